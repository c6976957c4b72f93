"""The reference against the shared goldens, and the bytes of a row against everything that must not change them."""
from types import SimpleNamespace

import numpy as np
import pytest

from k3cuda.config import PAGE_SIZE
from k3cuda.errors import ConfigError
from k3cuda.reference import mla
from k3cuda.reference.numerics import Numerics
from k3cuda.runtime.made_config import made_config
from k3cuda.runtime.made_model import MadeCheckpoint
from k3cuda.runtime.numpy_backend import NumpyBackend
from models import PAGES_A_SLOT, backend, feed, golden, headdims, open_slot, relative, step_rows

F32_LIMIT = 1e-5    # asked of every tensor; float64 goldens against F32 arithmetic give 2e-7 to 1.4e-6
BF16_LIMIT = 2.5e-2  # asked; the goldens' own BF16 emulation is 1.1e-2 away from float64


@pytest.fixture(scope="module")
def gold():
    return golden()


@pytest.fixture(scope="module")
def checkpoint():
    return headdims()


class Recorder:
    """Collects what the goldens hold about every token."""

    def __init__(self, cfg, tokens):
        self.first, layers, moe = 0, cfg.num_hidden_layers, cfg.num_hidden_layers - cfg.first_k_dense_replace
        self.layer_out = np.zeros((tokens, layers, cfg.hidden_size))
        self.expert_ids = np.zeros((tokens, moe, cfg.num_experts_per_token), int)
        self.expert_weights = np.zeros(self.expert_ids.shape)

    def __call__(self, op, arenas):
        row, a = self.first, arenas[0]
        if op.stage.name in ("dense_sum", "latent_up"):  # the prefix sum after a layer: hidden and what is yet to be added
            self.layer_out[row, op.layer] = a["hidden"][0] + a["ffn_out"][0]
        if op.stage.name == "route":
            self.expert_ids[row, op.layer - 1] = a["expert_ids"][0]
            self.expert_weights[row, op.layer - 1] = a["expert_weights"][0]
        if op.stage.name == "lm_head":
            self.first += 1


@pytest.fixture(scope="module")
def run(checkpoint, gold):
    """The golden tokens one at a time: backend afterwards, logits, records."""
    be = backend(checkpoint)
    open_slot(be, 0)
    seen = Recorder(checkpoint.cfg, len(gold["input_ids"]))
    return be, feed(be, 0, gold["input_ids"], observe=seen), seen


def test_logits_and_layers(run, gold):
    _, logits, seen = run
    assert relative(logits, gold["logits"]) < F32_LIMIT
    assert relative(seen.layer_out, gold["layer_out"]) < F32_LIMIT


def test_routing(run, gold):
    _, _, seen = run
    np.testing.assert_array_equal(seen.expert_ids, gold["expert_ids"])
    assert relative(seen.expert_weights, gold["expert_weights"]) < F32_LIMIT


def test_states_and_cache(run, gold, checkpoint):
    be, _, _ = run
    a, cfg = be.arenas[0], checkpoint.cfg
    for index, layer in enumerate(i for i in range(cfg.num_hidden_layers) if cfg.is_kda(i)):
        assert relative(a["kda_state"][index, 0], gold[f"kda_state.{layer}"]) < F32_LIMIT, layer
        assert relative(a["conv_state"][index, 0], gold[f"conv_state.{layer}"]) < F32_LIMIT, layer
    cache = a["mla_cache"][0].reshape(-1, cfg.dims()["mla_cache_dim"])[:len(gold["input_ids"])]
    assert relative(cache[:, :cfg.kv_lora_rank], gold["mla_ckv.2"]) < F32_LIMIT
    assert relative(cache[:, cfg.kv_lora_rank:], gold["mla_kpe.2"]) < F32_LIMIT


def test_bf16_mode(checkpoint, gold):
    be = backend(checkpoint, activation_dtype="bf16")
    open_slot(be, 0)
    seen = Recorder(checkpoint.cfg, len(gold["input_ids"]))
    logits = feed(be, 0, gold["input_ids"], observe=seen)
    assert relative(logits, gold["logits"]) < BF16_LIMIT
    np.testing.assert_array_equal(seen.expert_ids, gold["expert_ids"])
    assert relative(logits, gold["logits"]) > 1e-3, "nothing was rounded: the mode does nothing"
    bits = be.arenas[0]["conv_state"].view(np.uint32)
    assert not (bits & 0xFFFF).any(), "the conv window holds values that BF16 cannot store"


