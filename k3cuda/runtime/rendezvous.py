"""Where the processes of a job meet: rank 0 waits for all others, compares what they are about to run, and gives out the communicator's id.

Nothing is loaded before all ranks agree. docs/multi-node.md has the protocol, and what the token protects; rendezvous_join.py is the other side.
"""
import errno
import hashlib
import json
import os
import secrets
import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import Callable

from ..errors import ConfigError, K3Error, RankDied, UsageError
from . import wire
from .wire import HEAD_BYTES, LinkLost

MAGIC = b"k3cuda 1"          # protocol version; what rank 0 says first
NONCE_BYTES = 32
WATCH, DATA = CHANNELS = ("watch", "data")   # failures and signs of life; calls and what they move
TIMEOUT_S = 60.0             # by default, for all ranks to come
GUEST_S = 5.0                # that a connection may take to say who it is
GRACE_S = 5.0                # that ranks may come later than the first bad news, to hear it too
MAX_HELLO = 1 << 16          # bytes


@dataclass(frozen=True)
class Joined:
    """A rank that has met all others.

    Attributes:
        payload: what rank 0 had for all.
        watch, data: connections by rank: on rank 0 of every other one, elsewhere that of rank 0.
        hosts: of every rank "host, pid".
    """

    rank: int
    size: int
    payload: bytes
    watch: dict[int, socket.socket]
    data: dict[int, socket.socket]
    hosts: list[str]


@dataclass(eq=False)
class _Guest:
    """A connection to rank 0. `hello` is None until it has said who it is, with the right token."""

    sock: socket.socket
    address: str
    deadline: float
    nonce: bytes
    buffer: bytearray = field(default_factory=bytearray)
    hello: dict | None = None

    def send(self, key: bytes, message: dict) -> None:
        try:
            self.sock.settimeout(GUEST_S)
            self.sock.sendall(wire.packed(message, key, b"welcome", bytes.fromhex(self.hello["nonce"]) if self.hello else b""))
        except (OSError, ValueError):   # gone, or never one of ours: it will not miss the message
            pass


def key_of(token: str | bytes) -> bytes:
    """The key of a job's messages."""
    return hashlib.sha256(b"k3cuda job " + (token.encode() if isinstance(token, str) else token)).digest()


