"""Sequences fed by hand, beside the requests of the engine."""
from dataclasses import dataclass

import numpy as np

from ..errors import K3Error, PromptTooLong, UsageError
from .backend import Backend, StepRows
from .prompt_arrays import checked_ids
from .scheduler import Scheduler


@dataclass(eq=False)
class Held:
    """A slot and its pages, from `ByHand.open` or `fork` to `close`.

    Attributes:
        slot, pages: as the backend numbers them; pages for the whole context, in order of position.
        length: tokens committed.
        is_lost: a commit broke off, and what the state is nobody knows.
    """

    slot: int
    pages: tuple[int, ...]
    length: int = 0
    is_lost: bool = False


class ByHand:
    """Opens, feeds and copies such sequences. Not thread-safe; never called in the middle of a step.

    Args:
        context: tokens that a sequence can have.
    """

    def __init__(self, backend: Backend, scheduler: Scheduler, context: int):
        self._backend, self._scheduler, self._context = backend, scheduler, context

    def open(self) -> Held:
        """An empty sequence. Raises UsageError where no slot or page is free, or where none would be left for a request that waits."""
        held = self._take()
        try:
            self._backend.open_slot(held.slot, held.pages)
        except BaseException:
            self.close(held)
            raise
        return held

    def fork(self, held: Held) -> Held:
        """A copy that goes its own way. Pages that are full are never written again, so both have them; the rest is copied. Errors of `open`."""
        self._check_sound(held)
        copy = self._take(held.pages[:held.length // self._scheduler.page_tokens])
        try:
            self._backend.copy_slot(held.slot, copy.slot, copy.pages)
        except BaseException:
            self.close(copy)
            raise
        copy.length = held.length
        return copy

    def close(self, held: Held) -> None:
        self._scheduler.end_loan(held.slot, held.pages)

    def feed(self, held: Held, token_ids, every: bool):
        """Commits tokens, in as many steps as they need.

        Args:
            token_ids: int [n].
            every: whether logits are wanted for each token, or for the last one alone.
        Returns:
            float32 [n or 1, vocab_size], an array of the caller's own: `Backend.new_logits`.
        Raises:
            PromptTooLong, UsageError: before anything runs, for ids outside the vocabulary, none, or more than the context holds.
        """
        self._check_sound(held)
        if not len(token_ids):
            raise PromptTooLong("there is no token to feed", "give at least one")
        ids = checked_ids(token_ids, self._backend.cfg.vocab_size)
        if held.length + len(ids) > self._context:
            before = f"{len(ids)} tokens behind {held.length}" if held.length else f"{len(ids)} tokens"
            raise PromptTooLong(f"found {before}, the context holds {self._context}", "raise max_model_len")
        out = self._backend.new_logits(len(ids) if every else 1)
        most = min(self._backend.max_rows, self._backend.max_logits) if every else self._backend.max_rows
        for start in range(0, len(ids), most):
            chunk = ids[start:start + most]
            n, is_last = len(chunk), start + len(chunk) == len(ids)
            wanted = range(n) if every else [n - 1] * is_last
            self._step(held, chunk, wanted)
            self._commit(held, n)
            if wanted:   # behind the commit, so that states too are there for whoever has the logits
                self._backend.copy_logits(out[start:start + n] if every else out)
        return out

    def logits(self, token_ids) -> np.ndarray:
        """Teacher-forced: one token a step from an empty state.

        Args:
            token_ids: int [tokens].
        Returns:
            float32 [tokens, vocab_size] on the host, row i is the law of token i + 1.
        Raises:
            PromptTooLong: no token, or more than the context holds.
            UsageError: ids outside the vocabulary, or no free slot.
        """
        ids = checked_ids(token_ids, self._backend.cfg.vocab_size)
        if len(ids) > self._context:
            raise PromptTooLong(f"found {len(ids)} tokens, the context holds {self._context}", "raise max_model_len")
        taken = self._scheduler.take(self._scheduler.pages_for(len(ids)))   # given back below, so requests that wait lose nothing
        if taken is None:
            raise UsageError("no slot or cache page is free for logits", "finish or close running streams and sessions, or raise max_batch")
        held = Held(*taken)
        try:
            self._backend.open_slot(held.slot, held.pages)
            out = np.empty((len(ids), self._backend.cfg.vocab_size), np.float32)
            for position, token in enumerate(ids):
                self._step(held, [token], [0])
                out[position] = self._backend.logits()[0]
                self._commit(held, 1)
            return out
        finally:
            self._scheduler.give_back(held.slot, held.pages)

    def _take(self, shared=()) -> Held:
        needed = self._scheduler.pages_for(self._context)
        taken = self._scheduler.lend(needed, shared)
        if taken is None:
            slots, pages = self._scheduler.free
            raise UsageError(f"a session needs a slot and {needed - len(shared)} cache pages; {slots} slots and {pages} pages are "
                             f"free, {len(self._scheduler.waiting)} requests wait for theirs", "close a session or a stream, or raise max_batch")
        return Held(*taken)

    def _step(self, held: Held, ids: list[int], logit_rows) -> None:
        positions = range(held.length, held.length + len(ids))
        self._backend.step(StepRows(*(np.array(x, np.int32) for x in (ids, [held.slot] * len(ids), positions, logit_rows))))

    def _commit(self, held: Held, num_rows: int) -> None:
        try:
            self._backend.commit(np.ones(num_rows, bool))
            held.length += num_rows
        except BaseException:
            held.is_lost = True
            raise

    @staticmethod
    def _check_sound(held: Held) -> None:
        if held.is_lost:
            raise K3Error(f"the state of this session was lost: its commit behind {held.length} tokens broke off", "close it and prefill again")
