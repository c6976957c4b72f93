"""The draft's forward pass against the golden, and what its state must never show."""
from dataclasses import replace

import numpy as np
import pytest
from draft_oracle import Oracle
from drafts import Alone, ask, golden, made, open_golden, random_taps
from models import backend, golden as target_golden, headdims, open_slot, relative, step_rows

from k3cuda.reference import sample
from k3cuda.reference.accept import log_softmax_at
from k3cuda.reference.sample import draft_token
from k3cuda.runtime.drafting import Drafting
from k3cuda.runtime.made_draft import MadeDraft, made_draft_json

LIMIT = 1e-5  # asked; F32 against F64 stays far below it
INPUTS, WANT = golden()
LENGTHS = (21, 4)


def run(alone, r, pieces=None, temperature=0.0):
    """Round `r` of the golden: context rows in `pieces`, then a block; what every stage left, by buffer name."""
    start = sum(LENGTHS[:r])
    seen = {}

    def observe(op, arenas):
        for name in op.stage.outputs:
            if name in ("context", "head_in", "logits_part"):
                seen[name] = arenas[0][name].copy()

    taps, done = INPUTS[f"round{r}.taps"], 0
    for n in pieces or (len(taps),):
        alone.commit(0, start + done, taps[done:done + n], observe=observe)
        done += n
    drafted, = alone.draft.propose([ask(anchor=int(INPUTS[f"round{r}.anchor"][0]), position=start + len(taps), temperature=temperature)], observe)
    return seen, drafted


@pytest.mark.parametrize("tp", [1, 2])
def test_golden(tp):
    alone, done = open_golden(tp=tp), 0
    for r, n in enumerate(LENGTHS):
        seen, drafted = run(alone, r)
        want = {name.removeprefix(f"round{r}."): x for name, x in WANT.items() if name.startswith(f"round{r}.")}
        assert relative(seen["context"][:n], want["fused"]) < LIMIT
        for layer in range(2):
            assert relative(alone.cache(0)[layer, done:done + n], want[f"context_kv.{layer}"]) < LIMIT
        assert relative(seen["head_in"][:7], want["hidden"]) < LIMIT
        if tp == 1:
            assert relative(seen["logits_part"][:7], want["base_logits"]) < LIMIT
        assert relative(alone.draft.logits(0), want["greedy.logits"]) < LIMIT
        assert drafted.token_ids == tuple(want["greedy.tokens"])
        logit = np.log(drafted.confidence) - np.log1p(-np.array(drafted.confidence))
        assert relative(logit, want["greedy.confidence_logits"]) < LIMIT
        done += n


def test_golden_draws(monkeypatch):
    """The same blocks with drafts that are drawn, by the golden's dice: other tokens bring other biases."""
    alone, temperature = open_golden(), float(INPUTS["temperature"][0])
    for r, n in enumerate(LENGTHS):
        dice = INPUTS[f"round{r}.u_draft"]
        monkeypatch.setattr(sample, "uniform", lambda seed, position, stream, index, dice=dice: np.float32(dice[index]))
        drafted = run(alone, r, temperature=temperature)[1]
        want = {name.removeprefix(f"round{r}."): x for name, x in WANT.items() if name.startswith(f"round{r}.")}
        assert drafted.token_ids == tuple(want["sampled.tokens"]) != tuple(want["greedy.tokens"])
        assert relative(alone.draft.logits(0), want["sampled.logits"]) < LIMIT
        assert relative(np.exp([log_softmax_at(z, temperature) for z in alone.draft.logits(0)]), want["sampled.probs"]) < LIMIT


# Every kind of draft against a second implementation of the equations

SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "use_sliding_window": True}
SITU = {"mla_use_nope": True, "mla_use_output_gate": True, "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
        "rope_parameters": None}
PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
KINDS = {
    "mla": ("mla", {}, 7), "mla-3-rows": ("mla", {}, 3), "mla-causal": ("mla", {"is_causal": True, "block_size": 5}, 5), "mla-fc-norm": ("mla", {"fc_norm": True}, 7),
    "mla-nope-gate-situ": ("mla", SITU, 7), "mla-no-yarn": ("mla", PLAIN_ROPE, 7), "mla-no-confidence": ("mla", {"enable_confidence_head": False}, 7),
    "gqa": ("gqa", {}, 7), "gqa-8-rows": ("gqa", {"block_size": 8}, 8), "gqa-sliding": ("gqa", SLIDING, 7), "gqa-no-yarn": ("gqa", PLAIN_ROPE, 7),
    "gqa-sliding-both-ways": ("gqa", SLIDING | {"sliding_window_non_causal": True}, 7), "gqa-plain-confidence": ("gqa", {"confidence_head_with_markov": False}, 7),
    "gqa-behind-the-anchor": ("gqa", {"sample_from_anchor": False, "block_size": 8}, 8),
}


