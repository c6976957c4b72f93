"""Times the KDA, norm and route cores on this machine's GPU at the sizes of a TP16 rank.

    python scripts/bench_cores.py [kda|commit|norm|route ...]

A line has three times of a launch in a graph of dependent launches: behind a kernel of 5 us that lets it start early (what it adds to a
step whose kernels overlap), in a chain of its own kind that overlaps, and in one that doesn't; then the bytes it must move over the
first of them. States and weights rotate over more memory than the L2 cache holds; what an earlier kernel of the
step has just written (parts, projections, logits) stays in the cache, as it would in a step.
"""
import ctypes
import sys
from pathlib import Path

import cupy as cp
import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "tests/gpu")]
import core_kernels as ck  # noqa: E402

from k3cuda.runtime.cuda_timing import Timer  # noqa: E402

D, HEADS, LAYERS, HIDDEN, LATENT, PARTS = 128, 6, 69, 7168, 3584, 16
C = HEADS * D
RESIDENT = 96 << 20   # bytes of states that launches rotate over: more than any L2 here
MIXES = ((8, 2, 256, 2), (8, 2, 384), (8, 2, 512), (4, 2, 384), (4, 2, 512), (2, 2, 384), (2, 2, 256), (1, 2, 512), (1, 4, 384), (1, 4, 256))
COMMITS = ((1, 2), (2, 2), (4, 2), (4, 2, 256), (1, 4, 256, 2))
MIDDLE, PARTS_OF_ROWS = ck.kda_rows(), 22
NORMS = ((HIDDEN, 16, PARTS, 8, 16, 448), (HIDDEN, 16, PARTS, 8, 8, 448), (HIDDEN, 16, PARTS, 8, 8, 896), (HIDDEN, 16, PARTS, 8, 16, 224),
         *((HIDDEN, 16, parts, 8, *s) for parts in (PARTS, 1) for s in ((8, 448, 2), (8, 256, 3), (8, 256, 4), (4, 448, 2), (2, 448, 1))),
         (HIDDEN, 16, 1, 8, 16, 448), (HIDDEN, 16, 1, 8, 8, 448), (HIDDEN, 16, 1, 8, 1, 0), (HIDDEN, 16, 1, 8, 1, 0, 2),
         (LATENT, 16, PARTS, 0, 16, 224), (LATENT, 16, PARTS, 0, 8, 448),
         *((LATENT, 16, parts, 0, 8, 256) for parts in (PARTS, 1)))
ROUTES = (128, 256, 512)   # threads
LISTS = ((8, 384), (64, 384), (64, 1024), (256, 1024))
WAIT = """extern "C" __global__ void spacer(int cycles) {
  grid_wait();
  grid_launch_next();
  for (long long start = clock64(); clock64() - start < cycles;) {}
}
"""
SPACER = 10000        # clock cycles: some 5 us


def uniform(*shape, low=-1.0, high=1.0):
    return (cp.random.random(shape, dtype=cp.float32) * (high - low) + low).astype(cp.float32)


def bf16(*shape):
    return (uniform(*shape).view(cp.uint32) >> 16).astype(cp.uint16)


class Bench:
    def __init__(self, kernels):
        spacer = ck.Kernel("spacer", WAIT, 64)
        self.cores = ck.Cores([*kernels, spacer])
        self.timer = Timer(self.cores.device.arch)
        self.ceiling = self.timer.read_ceiling(uniform(1 << 29), self.cores.device.name) / 1e9
        self.spacer = (spacer, 132, [ctypes.c_int(SPACER)], 0)
        self.space = self.chain([self.spacer] * 32)
        print(f"{self.cores.device.name}: read ceiling {self.ceiling:.0f} GB/s, spacer {self.space:.2f} us")

    def chain(self, calls, dependent=True):
        """Median microseconds a launch, in a graph of the launches (kernel, grid, arguments, shared) one after the other."""
        launches = [self.cores.launcher(k, grid, a, shared=shared, stream=self.timer.raw, dependent=dependent) for k, grid, a, shared in calls]
        return self.timer.graph(launches) * 1e6 / len(calls)

    def line(self, what, kernel, grid, calls, nbytes, shared=0):
        calls = [(kernel, grid, a, shared) for a in calls]
        behind = 2 * self.chain([c for one in calls for c in (self.spacer, one)]) - self.space
        over, alone = self.chain(calls), self.chain(calls, dependent=False)
        rate = nbytes / behind / 1e3
        print(f"{what:46} {behind:8.2f} {over:8.2f} {alone:8.2f} us {rate:6.0f} GB/s {100 * rate / self.ceiling:3.0f} %", flush=True)


def slots_of(rows, sequences, first):
    per = rows // sequences
    return cp.asarray(np.repeat(np.arange(first, first + sequences), per).astype(np.int32))


