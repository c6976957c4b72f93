"""One backend of many processes: rank 0 tells the others each call of the engine, and all of them do the same."""
import hashlib
import logging

from ..errors import RanksDiffer
from . import wire
from .rank_calls import DECODE, ENCODE, tokens_of
from .rank_watch import Watch

log = logging.getLogger("k3cuda")

CHECK_EVERY = 32   # decisions of sampler or acceptance, between comparisons


class Decisions:
    """A digest of every token decided so far."""

    def __init__(self):
        self._digest, self.count = hashlib.blake2b(digest_size=8), 0

    def add(self, name: str, result) -> None:
        if tokens := tokens_of(name, result):
            self._digest.update(repr((name, tokens)).encode())
            self.count += 1

    def message(self) -> dict:
        return {"count": self.count, "digest": self._digest.hexdigest()}


class RankedBackend:
    """runtime/backend.py on rank 0: `own` runs this rank; the other ranks run `follow`.

    Every `CHECK_EVERY` decisions, and at the end, all ranks compare what they decided.

    Args:
        own: this rank's backend.
        data: connections to the other ranks. watch: of this process. end: called behind `close`, ends the processes.
    Raises, in every call:
        what ended the job on any rank, with its exit code; RanksDiffer: two ranks decided differently.
    """

    def __init__(self, own, data: dict, watch: Watch, end):
        self._own, self._data, self._watch, self._end, self._decisions = own, data, watch, end, Decisions()
        self._is_closed = False

    def __getattr__(self, name):
        return getattr(self._own, name)   # facts, and what rank 0 has to itself: logits, buffers

    def open_slot(self, slot, pages):
        self._call("open_slot", slot, pages)

    def copy_slot(self, source, target, pages):
        self._call("copy_slot", source, target, pages)

    def step(self, rows):
        self._call("step", rows)

    def sample(self, draws):
        return self._call("sample", draws)

    def propose(self, asks):
        return self._call("propose", asks)

    def accept(self, judges):
        return self._call("accept", judges)

    def commit(self, accepted):
        self._call("commit", accepted)

    def close(self):
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._watch.failure is None and self._decisions.count:
                with self._watch.call():
                    self._compare()
        finally:
            self._end()
            self._own.close()

    def _call(self, name, *args):
        with self._watch.call():
            message = {"call": name, "args": ENCODE[name](*args)}
            for sock in self._data.values():
                wire.send(sock, message)
            result = getattr(self._own, name)(*args)
            before = self._decisions.count
            self._decisions.add(name, result)
            if self._decisions.count > before and self._decisions.count % CHECK_EVERY == 0:
                self._compare()
            return result

    def _compare(self) -> None:
        mine = self._decisions.message()
        for sock in self._data.values():
            wire.send(sock, {"compare": True})
        for rank, sock in self._data.items():
            if (theirs := wire.receive(sock)) != mine:
                raise RanksDiffer(f"rank {rank} decided other tokens than rank 0: found {theirs['digest']} after {theirs['count']} decisions, "
                                  f"wanted {mine['digest']} after {mine['count']}", "a GPU or its memory may be faulty: what was generated since the last comparison cannot be trusted")


def follow(own, data, watch: Watch) -> None:
    """Another rank: does what rank 0 says until the connection ends; the watch then ends the process. `data`: the connection to rank 0."""
    decisions = Decisions()
    while True:
        message = wire.receive(data)
        if "compare" in message:
            wire.send(data, decisions.message())
            continue
        with watch.call():
            name = message["call"]
            decisions.add(name, getattr(own, name)(*DECODE[name](*message["args"])))
