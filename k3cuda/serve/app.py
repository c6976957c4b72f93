"""The routes put together, the key, and a line in the log for each request."""
import asyncio
import hmac
import logging
import time

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from . import pages
from .calls import Service
from .chat import chat_completions
from .completions import completions
from .http import error_response
from .refusals import Refusal

log = logging.getLogger("k3cuda")

ROUTES = [
    Route("/v1/chat/completions", chat_completions, methods=["POST"]), Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/models", pages.models), Route("/v1/models/{name:path}", pages.model),
    Route("/tokenize", pages.tokenize, methods=["POST"]), Route("/detokenize", pages.detokenize, methods=["POST"]),
    Route("/tokenizer_info", pages.tokenizer_info), Route("/health", pages.health), Route("/metrics", pages.metrics),
]
_OPEN = ("/health", "/metrics")   # probes and scrapers have no key


def make_app(service: Service):
    """The ASGI application."""
    app = Starlette(routes=ROUTES, exception_handlers={HTTPException: _no_route})
    app.state.service = service
    app = Outside(app, service)
    if not service.allowed_origins:
        return app
    # Around the key: a browser asks without one whether it may ask, and shows a page no refusal that does not name it.
    return _Origins(app, allow_origins=service.allowed_origins, allow_methods=["GET", "POST"], allow_headers=["*"])


class _Origins(CORSMiddleware):
    def preflight_response(self, request_headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code >= 400:   # a browser shows its page no reason, so the log has to
            log.info("a page of %.200r may not ask: %s", request_headers["origin"], response.body.decode())
        return response


async def _no_route(http: HttpRequest, error: HTTPException) -> Response:
    words = "there is no such route" if error.status_code == 404 else str(error.detail)
    return error_response(Refusal(error.status_code if error.status_code in (404, 405) else 400, f"{http.method} {_shown_path(http.scope)}: {words}"))


def _shown_path(scope) -> str:
    """As it was sent: what is no letter is still escaped, so a path cannot break a line of the log."""
    return scope["raw_path"].decode("latin-1")[:200]


class Outside:
    """Asks for the key and writes the log."""

    def __init__(self, app, service: Service):
        self._app, self._service = app, service

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.monotonic(), 500

        async def seen(message):
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            app = self._app if self._may(scope) else error_response(Refusal(401, "no or a wrong API key; send Authorization: Bearer KEY",
                                                                          code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}))
            await app(scope, receive, seen)
        except asyncio.CancelledError:   # only the end of the server cancels, and uvicorn would show its traceback
            pass
        finally:
            level = logging.DEBUG if scope["path"] in _OPEN else logging.INFO
            log.log(level, "%s %s %d, %.0f ms", scope["method"], _shown_path(scope), 499 if scope.get("k3cuda_gone") else status,
                    1e3 * (time.monotonic() - start))

    def _may(self, scope) -> bool:
        if self._service.api_key is None or scope["path"] in _OPEN:
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, b"Bearer " + self._service.api_key.encode())
