"""The engine with drafts, on a backend without a model: every request gives what it gives without them."""
import logging

import pytest
from engine_oracle import EOS, VOCAB, alone, drive, request
from fake_backend import FakeBackend
from fake_draft import Always, DraftingFake, options, right
from hypothesis import given, settings, strategies as st
from test_engine import parameters, prompts

from k3cuda.errors import NumericalError, UsageError
from k3cuda.reference import accept, sample
from k3cuda.runtime.engine import Engine
from k3cuda.runtime.sampling import SamplingParams


def run(requests, drafting=None, **backend):
    engine = Engine(DraftingFake(drafting or options(), **backend))
    for r in requests:
        engine.add(r)
    answers, last = drive(engine)
    assert engine.scheduler.free == (engine.scheduler.num_slots, engine.scheduler.num_pages)
    return answers, last, engine


def greedy(name, prompt=(3, 1), **given_):
    return request(name, list(prompt), temperature=0, **{"ignore_eos": True, "max_tokens": 30} | given_)


wrongs = st.one_of(st.just(Always()), st.builds(Always, st.integers(0, 6)), st.just(lambda tokens, k: [5] * k))
drafted = st.fixed_dictionaries({"num_drafts": st.integers(1, 7), "draft_rows": st.sampled_from(["block", "drafts"])})


# Text

@settings(deadline=None, max_examples=60)
@given(prompts, parameters, drafted, wrongs, st.sampled_from([4, 8, 64]))
def test_a_greedy_request_gives_what_it_gives_without_drafts(prompt, given_, drafting, say, max_rows):
    """Stops, limits, penalties and all, for any drafts."""
    r = request("r", prompt, **given_ | {"temperature": 0})
    drafting = options(**drafting)
    answers, _, engine = run([r], drafting, say=say, max_model_len=190, max_rows=max(max_rows, drafting.num_drafts + 1))
    assert answers["r"] == alone(prompt, r.params, context=190)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(prompts, parameters, st.sampled_from([None, 0, 2])), min_size=1, max_size=7), drafted, st.sampled_from(["standard", "block"]),
       st.sampled_from(["probabilistic", "greedy"]))
def test_a_request_gives_in_a_batch_what_it_gives_alone(specs, drafting, acceptance, draft_sampling):
    """Drawn tokens too, with drafts of any number or none beside each other."""
    requests = lambda: [request(str(i), prompt, **given_, num_drafts=None if n is None else min(n, drafting["num_drafts"])) for i, (prompt, given_, n) in enumerate(specs)]
    options_ = lambda: options(**drafting, acceptance=acceptance, draft_sampling=draft_sampling)
    together = run(requests(), options_(), max_model_len=190)[0]
    for i, r in enumerate(requests()):
        assert together[str(i)] == run([r], options_(), max_model_len=190, num_slots=1)[0][str(i)]
        if r.params.num_drafts == 0:
            assert together[str(i)] == alone(specs[i][0], r.params, context=190)


def test_drawn_drafts_are_accepted_now_and_then():
    """What the tests above run is no engine that always rejects."""
    for acceptance in ("standard", "block"):
        stats = run([request("r", [2, 7], max_tokens=200, ignore_eos=True)], options(acceptance=acceptance))[1]["r"].stats.speculative
        assert 1.3 < stats.acceptance_length < 7


