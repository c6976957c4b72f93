"""POST /v1/completions: text as it is, for evaluations and benchmarks."""
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..errors import PromptTooLong
from ..runtime.output import Output
from ..runtime.prompt_arrays import as_prompts
from ..runtime.request import Request
from ..runtime.text_stream import TextStream
from ..runtime.tokenizer import within
from . import fields
from .calls import Call, Service, head_of, respond
from .http import DONE, answered, error_response, event_of, off_loop, read_body
from .refusals import bad, refusal_of
from .tokens import TokenLists


@dataclass(frozen=True)
class Wish:
    """A body that was read. `logprobs`: None, or how many likely tokens to show; `max_tokens` 0 only scores the prompt."""

    head: dict
    requests: list[Request]
    stream: bool
    include_usage: bool
    echo: bool
    logprobs: int | None
    generate: bool


def _read(service: Service, data: bytes) -> Wish:
    body = fields.parsed(data)
    fields.check_names(body, fields.COMPLETION)
    head = head_of("cmpl", "text_completion", fields.check_model(body, service.names))
    stream, echo = fields.boolean(body, "stream"), fields.boolean(body, "echo")
    include_usage = fields.include_usage(body, stream)
    max_tokens = fields.max_tokens(body)
    generate = not (echo and max_tokens == 0 and not isinstance(max_tokens, bool))
    params = fields.sampling(body, max_tokens=max_tokens if generate else None, logprobs=body.get("logprobs"))
    params = params.resolved(service.model.generation_config)
    prompts = as_prompts(fields.wanted(body, "prompt"))
    if not prompts:
        raise bad("prompt", "found an empty list, wanted text or token ids")
    if len(prompts) > service.worker.capacity:   # before each of them costs kilobytes
        raise bad("prompt", f"found {len(prompts)} prompts, this server takes at most {service.worker.capacity} at a time")
    ids = [within(service.tokenizer.encoded(p), service.context) if isinstance(p, str) else p for p in prompts]
    if not all(ids):
        raise PromptTooLong("the prompt is empty", "give at least one token")
    requests = [Request(f"{head['id']}-{i}", p, params, service.model.eos_ids, _reader(service, params)) for i, p in enumerate(ids)]
    return Wish(head, requests, stream, include_usage, echo, params.logprobs, generate)


def _reader(service: Service, params) -> TextStream | None:
    return None if service.model.tokenizer is None and not params.stop else TextStream(service.tokenizer, params.stop)


@answered
async def completions(http: HttpRequest) -> Response:
    service: Service = http.app.state.service
    data = await read_body(http, service.limits)
    wish = await off_loop(len(data), _read, service, data)
    call = Call(service.worker, wish.requests, score=wish.logprobs if wish.echo else None, generate=wish.generate)
    events = (lambda: _events(service, wish, call)) if wish.stream else None
    return await respond(http, service, call, events, lambda outputs: wish.head | {
        "choices": [_choice(service, wish, call, i, output) for i, output in enumerate(outputs)], "usage": call.usage()})


def _choice(service: Service, wish: Wish, call: Call, index: int, output: Output) -> dict:
    lists, ids = TokenLists(service.words), wish.requests[index].prompt_ids
    if wish.echo:
        lists.add_prompt(ids, call.jobs[index].scores)
    for drawn in output.logprobs or ():
        lists.add(drawn)
    return {"index": index, "text": _prompt_text(service, wish, ids) + output.text, "logprobs": None if wish.logprobs is None else lists.taken(),
            "finish_reason": output.finish_reason, "stop_reason": output.stop_reason}


def _prompt_text(service: Service, wish: Wish, ids) -> str:
    return service.tokenizer.decode(ids) if wish.echo else ""


async def _events(service: Service, wish: Wish, call: Call):
    usage = {"usage": None} if wish.include_usage else {}
    lists = [TokenLists(service.words) for _ in wish.requests]
    is_first = [True] * len(lists)

    def chunk(index: int, text: str, finish_reason, stop_reason) -> bytes:
        choice = {"index": index, "text": text, "logprobs": None if wish.logprobs is None else lists[index].taken(),
                  "finish_reason": finish_reason, "stop_reason": stop_reason}
        return event_of(wish.head | {"choices": [choice]} | usage)

    try:
        async for batch in call.batches():
            pieces = []
            for index, event in batch:
                text = event.delta.content
                if is_first[index]:
                    is_first[index], ids = False, wish.requests[index].prompt_ids
                    text = _prompt_text(service, wish, ids) + text
                    if wish.echo:
                        lists[index].add_prompt(ids, call.jobs[index].scores)
                if wish.logprobs is not None:
                    for drawn in event.drawn:
                        lists[index].add(drawn)
                if text or event.finish_reason:
                    pieces.append(chunk(index, text, event.finish_reason, event.stop_reason))
            if pieces:
                yield b"".join(pieces)
        if wish.include_usage:
            yield event_of(wish.head | {"choices": [], "usage": call.usage()})
    except Exception as e:
        error_response(e)   # for the log
        yield event_of(refusal_of(e).document)
    yield DONE
