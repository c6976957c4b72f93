"""A rank's way to rank 0: see rendezvous.py."""
import secrets
import socket
import time

from ..errors import K3Error, RankDied, UsageError
from . import wire
from .rendezvous import CHANNELS, DATA, GRACE_S, GUEST_S, MAGIC, NONCE_BYTES, TIMEOUT_S, WATCH, Joined, key_of, me, ready
from .wire import HEAD_BYTES, LinkLost


class Told(Exception):
    """An error that rank 0 knows of, and will tell the user."""

    def __init__(self, error: K3Error):
        super().__init__(str(error))
        self.error = error


def join(host: str, port: int, token: str | bytes, rank: int, size: int, facts: dict, error: K3Error | None = None,
         timeout: float = TIMEOUT_S) -> Joined:
    """Another rank's side: arguments and errors of `Server` and `meet`; those that rank 0 knows of come as `Told`, also the own `error`."""
    end, key, socks, nonces = time.monotonic() + timeout, key_of(token), {}, {}
    try:
        for channel in CHANNELS[::-1]:   # what goes over `watch` comes last, so that rank 0 misses no channel of a rank with an error
            nonces[channel] = secrets.token_bytes(NONCE_BYTES)
            hello = {"rank": rank, "size": size, "host": me(), "channel": channel, "nonce": nonces[channel].hex(), "facts": facts}
            if error is not None and channel == WATCH:
                hello["error"] = wire.told(error)
            socks[channel], nonce = _call(host, port, rank, end, timeout)
            socks[channel].sendall(wire.packed(hello, key, b"hello", nonce))
        answers = {}
        for channel in CHANNELS:
            answers[channel] = _answer(socks[channel], key, nonces[channel], timeout + GRACE_S, f"{host}:{port}")
            if error is not None:
                raise Told(error)
            if "error" in answers[channel]:
                raise Told(wire.raised(answers[channel]["error"]))
        welcome = answers[WATCH]
        return Joined(rank, size, bytes.fromhex(welcome["payload"]), {0: ready(socks[WATCH])}, {0: ready(socks[DATA])}, welcome["hosts"])
    except BaseException as e:
        for sock in socks.values():
            sock.close()
        if isinstance(e, (LinkLost, OSError)):
            raise error or RankDied(f"rank {rank}: rank 0 at {host}:{port} went away before the job began ({e})", "its own output says why") from e
        raise


def _call(host: str, port: int, rank: int, end: float, timeout: float) -> tuple[socket.socket, bytes]:
    """(connection, rank 0's nonce). Tries until rank 0 listens."""
    pause, last = 0.02, None
    while time.monotonic() < end:
        try:
            sock = socket.create_connection((host, port), timeout=min(GUEST_S, max(0.1, end - time.monotonic())))
        except OSError as e:   # not there yet, or its name is not known yet
            last = e
            time.sleep(pause)
            pause = min(0.5, 2 * pause)
            continue
        try:
            greeting = wire.receive_bytes(sock, len(MAGIC) + NONCE_BYTES)
        except (LinkLost, TimeoutError):
            greeting = b""
        if greeting.startswith(MAGIC):
            return sock, greeting[len(MAGIC):]
        sock.close()
        if greeting:
            raise UsageError(f"rank {rank}: what answers at {host}:{port} is no k3cuda of this version", "set MASTER_PORT to a free port, the same on every rank")
        last = ConnectionError("it says nothing")
        time.sleep(pause)
    raise RankDied(f"rank {rank}: rank 0 did not answer at {host}:{port} within {timeout:g} s ({last})",
                   "see whether rank 0 runs, and whether MASTER_ADDR and MASTER_PORT are its own")


def _answer(sock: socket.socket, key: bytes, nonce: bytes, timeout: float, where: str) -> dict:
    sock.settimeout(timeout)   # rank 0 was there before we came: its own time ends earlier
    head = wire.receive_bytes(sock, HEAD_BYTES)
    answer = wire.unpacked(head + wire.receive_bytes(sock, wire.body_length(head)), key, b"welcome", nonce)
    if answer is None:
        raise UsageError(f"the job at {where} has another token",
                         "give every rank the same K3CUDA_JOB_TOKEN, or set MASTER_PORT to a free port where another job has this one")
    return answer
