"""The only loop: draft, step, accept, commit, for up to 64 sequences at once. It knows token ids, not text.

Without a draft model nothing is drafted and every draw is accepted. On a backend that overlaps, one step is always on its way while the tokens of the one before it are read: the next step takes them
where they were drawn. What it did for a sequence that turns out to have ended is never looked at.
"""
import logging
import random
import time
from dataclasses import dataclass, replace
from typing import Callable

import numpy as np

from ..errors import K3Error, NumericalError, OutOfMemory, PromptTooLong, UsageError
from .backend import Backend, Judged, Pending
from .by_hand import ByHand
from .prefix_cache import PrefixCache
from .prompt_arrays import checked_ids
from .request import Event, Request, joined, stats_of
from .sampling import DRAWN_SEED_BITS, Draw, Drawn
from .scheduler import Scheduler, Sequence, Work, step_rows
from .speculate import Speculator, kept_rows, refuse_drafts
from .text_stream import Delta

log = logging.getLogger("k3cuda")


@dataclass(frozen=True)
class Taken:
    """What a sequence takes of a step: tokens up to one that ends it, what became final in its text, and how it ended, if it did."""

    drawn: tuple[Drawn, ...]
    deltas: tuple[Delta, ...]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: K3Error | None = None


@dataclass(frozen=True)
class Launched:
    """A step on its way, with the draws of its work."""

    work: list[Work]
    pending: Pending

    @property
    def is_wanted(self) -> bool:
        """Whether any of its sequences still runs."""
        return any(w.sequence.slot is not None for w in self.work)


