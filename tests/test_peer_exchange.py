"""The exchange inside a kernel: its own code between ranks that are threads, and how memory is mapped, both in host memory."""
import ctypes
import random
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from drafts import made
from rank_oracle import check_plan
from shim import host

from k3cuda.draft_plan import build_draft_plan
from k3cuda.errors import DeviceError, ExchangeTimeout
from k3cuda.plan import build_plan
from k3cuda.runtime.made_config import made_config
from k3cuda.runtime.peer_exchange import EXCHANGE, STATE_WORDS, TROUBLE_WORDS, TURNS, Exchange, PeerExchange, capacities, memory_bytes
from k3cuda.runtime.peer_memory import HANDLE_BYTES, map_peers
from k3cuda.runtime.rank_moves import PACK, SPREAD, THREADS, RankMove, blocks_for, rank_move

EMPTY = 0xFFFFFFFF
FACTS = """#include "peer_exchange.cuh"
extern "C" int facts[];
int facts[] = {sizeof(Exchange), sizeof(PeerState), kTurns, kMostMoves, kMostRanks};
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return host.build(FACTS, [EXCHANGE], tmp_path_factory.mktemp("exchange"))


def test_python_knows_the_structure_of_an_exchange(library):
    from k3cuda.runtime import peer_exchange as p
    from k3cuda.weights import LEGAL_TP

    assert host.constants(library, "facts", 5) == (ctypes.sizeof(Exchange), 4 * STATE_WORDS, TURNS, p.MOST_MOVES, LEGAL_TP[-1])


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_it_compiles_without_spills(arch):
    pytest.importorskip("cuda.bindings", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")
    from k3cuda.runtime.cuda_kernels import compile_moves

    kernels = compile_moves(arch, strict=True).resources()
    assert set(kernels) == {EXCHANGE, PACK, SPREAD} and all(r.spills == r.stack == 0 for r in kernels.values())


class Ranks:
    """Exchanges of `tp` ranks in memory of this process, which all of them see."""

    def __init__(self, library, tp, capacity, limit_s=20.0, sleeps=0.0):
        words = memory_bytes(capacity) // 4
        self.inboxes = [np.full(words + 4, EMPTY, np.uint32) for _ in range(tp)]
        self.states = [np.zeros(STATE_WORDS * len(capacity), np.uint32) for _ in range(tp)]
        addresses, self.exchanges, dice = [-(-a.ctypes.data // 16) * 16 for a in self.inboxes], [], random.Random(tp)

        def kernel(name, arguments, vectors, dependent=False):
            def launch():
                time.sleep(dice.random() * sleeps)
                host.launch(library, name, blocks_for(vectors, 2), THREADS, arguments)
            return SimpleNamespace(launch=launch)

        for rank in range(tp):
            peers = SimpleNamespace(addresses=addresses, close=lambda: None)
            self.exchanges.append(PeerExchange(rank, peers, capacity, self.states[rank].ctypes.data, np.zeros(TROUBLE_WORDS, np.uint32), kernel, limit_s))

    def launches(self, rank, name, places):
        return [self.exchanges[rank].launch(name, [rank_move(*place) for place in places])]

    def is_clean(self):
        return all((inbox == EMPTY).all() for inbox in self.inboxes)


@pytest.mark.parametrize(("tp", "dcp", "rows"), [(2, 1, 1), (2, 1, 64), (4, 2, 8), (4, 4, 1)])
def test_a_step_exchanges_what_the_plan_says(tp, dcp, rows, library):
    """Three times over, on ranks that run apart: the bytes that NCCL brings (test_nccl.py), and memory that is as before."""
    plan = build_plan(made_config(), tp, dcp=dcp)
    ranks = Ranks(library, tp, capacities(plan), sleeps=0.003)
    assert set(capacities(plan)) == {tp, dcp} - {1}
    check_plan(plan, rows, ranks.launches, times=3)
    assert ranks.is_clean() and {int(state[0]) for state in ranks.states} <= {0, 1}
    for exchange in ranks.exchanges:
        exchange.check()


def test_a_draft_exchanges_what_its_plan_says(library):
    target, plan = build_plan(made_config(), 2), build_draft_plan(made("mla", {"num_key_value_heads": 4}).cfg, 2, 3)
    ranks = Ranks(library, 2, capacities(target, plan))
    check_plan(plan, 16, ranks.launches)
    assert ranks.is_clean()


def row_move(source, target, ranks):
    """The gather of a row between `ranks`."""
    width = source.nbytes
    return RankMove(source.ctypes.data, target.ctypes.data, width, 1, width, width, width * ranks, ranks, 0, 16)


def gather(exchanges, sources, targets):
    """One gather of a row by those `exchanges` of all ranks, each in a thread."""
    moves = [row_move(s, t, len(t)) for s, t in zip(sources, targets)]
    threads = [threading.Thread(target=e.launch("a gather", [m]).launch) for e, m in zip(exchanges, moves)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_every_number_arrives_but_one_nan_that_turns_round(library):
    words = np.array([0x80000000, 0x80008000, 1, 0x7FC00000, 0x7F800000, EMPTY, 0xFFFF0000, 0xFFFFFFFE], np.uint32)
    ranks, sources = Ranks(library, 2, {2: 64}), [words.copy(), words[::-1].copy()]
    targets = [np.zeros((2, 8), np.uint32) for _ in range(2)]
    gather(ranks.exchanges, sources, targets)
    for target in targets:
        np.testing.assert_array_equal(target, np.where(np.array(sources) == EMPTY, 0x7FFFFFFF, sources))


def test_a_rank_that_does_not_send_is_named_and_nothing_hangs(library):
    ranks, source, target = Ranks(library, 4, {4: 4096}, limit_s=0.05), np.ones(4, np.float32), np.zeros((4, 4), np.float32)
    gather(ranks.exchanges[:2] + ranks.exchanges[3:], [source] * 3, [target.copy() for _ in range(3)])   # rank 2 does nothing
    start = time.monotonic()
    for rank in (0, 1, 3):
        with pytest.raises(ExchangeTimeout, match=f"rank {rank} waited 0.05 s for the part of rank 2 in a gather") as e:
            ranks.exchanges[rank].check()
        assert e.value.code == 9
        ranks.exchanges[rank].launch("another", [row_move(source, target, 4)]).launch()   # no wait any more
    assert time.monotonic() - start < 2.0
    assert ranks.exchanges[2].check() is None


# ---- mapping ----

class HostDevice:
    """A device whose handles are numbers of arrays; `broken`: the call that fails, and on which rank. `one_host`: what it was asked for."""

    def __init__(self, rank, world, broken=None):
        self.rank, self.world, self.broken, self.alive, self.one_host = rank, world, broken, [], None

    def __call__(self, one_host):
        self.one_host = one_host
        return self

    def _may_fail(self, name):
        if self.broken == (name, self.rank):
            raise DeviceError(f"{name}: peer access is not supported")

    def allocate(self, nbytes):
        self._may_fail("allocate")
        self.alive.append(("own", 1000 + self.rank))
        return 1000 + self.rank

    def handle(self, address):
        self._may_fail("handle")
        return str(address).encode().ljust(HANDLE_BYTES, b"\0")

    def open(self, handle, nbytes):
        assert nbytes == 64
        self._may_fail("open")
        address = int(handle.rstrip(b"\0"))
        self.alive.append(("mapped", address))
        return address

    def close(self, address):
        self.alive.remove(("mapped", address))

    def free(self, address):
        self.alive.remove(("own", address))


def mapped(tp, broken=None, hosts=None):
    """(Peers of every rank, their devices)."""
    meet, told, devices, out = threading.Barrier(tp), [None] * tp, [HostDevice(r, tp, broken) for r in range(tp)], [None] * tp

    def run(rank):
        def gather(mine):
            told[rank] = mine
            meet.wait()
            found = list(told)
            meet.wait()
            return found
        out[rank] = map_peers(rank, 64, devices[rank], gather, hosts[rank] if hosts else "here")

    threads = [threading.Thread(target=run, args=(r,)) for r in range(tp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return out, devices


def test_every_rank_maps_all_others():
    peers, devices = mapped(3)
    assert [p.addresses for p in peers] == [[1000, 1001, 1002]] * 3 and not any(p.reason for p in peers)
    for p, device in zip(peers, devices):
        p.close()
        p.close()
        assert device.alive == []


@pytest.mark.parametrize(("broken", "words"), [
    (("allocate", 1), "rank 1 cannot give its memory away: allocate: peer access is not supported"),
    (("handle", 2), "rank 2 cannot give its memory away: handle: "), (("open", 0), "rank 0 cannot map the memory of rank 1: open: ")])
def test_where_one_rank_cannot_nobody_does_and_all_know_why(broken, words):
    peers, devices = mapped(3, broken)
    assert all(p.reason.startswith(words) and p.addresses == [] for p in peers) and not any(d.alive for d in devices)


@pytest.mark.parametrize(("hosts", "are_on_one"), [("aaaa", True), ("aabb", False)])
def test_ranks_of_several_hosts_use_handles_that_reach_them(hosts, are_on_one):
    peers, devices = mapped(4, hosts=hosts)
    assert {d.one_host for d in devices} == {are_on_one} and not any(p.reason for p in peers)


@pytest.mark.parametrize(("asked", "reason", "ranks"), [("nccl", None, "nccl"), ("peer", "", "peer"), ("peer", "rank 1 cannot map that", "nccl")])
def test_a_rank_says_what_carries_its_collectives(asked, reason, ranks, monkeypatch, caplog):
    pytest.importorskip("cupy", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")
    from k3cuda.runtime import cuda_rank
    from k3cuda.runtime.cuda_backend import CudaBackend

    class Carrier:
        def __init__(self, *arguments):
            self.name, self.capacity = "nccl", None

        def use_peers(self, capacity):
            self.name, self.capacity = ("nccl" if reason else "peer"), capacity
            return reason

        def check(self):
            raise ExchangeTimeout("rank 0 waited")

    monkeypatch.setattr(cuda_rank, "Carrier", Carrier)
    for name in ("bind_cache", "sample", "accept", "propose"):
        monkeypatch.setattr(CudaBackend, name, lambda self, _: None)
    monkeypatch.setattr(CudaBackend, "logits", lambda self: None)
    rank = cuda_rank.CudaRank.__new__(cuda_rank.CudaRank)
    rank._comm = rank.device = rank.stream = rank.draft = None
    rank._asked, rank.plan = asked, build_plan(made_config(), 4, dcp=2)
    rank.bind_cache(None)
    rank.bind_cache(100)   # the job's least: nothing is mapped anew
    assert rank.ranks == ranks and rank._carrier.capacity == (capacities(rank.plan) if asked == "peer" else None)
    assert [r.message for r in caplog.records] == ([f"collectives: nccl instead of peer: {reason}"] if reason else [])
    for read in (rank.logits, lambda: rank.sample(None), lambda: rank.accept(None), lambda: rank.propose(None)):   # nothing that is read goes unchecked
        with pytest.raises(ExchangeTimeout):
            read()
