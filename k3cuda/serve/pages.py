"""The routes that generate nothing: models, tokens, health, metrics."""
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from ..runtime.conversation import conversation_ids
from ..runtime.prompt_arrays import as_ids, checked_ids
from . import fields
from .calls import Service
from .http import answered, json_response, off_loop, read_body
from .refusals import bad

_BOS = "[BOS]"


def _service(http: HttpRequest) -> Service:
    return http.app.state.service


@answered
async def models(http: HttpRequest) -> Response:
    return json_response({"object": "list", "data": [_model(_service(http), name) for name in _service(http).names]})


@answered
async def model(http: HttpRequest) -> Response:
    return json_response(_model(_service(http), fields.check_model({"model": http.path_params["name"]}, _service(http).names)))


def _model(service: Service, name: str) -> dict:
    return {"id": name, "object": "model", "created": service.created, "owned_by": "k3cuda", "root": service.names[0], "max_model_len": service.context}


@answered
async def tokenize(http: HttpRequest) -> Response:
    service, data = _service(http), await read_body(http, _service(http).limits)
    return json_response(await off_loop(len(data), _tokenized, service, data))


def _tokenized(service: Service, data: bytes) -> dict:
    body = fields.parsed(data)
    fields.check_model(body, service.names)
    if (body.get("prompt") is None) == (body.get("messages") is None):
        raise bad("prompt", "give a prompt or messages, one of them")
    if body.get("messages") is not None:
        ids = conversation_ids(service.tokenizer, body["messages"], tools=body.get("tools"), reasoning_effort=fields.effort(body, service.effort))
    elif isinstance(body["prompt"], str):
        ids = _ids_of(service.tokenizer, body["prompt"])
    else:
        raise bad("prompt", f"found {type(body['prompt']).__name__}, wanted text")
    strings = {"token_strs": [service.words.text(i) for i in ids]} if fields.boolean(body, "return_token_strs") else {}
    return {"count": len(ids), "max_model_len": service.context, "tokens": ids} | strings


def _ids_of(tokenizer, text: str) -> list[int]:
    """Text is text, but for the one prompt by which clients ask what BOS is: its name and nothing else. BOS marks nothing in a conversation."""
    return [tokenizer.special[_BOS]] if text == _BOS and _BOS in tokenizer.special else tokenizer.encode(text)


@answered
async def detokenize(http: HttpRequest) -> Response:
    service, data = _service(http), await read_body(http, _service(http).limits)
    return json_response(await off_loop(len(data), _detokenized, service, data))


def _detokenized(service: Service, data: bytes) -> dict:
    body = fields.parsed(data)
    fields.check_model(body, service.names)
    ids = as_ids(fields.wanted(body, "tokens"))
    return {"prompt": service.tokenizer.decode(checked_ids(ids, service.tokenizer.vocab_size) if ids else [])}


@answered
async def tokenizer_info(http: HttpRequest) -> Response:
    service = _service(http)
    tokenizer = service.tokenizer

    def named(name: str) -> str | None:
        return name if name in tokenizer.special else None

    eos = next((service.words.text(i) for i in (*service.model.eos_ids, tokenizer.end_of_msg_id)))
    return json_response({"tokenizer_class": "TikTokenTokenizer", "bos_token": named(_BOS), "eos_token": eos, "pad_token": named("[PAD]"),
                          "unk_token": named("[UNK]"), "vocab_size": tokenizer.vocab_size, "model_max_length": service.context})


@answered
async def health(http: HttpRequest) -> Response:
    if (worker := _service(http).worker).trouble is not None:
        raise worker.engine_lost()
    return json_response({"status": "ok"})


@answered
async def metrics(http: HttpRequest) -> Response:
    return PlainTextResponse(_service(http).metrics.text(), media_type="text/plain; version=0.0.4")
