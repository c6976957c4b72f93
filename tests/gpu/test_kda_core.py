"""KDA's mixing and commit cores against the reference, and against themselves by bytes."""
import ctypes

import core_kernels as ck
import numpy as np
import pytest
from kda_case import BF16, Kda, live, take, with_nan

pytestmark = pytest.mark.gpu
# (blocks a head, value columns a thread, threads, blocks a SM)
SHAPES = ((8, 2, 384), (8, 2, 256, 2), (8, 4), (8, 1), (4, 2, 512), (4, 2), (4, 1), (4, 4), (2, 2), (2, 4), (2, 2, 384), (1, 2, 512), (1, 4, 512))
MIXES = {s: ck.kda_mix(*s) for s in SHAPES}
WIDE, ROWS, SPREAD, SHARES = ck.kda_wide(), ck.kda_rows(), ck.kda_spread(), ck.kda_shares()
COMMITS = {s: ck.kda_commit(*s) for s in ((4, 2), (1, 2), (2, 2), (8, 2), (4, 2, 256), (1, 4, 256, 2))}
MAIN, COMMIT = SHAPES[0], (4, 2)
# F32 sums of 128 products in another order than BLAS, twice over rows: measured 5e-7; BF16 output: half a unit of 2^-8, 1.7e-3 in L2.
F32_LIMIT, BF16_LIMIT = 5e-6, 3e-3


@pytest.fixture(scope="module")
def cores():
    return ck.Cores([*MIXES.values(), *WIDE, ROWS, SPREAD, SHARES, *COMMITS.values()])


def row_slots(rows):
    """Every kind of neighbour: a long sequence over more than one batch, single rows, padding in between and at the end."""
    pattern = [2, 2, 2, 0, -1, 5, 5, -1, 1] + [3] * 21 + [-1, 4] + [6] * 8 + [7] * 9 + [-1] * 3
    return (pattern * 3)[:rows] if rows <= len(pattern) else pattern + list(range(8, 8 + rows - len(pattern)))


def same(a, b, where=""):
    for name in a:
        assert a[name].tobytes() == b[name].tobytes(), (name, where)


@pytest.mark.parametrize("heads, rows", [(4, 1), (4, 8), (4, 55), (6, 64), (12, 30), (96, 9)])
def test_mix_matches_reference(cores, heads, rows):
    slots = row_slots(rows)
    case = Kda(cores, heads, max(slots) + 1, rows, seed=rows)
    x = with_nan(case.inputs(rows, seed=heads), ~live(slots))
    want = case.reference(slots, x, case.session())
    got = case.mix(MIXES[MAIN], MAIN[0], slots, x)
    on = live(slots)
    for name, limit in (("k", F32_LIMIT), ("v", F32_LIMIT), ("decay", F32_LIMIT), ("out", BF16_LIMIT)):
        assert ck.relative(got[name][on], want[name][on]) < limit, name
        assert np.isnan(got[name][~on].astype(np.float32)).all(), f"{name} of padding rows was written"


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_bytes_do_not_depend_on_slicing(cores, shape):
    slots = row_slots(64)
    case = Kda(cores, 6, max(slots) + 1, 64)
    x = case.inputs(64)
    same(case.mix(MIXES[MAIN], MAIN[0], slots, x), case.mix(MIXES[shape], shape[0], slots, x), shape)


@pytest.mark.parametrize("heads, rows", [(1, 55), (4, 64), (6, 130)])
def test_a_wide_steps_kernels_give_the_same_bytes(cores, heads, rows):
    slots = row_slots(rows)
    case = Kda(cores, heads, max(slots) + 1, rows)
    x = with_nan(case.inputs(rows), ~live(slots))
    shape = next(iter(MIXES))
    on = live(slots)
    same({k: v[on] for k, v in case.mix(MIXES[shape], shape[0], slots, x).items()}, {k: v[on] for k, v in case.mix_wide(WIDE, slots, x).items()})


