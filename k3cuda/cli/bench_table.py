"""The numbers of requests as lines for a reader, and how a benchmark ends. docs/bench.md defines the numbers."""
import re
from collections import Counter

import click

from ..errors import BenchmarkError
from . import options
from .output import say

ALLOW = options.flag("--allow-failures", type=click.IntRange(min=0), default=0, metavar="N", help="Failed requests that are no reason for code 8.  [default: 0]")
_ROWS = (("tpot_ms", "TPOT", "ms"), ("ttft_ms", "TTFT", "ms"), ("itl_ms", "ITL", "ms"), ("e2el_ms", "E2EL", "ms"),
         ("interactivity", "interactivity", "tok/s"), ("e2e_normalized_interactivity", "E2E-normalized", "tok/s"))


def show(title: str, found: dict) -> None:
    """A block on stderr with what `summary` found."""
    say(f"{title}: {found['completed']} requests in {found['duration']:.2f} s, {found['failed']} failed; "
        f"{found['output_throughput']:.1f} tok/s out, {found['total_token_throughput']:.1f} tok/s in and out")
    for name, label, unit in _ROWS:
        keys = [(re.fullmatch(rf"(mean|median|p\d+)_{name}", key), value) for key, value in found.items()]
        if cells := [f"{match[1].replace('median', 'p50')} {value:.2f}" for match, value in keys if match and value is not None]:
            say(f"  {label:15} {unit:6} " + "   ".join(cells))
    if found["spec_decode_acceptance_length"] is not None:
        say(f"  {'drafts':22} {found['spec_decode_acceptance_length']:.2f} tokens a verify step; by position "
            + " ".join(f"{rate:.2f}" for rate in found["spec_decode_per_position_acceptance_rates"]))


def failures(times) -> list[dict]:
    """[{"reason", "requests"}], the commonest one first."""
    return [{"reason": reason, "requests": n} for reason, n in Counter(t.error for t in times if t.error is not None).most_common()]


def end(times, allowed: int = 0) -> None:
    """Raises BenchmarkError where more than `allowed` requests failed."""
    failed = [t.error for t in times if t.error is not None]
    if len(failed) > allowed:
        raise BenchmarkError(f"{len(failed)} of {len(times)} requests failed, the first one: {failed[0]}", "rates and percentiles are of the others")
