"""What a number is worth nothing without: versions, commit, GPU, clocks and command of a benchmark's run."""
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from .. import __version__
from .cuda_jit import nvrtc_version
from .machine import package_versions


def surroundings(device, program: str = "k3cuda", more_packages=()) -> dict:
    """JSON-ready.

    Args:
        device: `cuda_driver.Device`; None: nothing runs on one, and what only it could say is None.
        program: what the command line begins with.
        more_packages: distributions whose versions matter here beside our own.
    """
    versions = {name: version for name, version in package_versions().items() if version} | {name: metadata.version(name) for name in more_packages}
    return {"commit": _commit(),
            "versions": {"k3cuda": __version__} | versions | ({"nvrtc": nvrtc_version()} if device else {}), "gpu": device and device.name,
            "arch": device and device.arch,
            "driver": device and _of_gpu(device.index, "driver_version"),
            "clocks": device and _of_gpu(device.index, "clocks.sm,clocks.mem,clocks.max.sm"),
            "command": " ".join([program, *_without_output(sys.argv[1:])])}


def _without_output(words: list[str]) -> list[str]:
    """A command line but for where its result went."""
    after = [False, *(word == "--output" for word in words)]
    return [word for word, is_path in zip(words, after) if not (is_path or word.partition("=")[0] == "--output")]


def _of_gpu(index: int, values: str) -> str | None:
    """What nvidia-smi says of GPU `index` of those visible: of all of a machine's it says a line each."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return _said("nvidia-smi", f"--id={visible[index] if index < len(visible) else index}", f"--query-gpu={values}", "--format=csv,noheader")


def _commit() -> str | None:
    """Of the package that runs: with `-dirty` where its files differ from the commit's, with `-untracked` where git knows nothing of them.

    A copy without its history is told by K3CUDA_COMMIT.
    """
    if told := os.environ.get("K3CUDA_COMMIT"):
        return told
    git = ("git", "-C", str(Path(__file__).parents[1]))
    head = _said(*git, "rev-parse", "--short", "HEAD")
    if head is None:
        return None
    if not _said(*git, "ls-files", "__init__.py"):
        return head + "-untracked"
    return head + "-dirty" * bool(_said(*git, "status", "--porcelain", "."))


def _said(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
