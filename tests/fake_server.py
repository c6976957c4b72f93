"""A server that says what a test tells it to, byte by byte; and an event loop whose time is its own."""
import asyncio
import json
import threading
from contextlib import contextmanager

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


class VirtualLoop(asyncio.SelectorEventLoop):
    """Nobody waits on it: where nothing can run, its clock jumps to the next time that something wants to."""

    def __init__(self):
        super().__init__()
        self._now = 0.0

    def time(self):
        return self._now

    def _run_once(self):
        if not self._ready and self._scheduled:
            self._now = max(self._now, self._scheduled[0]._when)
        super()._run_once()


def on_virtual_time(work):
    """What the coroutine function `work(clock)` returns."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work(runner.get_loop().time))


def event(**document) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def text(*words: str, finish_reason=None) -> bytes:
    """An event for each word; the last one has the finish reason."""
    last = len(words) - 1
    return b"".join(event(choices=[{"text": word, "finish_reason": finish_reason if i == last else None}]) for i, word in enumerate(words))


def document(status: str, body: bytes, kind: str = "application/json") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@contextmanager
def fake_server(answer, **pages: bytes):
    """(url, list of the bodies asked for). `answer`: bytes and pauses in seconds, in order, for every request that is no page of `pages`,
    which are answers by path with '_' for '/'; None as the last pause leaves the connection open for ever.
    """
    loop, ready, bodies, port = asyncio.new_event_loop(), threading.Event(), [], []

    async def each(reader, writer):
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length:"))
            body = await reader.readexactly(length)
            path = head.split()[1].strip("/").replace("/", "_")
            if path not in pages:
                if head.startswith("GET") or path == "tokenize":
                    writer.write(document("404 Not Found", b"{}"))
                    return
                bodies.append(json.loads(body) | {"head": head})
            for part in [pages[path]] if path in pages else answer:
                if isinstance(part, bytes):
                    writer.write(part)
                    await writer.drain()
                else:
                    await asyncio.sleep(3600 if part is None else part)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass   # the client has left, or the test has ended
        finally:
            writer.close()

    async def listen():
        server = await asyncio.start_server(each, "127.0.0.1", 0, backlog=512)
        port.append(server.sockets[0].getsockname()[1])
        ready.set()

    def run():
        loop.run_until_complete(listen())
        loop.run_forever()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield f"http://127.0.0.1:{port[0]}", bodies
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
