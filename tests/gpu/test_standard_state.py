"""What a step of the standard path leaves behind, and what it must not: drafts, other slots, padding, numbers that are not finite."""
from dataclasses import replace

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cp = pytest.importorskip("cupy", reason="CuPy holds the device's memory; install k3cuda[cu13] or k3cuda[cu12]")

from models import PAGES_A_SLOT, feed, golden, headdims, open_slot, step_rows  # noqa: E402
from standard import STATES, Cuda, alone, compile_ahead, same  # noqa: E402

from k3cuda.config import PAGE_SIZE  # noqa: E402
from k3cuda.emit_sizes import DECODE_BUCKETS  # noqa: E402
from k3cuda.runtime.cuda_kernels import bucket_of  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def compiled():
    compile_ahead((headdims().cfg, 1, DECODE_BUCKETS, "bf16", True))


@pytest.fixture(scope="module")
def gold():
    return golden()


@pytest.fixture(scope="module")
def want():
    """Logits and states of the golden tokens, fed one at a time."""
    return alone()


@pytest.fixture
def be():
    made = Cuda(headdims())
    yield made
    made.close()


@pytest.mark.parametrize("wrong", [7, 200])
def test_only_commit_advances_and_only_over_accepted_rows(be, gold, want, wrong):
    """Drafts that are not accepted leave no trace, whatever they were; the accepted prefix does, as if fed plainly."""
    open_slot(be, 1)
    done, got = 0, []
    for keep, extra in [(3, 4), (1, 7), (0, 2), (5, 0), (7, 3)]:
        be.step(step_rows((1, done, [*gold["input_ids"][done:done + keep], *[wrong] * extra])))
        got.append(be.logits()[:keep])
        be.commit(np.arange(keep + extra) < keep)
        done += keep
    same(np.concatenate(got), want[0], "logits")
    same(be.states(1), want[1], "states")


def test_rows_that_stand_leave_what_a_commit_leaves(be, gold, want):
    """In a bucket whose middle of KDA stores states in passing, and beside a slot that has rows of its own."""
    for slot in (1, 2):
        open_slot(be, slot)
    ids = gold["input_ids"]
    be.step(replace(step_rows((2, 0, [9] * 3), (1, 0, ids)), stand=True))
    same(be.logits()[3:], want[0], "logits")
    be.commit(np.ones(3 + len(ids), bool))
    same(be.states(1), want[1], "states")


def test_a_step_without_commit_starts_again(be, gold, want):
    open_slot(be, 0)
    feed(be, 0, gold["input_ids"][:5], [5])
    be.step(step_rows((0, 5, [9] * 11)))
    same(feed(be, 0, gold["input_ids"][5:], [11], first=5), want[0][5:])


def test_a_reopened_slot_is_empty(be, gold, want):
    open_slot(be, 0)
    feed(be, 0, [9] * 20, [20])
    open_slot(be, 0, [6, 3])
    same(feed(be, 0, gold["input_ids"]), want[0])


class Damaged:
    """A model with one token's embedding not finite in places."""

    token = 77

    def __init__(self, inner, value):
        self.inner, self.cfg, self.value = inner, inner.cfg, value

    def rank_slices(self, weight, layer, tp, rank):
        x = self.inner.rank_slices(weight, layer, tp, rank)
        if getattr(weight, "name", weight) == "embed_tokens":
            x = np.array(x)
            x[self.token, ::5] = self.value
        return x


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_touches_no_other(gold, want, value):
    assert Damaged.token not in gold["input_ids"]
    made = Cuda(Damaged(headdims(), value))
    for slot in range(3):
        open_slot(made, slot)
    made.step(step_rows((1, 0, [5, Damaged.token, 6, 8]), (0, 0, gold["input_ids"]), (2, 0, [Damaged.token] * 9)))
    logits = made.logits()
    same(logits[4:20], want[0])
    assert np.isfinite(logits[0]).all() and not np.isfinite(logits[[1, 2, 3, *range(20, 29)]]).all(axis=1).any()
    made.commit(np.ones(29, bool))
    same(made.states(0), want[1], "states")
    made.close()


def poison(be, slot, pages):
    """NaN in all that no row of `slot` may depend on: scratch, records, other slots, pages of others and positions to come."""
    be.stream.synchronize()
    for memory in be.memories:
        start, stop = be._io.input_bytes, memory.offsets["expert_list"]   # behind it lies what kernels keep for themselves
        memory.arena[start:stop] = 0xFF
        for name in STATES:
            memory.buffer(name)[:, np.arange(be.num_slots) != slot] = np.nan if name == "kda_state" else 0xFFFF
        memory.buffer("mla_cache")[:, ~np.isin(np.arange(be.num_pages), pages)] = 0xFFFF
        memory.buffer("mla_cache")[:, pages[0], be._check._lengths[slot]:] = 0xFFFF
    cp.cuda.Device().synchronize()


@pytest.mark.parametrize("chunks", [[1] * 16, [3, 5, 8], [7, 9]], ids=str)
def test_what_no_row_may_depend_on_is_poisoned(be, gold, want, chunks):
    """Padding rows, what an earlier step left, other slots and pages: NaN before every step, and the bytes stay."""
    open_slot(be, 2, [5, 1])
    got, done = [], 0
    for n in chunks:
        poison(be, 2, [5, 1])
        got.append(feed(be, 2, gold["input_ids"][done:done + n], [n], first=done))
        done += n
    same(np.concatenate(got), want[0], "logits")
    same(be.states(2), want[1], "states")


def test_a_step_touches_nothing_of_others(be):
    """A step of one row leaves every other slot's state and every other cache position as they were."""
    for slot in range(4):
        open_slot(be, slot)
        feed(be, slot, [3 + slot, 4, 5], [3])
    before = [be.states(slot) for slot in range(4)]
    cache = be.on_host("mla_cache")
    feed(be, 2, [9], first=3)
    for slot in (0, 1, 3):
        same(be.states(slot), before[slot], f"slot {slot}")
    changed = (be.on_host("mla_cache") != cache).any(axis=(0, 3))
    assert changed.sum() == 1 and changed[2 * PAGES_A_SLOT, 3]


@pytest.mark.parametrize("first_use", [1, 2, 3, 6])
def test_the_first_use_of_a_bucket_changes_no_state(be, gold, want, first_use):
    """Compiling and capturing in the middle of a sequence: states wait for commit, the cache changes where the new rows are."""
    ids = gold["input_ids"]
    open_slot(be, 1)
    feed(be, 1, ids[:9], [9])
    states, cache = be.states(1), be.on_host("mla_cache")
    assert ("step", bucket_of(first_use)) not in be._graphs
    be.step(step_rows((1, 9, ids[9:9 + first_use])))
    same(be.logits(), want[0][9:9 + first_use])
    same(be.states(1), states, "states")
    changed = (be.on_host("mla_cache") != cache).any(axis=(0, 3)).reshape(-1)
    np.testing.assert_array_equal(np.flatnonzero(changed), PAGES_A_SLOT * PAGE_SIZE + np.arange(9, 9 + first_use))
    be.commit(np.ones(first_use, bool))
    same(feed(be, 1, ids[9 + first_use:], first=9 + first_use), want[0][9 + first_use:])
    same(be.states(1), want[1])
