"""Loads one rank of a stand-in made of holes into a GPU, looks at every sampled tensor there, and says how fast and in how much host memory.

    scripts/gpu.sh load --folder FOLDER

Holes cost no disk, so what is measured is the way of a byte through the host, not a disk; that one is measured on a file that is really written.
"""
import json
import os
import re
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import numpy as np

from k3cuda.cli.model_argument import config_of
from k3cuda.config import RELEASED
from k3cuda.errors import K3Error
from k3cuda.packing import FOLDED, PACKED
from k3cuda.plan import build_plan
from k3cuda.runtime.atomic_file import atomic_file
from k3cuda.runtime.block_reader import DIRECT, FileReader, choose_mode
from k3cuda.runtime.checkpoint import Checkpoint
from k3cuda.runtime.cuda_driver import require_gpu
from k3cuda.runtime.cuda_weights import plan_bytes
from k3cuda.runtime.device_load import load_weights
from k3cuda.runtime.findings import error_of
from k3cuda.runtime.load_plan import BLOCK_BYTES, Block, Range
from k3cuda.runtime.loader import default_workers, page_buffer
from k3cuda.runtime.loading import Loading
from k3cuda.runtime.preflight import check
from k3cuda.runtime.safetensors_file import SafetensorsFile
from k3cuda.runtime.standin import sample_values, samples, write_standin
from k3cuda.runtime.surroundings import surroundings
from k3cuda.runtime.unpack import unpacked
from k3cuda.weights import BY_NAME, model_bytes, rank_slice

HOST_BYTES = 2_000_000_000   # of host memory that a load may take beside its ring of buffers


def peak_bytes() -> int:
    """The most memory that this process has had since `forget_peak`."""
    return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def sampled_wrong(held: dict, cfg, tp: int, rank: int) -> tuple[int, list[str]]:
    """Compares every sample of the stand-in with the rank's packed arrays.

    Args:
        held: (layer, stage) -> arrays uint8 on the device, as `load_weights` gives them.
    Returns:
        (samples of which the rank holds something, names of those that differ).
    """
    by_layer, dims, seen, wrong = defaultdict(list), cfg.dims(), 0, []
    for weight, layer, expert, rows in samples(cfg):
        by_layer[layer].append((weight, expert, rows))
    for layer, wanted in by_layer.items():
        arrays = {p.name: (p, array) for (at, stage), found in held.items() if at == layer for p, array in zip(PACKED[stage], found, strict=True)}
        factors = {}
        slices = _trunk(arrays, cfg, tp)
        for weight, expert, rows in wanted:
            values = sample_values(cfg, weight, layer, expert, rows)
            own_rows, *rest = rank_slice(weight, dims, tp, rank)
            here = range(max(rows.start, own_rows.start), min(rows.stop, own_rows.stop))
            if not here:
                continue
            want = values[here.start - rows.start:here.stop - rows.start].reshape(len(here), *(dims[name] for name in weight.shape[1:]))[(slice(None), *rest)]
            if expert is None and weight.name not in slices:   # a factor of a folded product, sampled whole
                factors[weight.name] = want.astype(np.float32)
                continue
            part = slices[weight.name] if expert is None else _expert(arrays, weight, expert, cfg, tp)
            seen += 1
            if part[here.start - own_rows.start:here.stop - own_rows.start].tobytes() != np.ascontiguousarray(want).tobytes():
                wrong.append(f"{weight.name}, layer {layer}, expert {expert}, rows {rows.start} to {rows.stop}")
        for p, array in arrays.values():
            if p.how == FOLDED:
                norm, score = (factors[name] for name in p.sources)
                seen += 1
                if _host(array).tobytes() != (norm * score).tobytes():
                    wrong.append(f"{p.name}, layer {layer}")
    return seen, wrong


def _host(array) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.get()


def _trunk(arrays: dict, cfg, tp: int) -> dict[str, np.ndarray]:
    """Weights of a layer but for experts and the factors of products."""
    trunk = {name: (p, array) for name, (p, array) in arrays.items() if p.how != FOLDED and not BY_NAME[p.sources[0]].count}
    return unpacked({name: _host(array) for name, (_, array) in trunk.items()}, tuple(p for p, _ in trunk.values()), cfg, tp)


def _expert(arrays: dict, weight, expert: int, cfg, tp: int) -> np.ndarray:
    p, array = next((p, array) for p, array in arrays.values() if weight.name.removesuffix("_scale") in p.sources)
    one = _host(array.reshape(cfg.num_experts, -1)[expert])
    return unpacked({p.name: one}, (p,), cfg, tp)[weight.name][0]


