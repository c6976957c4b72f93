"""A conversation that grows turn by turn. What the model wrote stays the ids that it drew, so that a prompt goes on where an answer ended.

Encoded again, an answer may have other ids: a text has many ways to be cut into tokens, and a model doesn't always write the one that
the tokenizer would choose. Then nothing of the state behind it could be used again.
"""
from typing import NamedTuple

from .answer import AnswerParser
from .chat import close_answer, encode_segments, render


class _End(NamedTuple):
    """Where an answer ends: messages up to there, segments of their rendering, and tokens."""

    num_messages: int
    num_segments: int
    num_tokens: int


class Dialogue:
    """Messages, and the ids of those that a model has read or written. `LLM.stream_chat` takes it in the place of messages, and with
    `prefix_cache` the next turn goes on where that answer ended.

    Args:
        tokenizer: of the model.
        messages: a conversation to begin with, as for `chat.render`.
    """

    def __init__(self, tokenizer, messages=()):
        self._tokenizer, self._messages = tokenizer, list(messages)
        self._ids, self._ends = [], []     # ids up to the last end
        self._head = self._prompt = None   # what else was rendered in the last prompt, and its ids

    @property
    def messages(self) -> tuple[dict, ...]:
        return tuple(self._messages)

    def add(self, message: dict) -> None:
        self._messages.append(message)

    def prompt_ids(self, *, tools, thinking: bool, thinking_effort, **options) -> list[int]:
        """Token ids of a prompt that ends where the next answer begins; arguments and errors of `chat.render`."""
        head = {"tools": tools, "thinking": thinking, "thinking_effort": thinking_effort}
        if head != self._head:   # it stands before everything else, and decides how answers are rendered
            self._head, self._ids, self._ends = head, [], []
        segments = render(self._messages, **head, **options)
        self._prompt = self._ids + encode_segments(self._tokenizer, segments[self._ends[-1].num_segments if self._ends else 0:])
        return list(self._prompt)

    def answer(self, token_ids, content: str, reasoning: str, tool_calls=(), stop_reason=None) -> None:
        """Adds the answer to the last prompt, whole or as far as it came.

        Args:
            token_ids: all that were drawn. content, reasoning, tool_calls: what was read from them, in OpenAI's form. stop_reason: the stop string or id that ended it,
                which is among the ids and was not shown.
        """
        message = {"role": "assistant", "content": content, "reasoning_content": reasoning}
        self._messages.append(message | ({"tool_calls": list(tool_calls)} if tool_calls else {}))
        end = None if stop_reason is not None else _end_of(self._tokenizer, list(token_ids), self._head["thinking"])
        if end is not None:
            self._ids = [*self._prompt, *token_ids, *end]
            rendered = render(self._messages, **self._head, add_generation_prompt=False)
            self._ends.append(_End(len(self._messages), len(rendered), len(self._ids)))

    def cut(self, num_messages: int) -> None:
        """Forgets all messages behind the first so many."""
        del self._messages[num_messages:]
        while self._ends and self._ends[-1].num_messages > num_messages:
            self._ends.pop()
        del self._ids[self._ends[-1].num_tokens if self._ends else 0:]

    def last(self, role: str) -> int | None:
        """The index of the last message of a role; None where there is none."""
        return next((i for i in reversed(range(len(self._messages))) if self._messages[i]["role"] == role), None)


def _end_of(tokenizer, token_ids: list[int], thinking: bool) -> list[int] | None:
    """Ids that end a message behind an answer that was drawn so far. None where they could not be read as what was shown of it: it was cut
    inside a tag, between channels or in a call, or it goes on behind its end."""
    if tokenizer.end_of_msg_id in token_ids:
        return [] if token_ids.index(tokenizer.end_of_msg_id) == len(token_ids) - 1 else None
    parser = AnswerParser(tokenizer, thinking)
    parser.feed_ids(token_ids)
    return None if parser.open_channel is None else encode_segments(tokenizer, close_answer(parser.open_channel))
