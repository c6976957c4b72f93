"""The exchange inside a kernel: its own code between ranks that are threads, and how memory is mapped, both in host memory."""
import ctypes
import random
import threading
import time
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from drafts import made
from rank_oracle import check_plan
from shim import host

from k3cuda.draft_plan import build_draft_plan
from k3cuda.emit import MoveLayout
from k3cuda.errors import DeviceError, ExchangeTimeout, PlanError, RankDied, RanksDiffer
from k3cuda.plan import build_plan
from k3cuda.runtime import wire
from k3cuda.runtime.backend import Backend
from k3cuda.runtime.made_config import made_config
from k3cuda.runtime.peer_exchange import EXCHANGE, STATE_WORDS, TROUBLE_WORDS, Exchange, PeerExchange, capacities, memory_bytes, sizes
from k3cuda.runtime.peer_memory import HANDLE_BYTES, map_peers
from k3cuda.runtime.rank_moves import PACK, SPREAD, THREADS, RankMove, blocks_for, rank_move

EMPTY = 0xFFFFFFFF
FACTS = """#include "peer_exchange.cuh"
extern "C" int facts[];
int facts[] = {sizeof(Exchange), sizeof(PeerState)};
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return host.build(FACTS, [EXCHANGE], tmp_path_factory.mktemp("exchange"), {"exchange_sizes.cuh": sizes()})


def test_python_knows_the_structure_of_an_exchange(library):
    assert host.constants(library, "facts", 2) == (ctypes.sizeof(Exchange), 4 * STATE_WORDS)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_it_compiles_without_spills(arch):
    pytest.importorskip("cuda.bindings", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")
    from k3cuda.runtime.cuda_kernels import compile_moves

    kernels = compile_moves(arch, strict=True).resources()
    assert set(kernels) == {EXCHANGE, PACK, SPREAD} and all(r.spills == r.stack == 0 for r in kernels.values())


class Ranks:
    """Exchanges of `tp` ranks in memory of this process, which all of them see."""

    def __init__(self, library, tp, capacity, limit_s=20.0, sleeps=0.0):
        words, self.asked = memory_bytes(capacity) // 4, [[] for _ in range(tp)]
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
        self.asked[rank].append((name, [layout for layout, _, _ in places]))
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
    of_group = [{m.ranks for m in moves} for _, moves in ranks.asked[0]]
    turns = [sum(groups == {n} for groups in of_group) * 3 % 2 for n in capacities(plan)]
    assert ranks.is_clean() and [state.reshape(-1, STATE_WORDS).tolist() for state in ranks.states] == [[[t, 0, 0, 0] for t in turns]] * tp
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


def test_a_peer_one_exchange_ahead_and_torn_vectors(library):
    """Rank 1 is played by hand: it has sent two exchanges before rank 0 begins, then a vector word by word."""
    ranks, source = Ranks(library, 2, {2: 64}), np.full(4, 9, np.uint32)
    exchange, inbox = ranks.exchanges[0], ranks.inboxes[0]
    begin = (-(-inbox.ctypes.data // 16) * 16 - inbox.ctypes.data) // 4
    place = lambda turn: inbox[begin + (turn * 2 + 1) * 16:][:4]
    place(0)[:], place(1)[:] = 5, 6
    targets = [np.zeros((2, 4), np.uint32) for _ in range(3)]
    for target in targets[:2]:
        exchange.launch("a gather", [row_move(source, target, 2)]).launch()
        exchange.check()
    assert (targets[0][1] == 5).all() and (targets[1][1] == 6).all()
    thread = threading.Thread(target=exchange.launch("torn", [row_move(source, targets[2], 2)]).launch)
    thread.start()
    for i in range(4):
        time.sleep(0.02)
        place(0)[i] = 7
    thread.join()
    exchange.check()
    assert (targets[2][1] == 7).all() and ranks.states[0].tolist() == [1, 0, 0, 0]


def test_a_rank_that_does_not_send_is_named_and_nothing_is_sent_any_more(library):
    ranks, source, target = Ranks(library, 4, {4: 4096}, limit_s=0.05), np.ones(4, np.float32), np.zeros((4, 4), np.float32)
    gather(ranks.exchanges[:2] + ranks.exchanges[3:], [source] * 3, [target.copy() for _ in range(3)])   # rank 2 does nothing
    sent = [inbox.copy() for inbox in ranks.inboxes]
    for rank in (0, 1, 3):
        with pytest.raises(ExchangeTimeout, match=f"rank {rank} waited 0.05 s for the part of rank 2 in a gather") as e:
            ranks.exchanges[rank].check()
        assert e.value.code == 9
        ranks.exchanges[rank].launch("another", [row_move(source, target, 4)]).launch()   # it would wait for rank 2 again, and say so
    assert all((inbox == before).all() for inbox, before in zip(ranks.inboxes, sent)) and ranks.exchanges[2].check() is None


def test_more_than_there_is_room_for_is_refused(library):
    ranks, source, target = Ranks(library, 2, {2: 64}), np.zeros(16, np.uint32), np.zeros((2, 16), np.uint32)
    ranks.exchanges[0].launch("fits", [row_move(source, target, 2)])
    with pytest.raises(PlanError, match="two: a rank sends another 128 bytes, its memory has room for 64"):
        ranks.exchanges[0].launch("two", [row_move(source, target, 2)] * 2)


def test_an_error_of_an_exchange_keeps_its_name_on_the_way_to_rank_0():
    for kind in (ExchangeTimeout, RanksDiffer, RankDied, DeviceError):
        assert type(wire.raised(wire.told(kind("why", "what to do")))) is kind


# ---- mapping ----

class HostDevice:
    """A device whose handles are numbers of arrays; `broken`: the call that fails, and on which rank. `one_host`: what it was asked for."""

    def __init__(self, rank, world, broken=None):
        self.rank, self.world, self.broken, self.alive, self.one_host = rank, world, broken, [], None

    def __call__(self, one_host):
        self.one_host = one_host
        self._may_fail("device")
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
        assert not any(("mapped", address) in other.alive for other in self.world), "somebody has it mapped"
        self.alive.remove(("own", address))


def mapped(tp, broken=None, hosts=None):
    """(Peers of every rank, their devices)."""
    meet, told, devices, out = threading.Barrier(tp), [None] * tp, [], [None] * tp
    devices += [HostDevice(r, devices, broken) for r in range(tp)]

    def run(rank):
        def gather(mine):
            told[rank] = mine
            meet.wait(10)
            found = list(told)
            meet.wait(10)
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
        assert device.alive == [("own", 1000 + device.rank)]   # for the others, until the process ends


@pytest.mark.parametrize(("broken", "words"), [
    (("device", 2), "rank 2 cannot give its memory away: device: "),
    (("allocate", 1), "rank 1 cannot give its memory away: allocate: peer access is not supported"),
    (("handle", 2), "rank 2 cannot give its memory away: handle: "), (("open", 0), "rank 0 cannot map the memory of rank 1: open: ")])
def test_where_one_rank_cannot_nobody_does_and_all_know_why(broken, words):
    peers, devices = mapped(3, broken)
    assert all(p.reason.startswith(words) and p.addresses == [] for p in peers) and not any(d.alive for d in devices)


@pytest.mark.parametrize(("hosts", "are_on_one"), [("aaaa", True), ("aabb", False)])
def test_ranks_of_several_hosts_use_handles_that_reach_them(hosts, are_on_one):
    peers, devices = mapped(4, hosts=hosts)
    assert {d.one_host for d in devices} == {are_on_one} and not any(p.reason for p in peers)


class FakeCarrier:
    """What a rank does with its carrier, in order."""

    reason, log = "", []

    def __init__(self, *arguments):
        self.name, self.capacity = "nccl", None

    def use_peers(self, capacity):
        self.name, self.capacity = ("nccl" if self.reason else "peer"), capacity
        return self.reason

    def meet(self):
        self.log.append("meet")

    share = gather = meet   # for launches, of which these tests have none

    def check(self):
        raise ExchangeTimeout("rank 0 waited")

    def close(self):
        self.log.append("carrier closed")


@pytest.fixture
def new_rank(monkeypatch):
    """Makes a CudaRank whose backend does nothing, of a Communicator that notes its end."""
    pytest.importorskip("cupy", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")
    from k3cuda.runtime import cuda_rank
    from k3cuda.runtime.cuda_backend import CudaBackend

    monkeypatch.setattr(FakeCarrier, "log", [])
    monkeypatch.setattr(cuda_rank, "Carrier", FakeCarrier)
    for name in ("bind_cache", "logits", "copy_logits", "buffer", "sample", "accept", "propose"):
        monkeypatch.setattr(CudaBackend, name, lambda self, *_: None)

    def make(asked="peer", rank=0):
        made = cuda_rank.CudaRank.__new__(cuda_rank.CudaRank)
        made._comm, made.stream = SimpleNamespace(rank=rank, size=4, abort=lambda: FakeCarrier.log.append("aborted")), SimpleNamespace(synchronize=lambda: None)
        made.device = made.draft = None
        made.tp, made._asked, made.plan, made._building = 4, asked, build_plan(made_config(), 4, dcp=2), nullcontext
        return made

    return make


@pytest.mark.parametrize(("asked", "reason", "ranks"), [("nccl", None, "nccl"), ("peer", "", "peer"), ("peer", "rank 1 cannot map that", "nccl")])
def test_a_rank_says_what_carries_its_collectives(asked, reason, ranks, new_rank, monkeypatch, caplog):
    monkeypatch.setattr(FakeCarrier, "reason", reason)
    for number in (0, 1):
        rank = new_rank(asked, number)
        rank.bind_cache(None)
        carrier = rank._carrier
        rank.bind_cache(100)   # the job's least: nothing is mapped anew
        assert rank.ranks == ranks and rank._carrier is carrier and carrier.capacity == (capacities(rank.plan) if asked == "peer" else None)
    assert [r.message for r in caplog.records] == ([f"collectives: nccl instead of peer: {reason}"] if reason else [])   # once, by rank 0


def test_nothing_that_is_read_goes_unchecked(new_rank):
    """Every method of a backend that gives something a step has computed; `launch` is for backends that overlap alone."""
    rank = new_rank()
    rank.bind_cache(None)
    reads = {"logits": (), "copy_logits": (None,), "buffer": ("logits",), "sample": ([],), "propose": ([],), "accept": ([],)}
    writes = {"open_slot", "copy_slot", "step", "new_logits", "commit", "launch", "close"}
    assert reads.keys() | writes == {name for name in vars(Backend) if not name.startswith("_") and callable(getattr(Backend, name))} and not rank.overlaps
    for name, arguments in reads.items():
        with pytest.raises(ExchangeTimeout):
            getattr(rank, name)(*arguments)


def test_ranks_meet_behind_kernels_that_one_may_have_to_compile(new_rank, monkeypatch):
    """Whatever that takes, no exchange waits for it; of a draft's kernels too."""
    from k3cuda.runtime.cuda_backend import CudaBackend
    from k3cuda.runtime.cuda_rank import CudaRank

    log, rank, building = FakeCarrier.log, new_rank(), ExitStack()
    building.callback(log.append, "built")
    rank.bind_cache(None)
    rank._building = lambda: building
    monkeypatch.setattr(CudaBackend, "kernels", lambda self, bucket: log.append(f"compiled {bucket}"))
    rank.kernels(8)
    assert log == ["compiled 8", "built", "meet"]   # a rank that waits for one that never comes builds nothing: it is a hang
    given = {}
    monkeypatch.setattr(CudaBackend, "__init__", lambda self, *_, **options: given.update(options))
    monkeypatch.setattr(FakeCarrier, "warm_up", lambda self: None, raising=False)
    monkeypatch.setattr(CudaRank, "_carrier", FakeCarrier())
    CudaRank(None, SimpleNamespace(rank=0, size=4), 0)
    del log[:]
    with given["building"]():
        log.append("compiled a draft's")
    assert log == ["compiled a draft's", "meet"]


