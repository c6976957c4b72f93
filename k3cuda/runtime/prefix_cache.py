"""Beginnings of texts whose state is kept: a request that starts with one goes on behind it instead of running it again.

What is kept is a triple at one token boundary, KDA state, conv window and pages of the MLA cache: the first two have no history, so a
prefix can be used only as far as one was stored, and `copy_slot` is all that storing and using it need. docs/serve.md says when.
"""
from dataclasses import dataclass
from typing import Iterable

import numpy as np

from .backend import Backend
from .scheduler import Scheduler, Sequence

EARLY = 64   # tokens in which most texts differ, if they do


@dataclass(eq=False)
class Prefix:
    """A stored beginning.

    Attributes:
        tokens: int32 [length], what it is the state of.
        slot, pages: where it is; full pages are shared with whoever else has them.
        source: the sequence it was copied from, until the token behind it was read: a row that turns out not to be finite takes the
            state before it along.
    """

    tokens: np.ndarray
    slot: int
    pages: tuple[int, ...]
    source: Sequence | None

    @property
    def length(self) -> int:
        return len(self.tokens)

    def common(self, tokens: np.ndarray) -> int:
        """How many tokens it has in common with the beginning of a text."""
        n = min(len(tokens), self.length)
        differ = np.flatnonzero(tokens[:EARLY] != self.tokens[:EARLY]) if n >= EARLY else ()
        if not len(differ):
            differ = np.flatnonzero(tokens[:n] != self.tokens[:n])
        return int(differ[0]) if len(differ) else n


class PrefixCache:
    """At most so many prefixes; the one that was not used for longest makes room.

    Args:
        slots: of the backend, for nobody else's use; one a prefix.

    Attributes:
        queried, hit: prompt tokens of requests that were looked for, and those found.
    """

    def __init__(self, backend: Backend, scheduler: Scheduler, slots: Iterable[int]):
        self._backend, self._scheduler, self._page = backend, scheduler, scheduler.page_tokens
        self._free_slots, self._prefixes = list(slots), []   # least recently used first
        self._in_use: Prefix | None = None
        self.queried = self.hit = 0
        scheduler.make_room = self._make_room

    def __len__(self) -> int:
        return len(self._prefixes)

    def admit(self) -> Sequence | None:
        """`Scheduler.admit`, with the slot opened and `committed` where the longest prefix of its prompt ends."""
        if not self._scheduler.waiting or not self._scheduler.free[0]:
            return None
        prompt = np.array(self._scheduler.waiting[0].tokens, np.int32)
        found, shared_until = self._find(prompt)
        self._in_use = found
        try:
            sequence = self._scheduler.admit(found.pages[:found.length // self._page] if found else ())
            if sequence is None and found:   # its own pages may be the room that is missing
                self._in_use = found = None
                sequence = self._scheduler.admit()
            if sequence is None:
                return None
            if found:
                self._prefixes.remove(found)
                self._prefixes.append(found)
                self._backend.copy_slot(found.slot, sequence.slot, sequence.pages)
                sequence.committed = sequence.reused = found.length
            else:
                self._backend.open_slot(sequence.slot, sequence.pages)
        finally:
            self._in_use = None
        self.queried += sequence.num_prompt
        self.hit += sequence.reused
        if self._keeps_end(sequence):
            return sequence
        ends = {shared_until, (len(prompt) - 1) // self._page * self._page}
        sequence.marks = sorted((n for n in ends if n > sequence.reused), reverse=True)
        return sequence

    def keep(self, sequences: Iterable[Sequence]) -> None:
        """Stores what stands at a mark of its prompt, or in another page of its answer than the last time. Called before each step."""
        for sequence in sequences:
            if sequence.marks and sequence.committed == sequence.marks[-1]:
                sequence.marks.pop()
                self._store(sequence)
            elif sequence.is_decoding and not self._keeps_end(sequence) and sequence.committed // self._page > max(sequence.num_prompt, sequence.kept) // self._page:
                sequence.kept = sequence.committed
                if sequence.stored in self._prefixes:   # an answer has one, however long it grows
                    self._drop(sequence.stored)
                sequence.stored = self._store(sequence)

    def keep_end(self, sequence: Sequence) -> None:
        """Stores where an answer ends, whatever the page, if its request wants that. Called between steps, while it has its slot."""
        if self._keeps_end(sequence) and sequence.is_decoding and (stored := self._store(sequence)):
            stored.source = None   # the token behind it was read: it ended the answer

    def clear(self) -> None:
        """Forgets everything: after a step that failed nobody knows what states are worth."""
        for prefix in list(self._prefixes):
            self._drop(prefix)

    def _keeps_end(self, sequence: Sequence) -> bool:
        # Where a step is on its way already, its row stands behind the end and nobody will read what came of it.
        return sequence.request.keeps_end and not self._backend.overlaps

    def _find(self, prompt: np.ndarray) -> tuple[Prefix | None, int]:
        """The longest prefix of a prompt, one token short of it at most, since something must be run to draw from; and the page boundary
        up to which the prompt has more than that in common with any text that was stored: others will share it too."""
        best, shared = None, 0
        for prefix in list(self._prefixes):
            if prefix.source is not None:
                if len(prefix.source.tokens) > prefix.length:
                    prefix.source = None
                elif prefix.source.slot is None:   # it ended before the token was read
                    self._drop(prefix)
                    continue
                else:
                    continue
            common = prefix.common(prompt)
            if common == prefix.length < len(prompt) and (best is None or common > best.length):
                best = prefix
            shared = max(shared, min(common, len(prompt) - 1) // self._page * self._page)
        return best, shared

    def _store(self, sequence: Sequence) -> Prefix | None:
        tokens = np.array(sequence.tokens[:sequence.committed], np.int32)
        length = len(tokens)
        if length < sequence.committed or any(p.length == length and p.common(tokens) == length for p in self._prefixes):
            return None   # a token that nobody has read yet, or here already
        if not self._free_slots:
            self._drop(self._prefixes[0])
        pages = self._scheduler.hold(self._scheduler.pages_for(length), sequence.pages[:length // self._page])
        if pages is None:
            return None
        prefix = Prefix(tokens, self._free_slots.pop(), pages, sequence)
        self._prefixes.append(prefix)
        try:
            self._backend.copy_slot(sequence.slot, prefix.slot, pages)
        except BaseException:
            self._drop(prefix)
            raise
        return prefix

    def _make_room(self) -> bool:
        """Drops the prefix that was not used for longest; False where there is none to drop."""
        for prefix in self._prefixes:
            if prefix is not self._in_use:
                self._drop(prefix)
                return True
        return False

    def _drop(self, prefix: Prefix) -> None:
        self._prefixes.remove(prefix)
        self._free_slots.append(prefix.slot)
        self._scheduler.drop(prefix.pages)
