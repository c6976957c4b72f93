"""Plays a trace: each session a coroutine that waits, asks with all that was said, and adds what it was answered."""
import asyncio
import itertools
import math
import time
from dataclasses import dataclass

from ..errors import K3Error
from ..runtime.request_times import Times, advance, percentiles
from .contexts import fillers
from .trace import Session


_UNTIL_ASKED = 4   # rounds of the loop from a timer, or the end of an answer, to the request behind it: what is due is part of the next step
PAUSE_S = 1.0   # behind a failed request, where sessions are played over and over


@dataclass(frozen=True)
class Played:
    """One request that was made. `turn` counts from 1."""

    session: str
    turn: int
    times: Times


async def play(sessions: list[Session], open_context, ask, *, users: int, duration: float | None, gap_cap: float | None, seed: int,
               clock=time.perf_counter) -> tuple[list[Played], int, float]:
    """(requests in the order of their ends, turns that were left out since one before them failed, seconds for all).

    Args:
        open_context: (session, fillers) -> a context of contexts.py. ask: (context, tokens of the answer) -> (Times, what `answered` takes).
        users: sessions at a time, in the order of the trace. duration: play it over and over, and begin no turn after so many seconds; None: once.
        gap_cap: no gap is longer.
    """
    plays = itertools.count() if duration is not None else range(1)
    waiting = ((play, number, session) for play in plays for number, session in enumerate(sessions))
    played, skipped, begin = [], 0, clock()

    def left() -> float:
        return math.inf if duration is None else duration - (clock() - begin)

    async def one_session(play: int, number: int, session: Session) -> int:
        context = open_context(session, fillers(session, number, play, seed))
        for i, turn in enumerate(session.turns):
            gap, rest = turn.gap_s if gap_cap is None else min(turn.gap_s, gap_cap), left()
            await asyncio.sleep(max(0.0, min(gap, rest)))
            if gap >= rest:   # the turn would begin when all is over
                return 0
            context.ask(turn)
            times, answer = await ask(context, turn.output_tokens)
            played.append(Played(session.name, i + 1, times))
            if times.error is not None:
                await asyncio.sleep(max(0.0, min(PAUSE_S, left())) if duration is not None else 0)   # a server that refuses all is not asked as fast as it can refuse
                return len(session.turns) - i - 1
            context.answered(answer, turn.output_tokens)
        return 0

    async def user() -> None:
        nonlocal skipped
        for item in waiting:
            if left() <= 0:
                return
            skipped += await one_session(*item)

    async with asyncio.TaskGroup() as group:
        for _ in range(users):
            group.create_task(user())
    return played, skipped, clock() - begin


class LocalModel:
    """An LLM of this process, asked by several coroutines: a step for all of them, then their turn. An async context manager.

    Args:
        params: (tokens of the answer) -> SamplingParams.
    """

    def __init__(self, llm, params, clock=time.perf_counter):
        self._llm, self._params, self._clock = llm, params, clock
        self._under_way, self._waiters, self._wake = [], {}, asyncio.Event()

    async def __aenter__(self):
        self._pump = asyncio.ensure_future(self._steps())
        return self

    async def __aexit__(self, *_):
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)
        for stream, _ in self._under_way:
            stream.close()

    async def ask(self, context, tokens: int) -> tuple[Times, tuple | None]:
        """The times of one request and its token ids."""
        times = Times(context.tokens, self._clock())
        try:
            stream = self._llm.stream(context.prompt, self._params(tokens))
        except K3Error as e:
            times.error = e.message
            return times, None
        waiter = self._waiters[id(stream)] = asyncio.get_running_loop().create_future()
        self._under_way.append((stream, times))
        self._wake.set()
        await waiter
        return times, stream.output.token_ids

    async def _steps(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._under_way:
                try:
                    ended = advance(self._under_way, self._clock)
                except Exception as e:   # nobody else would hear of it
                    for waiter in self._waiters.values():
                        waiter.set_exception(e)
                    return
                self._under_way = [pair for pair in self._under_way if pair not in ended]
                for stream, _ in ended:
                    stream.close()
                    self._waiters.pop(id(stream)).set_result(None)
                for _ in range(_UNTIL_ASKED):
                    await asyncio.sleep(0)


def by_turn(played: list[Played]) -> list[dict]:
    """For each place in a session what its requests had; times of those that did not fail."""
    found = []
    for turn in sorted({p.turn for p in played}):
        times = [p.times for p in played if p.turn == turn]
        done = [t for t in times if t.error is None]
        ttft = percentiles([1e3 * t.ttft for t in done])
        cached = [t.cached_tokens for t in done if t.cached_tokens is not None]
        found.append({"turn": turn, "completed": len(done), "failed": len(times) - len(done), "input_tokens": sum(t.prompt_tokens for t in done),
                      "cached_tokens": sum(cached) if cached else None, "output_tokens": sum(t.tokens for t in done),
                      "median_ttft_ms": ttft[50], "p90_ttft_ms": ttft[90], "p99_ttft_ms": ttft[99]})
    return found
