"""Machines and packages that cannot run or compile kernels: each is told what was found, what was wanted, and the way out."""
import logging

import pytest

pytest.importorskip("cuda.bindings", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")

from models import headdims  # noqa: E402

from k3cuda import LLM  # noqa: E402
from k3cuda.emit_sizes import GPU_SMS  # noqa: E402
from k3cuda.errors import DeviceError, UsageError  # noqa: E402
from k3cuda.plan import build_plan  # noqa: E402
from k3cuda.runtime import cuda_driver, cuda_jit, machine  # noqa: E402
from k3cuda.runtime.cuda_jit import compile_cuda  # noqa: E402
from k3cuda.runtime.cuda_kernels import compile_bucket  # noqa: E402
from k3cuda.runtime.machine import Driver, Gpu  # noqa: E402
from test_jit import small  # noqa: E402

SOURCE = 'extern "C" __global__ void k(int* p) { *p = 1; }\n'


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("K3CUDA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("K3CUDA_CUBIN_DIR", raising=False)
    return tmp_path / "cache"


def opened(monkeypatch, driver: Driver, line: int = 13) -> str:
    """What opening the first GPU of such a machine says."""
    monkeypatch.setattr(cuda_driver, "probe_driver", lambda: driver)
    monkeypatch.setattr(cuda_driver, "_bindings_line", lambda: line)
    with pytest.raises(DeviceError) as e:
        cuda_driver.open_device()
    assert e.value.code == 5
    return str(e.value)


@pytest.mark.parametrize("capability, cuda, line, words", [
    ("8.0", "13.0", 13, ["A has compute capability 8.0; the kernels need 9.0 or newer", "use --decode-backend reference"]),
    ("12.0", "13.0", 13, ["compute capability 12.0", "are built for 9.0, 10.0, 10.3", "99 KB of shared memory", "227"]),
    ("11.0", "13.0", 13, ["compute capability 11.0", "are built for 9.0, 10.0, 10.3"]),
    ("9.0", "12.9", 13, ["the driver supports CUDA 12.9 and the packages are for 13", "580", "k3cuda[cu12]"]),
    ("9.0", "11.8", 12, ["the driver supports CUDA 11.8 and the packages are for 12", "525"]),
])
def test_gpu_or_driver_that_cannot_run_kernels(monkeypatch, capability, cuda, line, words):
    found = opened(monkeypatch, Driver("1", cuda, (Gpu(0, "A", capability, 1),)), line)
    assert all(word in found for word in words), found


def test_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(cuda_driver, "probe_driver", lambda: Driver("1", "13.0", (Gpu(0, "A", "9.0", 1),)))
    with pytest.raises(DeviceError, match="GPU 3 doesn't exist: 1 visible, counted from 0; see CUDA_VISIBLE_DEVICES"):
        cuda_driver.open_device(3)


def test_no_driver(monkeypatch):
    assert "no NVIDIA driver" in opened(monkeypatch, Driver(problem="no NVIDIA driver (libcuda.so.1)"))


@pytest.mark.parametrize("backend", machine.ON_GPU)
def test_backend_asked_for_without_a_driver(monkeypatch, backend):
    monkeypatch.setattr(cuda_driver, "probe_driver", lambda: Driver(problem="no NVIDIA driver (libcuda.so.1)"))
    with pytest.raises(DeviceError, match="no NVIDIA driver"):
        LLM("tiny-random", decode_backend=backend)


def test_driver_in_the_newer_line_is_fine_for_the_older_packages():
    assert machine.old_driver(Driver("1", "13.2"), 12) is None and machine.old_driver(Driver("1", "12.4"), 12) is None


@pytest.mark.parametrize("problem", ["cuda-bindings isn't installed", "the NVRTC library isn't found"])
def test_no_nvrtc(monkeypatch, cache, problem):
    cuda_jit._nvrtc.cache_clear()
    monkeypatch.setattr(cuda_jit, "probe_nvrtc", lambda: (None, problem))
    try:
        with pytest.raises(DeviceError, match="pip install 'k3cuda.cu13.'") as e:
            compile_cuda(SOURCE, "sm_90a")
        assert e.value.message == problem and not cache.exists()
    finally:
        cuda_jit._nvrtc.cache_clear()


def test_nvrtc_without_its_built_in_functions(monkeypatch, cache):
    text = "nvrtc: error: failed to open libnvrtc-builtins.so.13.0.\n  Make sure that libnvrtc-builtins.so.13.0 is installed correctly."
    monkeypatch.setattr(cuda_jit, "_run", lambda *args: (b"", text, False))
    with pytest.raises(DeviceError, match="built-in functions isn't found; install NVRTC again"):
        compile_cuda(SOURCE, "sm_90a")
    assert not list(cache.iterdir())


def test_nvrtc_older_than_the_architecture(monkeypatch, cache):
    monkeypatch.setattr(cuda_jit, "_supported", lambda nvrtc: frozenset({"sm_90", "sm_100"}))
    with pytest.raises(DeviceError, match="doesn't know sm_103a; install a newer nvidia-cuda-nvrtc"):
        compile_cuda(SOURCE, "sm_103a")


def test_kernels_need_no_header_of_a_toolkit(monkeypatch, cache):
    monkeypatch.setattr(cuda_jit, "_toolkit", lambda: ())
    assert compile_bucket(build_plan(headdims().cfg, 1), 1, "bf16", "sm_90a").cubin


@pytest.mark.parametrize("arch, words", [("sm_80", "'sm_80' isn't supported; the kernels run on sm_90a, sm_100a, sm_103a"),
                                         ("sm_120a", "'sm_120a' isn't supported: a block has 99 KB of shared memory")])
def test_architecture_without_kernels(cache, arch, words):
    with pytest.raises(DeviceError, match=words):
        compile_cuda(SOURCE, arch)


def test_every_architecture_has_known_gpus():
    assert tuple(GPU_SMS) == cuda_jit.ARCHS and all(GPU_SMS.values())


def test_read_only_cubins_and_a_cache_that_cannot_be_written(tmp_path, monkeypatch, cache, caplog):
    """What was compiled beforehand is found without a word; what was not is compiled, with one warning for the cache."""
    shipped, blocked = tmp_path / "shipped", tmp_path / "file"
    shipped.mkdir()
    blocked.write_text("not a folder")
    headers = {"value.cuh": "constexpr int kValue = 7;\n"}
    compile_cuda('#include "value.cuh"\nextern "C" __global__ void k(int* p) { p[threadIdx.x] = kValue; }\n', "sm_90a", headers=headers, into=shipped)
    for path in (*shipped.rglob("*"), shipped):
        path.chmod(0o555 if path.is_dir() else 0o444)
    monkeypatch.setenv("K3CUDA_CUBIN_DIR", str(shipped))
    monkeypatch.setenv("K3CUDA_CACHE_DIR", str(blocked))
    cuda_jit._warn_unwritable.cache_clear()
    with caplog.at_level(logging.WARNING, "k3cuda"):
        assert small().folder.parent == shipped and not caplog.records
        assert small("8").folder is None and small("9").cubin
    assert [r.levelname for r in caplog.records] == ["WARNING"] and str(blocked) in caplog.text


# ---- scales of an FP8 cache ----

def test_missing_cache_scale_is_said(caplog):
    with caplog.at_level(logging.INFO, "k3cuda"):
        LLM("tiny-random", kv_cache_dtype="fp8_e4m3").close()
    assert "no scale for an fp8_e4m3 cache: 1 is used" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "k3cuda"):
        LLM("tiny-random", kv_cache_dtype="bf16").close()
    assert "scale" not in caplog.text


def test_unknown_cache_format():
    with pytest.raises(UsageError, match="kv_cache_dtype: found 'fp8_e5m2', wanted auto, f32, bf16, fp8_e4m3"):
        LLM("tiny-random", kv_cache_dtype="fp8_e5m2")
