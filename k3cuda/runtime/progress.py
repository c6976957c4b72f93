"""How far a batch or a load is, for people who watch."""
import sys
import threading
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


class LoadProgress:
    """Bytes, rate and time left: a bar on a terminal, elsewhere a plain line every PLAIN_S seconds.

    Args:
        total: bytes.
        show: whether anything is shown; None: on a terminal.
        verb: what is done with the bytes.
        is_terminal: None: whether stderr is one.
    """

    PLAIN_S, BAR_S, WIDTH = 10.0, 0.2, 20

    def __init__(self, total: int, show: bool | None = True, verb: str = "loading", is_terminal: bool | None = None):
        self._total, self._verb = max(total, 1), verb
        self._bar = sys.stderr is not None and sys.stderr.isatty() if is_terminal is None else is_terminal
        self._every = (self.BAR_S if self._bar else self.PLAIN_S) if (self._bar if show is None else show) else float("inf")
        self._start = self._shown = time.perf_counter()
        self._done, self._drawn, self._lock = 0, False, threading.Lock()

    def add(self, nbytes: int) -> None:
        """Counts bytes; any thread may call it."""
        with self._lock:
            self._done += nbytes
            now = time.perf_counter()
            if now - self._shown >= self._every:
                self._shown, self._drawn = now, True
                self._write(f"\r\033[K{self._line(now)}" if self._bar else self._line(now) + "\n")

    def _line(self, now: float) -> str:
        done = min(self._done / self._total, 1.0)
        rate = self._done / max(now - self._start, 1e-9)
        left = max(self._total - self._done, 0) / max(rate, 1e-9)
        bar = f" [{'#' * int(done * self.WIDTH):.<{self.WIDTH}}]" if self._bar else ""
        return f"{self._verb}{bar} {self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB, {done:.0%}, {rate / 1e9:.2f} GB/s, {_time(left)} left"

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar and self._drawn:
            self._write("\r\033[K")

    @staticmethod
    def _write(text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):   # never worth failing for
            pass


def _time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