@pytest.mark.parametrize("heads, rows, parts", [(1, 55, 3), (1, 64, 64), (6, 16, 5), (6, 64, 1), (6, 64, 22)])
def test_a_step_of_many_rows_gives_the_same_bytes(cores, heads, rows, parts):
    slots = row_slots(rows) if parts < 22 else np.arange(rows) * 5 % 64   # every row a sequence of its own
    case = Kda(cores, heads, max(slots) + 1, rows)
    x = with_nan(case.inputs(rows), ~live(slots))
    shape, on = next(iter(MIXES)), live(slots)
    same({k: v[on] for k, v in case.mix(MIXES[shape], shape[0], slots, x).items()}, {k: v[on] for k, v in case.mix_rows(ROWS, slots, x, parts=parts).items()})


@pytest.mark.parametrize("heads, rows, parts, alone", [(1, 55, 3, False), (6, 64, 22, False), (6, 16, 5, True), (6, 64, 22, True)])
def test_a_middle_of_many_rows_that_advances_leaves_what_a_commit_would(cores, heads, rows, parts, alone):
    slots = np.arange(rows) * 5 % 64 if alone else np.asarray(row_slots(rows))   # alone: every row a sequence of its own
    case, on = Kda(cores, heads, max(slots) + 1, rows, seed=rows), live(slots)
    x, before = with_nan(case.inputs(rows), ~on), case.session()
    want = case.mix(MIXES[MAIN], MAIN[0], slots, x)
    case.commit(COMMITS[COMMIT], COMMIT[0], slots, on)
    committed, case.advances = case.session(), 1
    assert committed[0].tobytes() != before[0].tobytes()
    for run in (lambda: case.mix_rows(ROWS, slots, x, parts=parts), lambda: case.mix_wide(WIDE, slots, x)):
        case.restore(before)
        same({k: v[on] for k, v in want.items()}, {k: v[on] for k, v in run().items()})
        for a, b in zip(committed, case.session()):
            assert a.tobytes() == b.tobytes()


FEW = ((-1,), (0,), (4, 4), (4, 1), (-1, 3), (5,) * 8, (1,) * 3 + (2,) * 5, (-1,) * 8, (1, 1, -1, 2, 3, 3, 4, -1), (1, 1, 2, 3, 3, 4, 5, 5), (1, 2, 3, 4, 5, 6, 7, -1),
       tuple(range(8)))


