"""What an agent has said and heard so far, as token ids for a model in this process and as messages or text for a server. All but the answers is filler."""
import zlib

import numpy as np

from .target import random_prompt, random_words
from .trace import Session, Turn


def fillers(session: Session, number: int, play: int, seed: int) -> tuple[np.random.Generator, np.random.Generator]:
    """Where the filler of the shared beginning and that of one play of a session comes from: a play has its own, or it would find the one before it in the cache."""
    shared = np.random.default_rng([seed, zlib.crc32((session.prefix or "").encode())])
    return shared, np.random.default_rng([seed, number, play, 1])


class IdContext:
    """Token ids.

    Attributes:
        prompt: int [tokens], what to ask with.
    """

    def __init__(self, session: Session, rngs, vocab_size: int):
        self._vocab_size, (shared, self._rng) = vocab_size, rngs
        self.prompt = random_prompt(shared, session.prefix_tokens, vocab_size)

    def ask(self, turn: Turn) -> None:
        """Adds what is new in a turn."""
        kept = self.prompt if turn.keep_tokens is None else self.prompt[:turn.keep_tokens]
        self.prompt = kept + random_prompt(self._rng, turn.new_tokens, self._vocab_size)

    def answered(self, ids, tokens: int) -> None:
        self.prompt = self.prompt + list(ids)

    @property
    def tokens(self) -> int:
        return len(self.prompt)


class TextContext:
    """Messages, or with `joined` the same text in one string. Tokens are those of the trace, words as many as make them.

    What is kept of a context that is cut are whole messages, and of a message of the user its first words.
    """

    def __init__(self, session: Session, rngs, tokens_a_word: float, joined: bool):
        self._tokens_a_word, self._joined, (shared, self._rng) = tokens_a_word, joined, rngs
        self._messages = [(session.prefix_tokens, self._of_user("system", shared, session.prefix_tokens))] if session.prefix_tokens else []

    def _of_user(self, role: str, rng, tokens: int) -> dict:
        return {"role": role, "content": random_words(rng, max(1, round(tokens / self._tokens_a_word)))}

    def ask(self, turn: Turn) -> None:
        """Adds what is new in a turn."""
        if turn.keep_tokens is not None:
            self._cut(turn.keep_tokens)
        self._messages.append((turn.new_tokens, self._of_user("user", self._rng, turn.new_tokens)))

    def _cut(self, keep: int) -> None:
        kept = []
        for tokens, message in self._messages:
            if tokens > keep:
                words = message["content"].split()[:round(keep / self._tokens_a_word)]
                if message["role"] != "assistant" and words:
                    kept.append((keep, message | {"content": " ".join(words)}))
                break
            kept.append((tokens, message))
            keep -= tokens
        self._messages = kept

    def answered(self, answer, tokens: int) -> None:
        message = {"role": "assistant", "content": answer.text}
        self._messages.append((tokens, message | ({"reasoning_content": answer.reasoning} if answer.reasoning else {})))

    @property
    def tokens(self) -> int:
        return sum(tokens for tokens, _ in self._messages)

    @property
    def prompt(self):
        messages = [message for _, message in self._messages]
        if not self._joined:
            return messages
        # An answer goes on where its prompt ended, as the server has it.
        return "".join(m["content"] if m["role"] == "assistant" or not i else f" {m['content']}" for i, m in enumerate(messages))
