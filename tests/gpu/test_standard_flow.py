"""Steps that run ahead of the host, and the sampler, through the backend and the engine."""

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
pytest.importorskip("cupy", reason="CuPy holds the device's memory; install k3cuda[cu13] or k3cuda[cu12]")

from models import PAGES_A_SLOT, feed, golden, headdims, open_slot, step_rows  # noqa: E402
from standard import Cuda, alone, compile_ahead, same  # noqa: E402
from test_sample_core import near_boundary  # noqa: E402
from test_standard_state import Damaged  # noqa: E402

from k3cuda.config import PAGE_SIZE  # noqa: E402
from k3cuda.emit_sizes import ROW_BUCKETS  # noqa: E402
from k3cuda.errors import PlanError  # noqa: E402
from k3cuda.reference import sample as reference  # noqa: E402
from k3cuda.runtime import cuda_step_io  # noqa: E402
from k3cuda.runtime.backend import AS_SAMPLED, StepRows  # noqa: E402
from k3cuda.runtime.engine import Engine  # noqa: E402
from k3cuda.runtime.request import Request  # noqa: E402
from k3cuda.runtime.sampling import Draw, SamplingParams  # noqa: E402

VOCAB = 256
LAWS = [dict(temperature=0), dict(temperature=1.0), dict(temperature=0.7, top_p=0.9), dict(temperature=1.3, top_k=20, min_p=0.02),
        dict(temperature=1.0, frequency_penalty=0.8, presence_penalty=-0.5), dict(temperature=0, repetition_penalty=1.3),
        dict(temperature=1.5, top_p=0.8, repetition_penalty=0.7, logprobs=5)]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    compile_ahead((headdims().cfg, 1, ROW_BUCKETS, "bf16", True), (headdims().cfg, 2, (1, 2, 4, 8), "bf16", True))


@pytest.fixture
def be():
    made = Cuda(headdims())
    yield made
    made.close()


def resolved(**given):
    return SamplingParams(**given).resolved({})


# ---- the sampler ----

def test_what_the_backend_draws_is_the_references(be):
    rng, checked = np.random.default_rng(3), 0
    for size in (1, 5, 16, 40, 64):
        for slot in range(4):
            open_slot(be, slot)
        parts = [(slot, 0, rng.integers(3, VOCAB, n)) for slot, n in enumerate(np.diff([0, *sorted(rng.integers(0, size + 1, 3)), size])) if n]
        be.step(step_rows(*parts))
        draws = [Draw(resolved(**LAWS[i % len(LAWS)]), int(rng.integers(1 << 62)), int(rng.integers(1 << 20)), prompt_ids=rng.integers(0, VOCAB, 30),
                      output_ids=rng.integers(0, VOCAB, 50)) for i in range(size)]
        got, logits = be.sample(draws), be.logits()
        for d, drawn, row in zip(draws, got, logits):
            want = reference.sample_row(row, d)
            checked += 1
            if drawn.token_id != want.token_id:
                law = reference.law(reference.penalised(row, d.params, d.prompt_ids, d.output_ids), d.params)
                assert not d.params.greedy and near_boundary(law, reference.uniform(d.seed, d.position), drawn.token_id, want.token_id)
            elif d.params.logprobs is None:
                assert drawn == want
            else:
                assert [i for i, _ in drawn.top_logprobs] == [i for i, _ in want.top_logprobs] and abs(drawn.logprob - want.logprob) < 2e-5
        be.commit(np.ones(size, bool))
    assert checked == 126 and not be.counts.reasons


@pytest.mark.parametrize("what, reason", [("penalties", "penalties of more than 40 tokens"), ("vocabulary", "no kernel")])
def test_what_no_kernel_draws_is_drawn_on_the_host_and_counted(monkeypatch, what, reason):
    plain = answers(Cuda(headdims()), 7)
    if what == "penalties":
        monkeypatch.setattr(cuda_step_io, "MAX_PENALTIES", 40)
    else:
        monkeypatch.setattr(cuda_step_io, "no_sampler", lambda vocab: "sampled on the host: no kernel")
    backend = Cuda(headdims())
    assert [a[0] for a in answers(backend, 7)] == [a[0] for a in plain]
    assert any(reason in r and n > 5 for r, n in backend.counts.reasons.items())


