"""Ranks meet, or every one of them is told why not: missing, different, doubled and dead ranks, wrong tokens, strangers on the port."""
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from k3cuda.errors import CheckpointError, ConfigError, OutOfMemory, RankDied, UsageError
from k3cuda.runtime import rendezvous, wire
from k3cuda.runtime.rendezvous import MAGIC, NONCE_BYTES, Server, key_of
from k3cuda.runtime.rendezvous_join import Told, join

HOST, TOKEN, FACTS = "127.0.0.1", "a secret of this job", {"version": "1", "model": "abc", "tp": 4}
# Seconds in which every rank must have been told. One is promised, this machine may be busy; what it must not be is GUEST_S or GRACE_S, which are 5.
MOMENT = 3.0


def outcome(call, *args, **options):
    """(what it gave or raised, seconds)."""
    start = time.monotonic()
    try:
        found = call(*args, **options)
    except Told as e:
        found = e.error
    except Exception as e:
        found = e
    return found, time.monotonic() - start


def meeting(size, others, *, facts=FACTS, payload=b"id", strangers=lambda port: None, **options):
    """What every rank got, rank 0 first; `others` are arguments of the ranks that come, by name."""
    server = Server(HOST, 0, TOKEN)
    try:
        with ThreadPoolExecutor(len(others) + 1) as pool:
            calls = [pool.submit(outcome, server.meet, size, facts, lambda: payload, **options)]
            strangers(server.port)
            for other in others:
                given = {"host": HOST, "port": server.port, "token": TOKEN, "size": size, "facts": facts, "timeout": 5} | other
                calls.append(pool.submit(outcome, join, **given))
            return [call.result() for call in calls]
    finally:
        server.close()


def close(results):
    for found, _ in results:
        for sock in (*found.watch.values(), *found.data.values()):
            sock.close()


def test_sixteen_ranks_meet_and_can_talk():
    results = meeting(16, [{"rank": r} for r in range(1, 16)], payload=bytes(range(128)))
    first = results[0][0]
    assert all(found.payload == bytes(range(128)) and found.hosts == first.hosts for found, _ in results)
    assert set(first.watch) == set(first.data) == set(range(1, 16))
    for r, (found, _) in enumerate(results[1:], 1):
        for name in ("watch", "data"):
            wire.send(getattr(first, name)[r], {"to": r, "over": name})
            assert wire.receive(getattr(found, name)[0]) == {"to": r, "over": name}
    close(results)


def test_missing_ranks_are_named():
    (found, seconds), *others = meeting(6, [{"rank": 1}, {"rank": 4}], timeout=0.4)
    assert isinstance(found, RankDied) and "ranks 2, 3, 5 of 6 did not come within 0.4 s" in str(found) and seconds < MOMENT
    assert all(str(e) == str(found) for e, _ in others)


def test_a_rank_that_finds_nobody_says_whom_it_looked_for():
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    found, _ = outcome(join, HOST, port, TOKEN, 3, 4, FACTS, timeout=0.2)
    assert isinstance(found, RankDied) and f"rank 3: rank 0 did not answer at {HOST}:{port}" in str(found)


@pytest.mark.parametrize(("name", "value"), [("version", "2"), ("model", "abd"), ("tp", 8), ("max_model_len", 128)])
def test_different_facts_end_every_rank_at_once(name, value):
    results = meeting(4, [{"rank": 1}, {"rank": 2, "facts": FACTS | {name: value}}, {"rank": 3}])
    for found, seconds in results:
        assert isinstance(found, (ConfigError, CheckpointError)) and found.code == 3 and seconds < MOMENT
        assert f"ranks differ in {name}: rank 0 has" in str(found) and f"rank 2 has {wire.json.dumps(value)}" in str(found)


def test_another_number_of_ranks():
    for found, seconds in meeting(3, [{"rank": 1}, {"rank": 2, "size": 4}]):
        assert found.code == 3 and "rank 0" in str(found) and "has 3, rank 2" in str(found) and seconds < MOMENT


def test_two_processes_with_one_rank():
    for found, seconds in meeting(3, [{"rank": 1}, {"rank": 1}]):
        assert isinstance(found, UsageError) and "two processes say they are rank 1" in str(found) and seconds < MOMENT


@pytest.mark.parametrize("error", [OutOfMemory("no room", "make some"), ConfigError("a bad cut"), UsageError("a bad flag")])
def test_the_error_of_one_rank_is_the_error_of_all(error):
    first, second, own = meeting(3, [{"rank": 1}, {"rank": 2, "error": error}])
    assert own[0] is error
    for found, seconds in (first, second):
        assert found.code == error.code and found.message.startswith("rank 2 (") and error.message in found.message and found.hint == error.hint
        assert seconds < MOMENT


def test_an_error_of_rank_0_reaches_the_others():
    first, *others = meeting(3, [{"rank": 1}, {"rank": 2}], error=OutOfMemory("no room"))
    assert first[0].code == 4 and all(found.code == 4 and found.message == "no room" and seconds < MOMENT for found, seconds in others)


