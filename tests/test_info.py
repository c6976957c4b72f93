"""`k3cuda info`: true on this machine, right about others, and never failing."""
import ctypes
import json
import re
from types import SimpleNamespace

import pytest
from command import ROOT, k3, k3_json

from k3cuda.runtime import machine
from k3cuda.runtime.machine import PACKAGES, Driver, Gpu

H200 = Gpu(0, "NVIDIA H200", "9.0", 150 << 30)
A100 = Gpu(0, "NVIDIA A100", "8.0", 80 << 30)


def installed(line=None, **changes):
    """Versions as if one CUDA line were complete."""
    versions = {name: "1" if extra == "base" or line and line in extra else None for name, (_, extra) in PACKAGES.items()}
    return versions | {"cuda-bindings": line and line[2:] + ".0"} | {name.replace("_", "-"): v for name, v in changes.items()}


def test_packages_are_those_of_setup():
    lists = dict(re.findall(r"^(\w+) = \[\n(.*?)^\]", (ROOT / "setup.py").read_text(encoding="utf-8"), re.M | re.S))
    named = {n for name, text in lists.items() if name != "TEST" for n in re.findall(r'^ +"([\w-]+)', text, re.M)}
    assert set(PACKAGES) == named


def test_json_is_true_here():
    found = k3_json("info", "--json")
    assert found["host"]["cores"] >= 1 and found["host"]["memory_bytes"] > 1 << 28
    assert found["packages"]["numpy"]["version"] and found["failed"] == []
    by_name = {b["name"]: b for b in found["decode_backends"]}
    assert set(by_name) == set(machine.DECODE_BACKENDS)
    assert by_name["reference"]["runs"] and all(b["runs"] != bool(b["reasons"]) for b in by_name.values())


def test_text_names_every_backend_and_package():
    text = k3("info", env={"K3CUDA_API_KEY": "secret", "K3CUDA_MODEL": "tiny-random"}).stdout.decode()
    assert all(name in text for name in (*machine.DECODE_BACKENDS, *PACKAGES))
    assert "K3CUDA_MODEL=tiny-random" in text and "secret" not in text


@pytest.mark.parametrize("driver, versions, words", [
    (Driver(problem="no NVIDIA driver"), installed(), ["no NVIDIA driver", "pip install 'k3cuda[cu13]'"]),
    (Driver("535.1", "12.2", (H200,)), installed(), ["pip install 'k3cuda[cu12]'"]),
    (Driver("535.1", "12.2", (H200,)), installed("cu13"), ["supports CUDA 12.2 and the packages are for 13", "580"]),
    (Driver("580.1", "13.0", (A100,)), installed("cu13"), ["compute capability 8.0", "9.0 or newer"]),
    (Driver("580.1", "13.0", (A100, H200)), installed("cu13"), []),
    (Driver("580.1", "13.0", (H200,)), installed("cu12"), []),   # an older line on a newer driver is fine
    (Driver("580.1", "13.0", (H200,)), installed("cu13") | {"cupy-cuda12x": "14"}, ["overwrite each other"]),
    (Driver("580.1", "13.0", (H200,)), installed("cu13") | {"nvidia-nccl-cu13": None}, ["pip install nvidia-nccl-cu13"]),
    (Driver("580.1", "13.0", (H200,)), installed("cu13") | {"cuda-bindings": "12.9"}, ["different CUDA lines"]),
])
def test_what_keeps_cuda_from_running(driver, versions, words, monkeypatch):
    monkeypatch.setattr(machine, "probe_nvrtc", lambda: ("13.0", None))
    problems = machine.cuda_problems(driver, versions)
    assert len(problems) == len([w for w in words if w != "580" and "or newer" not in w]), problems
    assert all(word in " ".join(problems) for word in words)


def test_nvrtc_wheel_without_its_library(monkeypatch):
    monkeypatch.setattr(machine, "probe_nvrtc", lambda: (None, "the NVRTC library isn't found"))
    problem, = machine.cuda_problems(Driver("580.1", "13.0", (H200,)), installed("cu12"))
    assert problem.endswith("pip install --force-reinstall nvidia-cuda-nvrtc-cu12")


def driver_library(init: int, gpus: int = 0):
    """A libcuda that answers as told."""
    def version(out):
        out._obj.value = 13000
        return 0

    def count(out):
        out._obj.value = gpus
        return 0

    def name(code, out):
        out._obj.value = b"CUDA_ERROR_SYSTEM_NOT_READY"
        return 0
    return SimpleNamespace(cuInit=lambda flags: init, cuDriverGetVersion=version, cuDeviceGetCount=count, cuGetErrorName=name)


def test_driver_that_does_not_start(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver_library(802))
    found = machine.probe_driver()
    assert found.cuda == "13.0" and found.gpus == ()
    assert found.problem.startswith("cuInit: CUDA_ERROR_SYSTEM_NOT_READY") and "nvidia-fabricmanager" in found.problem
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver_library(0))
    assert "CUDA_VISIBLE_DEVICES" in machine.probe_driver().problem


def test_driver_outside_the_container(monkeypatch):
    def absent(name):
        raise OSError(name)
    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert "no NVIDIA driver" in machine.probe_driver().problem
    monkeypatch.setattr(machine, "_kernel_module_version", lambda: "580.159.04")
    found = machine.probe_driver()
    assert found.version == "580.159.04" and "--gpus all" in found.problem


@pytest.mark.parametrize("line", [
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (builder@host)",
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Jan  7 20:00:00 UTC 2025"])
def test_version_of_the_kernel_module(line, monkeypatch):
    monkeypatch.setattr(machine.Path, "read_text", lambda self: line + "\nGCC version: gcc version 13.3.0\n")
    assert machine._kernel_module_version() == "580.159.04"


def test_a_probe_that_breaks_is_a_line_in_the_report(monkeypatch):
    def broken(*args):
        raise RuntimeError("oh")
    for name in ("probe_driver", "package_versions", "probe_nvrtc", "host", "variables", "decode_backends", "release_memory", "demo_model"):
        monkeypatch.setattr(machine, name, broken)
    found = machine.report()
    assert len(found["failed"]) == 8 and found["host"] is None
    json.dumps(found, allow_nan=False)
    from k3cuda.cli.info import _lines
    assert "could not be found out" in list(_lines(found))


def test_what_the_release_needs_of_these_gpus(monkeypatch):
    gpu = machine.Gpu(0, "one", "9.0", 150_000_000_000)
    monkeypatch.setattr(machine, "probe_driver", lambda: machine.Driver("1", "13.0", (gpu,)))
    found = machine.report()
    fits = {(row["tp"], row["dcp"]): row["max_model_len"]["bf16"] for row in found["release_memory"]}
    assert len(fits) == 15 and fits[8, 8] == 0 and fits[16, 16] > 15 * fits[16, 1] > 0
    from k3cuda.cli.info import _lines
    lines = list(_lines(found))
    assert any("tp 16  dcp 16  bf16" in line for line in lines) and sum("does not fit" in line for line in lines) == 10


@pytest.mark.gpu
def test_the_gpu_is_seen():
    driver = machine.probe_driver()
    assert driver.problem is None and driver.version and driver.gpus[0].memory_bytes > 1 << 30
