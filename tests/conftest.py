"""Tests marked gpu are left out where there is no GPU, others run the same there; a small checkpoint for tests that damage one."""
import os
import shutil

import pytest
from damage import small_checkpoint

from k3cuda.runtime.auto_backend import VARIABLE
from k3cuda.runtime.machine import REFERENCE, probe_driver

os.environ[VARIABLE] = REFERENCE   # what a test doesn't name is the same on every machine


def pytest_collection_modifyitems(config, items):
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