class Engine:
    """Continuous batching over one backend. Not thread-safe; one caller at a time.

    Args:
        backend: runs the model. The engine closes it.
        clock: seconds, monotonic.
        seeds: gives `getrandbits`, for requests without a seed.
        prefix_cache: slots of the backend, its last ones, that hold beginnings of texts instead of requests.

    Attributes:
        prefixes: what they hold; None where there are none.
        by_hand: sequences that a caller feeds, between steps.
    """

    def __init__(self, backend: Backend, *, clock: Callable[[], float] = time.perf_counter, seeds: random.Random | None = None,
                 prefix_cache: int = 0):
        self.backend, self._clock, self._seeds = backend, clock, seeds or random.SystemRandom()
        self.scheduler = Scheduler(backend.num_slots - prefix_cache, backend.num_pages, backend.max_rows, backend.page_tokens)
        stored_in = range(backend.num_slots - prefix_cache, backend.num_slots)
        self.prefixes = PrefixCache(backend, self.scheduler, stored_in) if prefix_cache else None
        # Tokens of prompt and answer together.
        spare = backend.drafting.spare_positions if backend.drafting else 0
        self.context = min(backend.max_model_len, backend.num_pages * backend.page_tokens - spare)
        self._speculator = Speculator(backend, backend.num_slots - prefix_cache) if backend.drafting else None
        self.by_hand = ByHand(backend, self.scheduler, self.context)
        self._sequences: dict[str, Sequence] = {}
        self._due: list[Event] = []  # made, not yet returned by step
        self._ahead: Launched | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._due)

    def add(self, request: Request) -> None:
        """Queues a request; it starts at one of the next steps.

        Raises:
            PromptTooLong: the prompt is empty, or leaves no room for a single token.
            UsageError: ids that are no integers or outside the vocabulary, stop ids too, a `request_id` in use, or sequences fed by hand
                that leave no slot or too few pages, however long it waits.
        """
        if request.request_id in self._sequences:
            raise UsageError(f"request_id {request.request_id!r} is in use")
        prompt = checked_ids(request.prompt_ids, self.backend.cfg.vocab_size)
        room = self.context - len(prompt)
        if room < 1:
            raise PromptTooLong.of(len(prompt), self.context)
        params = request.params.resolved({})
        if outside := [i for i in params.stop_token_ids if i >= self.backend.cfg.vocab_size]:
            raise UsageError(f"stop_token_ids: found {outside[0]}, wanted ids below the vocabulary of {self.backend.cfg.vocab_size}")
        params = replace(params, max_tokens=min(params.max_tokens or room, room),
                         seed=self._seeds.getrandbits(DRAWN_SEED_BITS) if params.seed is None else params.seed)
        sequence = Sequence(request, params, prompt, len(prompt), self._clock())
        self._speculator.prepare(sequence) if self._speculator else refuse_drafts(params)
        if not self.scheduler.can_wait(sequence):
            raise UsageError("open sessions hold the slots and cache pages that this request needs", "close a session, or raise max_batch")
        self._sequences[request.request_id] = sequence
        self.scheduler.waiting.append(sequence)

    def abort(self, request_id: str) -> None:
        """Ends a request and frees its slot now; the next `step` reports it. Unknown and ended requests are ignored."""
        if request_id in self._sequences:
            self._end_between_steps(self._sequences[request_id], "abort")

    def step(self) -> list[Event]:
        """Runs one step over everything that fits, and says what it brought.

        An exception of the backend ends the requests that had a slot, with that error; those that wait, and later ones, start from
        empty slots. An interrupt ends them too, as aborted, and is raised; the next call reports them.
        """
        try:
            self._admit()
            if self.backend.overlaps and not self._speculator:
                self._step_ahead()
            else:
                self._step()
        except Exception as e:
            log.debug("step failed", exc_info=True)
            self._end_running("error", _as_k3error(e))
        except BaseException:
            self._end_running("abort")
            raise
        events, self._due = self._due, []
        return events

    def close(self) -> None:
        """Ends everything and closes the backend; may be called twice."""
        try:
            for request_id in list(self._sequences):
                self.abort(request_id)
        finally:
            self.backend.close()

    def _admit(self) -> None:
        admit = self.prefixes.admit if self.prefixes is not None else self.scheduler.admit
        while (sequence := admit()) is not None:
            sequence.admitted = self._clock()
            if self.prefixes is None:
                self.backend.open_slot(sequence.slot, sequence.pages)

    def _plan(self) -> list[Work]:
        if self.prefixes is not None:
            self.prefixes.keep(self.scheduler.running)
        return self.scheduler.plan()

    def _step_ahead(self) -> None:
        """Launches the step behind the one that is on its way, and only then waits for that one's tokens."""
        before = self._ahead if self._ahead and self._ahead.is_wanted else self._launch()
        self._ahead = before and self._launch()
        if before:
            self._take(before)

    def _launch(self) -> Launched | None:
        work = self._plan()
        if not work:
            return None
        launched = Launched(work, self.backend.launch(step_rows(work), self._draws(work)))
        for w in work:
            w.sequence.committed += w.count
            w.sequence.unread += w.num_logits
        return launched

    def _take(self, launched: Launched) -> None:
        tokens = iter(launched.pending.drawn())
        now = self._clock()
        for w in launched.work:
            drawn = tuple(next(tokens) for _ in range(w.num_logits))
            if w.sequence.slot is not None:
                w.sequence.unread -= len(drawn)
                self._conclude(w.sequence, _take_over(w.sequence, drawn, now))

    def _step(self) -> None:
        work = self._plan()
        if not work:
            return
        if self._speculator:
            work = self._speculator.propose(work)
        stand = not self._speculator   # what stops or fails ends with its slot, and its row may stand
        self.backend.step(step_rows(work, stand))
        judged = iter(self._judge(work))
        verdicts = [next(judged) if w.num_logits else Judged(0, ()) for w in work]
        now = self._clock()
        # Stop rules come before the commit: the state ends where the answer does.
        taken = [_take_over(w.sequence, v.drawn, now) for w, v in zip(work, verdicts)]
        rows = [kept_rows(w, len(t.drawn), v.drawn) for w, v, t in zip(work, verdicts, taken)]
        self.backend.commit(np.concatenate([np.arange(w.count) < n for w, n in zip(work, rows)]) | stand)
        for w, v, t, n in zip(work, verdicts, taken, rows):
            w.sequence.committed += n
            if w.num_drafts:
                w.sequence.speculation.add(len(w.draft_ids), v.num_accepted, len(t.drawn))
            self._conclude(w.sequence, t)

    @staticmethod
    def _draws(work: list[Work]) -> list[Draw]:
        return [w.sequence.draw(w.sequence.committed + w.count) for w in work if w.num_logits]

    def _judge(self, work: list[Work]) -> list[Judged]:
        """Of every work with logits what stands, in order."""
        if self._speculator:
            return self._speculator.judge(work)
        draws = self._draws(work)
        return [Judged(0, (drawn,)) for drawn in self.backend.sample(draws)] if draws else []

    def _conclude(self, sequence: Sequence, taken: Taken) -> None:
        if taken.finish_reason:
            self._end_between_steps(sequence, taken.finish_reason, taken.drawn, taken.deltas, taken.stop_reason, taken.error)
        elif taken.drawn:
            self._due.append(Event(sequence.request.request_id, taken.drawn, joined(taken.deltas)))

    def _end_between_steps(self, sequence: Sequence, finish_reason: str, *end) -> None:
        if self.prefixes is not None and finish_reason != "error":
            self.prefixes.keep_end(sequence)
        self._end(sequence, finish_reason, *end)

    def _end(self, sequence: Sequence, finish_reason: str, drawn=(), deltas=(), stop_reason=None, error=None) -> None:
        """Frees what the request holds and flushes its text."""
        self.scheduler.remove(sequence)
        text, deltas = sequence.request.text, list(deltas)
        try:
            if text is not None:
                deltas.append(text.finish())
                if finish_reason in ("stop", "length") and text.stop_reason is not None:  # the flush may complete a stop string
                    finish_reason, stop_reason = "stop", text.stop_reason
        except Exception as e:
            finish_reason, stop_reason, error = "error", None, error or _as_k3error(e)
        del self._sequences[sequence.request.request_id]
        self._due.append(Event(sequence.request.request_id, tuple(drawn), joined(deltas), finish_reason, stop_reason, error,
                               stats_of(sequence), sequence.params))

    def _end_running(self, finish_reason: str, error: K3Error | None = None) -> None:
        self._ahead = None
        if self.prefixes is not None:
            self.prefixes.clear()
        for sequence in list(self.scheduler.running):
            self._end(sequence, finish_reason, error=error)


