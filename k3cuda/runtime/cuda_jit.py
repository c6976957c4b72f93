"""CUDA C++ to CUBIN by NVRTC, and the cache of what it made. Needs no GPU and no driver; launching is cuda_driver.py.

A cubin lies in a folder named after the hash of everything it depends on, with its source, generated headers and log beside it.
Folders are looked for in K3CUDA_CUBIN_DIR (read-only) first, then in K3CUDA_CACHE_DIR.
"""
import contextlib
import functools
import hashlib
import logging
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from ..errors import CompileError, DeviceError
from .machine import CAPABILITIES, REFUSED_CAPABILITIES, architecture, probe_nvrtc

log = logging.getLogger("k3cuda")

ARCHS = tuple(map(architecture, CAPABILITIES))
REFUSED = {architecture(capability): why for capability, why in REFUSED_CAPABILITIES.items()}
KERNELS = Path(str(files("k3cuda") / "kernels_cu"))
# fmad=false: whether the compiler contracts a * b + c must not decide bytes; kernels write fmaf where they mean it.
OPTIONS = ("--std=c++17", "--fmad=false", "-default-device", "--no-source-include", "--ptxas-options=-v", "--ptxas-options=--warn-on-spills")
STRICT = ("--ptxas-options=-Werror",)   # spills become errors: for tests and packagers, not for users; the cubin is the same
_CUBIN, _SOURCE, _LOG, _SUMS = "kernel.cubin", "kernel.cu", "kernel.log", "kernel.sha256"   # _SUMS: of cubin and log, which tell a folder that is whole


@dataclass(frozen=True)
class Resources:
    """What ptxas says of one kernel; bytes a thread, but shared memory a block."""

    registers: int
    stack: int
    spills: int
    shared: int


@dataclass(frozen=True)
class Compiled:
    """One cubin. `folder` holds it with source and log; None where no cache could be written."""

    arch: str
    cubin: bytes
    log: str
    folder: Path | None
    from_cache: bool

    def resources(self) -> dict[str, Resources]:
        return parse_resources(self.log)


def compile_cuda(source: str, arch: str, *, headers: dict[str, str] | None = None, options=(), strict: bool = False,
                 name: str = "kernels", into: Path | None = None) -> Compiled:
    """Compiles one translation unit, or finds it in the cache.

    Args:
        source: CUDA C++; it includes files of kernels_cu and of `headers` by name.
        arch: one of ARCHS.
        headers: generated headers, file name -> text; they hide files of kernels_cu with the same name.
        options: more NVRTC options.
        strict: warnings of ptxas, spills above all, are errors.
        name: what the unit is called in messages.
        into: a folder that exists and takes the place of the cache's.
    Raises:
        CompileError: the code doesn't compile. DeviceError: no NVRTC, or one that doesn't know `arch`.
    """
    nvrtc, version = _nvrtc()
    headers = headers or {}
    options = (f"--gpu-architecture={arch}", *OPTIONS, *options)
    digest = cache_key(source, headers, options, version, arch)
    found = _find(digest, into)
    if found:
        compiled = Compiled(arch, *found, True)
        if strict and "ptxas warning" in compiled.log:
            raise _compile_error(name, arch, compiled.log, compiled.folder)
        return compiled
    if f"sm_{_number(arch)}" not in _supported(nvrtc):
        raise DeviceError(f"NVRTC {version} doesn't know {arch}", "install a newer nvidia-cuda-nvrtc")
    root, kept = (str(into), True) if into else _writable_root()
    folder = Path(tempfile.mkdtemp(prefix=f".{digest}-", dir=root))
    try:
        for file, text in {**headers, _SOURCE: source}.items():
            (folder / file).write_text(text)
        cubin, text, ok = _run(nvrtc, source, (*options, *(STRICT if strict else ()), f"-I{folder}", f"-I{KERNELS}", *_toolkit()))
        (folder / _LOG).write_bytes(text.encode())
        if not ok and "libnvrtc-builtins" in text:
            raise DeviceError("NVRTC's library of built-in functions isn't found", "install NVRTC again: pip install --force-reinstall its wheel")
        if not ok:
            failed = Path(root) / f"failed-{digest}"
            with contextlib.suppress(DeviceError):   # somebody's of the same name: it says the same
                _move(folder, failed)
            raise _compile_error(name, arch, text, failed)
        (folder / _CUBIN).write_bytes(cubin)
        (folder / _SUMS).write_text(_sums(cubin, text.encode()))
        return Compiled(arch, cubin, text, _move(folder, Path(root) / digest) if kept else None, False)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def nvrtc_version() -> str:
    """Version of the NVRTC in use; DeviceError where there is none."""
    return _nvrtc()[1]


