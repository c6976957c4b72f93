"""One HTTP request to generate: its jobs, their events, and what both routes say about them."""
import asyncio
import secrets
import time
from dataclasses import dataclass, field

from starlette.responses import Response

from ..errors import Aborted
from ..runtime.open_model import Model
from ..runtime.output import Collector, Output
from ..runtime.request import Event, Request
from .http import EventStream, Limits, json_response, unless_gone
from .metrics import Metrics
from .refusals import refusal_of
from .tokens import Words
from .worker import Job, Worker


@dataclass
class Service:
    """What every endpoint needs.

    Attributes:
        names: what the model is called; the first one is the answer's where a request names none.
        effort: how much to think where a request does not say.
        api_key: None: everybody may ask.
        allowed_origins: of web pages whose scripts may ask; "*" is all of them.
    """

    model: Model
    worker: Worker
    metrics: Metrics
    names: tuple[str, ...]
    effort: str
    limits: Limits = Limits()
    api_key: str | None = None
    allowed_origins: tuple[str, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self):
        self.words = Words(self.model.tokenizer)

    @property
    def tokenizer(self):
        """Raises CheckpointError where the checkpoint has none."""
        if self.model.tokenizer is None:
            raise self.model.no_tokenizer
        return self.model.tokenizer

    @property
    def context(self) -> int:
        return self.worker.ready.result().context


class Call:
    """Jobs that are started, read and ended together.

    Args:
        requests: the first argument of each Job. score, generate: as there, for all.
    """

    def __init__(self, worker: Worker, requests: list[Request], *, score: int | None = None, generate: bool = True):
        self._worker, self._events = worker, asyncio.Queue()
        self.jobs = [Job(r, self._events, i, score=score, generate=generate) for i, r in enumerate(requests)]
        self._collectors = [Collector(r.prompt_ids) for r in requests]
        self._open = len(requests)

    async def start(self) -> None:
        """Returns when the engine has taken every job. Raises why one was refused."""
        self._worker.submit(self.jobs)
        for job in self.jobs:
            await job.accepted

    async def batches(self):
        """Lists of (index, Event), as they come: what piled up while the client was slow comes as one. Raises what ended one badly."""
        while self._open:
            batch = [await self._events.get()]
            while not self._events.empty():
                batch.append(self._events.get_nowait())
            for index, event in batch:
                self._check(event)
                self._collectors[index].take(event)
                self._open -= event.finish_reason is not None
            yield batch

    async def outputs(self) -> list[Output]:
        await self.start()
        async for _ in self.batches():
            pass
        return [c.output for c in self._collectors]

    def close(self) -> None:
        """Ends what has not ended."""
        self._worker.cancel(self.jobs)

    def usage(self) -> dict:
        """Of all jobs together, once they have ended."""
        stats = [c.output.stats for c in self._collectors if c.output.stats is not None]
        prompt, completion = sum(len(j.request.prompt_ids) for j in self.jobs), sum(s.completion_tokens for s in stats)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
                "prompt_tokens_details": {"cached_tokens": sum(s.cached_tokens for s in stats)},
                "completion_tokens_details": {"reasoning_tokens": sum(s.reasoning_tokens for s in stats)}}

    def finish_reason(self, index: int) -> str | None:
        """None while it goes on."""
        output = self._collectors[index].output
        return output and output.finish_reason

    @staticmethod
    def _check(event: Event) -> None:
        if event.finish_reason == "error":
            raise refusal_of(event.error)
        if event.finish_reason == "abort":
            raise refusal_of(Aborted("the request was stopped"))


def head_of(prefix: str, kind: str, model: str) -> dict:
    """The fields that an answer and every event of its stream begin with."""
    return {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": model}


async def respond(http, service: Service, call: Call, events, document) -> Response:
    """The answer to a call: the stream of `events()` once it has started, or the document that `document(outputs)` makes of all of it;
    `events` is None where no stream is wanted. The call is closed when the answer ends, also if the client leaves before.
    """
    if events is not None:
        try:
            await unless_gone(http.receive, call.start())
        except BaseException:
            call.close()
            raise
        return EventStream(events(), call.close)
    try:
        outputs = await unless_gone(http.receive, call.outputs())
    finally:
        call.close()
    return json_response(document(outputs))
