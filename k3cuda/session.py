"""A sequence that a script feeds itself, token by token, with the logits as arrays where the model runs."""
from functools import partial

from .errors import UsageError
from .runtime.prompt_arrays import as_tokens


class Session:
    """Made by `LLM.prefill` and `fork`; a context manager. It holds a slot and cache pages for a whole context until it is closed or lost.

    Requests, streams and other sessions of the LLM may run between its calls and change nothing in it. After an error it stands where it
    stood, `position` says where.

    Arrays are NumPy's on the reference backend and CuPy's on a GPU, where they are ready on the stream that was CuPy's current one when
    they were made. They are the caller's own: no later step writes them.
    """

    def __init__(self, llm, held):
        self._llm, self._held, self._is_closed = llm, held, False
        self._logits, self._logits_position = None, 0

    @property
    def logits(self):
        """float32 [vocab_size], raw: the law of the token at `position`. The same array until the next step, then another one."""
        if self._logits_position != self.position:
            raise UsageError(f"the last call broke off behind {self.position} tokens: nobody asked for the logits there", "feed the tokens that are missing")
        return self._logits

    @property
    def position(self) -> int:
        """Tokens so far, which is the position of the next one; also `len(session)`."""
        return self._held.length

    __len__ = position.fget

    @property
    def slot(self) -> int:
        """Where its states are in buffers with an axis of slots."""
        self._by_hand()
        return self._held.slot

    @property
    def pages(self) -> tuple[int, ...]:
        """Where its rows are in the MLA cache, in order of position: 64 a page on each rank that holds a part of it. Forks share pages that were full."""
        self._by_hand()
        return self._held.pages

    def step(self, ids):
        """Feeds tokens and returns what the model says after each of them.

        Args:
            ids: one integer (also an array without axes), or integers [n]: a list, or an array of NumPy, CuPy or anything with DLPack.
        Returns:
            float32 [vocab_size] for an integer, [n, vocab_size] for a list or an array.
        Raises:
            PromptTooLong: no token, or more than the context holds.
            UsageError: ids that are no integers inside the vocabulary, a closed session, a call from inside or beside another one.
        """
        ids, is_one = as_tokens(ids)
        out = self._feed(ids, every=True)
        return out[0] if is_one else out

    def feed(self, ids) -> None:
        """As `step`, but keeps only `logits`, those after the last token: for long texts, whose logits are large."""
        self._feed(as_tokens(ids)[0], every=False)

    def fork(self) -> "Session":
        """Another session with the same past. From here on the two know nothing of each other.

        Raises:
            UsageError: no slot is free (`max_batch` of them exist), a closed session, a call from inside or beside another one.
        """
        with self._llm._exclusive():
            child = Session(self._llm, self._by_hand().fork(self._held))
            if self._logits_position == self.position:
                child._logits, child._logits_position = self._logits.copy(), self.position
            return child

    def close(self) -> None:
        """Frees slot and pages. May be called twice, and after the LLM was closed."""
        if not self._is_closed:
            with self._llm._exclusive():
                self._is_closed = True
                self._llm._let_go(self._held)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        # Garbage collection may come in the middle of a step: the next call clears up.
        if not self._is_closed:
            self._llm._dropped.append(partial(self._llm._let_go, self._held))

    def _feed(self, ids: list[int], every: bool):
        with self._llm._exclusive():
            out = self._by_hand().feed(self._held, ids, every)
            # A row of its own: what `step` returned is the caller's to change.
            self._logits, self._logits_position = out[-1].copy() if every else out[-1], self.position
            return out

    def _by_hand(self):
        engine = self._llm._open_engine()
        if self._is_closed:
            raise UsageError("this session is closed", "open another one with prefill, or fork before closing")
        return engine.by_hand
