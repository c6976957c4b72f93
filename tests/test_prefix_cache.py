"""Stored prefixes: the answers are those without them, whatever is stored, shared, evicted or in the way; and they are used."""
import numpy as np
import pytest
from engine_oracle import VOCAB, collect, drive, request
from fake_backend import FakeBackend
from hypothesis import given, settings, strategies as st
from models import HEADDIMS
from prefix_cases import same_bytes_with_and_without
from scripted import fake  # noqa: F401, the fixture
from test_speculate_model import PROMPTS, checkpoint, drafting, finish

from k3cuda.config import PAGE_SIZE
from k3cuda.errors import OutOfMemory
from k3cuda.runtime.engine import Engine
from k3cuda.runtime.numpy_backend import NumpyBackend
from k3cuda.runtime.request import Request
from k3cuda.runtime.sampling import SamplingParams


def made(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def engine_with(prefix_cache=3, num_slots=3, **backend) -> Engine:
    return Engine(FakeBackend(VOCAB, num_slots=num_slots + prefix_cache, **backend), prefix_cache=prefix_cache)


def answer(engine, name, prompt, **params):
    """(ids, text, finish_reason, stop_reason) and the stats of one request alone."""
    engine.add(request(name, prompt, **params))
    answers, last = drive(engine)
    return answers[name], last[name].stats


def check_released(engine):
    """Slots are free; pages are, once nothing is stored."""
    slots, _ = engine.scheduler.free
    assert slots == engine.scheduler.num_slots and len(engine.prefixes._free_slots) + len(engine.prefixes) == engine.backend.num_slots - slots
    engine.prefixes.clear()
    assert engine.scheduler.free == (slots, engine.scheduler.num_pages) and not any(engine.scheduler._holders)


# A text is pieces of a few long ones, so that many begin alike and part anywhere.
PIECES = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1, 7, 63, 64, 65, 100, 128])), min_size=1, max_size=3)
ARRIVALS = st.lists(st.tuples(PIECES, st.sampled_from([1, 5, 70, 140]), st.integers(0, 30), st.booleans()), min_size=1, max_size=8)


@settings(max_examples=25, deadline=None)
@given(arrivals=ARRIVALS, prefix_cache=st.integers(1, 4), num_slots=st.integers(1, 3), num_pages=st.sampled_from([None, 9, 12]), max_rows=st.sampled_from([3, 64, 256]),
       overlaps=st.booleans(), page_tokens=st.sampled_from([PAGE_SIZE, 2 * PAGE_SIZE]))
def test_answers_are_those_without_it(arrivals, prefix_cache, num_slots, num_pages, max_rows, overlaps, page_tokens):
    prompts = [sum((made(seed, n) for seed, n in pieces), []) for pieces, *_ in arrivals]
    requests = [dict(name=f"r{i}", prompt=p, max_tokens=n, seed=i, ignore_eos=True, frequency_penalty=0.5 * penalty)
                for i, (p, (_, n, _, penalty)) in enumerate(zip(prompts, arrivals))]
    rows, found = [], []
    for engine in (engine_with(prefix_cache, num_slots, num_pages=num_pages, max_rows=max_rows, overlaps=overlaps, page_tokens=page_tokens),
                   Engine(FakeBackend(VOCAB, num_slots=num_slots, num_pages=num_pages, max_rows=max_rows))):
        answers, last = {}, {}
        for wish, (_, _, wait, _) in zip(requests, arrivals):
            engine.add(request(**wish))
            for _ in range(wait):
                collect(engine.step(), answers, last)
        for _ in range(3000):
            collect(engine.step(), answers, last)
            if not engine.has_work:
                break
        assert not engine.has_work
        found.append(answers)
        rows.append(sum(engine.backend.row_counts))
        if engine.prefixes is not None:
            assert len(engine.prefixes) <= prefix_cache
            saved = sum(e.stats.cached_tokens for e in last.values())
            check_released(engine)
    assert found[0] == found[1]
    assert overlaps or rows[0] == rows[1] - saved   # what is counted as cached was not run, and nothing was run twice


def test_the_second_of_two_equal_prompts_runs_its_last_page_only():
    engine, prompt = engine_with(), made(0, 200)
    first, stats = answer(engine, "a", prompt, ignore_eos=True)
    assert stats.cached_tokens == 0
    rows = sum(engine.backend.row_counts)
    again, stats = answer(engine, "b", prompt, ignore_eos=True)
    assert again == first and stats.cached_tokens == 192 and sum(engine.backend.row_counts) - rows == 200 - 192 + 11
    assert (engine.prefixes.queried, engine.prefixes.hit) == (400, 192)
    assert answer(engine, "c", prompt[:192])[1].cached_tokens == 0   # the whole of a prompt is no use: its last token must be run
    assert answer(engine, "d", prompt[:193])[1].cached_tokens == 192


def test_the_next_turn_of_a_conversation_goes_on_in_the_answer():
    engine, prompt = engine_with(), made(0, 100)
    (ids, *_), _ = answer(engine, "a", prompt, max_tokens=170, ignore_eos=True)
    _, stats = answer(engine, "b", prompt + ids + made(1, 30))
    assert stats.cached_tokens == (100 + 170 - 1) // PAGE_SIZE * PAGE_SIZE
    assert answer(engine, "c", prompt + ids[:5] + made(2, 30))[1].cached_tokens == 64   # the prompt's own prefix is still there


