"""What this machine has: host, NVIDIA driver, GPUs, packages, and what each decode backend still lacks. Nothing here raises."""
import ctypes
import importlib
import os
import platform
import re
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from .. import __version__

# Distribution -> (what it is needed for, the extra that brings it).
PACKAGES = {
    "numpy": ("arrays", "base"), "click": ("the command", "base"), "safetensors": ("checkpoints", "base"),
    "ml_dtypes": ("bfloat16 and float8", "base"), "tiktoken": ("the tokenizer", "base"), "threadpoolctl": ("BLAS threads", "base"),
    "cuda-bindings": ("driver and NVRTC calls", "cu13 or cu12"), "cuda-pathfinder": ("finding CUDA libraries", "cu13 or cu12"),
    "cupy-cuda13x": ("device memory", "cu13"), "nvidia-cuda-nvrtc": ("compiling kernels", "cu13"),
    "nvidia-cuda-runtime": ("headers for kernels", "cu13"), "nvidia-nccl-cu13": ("several GPUs", "cu13"),
    "cupy-cuda12x": ("device memory", "cu12"), "nvidia-cuda-nvrtc-cu12": ("compiling kernels", "cu12"),
    "nvidia-cuda-runtime-cu12": ("headers for kernels", "cu12"), "nvidia-nccl-cu12": ("several GPUs", "cu12"),
    "starlette": ("k3cuda serve", "serve"), "uvicorn": ("k3cuda serve", "serve"),
}
LINES = ("cu13", "cu12")
REFERENCE, STANDARD, LATENCY_SPECIALIZED = DECODE_BACKENDS = ("reference", "standard", "latency_specialized")
RANKS = AUTO_RANKS, VIRTUAL, PROCESSES = "auto", "virtual", "processes"   # how they are joined (rank_job.py)
COLLECTIVES = NCCL, PEER = "nccl", "peer"   # what carries them between processes that have a GPU each (cuda_rank.py)
ON_GPU, AUTO = (STANDARD, LATENCY_SPECIALIZED), "auto"
# What `auto` (auto_backend.py) does not choose where it could, and why.
NOT_AUTO = {LATENCY_SPECIALIZED: "slower than standard: a whole rank's step (TP16, one H200) of 1 row takes 5.94 ms against 4.16, of 8 rows 10.98 against 7.00"}
# Compute capabilities that the kernels are built for: they use the copy engine and the barriers that came with 9.0.
CAPABILITIES = ("9.0", "10.0", "10.3")
REFUSED_CAPABILITIES = {"12.0": "a block has 99 KB of shared memory there, and the kernels are laid out for 227"}   # newer, and why not ours
# What cuInit says where a reader needs more than its name.
_INIT_HINTS = {
    100: "no GPU is visible; see CUDA_VISIBLE_DEVICES, and --gpus for containers",
    802: "the fabric manager of this NVSwitch machine isn't running: start nvidia-fabricmanager",
    803: "driver library and kernel module differ in version: reload the module or restart the machine",
    804: "a CUDA compatibility library shadows the driver's libcuda.so.1: take it out of LD_LIBRARY_PATH",
}


@dataclass(frozen=True)
class Gpu:
    """One visible GPU. memory_bytes: all of it, in bytes."""

    index: int
    name: str
    compute_capability: str
    memory_bytes: int


@dataclass(frozen=True)
class Driver:
    """cuda: newest CUDA version the driver supports, like "13.0". problem: why no GPU can be used, or None."""

    version: str | None = None
    cuda: str | None = None
    gpus: tuple[Gpu, ...] = ()
    problem: str | None = None


def probe_driver() -> Driver:
    """Asks the driver itself, through cuInit: CuPy would report a missing driver as one that is too old."""
    version = _kernel_module_version()
    try:
        lib = ctypes.CDLL("libcuda.so.1")
    except OSError:
        if version or os.path.exists("/dev/nvidiactl"):
            problem = ("the kernel has an NVIDIA driver but libcuda.so.1 isn't visible here: start the container with --gpus all "
                       "and NVIDIA_DRIVER_CAPABILITIES=compute,utility")
        else:
            problem = "no NVIDIA driver (libcuda.so.1): this machine can compile kernels but not run them"
        return Driver(version, problem=problem)
    code = lib.cuInit(0)
    number = ctypes.c_int()
    lib.cuDriverGetVersion(ctypes.byref(number))
    cuda = f"{number.value // 1000}.{number.value % 1000 // 10}"
    if code:
        hint = _INIT_HINTS.get(code, "")
        return Driver(version, cuda, problem=f"cuInit: {_error_name(lib, code)}" + (f": {hint}" if hint else ""))
    gpus = _gpus(lib)
    return Driver(version, cuda, gpus, None if gpus else "the driver shows no GPU; see CUDA_VISIBLE_DEVICES")


