"""The fields of a request body, checked; what a field may hold is said in docs/serve.md."""
import json
import logging

from ..errors import RequestError
from ..runtime.chat import THINKING_EFFORTS
from ..runtime.sampling import SamplingParams
from .refusals import Refusal, bad

log = logging.getLogger("k3cuda")

# Fields of SamplingParams that have the same name in a body.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "presence_penalty",
             "frequency_penalty", "repetition_penalty")
_COMMON = {*_SAMPLING, "model", "max_tokens", "max_completion_tokens", "logprobs", "stream", "stream_options", "user"}
CHAT = _COMMON | {"messages", "tools", "tool_choice", "response_format", "top_logprobs", "reasoning_effort", "thinking", "chat_template_kwargs"}
COMPLETION = _COMMON | {"prompt", "echo"}
# Fields of other servers that would change the answer, and values of them that change nothing.
_NOT_THERE = {
    "n": (1,), "best_of": (1,), "logit_bias": ({},), "suffix": ("",), "prompt_logprobs": (), "min_tokens": (0,), "use_beam_search": (False,),
    "include_stop_str_in_output": (False,), "bad_words": ([],), "functions": ([],), "function_call": ("none", "auto"), "guided_json": (),
    "guided_regex": (), "guided_choice": (), "guided_grammar": (), "structured_outputs": ({},), "modalities": (["text"],), "audio": (),
    "continue_final_message": (False,), "add_generation_prompt": (True,), "length_penalty": (1, 1.0), "prompt_embeds": (),
}
_EFFORT_WORDS = {"minimal": "low", "medium": "high", "xhigh": "max"} | {e: e for e in ("none", *THINKING_EFFORTS)}


def parsed(data: bytes) -> dict:
    """The object in a body. Refusal 400 for anything else; NaN and Infinity are no JSON."""
    try:
        body = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as e:
        raise Refusal(400, f"the body is no JSON: {str(e)[:120]}", code="not_json") from None
    if not isinstance(body, dict):
        raise Refusal(400, f"the body is a JSON {type(body).__name__}, wanted an object", code="not_json")
    return body


def _no_constant(name: str):
    raise ValueError(f"{name} is no JSON")


def check_names(body: dict, known: set[str]) -> None:
    """Refuses fields that would change the answer and are not there; others that are unknown are ignored."""
    for name in sorted(body.keys() - known):
        if name not in _NOT_THERE:
            log.debug("ignored field %r", name[:80])
        elif body[name] is not None and not any(body[name] == ok and type(body[name]) is type(ok) for ok in _NOT_THERE[name]):
            raise bad(name, "is not supported; leave it out")


def boolean(body: dict, name: str) -> bool:
    """False where it is absent or null."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise bad(name, f"found {_shown(value)}, wanted true or false")
    return bool(value)


def mapping(body: dict, name: str) -> dict:
    """Empty where it is absent or null."""
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise bad(name, f"found {_shown(value)}, wanted an object")
    return value or {}


def include_usage(body: dict, stream: bool) -> bool:
    options = mapping(body, "stream_options")
    if options and not stream:
        raise bad("stream_options", "is for streams; set stream to true or leave it out")
    return boolean(options, "include_usage")


def max_tokens(body: dict) -> int | None:
    """The newer name wins."""
    newer = body.get("max_completion_tokens")
    return body.get("max_tokens") if newer is None else newer


def sampling(body: dict, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """Raises UsageError for a value of the wrong type or out of range."""
    return SamplingParams(**{name: body[name] for name in _SAMPLING if body.get(name) is not None}, max_tokens=max_tokens, logprobs=logprobs)


def chat_logprobs(body: dict) -> int | None:
    """The number that SamplingParams takes."""
    if boolean(body, "logprobs"):
        return 0 if body.get("top_logprobs") is None else body["top_logprobs"]
    if body.get("top_logprobs") not in (None, 0):
        raise bad("top_logprobs", "needs logprobs; set it to true")
    return None


def effort(body: dict, default: str) -> str:
    """How much to think, of the several ways that clients say it; a way that turns it off wins over the default."""
    extra, thinking = mapping(body, "chat_template_kwargs"), mapping(body, "thinking")
    for where, name in ((body, "reasoning_effort"), (extra, "thinking_effort"), (extra, "reasoning_effort")):
        if (word := where.get(name)) is not None:
            if not isinstance(word, str) or word not in _EFFORT_WORDS:
                raise bad(name, f"found {_shown(word)}, wanted {', '.join(_EFFORT_WORDS)}")
            return _EFFORT_WORDS[word]
    kind = thinking.get("type")
    if kind not in (None, "enabled", "disabled"):
        raise bad("thinking", f"found type {_shown(kind)}, wanted enabled or disabled")
    wanted = [boolean(extra, name) for name in ("thinking", "enable_thinking") if extra.get(name) is not None]
    wanted += [kind == "enabled"] * (kind is not None)
    if not wanted:
        return default
    return "none" if not all(wanted) else "max" if default == "none" else default


def check_tool_choice(body: dict) -> str | None:
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        raise bad("tool_choice", "a named tool is not supported; declare only that tool and say required")
    return choice


def check_model(body: dict, names: tuple[str, ...]) -> str:
    """The name to answer with. Refusal 404 for another model."""
    name = body.get("model")
    if name is None or name == "":
        return names[0]
    if not isinstance(name, str):
        raise bad("model", f"found {_shown(name)}, wanted text")
    if name not in names:
        raise Refusal(404, f"model {name[:80]!r} is not served here, only {', '.join(names)}", param="model", code="model_not_found")
    return name


def wanted(body: dict, name: str):
    if body.get(name) is None:
        raise RequestError(f"{name}_missing", f"{name}: found nothing, wanted one")
    return body[name]


def _shown(value) -> str:
    return f"{value[:60]!r}" if isinstance(value, str) else type(value).__name__
