"""Conversations in, answers out: what every caller of the engine does with a chat request."""
from .answer import AnswerParser
from .chat import THINKING_EFFORTS, encode_chat
from .dialogue import Dialogue
from .open_model import choice
from .reasoning_stops import ReasoningStops
from .sampling import SamplingParams
from .text_stream import TokenStream

EFFORTS = ("none", *THINKING_EFFORTS)


def conversation_ids(tokenizer, messages, *, reasoning_effort: str, tools=None, tool_choice=None, response_format=None, most: int | None = None) -> list[int]:
    """Token ids of a prompt that ends where the answer begins; arguments of `LLM.chat`. RequestError where it cannot be rendered, PromptTooLong
    where messages are far more than `most` tokens."""
    effort = choice("reasoning_effort", reasoning_effort, EFFORTS)
    thinking = effort != "none"
    options = {"tools": tools, "thinking": thinking, "thinking_effort": effort if thinking else None, "tool_choice": tool_choice, "response_format": response_format}
    return messages.prompt_ids(**options) if isinstance(messages, Dialogue) else encode_chat(tokenizer, messages, most=most, **options)


def answer_reader(tokenizer, params: SamplingParams, reasoning_effort: str) -> TokenStream:
    """Reads the answer to such a prompt."""
    parser = AnswerParser(tokenizer, thinking=reasoning_effort != "none", stop=params.stop)
    return ReasoningStops(parser, params.stop) if params.stop_in_reasoning and params.stop else parser