def _kernel_module_version() -> str | None:
    try:
        found = re.search(r"Kernel Module.*?\b(\d{3,}(?:\.\d+)+)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return None
    return found and found.group(1)


def _error_name(lib, code: int) -> str:
    name = ctypes.c_char_p()
    lib.cuGetErrorName(code, ctypes.byref(name))
    return name.value.decode() if name.value else f"error {code}"


def _gpus(lib) -> tuple[Gpu, ...]:
    count, gpus = ctypes.c_int(), []
    lib.cuDeviceGetCount(ctypes.byref(count))
    for index in range(count.value):
        device, total, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
        major, minor = ctypes.c_int(), ctypes.c_int()
        lib.cuDeviceGet(ctypes.byref(device), index)
        lib.cuDeviceGetName(name, len(name), device)
        lib.cuDeviceTotalMem_v2(ctypes.byref(total), device)
        lib.cuDeviceGetAttribute(ctypes.byref(major), 75, device)   # compute capability, major
        lib.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)   # and minor
        gpus.append(Gpu(index, name.value.decode(errors="replace"), f"{major.value}.{minor.value}", total.value))
    return tuple(gpus)


def package_versions() -> dict[str, str | None]:
    """Version of each distribution in PACKAGES, None where it isn't installed. Imports nothing."""
    versions = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return versions


def probe_nvrtc() -> tuple[str | None, str | None]:
    """(version, problem) of NVRTC, loaded for real: it may also come from a toolkit, and a wheel may lack its library."""
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        code, major, minor = nvrtc.nvrtcVersion()
    except ImportError:
        return None, "cuda-bindings isn't installed"
    except RuntimeError:   # cuda.pathfinder's DynamicLibNotFoundError is one
        return None, "the NVRTC library isn't found"
    return (f"{major}.{minor}", None) if int(code) == 0 else (None, f"NVRTC answers {code!s}")


def cuda_problems(driver: Driver, versions: dict[str, str | None]) -> list[str]:
    """Everything that keeps CUDA kernels from running here, each with its way out. Empty: nothing does."""
    return [p for p in (driver.problem, _gpu_problem(driver)) if p] + _package_problems(driver, versions)


def _package_problems(driver: Driver, versions: dict[str, str | None]) -> list[str]:
    lines = [line for line in LINES if versions[_cupy(line)]]
    if len(lines) > 1:
        return [f"{' and '.join(map(_cupy, lines))} are both installed and overwrite each other: pip uninstall both, then install one extra"]
    if not lines:
        return [f"the CUDA packages aren't installed: pip install 'k3cuda[{best_line(driver)}]'"]
    line, problems = lines[0], []
    missing = [name for name, (_, extra) in PACKAGES.items() if line in extra and not versions[name]]
    bindings = versions["cuda-bindings"]
    if missing:
        problems.append(f"missing: pip install {' '.join(missing)}")
    elif problem := probe_nvrtc()[1]:
        problems.append(f"{problem}: pip install --force-reinstall {next(n for n, (_, e) in PACKAGES.items() if e == line and 'nvrtc' in n)}")
    if bindings and not bindings.startswith(line[2:]):
        problems.append(f"cuda-bindings {bindings} and {_cupy(line)} are of different CUDA lines: pip install 'k3cuda[{line}]'")
    if problem := old_driver(driver, int(line[2:])):
        problems.append(": ".join(problem))
    return problems


def old_driver(driver: Driver, line: int) -> tuple[str, str] | None:
    """What is wrong and the way out where the driver is older than packages of CUDA `line`; None where it isn't."""
    if not driver.cuda or _number(driver.cuda) >= (line, 0):
        return None
    out = {12: "install a driver of the 525 series or newer",
           13: "install a driver of the 580 series or newer, or 'k3cuda[cu12]' in an environment of its own"}
    return f"the driver supports CUDA {driver.cuda} and the packages are for {line}", out[line]


def _gpu_problem(driver: Driver) -> str | None:
    problems = [gpu_problem(gpu) for gpu in driver.gpus]
    return problems[0] if problems and all(problems) else None


