"""Which sequences hold slots and pages, and whose rows make up the next step."""
import heapq
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Callable

import numpy as np

from ..config import PAGE_SIZE
from .backend import AS_SAMPLED, StepRows
from .sampling import Draw, SamplingParams

MIXED_ROWS = 256   # of a step that has prompts beside decoding sequences, which wait for it


@dataclass(eq=False)
class Sequence:
    """A request from its arrival to its end.

    After every step `len(tokens) + unread = committed + 1` once the prompt is done: the last token is drawn, but not yet run.

    Attributes:
        request: what was asked (request.Request).
        params: resolved, seed and max_tokens filled in.
        tokens: prompt, then output.
        num_prompt: tokens of the prompt.
        committed: tokens in the backend's state.
        unread: tokens drawn behind `tokens` that the host has not read, 0 or 1.
        slot, pages: held while it runs; None and () while it waits.
        drafts, last_anchor: drafts it asks for in a step, as long as its last token stands at no later position than that.
        spare: positions behind its last one that the draft model's cache needs.
        speculation: what became of its drafts (speculate.Counts); None where it has none.
        reused: tokens of the prompt that a stored prefix had (prefix_cache.py).
        marks: lengths in the prompt where its state is to be stored, falling: no step goes across one.
        kept, stored: length and state of the last one stored in its answer.
        arrived, admitted, first, last: times of the engine's clock, in seconds; `first` and `last` of output tokens.
    """

    request: object
    params: SamplingParams
    tokens: list[int]
    num_prompt: int
    arrived: float
    committed: int = 0
    unread: int = 0
    slot: int | None = None
    pages: tuple[int, ...] = ()
    drafts: int = 0
    last_anchor: int = -1
    spare: int = 0
    speculation: object = None
    admitted: float | None = None
    first: float | None = None
    last: float | None = None
    reused: int = 0
    marks: list[int] = field(default_factory=list)
    kept: int = 0
    stored: object | None = field(default=None, repr=False)
    _prompt_set: np.ndarray | None = field(default=None, repr=False)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_positions(self) -> int:
        """Every position it may ever hold."""
        return self.num_prompt + self.params.max_tokens + self.spare

    @property
    def is_decoding(self) -> bool:
        return self.num_output + self.unread > 0

    @property
    def num_pending(self) -> int:
        """Tokens to run; none behind a last one that max_tokens has fixed, though nobody has read it."""
        return len(self.tokens) + self.unread - self.committed if self.num_output + self.unread < self.params.max_tokens else 0

    @property
    def num_drafts(self) -> int:
        """Drafts that its next step may verify: never more than could be kept beside the token that follows them."""
        if not self.is_decoding or len(self.tokens) - 1 > self.last_anchor:
            return 0
        return min(self.drafts, self.params.max_tokens - self.num_output - 1)

    def draw(self, position: int, drafts: tuple[int, ...] = ()) -> Draw:
        """The token of `position`, which follows all tokens so far, the unread one too, and these drafts."""
        if not self.params.has_penalties:
            return Draw(self.params, self.params.seed, position)
        if self._prompt_set is None:
            self._prompt_set = np.unique(self.tokens[:self.num_prompt])  # penalties ask only which tokens were there
        return Draw(self.params, self.params.seed, position, prompt_ids=self._prompt_set, output_ids=[*self.tokens[self.num_prompt:], *drafts],
                    after_sampled=self.unread > 0)


@dataclass(frozen=True)
class Work:
    """The rows of one sequence in a step: `count` tokens from its committed length on.

    `num_logits` of them, the last ones, want logits: none inside a prompt, one for the token that follows it or is decoded. There is room
    for `num_drafts` rows more; once they are proposed, `draft_ids` are the tokens of the last rows, and counted as these are.
    """

    sequence: Sequence
    count: int
    num_logits: int
    num_drafts: int = 0
    draft_ids: tuple[int, ...] = ()


