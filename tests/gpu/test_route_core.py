"""The router's choice and the expert list against NumPy, exactly, and against themselves by bytes."""
import ctypes

import core_kernels as ck
import numpy as np
import pytest
from core_kernels import down, poisoned, up

pytestmark = pytest.mark.gpu
F32, I32 = np.float32, np.int32
K3, SMALL = (896, 16), (16, 4)
ROUTES = {(*m, t): ck.route(*m, t) for m, t in ((K3, 128), (K3, 256), (K3, 512), (SMALL, 64))}
LISTS = {(*m, r, t): ck.list_experts(*m, r, t) for m, r, t in ((K3, 1, 256), (K3, 8, 384), (K3, 64, 512), (K3, 256, 384), (SMALL, 64, 128))}
WIDE_LISTS = {(*m, *s): ck.list_wide(*m, *s) for m, s in ((K3, (128, 512, 16, 8)), (K3, (1024, 512, 16, 24)), (SMALL, (128, 64, 5, 24)), (SMALL, (128, 64, 20, 8)))}


@pytest.fixture(scope="module")
def cores():
    return ck.Cores([*ROUTES.values(), *LISTS.values(), *WIDE_LISTS.values()])


def route(cores, shape, logits, bias, slots=None, scale=1.0):
    rows = len(logits)
    slots = np.zeros(rows, I32) if slots is None else np.asarray(slots, I32)
    ids, weights = poisoned((rows, shape[1]), I32), poisoned((rows, shape[1]), F32)
    cores.run(ROUTES[shape], rows, [up(logits), up(bias), up(slots), ctypes.c_float(scale), ids, weights])
    return down(ids), down(weights)


def want_route(logits, bias, k):
    """Ids by the stable order, exact wherever the scores are; scores in F32 as the reference computes them."""
    scores = (1 / (1 + np.exp(-logits.astype(np.float64)))).astype(F32)
    ids = np.argsort(-(scores + bias), axis=-1, kind="stable")[:, :k]
    chosen = np.take_along_axis(scores, ids, -1).astype(np.float64)
    return ids, chosen / (chosen.sum(-1, keepdims=True) + 1e-20)


def check_choice(ids, logits, bias, k):
    """Equal to the oracle's, but for neighbours whose scores differ by less than expf's two units in the last place."""
    scores = 1 / (1 + np.exp(-logits.astype(np.float64))) + bias
    want, _ = want_route(logits, bias, k)
    for row in np.flatnonzero((ids != want).any(-1)):
        assert len(set(ids[row])) == k
        assert np.abs(scores[row, ids[row]] - scores[row, want[row]]).max() < 4e-7, row


@pytest.mark.parametrize("shape", ROUTES)
def test_matches_numpy(cores, shape):
    g = np.random.default_rng(shape[2])
    logits, bias = g.standard_normal((37, shape[0])).astype(F32) * 2, (g.standard_normal(shape[0]) * 0.1).astype(F32)
    ids, weights = route(cores, shape, logits, bias, scale=2.5)
    check_choice(ids, logits, bias, shape[1])
    scores = 1 / (1 + np.exp(-np.take_along_axis(logits, ids, -1).astype(np.float64)))
    assert ck.relative(weights, scores / scores.sum(-1, keepdims=True) * 2.5) < 1e-6