def measure(folder: Path, tp: int, rank: int, device, mode: str, device_bytes) -> dict:
    """Checks and loads one rank into `device` (device_load.Device).

    Args:
        device_bytes: how much of the device's memory is in use.
    Returns:
        JSON-ready; times in seconds, sizes in bytes.
    """
    start = time.perf_counter()
    forget_peak()
    report = check(folder, tp=tp, is_reference=False)
    if report.findings:
        raise error_of(report.findings, folder)
    checkpoint = report.open()
    found = {"check_s": time.perf_counter() - start, "check_peak_bytes": peak_bytes()}
    plan, loading, ranks = build_plan(checkpoint.cfg, tp), Loading(mode, None), range(rank, rank + 1)
    forget_peak()
    before, before_device, start = peak_bytes(), device_bytes(), time.perf_counter()
    held, = load_weights(plan, checkpoint, tp, ranks, device, loading)
    wall = time.perf_counter() - start
    ring = default_workers() * 2 * BLOCK_BYTES   # a buffer and gathered columns for each
    taken = peak_bytes() - before
    seen, wrong = sampled_wrong(held, checkpoint.cfg, tp, rank)
    kept = model_bytes(checkpoint.cfg, tp)
    return found | {
        "tp": tp, "rank": rank, "load_s": wall, "weights_bytes": kept, "weights_gb_s": kept / 1e9 / wall, "read_gb_s": loading.read_bytes / 1e9 / wall,
        "loading": loading.to_dict(), "packed_bytes": plan_bytes(plan), "device_bytes": device_bytes() - before_device, "ring_bytes": ring,
        "host_bytes": taken, "host_bytes_allowed": ring + HOST_BYTES, "is_host_memory_bounded": taken <= ring + HOST_BYTES,
        "samples": seen, "samples_wrong": len(wrong), "first_wrong": wrong[:5]}


def storage(folder: Path, nbytes: int) -> dict:
    """Speed of the disk below `folder` on a file that is really written: past the page cache where that can be."""
    content, path = np.random.default_rng(0).integers(0, 256, BLOCK_BYTES, np.uint8), folder / "storage.bin"
    blocks = max(1, nbytes // BLOCK_BYTES)
    start = time.perf_counter()
    try:
        with atomic_file(path) as f:
            for n in range(blocks):
                content[:8] = np.array([n], "<u8").view(np.uint8)   # no two blocks are alike
                f.write(content)
        written = time.perf_counter() - start
        file = SafetensorsFile(path, {}, 0, {})
        mode, why = choose_mode("auto", [file], 1 << 62)
        reader, places = FileReader(mode == DIRECT, keep=False), iter(range(blocks))

        def read(buffer):
            while (n := next(places, None)) is not None:
                view, = reader.read(Block(file, [Range(n * BLOCK_BYTES, (n + 1) * BLOCK_BYTES, [])]), buffer)
                assert int(view[:8].view("<u8")[0]) == n

        workers, start = default_workers(), time.perf_counter()
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(read, [page_buffer(BLOCK_BYTES) for _ in range(workers)]))
        took = time.perf_counter() - start
        reader.close()
    finally:
        path.unlink(missing_ok=True)
    return {"bytes": blocks * BLOCK_BYTES, "mode": mode, "why": why, "write_gb_s": blocks * BLOCK_BYTES / 1e9 / written, "read_gb_s": blocks * BLOCK_BYTES / 1e9 / took}


def run(cfg, folder: Path, tp: int, rank: int, device, mode: str, written: int, device_bytes) -> dict:
    """Everything; `folder` is made where it is missing, and holds the stand-in afterwards."""
    start = time.perf_counter()
    standin = folder / "standin"
    if not standin.exists():
        write_standin(cfg, standin)
    made = time.perf_counter() - start
    disk = sum(f.stat().st_blocks for f in standin.iterdir()) * 512
    assert Checkpoint.open(standin).cfg == cfg, f"{standin} is of another model: remove it"
    return {"label": "synthetic: holes cost no disk", "layers": cfg.num_hidden_layers, "standin_s": made, "standin_disk_bytes": disk,
            **measure(standin, tp, rank, device, mode, device_bytes), "storage": storage(folder, written)}


@click.command(help=__doc__.partition("\n")[0])
@click.option("--config", default=RELEASED, show_default=True, help="config.json to follow, or its folder.")
@click.option("--layers", type=click.IntRange(min=1), help="The first so many layers only.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where the stand-in is made and kept.  [default: a temporary one]")
@click.option("--tp", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--rank", type=click.IntRange(min=0), default=3, show_default=True)
@click.option("--load-mode", default="auto", show_default=True)
@click.option("--written", type=int, default=16 << 30, show_default=True, help="Bytes that are really written to measure the disk.")
@click.option("--output", type=click.Path(path_type=Path), help="File for the result.  [default: stdout]")
def main(config, layers, folder, tp, rank, load_mode, written, output):
    try:
        gpu = require_gpu()
        import cupy

        from k3cuda.runtime.cuda_load import CudaLoadDevice

        with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as own, CudaLoadDevice(gpu, BLOCK_BYTES) as device:
            found = run(config_of(config, layers), folder or Path(own), tp, rank, device, load_mode, written,
                        lambda: -cupy.cuda.runtime.memGetInfo()[0])
    except K3Error as e:
        raise click.ClickException(str(e)) from None
    text = json.dumps({**surroundings(gpu, "python scripts/load_rank.py"), **found}, indent=2) + "\n"
    if output:
        output.write_text(text, encoding="utf-8")
    click.echo(text, nl=False)
    sys.exit(0 if found["is_host_memory_bounded"] and not found["samples_wrong"] and found["samples"] else 8)


if __name__ == "__main__":
    main()
