"""HTTP/1.1 over asyncio, one connection a request: the body of an answer comes in pieces as they arrive.

The standard library has no client that waits for thousands of streams on one thread, and a thread for each would measure the threads.
"""
import asyncio
import functools
import ssl
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import AsyncIterator
from urllib.parse import urlsplit

from ..errors import UsageError

LONGEST_HEAD = 1 << 16   # bytes
PIECE = 1 << 16          # bytes that are read at a time


class Failed(Exception):
    """Why a request failed, in words that are the same for all requests that failed so."""


@dataclass(frozen=True)
class Address:
    """Where a server is. `prefix` stands before every path."""

    host: str
    port: int
    is_tls: bool
    prefix: str

    @classmethod
    def of(cls, url: str) -> "Address":
        """Raises UsageError for what is no http or https URL."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            parts = host = port = None
        if not host or parts.scheme not in ("http", "https") or any(c <= " " or c > "~" for c in url):
            raise UsageError(f"found {url!r:.80}, wanted a URL like http://127.0.0.1:8000", "give the address of the server with --base-url")
        is_tls = parts.scheme == "https"
        return cls(host, port or (443 if is_tls else 80), is_tls, parts.path.rstrip("/"))

    @property
    def name(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass
class Response:
    """An answer whose head was read. `pieces` yields its body, bytes as they arrive, and raises Failed."""

    status: int
    headers: dict[str, str]
    pieces: AsyncIterator[bytes]

    async def read(self, most: int) -> bytes:
        """The body, cut behind `most` bytes."""
        found = b""
        async for piece in self.pieces:
            found += piece
            if len(found) >= most:
                break
        return found[:most]


@asynccontextmanager
async def request(address: Address, method: str, path: str, body: bytes = b"", headers=(), stall_s: float = 60):
    """Sends a request and yields its Response. Failed where there is none, or where nothing arrives for `stall_s` seconds."""
    writer = None
    try:
        async with _patience(stall_s):
            reader, writer = await asyncio.open_connection(
                address.host, address.port, limit=LONGEST_HEAD, ssl=_tls() if address.is_tls else None)
            head = [f"{method} {address.prefix}{path} HTTP/1.1", f"Host: {address.name}", "Connection: close", f"Content-Length: {len(body)}",
                    *(f"{name}: {value}" for name, value in headers)]
            writer.write("\r\n".join([*head, "", ""]).encode("latin-1") + body)
            await writer.drain()
        status, found = await _head(reader, stall_s)
        while 100 <= status < 200:
            status, found = await _head(reader, stall_s)
        yield Response(status, found, _told(_body(reader, found, stall_s)))
    except (OSError, EOFError, asyncio.LimitOverrunError, UnicodeError) as e:
        raise _failed(e) from e
    finally:
        if writer is not None:
            writer.transport.abort()   # nothing more is wanted of it, and a polite end may wait for ever


@functools.cache
def _tls() -> ssl.SSLContext:
    """The system's certificates, read once: that takes longer than a request."""
    return ssl.create_default_context()


@asynccontextmanager
async def _patience(seconds: float):
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError as e:
        raise (Failed(f"nothing arrived for {seconds:g} s") if limit.expired() else _failed(e)) from e


async def _head(reader, stall_s: float) -> tuple[int, dict[str, str]]:
    async with _patience(stall_s):
        data = await reader.readuntil(b"\r\n\r\n")
    first, *lines = data[:-4].decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
        raise Failed("what arrived is no HTTP")
    pairs = (line.partition(":") for line in lines)
    return int(rest[:3]), {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _body(reader, headers, stall_s: float) -> AsyncIterator[bytes]:
    if "chunked" in headers.get("transfer-encoding", "").lower():
        while size := await _chunk_size(reader, stall_s):
            async for piece in _exactly(reader, size, stall_s):
                yield piece
            async with _patience(stall_s):
                await reader.readexactly(2)
    elif (length := headers.get("content-length")) is not None:
        if not length.isdecimal():
            raise Failed("what arrived is no HTTP")
        async for piece in _exactly(reader, int(length), stall_s):
            yield piece
    else:
        while piece := await _piece(reader, PIECE, stall_s):
            yield piece


async def _chunk_size(reader, stall_s: float) -> int:
    async with _patience(stall_s):
        line = await reader.readuntil(b"\r\n")
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError:
        raise Failed("what arrived is no HTTP") from None


async def _exactly(reader, size: int, stall_s: float) -> AsyncIterator[bytes]:
    while size > 0:
        piece = await _piece(reader, min(size, PIECE), stall_s)
        if not piece:
            raise EOFError
        size -= len(piece)
        yield piece


async def _piece(reader, most: int, stall_s: float) -> bytes:
    async with _patience(stall_s):
        return await reader.read(most)


async def _told(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for piece in pieces:
            yield piece
    except (OSError, EOFError, asyncio.LimitOverrunError) as e:
        raise _failed(e) from e


def _failed(e: Exception) -> Failed:
    if isinstance(e, ConnectionRefusedError):
        return Failed("connection refused")
    if isinstance(e, (EOFError, ConnectionError)):
        return Failed("the connection was lost")
    if isinstance(e, asyncio.LimitOverrunError):
        return Failed("what arrived is no HTTP")
    if isinstance(e, ssl.SSLError):
        return Failed(f"TLS: {getattr(e, 'verify_message', None) or e.reason or e}")
    return Failed(f"no connection: {getattr(e, 'strerror', None) or e}")