def cache_key(source: str, headers: dict[str, str], options, nvrtc_version: str, arch: str) -> str:
    """Hash of all that decides a cubin: every file of kernels_cu, since which of them a unit includes is not known beforehand."""
    h = hashlib.sha256()
    for part in (nvrtc_version, arch, *options, *(f"{k}\0{v}" for k, v in sorted(headers.items())), kernel_texts(), source):
        data = part.encode()
        h.update(len(data).to_bytes(8, "little") + data)
    return h.hexdigest()[:24]


def kernel_texts() -> str:
    paths = sorted(p for p in KERNELS.rglob("*") if p.suffix in (".cu", ".cuh"))
    return "\0".join(f"{p.relative_to(KERNELS)}\0{p.read_text()}" for p in paths)


def parse_resources(text: str) -> dict[str, Resources]:
    """Kernel -> what `ptxas -v` printed about it."""
    out = {}
    for block in re.split(r"(?=Compiling entry function)", text)[1:]:
        name = re.search(r"Compiling entry function '?([\w$]+)", block).group(1)
        numbers = [int(m.group(1)) if (m := re.search(pattern, block)) else 0 for pattern in (
            r"Used (\d+) registers", r"(\d+) bytes stack frame", r"(\d+) bytes spill stores", r"(\d+) bytes smem")]
        out[name] = Resources(*numbers)
    return out


# ---- cache folders ----

def _find(digest: str, into: Path | None) -> tuple[bytes, str, Path] | None:
    """(cubin, log, folder)"""
    roots = [into] if into else [os.environ.get("K3CUDA_CUBIN_DIR"), cache_dir()]
    for folder in (Path(r) / digest for r in roots if r):
        if found := _whole(folder):
            return *found, folder
        if folder.exists():
            log.warning("%s is damaged: its kernels are compiled again", folder)
    return None


def _sums(cubin: bytes, text: bytes) -> str:
    return "".join(hashlib.sha256(part).hexdigest() + "\n" for part in (cubin, text))


def _whole(folder: Path) -> tuple[bytes, str] | None:
    """(cubin, log) of a folder in which nothing is missing or changed: a copy may have been broken off, or a disk full."""
    try:
        cubin, text, sums = (folder / _CUBIN).read_bytes(), (folder / _LOG).read_bytes(), (folder / _SUMS).read_bytes()
    except OSError:
        return None
    return (cubin, text.decode()) if sums == _sums(cubin, text).encode() else None


def cache_dir() -> Path | None:
    """K3CUDA_CACHE_DIR, else k3cuda under XDG_CACHE_HOME or ~/.cache; None where there is no home."""
    if os.environ.get("K3CUDA_CACHE_DIR"):
        return Path(os.environ["K3CUDA_CACHE_DIR"])
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "k3cuda"
    with contextlib.suppress(RuntimeError):   # no HOME and no entry in the user database
        return Path.home() / ".cache" / "k3cuda"
    return None


@functools.cache
def _warn_unwritable(root: str, why: str) -> None:
    log.warning("kernel cache %s can't be written (%s): kernels are compiled again at every start; set K3CUDA_CACHE_DIR", root, why)