@pytest.mark.parametrize("shape", ROUTES)
@pytest.mark.parametrize("kind", ("equal", "few values", "rising", "falling", "by lane", "infinite", "nan", "negative zero"))
def test_ties_orders_and_odd_values(cores, shape, kind):
    """Scores of exact values (the bias decides: sigmoid of a constant), so ids must be exactly NumPy's."""
    n, k = shape[:2]
    g, logits, bias = np.random.default_rng(1), np.zeros((3, n), F32), np.zeros(n, F32)
    if kind == "few values":
        bias = g.integers(0, 4, n).astype(F32)
    elif kind in ("rising", "falling"):
        bias = np.arange(n, dtype=F32)[:: 1 if kind == "rising" else -1].copy()
    elif kind == "by lane":                      # the best all sit in few lanes: more candidates than the list holds
        bias = (-(np.arange(n) % 32) * 1000.0 - np.arange(n) // 32).astype(F32)
    elif kind == "infinite":
        logits[:, ::3], logits[:, 1::3] = np.inf, -np.inf
    elif kind == "nan":
        logits[0, :] = np.nan
        logits[1, 5:] = np.nan
        logits[2, : n - k] = np.nan
    elif kind == "negative zero":
        bias[::2] = -0.0
        logits[:] = -np.inf                      # scores 0 and -0 are equal
    ids, weights = route(cores, shape, logits, bias)
    with np.errstate(all="ignore"):
        want = want_route(logits, bias, k)[0]
    assert (ids == want).all()
    if kind not in ("nan", "negative zero"):
        assert abs(weights.sum(-1) - 1).max() < 1e-5


def test_bytes_alone_in_a_batch_and_beside_nan(cores):
    g = np.random.default_rng(7)
    logits, bias = g.standard_normal((64, 896)).astype(F32), (g.standard_normal(896) * 0.05).astype(F32)
    whole = route(cores, (*K3, 128), logits, bias)
    for row in (0, 13, 63):
        for shape in list(ROUTES)[:3]:
            for a, b in zip(route(cores, shape, logits[[row]], bias), whole):
                assert a[0].tobytes() == b[row].tobytes()
    dead = np.arange(64) % 5 == 2
    logits[dead] = np.nan
    ids, weights = route(cores, (*K3, 128), logits, bias, np.where(dead, -1, 3))
    assert ids[~dead].tobytes() == whole[0][~dead].tobytes() and weights[~dead].tobytes() == whole[1][~dead].tobytes()
    assert (ids[dead] == -7).all() and np.isnan(weights[dead]).all()


@pytest.mark.parametrize("shape, rows", [((*K3, 1, 256), 1), ((*K3, 8, 384), 1), ((*K3, 8, 384), 8), ((*K3, 64, 512), 64), ((*K3, 64, 512), 33),
                                         ((*K3, 256, 384), 256), ((*K3, 256, 384), 70), ((*SMALL, 64, 128), 50)])
@pytest.mark.parametrize("kind", ("random", "one set", "padding"))
def test_expert_list(cores, shape, rows, kind):
    ids, slots = choice(shape, rows, kind)
    check_list(cores, LISTS[shape], 1, [up(ids), up(slots), ctypes.c_int(rows)], shape, 8, ids, slots)


@pytest.mark.parametrize("shape", WIDE_LISTS)
@pytest.mark.parametrize("kind", ("random", "one set", "padding", "half"))
def test_wide_expert_list(cores, shape, kind):
    """The same list from several blocks, also where some have no experts; rows behind those of a step are padding."""
    rows, (ids, slots) = shape[2], choice(shape, shape[2], kind)
    if kind == "half":
        slots[rows // 2:] = -1
    check_list(cores, WIDE_LISTS[shape], shape[4], [up(ids), up(slots)], shape, shape[5], ids, slots)


def choice(shape, rows, kind):
    """Ids of `rows` rows, and their slots."""
    experts, k = shape[:2]
    g = np.random.default_rng(rows)
    ids = np.stack([g.permutation(experts)[:k] for _ in range(rows)]).astype(I32)
    if kind == "one set":
        ids[:] = ids[0]
    slots = np.where(g.random(rows) < 0.4, -1, 1).astype(I32) if kind == "padding" else np.ones(rows, I32)
    ids[slots < 0] = 1 << 30                     # stale garbage
    return ids, slots


def check_list(cores, kernel, blocks, arguments, shape, group, ids, slots):
    k, most = shape[1], shape[2] * shape[1]
    out = [up(np.full(n, 0x7777, t)) for n, t in ((1, I32), (1, I32), (most + 1, np.uint32), (most, np.uint16))]
    cores.run(kernel, blocks, [*arguments, *out])
    entries, items, entry, item = (down(x) for x in out)
    lists = {}
    for r in np.flatnonzero(slots >= 0):
        for p in range(k):
            lists.setdefault(int(ids[r, p]), []).append(r * k + p)
    want_items = [i for e in sorted(lists) for i in lists[e]]
    firsts = np.cumsum([0] + [len(lists[e]) for e in sorted(lists)])
    want = [e | int(first + g) << 16 for e, first in zip(sorted(lists), firsts) for g in range(0, len(lists[e]), group)]
    assert (entries[0], items[0]) == (len(want), len(want_items))
    assert list(entry[:len(want) + 1]) == [*want, len(want_items) << 16] and list(item[:len(want_items)]) == want_items
    assert (entry[len(want) + 1:] == 0x7777).all() and (item[len(want_items):] == 0x7777).all()
