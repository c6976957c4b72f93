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
        self._start = self._shown = time.perf_counter()

    def show(self, collectors) -> None:
        now, done = time.perf_counter(), sum(c.output is not None for c in collectors)
        if not self._on or (now < self._shown + 0.1 and done < self._total):  # seconds; faster nobody reads
            return
        self._shown, tokens = now, sum(len(c.drawn) for c in collectors)
        rate = tokens / max(now - self._start, 1e-9)
        print(f"\r{done}/{self._total} answers, {tokens} tokens, {rate:.1f} tok/s", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._on:
            print(file=sys.stderr)
