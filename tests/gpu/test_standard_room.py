"""Memory of the standard path: what is said to fit does fit, and addresses beyond 2^31 elements are right."""
import ctypes
import re
from dataclasses import replace

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cp = pytest.importorskip("cupy", reason="CuPy holds the device's memory; install k3cuda[cu13] or k3cuda[cu12]")

from models import golden, headdims  # noqa: E402
from standard import Cuda, compile_ahead, same  # noqa: E402

from k3cuda.config import PAGE_SIZE  # noqa: E402
from k3cuda.emit_sizes import ROW_BUCKETS  # noqa: E402
from k3cuda.errors import ConfigError, OutOfMemory, PlanError  # noqa: E402
from k3cuda.runtime.backend import StepRows  # noqa: E402
from k3cuda.runtime.cuda_synthetic import Filler  # noqa: E402
from k3cuda.runtime.engine import Engine  # noqa: E402
from k3cuda.runtime.request import Request  # noqa: E402
from k3cuda.runtime.sampling import SamplingParams  # noqa: E402
from k3cuda.runtime.step_room import KERNEL_BYTES, rank_room  # noqa: E402

LONG = 1 << 20


class LongModel:
    """The small model, for a context of a million tokens."""

    def __init__(self):
        self.inner = headdims()
        self.cfg = replace(self.inner.cfg, max_position_embeddings=LONG)

    def rank_slices(self, *arguments):
        return self.inner.rank_slices(*arguments)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    compile_ahead((LongModel().cfg, 1, (1, 4, 128), "bf16", True), (headdims().cfg, 1, ROW_BUCKETS, "bf16", True))


def rows(slot, first, ids):
    ids = np.asarray(ids, np.int32)
    n = len(ids)
    return StepRows(ids, np.full(n, slot, np.int32), np.arange(first, first + n, dtype=np.int32), np.arange(max(n - 64, 0), n, dtype=np.int32))


def used() -> int:
    cp.cuda.Device().synchronize()
    free, total = cp.cuda.runtime.memGetInfo()
    return total - free


def test_the_length_that_is_named_works_and_uses_no_more():
    """A limit in the middle of nowhere: what the error names fits, one page more does not; every bucket then runs inside the limit."""
    cp.get_default_memory_pool().free_all_blocks()
    source, slots, before = LongModel(), 4, used()
    with pytest.raises(OutOfMemory) as e:
        Cuda(source, max_batch=slots, max_model_len=LONG, memory_limit=KERNEL_BYTES + (900 << 20))
    fits = int(re.search(r"max_model_len of at most (\d+)", e.value.hint).group(1))
    assert 0 < fits < LONG and fits % PAGE_SIZE == 0
    limit = KERNEL_BYTES + (900 << 20)
    with pytest.raises(OutOfMemory, match="need"):
        Cuda(source, max_batch=slots, max_model_len=fits + 1, memory_limit=limit)
    cp.get_default_memory_pool().free_all_blocks()
    made = Cuda(source, max_batch=slots, max_model_len=None, memory_limit=limit)
    assert made.max_model_len == fits
    assert rank_room(made.plan, slots, fits, "bf16") <= 900 << 20
    for slot in range(slots):
        made.open_slot(slot, range(slot * fits // PAGE_SIZE, (slot + 1) * fits // PAGE_SIZE))
    made._check._lengths[3] = fits - 3
    made.step(rows(3, fits - 3, [5, 6, 7]))   # the last positions of the last slot
    assert np.isfinite(made.logits()).all()
    made.commit(np.ones(3, bool))
    with pytest.raises(PlanError, match="does not continue"):
        made.step(rows(3, fits, [8]))
    assert used() - before <= limit, "more than was asked for"
    made.close()


def test_kernels_and_graphs_fit_what_is_kept_for_them():
    """All buckets of steps and commits, captured."""
    cp.get_default_memory_pool().free_all_blocks()
    made = Cuda(headdims(), max_model_len=ROW_BUCKETS[-1])
    before = used()
    made.open_slot(0, range(ROW_BUCKETS[-1] // PAGE_SIZE))
    for bucket in ROW_BUCKETS:
        made._check.open(0)
        made.step(rows(0, 0, np.arange(bucket) % 250))
        made.commit(np.zeros(bucket, bool))
    assert len(made._graphs) >= 2 * (len(ROW_BUCKETS) - 1)
    print(f"kernels and graphs: {(used() - before) / 2**20:.0f} MiB")
    assert used() - before <= KERNEL_BYTES
    made.close()


def test_nothing_fits():
    with pytest.raises(OutOfMemory, match="need") as e:
        Cuda(headdims(), max_batch=4, memory_limit=1 << 20)
    assert "max_model_len" not in e.value.hint and "max_batch" in e.value.hint


def test_a_context_longer_than_the_models_or_than_the_cache():
    with pytest.raises(ConfigError, match="beyond the model's"):
        Cuda(headdims(), max_model_len=headdims().cfg.max_position_embeddings + 1)
    engine = Engine(Cuda(headdims(), max_model_len=100))
    with pytest.raises(Exception, match="the context holds 100") as e:
        engine.add(Request("long", list(range(3, 103)), SamplingParams(), ()))
    assert e.value.code == 6 and "max_model_len" in e.value.hint
    engine.close()


def test_addresses_beyond_2_31():
    """A slot at the far end of a cache of more than 2^31 elements, at its first and at its last positions, against one at the near end."""
    be, ids = Cuda(LongModel(), max_batch=4, max_model_len=LONG), golden()["input_ids"]
    cache = be.memories[0].buffer("mla_cache")
    assert cache.size > 1 << 31 and cache.shape[0] == 1
    pages = LONG // PAGE_SIZE
    near, far = (0, range(pages)), (3, range(3 * pages, 4 * pages))
    for slot, own in (near, far):
        be.open_slot(slot, own)
    out = []
    for slot, own in (near, far):
        logits = []
        for done, n in ((0, 3), (3, 13)):
            be.step(rows(slot, done, ids[done:done + n]))
            logits.append(be.logits().copy())
            be.commit(np.ones(n, bool))
        out.append([*logits, *be.states(slot), cache[0, own[0]].get()])
    same(out[1], out[0], "first positions")

    part = cache[0, :pages]
    Filler(be.device.arch).run("fill_cache", part, part.nbytes // 4, ctypes.c_uint(3), ctypes.c_int(0))
    cp.cuda.Device().synchronize()
    cp.cuda.runtime.memcpy(cache[0, 3 * pages:].data.ptr, part.data.ptr, part.nbytes, cp.cuda.runtime.memcpyDeviceToDevice)
    out = []
    for slot, own in (near, far):
        be._check._lengths[slot] = LONG - 76
        logits = []
        for done, n in ((LONG - 76, 3), (LONG - 73, 70), (LONG - 3, 3)):   # a small, a wide, the last step
            be.step(rows(slot, done, [*ids, *ids, *ids, *ids, *ids][:n]))
            logits.append(be.logits().copy())
            be.commit(np.ones(n, bool))
        out.append([*logits, *be.states(slot), cache[0, own[-1]].get(), cache[0, own[-2]].get()])
    assert np.isfinite(out[0][0]).all() and out[0][0].std() > 0.01
    same(out[1], out[0], "last positions")
    be.close()
