"""When requests are sent: at a rate, and no more than so many at a time."""
import asyncio
import math
import time
from typing import Awaitable, Callable

import numpy as np


def arrivals(n: int, rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """Seconds from the start at which n requests arrive; an infinite rate: all at once.

    Gaps are drawn from a gamma distribution with mean 1 / rate and shape `burstiness`: 1 is a Poisson process, less comes in bursts, more is
    more even. The first request arrives at once.
    """
    if math.isinf(rate):
        return [0.0] * n
    gaps = rng.gamma(burstiness, 1 / (rate * burstiness), n)
    return [0.0, *np.cumsum(gaps[:-1]).tolist()]


async def run(asks: list[Callable[[], Awaitable]], starts: list[float], most: int | None, clock=time.perf_counter) -> tuple[list, float]:
    """(what each ask returned, seconds for all).

    Args:
        asks: each starts one request. starts: seconds from now, rising; a request that arrives while `most` are under way is sent when one of them has ended.
    """
    limit = asyncio.Semaphore(most or len(asks))
    begin = clock()

    async def one(ask, start: float):
        await asyncio.sleep(max(0.0, begin + start - clock()))
        async with limit:   # first come, first served
            return await ask()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(*pair)) for pair in zip(asks, starts)]
    return [task.result() for task in tasks], clock() - begin