# ---- ahead of the host ----

def generate(be, parts, laws, count, ahead):
    """Tokens of sequences (slot, ids) that all go on for `count` tokens; with `ahead`, from tokens that the host has not read."""
    out = [[] for _ in parts]
    rows = step_rows(*((slot, 0, ids) for slot, ids in parts))
    rows = StepRows(rows.token_ids, rows.slots, rows.positions, (np.cumsum([len(ids) for _, ids in parts]) - 1).astype(np.int32))
    pending = []

    def draws(step):
        known = max(step - 1, 0) if ahead else step   # tokens that the host has read
        return [Draw(resolved(**law), 11 + slot, len(ids) + step, prompt_ids=ids, output_ids=out[i][:known], after_sampled=ahead and step > 0)
                for i, ((slot, ids), law) in enumerate(zip(parts, laws))]

    def read(drawn):
        for tokens, d in zip(out, drawn):
            tokens.append(d.token_id)

    for step in range(count):
        if step:
            token = [AS_SAMPLED] * len(parts) if ahead else [tokens[-1] for tokens in out]
            rows = step_rows(*((slot, len(ids) + step - 1, [t]) for (slot, ids), t in zip(parts, token)))
        if ahead:
            pending.append(be.launch(rows, draws(step)))
            if step:
                read(pending[step - 1].drawn())
        else:
            be.step(rows)
            read(be.sample(draws(step)))
            be.commit(np.ones(len(rows), bool))
    if ahead:
        read(pending[-1].drawn())
    return out


@pytest.mark.parametrize("tp", [1, 2])
def test_steps_from_tokens_that_nobody_read(tp):
    """The same tokens, logits, states and cache as with the host between, whatever the law, in ragged batches; three runs identical."""
    rng = np.random.default_rng(5)
    parts = [(slot, rng.integers(3, VOCAB, n).tolist()) for slot, n in ((2, 1), (0, 5), (3, 2))]
    laws, seen = [LAWS[3], LAWS[4], LAWS[6]], []
    for ahead in (False, True, True, True):
        be = Cuda(headdims(), tp)
        for slot in range(4):
            open_slot(be, slot)
        tokens = generate(be, parts, laws, 24, ahead)
        left = [be.logits(), *(x for slot, _ in parts for x in be.states(slot)), be.on_host("mla_cache")]
        seen.append((tokens, left))
        be.close()
    assert len({t for tokens in seen[0][0] for t in tokens}) > 20, "these tokens say little"
    for tokens, left in seen[1:]:
        assert tokens == seen[0][0]
        same(left, seen[0][1])


class Plain(Cuda):
    overlaps = False


def answers(backend, count, **more):
    """(ids, finish reason) of so many requests that come one after the other, and close the backend."""
    rng, engine, ids, ends = np.random.default_rng(9), Engine(backend), {}, {}
    requests = [Request(str(i), rng.integers(3, VOCAB, 1 + 13 * i % 50).tolist(), resolved(seed=i, max_tokens=10 + 7 * i % 40, **LAWS[i % len(LAWS)] | more))
                for i in range(count)]
    steps = 0
    while requests or engine.has_work:
        if requests and steps % 3 == 0:
            engine.add(requests.pop(0))
        steps += 1
        for event in engine.step():
            ids.setdefault(event.request_id, []).extend(event.token_ids)
            if event.finish_reason:
                assert event.error is None, event.error
                ends[event.request_id] = event.finish_reason
    backend.close()
    return [(ids[str(i)], ends[str(i)]) for i in range(count)]


