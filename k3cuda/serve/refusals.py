"""What a client is told when it does not get an answer: OpenAI's error object and its status."""
import re

from ..errors import Aborted, CheckpointError, ConfigError, K3Error, OutOfMemory, PromptTooLong, RequestError, UsageError

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error",
          408: "timeout_error", 413: "invalid_request_error", 429: "rate_limit_error", 500: "server_error", 503: "service_unavailable_error"}
_FIELD = re.compile(r"([a-z_]+)(?:[:.\[])")


class Refusal(Exception):
    """A request that is not answered. `code` is stable and meant for programs."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None, headers=None):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers or {}

    @property
    def document(self) -> dict:
        return {"error": {"message": self.message, "type": _TYPES[self.status], "param": self.param, "code": self.code}}


def bad(field: str, message: str) -> Refusal:
    return Refusal(400, f"{field}: {message}", param=field)


def refusal_of(error: Exception) -> Refusal:
    """Any error as what a client is told; what is no K3Error is told without its words, which may hold anything."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, PromptTooLong):
        return Refusal(400, str(error), param="prompt", code="context_length_exceeded")
    if isinstance(error, (UsageError, ConfigError, CheckpointError)):   # a checkpoint without a tokenizer, asked for text
        named = _FIELD.match(error.message)
        return Refusal(400, str(error), param=named and named[1], code=error.name if isinstance(error, RequestError) else None)
    if isinstance(error, Aborted):
        return Refusal(503, "the server is shutting down", code="shutting_down")
    if isinstance(error, OutOfMemory):
        return Refusal(503, str(error), code="out_of_memory")
    if isinstance(error, K3Error):
        return Refusal(500, str(error))
    return Refusal(500, "internal error; the server's log says more")
