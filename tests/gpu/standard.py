"""What tests of the standard path share: backends as tests/models.py makes the reference's, and comparisons by bytes."""
import functools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from models import PAGES_A_SLOT, feed, golden, headdims, open_slot

from k3cuda.buffers import BY_NAME
from k3cuda.config import PAGE_SIZE
from k3cuda.plan import build_plan
from k3cuda.runtime.cuda_backend import CudaBackend
from k3cuda.runtime.cuda_driver import open_device
from k3cuda.runtime.cuda_kernels import compile_bucket

STATES = ("kda_state", "conv_state")


class Cuda(CudaBackend):
    """The drivers of tests/models.py pass `observe`, which is a matter of the reference alone."""

    def __init__(self, source, tp=1, **options):
        super().__init__(source, tp, **{"max_batch": 4, "max_model_len": PAGES_A_SLOT * PAGE_SIZE} | options)

    def step(self, rows, observe=None):
        super().step(rows)

    def on_host(self, name):
        """A buffer of the first rank on the host."""
        self.stream.synchronize()
        return self.memories[0].buffer(name).get()

    def states(self, slot):
        """The whole states of a slot, the ranks' parts side by side."""
        self.stream.synchronize()
        return [np.concatenate([m.buffer(name)[:, slot].get() for m in self.memories], axis=BY_NAME[name].cut - 1) for name in STATES]


def compile_ahead(*units) -> None:
    """Fills the cache of cubins, all at the same time; a unit is (cfg, tp, buckets, kv_cache_dtype, whether collectives ride on stores)."""
    device = open_device()
    with ThreadPoolExecutor() as pool:   # NVRTC works outside Python's lock
        jobs = [pool.submit(compile_bucket, build_plan(cfg, tp), rows, kv, device.arch, sms=device.sms, ride=ride)
                for cfg, tp, buckets, kv, ride in units for rows in buckets]
        for job in jobs:
            job.result()


def run(source, ids, chunks=None, *, slot=0, pages=None, tp=1, **options):
    """Logits of a sequence alone in a fresh backend, one token at a time by default, and the states it leaves."""
    made = Cuda(source, tp, **options)
    try:
        open_slot(made, slot, pages)
        return feed(made, slot, ids, chunks), made.states(slot)
    finally:
        made.close()


@functools.cache
def alone():
    """`run` of the golden tokens."""
    return run(headdims(), golden()["input_ids"])


def same(got, want, what=""):
    """The same bytes, NaN included."""
    for a, b in zip(_list(got), _list(want), strict=True):
        a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
        assert a.shape == b.shape and a.dtype == b.dtype, what
        if a.tobytes() != b.tobytes():
            wrong = np.flatnonzero(a.reshape(-1).view(np.uint8) != b.reshape(-1).view(np.uint8)) // a.itemsize
            at = np.unravel_index(wrong[0], a.shape)
            raise AssertionError(f"{what}: {len(set(wrong))} values differ, first {tuple(map(int, at))}: {a[at]!r}, wanted {b[at]!r}")


def _list(x):
    return x if isinstance(x, (list, tuple)) else [x]
