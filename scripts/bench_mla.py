"""Times latent attention on a GPU: microseconds a layer, bytes a second, fraction of the read ceiling of the same run.

    python3 scripts/bench_mla.py [--quick]

A case runs as a CUDA graph over several layers with caches of their own, several times the L2 cache together. Writes
$OUT/bench_mla.json where OUT is set.
"""
import argparse
import json
import os
import sys
import zlib
from pathlib import Path

import cupy as cp
import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "tests/gpu")]
import mla_device as md  # noqa: E402

from k3cuda.runtime.step_room import mla_chunks  # noqa: E402
from k3cuda.runtime.cuda_timing import Timer  # noqa: E402

ROTATE = 512 << 20   # bytes of caches that one graph walks over: eight times the L2 cache
#        sequences, tokens of each, rows of each
CASES = [(1, 131072, 1), (1, 131072, 8), (64, 8192, 1), (1, 8192, 1), (1, 8192, 8), (8, 8192, 8), (1, 32768, 1), (1, 8192, 64), (1, 131072, 64)]
QUICK = CASES[:3]


def tiles_of(heads: int, rows: int) -> int:
    """The narrowest group that holds a sequence's queries, or the widest there is."""
    return next((t for t in (1, 2, 3) if heads * rows <= 8 * t), 6)


class Bench:
    def __init__(self):
        self.timer = Timer(md.device().arch)
        self.raw = self.timer.raw
        self.pool = cp.empty(ROTATE * 3 + (256 << 20), cp.uint8)
        rng = cp.random.default_rng(7)
        for at in range(0, self.pool.size, 256 << 20):
            self.pool[at:at + (256 << 20)] = rng.integers(0, 256, min(256 << 20, self.pool.size - at), dtype=cp.uint8)
        self.ceiling = self.timer.read_ceiling(self.pool, md.device().name)

    def case(self, bytes_: int, heads: int, sequences: int, tokens: int, rows: int, tiles: int | None = None, blocks: int | None = None):
        tiles = tiles or tiles_of(heads, rows)
        m = md.Mla(bytes_, heads, tiles, blocks, partials=sequences * rows * heads * mla_chunks(tokens))
        slot_pages = tokens // md.PAGE
        size = sequences * tokens * md.DIM * bytes_
        layers = max(2, min(16, ROTATE // size))
        table = cp.asarray(np.random.default_rng(0).permutation(sequences * slot_pages).reshape(sequences, slot_pages), cp.int32)
        slot = cp.repeat(cp.arange(sequences, dtype=cp.int32), rows)
        position = cp.asarray(np.tile(np.arange(tokens - rows, tokens), sequences), cp.int32)
        q = md.bf16_bits(cp.random.default_rng(1).standard_normal((len(slot), heads, md.DIM)))
        kind = {1: cp.uint8, 2: cp.uint16}[bytes_]
        launches, parts, outs = [], [], []
        for layer in range(layers):
            at = layer * size
            cache = self.pool[at:at + size].view(kind).reshape(-1, md.PAGE, md.DIM)
            outs.append(cp.empty((len(slot), heads, md.LATENT), cp.uint16))
            both = m.launches(q, cache, slot, position, table, outs[-1], stream=self.raw, dependent=True)
            launches += both
            parts.append(both[1])
        seconds, combine = self.timer.graph(launches) / layers, self.timer.graph(parts * 4) / (4 * layers)
        return {"kind": {1: "fp8", 2: "bf16"}[bytes_], "heads": heads, "sequences": sequences, "tokens": tokens, "rows": rows, "tiles": tiles,
                "us": round(seconds * 1e6, 2), "combine_us": round(combine * 1e6, 2), "gb_s": round(size / seconds / 1e9),
                "of_ceiling": round(size / seconds / self.ceiling, 3),
                "crc": f"{zlib.crc32(cp.asnumpy(outs[-1]).tobytes()):08x}"}


def tame(pool, bytes_: int):
    """Random bytes as cache rows would hold NaN and enormous values: keeps magnitudes from 1/4 to 2."""
    for at in range(0, pool.size, 256 << 20):
        part = pool[at:at + (256 << 20)]
        if bytes_ == 1:
            part[...] = (part & 0x87) | 0x28 | ((part >> 2) & 0x10)
        else:
            part = part.view(cp.uint16)
            part[...] = (part & 0x80ff) | 0x3f00


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    bench = Bench()
    print(f"{md.device().name}, read ceiling {bench.ceiling / 1e12:.2f} TB/s")
    md.build([(b, h, t) for b in (1, 2) for h in (6, 12) for t in (1, 2, 3, 6)])
    results = []
    for bytes_ in (1, 2):
        tame(bench.pool, bytes_)
        for heads in (6, 12):
            for case in QUICK if quick else CASES:
                results.append(bench.case(bytes_, heads, *case))
                print(" ".join(f"{k} {v}" for k, v in results[-1].items()), flush=True)
    if os.environ.get("OUT"):
        (Path(os.environ["OUT"]) / "bench_mla.json").write_text(json.dumps({"ceiling_tb_s": bench.ceiling / 1e12, "cases": results}, indent=1))


if __name__ == "__main__":
    main()
