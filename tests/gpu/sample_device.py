"""The sampler's kernels with device memory of their own, for tests and scripts/bench_sample.py."""
import ctypes
import functools

import cupy as cp
import numpy as np

from k3cuda.runtime.cuda_driver import Launch, Module, open_device
from k3cuda.runtime.cuda_jit import compile_cuda

CLUSTER, NODE, TOP = 8, 1024, 20
ROW = np.dtype([(n, t) for t, names in (
    ("i4", "active greedy"), ("f4", "temperature top_p min_p"), ("i4", "top_k"), ("u4", "seed_low seed_high position stream"),
    ("i4", "logprobs penalty_begin penalty_count"), ("f4", "repetition frequency presence")) for n in names.split()])
PENALTY = np.dtype([("id", "i4"), ("count", "i4")])


class Args(ctypes.Structure):
    _fields_ = [(n, ctypes.c_void_p) for n in ("logits", "rows", "penalties", "token", "logprob", "top_ids", "top_logprobs")]


def warps(vocab: int) -> int:
    return -(-vocab // (CLUSTER * NODE))


@functools.cache
def device():
    return open_device(0)


@functools.cache
def module(vocab: int) -> Module:
    source = f'#include "bench_sample.cuh"\nK3_BENCH_SAMPLE(sample, {vocab}, {CLUSTER}, {warps(vocab)})\n'
    return Module(compile_cuda(source, device().arch, name="sample").cubin)


def records(draws):
    """(rows, penalties) of resolved draws as the kernel reads them; None is a row that is not active."""
    rows, penalties = np.zeros(len(draws), ROW), [np.zeros(0, PENALTY)]
    for i, d in enumerate(draws):
        if d is None:
            continue
        p, entries = d.params, np.zeros(0, PENALTY)
        if p.has_penalties:
            output, counts = np.unique(np.asarray(d.output_ids, np.int32), return_counts=True)
            ids = np.union1d(np.asarray(d.prompt_ids, np.int32), output) if p.repetition_penalty != 1 else output
            entries = np.zeros(len(ids), PENALTY)
            entries["id"] = ids
            entries["count"][np.searchsorted(ids, output)] = counts
        rows[i] = (1, p.greedy, p.temperature, p.top_p, p.min_p, p.top_k, d.seed & 0xffffffff, d.seed >> 32, d.position, d.stream,
                   -1 if p.logprobs is None else p.logprobs, sum(map(len, penalties)), len(entries), p.repetition_penalty,
                   p.frequency_penalty, p.presence_penalty)
        penalties.append(entries)
    return rows, np.concatenate(penalties)


class Sample:
    def __init__(self, logits, draws, stream: int = 0, full: bool = True):
        self.logits, n = logits, len(draws)
        rows, penalties = records(draws)
        self.rows = cp.asarray(rows.view(np.uint8))
        self.penalties = cp.asarray(np.append(penalties, np.zeros(1, PENALTY)).view(np.uint8))
        self.token, self.logprob = cp.full(n, -7, cp.int32), cp.full(n, cp.nan, cp.float32)
        self.top_ids, self.top_logprobs = cp.full((n, TOP), -7, cp.int32), cp.full((n, TOP), cp.nan, cp.float32)
        arrays = (self.logits, self.rows, self.penalties, self.token, self.logprob, self.top_ids, self.top_logprobs)
        vocab = logits.shape[1]
        self.launch = Launch(module(vocab).function("sample_full" if full else "sample_greedy"), n * CLUSTER, warps(vocab) * 32,
                             [Args(*(a.data.ptr for a in arrays))], cluster=CLUSTER, stream=stream)

    def run(self):
        cp.cuda.Device().synchronize()
        self.launch.launch()
        cp.cuda.Device().synchronize()
        return self


def sample(logits, draws, **more) -> Sample:
    return Sample(cp.asarray(logits, cp.float32), draws, **more).run()


