"""Bodies in, documents and event streams out, over ASGI; and the client that leaves."""
import asyncio
import functools
import json
import logging
from dataclasses import dataclass
from typing import AsyncIterator, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ..errors import K3Error
from .refusals import Refusal, refusal_of

log = logging.getLogger("k3cuda")

LONG_BODY = 16_384   # bytes; what may take milliseconds to read and encode goes to a thread, so that streams go on


@dataclass(frozen=True)
class Limits:
    """What a client may cost.

    Attributes:
        max_body: bytes of a body.
        body_s, header_s: seconds that a body, and the headers before it, may take to arrive.
        write_s: seconds that a client may leave all that waits for it unread.
    """

    max_body: int = 32 << 20
    body_s: float = 30
    header_s: float = 30
    write_s: float = 60


class ClientGone(Exception):
    """Nobody waits for this answer any more."""


def encoded(document) -> bytes:
    # Half a surrogate pair, which JSON can carry in, is no UTF-8.
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")


def json_response(document, status: int = 200, headers=None) -> Response:
    return Response(encoded(document), status, headers, media_type="application/json")


def error_response(error: Exception) -> Response:
    refusal = refusal_of(error)
    if refusal.status >= 500:
        log.error("%s", refusal.message, exc_info=None if isinstance(error, (K3Error, Refusal)) else error)
    return json_response(refusal.document, refusal.status, refusal.headers)


def answered(endpoint):
    """An endpoint that may raise anything; 499, which nobody reads, marks a client that left."""
    @functools.wraps(endpoint)
    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except (ClientGone, ClientDisconnect):
            return Response(status_code=499)
        except Exception as e:
            return error_response(e)
    return answer


async def read_body(request: Request, limits: Limits) -> bytes:
    """Refusal 413 for one that is too long, 408 for one that doesn't come."""
    too_long = Refusal(413, f"the body has more than {limits.max_body} bytes", code="body_too_long")
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced[:20]) > limits.max_body:
        raise too_long
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.body_s):
            async for part in request.stream():
                size += len(part)
                if size > limits.max_body:
                    raise too_long
                parts.append(part)
    except TimeoutError:
        raise Refusal(408, f"the body did not arrive within {limits.body_s:g} s", code="body_timeout", headers={"Connection": "close"}) from None
    return b"".join(parts)


async def off_loop(size: int, work: Callable, *args):
    """`work(*args)`, in a thread where the body it comes from is long."""
    return await asyncio.to_thread(work, *args) if size > LONG_BODY else work(*args)


async def gone(receive) -> None:
    """Returns when the client has left. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive, work):
    """What the coroutine `work` returns. ClientGone, and `work` cancelled, once the client leaves."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        await _cancelled(working, leaving)


async def _cancelled(*tasks) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Server-sent events.

    Args:
        pieces: the events, encoded, as they come.
        close: called once, whatever ended the stream.
    """

    media_type = "text/event-stream"

    def __init__(self, pieces: AsyncIterator[bytes], close: Callable[[], None]):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._pieces, self._close = pieces, close

    async def __call__(self, scope, receive, send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        except (ClientGone, OSError):
            scope["k3cuda_gone"] = True
        finally:
            self._close()

    async def _send(self, send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def event_of(document) -> bytes:
    return b"data: " + encoded(document) + b"\n\n"


DONE = b"data: [DONE]\n\n"
