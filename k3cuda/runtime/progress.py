"""How far a batch is, for people who watch."""
import sys
import time


class Progress:
    """A line on stderr that is rewritten after each step.

    Args:
        total: requests.
        wanted: None: if stderr is a terminal.
    """

    def __init__(self, total: int, wanted: bool | None):
        self._total, self._on = total, sys.stderr is not None and sys.stderr.isatty() if wanted is None else wanted
        self._start = time.perf_counter()

    def show(self, collectors) -> None:
        if self._on:
            done, tokens = sum(c.output is not None for c in collectors), sum(len(c.drawn) for c in collectors)
            rate = tokens / max(time.perf_counter() - self._start, 1e-9)
            print(f"\r{done}/{self._total} answers, {tokens} tokens, {rate:.1f} tok/s", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._on:
            print(file=sys.stderr)
