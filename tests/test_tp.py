"""Virtual ranks: each holds only its own slices, and together they give what one rank gives."""
import ml_dtypes
import numpy as np
import pytest

from k3cuda.config import MXFP4_GROUP
from k3cuda.errors import ConfigError
from k3cuda.runtime.made_config import made_config
from k3cuda.runtime.made_model import MadeCheckpoint
from k3cuda.runtime.tensor_source import TensorSource
from k3cuda.weights import rank_slice
from models import FEW_PIECES, backend, feed, golden, headdims, open_slot, relative

LIMIT = 1e-5  # asked: ranks add partial sums in another order than one rank does


class OwnSlicesOnly(TensorSource):
    """A source in which everything that the asking rank does not own is NaN (in MXFP4: scale code 255)."""

    def __init__(self, inner, tp, rank):
        self.inner, self.cfg, self.tp, self.rank = inner, inner.cfg, tp, rank

    def stored(self, weight, layer, expert):
        whole = self.inner.read(weight, layer, expert)
        nan = np.array(255 if whole.dtype == np.uint8 else np.nan).astype(whole.dtype)
        masked = np.full(whole.shape, nan, whole.dtype)
        own = rank_slice(weight, self._dims, self.tp, self.rank)
        masked[own] = whole[own]
        return masked


class EachItsOwn:
    """Gives every rank of `tp` a source of its own."""

    def __init__(self, inner, tp):
        self.cfg, self.ranks = inner.cfg, [OwnSlicesOnly(inner, tp, r) for r in range(tp)]

    def rank_slices(self, weight, layer, tp, rank):
        return self.ranks[rank].rank_slices(weight, layer, tp, rank)


@pytest.fixture(scope="module")
def sixteen_heads():
    return MadeCheckpoint(made_config(), seed=3)


def logits(checkpoint, tp, ids):
    be = backend(checkpoint, tp)
    open_slot(be, 0)
    out = feed(be, 0, ids, [len(ids)])
    for arena in be.arenas:
        np.testing.assert_array_equal(arena["logits"][:len(ids)], out, err_msg="ranks disagree")
        np.testing.assert_array_equal(arena["hidden"][:len(ids)], be.arenas[0]["hidden"][:len(ids)])
    return out


@pytest.mark.parametrize("tp", [2, 4])
def test_headdims(tp):
    ids = golden()["input_ids"]
    assert relative(logits(EachItsOwn(headdims(), tp), tp, ids), logits(headdims(), 1, ids)) < LIMIT


@pytest.mark.parametrize("tp", [2, 4, 8, 16])
def test_sixteen_heads(sixteen_heads, tp):
    ids = np.random.default_rng(tp).integers(0, 300, 21)
    want = logits(sixteen_heads, 1, ids)
    assert np.isfinite(want).all() and want.std() > 0.1, "a model that says nothing tests nothing"
    assert relative(logits(EachItsOwn(sixteen_heads, tp), tp, ids), want) < LIMIT


@pytest.mark.parametrize("tp", [4, 8, 16])
def test_more_ranks_than_pieces(tp):
    """Those that have none hold zeros, and their states stay zero."""
    made, ids = MadeCheckpoint(FEW_PIECES, seed=3), np.random.default_rng(tp).integers(0, 300, 21)
    want = logits(made, 1, ids)
    assert np.isfinite(want).all() and want.std() > 0.1 and relative(logits(EachItsOwn(made, tp), tp, ids), want) < LIMIT
    be = backend(made, tp)
    open_slot(be, 0)
    feed(be, 0, ids, [len(ids)])
    for rank, arena in enumerate(be.arenas):
        assert arena["kda_state"].shape[2] == FEW_PIECES.dims()["kda_num_heads"] // 4
        assert all(arena[name].any() == (rank < 4) for name in ("kda_state", "conv_state"))
    for name, pieces in (("kda_q_proj", 4), ("kda_a_log", 4), ("o_proj", 4), ("dense_up_proj", min(tp, 2)), ("shared_down_proj", min(tp, 2)), ("expert_w1_scale", 1), ("expert_w2", 1)):
        layer = 0 if name.startswith("dense") else 1
        held = [made.rank_slices(name, layer, tp, rank) for rank in range(tp)]
        assert [bool(h.any()) for h in held] == [rank < pieces for rank in range(tp)] and len({h.shape for h in held}) == 1, name


def test_a_slice_that_is_not_owned_shows(sixteen_heads):
    """The masking above can fail: a rank that takes its neighbour's slice gives NaN."""
    swapped = EachItsOwn(sixteen_heads, 2)
    swapped.ranks.reverse()
    assert not np.isfinite(logits(swapped, 2, [5, 6, 7])).any()


def test_ranks_hold_nothing_but_their_slices(sixteen_heads):
    """Bytes of all ranks together: cut weights once, the others once a rank."""
    one, four = (backend(sixteen_heads, tp) for tp in (1, 4))

    def size(be, rank, names):
        held = be.program.weights[rank][1]
        return sum(np.size(held[n].packed) if hasattr(held[n], "packed") else np.size(held[n]) for n in names)

    cut, whole = ["kda_q_proj", "o_proj", "expert_w2", "router"], ["input_layernorm", "e_score_correction_bias"]
    assert sum(size(four, r, cut) for r in range(4)) == size(one, 0, cut)
    assert all(size(four, r, whole) == size(one, 0, whole) for r in range(4))


def test_no_cut_goes_through_a_scale_group():
    """w2 is cut only between groups: 64 inputs are 2 groups, so 2 of 4 ranks have one each."""
    made = MadeCheckpoint(made_config(moe_intermediate_size=2 * MXFP4_GROUP))
    parts = [made.rank_slices(name, 1, 4, rank) for name in ("expert_w2", "expert_w2_scale") for rank in range(4)]
    assert [p.shape[2] for p in parts] == [MXFP4_GROUP // 2] * 4 + [1] * 4 and [bool(p.any()) for p in parts] == [True, True, False, False] * 2


def test_outputs_that_ranks_cannot_share_equally_are_refused():
    with pytest.raises(ConfigError, match="vocab_size .in at most 600 pieces. cannot be cut over 16 ranks: .*; 1, 2, 4, 8 fit this model"):
        backend(MadeCheckpoint(made_config(vocab_size=600)), 16)


def test_bf16_mode_over_ranks(sixteen_heads):
    """Ranks round partial sums at other places, so only closeness can be asked: BF16 keeps 8 bits."""
    ids = [5, 80, 200, 3]
    runs = []
    for tp in (1, 8):
        be = backend(sixteen_heads, tp, activation_dtype="bf16")
        open_slot(be, 0)
        runs.append(feed(be, 0, ids))
    assert relative(runs[1], runs[0]) < 5e-2
    assert ml_dtypes.finfo(ml_dtypes.bfloat16).nmant == 7