@pytest.mark.parametrize("family, changes, rows", KINDS.values(), ids=KINDS)
def test_second_implementation(family, changes, rows):
    source = made(family, changes)
    taps, alone = random_taps(source.cfg, 23), Alone(source, rows=rows, num_drafts=rows - source.cfg.first_row, num=None)
    alone.commit(0, 0, taps)
    drafted, = alone.draft.propose([ask(anchor=5, position=23)])
    tokens, logits, sure = Oracle(source).greedy(taps, 5, rows, rows - source.cfg.first_row)
    assert relative(alone.draft.logits(0), logits) < LIMIT
    assert drafted.token_ids == tuple(tokens)
    assert (drafted.confidence is None) == (sure is None)
    if sure:
        np.testing.assert_allclose(drafted.confidence, sure, rtol=1e-5)


@pytest.mark.parametrize("family", ["mla", "gqa"])
@pytest.mark.parametrize("change", ["causal", "windows", "rope", "first_row"])
def test_the_second_implementation_can_fail(family, change):
    """What is not visible in shapes changes the logits by far more than the limit."""
    source = made(family, {})
    other = {"causal": (True, True), "windows": (4, 4), "rope": replace(source.cfg.rope, interleaved=not source.cfg.rope.interleaved), "first_row": 1}[change]
    taps, alone = random_taps(source.cfg, 23), Alone(source, num_drafts=6)
    alone.commit(0, 0, taps)
    alone.draft.propose([ask(anchor=5, position=23)])
    source.cfg = replace(source.cfg, **{change: other})
    got = Alone(source, num_drafts=6)
    got.commit(0, 0, taps)
    got.draft.propose([ask(anchor=5, position=23)])
    assert relative(got.draft.logits(0), alone.draft.logits(0)) > 1e-3


# State

@pytest.mark.parametrize("family", ["mla", "gqa"])
def test_context_in_pieces_and_beside_others_gives_the_same_bytes(family):
    source = made(family, SLIDING if family == "gqa" else {})
    taps = [random_taps(source.cfg, 70, seed) for seed in range(2)]
    one, two = Alone(source, slots=2), Alone(source, slots=2)
    one.commit(0, 0, taps[0][:64])
    one.commit(0, 64, taps[0][64:])
    first, = one.draft.propose([ask(0, 9, 70, seed=3, temperature=1.0)])
    logits = one.draft.logits(0).copy()
    for slot, pieces in ((1, (30, 34, 6)), (0, (1, 5, 58, 6))):
        done = 0
        for n in pieces:
            two.commit(slot, done, taps[slot][done:done + n])
            done += n
    both = two.draft.propose([ask(1, 4, 70, seed=8, temperature=0.5), ask(0, 9, 70, seed=3, temperature=1.0)])
    assert both[1] == first and np.array_equal(two.draft.logits(0), logits)
    assert both[0].token_ids != first.token_ids


@pytest.mark.parametrize("family", ["mla", "gqa"])
def test_block_rows_and_rejected_rows_leave_no_trace(family):
    source, name = made(family, {}), f"{family}_cache"
    taps = random_taps(source.cfg, 30)
    clean, used = Alone(source), Alone(source)
    clean.commit(0, 0, taps)
    used.commit(0, 0, taps[:20])
    used.draft.propose([ask(anchor=3, position=20)])
    noise = np.concatenate([taps[20:22], random_taps(source.cfg, 5, seed=9)])
    used.commit(0, 20, noise, accepted=2)
    used.draft.propose([ask(anchor=4, position=22, temperature=1.0)])
    used.commit(0, 22, taps[22:])
    assert np.array_equal(used.cache(0, name)[:, :30], clean.cache(0, name)[:, :30])
    results = [alone.draft.propose([ask(anchor=8, position=30)])[0] for alone in (clean, used)]
    assert results[0] == results[1]


def test_drafts_behind_logits_that_are_not_finite_are_dropped():
    alone = Alone(made("mla", {}), slots=2)
    for slot in range(2):
        alone.commit(slot, 0, random_taps(alone.draft.cfg, 5))
    alone.draft.program.weights[0][None]["markov_w1"][7] = np.nan   # the embedding of one anchor
    sick, well = alone.draft.propose([ask(0, 7, 5), ask(1, 8, 5)])
    assert sick.token_ids == () and len(well.token_ids) == 7