def _take_over(sequence: Sequence, new: tuple[Drawn, ...], now: float) -> Taken:
    """Adds new tokens to the sequence and applies the stop rules to one after the other."""
    kept, deltas = [], []

    def taken(*end) -> Taken:
        return Taken(tuple(kept), tuple(deltas), *end)

    for drawn in new:
        if drawn.token_id is None:
            return taken("error", None, NumericalError(
                f"logits for position {len(sequence.tokens)} are not finite",
                "weights may be damaged behind sound headers: compare checksums with the release; other requests go on"))
        sequence.tokens.append(drawn.token_id)
        sequence.first, sequence.last = now if sequence.first is None else sequence.first, now
        kept.append(drawn)
        try:
            finish_reason, stop_reason = _read(sequence, drawn.token_id, deltas)
        except Exception as e:  # the reader of one request is no other's business
            return taken("error", None, _as_k3error(e))
        if finish_reason:
            return taken(finish_reason, stop_reason)
    return taken()


def _read(sequence: Sequence, token: int, deltas: list[Delta]) -> tuple[str | None, str | int | None]:
    """(finish_reason, stop_reason) after one token; text goes to `deltas`. A stop beats a limit that is reached with it."""
    params, text = sequence.params, sequence.request.text
    is_eos = token in sequence.request.eos_ids and not params.ignore_eos
    if not is_eos and token in params.stop_token_ids:
        return "stop", token  # its text is not shown
    if text is not None:
        deltas.append(text.feed(token))  # an end token shows nothing, but closes what is open
        if text.stop_reason is not None:
            return "stop", text.stop_reason
    if is_eos:
        return "stop", None
    return ("length" if sequence.num_output >= params.max_tokens else None), None


def _as_k3error(e: Exception) -> K3Error:
    if isinstance(e, K3Error):
        return e
    error = (OutOfMemory if isinstance(e, MemoryError) else K3Error)(f"the step failed: {type(e).__name__}: {e}")
    error.__cause__ = e
    return error