def test_what_rank_0_finds_out_while_it_waits_reaches_the_others():
    def look():
        if time.monotonic() - start > 0.1:
            raise RankDied("worker 2 ended with code 1")

    start = time.monotonic()
    old, rendezvous.GRACE_S = rendezvous.GRACE_S, 0.2
    try:
        results = meeting(3, [{"rank": 1}], look=look)
    finally:
        rendezvous.GRACE_S = old
    assert all("worker 2 ended with code 1" in str(found) for found, _ in results)


def test_a_wrong_token_is_named_and_not_shown():
    (first, _), (second, _), (third, seconds) = meeting(3, [{"rank": 1}, {"rank": 2, "token": "another secret"}], timeout=0.6)
    assert isinstance(third, UsageError) and "has another token" in str(third) and seconds < MOMENT
    assert "rank 2 of 3 did not come" in str(first) and "processes with another token tried from 127.0.0.1" in str(first)
    assert all("secret" not in str(found) for found in (first, second, third))


def test_a_hello_cannot_be_used_again():
    body = wire.packed({"rank": 1}, key_of(TOKEN), b"hello", bytes(NONCE_BYTES))
    assert wire.unpacked(body, key_of(TOKEN), b"hello", bytes(NONCE_BYTES)) == {"rank": 1}
    for key, purpose, nonce in ((TOKEN + ".", b"hello", bytes(NONCE_BYTES)), (TOKEN, b"welcome", bytes(NONCE_BYTES)), (TOKEN, b"hello", bytes([1] * NONCE_BYTES))):
        assert wire.unpacked(body, key_of(key), purpose, nonce) is None


def test_a_port_in_use():
    with socket.create_server((HOST, 0)) as taken, pytest.raises(UsageError, match=f"port {taken.getsockname()[1]} is in use"):
        Server(HOST, taken.getsockname()[1], TOKEN)


def test_a_host_without_an_address():
    with pytest.raises(UsageError, match="no.such.host.invalid"):
        Server("no.such.host.invalid", 0, TOKEN)


def test_something_else_on_the_port():
    def answer():
        sock, _ = other.accept()
        with sock:
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n" + bytes(64))

    with socket.create_server((HOST, 0)) as other:
        threading.Thread(target=answer, daemon=True).start()
        found, seconds = outcome(join, HOST, other.getsockname()[1], TOKEN, 1, 2, FACTS)
    assert isinstance(found, UsageError) and "no k3cuda" in str(found) and seconds < MOMENT


def test_strangers_neither_stop_nor_delay_a_meeting():
    """Scanners that send rubbish, say nothing, promise a message without end, or send it byte by byte."""
    held = []

    def strangers(port):
        for first in (b"GET / HTTP/1.1\r\n\r\n" + bytes(100), b"", b"\xff" * 40, bytes(36) + b"x", (2).to_bytes(4, "little") + bytes(32) + b"{}", b"\x00"):
            for _ in range(30):
                held.append(socket.create_connection((HOST, port)))
                held[-1].sendall(first)

    results = meeting(4, [{"rank": r} for r in (1, 2, 3)], strangers=strangers)
    assert all(seconds < MOMENT and found.payload == b"id" for found, seconds in results), results
    close(results)
    for sock in held:
        sock.close()


def test_a_slow_stranger_is_closed(monkeypatch):
    monkeypatch.setattr(rendezvous, "GUEST_S", 0.2)
    held = []

    def strangers(port):
        held.append(socket.create_connection((HOST, port)))

    (found, _), = meeting(2, [], strangers=strangers, timeout=0.8)
    assert "1 other connections were no ranks" in str(found)
    held[0].settimeout(1)
    assert len(wire.receive_bytes(held[0], len(MAGIC) + NONCE_BYTES)) and held[0].recv(1) == b""
    held[0].close()


def test_a_rank_that_goes_away_is_told(monkeypatch):
    monkeypatch.setattr(rendezvous, "GRACE_S", 0.2)
    server = Server(HOST, 0, TOKEN)

    def leave():
        sock = socket.create_connection((HOST, server.port))
        nonce = wire.receive_bytes(sock, len(MAGIC) + NONCE_BYTES)[len(MAGIC):]
        hello = {"rank": 1, "size": 3, "host": "h", "channel": "watch", "nonce": "", "facts": FACTS}
        sock.sendall(wire.packed(hello, key_of(TOKEN), b"hello", nonce))
        time.sleep(0.1)
        sock.close()

    threading.Thread(target=leave, daemon=True).start()
    found, seconds = outcome(server.meet, 3, FACTS)
    server.close()
    assert isinstance(found, RankDied) and "rank 1 (h) went away before the job began" in str(found) and seconds < MOMENT


def test_alone():
    server = Server(HOST, 0, TOKEN)
    assert server.meet(1, FACTS, lambda: b"id").payload == b"id"
    server.close()
