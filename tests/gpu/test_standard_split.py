"""Virtual ranks that hold the MLA cache together: the logits of ranks that each hold all of it, whatever the batch, the pages and the cuts."""
import numpy as np
import pytest

pytestmark = pytest.mark.gpu
pytest.importorskip("cupy", reason="CuPy holds the device's memory; install k3cuda[cu13] or k3cuda[cu12]")

from models import headdims, relative, step_rows  # noqa: E402
from standard import Cuda, same  # noqa: E402

from k3cuda.config import PAGE_SIZE  # noqa: E402
from k3cuda.runtime.backend import StepRows  # noqa: E402

TOKENS = 300   # five pages
IDS = np.random.default_rng(11).integers(3, 256, TOKENS)
WIDE, NARROW = [256, 44], [64] * 4 + [44]
LIMIT = 2e-3   # another order of sums, and every BF16 rounding behind it: 1.1e-3 on an H200


def opened(tp, dcp, kv="bf16", ride=True):
    return Cuda(headdims(), tp, dcp=dcp, kv_cache_dtype=kv, ride=ride, max_batch=2, max_model_len=8 * PAGE_SIZE)


def feed(be, slot, sizes, ids=IDS, first=0):
    """Logits of the last rows of every step, up to 44 of it."""
    out, done = [], 0
    for n in sizes:
        rows = [np.full(n, slot, np.int32), np.arange(first + done, first + done + n, dtype=np.int32), np.arange(max(0, n - 44), n, dtype=np.int32)]
        be.step(StepRows(ids[done:done + n].astype(np.int32), *rows))
        out.append(be.logits())
        be.commit(np.ones(n, bool))
        done += n
    return np.concatenate(out)


def prompt(tp, dcp, sizes, *, slot=0, backwards=False, **options):
    be = opened(tp, dcp, **options)
    each = be.num_pages // 2
    pages = range(slot * each, (slot + 1) * each)
    be.open_slot(slot, pages[::-1] if backwards else pages)
    logits, cache = feed(be, slot, sizes), [m.buffer("mla_cache").nbytes for m in be.memories]
    be.close()
    return logits, cache


@pytest.mark.parametrize("tp, dcp, kv, sizes", [(2, 2, "bf16", NARROW), (4, 4, "fp8_e4m3", NARROW), (4, 2, "bf16", WIDE)])
def test_logits_are_those_of_whole_caches(tp, dcp, kv, sizes):
    (got, own), (want, whole) = (prompt(tp, n, sizes, kv=kv) for n in (dcp, 1))
    assert np.isfinite(got).all() and 0 < relative(got, want) < LIMIT, relative(got, want)
    assert [dcp * n for n in own] == whole


def test_bytes_depend_on_nothing_but_the_group():
    """Other pages, another slot, other cuts, collectives as kernels of their own."""
    want, _ = prompt(2, 2, NARROW)
    same(prompt(2, 2, NARROW, slot=1, backwards=True)[0], want, "elsewhere")
    same(prompt(2, 2, NARROW, ride=False)[0], want, "without stores that ride")
    last = prompt(2, 2, WIDE)[0][-44:]
    same(last, want[-44:], "in wide steps")


def test_rows_that_see_nothing_of_a_rank():
    """A short sequence beside a long one, and rows over the edge of its first page; a NaN row stays one row's trouble."""
    be, want = opened(2, 2), prompt(2, 2, NARROW)[0]
    each = be.num_pages // 2
    for slot in range(2):
        be.open_slot(slot, range(slot * each, (slot + 1) * each))
    feed(be, 1, [62])
    feed(be, 0, NARROW[:-1])
    be.step(step_rows((1, 62, IDS[62:66].tolist()), (0, 256, IDS[256:300].tolist())))
    logits = be.logits()
    be.close()
    same(logits[4:], want[-44:], "the long one")
    alone = opened(2, 2)
    alone.open_slot(0, range(each))
    feed(alone, 0, [62])
    same(logits[:4], feed(alone, 0, [4], IDS[62:66], first=62), "the short one")
    alone.close()
