"""Builds CUDA C++ for the CPU with g++ and the shim, and launches its kernels on NumPy arrays."""
import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np

from k3cuda.runtime.cuda_jit import KERNELS

# In front of a source: its random words are those of `throw`, by stream and index, and everything else is the kernels' own.
GIVEN_DICE = """#include "sample_types.cuh"
extern "C" u32 given_words[3][8];
u32 given_words[3][8];
static u32 given_word(u32, u32 stream, u32 index, u32, u32, u32) { return given_words[stream][index]; }
#define philox given_word
"""
HERE = Path(__file__).resolve().parent
COMPILER = shutil.which("g++")


def build(source: str, kernels, folder: Path, headers: dict[str, str] | None = None) -> ctypes.CDLL:
    """The library of one translation unit; `headers` are generated ones."""
    for name, text in (headers or {}).items():
        (folder / name).write_text(text)
    unit, out = folder / "unit.cpp", folder / "unit.so"
    unit.write_text(source + "".join(f"K3_SHIM_EXPORT({k})\n" for k in kernels))
    # Else what is static in a template is one for all libraries of the process, and shared memory of one kernel has the size of another's.
    done = subprocess.run([COMPILER, "-fno-gnu-unique", "-O1", "-std=c++17", "-shared", "-fPIC", "-pthread", "-ffp-contract=off", "-w", "-DK3_HOST_SHIM", "-include",
                           str(HERE / "k3_host_shim.h"), f"-I{folder}", f"-I{KERNELS}", str(unit), "-o", str(out)], capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(done.stderr[:4000])
    return ctypes.CDLL(str(out))


def throw(library, stream: int, numbers) -> None:
    """What a source behind GIVEN_DICE draws of a stream: `numbers` in [0, 1), of which 24 bits are read."""
    words = np.frombuffer((ctypes.c_uint32 * 24).in_dll(library, "given_words"), np.uint32).reshape(3, 8)
    words[stream, :len(numbers)] = (np.asarray(numbers) * 2**24).astype(np.uint32) << 8


def launch(library, name: str, grid: int | tuple[int, ...], threads: int, arguments, shared: int = 0, seed: int = 0) -> None:
    """`seed` other than 0 visits threads in a shuffled order, which exposes a missing barrier."""
    values = [ctypes.c_void_p(a.ctypes.data) if isinstance(a, np.ndarray) else a for a in arguments]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
    three, blocks = ctypes.c_uint * 3, grid if isinstance(grid, tuple) else (grid,)
    getattr(library, f"k3_shim_{name}")(three(*(*blocks, 1, 1)[:3]), three(threads, 1, 1), ctypes.c_size_t(shared), 0, ctypes.c_uint(seed), pointers)


def constants(library, name: str, count: int) -> tuple[int, ...]:
    return tuple((ctypes.c_int32 * count).in_dll(library, name))