@pytest.mark.parametrize("chunks", [[16], [1, 15], [3, 5, 8], [7, 9], [2] * 8])
def test_chunks_give_the_same_bytes(checkpoint, gold, run, chunks):
    be = backend(checkpoint)
    open_slot(be, 2, [5, 1])
    logits = feed(be, 2, gold["input_ids"], chunks)
    np.testing.assert_array_equal(logits, run[1])
    np.testing.assert_array_equal(be.arenas[0]["kda_state"][:, 2], run[0].arenas[0]["kda_state"][:, 0])
    np.testing.assert_array_equal(be.arenas[0]["conv_state"][:, 2], run[0].arenas[0]["conv_state"][:, 0])


@pytest.mark.parametrize("options", [{}, {"activation_dtype": "bf16"}, {"kv_cache_dtype": "fp8_e4m3"}, {"tp": 2}],
                         ids=lambda o: "-".join(map(str, o.values())) or "f32")
def test_a_sequence_gives_the_same_bytes_alone_and_in_any_batch(checkpoint, options):
    """Random sequences in random slots and pages, cut into random runs of rows, in random order: each as if it were alone."""
    rng = np.random.default_rng(7)
    lengths = [1, 9, 33, 70]  # one token; several; most of a step; more than a page and than a step
    texts = [rng.integers(3, 256, n) for n in lengths]
    alone = []
    for ids in texts:
        be = backend(checkpoint, **options)
        open_slot(be, 0)
        alone.append(feed(be, 0, ids, [min(64, len(ids)), len(ids) - min(64, len(ids))][:1 + (len(ids) > 64)]))
    be = backend(checkpoint, **options)
    slots, pages = rng.permutation(4), rng.permutation(4 * PAGES_A_SLOT).reshape(4, PAGES_A_SLOT)
    for slot, own in zip(slots, pages):
        open_slot(be, slot, own)
    done, got = [0] * 4, [[] for _ in texts]
    while any(d < n for d, n in zip(done, lengths)):
        waiting = [i for i in rng.permutation(4) if done[i] < lengths[i]]
        room, parts = 64, []
        for i in waiting:
            n = int(min(room, lengths[i] - done[i], rng.integers(1, 24)))
            if n:
                parts.append((i, n))
                room -= n
        be.step(step_rows(*((int(slots[i]), done[i], texts[i][done[i]:done[i] + n]) for i, n in parts)))
        rows = np.split(be.logits().copy(), np.cumsum([n for _, n in parts])[:-1])
        be.commit(np.ones(sum(n for _, n in parts), bool))
        for (i, n), logits in zip(parts, rows):
            got[i].append(logits)
            done[i] += n
    for i, want in enumerate(alone):
        np.testing.assert_array_equal(np.concatenate(got[i]), want, err_msg=f"sequence of {lengths[i]} tokens")


def test_only_commit_advances_and_only_over_accepted_rows(checkpoint, gold):
    """Drafts that are not accepted leave no trace, whatever they were; the accepted prefix does, as if fed plainly."""
    ids = gold["input_ids"]
    plain = backend(checkpoint)
    open_slot(plain, 1)
    want = feed(plain, 1, ids)
    for wrong in (7, 200):  # two contents for the rejected rows
        be = backend(checkpoint)
        open_slot(be, 1)
        done, got = 0, []
        for keep, extra in [(3, 4), (1, 7), (0, 2), (5, 0), (7, 3)]:
            be.step(step_rows((1, done, [*ids[done:done + keep], *[wrong] * extra])))
            got.append(be.logits()[:keep].copy())
            be.commit(np.arange(keep + extra) < keep)
            done += keep
        assert done == len(ids)
        np.testing.assert_array_equal(np.concatenate(got), want)
        np.testing.assert_array_equal(be.arenas[0]["kda_state"][:, 1], plain.arenas[0]["kda_state"][:, 1])
        np.testing.assert_array_equal(be.arenas[0]["conv_state"][:, 1], plain.arenas[0]["conv_state"][:, 1])


