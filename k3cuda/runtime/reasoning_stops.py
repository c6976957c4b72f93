"""Stop strings inside the reasoning, for requests that ask for it; the answer's own are the parser's."""
from .text_stream import Delta, StopStrings, TokenStream


class ReasoningStops(TokenStream):
    """Drives a parser and searches what it shows as reasoning.

    Args:
        parser: an AnswerParser; it searches the content itself.
        stop: stop strings.
    """

    def __init__(self, parser: TokenStream, stop):
        super().__init__()
        self._parser, self._stops = parser, StopStrings(stop)

    @property
    def num_reasoning_tokens(self) -> int:
        return self._parser.num_reasoning_tokens

    def feed(self, token_id: int) -> Delta:
        return Delta() if self.stop_reason is not None else self._searched(self._parser.feed(token_id))

    def finish(self) -> Delta:
        return Delta() if self.stop_reason is not None else self._searched(self._parser.finish(), is_last=True)

    def _searched(self, delta: Delta, is_last: bool = False) -> Delta:
        reasoning, self.stop_reason = self._stops.feed(delta.reasoning)
        if self.stop_reason is not None:
            return self._show(Delta(reasoning=reasoning))
        self.stop_reason = self._parser.stop_reason
        if is_last or delta.content or delta.tool_calls or self.stop_reason is not None:
            reasoning += self._stops.flush()  # the reasoning is over: what was held back completes no stop string
        return self._show(delta._replace(reasoning=reasoning))
