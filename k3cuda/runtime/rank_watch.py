"""Signs of life between ranks: whichever dies, hangs or fails first ends the job everywhere, with its own error and exit code.

Rank 0 hears every other rank, and they hear rank 0. All of it runs beside the main thread, which may be stuck in a collective.
"""
import logging
import os
import signal
import socket
import threading
import time
from contextlib import contextmanager, nullcontext
from typing import Callable

from ..errors import K3Error, RankDied
from . import wire
from .rendezvous import Joined

log = logging.getLogger("k3cuda")

BEAT_S = 1.0           # between signs of life
SILENCE_S = 8.0        # without one a rank is taken for dead: with all that follows the job has ended within 15 s
_STOPPED_S = 3.0       # between two of our own signs of life: this process was stopped
LAST_WORDS_S = 3.0     # that a main thread has to notice, before the process is ended
EXPLAIN_S = 2.0        # that the first error may take to arrive behind what follows from it
# Whether this process ends when its job does, though nothing of it waits for another rank: a command has nothing else to do.
ends_process = False


class Watch:
    """The watch of one rank.

    Args:
        joined: its connections.
        hang_s: seconds without progress of any rank, in the middle of a call, that are taken for a hang.
        words: says more about a rank that went away without a word, like how its process ended; or "".

    Attributes:
        failure: the first error of the job, once there is one.
    """

    def __init__(self, joined: Joined, hang_s: float = SILENCE_S, words: Callable[[int], str] = lambda rank: ""):
        self.rank, self.failure, self._hosts, self._socks = joined.rank, None, joined.hosts, joined.watch
        self._data, self._hang_s, self._words = list(joined.data.values()), hang_s, words
        self._progress, self._is_in_call, self._is_step, self._is_over = 0, False, False, False
        self._is_building = False
        self._beaten, self._woke = time.monotonic(), float("-inf")   # when this process last gave a sign of life, and when it last had been stopped
        self._seen, self._moved = {}, 0.0   # progress of all ranks when some was last seen, and when that was
        self._theirs = dict.fromkeys(self._socks, 0)
        self._known, self._lock, self._writing = threading.Event(), threading.Lock(), threading.Lock()
        for sock in self._socks.values():
            sock.settimeout(SILENCE_S)
        for rank in self._socks:
            threading.Thread(target=self._listen, args=(rank,), name=f"k3cuda-watch-{rank}", daemon=True).start()
        threading.Thread(target=self._beat, name="k3cuda-beat", daemon=True).start()

    # The main thread's side

    def progress(self) -> None:
        """To be called wherever a rank gets on."""
        self._progress += 1

    @contextmanager
    def call(self, is_step: bool = True):
        """Around whatever waits for other ranks. What goes wrong inside is raised as the first error of the job.

        `is_step`: signals wait for the end, and no progress is a hang; else, as for a load, neither.
        """
        self.check()
        self.progress()
        self._is_in_call, self._is_step = True, is_step
        try:
            with _signals_held() if is_step else nullcontext():
                yield
        except Exception as e:
            raise self.end(self._first(e)) from e
        finally:
            self._is_in_call = False

    @contextmanager
    def building(self):
        """Around what may take long in the middle of a call though nothing hangs, like compiling a kernel: being alive is progress there."""
        self._is_building = True
        try:
            yield
        finally:
            self._is_building = False

    def check(self) -> None:
        """Raises what ended the job, if anything did."""
        if self.failure is not None:
            raise self.failure

    def end(self, error: K3Error) -> K3Error:
        """Ends the job on every rank; the first error stands, and is returned."""
        with self._lock:
            if self.failure is not None or self._is_over:
                return self.failure or error
            self.failure = error
        log.debug("rank %d: the job ends: %s", self.rank, error)
        self._tell({"end": wire.told(error)})
        if self.rank:
            self._known.set()
            return error
        for sock in self._data:   # a main thread that waits there wakes up
            _shut(sock, is_last=False)
        self._known.set()
        threading.Thread(target=self._last_words, name="k3cuda-last-words", daemon=True).start()
        return error

    def close(self) -> None:
        """A clean end: from here on nobody misses anybody. May be called twice."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        self._tell({"bye": True})
        for sock in [*self._socks.values(), *self._data]:
            _shut(sock)

    def _first(self, error: Exception) -> K3Error:
        """What is to be blamed for `error`: lost connections follow from something else, whose own word may still be on its way."""
        if isinstance(error, (wire.LinkLost, TimeoutError)):
            self._known.wait(EXPLAIN_S)
            return self.failure or RankDied(f"rank {self.rank} lost the connection to another rank ({error})")
        return error if isinstance(error, K3Error) else wire.raised(wire.told(error))

    # Threads beside it

    def _listen(self, rank: int) -> None:
        sock = self._socks[rank]
        try:
            while not self._is_over:
                try:
                    message = wire.receive(sock)
                except TimeoutError:
                    if not self._has_slept():
                        raise
                    continue
                if "end" in message:
                    self._heard(wire.raised(message["end"], f"rank {rank} ({self._hosts[rank]}): " if self.rank == 0 else ""), is_told=True)
                    return
                if "bye" in message:
                    if self.rank:
                        self._leave(0)
                    return
                self._theirs[rank] = message["progress"]
        except TimeoutError:
            self._heard(RankDied(f"rank {rank} ({self._hosts[rank]}) gave no sign of life for {SILENCE_S:g} s", "see whether its machine still runs"))
        except (wire.LinkLost, KeyError):
            if not self._is_over:
                words = self._words(rank)
                self._heard(RankDied(f"rank {rank} ({self._hosts[rank]}) ended {words or 'without a word'}", "its own output, or its machine's log, may say why"))

    def _heard(self, error: K3Error, is_told: bool = False) -> None:
        """`is_told`: rank 0 knows of it, and will say so."""
        if self.rank == 0:
            self.end(error)
        elif not self._is_over:
            if self.failure is None and not is_told:
                log.error("%s", error)
            self.failure = self.failure or error
            self._leave(self.failure.code)

    def _leave(self, code: int) -> None:
        """Another rank than 0 has nothing to do when its job ends, whatever its main thread waits for."""
        logging.shutdown()
        os._exit(code)

    def _beat(self) -> None:
        while not self._is_over:
            now = time.monotonic()
            if now - self._beaten > _STOPPED_S:
                self._woke, self._seen = now, {}
            self._beaten = now
            self._progress += self._is_building
            self._tell({"progress": self._progress})
            if self.rank == 0 and self._is_in_call and self._is_step and self.failure is None:
                self._look_for_hangs()
            time.sleep(BEAT_S)

    def _has_slept(self) -> bool:
        """Whether this process was stopped itself of late, as a whole job is by Ctrl-Z: then nobody else is to blame for the silence."""
        now = time.monotonic()
        return now - self._beaten > _STOPPED_S or now - self._woke < SILENCE_S

    def _look_for_hangs(self) -> None:
        counts = {0: self._progress} | self._theirs
        if counts != self._seen:
            self._seen, self._moved = counts, time.monotonic()
        elif time.monotonic() - self._moved > self._hang_s:
            least = [rank for rank, n in counts.items() if n == min(counts.values())]
            names = ", ".join(f"{rank} ({self._hosts[rank]})" for rank in least[:4])
            self.end(RankDied(f"rank{'s' * (len(least) > 1)} {names} hung: no rank got on for {self._hang_s:g} s in the middle of a step, and none was further behind",
                              "see what it waited for, and whether its machine and network are sound"))

    def _tell(self, message: dict) -> None:
        for sock in self._socks.values():
            try:
                with self._writing:
                    wire.send(sock, message)
            except (wire.LinkLost, ValueError):   # whoever listens there finds out
                pass

    def _last_words(self) -> None:
        time.sleep(LAST_WORDS_S)
        if not self._is_over and (self._is_in_call or ends_process):
            log.error("%s", self.failure)
            logging.shutdown()
            os._exit(self.failure.code)


@contextmanager
def _signals_held():
    """SIGINT and SIGTERM wait until a call is over: ranks that stop in the middle of one are lost. The second of them ends the process at once."""
    handlers, caught = {}, []

    def hold(number, frame):
        if caught:
            os._exit(128 + number)
        caught.append(number)

    if threading.current_thread() is threading.main_thread():
        handlers = {n: handler for n in (signal.SIGINT, signal.SIGTERM) if callable(handler := signal.getsignal(n))}
    for number in handlers:
        signal.signal(number, hold)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if caught:
            handlers[caught[0]](caught[0], None)


def _shut(sock: socket.socket, is_last: bool = True) -> None:
    """Wakes whoever waits at a connection; closes it where nobody can be using it any more."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:   # it is already
        pass
    if is_last:
        sock.close()
