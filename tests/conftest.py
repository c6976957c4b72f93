"""Tests marked gpu are left out where there is no GPU; what depends on the packages of a CUDA line is marked; a small checkpoint for tests that damage one."""
import functools
import re
import shutil
from pathlib import Path

import pytest
from damage import small_checkpoint

from k3cuda.runtime.machine import probe_driver


# What a module says that asks for a package of a CUDA line, or for one of the lines.
ASKS_FOR_A_LINE = re.compile(r"""importorskip\("cu|REQUIRE_CUDA_LINE|\bcu1[23]\b""")


@functools.cache
def depends_on_line(path: Path) -> bool:
    return ASKS_FOR_A_LINE.search(path.read_text(encoding="utf-8")) is not None


@pytest.hookimpl(tryfirst=True)   # before -m chooses
def pytest_collection_modifyitems(config, items):
    for item in items:
        # Kernels under g++ ask for CuPy alone, for the layout of what a kernel is given.
        under_gxx = any(m.kwargs.get("reason") == "needs g++" for m in item.iter_markers("skipif"))
        if depends_on_line(item.path) and not under_gxx:
            item.add_marker("cuda_line")
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not probe_driver().gpus:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in set(gpu)]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A small made checkpoint, shared: tests write into a `folder` instead."""
    return small_checkpoint(tmp_path_factory.mktemp("small") / "model")


@pytest.fixture
def folder(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "model")