def test_positions_behind_the_draft_s_limit_get_no_context():
    source = made("mla", {"max_position_embeddings": 12})
    alone = Alone(source)
    alone.commit(0, 0, random_taps(source.cfg, 20))
    rows = alone.cache(0)[0]
    assert rows[:12].any(-1).all() and not rows[12:].any()


@pytest.mark.parametrize("family", ["mla", "gqa"])
def test_virtual_ranks(family):
    source = made(family, {"num_key_value_heads": 4} if family == "gqa" else {})
    taps, results = random_taps(source.cfg, 20), []
    for tp in (1, 2, 4):
        alone = Alone(source, tp=tp)
        alone.commit(0, 0, taps)
        drafted, = alone.draft.propose([ask(anchor=5, position=20, seed=1, temperature=1.0)])
        results.append((drafted.token_ids, alone.draft.logits(0).copy()))
        for arena in alone.draft.program.arenas:
            assert np.array_equal(arena["draft_ids"], alone.arena["draft_ids"])
    for ids, logits in results[1:]:
        assert ids == results[0][0] and relative(logits, results[0][1]) < LIMIT


def test_draws_follow_the_law_of_the_draft():
    """Tokens of 4,000 seeds against softmax(logits / T), in float64."""
    logits = np.random.default_rng(3).normal(size=24).astype(np.float32) * 2
    drawn = [draft_token(logits, 0.7, seed, 6, 0) for seed in range(4000)]
    want = 4000 * np.exp(np.float64(logits) / 0.7) / np.exp(np.float64(logits) / 0.7).sum()
    counts, large = np.bincount(drawn, minlength=24), want > 5
    chi = ((counts - want)[large] ** 2 / want[large]).sum() + (counts[~large].sum() - want[~large].sum()) ** 2 / max(want[~large].sum(), 1)
    assert chi < 58   # 24 degrees of freedom at most, 1 in 10,000
    assert draft_token(logits, 0, 1, 6, 0) == logits.argmax()
    assert len({draft_token(logits, 2.0, 1, 6, i) for i in range(20)}) > 1, "drafts of one position in several steps need numbers of their own"


# Taps of the target

def tapped(layers, stream, **target):
    """(taps by layer, what other buffers held) of a step over the golden's tokens, from the target with such a draft."""
    source = headdims()
    be = backend(source, **target, drafting=Drafting(MadeDraft(made_draft_json(source.cfg, target_layer_ids=layers, aux_hidden_stream=stream), source.cfg)))
    open_slot(be, 0)
    seen = {}

    def observe(op, arenas):
        for name in ("attn_in", "head_in"):
            if name in op.stage.outputs:
                seen[name, op.layer] = arenas[0][name][:16].copy()

    ids = target_golden()["input_ids"]
    be.step(step_rows((0, 0, ids)), observe)
    return {layer: be.buffer("taps")[:16, i].copy() for i, layer in enumerate(layers)}, seen, source


@pytest.mark.parametrize("tp", [1, 2])
def test_prefix_taps_are_the_sums_behind_the_layers(tp):
    taps, _, _ = tapped([0, 1, 2, 3], "prefix", tp=tp)
    for layer, tap in taps.items():
        assert relative(tap, target_golden()["layer_out"][:, layer]) < LIMIT


def test_attn_res_taps_are_what_the_next_layer_norms():
    taps, seen, source = tapped([0, 1, 2, 3], "attn_res")
    for layer, tap in taps.items():
        where = ("attn_in", layer + 1) if layer < 3 else ("head_in", None)
        weight = np.float32(source.read("input_layernorm", layer + 1) if layer < 3 else source.read("final_norm"))
        normed = tap / np.sqrt((tap * tap).mean(-1, keepdims=True) + np.float32(source.cfg.rms_norm_eps)) * weight
        assert relative(normed, seen[where]) < 1e-6
        assert relative(tap, target_golden()["layer_out"][:, layer]) > 0.1, "the two streams differ by far more than rounding"


def test_taps_change_nothing_in_the_step():
    ids, logits = target_golden()["input_ids"], []
    for drafting in (None, Drafting(MadeDraft(made_draft_json(headdims().cfg, aux_hidden_stream="attn_res"), headdims().cfg))):
        be = backend(headdims(), drafting=drafting)
        open_slot(be, 0)
        be.step(step_rows((0, 0, ids)))
        logits.append(be.logits().copy())
    assert np.array_equal(*logits)