class Scheduler:
    """First come, first served: slots and pages are given in order of arrival, and taken for the whole life of a request.

    Args:
        num_slots, num_pages, max_rows, page_tokens: of the backend.
    """

    def __init__(self, num_slots: int, num_pages: int, max_rows: int, page_tokens: int = PAGE_SIZE):
        self.max_rows, self.page_tokens = max_rows, page_tokens
        # Every decoding sequence gets a row in every step, and a row is left while any prompt waits in a slot.
        self.num_slots = min(num_slots, max_rows)
        self.num_pages = num_pages
        self._free_slots, self._free_pages = list(range(self.num_slots)), list(range(num_pages))
        self._holders = [0] * num_pages  # sequences, and stored prefixes, that have the page
        self.make_room: Callable[[], bool] = lambda: False   # gives up something that nobody waits for; False: there is nothing
        self._lent: Counter[int] = Counter()   # loans of each page
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def free(self) -> tuple[int, int]:
        """(slots, pages) that nobody holds."""
        return len(self._free_slots), len(self._free_pages)

    def pages_for(self, positions: int) -> int:
        """Pages that hold so many."""
        return -(-positions // self.page_tokens)

    def take(self, num_pages: int, shared: tuple[int, ...] = ()) -> tuple[int, tuple[int, ...]] | None:
        """A slot and so many pages, lowest numbers first, behind those that are `shared` with another; None where there are not enough."""
        pages = self.hold(num_pages, shared) if self._free_slots else None
        return None if pages is None else (heapq.heappop(self._free_slots), pages)

    def give_back(self, slot: int, pages) -> None:
        heapq.heappush(self._free_slots, slot)
        self.drop(pages)

    def hold(self, num_pages: int, shared: tuple[int, ...] = ()) -> tuple[int, ...] | None:
        """`take` without a slot. Where pages are missing, `make_room` is asked for them."""
        self._retain(shared)
        while num_pages - len(shared) > len(self._free_pages):
            if not self.make_room():
                self.drop(shared)
                return None
        fresh = tuple(heapq.heappop(self._free_pages) for _ in range(num_pages - len(shared)))
        self._retain(fresh)
        return (*shared, *fresh)

    def drop(self, pages) -> None:
        """Gives back what `hold` gave."""
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                heapq.heappush(self._free_pages, page)

    def _retain(self, pages) -> None:
        for page in pages:
            self._holders[page] += 1

    def lend(self, num_pages: int, shared: tuple[int, ...] = ()) -> tuple[int, tuple[int, ...]] | None:
        """`take` for one who may never give back: None also where a waiting sequence could then wait for ever."""
        taken = self.take(num_pages, shared)
        if taken is None:
            return None
        self._lent.update(taken[1])
        if not all(map(self.can_wait, self.waiting)):
            self.end_loan(*taken)
            return None
        return taken

    def end_loan(self, slot: int, pages) -> None:
        self._lent.subtract(pages)
        for page in pages:
            if not self._lent[page]:
                del self._lent[page]
        self.give_back(slot, pages)

    def can_wait(self, sequence: Sequence) -> bool:
        """Whether it can be admitted once every running sequence has ended: what is lent never ends by itself. What is stored makes room."""
        slots, _ = self.free
        return slots + len(self.running) > 0 and self.pages_for(sequence.num_positions) <= self.num_pages - len(self._lent)

    def admit(self, shared: tuple[int, ...] = ()) -> Sequence | None:
        """Gives the first waiting sequence its slot and pages, the first of them `shared` with another. It is never overtaken, so that
        long requests are not starved."""
        held = self.take(self.pages_for(self.waiting[0].num_positions), shared) if self.waiting else None
        if held is None:
            return None
        sequence = self.waiting.popleft()
        sequence.slot, sequence.pages = held
        self.running.append(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Takes it out, wherever it is, and frees what it holds."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self.give_back(sequence.slot, sequence.pages)
        sequence.slot, sequence.pages = None, ()

    def plan(self) -> list[Work]:
        """Decoding sequences first, then chunks of prompts in order of arrival, at most `max_rows` rows in all, MIXED_ROWS beside decoding ones."""
        room, work = min(self.max_rows, MIXED_ROWS) if any(s.is_decoding for s in self.running) else self.max_rows, []
        for sequence in sorted(self.running, key=lambda s: not s.is_decoding):  # stable: arrival within each kind
            pending = sequence.num_pending
            count = min(pending, room, sequence.marks[-1] - sequence.committed if sequence.marks else room)
            if count:
                drafts = min(sequence.num_drafts, room - count)
                work.append(Work(sequence, count, int(count == pending), drafts))
                room -= count + drafts
        return work


def step_rows(work: list[Work], stand: bool = False) -> StepRows:
    """The rows of `work`, sequence after sequence. `stand`: as StepRows."""
    token_ids, slots, positions, logit_rows = [], [], [], []
    for w in work:
        start, end = w.sequence.committed, w.sequence.committed + w.count
        known = end - len(w.draft_ids)
        token_ids += w.sequence.tokens[start:known]
        token_ids += [AS_SAMPLED] * (known - max(start, len(w.sequence.tokens)))
        token_ids += w.draft_ids
        slots += [w.sequence.slot] * w.count
        positions += range(start, end)
        logit_rows += range(len(token_ids) - w.num_logits, len(token_ids))
    return StepRows(*(np.array(x, np.int32) for x in (token_ids, slots, positions, logit_rows)), stand)
