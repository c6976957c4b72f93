"""Draft models beside the standard backend: the same text and the same states as without one, byte for byte, and the reference's decisions."""
import functools
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
pytest.importorskip("cupy", reason="CuPy holds the device's memory; install k3cuda[cu13] or k3cuda[cu12]")

from models import feed, headdims  # noqa: E402
from standard import STATES, Cuda, same  # noqa: E402

from k3cuda.buffers import BY_NAME  # noqa: E402
from k3cuda.config import PAGE_SIZE  # noqa: E402
from k3cuda.draft_plan import build_draft_plan  # noqa: E402
from k3cuda.errors import OutOfMemory, PlanError  # noqa: E402
from k3cuda.plan import build_plan  # noqa: E402
from k3cuda.reference.sample import draft_token  # noqa: E402
from k3cuda.runtime.backend import AS_DRAFTED, DraftAsk, StepRows  # noqa: E402
from k3cuda.runtime.cuda_driver import open_device  # noqa: E402
from k3cuda.runtime.cuda_kernels import compile_bucket  # noqa: E402
from k3cuda.runtime.drafting import Drafting  # noqa: E402
from k3cuda.runtime.engine import Engine  # noqa: E402
from k3cuda.runtime.made_draft import MadeDraft, made_draft_json  # noqa: E402
from k3cuda.runtime.request import Request  # noqa: E402
from k3cuda.runtime.sampling import SamplingParams  # noqa: E402

CFG = headdims().cfg
VOCAB, LENGTH, SLOTS = CFG.vocab_size, 640, 4
PROMPTS = [[5, 9, 14], [30], [7, 7, 80, 12, 3], list(range(40, 110))]


def drafting(num_drafts=7, family="mla", **given):
    changes = {"aux_hidden_stream": "attn_res"} if family == "mla" else {}
    return Drafting(MadeDraft(made_draft_json(CFG, family, **changes), CFG), num_drafts, **given)


KINDS = {"mla 7": (7, "mla", {}), "mla 4 of a block": (4, "mla", {}), "gqa 3 rows": (3, "gqa", {"draft_rows": "drafts"}), "mla 1": (1, "mla", {"draft_rows": "drafts"})}


STEPS, CONTEXTS = (1, 2, 4, 8, 16, 32, 128), (1, 2, 4, 8, 16, 32, 64)   # rows of steps and of a draft's that come up here


@functools.cache
def compile_kind(kind, tp=1, steps=STEPS, contexts=CONTEXTS):
    """All its kernels at the same time; with no kind those of steps without a draft."""
    device, jobs = open_device(), []
    if kind is None:
        jobs = [(build_plan(CFG, tp), rows) for rows in steps]
    else:
        k, family, given = KINDS[kind]
        d = drafting(k, family, **given)
        jobs = [(build_plan(CFG, tp, d.taps), rows) for rows in steps] + [(build_draft_plan(d.source.cfg, tp, k, d.block_rows), rows) for rows in contexts]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda job: compile_bucket(*job, "bf16", device.arch, sms=device.sms), jobs))


@pytest.fixture(scope="module", autouse=True)
def compiled():
    compile_kind("mla 7")
    compile_kind(None, steps=(1, 2, 4, 128))


def engine(drafting=None, tp=1, **options):
    return Engine(Cuda(headdims(), tp, **{"max_batch": SLOTS, "max_model_len": LENGTH} | options, drafting=drafting))


def add(e, i, max_tokens=30, **params):
    plain = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": i, "max_tokens": max_tokens, "ignore_eos": True}
    e.add(Request(str(i), PROMPTS[i], SamplingParams(**plain | params)))


def finish(e):
    """Output tokens of every request, its counts and its end."""
    ids, stats, ends = {}, {}, {}
    while e.has_work:
        for event in e.step():
            assert event.error is None, event.error
            ids.setdefault(event.request_id, []).extend(event.token_ids)
            if event.finish_reason:
                stats[event.request_id], ends[event.request_id] = event.stats.speculative, event.finish_reason
    e.close()
    return ids, stats, ends


@functools.cache
def plain(tokens=500, **params):
    e = engine()
    for i in range(SLOTS):
        add(e, i, tokens, **params)
    return finish(e)[0]


