"""`bench replay`: the form of a trace, contexts that grow, and the times of a play on a clock of its own."""
import asyncio
import json
import re

import pytest
from click.testing import CliRunner
from command import ROOT, k3_json
from fake_server import OK, VirtualLoop, document, event, fake_server, on_virtual_time, text
from scripted import fake  # noqa: F401, the fixture

from k3cuda import SamplingParams
from k3cuda.bench.answers import Answer
from k3cuda.bench.contexts import IdContext, TextContext, fillers
from k3cuda.bench.replay import LocalModel, Played, by_turn, play
from k3cuda.bench.trace import Session, Turn, read_trace
from k3cuda.cli.bench_replay import replay
from k3cuda.errors import UsageError
from k3cuda.runtime.request_times import Times, summary

PAGE = (ROOT / "docs/bench.md").read_text(encoding="utf-8")
TRACE, = re.findall(r"```jsonl trace\n(.*?)```", PAGE, re.S)
TWO_TURNS = Session("a", (Turn(5, 3), Turn(4, 2, 2.5)))
ONE_TURN = Session("b", (Turn(6, 2, 1.0),))


# ---- the form of a trace ----

def test_the_trace_of_the_page():
    one, other = read_trace(TRACE, "x")
    assert (one.name, one.prefix, one.prefix_tokens, len(one.turns), other.prefix) == ("fix-tests", "tools", 128, 3, "tools")
    assert one.turns[1] == Turn(60, 8, 0.3) and one.turns[2].keep_tokens == 152 and one.context_tokens == 152 + 20 + 8


@pytest.mark.parametrize("line, words", [
    ("{", "line 1"), ("3", "found int, wanted an object"), ('{"session": "a", "new_tokens": 1, "output_tokens": 1, "delay": 3}', "unknown key 'delay'"),
    ('{"new_tokens": 1, "output_tokens": 1}', "session: found None"), ('{"session": "a", "output_tokens": 1}', "new_tokens: found None, wanted an integer of at least 1"),
    ('{"session": "a", "new_tokens": 1, "output_tokens": 0}', "output_tokens: found 0"), ('{"session": "a", "new_tokens": true, "output_tokens": 1}', "new_tokens: found True"),
    ('{"session": "a", "new_tokens": 1, "output_tokens": 1, "gap_s": -1}', "gap_s: found -1, wanted seconds"),
    ('{"session": "a", "new_tokens": 1, "output_tokens": 1, "gap_s": NaN}', "gap_s: found nan, wanted seconds"),
    ('{"session": "a", "new_tokens": 1, "output_tokens": 1, "prefix": "p"}', "prefix_tokens beside it"),
    ('{"session": "a", "new_tokens": 1, "output_tokens": 1, "keep_tokens": 0}', "has nothing to keep"),
    ('{"session": "a", "new_tokens": 1, "output_tokens": 1}\n{"session": "a", "new_tokens": 1, "output_tokens": 1, "keep_tokens": 3}', "line 2: keep_tokens: found 3, the context before this turn has 2"),
    ('{"session": "a", "new_tokens": 1, "output_tokens": 1}\n\n{"session": "a", "new_tokens": 1, "output_tokens": 1, "prefix": "p", "prefix_tokens": 1}', "line 3: prefix: only the first turn"),
    ("", "found no turns")])