class Server:
    """Rank 0's side. Listens from the start, so that the port is known and the others may come early.

    Args:
        host: where the other ranks find this one; an address of this machine's own loop is the only one listened on, else all are.
        port: 0 takes a free one, which `port` says.
        token: of the job.
    Raises:
        UsageError: the port is in use or forbidden, or the host's name is unknown.
    """

    def __init__(self, host: str, port: int, token: str | bytes):
        self._key, self._strangers, self._others = key_of(token), 0, set()
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            own = address[0] == "::1" or address[0].startswith("127.")
            self._listener = socket.create_server((address[0] if own else "", port), family=family, backlog=128)
        except socket.gaierror as e:
            raise UsageError(f"MASTER_ADDR: found {host!r}, which has no address ({e.strerror})", "give the name or address of rank 0's machine") from e
        except OSError as e:
            found = "is in use" if e.errno == errno.EADDRINUSE else f"cannot be listened on ({e.strerror})"
            raise UsageError(f"rank 0: port {port} {found}", "set MASTER_PORT to a free one, the same on every rank") from e
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._guests: list[_Guest] = []
        self._here: dict[tuple[int, str], _Guest] = {}

    def meet(self, size: int, facts: dict, payload: Callable[[], bytes] = bytes, error: K3Error | None = None, timeout: float = TIMEOUT_S,
             look: Callable[[], None] = lambda: None) -> Joined:
        """Waits for ranks 1 to size - 1, compares what they say, and tells all of them how it went.

        Args:
            facts: name -> JSON value, which must be the same on every rank.
            payload: makes what every rank gets, once all have agreed.
            error: why this rank cannot go on: the others are told.
            look: called about four times a second; what it raises ends the job.
        Raises:
            ConfigError: the facts differ. RankDied: a rank is missing after `timeout` seconds, or went away.
            UsageError: two processes with one rank. Any error that another rank could not go on with.
        """
        end, told = time.monotonic() + (timeout if error is None else GRACE_S), error
        try:
            while sum(g.hello is not None for g in self._guests) < len(CHANNELS) * (size - 1):
                now = time.monotonic()
                if now >= end:
                    raise told or self._missing(size, timeout)
                try:
                    self._wait(min(0.25, end - now), size)
                    look()
                except K3Error as e:
                    if told is None:   # the others hear of it, also those that are on their way
                        told, end = e, min(end, time.monotonic() + GRACE_S)
            told = told or _differing({0: facts} | {r: g.hello["facts"] for (r, c), g in self._here.items() if c == WATCH})
            if told:
                raise told
            data, hosts = payload(), [me()] + [self._here[r, WATCH].hello["host"] for r in range(1, size)]
        except BaseException as e:
            self._tell(wire.told(e) if isinstance(e, (K3Error, MemoryError)) else wire.told(RankDied(f"rank 0 ({me()}) stopped")))
            raise
        for guest in self._here.values():
            guest.send(self._key, {"payload": data.hex(), "hosts": hosts})
        joined = Joined(0, size, data, *({r: ready(g.sock) for (r, c), g in self._here.items() if c == name} for name in CHANNELS), hosts)
        self._guests = [g for g in self._guests if g not in self._here.values()]
        return joined

    def close(self) -> None:
        """Ends listening, and every connection that is not of a rank that met."""
        for guest in self._guests:
            guest.sock.close()
        self._guests = []
        self._selector.close()
        self._listener.close()

    def _wait(self, seconds: float, size: int) -> None:
        for key, _ in self._selector.select(max(seconds, 0)):
            if key.data is None:
                self._accept(size)
            else:
                self._read(key.data, size)
        now = time.monotonic()
        for guest in [g for g in self._guests if g.hello is None and g.deadline < now]:
            self._drop(guest)

    def _accept(self, size: int) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError:   # it went away again
            return
        sock.setblocking(False)
        guest = _Guest(sock, str(address[0]), time.monotonic() + GUEST_S, secrets.token_bytes(NONCE_BYTES))
        waiting = [g for g in self._guests if g.hello is None]
        if len(waiting) >= 4 * size + 64:   # connections that say nothing must not use up ours
            self._drop(waiting[0])
        self._guests.append(guest)
        self._selector.register(sock, selectors.EVENT_READ, guest)
        try:
            sock.send(MAGIC + guest.nonce)   # a new connection has room for it
        except OSError:
            self._drop(guest)

    def _drop(self, guest: _Guest) -> None:
        self._strangers += guest.hello is None
        self._selector.unregister(guest.sock)
        guest.sock.close()
        self._guests.remove(guest)

    def _read(self, guest: _Guest, size: int) -> None:
        try:
            part = guest.sock.recv(MAX_HELLO)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if guest.hello is not None:   # it has nothing to say until it is answered
            self._drop(guest)
            self._here = {place: g for place, g in self._here.items() if g is not guest}
            raise RankDied(f"rank {guest.hello['rank']} ({guest.hello['host']}) went away before the job began", "its own output says why")
        guest.buffer += part
        try:
            if not part:
                raise LinkLost("closed")
            if len(guest.buffer) < HEAD_BYTES or len(guest.buffer) < HEAD_BYTES + wire.body_length(guest.buffer, MAX_HELLO):
                return
            hello = wire.unpacked(bytes(guest.buffer), self._key, b"hello", guest.nonce)
        except LinkLost:
            self._drop(guest)
            return
        if hello is None:
            self._others.add(guest.address)
            guest.send(self._key, {})   # its digest tells the other side that the token is not the same
            self._drop(guest)
            return
        guest.hello = hello
        self._greet(guest, size)

    def _greet(self, guest: _Guest, size: int) -> None:
        """Takes in a rank with the right token."""
        rank, channel, host, theirs = (guest.hello.get(name) for name in ("rank", "channel", "host", "size"))
        if theirs != size:
            raise ConfigError(f"ranks differ in their number: rank 0 ({me()}) has {size}, rank {rank} ({host}) has {theirs}",
                              "start all of them by one command, with one --tp")
        if not isinstance(rank, int) or not 0 < rank < size or channel not in CHANNELS:
            raise UsageError(f"{host} says it is rank {rank}, wanted 1 to {size - 1}", "give every process a rank of its own; 0 is taken")
        if (rank, channel) in self._here:
            raise UsageError(f"two processes say they are rank {rank}: {self._here[rank, channel].hello['host']} and {host}", "give every process a rank of its own")
        self._here[rank, channel] = guest
        if error := guest.hello.get("error"):
            raise wire.raised(error, f"rank {rank} ({host}): ")

    def _missing(self, size: int, timeout: float) -> RankDied:
        gone = [r for r in range(1, size) if (r, WATCH) not in self._here or (r, DATA) not in self._here]
        notes = []
        if self._others:
            notes.append(f"processes with another token tried from {', '.join(sorted(self._others)[:4])}")
        if self._strangers:
            notes.append(f"{self._strangers} other connections were no ranks")
        return RankDied(f"rank{'s' * (len(gone) > 1)} {', '.join(map(str, gone))} of {size} did not come within {timeout:g} s"
                        + "".join(f"; {note}" for note in notes),
                        f"see whether they run, and whether they reach port {self.port} of this machine ({socket.gethostname()})")

    def _tell(self, error: dict) -> None:
        for guest in self._guests:
            if guest.hello is not None:
                guest.send(self._key, {"error": error})


def _differing(facts: dict[int, dict]) -> ConfigError | None:
    """The first fact that is not the same everywhere."""
    for name in facts[0] | {n: None for f in facts.values() for n in f}:
        for rank, found in sorted(facts.items()):
            if found.get(name) != facts[0].get(name):
                return ConfigError(f"ranks differ in {name}: rank 0 has {_short(facts[0].get(name))}, rank {rank} has {_short(found.get(name))}",
                                   "start all of them by one command, from one version and one copy of the checkpoint")
    return None


def _short(value) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def me() -> str:
    """This process, for messages."""
    return f"{socket.gethostname()}, pid {os.getpid()}"


def ready(sock: socket.socket) -> socket.socket:
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
