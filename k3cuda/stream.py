"""The answer to one request of an LLM, handed out as it comes."""
from functools import partial

from .runtime.output import Chunk


class Stream:
    """An iterator of Chunk for one request. Closing it, or losing it, aborts the request; the last chunk has the whole answer."""

    def __init__(self, llm, request_id: str):
        self._llm, self._id, self._collector = llm, request_id, llm._collectors[request_id]

    def __iter__(self):
        return self

    def __next__(self) -> Chunk:
        self.wait()
        return self._collector.chunks.popleft()

    @property
    def waiting(self) -> int:
        """Chunks that can be taken without a step of the model."""
        return len(self._collector.chunks)

    def wait(self) -> None:
        """Steps the model until a chunk is waiting. StopIteration: the request has ended and all its chunks were taken."""
        while not self.step():
            pass

    def step(self) -> bool:
        """Runs one step of the model, if no chunk is waiting; whether one is now. StopIteration as `wait`."""
        if not self._collector.chunks:
            self._advance()
        return bool(self._collector.chunks)

    @property
    def output(self):
        """The whole answer once it has ended, also while chunks of it wait to be handed out; None before."""
        return self._collector.output

    def _advance(self) -> None:
        llm = self._llm
        with llm._exclusive():
            # A request that has ended without a last chunk was closed, or an interrupt came just as that chunk was handed over.
            is_over = self._id not in llm._collectors or self._collector.output is not None or not llm._has_work
            if not is_over:
                llm._pump()
        if is_over and not self._collector.chunks:
            self.close()
            raise StopIteration

    def close(self) -> None:
        """Ends the request at once and frees its slot; what was not handed out is dropped. May be called twice, and after the end."""
        self._collector.chunks.clear()
        if self._id in self._llm._collectors:
            with self._llm._exclusive():
                self._llm._forget(self._id)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        # Garbage collection may come in the middle of a step: the next one clears up.
        self._llm._dropped.append(partial(self._llm._forget, self._id))
