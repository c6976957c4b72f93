# syntax=docker/dockerfile:1
# docs/container.md says how to build and run it. Two stages: pip and what it leaves behind stay in the first.
ARG PYTHON_IMAGE=python:3.13-slim-trixie
FROM ${PYTHON_IMAGE} AS build
ARG CUDA_LINE=cu13
ARG COMPILE="--arch sm_90a,sm_100a,sm_103a --tp 16"
WORKDIR /src
COPY container/requirements-${CUDA_LINE}.lock requirements.lock
RUN python -m venv --without-pip /opt/k3cuda \
 && pip --python /opt/k3cuda/bin/python install --no-cache-dir --no-compile --require-hashes --no-deps -r requirements.lock
COPY dist/k3cuda-*.whl ./
# Kernels need NVRTC but neither GPU nor driver. COMPILE is several words.
# hadolint ignore=SC2086
RUN pip --python /opt/k3cuda/bin/python install --no-cache-dir --no-compile --no-index --no-deps ./k3cuda-*.whl \
 && /opt/k3cuda/bin/k3cuda compile --output /opt/k3cuda/cubin ${COMPILE} \
 && find /opt/k3cuda/lib -type d -name tests -prune -exec rm -r {} + \
 && /opt/k3cuda/bin/python -m compileall -q /opt/k3cuda/lib

FROM ${PYTHON_IMAGE}
# The driver's library comes from the NVIDIA container runtime. Only /tmp is written, by whatever user; weights are mounted at /models.
ENV PATH=/opt/k3cuda/bin:$PATH \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp XDG_CACHE_HOME=/tmp/cache \
    K3CUDA_CUBIN_DIR=/opt/k3cuda/cubin K3CUDA_CACHE_DIR=/tmp/cache/k3cuda K3CUDA_OFFLINE=1 \
    CUPY_CACHE_IN_MEMORY=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build /opt/k3cuda /opt/k3cuda
USER 10001:10001
WORKDIR /models
STOPSIGNAL SIGTERM
# For `serve` on its usual port; loading 1.56 TB may take the hour.
HEALTHCHECK --interval=30s --timeout=5s --start-period=60m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["k3cuda"]
CMD ["info"]
