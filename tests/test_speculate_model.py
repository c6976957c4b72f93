"""Speculation on the reference: the same tokens and the same states as without it, bit for bit."""
import functools
import random

import numpy as np
import pytest
from models import feed, open_slot

from k3cuda.config import PAGE_SIZE
from k3cuda.runtime.backend import DraftAsk
from k3cuda.runtime.drafting import Drafting
from k3cuda.runtime.engine import Engine
from k3cuda.runtime.made_config import made_config
from k3cuda.runtime.made_draft import MadeDraft, made_draft_json
from k3cuda.runtime.made_model import MadeCheckpoint
from k3cuda.runtime.numpy_backend import NumpyBackend
from k3cuda.runtime.request import Request
from k3cuda.runtime.sampling import SamplingParams

SMALL = made_config(vocab_size=160, num_attention_heads=2, num_hidden_layers=2, full_attn_layers=[2], kda_layers=[1], num_experts=4,
                    num_experts_per_token=2, moe_intermediate_size=64, intermediate_size=64, attn_res_block_size=2)
GREEDY = SamplingParams(temperature=0, top_p=1.0, top_k=0, min_p=0.0)
PROMPTS = [[5, 9, 14], [30], [7, 7, 80, 12, 3], list(range(40, 110))]


def checkpoint():
    return MadeCheckpoint(SMALL, seed=2)


def drafting(num_drafts=7, family="mla", **given):
    changes = {"aux_hidden_stream": "attn_res"} if family == "mla" else {"num_key_value_heads": 2}
    return Drafting(MadeDraft(made_draft_json(SMALL, family, num_hidden_layers=1, **changes), SMALL), num_drafts, **given)


def engine(drafting=None, tp=1, max_model_len=640, max_batch=4):
    return Engine(NumpyBackend(checkpoint(), tp, max_batch=max_batch, max_model_len=max_model_len, drafting=drafting))


def add(e, i, max_tokens=30, **params):
    e.add(Request(str(i), PROMPTS[i], SamplingParams(**{"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": i, "max_tokens": max_tokens} | params)))


def finish(e):
    """Output tokens of every request and its counts."""
    ids, stats = {}, {}
    while e.has_work:
        for event in e.step():
            assert event.error is None, event.error
            ids[event.request_id] = ids.get(event.request_id, []) + list(event.token_ids)
            stats[event.request_id] = event.stats or stats.get(event.request_id)
    return ids, stats


@functools.cache
def plain(tokens, **params):
    e = engine()
    for i in range(4):
        add(e, i, tokens)
    return finish(e)[0]


def oracle(e, patterns):
    """Drafts by request (its seed): None leaves the draft model's own; else `pattern(place, right token)`."""
    known, propose = {i: PROMPTS[i] + plain(500)[str(i)] + [0] * 8 for i in range(4)}, e.backend.propose

    def say(asks):
        own = propose(asks)
        out = []
        for a, drafted in zip(asks, own):
            pattern, behind = patterns[a.seed], known[a.seed][a.position + 1:]
            ids = drafted.token_ids if pattern is None else tuple(pattern(i, behind[i]) for i in range(len(drafted.token_ids)))
            out.append(type(drafted)(ids, drafted.confidence))
        return out

    e.backend.propose = say


def right(place, token):
    return token


def wrong(place, token):
    return (token + 1 + place) % SMALL.vocab_size


def right_but(at, off=1):
    return lambda place, token: (token + off * (place == at)) % SMALL.vocab_size


def test_greedy_text_of_500_tokens_is_the_same_bytes_with_any_pattern_of_drafts():
    """A batch of four with drafts that are right, wrong, right but at one place, and right now and then."""
    e, rng = engine(drafting(3, draft_rows="drafts")), random.Random(1)
    oracle(e, [right, wrong, right_but(1), lambda place, token: token if rng.random() < 0.9 else 0])
    for i in range(4):
        add(e, i, 500)
    ids, stats = finish(e)
    assert ids == plain(500)
    lengths = [stats[str(i)].speculative.acceptance_length for i in range(3)]
    assert lengths == [pytest.approx(499 / 125), 1.0, pytest.approx(2, rel=0.01)]


