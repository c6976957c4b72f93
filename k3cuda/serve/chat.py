"""POST /v1/chat/completions."""
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..runtime.conversation import answer_reader, conversation_ids
from ..runtime.output import Output
from ..runtime.request import Request
from . import fields
from .calls import Call, Service, head_of, respond
from .http import DONE, answered, error_response, event_of, off_loop, read_body
from .refusals import refusal_of


@dataclass(frozen=True)
class Wish:
    """A body that was read."""

    head: dict
    request: Request
    stream: bool
    include_usage: bool


def _read(service: Service, data: bytes) -> Wish:
    body = fields.parsed(data)
    fields.check_names(body, fields.CHAT)
    head = head_of("chatcmpl", "chat.completion", fields.check_model(body, service.names))
    stream = fields.boolean(body, "stream")
    include_usage = fields.include_usage(body, stream)
    params = fields.sampling(body, max_tokens=fields.max_tokens(body), logprobs=fields.chat_logprobs(body))
    params = params.resolved(service.model.generation_config)
    effort, tokenizer = fields.effort(body, service.effort), service.tokenizer
    ids = conversation_ids(tokenizer, fields.wanted(body, "messages"), tools=body.get("tools"), reasoning_effort=effort,
                           tool_choice=fields.check_tool_choice(body), response_format=body.get("response_format"), most=service.context)
    eos_ids = (*service.model.eos_ids, tokenizer.end_of_msg_id)
    return Wish(head, Request(head["id"], ids, params, eos_ids, answer_reader(tokenizer, params, effort)), stream, include_usage)


@answered
async def chat_completions(http: HttpRequest) -> Response:
    service: Service = http.app.state.service
    data = await read_body(http, service.limits)
    wish = await off_loop(len(data), _read, service, data)
    call = Call(service.worker, [wish.request])
    events = (lambda: _events(service, wish, call)) if wish.stream else None
    return await respond(http, service, call, events, lambda outputs: _document(service, wish, call, *outputs))


def _document(service: Service, wish: Wish, call: Call, output: Output) -> dict:
    message = {"role": "assistant", "content": output.text or None, "reasoning_content": output.reasoning, "reasoning": output.reasoning}
    if output.tool_calls:
        message["tool_calls"] = [c.document for c in output.tool_calls]
    logprobs = None if output.logprobs is None else {"content": [service.words.entry(d) for d in output.logprobs]}
    choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
    return wish.head | {"choices": [choice], "usage": call.usage()}


async def _events(service: Service, wish: Wish, call: Call):
    head = wish.head | {"object": "chat.completion.chunk"}
    usage = {"usage": None} if wish.include_usage else {}
    is_first, num_calls, drawn = True, 0, []

    def chunk(delta: dict, finish_reason=None, stop_reason=None) -> bytes:
        logprobs = {"content": [service.words.entry(d) for d in drawn]} if drawn else None
        drawn.clear()
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return event_of(head | {"choices": [choice | ({"stop_reason": stop_reason} if finish_reason else {})]} | usage)

    try:
        async for batch in call.batches():
            pieces = []
            for _, event in batch:
                if is_first:   # with the first token, not before: clients take the first event for it
                    pieces.append(chunk({"role": "assistant", "content": ""}))
                    is_first = False
                if wish.request.params.logprobs is not None:
                    drawn += event.drawn
                delta = {}
                if event.delta.reasoning:
                    delta |= {"reasoning_content": event.delta.reasoning, "reasoning": event.delta.reasoning}
                if event.delta.content:
                    delta["content"] = event.delta.content
                if event.delta.tool_calls:
                    delta["tool_calls"] = [{"index": num_calls + i} | c.document for i, c in enumerate(event.delta.tool_calls)]
                    num_calls += len(event.delta.tool_calls)
                if delta:
                    pieces.append(chunk(delta))
                if event.finish_reason:
                    pieces.append(chunk({}, call.finish_reason(0), event.stop_reason))
            yield b"".join(pieces)
        if wish.include_usage:
            yield event_of(head | {"choices": [], "usage": call.usage()})
    except Exception as e:
        error_response(e)   # for the log
        yield event_of(refusal_of(e).document)
    yield DONE
