"""Draft and verify, as the engine asks for it: who drafts how much, what is put to the target, and what is counted."""
import logging
from dataclasses import dataclass, field, replace

from ..errors import UsageError
from .backend import Backend, DraftAsk, Judge, Judged
from .drafting import GREEDY
from .sampling import Drawn, SamplingParams
from .scheduler import Sequence, Work

log = logging.getLogger("k3cuda")


@dataclass
class Counts:
    """What became of the drafts of one request.

    Attributes:
        num_drafts: asked for a step.
        steps: verify steps. proposed, accepted: drafts that were verified, and those that stood. emitted: tokens of these steps.
        per_position: for each place in a block the steps whose draft there stood.
    """

    num_drafts: int
    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    emitted: int = 0
    per_position: list[int] = field(default_factory=list)

    def add(self, proposed: int, accepted: int, emitted: int) -> None:
        self.steps, self.proposed, self.accepted, self.emitted = self.steps + 1, self.proposed + proposed, self.accepted + accepted, self.emitted + emitted
        self.per_position += [0] * (self.num_drafts - len(self.per_position))
        for i in range(accepted):
            self.per_position[i] += 1


class Speculator:
    """Speculation over one backend that has a draft model (`backend.drafting`), for at most `max_batch` sequences at a time.

    Raises UsageError where these do not fit one step with all their drafts.
    """

    def __init__(self, backend: Backend, max_batch: int):
        self._backend, self.drafting = backend, backend.drafting
        self.drafting.check_batch(max_batch)
        self._warned = False

    def prepare(self, sequence: Sequence) -> None:
        """Settles how much a new sequence drafts. Raises UsageError where it asks for more than the model was opened with."""
        asked, most = sequence.params.num_drafts, self.drafting.num_drafts
        if asked is not None and asked > most:
            raise UsageError(f"num_drafts: found {asked}, the model was opened with {most} drafts a step", "ask for fewer, or open it with more")
        count = most if asked is None else asked
        sequence.params = replace(sequence.params, num_drafts=count)
        sequence.spare = self.drafting.spare_positions
        if count:
            sequence.drafts, sequence.speculation = count, Counts(count)
            sequence.last_anchor = self.drafting.source.cfg.max_position_embeddings - self.drafting.block_rows

    def propose(self, work: list[Work]) -> list[Work]:
        """The same work with the drafts that are to be verified."""
        self._warn(work)
        asking = [w for w in work if w.num_drafts]
        if not asking:
            return work
        # One answer serves all: the host reads the drafts of a step, or none.
        is_read = self.drafting.confidence_threshold is not None or any(w.sequence.params.has_penalties for w in asking)
        found = dict(zip(map(id, asking), self._backend.propose([self._ask(w.sequence, is_read) for w in asking])))
        out = []
        for w in work:
            if w.num_drafts:
                ids = self._sure(found[id(w)])[:w.num_drafts]
                w = replace(w, count=w.count + len(ids), num_logits=w.num_logits + len(ids), draft_ids=ids)
            out.append(w)
        return out

    def judge(self, work: list[Work]) -> list[Judged]:
        """Of every work with logits how many drafts stand and what its tokens are, in order; without drafts it is a plain draw."""
        asks = []
        for w in work:
            if w.num_logits:
                first = w.sequence.committed + w.count - len(w.draft_ids)
                asks.append(Judge(w.sequence.slot, w.draft_ids, tuple(w.sequence.draw(first + i, w.draft_ids[:i]) for i in range(len(w.draft_ids) + 1))))
        return self._backend.accept(asks) if asks else []

    def _ask(self, sequence: Sequence, is_read: bool) -> DraftAsk:
        params = sequence.params
        is_drawn = self.drafting.draft_sampling != GREEDY and not params.greedy
        return DraftAsk(sequence.slot, sequence.tokens[-1], len(sequence.tokens) - 1, params.seed, params.temperature if is_drawn else 0.0, is_read)

    def _sure(self, drafted) -> tuple[int, ...]:
        """The drafts before the first that is too unlikely to stand. That it is left out must not depend on its own token: it does not."""
        limit = self.drafting.confidence_threshold
        if limit is None or drafted.confidence is None:
            return drafted.token_ids
        return drafted.token_ids[:next((i for i, c in enumerate(drafted.confidence) if c < limit), len(drafted.token_ids))]

    def _warn(self, work: list[Work]) -> None:
        if not self._warned and any(w.sequence.drafts and w.sequence.is_decoding and len(w.sequence.tokens) - 1 > w.sequence.last_anchor for w in work):
            self._warned = True
            log.warning("from position %d on requests go on without drafts: the draft model's context ends at %d",
                        max(w.sequence.last_anchor for w in work) + 1, self.drafting.source.cfg.max_position_embeddings)


def refuse_drafts(params: SamplingParams) -> None:
    """Raises UsageError where a request wants drafts of a model that was opened without a draft model."""
    if params.num_drafts:
        raise UsageError(f"num_drafts: found {params.num_drafts}, but there is no draft model", "open the model with one, or leave it out")


def kept_rows(work: Work, kept: int, drawn: tuple[Drawn, ...]) -> int:
    """Rows of the step that the state keeps, after `kept` of the tokens `drawn`: all but the last of the tokens so far are run.

    Drafts behind a stop are not in it, nor is a step whose first token could not be drawn.
    """
    if not drawn:
        return work.count
    return work.count - len(work.draft_ids) + kept - 1 if kept else 0