@pytest.mark.parametrize("family, k, rows", [("mla", 1, "drafts"), ("mla", 4, "drafts"), ("mla", 4, "block"), ("gqa", 3, "drafts"), ("gqa", 3, "block"), ("gqa", 7, "block")])
def test_greedy_text_with_any_draft_and_any_k(family, k, rows):
    e = engine(drafting(k, family, draft_rows=rows))
    oracle(e, [right_but(k // 2), None, right, wrong])
    for i in range(4):
        add(e, i, 40)
    ids, stats = finish(e)
    assert ids == {i: tokens[:40] for i, tokens in plain(500).items()}
    right_ones = stats["2"].speculative
    assert right_ones.accepted == right_ones.proposed > 0 and right_ones.steps <= -(-39 // (k + 1))


def states(e, slot, length):
    """What later steps of a slot read, of target and draft."""
    arena, draft = e.backend.arenas[0], e.backend.draft.program.arenas[0]
    pages = arena["page_table"][slot][:-(-length // PAGE_SIZE)]
    assert np.array_equal(pages, draft["page_table"][slot][:len(pages)])
    cached = lambda x: x[:, pages].reshape(len(x), -1, *x.shape[3:])[:, :length].copy()
    return {"kda_state": arena["kda_state"][:, slot].copy(), "conv_state": arena["conv_state"][:, slot].copy(), "mla_cache": cached(arena["mla_cache"]),
            "draft": cached(draft["mla_cache"])}


@pytest.mark.parametrize("acceptance, temperature, k", [("standard", 1.0, 7), ("block", 0.8, 5), ("standard", 0.0, 3)])
def test_states_after_random_steps_are_those_of_a_plain_run(acceptance, temperature, k):
    e, rng = engine(drafting(k, acceptance=acceptance)), random.Random(k)
    oracle(e, [lambda place, token: token if rng.random() < 0.8 else rng.randrange(160)] * 3 + [None])
    for i in range(4):
        add(e, i, 300, temperature=temperature, logprobs=None, top_k=3)
    e.backend.drafting = drafting(k, acceptance=acceptance, draft_sampling="greedy")   # the oracle's drafts were not drawn
    e._speculator.drafting = e.backend.drafting
    for _ in range(12):
        e.step()
    assert any(s.speculation.accepted > 0 for s in e.scheduler.running) and any(s.speculation.accepted < s.speculation.proposed for s in e.scheduler.running)
    for s in e.scheduler.running:
        assert len(s.tokens) == s.committed + 1
        fresh = engine(drafting(k), max_batch=1)
        open_slot(fresh.backend, 0, range(fresh.backend.num_pages))
        feed(fresh.backend, 0, s.tokens[:s.committed])
        got, want = states(e, s.slot, s.committed), states(fresh, 0, s.committed)
        for name in want:
            assert np.array_equal(got[name], want[name]), name


def test_the_content_of_rejected_drafts_changes_nothing():
    results = []
    for off in (1, 77):
        e = engine(drafting())
        oracle(e, [right_but(2, off), right_but(0, off), right_but(6, off), right_but(4, off)])
        for i in range(4):
            add(e, i, 200)
        tokens = [e.step() for _ in range(12)]
        results.append(([[(x.request_id, x.token_ids) for x in step] for step in tokens], [states(e, s.slot, s.committed) for s in e.scheduler.running]))
    for tokens, each in results[1:]:
        assert tokens == results[0][0]
        for got, want in zip(each, results[0][1], strict=True):
            assert all(np.array_equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("acceptance, sampling", [("standard", "probabilistic"), ("block", "greedy")])
def test_drawn_text_is_the_same_alone_and_in_a_batch(acceptance, sampling):
    d = lambda: drafting(5, "gqa", acceptance=acceptance, draft_sampling=sampling)
    e = engine(d())
    for i in range(4):
        add(e, i, 15, temperature=1.0, num_drafts=(5, 3, 0, None)[i])
    together = finish(e)[0]
    for i in range(4):
        e = engine(d())
        add(e, i, 15, temperature=1.0, num_drafts=(5, 3, 0, None)[i])
        assert finish(e)[0][str(i)] == together[str(i)]
    e = engine()
    add(e, 2, 15, temperature=1.0)
    assert finish(e)[0]["2"] == together["2"], "a request without drafts gives what it gives without a draft model"


def test_virtual_ranks_draft_the_same():
    runs = []
    for tp in (1, 2):
        e = engine(drafting(3, "gqa"), tp)
        add(e, 0, 20)
        add(e, 1, 20, temperature=0.9)
        runs.append(finish(e)[0])
    assert runs[0] == runs[1]


def test_a_copied_slot_has_its_draft_context():
    be = engine(drafting()).backend
    pages = be.num_pages // 4
    open_slot(be, 0, range(pages))
    feed(be, 0, PROMPTS[3], [64, 6])
    be.copy_slot(0, 2, (0, *range(2 * pages, 3 * pages - 1)))
    a, b = (be.propose([DraftAsk(slot, 3, 70, 1, 1.0)])[0] for slot in (0, 2))
    assert a == b and len(a.token_ids) == 7