def test_a_reopened_slot_is_empty(checkpoint, gold, run):
    be = backend(checkpoint)
    open_slot(be, 0)
    feed(be, 0, [9] * 20, [20])
    open_slot(be, 0, [6, 3])
    np.testing.assert_array_equal(feed(be, 0, gold["input_ids"]), run[1])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_touches_no_other(gold, bad):
    """One token's embedding is damaged. The sequences that do not hold it give the bytes they give alone."""
    poisoned = 77
    assert poisoned not in gold["input_ids"]

    class Damaged:
        def __init__(self, inner):
            self.inner, self.cfg = inner, inner.cfg

        def rank_slices(self, weight, layer, tp, rank):
            x = self.inner.rank_slices(weight, layer, tp, rank)
            if weight.name == "embed_tokens":
                x = np.array(x)
                x[poisoned, ::5] = bad
            return x

    clean = backend(Damaged(headdims()))
    open_slot(clean, 0)
    want = feed(clean, 0, gold["input_ids"], [16])
    be = backend(Damaged(headdims()))
    for slot in range(3):
        open_slot(be, slot)
    be.step(step_rows((1, 0, [5, poisoned, 6, 8]), (0, 0, gold["input_ids"]), (2, 0, [poisoned] * 9)))
    logits = be.logits()
    np.testing.assert_array_equal(logits[4:20], want)
    assert np.isfinite(logits[0]).all() and not np.isfinite(logits[1:4]).all(axis=1).any()


def test_padding_rows_are_no_rows(checkpoint):
    """A step of one row leaves every other slot's state and every other page as they were."""
    be = backend(checkpoint)
    for slot in range(4):
        open_slot(be, slot)
        feed(be, slot, [3 + slot, 4, 5], [3])
    before = {n: be.arenas[0][n].copy() for n in ("kda_state", "conv_state", "mla_cache")}
    feed(be, 2, [9], first=3)
    after = be.arenas[0]
    others = [0, 1, 3]
    np.testing.assert_array_equal(after["kda_state"][:, others], before["kda_state"][:, others])
    np.testing.assert_array_equal(after["conv_state"][:, others], before["conv_state"][:, others])
    changed = (after["mla_cache"] != before["mla_cache"]).any(axis=(0, 3))
    assert changed.sum() == 1 and changed[2 * PAGES_A_SLOT, 3]


def test_a_model_may_end_inside_a_page():
    checkpoint = MadeCheckpoint(made_config(max_position_embeddings=PAGE_SIZE + 36))
    assert NumpyBackend(checkpoint).max_model_len == NumpyBackend(checkpoint, max_model_len=PAGE_SIZE + 36).max_model_len == PAGE_SIZE + 36
    with pytest.raises(ConfigError, match="beyond the model's 100"):
        NumpyBackend(checkpoint, max_model_len=PAGE_SIZE + 37)


def test_low_rank_norms_have_an_eps_of_their_own():
    """Of values as small as its root: the goldens' are large, and 1e-5 in its place would move their logits by a millionth only."""
    small, rank = np.float32(1e-3), 4
    b = SimpleNamespace(mla_q_a=np.full((1, rank), small), mla_kv_a=np.full((1, rank + 2), small), mla_q_latent=np.zeros((1, rank), np.float32),
                        mla_cache=np.zeros((1, PAGE_SIZE, rank + 2), np.float32), row_slot=np.zeros(1, int), row_position=np.zeros(1, int),
                        page_table=np.zeros((1, 1), int))
    w = SimpleNamespace(mla_q_a_layernorm=np.ones(rank, np.float32), mla_kv_a_layernorm=np.ones(rank, np.float32))
    mla.mla_norm(SimpleNamespace(cfg=SimpleNamespace(kv_lora_rank=rank), num=Numerics(), dcp=1, place=0, sequences=lambda slots: [(0, slice(0, 1))]), w, b, None)
    assert np.allclose(b.mla_q_latent, 0.5**0.5) and np.allclose(b.mla_cache[0, 0], [0.5**0.5] * rank + [small] * 2)   # 1e-3 / sqrt(1e-6 + 1e-6)
