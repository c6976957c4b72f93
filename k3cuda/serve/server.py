"""The listening socket, uvicorn under it, and a shutdown that lets requests end."""
import asyncio
import logging
import random
import socket

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import UsageError
from ..runtime.engine import Engine
from ..runtime.open_files import raise_file_limit
from ..runtime.open_model import open_model
from .app import make_app
from .calls import Service
from .http import Limits
from .metrics import Metrics
from .worker import Worker

log = logging.getLogger("k3cuda")

BACKLOG = 2048        # connections that may wait to be taken
KEEP_ALIVE_S = 75     # longer than what proxies and clients keep idle connections for
LAST_WORDS_S = 5      # for clients to read the error that ends their stream at a shutdown


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet; port 0 takes a free one. UsageError where it cannot be had: told before a model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, OverflowError, UnicodeError) as e:
        raise UsageError(f"cannot listen at {host} port {port}: {getattr(e, 'strerror', None) or e}", "give another --host or --port") from e
    return listener


def open_service(model, arguments: dict, *, names, effort: str, max_queue: int, limits: Limits = Limits(), api_key: str | None = None,
                 seed: int | None = None, allowed_origins: tuple[str, ...] = ()) -> Service:
    """A model on a thread of its own, ready for requests; `arguments` and errors are those of `open_model`, `seed` is that of `LLM`."""
    opened = []

    def open_engine() -> Engine:
        opened.append(open_model(model, **arguments))
        return Engine(opened[0].backend, seeds=None if seed is None else random.Random(seed), prefix_cache=opened[0].prefix_cache)

    metrics = Metrics(names[0])
    worker = Worker(open_engine, max_queue, metrics)
    worker.start()
    worker.ready.result()
    return Service(opened[0], worker, metrics, tuple(names), effort, limits, api_key, allowed_origins)


def _protocol(limits: Limits):
    class Protocol(H11Protocol):
        """uvicorn's, which waits for ever for headers that never end, and for a client that reads nothing."""

        header_timer = unread_timer = None

        def connection_made(self, transport):
            super().connection_made(transport)
            self._wait_for_headers()

        def data_received(self, data):
            if self.header_timer is None and (self.cycle is None or self.cycle.response_complete):
                self._wait_for_headers()
            before = self.cycle
            super().data_received(data)
            if self.cycle is not before:
                self._stop_waiting()

        def connection_lost(self, exc):
            self._stop_waiting()
            self._stop_watching()
            super().connection_lost(exc)

        def _wait_for_headers(self):
            self.header_timer = self.loop.call_later(limits.header_s, self._headers_late)

        def _stop_waiting(self):
            if self.header_timer is not None:
                self.header_timer.cancel()
                self.header_timer = None

        def _headers_late(self):
            self.header_timer = None
            if not self.transport.is_closing():
                self.transport.close()

        def pause_writing(self):
            super().pause_writing()
            self._watch()

        def resume_writing(self):
            self._stop_watching()
            super().resume_writing()

        def _watch(self):
            self.unread_timer = self.loop.call_later(limits.write_s, self._unread, self.transport.get_write_buffer_size())

        def _stop_watching(self):
            if self.unread_timer is not None:
                self.unread_timer.cancel()
                self.unread_timer = None

        def _unread(self, before: int):
            # While writing is paused nothing is added, so what does not shrink is not read. close() would wait for it to be.
            if self.transport.get_write_buffer_size() < before:
                self._watch()
            else:
                self.unread_timer = None
                self.transport.abort()

    return Protocol


class Server(uvicorn.Server):
    """Ends in steps: no new connections, `grace_s` for the requests that run, then an error for each of them. With the engine it ends by itself."""

    def __init__(self, service: Service, grace_s: float):
        self._service, self._grace_s = service, grace_s
        super().__init__(uvicorn.Config(
            make_app(service), http=_protocol(service.limits), ws="none", lifespan="off", log_config=None, access_log=False,
            server_header=False, timeout_keep_alive=KEEP_ALIVE_S, backlog=BACKLOG,
            timeout_graceful_shutdown=grace_s + LAST_WORDS_S))

    def run(self, sockets=None):
        """Signals count from before the event loop is made: one that cut into its making would leave half a loop and its complaints."""
        with self.capture_signals():
            super().run(sockets)

    async def serve(self, sockets=None):
        await self._serve(sockets)   # uvicorn's, without its capture of signals inside the loop

    async def on_tick(self, counter: int) -> bool:
        # Of a lost engine what runs has its error; whoever watches the process starts another one, and nobody else can help. `should_exit` is a signal's.
        return await super().on_tick(counter) or self._service.worker.trouble is not None

    def handle_exit(self, sig, frame):
        if self.should_exit:
            self.force_exit = True   # the second signal, whichever it is
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets=None):
        if self._service.worker.in_flight:
            log.info("shutting down: %d requests have %g s to end", self._service.worker.in_flight, self._grace_s)
        late = asyncio.get_running_loop().call_later(self._grace_s, self._service.worker.stop)
        try:
            await super().shutdown(sockets)
        finally:
            late.cancel()
            self._service.worker.stop()
            if self.force_exit:   # who still waits is cut off: to uvicorn, an answer that ends behind that is no mistake
                for connection in list(self.server_state.connections):
                    connection.transport.abort()


def serve(service: Service, listener: socket.socket, grace_s: float) -> None:
    """Runs until a signal; raises it again when everything has ended. Raises what lost the engine, if anything does."""
    for name in ("uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = log.handlers, False
        logger.setLevel(logging.WARNING)
    server = Server(service, grace_s)
    raise_file_limit()
    try:
        server.run(sockets=[listener])
    finally:
        service.worker.stop()
        service.worker.join(LAST_WORDS_S)
    if service.worker.lost:
        raise service.worker.lost