def test_a_rank_that_cannot_be_made_or_closed_lets_go(new_rank, monkeypatch):
    from k3cuda.runtime.cuda_backend import CudaBackend
    from k3cuda.runtime.cuda_rank import CudaRank

    def fails(self, *_, **options):
        self._carrier = FakeCarrier()
        raise DeviceError("no room")

    monkeypatch.setattr(CudaBackend, "__init__", fails)
    with pytest.raises(DeviceError, match="no room"):
        CudaRank(None, new_rank()._comm, 0)
    assert FakeCarrier.log == ["carrier closed", "aborted"]
    rank = new_rank()
    rank.bind_cache(None)
    monkeypatch.setattr(CudaBackend, "close", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rank.close()
    assert FakeCarrier.log[2:] == ["carrier closed", "aborted"]


def test_fabric_handles_leave_nothing_where_a_call_fails(monkeypatch):
    """Every call in turn fails; what those before it have made is undone."""
    pytest.importorskip("cupy", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")
    from cuda.bindings import driver as cu

    from k3cuda.runtime import cuda_peers

    makes = {"cuMemCreate": "cuMemRelease", "cuMemImportFromShareableHandle": "cuMemRelease", "cuMemAddressReserve": "cuMemAddressFree",
             "cuMemMap": "cuMemUnmap"}
    calls = [*makes, "cuMemSetAccess", "cuMemsetD8", "cuCtxSynchronize"]

    class Driver:
        def __init__(self, fails):
            self.fails, self.held = fails, []

        def __getattr__(self, name):
            def call(*arguments):
                if name == self.fails:
                    return cu.CUresult.CUDA_ERROR_NOT_SUPPORTED, 0
                if name in makes:
                    self.held.append(makes[name])
                elif name in makes.values():
                    self.held.remove(name)
                return cu.CUresult.CUDA_SUCCESS, 4096
            return call if name.startswith("cuMem") or name == "cuCtxSynchronize" else getattr(cu, name)

    def checked(result):
        if result[0]:
            raise DeviceError("not supported")
        return result[1]

    monkeypatch.setattr(cuda_peers, "check", checked)
    for fails in (None, *calls):
        driver = Driver(fails)
        monkeypatch.setattr(cuda_peers, "driver", lambda: driver)
        device = cuda_peers.FabricPeers(SimpleNamespace(index=0))
        done = []
        for ask in (lambda: device.allocate(100), lambda: device.open(bytes(HANDLE_BYTES), 100)):
            try:
                address = ask()
                done.append(address)
                assert len(driver.held) == 3
                device.close(address)
            except DeviceError:
                pass
            assert driver.held == [], fails
        assert len(done) == {None: 2, "cuMemCreate": 1, "cuMemImportFromShareableHandle": 1, "cuMemsetD8": 1, "cuCtxSynchronize": 1}.get(fails, 0)


@pytest.mark.parametrize("reason", ["", "rank 1 cannot map that"])
def test_a_carrier_uses_peers_or_says_why_not(reason, monkeypatch):
    pytest.importorskip("cupy", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")
    from k3cuda.runtime import cuda_carry

    log, stream = [], SimpleNamespace(synchronize=lambda: None, __cuda_stream__=lambda: (0, 77))
    peers = SimpleNamespace(reason=reason, addresses=[1 << 20, 2 << 20], close=lambda: log.append("peers closed"))
    memory = SimpleNamespace(data=SimpleNamespace(ptr=3 << 20))
    monkeypatch.setattr(cuda_carry, "cupy", SimpleNamespace(zeros=lambda *_: memory, empty=lambda *_: memory, uint8=None, uint32=None, cuda=SimpleNamespace(
        get_current_stream=lambda: stream, alloc_pinned_memory=bytearray)))
    monkeypatch.setattr(cuda_carry, "map_peers", lambda rank, nbytes, device_of, gather: log.append((rank, nbytes)) or peers)
    monkeypatch.setattr(cuda_carry, "Module", lambda cubin: SimpleNamespace(close=lambda: log.append("module closed"), function=lambda name: name))
    monkeypatch.setattr(cuda_carry, "compile_moves", lambda arch: SimpleNamespace(cubin=b""))
    monkeypatch.setattr(cuda_carry, "Launch", lambda function, *_, **options: SimpleNamespace(function=function, dependent=options["dependent"]))
    carrier = cuda_carry.Carrier(SimpleNamespace(rank=1, size=2), SimpleNamespace(arch="sm_90a", sms=132), stream)
    assert carrier.use_peers({2: 4096}) == reason and log == [(1, memory_bytes({2: 4096}))]
    launches = carrier.launches("a gather", [(MoveLayout(1, 64, 64, 128, 64, False, 2, 0, 0), 4 << 20, 5 << 20)], overlap=True)
    carrier.check()
    carrier.close()
    if reason:
        assert carrier.name == "nccl" and [type(x) for x in launches] == [cuda_carry.NcclMove] and log[1:] == ["module closed"]
    else:
        assert carrier.name == "peer" and [(x.function, x.dependent) for x in launches] == [(EXCHANGE, True)] and log[1:] == ["peers closed", "module closed"]