def test_a_long_answer_holds_one_prefix():
    engine = engine_with(prefix_cache=3)
    answer(engine, "a", made(5, 70))
    answer(engine, "b", made(0, 70), max_tokens=400, ignore_eos=True)
    assert len(engine.prefixes) == 3 and answer(engine, "c", made(5, 70))[1].cached_tokens == 64


def test_what_two_prompts_share_is_stored_for_the_third():
    engine, system = engine_with(), made(0, 150)
    found = [answer(engine, str(i), system + made(i, 60))[1].cached_tokens for i in (1, 2, 3)]
    assert found == [0, 0, 128]


def test_the_one_not_used_for_longest_makes_room():
    engine, texts = engine_with(prefix_cache=2), [made(i, 80) for i in range(3)]
    cached = [answer(engine, str(n), texts[i])[1].cached_tokens for n, i in enumerate([0, 1, 0, 2, 0, 1])]
    assert cached == [0, 0, 64, 0, 64, 0] and len(engine.prefixes) == 2


def test_prefixes_give_up_pages_that_a_request_or_a_session_needs():
    engine = engine_with(prefix_cache=2, num_slots=2, num_pages=8)
    for i in range(2):
        answer(engine, str(i), made(i, 190), max_tokens=1)
    assert len(engine.prefixes) == 2 and engine.scheduler.free[1] == 4
    assert answer(engine, "large", made(2, 8 * PAGE_SIZE - 1), max_tokens=1)[0][0]   # all pages there are
    answer(engine, "again", made(0, 190), max_tokens=1)
    held = engine.by_hand.open()
    assert len(held.pages) == 8 and not len(engine.prefixes)
    engine.by_hand.close(held)
    check_released(engine)


def test_an_own_prefix_whose_pages_are_missing_is_given_up():
    engine, prompt = engine_with(prefix_cache=1, num_slots=1, num_pages=3), made(0, 190)
    first, _ = answer(engine, "a", prompt, max_tokens=2)   # holds two pages; its last token may need a third of its own
    again, stats = answer(engine, "b", prompt, max_tokens=2)
    assert again[0] == first[0] and stats.cached_tokens == 128
    check_released(engine)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_row_that_is_not_finite_takes_the_state_behind_it_along(overlaps):
    """The state at a page's end is stored when the row before it may not have been read: here it was not finite."""
    prompt = made(0, 60)
    bad = {"on": True}
    engine = engine_with(overlaps=overlaps, bad=lambda tokens: bad["on"] and len(tokens) == 64 and tokens[:60] == prompt)
    (ids, _, finish_reason, _), _ = answer(engine, "a", prompt, max_tokens=30, ignore_eos=True)
    assert finish_reason == "error" and len(ids) == 4
    bad["on"] = False
    assert answer(engine, "b", prompt + ids + made(3, 9))[1].cached_tokens == 0 and len(engine.prefixes) in (0, 1)


def test_a_step_that_fails_forgets_everything():
    engine, prompt = engine_with(), made(0, 100)
    first, _ = answer(engine, "a", prompt)
    engine.backend.fail[engine.backend.calls + 3] = OutOfMemory("no")
    assert answer(engine, "b", prompt)[0][2] == "error" and not len(engine.prefixes)
    again, stats = answer(engine, "c", prompt)
    assert again == first and stats.cached_tokens == 0
    engine.backend.fail[engine.backend.calls] = OutOfMemory("no")   # in the copy itself
    assert answer(engine, "d", prompt)[0][2] == "error"
    check_released(engine)


def test_bytes_of_the_reference_are_the_same():
    same_bytes_with_and_without(HEADDIMS)


@pytest.mark.parametrize("family", ["mla", "gqa"])
def test_drafts_go_on_from_a_prefix_too(family):
    """The same tokens, and the same number of drafts that stood: the draft model's context is in the copy."""
    found = []
    for prefix_cache in (0, 2):
        made = NumpyBackend(checkpoint(), max_batch=1 + prefix_cache, max_model_len=256, drafting=drafting(3, family))
        engine, answers = Engine(made, prefix_cache=prefix_cache), []
        prompt = PROMPTS[3]
        for turn in range(3):   # the same prompt twice, then the next turn of that conversation
            params = SamplingParams(max_tokens=70, seed=1, temperature=0.7, top_p=1.0, top_k=0, min_p=0.0, ignore_eos=True)
            engine.add(Request(str(turn), prompt, params))
            ids, stats = (x[str(turn)] for x in finish(engine))
            answers.append((ids, stats.speculative, stats.cached_tokens))
            prompt = prompt + ids + [5] if turn == 1 else prompt
        engine.close()
        found.append(answers)
    assert [a[:2] for a in found[0]] == [a[:2] for a in found[1]]
    first, second, third = (a[2] for a in found[1])
    assert (first, second) == (0, 64) and found[0][0][1].accepted > 0
    assert 128 <= third <= 128 + 3   # an answer is stored at the first commit in a new page, which a run of up to three drafts may carry into it


def test_an_llm_has_it_where_it_is_asked_for(fake):
    ids, params = made(0, 100), SamplingParams(max_tokens=2, temperature=0)
    plain, kept = fake(num_slots=4), fake(num_slots=4, prefix_cache=2)
    for llm, cached in ((plain, 0), (kept, 64)):
        first, second = llm.generate(ids, params)[0], llm.generate(ids, params)[0]
        assert first.token_ids == second.token_ids and (first.stats.cached_tokens, second.stats.cached_tokens) == (0, cached)
    assert kept._engine.scheduler.free[0] == 2
