"""Run-time compilation without a GPU: every architecture, no spill, the right opcodes, the cache, and what an error says."""
import os
import re
import shutil
import subprocess
import tempfile

import core_units as u
import pytest

pytest.importorskip("cuda.bindings", reason="the CUDA packages aren't installed")
from k3cuda.errors import CompileError, DeviceError
from k3cuda.runtime import cuda_driver, cuda_jit
from k3cuda.runtime.cuda_jit import compile_cuda

pathfinder = pytest.importorskip("cuda.pathfinder", reason="the CUDA packages aren't installed")
NVDISASM = pathfinder.find_nvidia_binary_utility("nvdisasm")
ARCHS = ("sm_90a", "sm_100a", "sm_103a")
SMALL = 'extern "C" __global__ void k(int* p) { p[threadIdx.x] = kValue; }\n'


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("K3CUDA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("K3CUDA_CUBIN_DIR", raising=False)
    return tmp_path / "cache"


def small(value="7", arch="sm_90a"):
    return compile_cuda('#include "value.cuh"\n' + SMALL, arch, headers={"value.cuh": f"constexpr int kValue = {value};\n"}, name="small")


def opcodes(cubin: bytes) -> dict[str, set[str]]:
    """Kernel -> opcodes with their modifiers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        text = subprocess.run([NVDISASM, "-c", f.name], check=True, capture_output=True, text=True).stdout
    parts = re.split(r"\.section\s+\.text\.(\w+),", text)[1:]
    return {name: set(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", code)) for name, code in zip(parts[::2], parts[1::2])}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("nt", [1, 2, 4, 8])
def test_row_core_has_no_spills_and_uses_the_machine(arch, nt):
    source = "".join(u.row_source(name, nt).split("\n", 2)[2] for name in u.PRODUCTS)   # one unit, one header
    compiled = compile_cuda('#define K3_BENCH_SMS 4\n#include "bench_core.cuh"\n' + source, arch, strict=True)
    assert all(r.spills == r.stack == 0 for r in compiled.resources().values())
    if NVDISASM is None:
        pytest.skip("nvdisasm isn't installed: pip install 'k3cuda[test]'")
    found = opcodes(compiled.cubin)
    for name in u.PRODUCTS:
        ops = found[f"{name}_{nt}"]
        assert any(o.startswith("HMMA.16816.F32.BF16") for o in ops), name
        assert any(o.startswith("UBLKCP") for o in ops) or any(o.startswith("LDG") and "128" in o for o in ops), name
        assert not any(o.split(".")[0] in ("LDL", "STL") for o in ops), name


@pytest.mark.parametrize("arch", ARCHS)
def test_expert_core_has_no_spills_and_uses_the_machine(arch):
    compiled = compile_cuda(u.expert_source(), arch, strict=True)
    assert all(r.spills == r.stack == 0 for r in compiled.resources().values())
    if NVDISASM is None:
        pytest.skip("nvdisasm isn't installed: pip install 'k3cuda[test]'")
    found = opcodes(compiled.cubin)
    for name in ("small_up", "small_down"):
        ops = {o.split(".")[0] for o in found[name]}
        assert {"HMMA", "UBLKCP", "LOP3"} <= ops and not {"LDL", "STL"} & ops


def test_cache_hits_on_equal_text_only(cache):
    first, again, other = small(), small(), small("8")
    assert (first.from_cache, again.from_cache, other.from_cache) == (False, True, False)
    assert first.cubin == again.cubin != other.cubin and first.folder == again.folder
    assert {p.name for p in first.folder.iterdir()} == {"kernel.cu", "kernel.cubin", "kernel.log", "kernel.sha256", "value.cuh"}
    assert not [p for p in cache.iterdir() if p.name.startswith(".")]   # no half-built folder


DAMAGES = {"cut short": ("kernel.cubin", lambda f: f.write_bytes(f.read_bytes()[:1000])), "empty": ("kernel.cubin", lambda f: f.write_bytes(b"")),
           "cubin gone": ("kernel.cubin", os.unlink), "log gone": ("kernel.log", os.unlink), "another log": ("kernel.log", lambda f: f.write_text("fine")),
           "sums gone": ("kernel.sha256", os.unlink), "all gone": (".", lambda f: [part.unlink() for part in f.iterdir()])}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("where", ["K3CUDA_CACHE_DIR", "K3CUDA_CUBIN_DIR", "into"])
def test_what_is_damaged_is_compiled_again(tmp_path, monkeypatch, caplog, damage, where):
    """Wherever it lies: said, and made again; in a folder that is only read, beside it."""
    monkeypatch.setattr(cuda_jit, "_run", lambda *args: (b"cubin" * 999, "log", True))
    monkeypatch.setenv("K3CUDA_CACHE_DIR", str(tmp_path / "cache"))
    (given := tmp_path / "given").mkdir()
    into = None if where == "K3CUDA_CACHE_DIR" else given
    first = cuda_jit.compile_cuda("text", "sm_90a", into=into)
    monkeypatch.setenv("K3CUDA_CUBIN_DIR", str(given) if where == "K3CUDA_CUBIN_DIR" else "")
    options = {"into": given} if where == "into" else {}
    assert cuda_jit.compile_cuda("text", "sm_90a", **options).from_cache and not caplog.records
    name, act = DAMAGES[damage]
    act(first.folder / name)
    again = cuda_jit.compile_cuda("text", "sm_90a", **options)
    assert not again.from_cache and again.cubin == first.cubin and str(first.folder) in caplog.text and "damaged" in caplog.text
    assert cuda_jit.compile_cuda("text", "sm_90a", **options).folder == again.folder and (again.folder == first.folder) == (where != "K3CUDA_CUBIN_DIR")


def test_what_is_in_the_way_of_a_cubin_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_jit, "_run", lambda *args: (b"cubin", "log", True))
    made = cuda_jit.compile_cuda("text", "sm_90a", into=tmp_path).folder
    shutil.rmtree(made)
    made.write_text("a file")
    with pytest.raises(DeviceError, match=f"{made.name} cannot be written"):
        cuda_jit.compile_cuda("text", "sm_90a", into=tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == [made.name] and made.read_text() == "a file"


def test_key_covers_everything(monkeypatch):
    def key(source="s", headers={"h": "t"}, options=("-o",), version="13.0", arch="sm_90a"):   # noqa: B006
        return cuda_jit.cache_key(source, headers, options, version, arch)

    keys = {key(), key(source="x"), key(headers={"h": "u"}), key(headers={"g": "t"}), key(options=()), key(version="13.1"), key(arch="sm_100a")}
    monkeypatch.setattr(cuda_jit, "kernel_texts", lambda: "another header")
    assert len(keys | {key()}) == 8


def test_no_home(monkeypatch):
    for name in ("K3CUDA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cuda_jit.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert cuda_jit.cache_dir() is None


def test_compile_error_shows_count_first_error_log_and_source(cache):
    with pytest.raises(CompileError, match=r"small for sm_90a: 2 errors, first: value.cuh\(1\): error: .*kMissing") as e:
        small("kMissing + kOther")
    folder = next(p for p in cache.iterdir() if p.name.startswith("failed-"))
    assert e.value.code == 5 and str(folder) in str(e.value) and "kOther" in e.value.log
    assert "kOther" in (folder / "kernel.log").read_text() and (folder / "kernel.cu").is_file()


def spilling() -> str:
    """A kernel that needs 64 registers and has 32."""
    body = "".join(f"float a{i} = p[{i}];\n" for i in range(64)) + "__syncthreads();\n" + "".join(f"p[{i}] = a{63 - i} * a{i};\n" for i in range(64))
    return f'extern "C" __global__ void __launch_bounds__(1024, 2) k(volatile float* p) {{ {body} }}'


def test_spill_is_an_error_when_strict(cache):
    source = spilling()
    with pytest.raises(CompileError, match="spilled"):
        compile_cuda(source, "sm_90a", strict=True)
    assert compile_cuda(source, "sm_90a").resources()["k"].spills > 0
    with pytest.raises(CompileError, match="1 error, first: ptxas warning.*spilled"):   # found in the cache, and no better for it
        compile_cuda(source, "sm_90a", strict=True)


def test_what_strict_compiled_is_found_by_others(cache):
    source = SMALL.replace("kValue", "3")
    made = compile_cuda(source, "sm_90a", strict=True)
    assert compile_cuda(source, "sm_90a").folder == made.folder


def test_launch_is_built_once():
    """No GPU: the configuration and its attributes."""
    import ctypes
    launch = cuda_driver.Launch(0, 264, 256, [ctypes.c_int(1), ctypes.c_void_p(2)], shared=1024, dependent=True, cluster=4)
    c = launch.config
    assert (c.gridDimX, c.gridDimY, c.blockDimX, c.sharedMemBytes, c.numAttrs) == (264, 1, 256, 1024, 2)
    assert {a.id.name for a in c.attrs} == {"CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION", "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION"}


def test_no_model_number_is_typed_in_a_kernel():
    """Sizes come from generated headers. Powers of two are left out: they are also sizes of the machine."""
    from k3cuda.config import RELEASED_FOLDER, K3Config
    dims = K3Config.from_json(RELEASED_FOLDER).dims()
    numbers = {v // tp for v in dims.values() for tp in (1, 8, 16) if v % tp == 0 and v // tp > 128}
    numbers = {n for n in numbers if n & (n - 1)}
    found = [(p.name, int(n)) for p in cuda_jit.KERNELS.rglob("*.cuh") for line in p.read_text().splitlines()
             for n in re.findall(r"(?<![\w.])\d+(?![\w.])", line.split("//")[0]) if int(n) in numbers]
    assert not found


def test_nothing_is_written_into_bytes_that_python_shares():
    """An empty log has one byte, its end; Python has one object for b" ", and a process in which it had become b"\\0" found no token for a blank."""
    nvrtc, _ = cuda_jit._nvrtc()
    cubin, log, compiled = cuda_jit._run(nvrtc, SMALL.replace("kValue", "7"), ["--gpu-architecture=sm_90a"])
    assert compiled and log == "" and cubin.startswith(b"\x7fELF")
    assert [bytes([n])[0] for n in range(256)] == list(range(256))
