"""Tests marked gpu are left out where there is no GPU."""
import pytest

from k3cuda.runtime.machine import probe_driver


def pytest_collection_modifyitems(config, items):
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not probe_driver().gpus:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in set(gpu)]
