"""Tokens as clients of the API see them: text, bytes and log-probabilities."""
from ..runtime.sampling import Drawn
from ..runtime.text_stream import utf8_decoder


class Words:
    """Names of tokens. Without a tokenizer a token is called by its id."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._special = {} if tokenizer is None else {number: name for name, number in tokenizer.special.items()}

    def bytes(self, token_id: int) -> bytes:
        """None of special tokens."""
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def text(self, token_id: int) -> str:
        """Different for different tokens: bytes that are no text of their own are spelled out, as OpenAI does."""
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        if token_id in self._special:
            return self._special[token_id]
        data = self.bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in data)

    def entry(self, drawn: Drawn) -> dict:
        """One element of `choices[].logprobs.content` of a chat."""
        return self._named(drawn.token_id, drawn.logprob) | {"top_logprobs": [self._named(i, p) for i, p in drawn.top_logprobs or ()]}

    def _named(self, token_id: int, logprob: float) -> dict:
        return {"token": self.text(token_id), "logprob": logprob, "bytes": list(self.bytes(token_id)) or None}


class TokenLists:
    """`choices[].logprobs` of a completion: lists with an element a token. Offsets count characters of the choice's text."""

    def __init__(self, words: Words):
        self._words, self._offset, self._decoder = words, 0, utf8_decoder()
        self._clear()

    def _clear(self) -> None:
        self._tokens, self._logprobs, self._top, self._offsets = [], [], [], []

    def add(self, drawn: Drawn) -> None:
        """One token; its logprob is None for the first one of a prompt, which nothing stands before."""
        self._tokens.append(self._words.text(drawn.token_id))
        self._logprobs.append(drawn.logprob)
        # The likeliest ones first, then the token itself, which may be none of them.
        top = None if drawn.top_logprobs is None else (*drawn.top_logprobs, (drawn.token_id, drawn.logprob))
        self._top.append(None if top is None else {self._words.text(i): p for i, p in top})
        self._offsets.append(self._offset)
        self._offset += len(self._decoder.decode(self._words.bytes(drawn.token_id)))

    def add_prompt(self, ids, scores) -> None:
        if ids:
            self.add(Drawn(ids[0]))
        for drawn in scores:
            self.add(drawn)

    def taken(self) -> dict:
        """What was added since the last call."""
        found = {"tokens": self._tokens, "token_logprobs": self._logprobs, "top_logprobs": self._top, "text_offset": self._offsets}
        self._clear()
        return found