def bench_mix(b):
    w = [dict(f_b=bf16(C, D), a_log=uniform(HEADS), dt_bias=uniform(C), q_conv=uniform(C, 4), k_conv=uniform(C, 4), v_conv=uniform(C, 4))
         for _ in range(LAYERS)]
    norm = uniform(D)
    for rows, sequences in ((1, 1), (4, 1), (8, 1), (8, 8), (64, 64), (64, 8), (64, 1)):
        one = HEADS * D * D * 4
        slots = max(sequences, RESIDENT // one // sequences * sequences)
        calls_n = min(LAYERS, max(slots // sequences, 8))
        state, conv = uniform(slots, HEADS, D, D), bf16(slots, 3, 3, C)
        k, v, decay, out = uniform(rows, C), uniform(rows, C), uniform(rows, C), bf16(rows, C)
        common = dict(rows=rows, heads=HEADS, qkv=bf16(rows, 3, C), f_a=bf16(rows, D), beta=uniform(rows, HEADS, low=0), out_gate=uniform(rows, C),
                      state=state, conv_state=conv, o_norm=norm, k=k, v=v, decay=decay, out=out, lower_bound=-5.0, l2_eps=1e-6, eps=1e-5)
        calls = [[ck.fill(ck.KdaMix, row_slot=slots_of(rows, sequences, i * sequences % slots), **common, **w[i])] for i in range(calls_n)]
        nbytes = sequences * (one + 9 * C * 2) + rows * C * (6 + 4 + 2 + 12) + C * (D * 2 + 52)
        for s in MIXES:
            b.line(f"kda_mix {s}, {rows} rows of {sequences}", ck.kda_mix(*s), (HEADS * s[0], rows), calls, nbytes,
                   ck.kda_mix_shared(s[0]))
        if rows > 8:
            b.line(f"kda_rows, {rows} rows of {sequences}", MIDDLE, HEADS * PARTS_OF_ROWS, [[c[0], ctypes.c_int(PARTS_OF_ROWS)] for c in calls], nbytes,
                   ck.KDA_ROWS_SHARED)


def bench_commit(b):
    for rows, sequences in ((1, 1), (8, 1), (8, 8), (64, 64)):
        slots = max(sequences, 4)
        state, conv = uniform(LAYERS, slots, HEADS, D, D), bf16(LAYERS, slots, 3, 3, C)
        rec = [uniform(LAYERS, rows, C, low=-0.1, high=0) for _ in range(3)]
        common = dict(row_accepted=cp.ones(rows, cp.uint8), rows=rows, heads=HEADS, slots=slots, record_rows=rows, qkv=bf16(LAYERS, rows, 3, C),
                      k=rec[0], v=rec[1], decay=rec[2], beta=uniform(LAYERS, rows, HEADS, low=0), state=state, conv_state=conv)
        calls = [[ck.fill(ck.KdaCommit, row_slot=slots_of(rows, sequences, i * sequences % slots), **common)] for i in range(8)]
        nbytes = LAYERS * (sequences * 2 * (HEADS * D * D * 4 + 9 * C * 2) + rows * C * 18)
        for s in COMMITS:
            for lanes in sorted({1, min(4, sequences), min(16, sequences)}):
                b.line(f"kda_commit {s} lanes {lanes}, {rows} rows of {sequences}", ck.kda_commit(*s), (HEADS * s[0], lanes, LAYERS), calls,
                       nbytes)


def bench_norm(b):
    for rows in (1, 8, 64):
        slots = cp.arange(rows, dtype=cp.int32)
        for s in NORMS:
            n, _, parts, blocks, cluster, threads, *resident = s
            sets = []
            for _ in range(4):
                keep = dict(row_slot=slots, row_map=None, rows=rows, part_rows=rows, parts=uniform(parts, rows, n), hidden=uniform(rows, n) if blocks else None,
                            snapshot=None, blocks=uniform(blocks, rows, n) if blocks else None, num_blocks=blocks, score=uniform(n, high=0.01),
                            weight=bf16(n), out=bf16(rows, n), eps=1e-5)
                sets.append([ck.fill(ck.NormRow, **keep, hidden_out=keep["hidden"])])
            nbytes = rows * n * (4 * (parts + blocks + (2 if blocks else 0)) + 2) + n * (2 + (4 if blocks else 0))
            b.line(f"norm {n}, {parts} parts, {blocks} blocks, {cluster} x {threads}, {resident[0] if resident else 1} an SM, {rows} rows", ck.norm_row(*s), rows * cluster, sets * 16, nbytes,
                   ck.norm_shared(*s))


def bench_route(b):
    for rows in (1, 8, 64, 256):
        slots, weights = cp.zeros(rows, cp.int32), uniform(rows, 16)
        ids = cp.asarray(np.stack([np.random.default_rng(r).permutation(896)[:16] for r in range(rows)]).astype(np.int32))
        logits, bias = uniform(rows, 896, low=-4, high=4), uniform(896, high=0.1)
        for threads in ROUTES:
            args = [logits, bias, slots, ctypes.c_float(1), ids, weights]
            b.line(f"route, {threads} threads, {rows} rows", ck.route(896, 16, threads), rows, [args] * 64, rows * 896 * 4)
        out = [cp.zeros(n, cp.int32) for n in (1, 1, 4097, 4096)]
        for most, threads in LISTS:
            if rows <= most:
                args = [ids, slots, ctypes.c_int(rows), *out]
                b.line(f"list of {most}, {threads} threads, {rows} rows", ck.list_experts(896, 16, most, threads), 1, [args] * 64, rows * 128)


PARTS_OF_BENCH = {"kda": ([MIDDLE, *(ck.kda_mix(*s) for s in MIXES)], bench_mix), "commit": ([ck.kda_commit(*s) for s in COMMITS], bench_commit),
                  "norm": ([ck.norm_row(*s) for s in NORMS], bench_norm),
                  "route": ([ck.route(896, 16, s) for s in ROUTES] + [ck.list_experts(896, 16, *s) for s in LISTS], bench_route)}


def main(names):
    names = names or list(PARTS_OF_BENCH)
    b = Bench([k for n in names for k in PARTS_OF_BENCH[n][0]])
    for n in names:
        PARTS_OF_BENCH[n][1](b)
    used = {k: v for k, v in b.cores.compiled.resources().items()}
    print("registers:", ", ".join(f"{k} {v.registers}" for k, v in used.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
