"""The sampler's kernel with device memory of its own, for tests and scripts/bench_sample.py."""
import functools

import cupy as cp
import numpy as np

from k3cuda.runtime.cuda_driver import Launch, Module, open_device
from k3cuda.runtime.cuda_kernels import compile_step_io
from k3cuda.runtime.sampling import MAX_LOGPROBS
from k3cuda.runtime.step_records import CLUSTER, NO_PENALTIES, PENALTY, ROW, SampleArgs, penalty_entries, row_record, sampler_warps

TOP = MAX_LOGPROBS


@functools.cache
def device():
    return open_device(0)


@functools.cache
def module(vocab: int) -> Module:
    return Module(compile_step_io(vocab, device().arch).cubin)


def records(draws):
    """(rows, penalties) of resolved draws as the kernel reads them; None is a row that is not active."""
    rows, penalties = np.zeros(len(draws), ROW), [NO_PENALTIES]
    for i, d in enumerate(draws):
        if d is not None:
            entries = penalty_entries(d)
            rows[i] = row_record(d, sum(map(len, penalties)), len(entries), slot=-1)
            penalties.append(entries)
    return rows, np.concatenate(penalties)


class Sample:
    def __init__(self, logits, draws, stream: int = 0):
        self.logits, n = logits, len(draws)
        rows, penalties = records(draws)
        self.rows = cp.asarray(rows.view(np.uint8))
        self.penalties = cp.asarray(np.append(penalties, np.zeros(1, PENALTY)).view(np.uint8))
        self.slot_tokens, self.ended = cp.zeros(1, cp.int32), cp.zeros(n, cp.uint64)
        self.token, self.logprob = cp.full(n, -7, cp.int32), cp.full(n, cp.nan, cp.float32)
        self.top_ids, self.top_logprobs = cp.full((n, TOP), -7, cp.int32), cp.full((n, TOP), cp.nan, cp.float32)
        arrays = (self.logits, self.rows, self.penalties, self.slot_tokens, self.ended, self.token, self.logprob, self.top_ids, self.top_logprobs)
        vocab = logits.shape[1]
        self.launch = Launch(module(vocab).function("k_sample"), n * CLUSTER, sampler_warps(vocab) * 32,
                             [SampleArgs(*(a.data.ptr for a in arrays))], cluster=CLUSTER, stream=stream)

    def run(self):
        cp.cuda.Device().synchronize()
        self.launch.launch()
        cp.cuda.Device().synchronize()
        return self


def sample(logits, draws, **more) -> Sample:
    return Sample(cp.asarray(logits, cp.float32), draws, **more).run()