def test_the_engine_gives_the_same_ahead_or_not():
    """Ten requests on four slots, some of which meet a stop token that nobody could foresee; three runs identical."""
    free = answers(Plain(headdims()), 10)
    stops = tuple({ids[len(ids) // 2] for ids, _ in free[::3]})
    plain = answers(Plain(headdims()), 10, stop_token_ids=stops)
    assert sum(end == "stop" for _, end in plain) >= 4 and sum(end == "length" for _, end in plain) >= 1
    for _ in range(3):
        assert answers(Cuda(headdims()), 10, stop_token_ids=stops) == plain


def test_a_row_that_is_not_finite_ends_alone_and_its_slot_is_used_again():
    be = Cuda(Damaged(headdims(), np.nan))
    for slot in (0, 1):
        open_slot(be, slot)
    law = [Draw(resolved(temperature=0), 1, 0)] * 2
    first = be.launch(StepRows(*(np.array(x, np.int32) for x in ([5, 6, Damaged.token, 8], [0, 0, 1, 1], [0, 1, 0, 1], [1, 3]))), [
        Draw(d.params, 1, 2) for d in law])
    second = be.launch(step_rows((0, 2, [AS_SAMPLED]), (1, 2, [AS_SAMPLED])), [Draw(d.params, 1, 3) for d in law])
    assert [d.token_id is None for d in first.drawn()] == [d.token_id is None for d in second.drawn()] == [False, True]
    open_slot(be, 1)
    ids = golden()["input_ids"]
    same(feed(be, 1, ids), alone()[0])
    be.close()


def test_a_token_nobody_drew_and_tokens_nobody_kept(be):
    open_slot(be, 0)
    with pytest.raises(PlanError, match="no token was drawn for position 0"):
        be.step(step_rows((0, 0, [AS_SAMPLED])))
    law = resolved(temperature=0)
    first = be.launch(step_rows((0, 0, [4])), [Draw(law, 1, 1)])
    for position in (1, 2):
        be.launch(step_rows((0, position, [AS_SAMPLED])), [Draw(law, 1, position + 1)])
    with pytest.raises(PlanError, match="gone"):
        first.drawn()


# ---- graphs and the cache ----

def everything(be):
    be.stream.synchronize()
    return [x.get() for m in be.memories for x in (m.arena, *m.session.values(), m.mla_work)]


def test_loading_and_capturing_change_no_byte(be):
    open_slot(be, 1)
    feed(be, 1, golden()["input_ids"][:9], [9])
    before = everything(be)
    for bucket in ROW_BUCKETS:
        for what, half in (("step", None), ("commit", None), *(("launch", half) for half in be._io._halves)):
            be.graph(what, bucket, half)
    same(everything(be), before)


def test_another_cache_means_other_graphs(be):
    """Every graph holds addresses of the cache it was captured for; behind a new one none is left, and the bytes are the same."""
    want = alone()
    ids = golden()["input_ids"]
    for length in (PAGES_A_SLOT * PAGE_SIZE, 40 * PAGE_SIZE, PAGE_SIZE):
        be.bind_cache(length)
        assert not be._graphs and be.max_model_len == length and be.on_host("mla_cache").shape[1] == be.num_pages == 4 * length // PAGE_SIZE
        be.open_slot(1, [be.num_pages - 1])
        same(feed(be, 1, ids), want[0])
        same(be.states(1), want[1])
        be.open_slot(2, [0])
        be.launch(step_rows((2, 0, [4])), [Draw(resolved(temperature=0), 1, 1)]).drawn()
        assert len(be._graphs) >= 3
    be.open_slot(0, [2])
    feed(be, 0, [4] * PAGE_SIZE, [PAGE_SIZE])
    with pytest.raises(PlanError, match=f"slot 0: position {PAGE_SIZE} does not continue its {PAGE_SIZE} tokens of {PAGE_SIZE}"):
        be.step(step_rows((0, PAGE_SIZE, [4])))