def oracle(e, patterns, text=None):
    """Drafts by request (its seed): None leaves the draft model's own; else `pattern(place, right token)`. `text`: the right tokens; None: those of one rank."""
    text = text or plain()
    known, propose = {i: PROMPTS[i] + text[str(i)] + [0] * 8 for i in range(SLOTS)}, e.backend.propose

    def say(asks):
        out = []
        for a, drafted in zip(asks, propose(asks)):
            pattern, behind = patterns[a.seed], known[a.seed][a.position + 1:]
            out.append(drafted if pattern is None else replace(drafted, token_ids=tuple(pattern(i, behind[i]) for i in range(len(drafted.token_ids)))))
        return out

    e.backend.propose = say


def right(place, token):
    return token


def wrong(place, token):
    return (token + 1 + place) % VOCAB


def right_but(at, off=1):
    return lambda place, token: (token + off * (place == at)) % VOCAB


def test_greedy_text_of_500_tokens_is_the_same_bytes_with_any_pattern_of_drafts():
    """A batch of four with drafts that are right, wrong, right but at one place, and right now and then."""
    e, rng = engine(drafting(7)), random.Random(1)
    oracle(e, [right, wrong, right_but(3), lambda place, token: token if rng.random() < 0.9 else 0])
    for i in range(SLOTS):
        add(e, i, 500)
    ids, stats, _ = finish(e)
    assert ids == plain()
    lengths = [stats[str(i)].acceptance_length for i in range(3)]
    assert lengths == [pytest.approx(499 / 63), 1.0, pytest.approx(4, rel=0.02)], "an always right draft commits k + 1 a step"


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_with_any_draft_and_any_k(kind):
    compile_kind(kind)
    k, family, given = KINDS[kind]
    e = engine(drafting(k, family, **given))
    oracle(e, [right_but(k // 2), None, right, wrong])
    for i in range(SLOTS):
        add(e, i, 60)
    ids, stats, _ = finish(e)
    assert ids == {i: tokens[:60] for i, tokens in plain().items()}
    found = stats["2"]
    assert found.accepted == found.proposed > 0 and found.steps <= -(-59 // (k + 1))
    assert not e.backend.counts.reasons


@pytest.mark.parametrize("family", ["mla", "gqa"])
def test_greedy_text_beside_a_cache_that_ranks_hold_together(family):
    """Contexts that go over pages of the draft's and of the target's, in slots whose pages were another's before."""
    texts = []
    for d in (None, drafting(3, family)):
        e = engine(d, tp=2, dcp=2)
        if d:
            oracle(e, [right, None, wrong, right_but(1)], texts[0])
        for i in range(SLOTS):
            add(e, i, 90)
        found, stats, _ = finish(e)
        texts.append(found)
    assert texts[0] == texts[1] and stats["0"].accepted == stats["0"].proposed > 60


def states(be, slot, length):
    """What later steps of a slot read, of target and draft, of the first rank."""
    be.stream.synchronize()
    memory, draft = be.memories[0], be.draft.memories[0]
    pages = memory.buffer("page_table")[slot].get()[:-(-length // PAGE_SIZE)]
    cached = lambda x: x.get()[:, pages].reshape(len(x), -1, *x.shape[3:])[:, :length]   # noqa: E731
    return [*(memory.buffer(n)[:, slot].get() for n in STATES), cached(memory.buffer("mla_cache")), cached(draft.buffer(f"{draft.plan.cfg.family}_cache"))]


@pytest.mark.parametrize("acceptance, temperature, k, family", [("standard", 1.0, 7, "mla"), ("block", 0.8, 7, "mla"), ("standard", 0.0, 3, "gqa")])
def test_states_after_random_steps_are_those_of_a_plain_run(acceptance, temperature, k, family):
    given = {"draft_rows": "drafts"} if family == "gqa" else {}
    compile_kind("gqa 3 rows" if family == "gqa" else "mla 7")
    d = drafting(k, family, acceptance=acceptance, draft_sampling="greedy", **given)   # the oracle's drafts were not drawn
    e, rng = engine(d), random.Random(k)
    oracle(e, [lambda place, token: token if rng.random() < 0.8 else rng.randrange(VOCAB)] * 3 + [None])
    for i in range(SLOTS):
        add(e, i, 300, temperature=temperature, top_k=3)
    for _ in range(14):
        e.step()
    assert any(s.speculation.accepted > 0 for s in e.scheduler.running) and any(s.speculation.accepted < s.speculation.proposed for s in e.scheduler.running)
    fresh = Cuda(headdims(), max_batch=1, max_model_len=LENGTH, drafting=d)
    for s in e.scheduler.running:
        assert len(s.tokens) == s.committed + 1
        fresh.open_slot(0, range(fresh.num_pages))
        feed(fresh, 0, s.tokens[:s.committed])
        same(states(e.backend, s.slot, s.committed), states(fresh, 0, s.committed))
    fresh.close()
    e.close()


def test_the_content_of_rejected_drafts_changes_nothing():
    results = []
    for off in (1, 77):
        e = engine(drafting(7))
        oracle(e, [right_but(2, off), right_but(0, off), right_but(6, off), right_but(4, off)])
        for i in range(SLOTS):
            add(e, i, 200)
        tokens = [[(x.request_id, x.token_ids) for x in e.step()] for _ in range(12)]
        results.append((tokens, [x for s in e.scheduler.running for x in states(e.backend, s.slot, s.committed)]))
        e.close()
    assert results[0][0] == results[1][0]
    same(results[1][1], results[0][1])


def test_stops_inside_a_run_of_accepted_drafts_cut_exactly_there():
    """A stop token, max_tokens and the context, each inside a run; the states are those at the cut."""
    tokens = plain()
    stop = next(t for n, t in enumerate(tokens["0"]) if n > 12 and t not in tokens["0"][:n])
    at = tokens["0"].index(stop)
    e = engine(drafting(7), max_model_len=128)
    oracle(e, [right] * SLOTS)
    add(e, 0, 100, stop_token_ids=(stop,))
    add(e, 1, 21)
    add(e, 3, None)
    ids, stats, ends = finish(e)
    assert ids == {"0": tokens["0"][:at + 1], "1": tokens["1"][:21], "3": tokens["3"][:128 - len(PROMPTS[3])]}
    assert ends == {"0": "stop", "1": "length", "3": "length"} and all(s.accepted > 0 for s in stats.values())


def decided(e):
    """Compares every decision of the device with the reference's for the logits that the device has; how many, and how many differ."""
    be, counts = e.backend, [0, 0]
    propose, accept = be.propose, be.accept

    def checked_propose(asks):
        found = propose(asks)
        logits, ids = be.draft.memories[0].buffer("draft_logits").get(stream=be.stream), be.draft.ids()
        for a in asks:
            place = be.draft.places[a.slot]
            want = [draft_token(row, a.temperature, a.seed, a.position + 1 + i, i) for i, row in enumerate(logits[:, place])]
            counts[0] += len(want)
            counts[1] += sum(t != int(i) for t, i in zip(want, ids[:, place]))
        return found

    def checked_accept(judges):
        found, want = accept(judges), be._accept._on_host(judges)
        counts[0] += len(found)
        counts[1] += sum([d.token_id for d in f.drawn] != [d.token_id for d in w.drawn] for f, w in zip(found, want))
        return found

    be.propose, be.accept = checked_propose, checked_accept
    return counts


@pytest.mark.parametrize("acceptance", ["standard", "block", "synthetic"])
@pytest.mark.parametrize("sampling", ["probabilistic", "greedy"])
def test_decisions_are_the_references_and_text_is_the_same_alone_and_in_a_batch(acceptance, sampling):
    """Four laws, and four numbers of drafts: the model's, fewer, none."""
    laws = [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "logprobs": 2}, {"temperature": 1.2, "top_k": 20}, {"temperature": 0.9, "min_p": 0.02}]
    drafts = (7, 3, 0, None)
    d = drafting(7, acceptance=acceptance, draft_sampling=sampling, acceptance_length=3.5 if acceptance == "synthetic" else None)
    e = engine(d)
    counts = decided(e)
    for i in range(SLOTS):
        add(e, i, 40, num_drafts=drafts[i], **laws[i])
    together, stats, _ = finish(e)
    assert counts[0] > 200 and counts[1] <= 1   # NumPy's exp and the device's may part at a boundary
    assert not e.backend.counts.reasons and stats["0"].proposed > 0
    for i in range(SLOTS):
        e = engine(d)
        add(e, i, 40, num_drafts=drafts[i], **laws[i])
        assert finish(e)[0][str(i)] == together[str(i)]
    e = engine()
    add(e, 2, 40, **laws[2])
    assert finish(e)[0]["2"] == together["2"], "a request without drafts gives what it gives without a draft model"


def test_drafts_that_the_host_reads_are_the_same():
    """A threshold of 0 keeps all drafts, and so do penalties that do nothing: but then the host must know them."""
    runs = []
    for d, params in ((drafting(7), {}), (drafting(7, confidence_threshold=0.0), {}), (drafting(7), {"presence_penalty": 1e-30})):
        e = engine(d)
        seen, propose = set(), e.backend.propose
        e.backend.propose = lambda asks: [seen.update(i <= AS_DRAFTED for i in f.token_ids) or f for f in propose(asks)]   # noqa: B023
        for i in range(SLOTS):
            add(e, i, 50, temperature=(0.0, 1.0)[i % 2], **params)
        runs.append((finish(e)[:2], seen))
    assert runs[0][0] == runs[1][0] == runs[2][0] and [seen for _, seen in runs] == [{True}, {False}, {False}]


def test_synthetic_acceptance_of_length_six_is_six_tokens_in_every_step():
    e = engine(drafting(7, acceptance_length=6.0))
    for i in range(SLOTS):
        add(e, i, 61)
    _, stats, _ = finish(e)
    assert [(s.steps, s.acceptance_length) for s in stats.values()] == [(10, 6.0)] * SLOTS


def test_virtual_ranks_draft_the_same():
    runs = []
    compile_kind("gqa 3 rows", 2, (1, 2, 4, 8), (1, 2, 4, 8))
    for tp in (1, 2):
        e = engine(drafting(3, "gqa", draft_rows="drafts"), tp)
        add(e, 0, 30)
        add(e, 1, 30, temperature=0.9)
        runs.append(finish(e)[:2])
    assert runs[0] == runs[1]


def test_a_copied_slot_has_its_draft_context():
    be = Cuda(headdims(), max_batch=SLOTS, max_model_len=LENGTH, drafting=drafting(7))
    pages = be.num_pages // SLOTS
    be.open_slot(0, range(pages))
    feed(be, 0, PROMPTS[3], [64, 6])
    be.copy_slot(0, 2, (0, *range(2 * pages, 3 * pages - 1)))
    a, b = (be.propose([DraftAsk(slot, 3, 70, 1, 1.0)])[0] for slot in (0, 2))
    assert a == b and len(a.token_ids) == 7
    same(states(be, 2, 70), states(be, 0, 70))
    be.close()


def test_drafts_of_an_earlier_proposal_are_nobodys():
    be = Cuda(headdims(), max_batch=SLOTS, max_model_len=LENGTH, drafting=drafting(7))
    be.open_slot(0, range(2))
    old = be.propose([DraftAsk(0, 3, 0, 1, 1.0, is_read=False)])[0].token_ids
    be.propose([DraftAsk(0, 3, 0, 1, 1.0)])
    with pytest.raises(PlanError, match="stands for no draft of the last proposal"):
        be.step(StepRows(*(np.array(x, np.int32) for x in ([3, old[0]], [0, 0], [0, 1], [0, 1]))))
    be.close()


def test_what_fits_beside_a_draft_fits():
    """The longest context under a limit is taken, spare positions and all; a longer one is refused with that number."""
    limit, d = 700 << 20, drafting(7)
    made = Cuda(headdims(), max_batch=2, max_model_len=None, memory_limit=limit, drafting=d)
    fits = made.max_model_len
    assert 1 <= fits and made.num_pages * PAGE_SIZE >= 2 * (fits + d.spare_positions)
    made.close()
    alone = Cuda(headdims(), max_batch=2, max_model_len=None, memory_limit=limit)   # under the same limit, so one behind the other
    assert fits <= alone.max_model_len
    alone.close()
    if fits < CFG.max_position_embeddings:
        with pytest.raises(OutOfMemory, match=f"with the draft model.*\n?.*at most {fits}"):
            Cuda(headdims(), max_batch=2, max_model_len=fits + PAGE_SIZE, memory_limit=limit, drafting=d)


def test_buffers_of_taps_are_lent():
    be = Cuda(headdims(), max_batch=SLOTS, max_model_len=LENGTH, drafting=drafting(7))
    be.open_slot(0, range(2))
    feed(be, 0, [4, 5], [2])
    taps = be.buffer("taps")
    assert taps.shape[1:] == (BY_NAME["taps"].shape and len(drafting(7).source.cfg.target_layer_ids), CFG.hidden_size) and float(abs(taps[:2].astype(np.float32)).max()) > 0
    be.close()
