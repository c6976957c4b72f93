"""Conversation to prompt in the chat format of Kimi K3. The checkpoint ships no template: these are its rules.

A prompt is a list of segments, and every segment is encoded on its own: the four structural markers become their ids,
everything else is ordinary text, also where it spells a marker. That is the whole defence against forged markers. The
cuts are part of the format: joining a tag's name, its quotes and its values first would give other ids.
"""

from typing import NamedTuple

from ..errors import RequestError
from .chat_messages import (
    ToolTurn,
    arguments_of,
    check_messages,
    check_tools,
    found,
    name_of,
    text_parts,
    to_json,
)
from .tokenizer import CLOSE, END_OF_MSG, OPEN, SEP, within

THINKING_EFFORTS = ("low", "high", "max")

_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
_NEW_TOOLS = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n"
    "```json\n{}\n```"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with `thinking_effort={}`."
)
_TOOL_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_RESPONSE_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{}\n```"


class Segment(NamedTuple):
    """One string that is encoded on its own. `special`: it is a structural marker."""

    text: str
    special: bool


def render(
    messages,
    tools=None,
    *,
    thinking: bool = True,
    thinking_effort: str | None = "max",
    add_generation_prompt: bool = True,
    tool_choice: str | None = None,
    response_format: dict | None = None,
) -> list[Segment]:
    """Prompt of a conversation, as segments in encoding order.

    Args:
        messages: OpenAI-style messages, roles system (or developer), user, assistant, tool; text only. Content that
            is None counts as empty. An assistant's `reasoning_content` (else `reasoning`) is rendered if thinking.
        tools: OpenAI-style tool declarations, or None.
        thinking: open the prompt on the `think` channel, else on `response`.
        thinking_effort: low, high or max; None leaves the effort line out, which the checkpoint itself never does.
        add_generation_prompt: end with the opening of the assistant's message.
        tool_choice: None or auto (add nothing), required, none.
        response_format: None or an object whose `type` is text (add nothing), json_object or json_schema.

    Raises:
        RequestError: its `name` is one of messages_malformed, unknown_role, content_malformed, image_unsupported,
            part_unsupported, name_malformed, reasoning_malformed, tool_calls_malformed, arguments_not_object,
            tool_call_id_malformed, unresolvable_tool_name, tools_malformed, unknown_effort, unknown_tool_choice,
            unknown_response_format, response_schema_malformed, not_json, number_too_long, nesting_too_deep.
    """
    _check_options(thinking_effort, tool_choice, response_format)
    prompt = _Prompt()
    if check_tools(tools, "tools"):
        prompt.system("tool-declare", _TOOLS.format(to_json(tools, "tools", canonical=True)))
    if thinking and thinking_effort is not None:
        prompt.system("thinking-effort", _EFFORT.format(thinking_effort))
    _conversation(prompt, check_messages(messages), thinking)
    if tool_choice in _TOOL_CHOICE:
        prompt.system("tool-choice", _TOOL_CHOICE[tool_choice])
    if response_format is not None and response_format["type"] != "text":
        prompt.system("response-format", _response_format(response_format))
    if add_generation_prompt:
        prompt.open("message", role="assistant")
        prompt.open("think" if thinking else "response")
    return prompt.segments


def encode_chat(tokenizer, messages, tools=None, *, most: int | None = None, **options) -> list[int]:
    """Token ids of the prompt; arguments and errors of `render`, PromptTooLong where there are far more than `most`."""
    return encode_segments(tokenizer, render(messages, tools, **options), most)


def close_answer(channel: str) -> list[Segment]:
    """What ends the message of an assistant behind text in `think` or `response`."""
    prompt = _Prompt()
    prompt.close(channel)
    if channel == "think":
        prompt.element("response", [])
    prompt.end_message()
    return prompt.segments


def encode_segments(tokenizer, segments, most: int | None = None) -> list[int]:
    return within((ids for text, special in segments for ids in ([[tokenizer.special[text]]] if special else tokenizer.encoded(text))), most)


class _Prompt:
    """Segments so far. Empty text makes no segment."""

    def __init__(self):
        self.segments: list[Segment] = []

    def text(self, text: str) -> None:
        if text:
            self.segments.append(Segment(text, False))

    def open(self, tag: str, **attributes: str) -> None:
        self.segments.append(Segment(OPEN, True))
        self.text(tag)
        for key, value in attributes.items():
            self.text(f" {key}")
            self.text('="')
            self.text(value.replace("&", "&amp;").replace('"', "&quot;"))
            self.text('"')
        self.segments.append(Segment(SEP, True))

    def close(self, tag: str) -> None:
        self.segments += (Segment(CLOSE, True), Segment(tag, False), Segment(SEP, True))

    def element(self, tag: str, parts, **attributes: str) -> None:
        self.open(tag, **attributes)
        for part in parts:
            self.text(part)
        self.close(tag)

    def end_message(self) -> None:
        self.close("message")
        self.segments.append(Segment(END_OF_MSG, True))

    def message(self, parts, **attributes: str) -> None:
        self.element("message", parts, **attributes)
        self.segments.append(Segment(END_OF_MSG, True))

    def system(self, kind: str, body: str) -> None:
        self.message([body], role="system", type=kind)


def _conversation(prompt: _Prompt, messages: list[dict], thinking: bool) -> None:
    turn = ToolTurn([])
    position = 0
    while position < len(messages):
        message, where = messages[position], f"messages[{position}]"
        role = message["role"]
        if role == "tool":
            end = position
            while end < len(messages) and messages[end]["role"] == "tool":
                end += 1
            for result, name, index, where in turn.order(messages[position:end], position):
                prompt.message(text_parts(result, where), role="tool", tool=name, index=str(index))
            position = end
            continue
        if role == "assistant":
            turn = ToolTurn(message["tool_calls"])
            _assistant(prompt, message, thinking, where)
        elif role == "system" and message.get("tools"):
            tools = to_json(message["tools"], f"{where}.tools", canonical=True)
            prompt.system("tool-declare", _NEW_TOOLS.format(tools))
        else:
            prompt.message(text_parts(message, where), role=role, **name_of(message, where))
        position += 1


def _assistant(prompt: _Prompt, message: dict, thinking: bool, where: str) -> None:
    prompt.open("message", role="assistant", **name_of(message, where))
    if thinking:  # the channel is there even when it is empty
        reasoning = message["reasoning"]
        prompt.element("think", [reasoning] if reasoning.strip() else [])
    prompt.element("response", text_parts(message, where))
    if message["tool_calls"]:
        prompt.open("tools")
        for index, call in enumerate(message["tool_calls"], 1):
            prompt.open("call", tool=call["name"], index=str(index))
            for tag, text, attributes in arguments_of(call["arguments"], f"{where}.tool_calls[{index - 1}]"):
                prompt.element(tag, [text], **attributes)
            prompt.close("call")
        prompt.close("tools")
    prompt.end_message()


def _check_options(thinking_effort, tool_choice, response_format) -> None:
    if thinking_effort is not None and thinking_effort not in THINKING_EFFORTS:
        raise RequestError("unknown_effort", found("thinking_effort", thinking_effort, ", ".join(THINKING_EFFORTS)))
    if tool_choice not in (None, "auto", *_TOOL_CHOICE):
        raise RequestError("unknown_tool_choice", found("tool_choice", tool_choice, "auto, required or none"))
    if response_format is None:
        return
    if not isinstance(response_format, dict):
        raise RequestError("unknown_response_format", found("response_format", response_format, "an object"))
    kind = response_format.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise RequestError(
            "unknown_response_format", found("response_format.type", kind, "text, json_object or json_schema")
        )


def _response_format(response_format: dict) -> str:
    kind, body = response_format["type"], _RESPONSE_FORMAT.format(response_format["type"])
    if kind == "json_object":
        return body
    schema = response_format.get("json_schema")
    if isinstance(schema, dict):  # the schema itself, or wrapped with its name as OpenAI's clients send it
        schema = schema.get("schema", schema)
    if not isinstance(schema, dict):
        raise RequestError("response_schema_malformed", found("response_format.json_schema", schema, "an object"))
    return body + _SCHEMA.format(to_json(schema, "response_format.json_schema", canonical=True))