def test_what_is_no_trace(line, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        read_trace(line, "x")


# ---- contexts ----

def test_ids_grow_are_cut_and_share_their_beginning():
    session = Session("a", (Turn(4, 2), Turn(3, 1), Turn(2, 1, keep_tokens=7)), "tools", 5)
    a, b, again = (IdContext(session, fillers(session, number, play, 3), 50) for number, play in ((0, 0), (1, 0), (0, 1)))
    for context in (a, b, again):
        context.ask(session.turns[0])
    assert a.prompt[:5] == b.prompt[:5] == again.prompt[:5] and len({str(c.prompt[5:]) for c in (a, b, again)}) == 3 and a.tokens == 9
    first = list(a.prompt)
    a.answered((7, 8), 2)
    a.ask(session.turns[1])
    assert a.prompt[:11] == [*first, 7, 8] and a.tokens == 14
    a.answered((9,), 1)
    a.ask(session.turns[2])
    assert a.prompt[:7] == first[:7] and a.tokens == 9


def test_messages_grow_and_are_cut():
    session = Session("a", (Turn(6, 2), Turn(4, 2), Turn(2, 1, keep_tokens=13)), "tools", 8)
    context = TextContext(session, fillers(session, 0, 0, 3), 2.0, False)   # two tokens a word
    context.ask(session.turns[0])
    assert [(m["role"], len(m["content"].split())) for m in context.prompt] == [("system", 4), ("user", 3)] and context.tokens == 14
    context.answered(Answer(text="an answer", reasoning="why"), 2)
    context.ask(session.turns[1])
    assert context.prompt[2] == {"role": "assistant", "content": "an answer", "reasoning_content": "why"} and context.tokens == 20
    first = context.prompt[1]["content"].split()
    context.answered(Answer(text="x"), 2)
    context.ask(session.turns[2])
    roles = [(m["role"], len(m["content"].split())) for m in context.prompt]
    assert roles == [("system", 4), ("user", 2), ("user", 1)] and context.prompt[1]["content"].split() == first[:2] and context.tokens == 15
    joined = TextContext(session, fillers(session, 0, 0, 3), 2.0, True)
    joined.ask(session.turns[0])
    assert joined.prompt == " ".join([context.prompt[0]["content"], *first])


# ---- times, by hand ----

class Counted:
    """A context that only counts."""

    def __init__(self, session, rngs):
        self.tokens = session.prefix_tokens

    def ask(self, turn):
        self.tokens = (self.tokens if turn.keep_tokens is None else turn.keep_tokens) + turn.new_tokens

    def answered(self, answer, tokens):
        self.tokens += tokens


def played(sessions, fails=lambda tokens: False, **how):
    """Every request takes a second to its first token and half a second for each token behind it."""
    async def work(clock):
        async def ask(context, tokens):
            sent, outputs = clock(), []
            for i in range(tokens):
                await asyncio.sleep(0.5 if i else 1)
                outputs.append((clock(), 1))
            return Times(context.tokens, sent, outputs, error="no" if fails(context.tokens) else None), ()
        return await play(sessions, Counted, ask, clock=clock, **{"users": 1, "duration": None, "gap_cap": None, "seed": 0} | how)
    return on_virtual_time(work)


def test_a_play_by_hand():
    found, skipped, seconds = played([TWO_TURNS, ONE_TURN])
    assert [(p.session, p.turn, p.times.sent, p.times.prompt_tokens, p.times.e2el) for p in found] == [
        ("a", 1, 0, 5, 2.0), ("a", 2, 4.5, 12, 1.5), ("b", 1, 7.0, 6, 1.5)]   # 2 + a gap of 2.5; 6 + a gap of 1
    assert (skipped, seconds) == (0, 8.5)
    numbers = summary([p.times for p in found], seconds)
    # TPOT 0.5 s everywhere. E2EL a token: 2/3, 0.75, 0.75; the P90 of these is 0.75.
    assert numbers["p90_interactivity"] == 2 and numbers["p90_e2e_normalized_interactivity"] == pytest.approx(1 / 0.75)
    assert numbers["p50_e2e_normalized_interactivity"] == pytest.approx(1 / 0.75) and numbers["output_throughput"] == pytest.approx(7 / 8.5)


def test_two_users_and_shorter_gaps():
    found, _, seconds = played([TWO_TURNS, ONE_TURN], users=2, gap_cap=0.5)
    assert [(p.session, p.turn, p.times.sent) for p in found] == [("b", 1, 0.5), ("a", 1, 0), ("a", 2, 2.5)] and seconds == 4


def test_a_failed_turn_ends_its_session():
    found, skipped, _ = played([TWO_TURNS, ONE_TURN], fails=lambda tokens: tokens == 5)
    assert [(p.session, p.turn, p.times.error) for p in found] == [("a", 1, "no"), ("b", 1, None)] and skipped == 1


def test_over_and_over():
    found, _, seconds = played([ONE_TURN], duration=6.0)   # each play takes 2.5 s; the third turn would begin at 6
    assert [p.times.sent for p in found] == [1, 3.5] and seconds == 6


def test_the_end_cuts_a_gap_short():
    found, skipped, seconds = played([Session("a", (Turn(5, 3), Turn(4, 2, 3600.0)))], duration=5.0)
    assert ([p.turn for p in found], skipped, seconds) == ([1], 0, 5)
    assert played([ONE_TURN], duration=1.25, fails=lambda tokens: True)[2] == 2.5   # a request that has begun ends; the pause behind it is cut
    assert played([ONE_TURN], duration=3.0, fails=lambda tokens: True)[2] == 3


def test_turns_are_told_apart():
    a, b = Times(10, 0.0, [(1.0, 1)], cached_tokens=4), Times(20, 0.0, [(3.0, 2)], cached_tokens=8)
    first, second = by_turn([Played("x", 1, a), Played("y", 1, b), Played("x", 2, Times(3, 0.0, error="no"))])
    assert first == {"turn": 1, "completed": 2, "failed": 0, "input_tokens": 30, "cached_tokens": 12, "output_tokens": 3,
                     "median_ttft_ms": 2000, "p90_ttft_ms": pytest.approx(2800), "p99_ttft_ms": pytest.approx(2980)}
    assert (second["failed"], second["median_ttft_ms"], second["cached_tokens"]) == (1, None, None)


def on_steps(llm, sessions, **how):
    """A play on a model whose every step takes a second."""
    loop = VirtualLoop()
    step = llm.backend.step

    def timed(rows):
        loop._now += 1
        return step(rows)

    llm.backend.step = timed

    async def work():
        async with LocalModel(llm, lambda tokens: SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True), loop.time) as local:
            return await play(sessions, lambda session, rngs: IdContext(session, rngs, llm.cfg.vocab_size), local.ask, clock=loop.time,
                              **{"users": 2, "duration": None, "gap_cap": None, "seed": 0} | how)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(work())


