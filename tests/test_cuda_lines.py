"""Each CUDA line compiles kernels on a machine without a GPU: bindings, NVRTC, headers and the disassembler fit together.

CI installs one line at a time and names it in REQUIRE_CUDA_LINE; nothing may then be skipped.
"""
import importlib
import os
import re
import shutil
import subprocess
from importlib import metadata

import pytest

REQUIRED = os.environ.get("REQUIRE_CUDA_LINE")
# A header of the runtime package, and a bfloat16 multiply-add that must become one instruction.
SOURCE = b"""#include <cuda_bf16.h>
extern "C" __global__ void fma2(__nv_bfloat162* x, const __nv_bfloat162* y) { x[threadIdx.x] = __hfma2(x[threadIdx.x], y[0], y[1]); }
"""


def line_of(distribution: str) -> str | None:
    try:
        return "cu" + metadata.version(distribution).split(".")[0]
    except metadata.PackageNotFoundError:
        return None


LINE = line_of("cuda-bindings")
pytestmark = pytest.mark.skipif(LINE is None and REQUIRED is None, reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")


def test_line_is_the_required_one():
    assert REQUIRED in (None, LINE)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_103a"])
def test_compiles_without_a_gpu(arch, tmp_path):
    nvrtc, pathfinder = importlib.import_module("cuda.bindings.nvrtc"), importlib.import_module("cuda.pathfinder")

    def ok(result):
        code, *rest = result
        assert int(code) == 0, nvrtc.nvrtcGetErrorString(code)[1].decode()
        return rest[0] if rest else None

    headers = pathfinder.find_nvidia_header_directory("cudart")
    program = ok(nvrtc.nvrtcCreateProgram(SOURCE, b"fma2.cu", 0, [], []))
    flags = [f"--gpu-architecture={arch}".encode(), f"-I{headers}".encode(), b"--no-source-include"]
    code, = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    text = bytearray(ok(nvrtc.nvrtcGetProgramLogSize(program)))
    ok(nvrtc.nvrtcGetProgramLog(program, text))
    assert int(code) == 0, text.decode()
    cubin = bytearray(ok(nvrtc.nvrtcGetCUBINSize(program)))
    ok(nvrtc.nvrtcGetCUBIN(program, cubin))
    (tmp_path / "fma2.cubin").write_bytes(cubin)
    tool = pathfinder.find_nvidia_binary_utility("nvdisasm") or shutil.which("nvdisasm")
    assert tool, "nvdisasm is missing; it comes with k3cuda[test]"
    sass = subprocess.run([tool, "-c", tmp_path / "fma2.cubin"], capture_output=True, text=True, check=True).stdout
    assert re.search(r"HFMA2\S*BF16", sass), sass
    # CUDA 13 writes the architecture as a target, CUDA 12 as a header flag without the letter.
    assert re.search(rf"\.target\s+{arch}\b|EF_CUDA_{arch.upper().replace('_', '')[:-1]}\b", sass), sass


@pytest.mark.skipif(REQUIRED is None and line_of("cupy-cuda13x") is None and line_of("cupy-cuda12x") is None, reason="no CuPy installed")
def test_cupy_and_nccl_are_of_the_line():
    cupy, pathfinder = importlib.import_module("cupy"), importlib.import_module("cuda.pathfinder")
    assert cupy.cuda.runtime.runtimeGetVersion() // 1000 == int(LINE[2:])
    assert metadata.version(f"nvidia-nccl-{LINE}")
    assert os.path.exists(pathfinder.load_nvidia_dynamic_lib("nccl").abs_path)