def gpu_problem(gpu: Gpu) -> str | None:
    """Why the kernels cannot run on this GPU, or None."""
    found = gpu.compute_capability
    if found in CAPABILITIES:
        return None
    wanted = f"need {CAPABILITIES[0]} or newer" if _number(found) < _number(CAPABILITIES[0]) else f"are built for {', '.join(CAPABILITIES)}"
    return f"{gpu.name} has compute capability {found}; the kernels {wanted}" + (f": {why}" if (why := REFUSED_CAPABILITIES.get(found)) else "")


def architecture(capability: str) -> str:
    """What compilers call a compute capability, with everything that only it has: "sm_90a" for "9.0"."""
    return f"sm_{capability.replace('.', '')}a"


def decode_backends(driver: Driver, versions: dict[str, str | None]) -> list[dict]:
    """Each decode backend, whether it runs here, and everything that it lacks."""
    missing = [name for name, (_, extra) in PACKAGES.items() if extra == "base" and not versions[name]]
    lacks = {REFERENCE: [f"missing: pip install {' '.join(missing)}"] if missing else []}
    for name in ON_GPU:
        lacks[name] = cuda_problems(driver, versions)
    not_auto = NOT_AUTO | ({} if lacks[STANDARD] else {REFERENCE: f"{STANDARD} runs here"})
    return [{"name": name, "runs": not reasons, "reasons": reasons, "not_auto": not_auto.get(name)} for name, reasons in lacks.items()]


def best_line(driver: Driver) -> str:
    """The extra that fits the driver; the newer one where there is none."""
    return "cu12" if driver.cuda and _number(driver.cuda) < (13, 0) else "cu13"


def _cupy(line: str) -> str:
    return f"cupy-cuda{line[2:]}x"


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def report() -> dict:
    """Everything as one JSON-ready document; docs/cli.md has its keys. A probe that fails leaves null and a line in `failed`."""
    failed = []

    def safe(probe, *args, otherwise=None):
        try:
            return probe(*args)
        except Exception as e:   # a report about a broken machine must not break on it
            failed.append(f"{probe.__name__}: {type(e).__name__}: {e}")
            return otherwise

    driver = safe(probe_driver, otherwise=Driver(problem="the driver could not be asked"))
    versions = safe(package_versions, otherwise=dict.fromkeys(PACKAGES))
    return {
        "version": __version__, "python": platform.python_version(), "host": safe(host), "driver": asdict(driver),
        "nvrtc": safe(probe_nvrtc, otherwise=(None,))[0],
        "packages": {name: {"version": versions[name], "purpose": p, "extra": e} for name, (p, e) in PACKAGES.items()},
        "decode_backends": safe(decode_backends, driver, versions, otherwise=[]), "release_memory": safe(release_memory, driver, otherwise=[]),
        "demo": safe(demo_model), "variables": safe(variables, otherwise={}), "failed": failed,
    }


def demo_model() -> dict:
    """What the manifest of the packaged model says, without its files."""
    from .named_models import manifest

    return {name: value for name, value in manifest().items() if name != "sha256"}


def release_memory(driver: Driver) -> list[dict]:
    """gpu_room.gpu_table of the released model on the GPUs of this machine, for as many sequences as there can be."""
    from ..config import DECODE_ROWS, RELEASED_FOLDER, K3Config   # gpu_room needs this module
    from .gpu_room import gpu_table

    return gpu_table(K3Config.from_json(RELEASED_FOLDER), driver.gpus, DECODE_ROWS) if driver.gpus else []


def host() -> dict:
    """System, CPU and memory. Bytes are bytes; `memory_limit` is the container's, None where there is none."""
    return {
        "system": platform.system(), "release": platform.release(), "machine": platform.machine(), "executable": sys.executable,
        "cpu": _cpu_name(), "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _meminfo("MemTotal"), "memory_free_bytes": _meminfo("MemAvailable"), "memory_limit_bytes": _memory_limit(),
    }


def _cpu_name() -> str | None:
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found.group(1) if found else platform.processor() or None


def _meminfo(key: str) -> int | None:
    try:
        found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    except OSError:
        found = None
    return int(found.group(1)) * 1024 if found else None


def _memory_limit() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            value = int(Path(path).read_text())
        except (OSError, ValueError):   # absent, or "max"
            continue
        return value if value < 1 << 60 else None   # version 1 says "no limit" with a huge number
    return None


def variables() -> dict[str, str]:
    """Environment that changes what runs; secrets are named, not shown."""
    names = [n for n in os.environ if n.startswith(("K3CUDA_", "NCCL_")) or n in ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")]
    return {n: "(set)" if "KEY" in n or "TOKEN" in n else os.environ[n] for n in sorted(names)}