def test_a_model_of_this_process_by_hand(fake):  # noqa: F811
    found, skipped, seconds = on_steps(fake(num_slots=2), [TWO_TURNS, ONE_TURN])
    times = {(p.session, p.turn): p.times for p in found}
    assert times["a", 1].outputs == [(1, 1), (2, 1), (3, 1)] and (times["b", 1].sent, times["b", 1].outputs) == (1, [(2, 1), (3, 1)])   # they share steps 2 and 3
    assert (times["a", 2].sent, times["a", 2].prompt_tokens, times["a", 2].outputs) == (5.5, 12, [(6.5, 1), (7.5, 1)]) and (skipped, seconds) == (0, 7.5)


def test_a_stored_beginning_is_counted(fake):  # noqa: F811
    sessions = [Session("a", (Turn(70, 3), Turn(10, 2))), Session("b", (Turn(5, 2),), "tools", 64), Session("c", (Turn(5, 2),), "tools", 64), Session("d", (Turn(5, 2),), "tools", 64)]
    found, _, _ = on_steps(fake(num_slots=6, prefix_cache=4), sessions, users=1)
    assert [p.times.cached_tokens for p in found] == [0, 64, 0, 64, 64]


def test_a_context_that_is_full_fails_its_turn(fake):  # noqa: F811
    llm = fake(num_slots=2, num_pages=2)
    found, skipped, _ = on_steps(llm, [Session("a", (Turn(60, 4), Turn(100, 4), Turn(1, 1))), ONE_TURN])
    assert {(p.session, p.turn): p.times.error is None for p in found} == {("a", 1): True, ("b", 1): True, ("a", 2): False} and skipped == 1
    assert "context holds" in next(p.times.error for p in found if p.times.error) and not llm._has_work