def _writable_root() -> tuple[str, bool]:
    """(folder to build in, whether results stay there)."""
    root, why = cache_dir(), "no home folder"
    if root is not None:
        try:
            root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=root):
                return str(root), True
        except OSError as e:
            why = e.strerror or str(e)
    _warn_unwritable(str(root), why)
    return tempfile.gettempdir(), False


def _move(folder: Path, to: Path) -> Path:
    """One rename, so that a reader sees a whole folder or none. Whoever came first has written the same bytes; what is damaged makes room.

    Raises DeviceError where something else is in the way.
    """
    folder.chmod(0o755)
    try:
        if to.is_dir() and not _whole(to):
            shutil.rmtree(to)
        folder.rename(to)
    except OSError as e:
        if not _whole(to):
            raise DeviceError(f"{to} cannot be written: {e.strerror}", "remove what is there, or give another folder") from e
    return to


# ---- NVRTC ----

@functools.cache
def _nvrtc():
    """(the bindings, version such as "13.0"); the library itself loads at the first call, not at import."""
    version, problem = probe_nvrtc()
    if problem:
        raise DeviceError(problem, "pip install 'k3cuda[cu13]', or 'k3cuda[cu12]' for a driver older than the 580 series")
    from cuda.bindings import nvrtc

    return nvrtc, version


def _number(arch: str) -> str:
    if arch not in ARCHS:
        why = f": {REFUSED[arch]}" if arch in REFUSED else ""
        raise DeviceError(f"architecture {arch!r} isn't supported{why}", f"the kernels run on {', '.join(ARCHS)}; elsewhere use --decode-backend reference")
    return re.sub(r"\D", "", arch)


@functools.cache
def _supported(nvrtc) -> frozenset[str]:
    return frozenset(f"sm_{n}" for n in nvrtc.nvrtcGetSupportedArchs()[1])


@functools.cache
def _toolkit() -> tuple[str, ...]:
    """Headers of the number formats, where they are installed; no kernel needs others."""
    from cuda import pathfinder
    folder = pathfinder.find_nvidia_header_directory("cudart")
    return (f"-I{folder}",) if folder else ()


def _run(nvrtc, source: str, options) -> tuple[bytes, str, bool]:
    def ok(result):
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise DeviceError(f"NVRTC: {nvrtc.nvrtcGetErrorString(result[0])[1].decode()}")
        return result[1] if len(result) > 1 else None

    program = ok(nvrtc.nvrtcCreateProgram(source.encode(), _SOURCE.encode(), 0, [], []))
    try:
        (code,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        # NVRTC writes into these: never bytes, of which Python has one object for each single byte, whatever it is used for. A log can be one byte long.
        text = bytearray(ok(nvrtc.nvrtcGetProgramLogSize(program)))
        ok(nvrtc.nvrtcGetProgramLog(program, text))
        text = text.rstrip(b"\0").decode(errors="replace")
        if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            return b"", text or code.name, False
        cubin = bytearray(ok(nvrtc.nvrtcGetCUBINSize(program)))
        ok(nvrtc.nvrtcGetCUBIN(program, cubin))
        return bytes(cubin), text, True
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _compile_error(name: str, arch: str, text: str, folder: Path) -> CompileError:
    errors = re.findall(r"^(.*?error.*)$", text, re.M | re.I) or re.findall(r"^ *(ptxas warning.*)$", text, re.M)
    count = re.search(r"(\d+) errors? detected", text)
    number = int(count.group(1)) if count else max(len(errors), 1)
    first = re.sub(r"^\S*/(?=\w+\.cuh?\b)", "", errors[0].strip()) if errors else (text.strip().splitlines() or ["no message"])[0]
    return CompileError(f"{name} for {arch}: {number} error{'s' * (number != 1)}, first: {first}", f"source and log in {folder}", text)