@pytest.mark.parametrize("slots", FEW)
def test_every_sequence_of_few_rows_is_taken_once(cores, slots):
    lanes = max(1, len(slots) // 2)
    first, halves = (ck.poisoned(2 * lanes, np.int32) for _ in range(2))
    cores.run(SHARES, 2 * lanes, [ck.up(np.asarray(slots, np.int32)), ctypes.c_int(len(slots)), first, halves])
    first, halves = ck.down(first).reshape(lanes, 2), ck.down(halves)
    opens = [r for r, s in enumerate(slots) if s >= 0 and (r == 0 or slots[r - 1] != s)]
    assert (halves == (len(opens) > lanes)).all()
    assert halves[0] or (first[:, 0] == first[:, 1]).all()
    taken = first.ravel() if halves[0] else first[:, 0]
    assert [r for r in taken if r >= 0] == opens


@pytest.mark.parametrize("slots", FEW)
def test_few_rows_give_the_same_bytes_by_quarters_and_halves(cores, slots):
    case = Kda(cores, 6, max(slots) + 1 or 1, len(slots))
    x = with_nan(case.inputs(len(slots)), ~live(slots))
    same(case.mix(MIXES[MAIN], MAIN[0], slots, x), case.mix(SPREAD, 4, slots, x, blocks=4 * 6 * max(1, len(slots) // 2)))


def test_bytes_do_not_depend_on_neighbours_slot_or_bucket(cores):
    slots = row_slots(55)
    case = Kda(cores, 6, 20, 256)
    x = case.inputs(55)
    whole = case.mix(MIXES[MAIN], MAIN[0], slots, x)
    state, conv = case.session()
    state[:, 19], conv[:, 19] = state[:, 3], conv[:, 3]
    case.restore((state, conv))
    rows = [i for i, s in enumerate(slots) if s == 3]
    for before, after in ((0, 0), (1, 0), (7, 5), (37, 198)):
        moved = [-1] * before + [19] * len(rows) + [-1] * after
        y = case.inputs(len(moved), seed=9)
        y = with_nan(y, np.ones(len(moved), bool))
        for k in y:
            y[k][before:before + len(rows)] = x[k][rows]
        alone = case.mix(MIXES[MAIN], MAIN[0], moved, y)
        same({k: v[rows] for k, v in whole.items()}, {k: v[before:before + len(rows)] for k, v in alone.items()}, before)


@pytest.mark.parametrize("heads, chunks", [(4, (1,) * 20), (6, (8, 7, 5)), (6, (20,)), (6, (3, 9, 8))])
def test_chunks_and_commits_give_the_bytes_of_single_rows(cores, heads, chunks):
    tokens = 20
    one, case = (Kda(cores, heads, 3, 64, layers=2) for _ in range(2))
    xs = [one.inputs(tokens, seed=s) for s in range(2)]
    rows = [[], []]
    for t in range(tokens):
        for layer, x in enumerate(xs):
            rows[layer].append(one.mix(MIXES[MAIN], MAIN[0], [1], take(x, [t]), layer))
        one.commit(COMMITS[COMMIT], COMMIT[0], [1], [1])
    at = 0
    for n in chunks:
        slots = [2, 2] + [1] * n + [-1]       # a second sequence that is never accepted
        for layer, x in enumerate(xs):
            padded = {k: np.concatenate([v[:2], v[at:at + n], np.full_like(v[:1], np.nan)]) for k, v in x.items()}
            got = case.mix(MIXES[MAIN], MAIN[0], slots, padded, layer)
            for i in range(n):
                same({k: v[2 + i] for k, v in got.items()}, {k: v[0] for k, v in rows[layer][at + i].items()}, (at, i))
        case.commit(COMMITS[COMMIT], COMMIT[0], slots, [0, 0] + [1] * n + [0])
        at += n
    for a, b in zip(one.session(), case.session()):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("shape", COMMITS)
def test_commit_matches_reference_and_leaves_the_rest(cores, shape):
    slots = row_slots(64)
    case = Kda(cores, 6, max(slots) + 1, 64, layers=2, seed=3)
    xs = [case.inputs(64, seed=s) for s in (5, 6)]
    for layer, x in enumerate(xs):
        case.mix(MIXES[MAIN], MAIN[0], slots, x, layer)
    before = case.session()
    accepted = np.random.default_rng(0).random(64) < 0.6
    accepted[[i for i, s in enumerate(slots) if s in (5, 9)]] = False
    case.commit(COMMITS[shape], shape[0], slots, accepted)
    state, conv = case.session()
    touched = sorted({s for s, a in zip(slots, accepted) if s >= 0 and a})
    for layer, x in enumerate(xs):
        want = case.reference(slots, x, before, layer, accepted=np.concatenate([accepted, np.zeros(8, bool)]))
        assert ck.relative(state[layer], want["state"]) < F32_LIMIT
        assert (conv[layer].view(BF16).astype(np.float32) == want["conv"]).all()
    rest = [s for s in range(case.slots) if s not in touched]
    assert 5 in rest and 9 in rest and len(touched) > 5
    assert state[:, rest].tobytes() == before[0][:, rest].tobytes() and conv[:, rest].tobytes() == before[1][:, rest].tobytes()


@pytest.mark.parametrize("shape, lanes", [((1, 2), 1), ((2, 2), 64), ((4, 2), 2), ((1, 4, 256, 2), 4)])
def test_commit_bytes_do_not_depend_on_launch(cores, shape, lanes):
    slots = row_slots(64)
    case = Kda(cores, 4, max(slots) + 1, 64)
    case.mix(MIXES[MAIN], MAIN[0], slots, case.inputs(64))
    before, accepted = case.session(), np.arange(64) % 3 != 1
    case.commit(COMMITS[COMMIT], COMMIT[0], slots, accepted)
    want = case.session()
    case.restore(before)
    case.commit(COMMITS[shape], shape[0], slots, accepted, lanes)
    for a, b in zip(want, case.session()):
        assert a.tobytes() == b.tobytes()


def test_long_chunk(cores):
    """256 rows of prefill: one sequence beside another, against the reference."""
    slots = [0] * 250 + [1] * 6
    case = Kda(cores, 6, 2, 256)
    x = case.inputs(256)
    want, got = case.reference(slots, x, case.session()), case.mix(MIXES[MAIN], MAIN[0], slots, x)
    assert ck.relative(got["out"], want["out"]) < BF16_LIMIT