def test_a_model_that_breaks_ends_the_play(fake, monkeypatch):  # noqa: F811
    llm = fake(num_slots=2)
    with monkeypatch.context() as broken, pytest.raises(ExceptionGroup) as e:
        broken.setattr(llm, "_pump", lambda: 1 / 0)
        on_steps(llm, [ONE_TURN])
    assert "ZeroDivisionError" in repr(e.value)


# ---- the command ----

@pytest.fixture
def trace(tmp_path):
    (tmp_path / "trace.jsonl").write_text(TRACE)
    return tmp_path


def test_the_command_of_the_page(trace):
    here, _ = re.findall(r"^k3cuda (bench replay .+)$", PAGE, re.M)
    found = k3_json(*here.split(), "--save-detailed", cwd=trace)
    shown = json.loads(re.findall(r"```json replay\n(.*?)```", PAGE, re.S)[0])
    detail = found.pop("detail")
    assert shown.keys() == found.keys() and shown["turns"][0].keys() == found["turns"][0].keys()
    numbers = found["requests"]
    assert numbers["completed"] == 5 and numbers["failed"] == 0 and [t["completed"] for t in found["turns"]] == [2, 2, 1]
    # The second turn finds what its first one left, the third the beginning that was kept: whole pages of 64 tokens.
    assert found["cached_share"] == numbers["total_cached_tokens"] / numbers["total_input_tokens"] > 0.3
    assert dict(zip(zip(detail["sessions"], detail["turns"]), detail["cached_tokens"]))["fix-tests", 2] == 128


def test_a_server_without_usage(trace):
    with fake_server([OK + text("a", "b", finish_reason="length") + b"data: [DONE]\n\n"], v1_models=document("200 OK", b'{"data": [{"id": "m"}]}')) as (url, bodies):
        found = k3_json("bench", "replay", "trace.jsonl", "--base-url", url, "--idle-gap-cap", 0, "--endpoint", "/v1/completions", cwd=trace)
    assert found["requests"]["completed"] == 5 and found["cached_share"] is None and found["tokens_counted_by"] == {"usage": 0, "events": 5}
    assert bodies[1]["prompt"].startswith(bodies[0]["prompt"] + "ab ") and bodies[0]["ignore_eos"] and bodies[0]["max_tokens"] == 8


def test_failures_make_code_8(trace):
    with fake_server([OK + event(error={"message": "full"})]) as (url, _):
        found = k3_json("bench", "replay", "m", "trace.jsonl", "--base-url", url, cwd=trace, code=8)
    assert found["failures"] == [{"reason": "the stream ended with an error: full", "requests": 2}] and found["skipped_turns"] == 3


@pytest.mark.parametrize("words, said", [
    (["trace.jsonl"], "no model; give the folder"), (["tiny-random", "nix.jsonl"], "cannot be read"), (["tiny-random", "a", "b"], "wanted [MODEL] TRACE"),
    (["tiny-random", "trace.jsonl", "--endpoint", "/v1/completions"], "--endpoint is for a server"), (["trace.jsonl", "--base-url", "http://x", "--tp", "2"], "--tp is for a model in this process"),
    (["trace.jsonl", "--base-url", "http://x", "--prefix-cache", "2"], "--prefix-cache is for a model"), (["tiny-random", "trace.jsonl", "--stall-timeout", "2"], "--stall-timeout is for a server"), (["tiny-random", "trace.jsonl", "-t", "3"], "temperature: found 3")])
def test_what_is_refused(trace, monkeypatch, words, said):
    monkeypatch.chdir(trace)
    found = CliRunner().invoke(replay, words)
    assert said in found.output + str(found.exception) and found.exit_code
