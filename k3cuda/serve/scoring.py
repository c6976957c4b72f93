"""Log-probabilities of a prompt's own tokens."""
import numpy as np

from ..errors import NumericalError, PromptTooLong, UsageError
from ..reference.sample import log_softmax, most_likely
from ..runtime.engine import Engine
from ..runtime.prompt_arrays import checked_ids
from ..runtime.request import Request
from ..runtime.sampling import Drawn


class Scorer:
    """Feeds a prompt by hand, one step at a time, beside the requests of the engine.

    It holds a slot and pages for a whole context, and a request whose turn came after its own may need them: so the worker gives the
    engine nothing until it is done, which takes one step for each 64 tokens or fewer.
    """

    def __init__(self, engine: Engine, held, request: Request, count: int):
        self._engine, self._held, self._ids, self._count = engine, held, request.prompt_ids, count
        self.request_id = request.request_id
        self._rows, self._scores = min(engine.backend.max_rows, engine.backend.max_logits), []

    @classmethod
    def open(cls, engine: Engine, request: Request, count: int, room: int) -> "Scorer | None":
        """None where no slot is free until a running request ends.

        Raises PromptTooLong, UsageError: ids outside the vocabulary, none, or so many that no `room` is left behind them.
        """
        ids = checked_ids(request.prompt_ids, engine.backend.cfg.vocab_size)
        if len(ids) + room > engine.context:
            raise PromptTooLong(f"the prompt has {len(ids)} tokens, the context holds {engine.context}" + " and the answer needs one of them" * room,
                                "shorten the prompt or raise max_model_len")
        try:
            return cls(engine, engine.by_hand.open(), request, count)
        except UsageError:
            if not engine.has_work:
                raise
            return None

    def advance(self) -> tuple[Drawn, ...] | None:
        """One step. The scores of all tokens but the first, once there are all; then and after an error nothing is held any more.

        Raises NumericalError where a row is not finite.
        """
        try:
            start = len(self._scores)
            rows = self._engine.by_hand.feed(self._held, self._ids[start:-1][:self._rows], every=True)
            rows = rows.get() if hasattr(rows, "get") else rows   # CuPy's come to the host
            for row, token in zip(rows, self._ids[start + 1:]):
                if not np.isfinite(row).all():
                    raise NumericalError(f"logits for position {len(self._scores) + 1} are not finite")
                logprobs = log_softmax(row)
                self._scores.append(Drawn(token, float(logprobs[token]), most_likely(logprobs, self._count)))
        except BaseException:
            self.close()
            raise
        if len(self._scores) < len(self._ids) - 1:
            return None
        self.close()
        return tuple(self._scores)

    def close(self) -> None:
        self._engine.by_hand.close(self._held)
