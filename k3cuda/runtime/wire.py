"""Messages between the processes of a job: JSON behind its length and a digest. Nothing that is received is ever run."""
import hashlib
import hmac
import json
import operator
import socket
import struct

from ..errors import (CheckpointError, DeviceError, ExchangeTimeout, K3Error, NumericalError, OutOfMemory, PromptTooLong, RankDied, RanksDiffer, StepTimeout,
                      UsageError, out_of_memory)

DIGEST_BYTES = hashlib.sha256().digest_size
_LENGTH = struct.Struct("<I")
HEAD_BYTES = _LENGTH.size + DIGEST_BYTES
MAX_MESSAGE = 64 << 20   # bytes: a step whose draws have penalties over a text of a million tokens needs a tenth of it
# What an error of another process is here: whoever catches a kind of error on one rank catches it on all.
_KINDS = {kind.code: kind for kind in (UsageError, CheckpointError, OutOfMemory, DeviceError, PromptTooLong, NumericalError, RankDied)}
_NAMED = {kind.__name__: kind for kind in (ExchangeTimeout, RanksDiffer, StepTimeout)}   # which share the code of another


class LinkLost(Exception):
    """The other process is gone, or does not speak as agreed."""


def digest(key: bytes, purpose: bytes, nonce: bytes, body: bytes) -> bytes:
    """HMAC-SHA256 over a message; `nonce` is the reader's, so that an old message is worth nothing."""
    return hmac.new(key, purpose + nonce + body, hashlib.sha256).digest()


def packed(message: dict, key: bytes = b"", purpose: bytes = b"", nonce: bytes = b"") -> bytes:
    """The bytes of a message."""
    body = json.dumps(message, separators=(",", ":"), allow_nan=False, default=operator.index).encode()   # NumPy has integers of its own
    return _LENGTH.pack(len(body)) + digest(key, purpose, nonce, body) + body


def body_length(head: bytes, limit: int = MAX_MESSAGE) -> int:
    """Raises LinkLost where a message says that it is longer than `limit` bytes."""
    length, = _LENGTH.unpack_from(head)
    if length > limit:
        raise LinkLost(f"a message of {length} bytes, wanted at most {limit}")
    return length


def unpacked(whole: bytes, key: bytes = b"", purpose: bytes = b"", nonce: bytes = b"") -> dict | None:
    """The message, or None where its digest is not that of `key`. Raises LinkLost where it has another form."""
    body = whole[HEAD_BYTES:]
    if not hmac.compare_digest(whole[_LENGTH.size:HEAD_BYTES], digest(key, purpose, nonce, body)):
        return None
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as e:
        raise LinkLost("a message that is no JSON") from e
    if not isinstance(message, dict):
        raise LinkLost(f"a message that is a {type(message).__name__}, wanted an object")
    return message


def send(sock: socket.socket, message: dict) -> None:
    """Raises LinkLost where the other side is gone."""
    try:
        sock.sendall(packed(message))
    except OSError as e:
        raise LinkLost(str(e)) from e


def receive(sock: socket.socket) -> dict:
    """The next message. Raises LinkLost where the other side is gone or sends something else; TimeoutError as the socket says."""
    head = receive_bytes(sock, HEAD_BYTES)
    message = unpacked(head + receive_bytes(sock, body_length(head)))
    if message is None:
        raise LinkLost("a damaged message")
    return message


def receive_bytes(sock: socket.socket, count: int) -> bytes:
    whole = bytearray(count)
    receive_into(sock, memoryview(whole))
    return bytes(whole)


def receive_into(sock: socket.socket, target: memoryview) -> None:
    """Fills `target`, bytes. Raises LinkLost where the other side is gone; TimeoutError as the socket says."""
    done = 0
    while done < len(target):
        try:
            got = sock.recv_into(target[done:])
        except TimeoutError:
            raise
        except OSError as e:
            raise LinkLost(str(e)) from e
        if not got:
            raise LinkLost("the connection was closed")
        done += got


def told(error: BaseException) -> dict:
    """An error as a message."""
    if isinstance(error, MemoryError):
        error = out_of_memory(error)
    elif not isinstance(error, K3Error):
        error = K3Error(f"{type(error).__name__}: {error}", "run again with -v for the traceback, and please report it")
    return {"code": error.code, "kind": type(error).__name__, "message": error.message, "hint": error.hint}


def raised(message: dict, where: str = "") -> K3Error:
    """The error that `told` made, with the same exit code; `where` says whose it is."""
    kind = _NAMED.get(message.get("kind"), _KINDS.get(message.get("code"), K3Error))
    return kind(where + str(message.get("message")), str(message.get("hint", "")))