@pytest.mark.parametrize("stops", [{"stop_token_ids": None}, {"ignore_eos": False}, {"stop": None}, {"max_tokens": None}], ids=lambda s: next(iter(s)))
@pytest.mark.parametrize("place", range(8))
def test_a_stop_inside_accepted_drafts_cuts_exactly_there(stops, place):
    """The stop is at each place of a step of 8 tokens; what the state holds afterwards is all tokens but the last one."""
    for start in range(40):   # a prompt after which `stop` is met first at the wanted place, behind one token and a whole step
        tokens = [start % VOCAB, start // 5 % VOCAB, 7]
        output = right(tokens, 30)
        token = output[9 + place]
        if token not in output[:9 + place] and token not in EOS and (token < 20 or "stop" not in stops):
            break
    given_ = {"stop_token_ids": (token,)} if "stop_token_ids" in stops else {"max_tokens": 10 + place} if "max_tokens" in stops else {}
    r = greedy("r", tokens, **given_)
    if "ignore_eos" in stops:
        r = type(r)("r", tokens, SamplingParams(temperature=0, max_tokens=30, seed=1).resolved({}), (token,), r.text)
    if "stop" in stops:
        text = alone(tokens, greedy("r", tokens, max_tokens=10 + place).params, context=500)[1]
        r = greedy("r", tokens, stop=(text[-5:],))
    want = alone(tokens, r.params, context=500, eos=r.eos_ids)
    answers, last, engine = run([r], say=Always())
    assert answers["r"] == want
    held, = engine.backend.slots.values()
    assert held.tokens == tokens + list(want[0])[:-1]


def test_the_context_limit_cuts_inside_drafts():
    for length in (30, 31, 64, 65):
        r = greedy("r", [1] * 10, max_tokens=None)
        answers, _, engine = run([r], say=Always(), max_model_len=length)
        assert len(answers["r"][0]) == length - 10 and answers["r"] == alone([1] * 10, r.params, context=length)


# Steps and counts

@pytest.mark.parametrize("k", range(1, 8))
@pytest.mark.parametrize("rows", ["block", "drafts"])
def test_an_always_right_draft_commits_k_plus_1_a_step(k, rows):
    answers, last, engine = run([greedy("r", max_tokens=1 + 5 * (k + 1))], options(k, draft_rows=rows), say=Always())
    assert engine.backend.row_counts == [2] + [k + 1] * 5   # the prompt, then whole steps
    s = last["r"].stats.speculative
    assert (s.k, s.steps, s.proposed, s.accepted, s.acceptance_rate, s.acceptance_length) == (k, 5, 5 * k, 5 * k, 1.0, k + 1)
    assert s.per_position == (1.0,) * k


@pytest.mark.parametrize("wrong", range(5))
def test_drafts_wrong_at_one_place(wrong):
    answers, last, engine = run([greedy("r", max_tokens=1 + 6 * (wrong + 1))], options(5), say=Always(wrong))
    s = last["r"].stats.speculative
    assert s.acceptance_length == wrong + 1 and s.per_position[:wrong] == (1.0,) * wrong and s.per_position[wrong:] == (0.0,) * (5 - wrong)


def test_the_last_steps_verify_no_more_than_can_be_kept():
    engine = run([greedy("r", max_tokens=12)], options(7), say=Always())[2]
    assert engine.backend.row_counts == [2, 8, 3] and engine.backend.asked == [1, 1]


def test_every_sequence_keeps_its_own_number_of_rows():
    """Four sequences, of which one drafts rightly, one wrongly, one fewer, one not at all."""
    plans = {(1,): Always(), (2,): Always(0), (3,): Always(), (4,): Always()}
    say = lambda tokens, k: plans[tuple(tokens[:1])](tokens, k)
    requests = [greedy(str(i), [i], max_tokens=33, num_drafts=n) for i, n in ((1, None), (2, None), (3, 2), (4, 0))]
    answers, last, engine = run(requests, options(7), say=say)
    for r in requests:
        assert answers[r.request_id] == alone(r.prompt_ids, r.params, context=512)
    speculative = [last[str(i)].stats.speculative for i in range(1, 5)]
    assert [s and s.acceptance_length for s in speculative] == [8, 1, pytest.approx(32 / 11), None]
    assert engine.backend.row_counts[1] == 8 + 8 + 3 + 1 and engine.backend.asked[0] == 3


def test_from_draft_marks_accepted_drafts_alone():
    _, last, _ = run([greedy("r", max_tokens=1 + 3)], options(7), say=Always(2))
    assert [d.from_draft for d in last["r"].drawn] == [True, True, False]


def test_synthetic_length_6_with_7_drafts_is_6_tokens_in_every_step():
    for say in (Always(), Always(0), None):
        _, last, engine = run([request("r", [2, 7], max_tokens=1 + 600, ignore_eos=True)], options(7, acceptance="synthetic", acceptance_length=6.0), say=say,
                              max_model_len=640)
        s = last["r"].stats.speculative
        assert (s.steps, s.acceptance_length) == (100, 6.0) and s.per_position == (1.0,) * 5 + (0.0,) * 2


def test_drafts_below_the_threshold_are_not_verified():
    sure = (0.9, 0.8, 0.3, 0.95, 0.9, 0.9, 0.9)
    _, last, engine = run([greedy("r", max_tokens=1 + 12)], options(7, confidence_threshold=0.5), say=Always(), sure=sure)
    assert engine.backend.row_counts == [2] + [3] * 4
    assert (last["r"].stats.speculative.proposed, last["r"].stats.speculative.acceptance_length) == (8, 3)
    _, last, engine = run([greedy("r", max_tokens=4)], options(7, confidence_threshold=0.95), say=Always(), sure=sure)
    assert (last["r"].stats.speculative.proposed, last["r"].stats.speculative.steps, last["r"].stats.speculative.acceptance_rate) == (0, 2, None)


@pytest.mark.parametrize("acceptance", ["standard", "block"])
def test_no_random_number_is_used_twice(monkeypatch, acceptance):
    """A position is proposed in several steps, and block verification looks at the numbers of drafts that it rejects."""
    used = []
    for module in (accept, sample):
        monkeypatch.setattr(module, "uniform", lambda *where, right=module.uniform: used.append(where) or right(*where))
    run([request(str(i), [i, 7], max_tokens=60, ignore_eos=True, seed=i) for i in range(3)], options(7, acceptance=acceptance))
    assert len(used) > 3 * 60 * 2 and len({(*where, 0)[:4] for where in used}) == len(used)


# Trouble

def test_a_draft_s_window_that_ends_before_the_answer_stops_speculation_with_one_warning(caplog):
    drafting = options(7, draft={"max_position_embeddings": 40})
    requests = [greedy(str(i), [i + 1] * 5, max_tokens=60) for i in range(2)]
    with caplog.at_level(logging.WARNING, "k3cuda"):
        answers, last, _ = run(requests, drafting, say=Always())
    for r in requests:
        assert answers[r.request_id] == alone(r.prompt_ids, r.params, context=512)
    assert [r.message for r in caplog.records] == ["from position 34 on requests go on without drafts: the draft model's context ends at 40"]
    assert last["0"].stats.speculative.steps == 4   # anchors at 5, 13, 21, 29; the next one would be 37


def test_a_window_shorter_than_the_prompt_never_drafts(caplog):
    answers, last, engine = run([greedy("r", [1] * 50, max_tokens=5)], options(7, draft={"max_position_embeddings": 40}), say=Always())
    assert engine.backend.asked == [] and last["r"].stats.speculative.acceptance_length is None and len(caplog.records) == 1


def test_more_drafts_than_the_model_was_opened_with_are_refused():
    engine = Engine(DraftingFake(options(3)))
    with pytest.raises(UsageError, match="num_drafts: found 4, the model was opened with 3"):
        engine.add(greedy("r", num_drafts=4))
    with pytest.raises(UsageError, match="num_drafts: found 1, but there is no draft model"):
        Engine(FakeBackend(VOCAB)).add(greedy("r", num_drafts=1))


def test_rows_that_are_not_finite_end_a_request_only_where_they_are_reached():
    prompt, good = [3, 1], right([3, 1], 40)
    bad = lambda tokens: tokens[:2] == prompt and len(tokens) > 2 and tokens[2:] != good[:len(tokens) - 2]   # only behind rejected drafts
    answers, last, _ = run([greedy("r", prompt), greedy("s", [4, 4])], say=Always(3), bad=bad)
    assert list(answers["r"][0]) == good[:30] and len(answers["s"][0]) == 30
    sick = lambda tokens: tokens == prompt + good[:12]
    answers, last, _ = run([greedy("r", prompt), greedy("s", [4, 4])], say=Always(), bad=sick)
    assert list(answers["r"][0]) == good[:12] and isinstance(last["r"].error, NumericalError) and "position 14" in str(last["r"].error)
    assert answers["s"] == alone([4, 4], greedy("s").params, context=512)


@pytest.mark.parametrize("call", range(12))
def test_a_failure_at_any_call_ends_what_ran_and_leaves_the_engine_usable(call):
    engine = Engine(DraftingFake(options(7), say=Always(), fail={call: RuntimeError("boom")}))
    engine.add(greedy("r", max_tokens=20))
    drive(engine)
    engine.backend.fail = {}
    engine.add(greedy("s"))
    answers, _ = drive(engine)
    assert answers["s"] == alone([3, 1], greedy("s").params, context=512)
    assert engine.scheduler.free == (engine.scheduler.num_slots, engine.scheduler.num_pages)
