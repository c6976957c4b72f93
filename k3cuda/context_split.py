"""Decode context parallelism: `dcp` neighbouring ranks are a group that holds the MLA cache once, and each attends over its own part.

Pages of 64 positions go round the group: rank r holds page j of a sequence where j mod dcp is its place r mod dcp. So a page of the engine is 64
positions on every rank, 64 dcp of the sequence, and has one number for the whole group. Which rank holds a position follows from that alone,
never from where pages lie: bytes stay those of any other pages.
"""
from .config import PAGE_SIZE
from .errors import UsageError


def legal_dcps(tp: int) -> list[int]:
    """Sizes that a group can have: the divisors of `tp`."""
    return [n for n in range(1, tp + 1) if tp % n == 0]


def check_dcp(tp: int, dcp: int) -> None:
    """Raises UsageError where groups of `dcp` ranks do not divide `tp`."""
    if dcp not in (legal := legal_dcps(tp)):
        fits = " or ".join(filter(None, (", ".join(map(str, legal[:-1])), str(legal[-1]))))
        raise UsageError(f"dcp: found {dcp}, wanted {fits} with a tp of {tp}", "each rank belongs to one group of dcp ranks, so dcp divides tp")


def page_tokens(dcp: int) -> int:
    """Tokens of a sequence that one page of the engine holds, over all ranks of a group."""
    return PAGE_SIZE * dcp


def own_length(length, place: int, dcp: int):
    """How many of the first `length` positions the rank at `place` of its group holds; an integer, or an array of them."""
    pages, rest = divmod(length, PAGE_SIZE)
    return (pages + dcp - 1 - place) // dcp * PAGE_SIZE + rest * (pages % dcp == place)
