"""NCCL's library as far as it goes without a GPU: ids for sixteen processes, errors in its words; what is asked of it, on a library that moves memory."""
import ctypes
import os
import sys
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from command import ROOT
from drafts import made
from rank_oracle import check_plan, collectives_of
from rank_processes import ends, free_port, start
from shim import host

from k3cuda.config import DECODE_ROWS, MAX_ROWS
from k3cuda.draft_plan import build_draft_plan
from k3cuda.emit import arena_offsets
from k3cuda.errors import DeviceError, UsageError
from k3cuda.plan import build_plan
from k3cuda.runtime import nccl
from k3cuda.runtime.made_config import made_config
from k3cuda.runtime.peer_exchange import sizes
from k3cuda.runtime.rank_moves import PACK, SPREAD, THREADS, RankMove, blocks_for
from k3cuda.stages import GATHER, SCATTER, STACK
from k3cuda.tables import tables_of

RENDEZVOUS = """
import hashlib, sys
from k3cuda.runtime import nccl
from k3cuda.runtime.rendezvous import Server
from k3cuda.runtime.rendezvous_join import join
rank, size, port = map(int, sys.argv[1:])
facts = {"version": 1}
if rank:
    joined = join("127.0.0.1", port, "t", rank, size, facts)
else:
    server = Server("127.0.0.1", port, "t")
    joined = server.meet(size, facts, nccl.unique_id)
    server.close()
print(len(joined.payload), hashlib.sha256(joined.payload).hexdigest(), len(joined.watch), len(joined.data))
"""


TP = 4


@pytest.fixture(scope="module", autouse=True)
def installed():
    """CI installs a CUDA line with NCCL; there its absence is a failure."""
    try:
        nccl.library()
    except DeviceError as e:
        if os.environ.get("REQUIRE_CUDA_LINE"):
            raise
        pytest.skip(str(e))


def test_sixteen_processes_get_one_real_id():
    port, size = free_port(), 16
    results = ends(*(start([sys.executable, "-c", RENDEZVOUS, r, size, port]) for r in range(size)))
    assert [code for code, _, _ in results] == [0] * size, results
    lines = [out.decode().split() for _, out, _ in results]
    assert {line[0] for line in lines} == {str(nccl.ID_BYTES)} and len({line[1] for line in lines}) == 1
    assert [line[2:] for line in lines] == [["15", "15"]] + [["1", "1"]] * 15


def test_ids_differ_and_the_version_is_one_we_know():
    first, second = nccl.unique_id(), nccl.unique_id()
    assert len(first) == nccl.ID_BYTES and first != second and any(first)
    assert tuple(map(int, nccl.version().split("."))) >= (2, 28)


def test_without_a_gpu_nccl_says_so_in_its_own_words():
    from k3cuda.runtime.machine import probe_driver

    if probe_driver().gpus:
        pytest.skip("there is a GPU here: tests/gpu has communicators")
    with pytest.raises(DeviceError, match="ncclCommInitRank: unhandled cuda error.*driver") as e:
        nccl.Communicator(nccl.unique_id(), 0, 1)
    assert e.value.code == 5


def test_a_missing_library_is_named(monkeypatch):
    nccl.library.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda", None)
    with pytest.raises(DeviceError, match="NCCL cannot be used") as e:
        nccl.library()
    assert "k3cuda[cu13]" in e.value.hint
    nccl.library.cache_clear()


def test_the_benchmark_without_a_gpu_ends_every_rank_with_code_5():
    from k3cuda.runtime.machine import probe_driver

    if probe_driver().gpus:
        pytest.skip("there is a GPU here")
    (code, _, text), = ends(start([sys.executable, ROOT / "scripts/bench_collectives.py", "--ranks", "2"]))
    assert code == 5 and "has no GPU: 0 are visible" in text


@pytest.mark.parametrize(("local_rank", "visible", "wanted"), [(0, 1, 0), (3, 1, 0), (3, 4, 3), (0, 8, 0)])
def test_the_gpu_of_a_rank(local_rank, visible, wanted):
    assert nccl.device_index(local_rank, visible) == wanted


@pytest.mark.parametrize("visible", [0, 2])
def test_more_ranks_than_gpus(visible):
    with pytest.raises(DeviceError, match=f"local rank 2 has no GPU: {visible} are visible"):
        nccl.device_index(2, visible)


class MovesMemory:
    """A stand-in for the library on the host: ranks are threads, a communicator's handle is its rank + 1."""

    def __init__(self, size):
        self.meet, self.here, self.open, self.log = threading.Barrier(size), {}, threading.local(), []

    def ncclCommInitRank(self, comm, size, made, rank):
        comm._obj.value = rank + 1
        return 0

    def ncclAllGather(self, source, target, count, dtype, comm, stream):
        assert dtype == 1 and stream == 77
        self.here[comm.value - 1] = source
        self.meet.wait()
        for rank, address in self.here.items():
            ctypes.memmove(target + rank * count, address, count)
        self.meet.wait()
        return 0

    def ncclGroupStart(self):
        self.open.sends, self.open.receives = {}, {}
        return 0

    def ncclSend(self, source, count, dtype, peer, comm, stream):
        self.open.sends[peer], self.open.rank = source, comm.value - 1
        return 0

    def ncclRecv(self, target, count, dtype, peer, comm, stream):
        self.open.receives[peer] = target, count
        return 0

    def ncclGroupEnd(self):
        rank = self.open.rank
        self.here[rank] = self.open.sends
        self.meet.wait()
        for peer, (target, count) in self.open.receives.items():
            ctypes.memmove(target, self.here[peer][rank], count)
        self.meet.wait()
        return 0

    def ncclCommDestroy(self, comm):
        self.log.append(("destroy", comm.value))
        return 0

    def ncclCommGetAsyncError(self, comm, code):
        code._obj.value = 6
        return 0

    def ncclGetErrorString(self, code):
        return b"remote process exited" if code == 6 else b"invalid usage"

    def ncclGetLastError(self, comm):
        return b""


def test_what_the_library_says_in_the_background_is_raised():
    lib = MovesMemory(2)
    comms = [nccl.Communicator(bytes(nccl.ID_BYTES), r, 2, lib) for r in range(2)]
    with pytest.raises(DeviceError, match="NCCL on rank 1: remote process exited"):
        comms[1].check()
    comms[1].close()
    comms[1].close()
    assert lib.log == [("destroy", 2)]


@pytest.fixture(scope="module")
def movers(tmp_path_factory):
    source = '#include "rank_moves.cuh"\nextern "C" int size_of_move;\nint size_of_move = sizeof(RankMove);\n'
    return host.build(source, [PACK, SPREAD], tmp_path_factory.mktemp("movers"), {"exchange_sizes.cuh": sizes()})


def test_python_knows_the_structure_of_a_move(movers):
    assert host.constants(movers, "size_of_move", 1) == (ctypes.sizeof(RankMove),)


@pytest.mark.parametrize("dcp", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 64])
def test_a_step_moves_what_the_plan_says(rows, dcp, movers):
    plan = build_plan(made_config(), TP, dcp=dcp)
    moves = [m for _, _, moves in collectives_of(plan) for m in moves]
    assert {m.how for m in moves} == {GATHER, STACK, SCATTER} and sum(m.in_group for m in moves) == 2 * (dcp > 1)
    check_plan(plan, rows, by_nccl(movers))


@pytest.mark.parametrize("family", ["mla", "gqa"])
@pytest.mark.parametrize("rows", [16, 64])
def test_a_draft_moves_what_its_plan_says(rows, family, movers):
    plan = build_draft_plan(made(family, {"num_key_value_heads": 4}).cfg, TP, 3)
    logits_of_drafts, moves = 3, [m for _, _, moves in collectives_of(plan) for m in moves]
    assert len(moves) == {"mla": 7, "gqa": 4}[family] + logits_of_drafts and plan.padded_seqs(rows) < rows
    check_plan(plan, rows, by_nccl(movers))


def by_nccl(movers):
    """What `check_plan` launches: moves packed and spread by the GPU's own kernels, carried by a library that moves memory."""
    from k3cuda.runtime.cuda_carry import NcclMove

    lib = MovesMemory(TP)
    comms = [nccl.Communicator(bytes(nccl.ID_BYTES), r, TP, lib) for r in range(TP)]

    def kernel(name, arguments, vectors):
        return SimpleNamespace(launch=lambda: host.launch(movers, name, blocks_for(vectors, 2), THREADS, arguments))

    def launches(rank, name, places):
        out = []
        for layout, source, target in places:
            staging = np.empty(NcclMove.staging_bytes(layout), np.uint8)
            out.append(NcclMove(layout, comms[rank], source, target, staging.ctypes.data, 77, kernel))
            out[-1].keeps = staging
        return out

    return launches


def test_a_rank_of_the_standard_backend_asks_its_carrier_where_others_run_a_kernel(monkeypatch):
    from k3cuda.runtime.cuda_backend import CudaBackend
    from k3cuda.runtime.cuda_carry import Carrier, NcclMove
    from k3cuda.runtime.cuda_rank import CudaRank

    asked, plan = [], build_plan(made_config(), 4)
    memory = SimpleNamespace(arena=SimpleNamespace(data=SimpleNamespace(ptr=1 << 20)), tables=tables_of(plan), plan=plan, offsets=arena_offsets(plan)[0])
    monkeypatch.setattr(CudaBackend, "launches", lambda self, what, bucket, **options: asked.append(options) or [(op, ["kernel"]) for op in plan.ops])
    monkeypatch.setattr(Carrier, "_room", lambda self, layout: 1 << 30)
    monkeypatch.setattr(Carrier, "_kernel", lambda self, name, arguments, vectors: name)
    rank = CudaRank.__new__(CudaRank)
    rank.memories, rank.plan, rank.tp, rank._carrier = [memory], plan, 4, Carrier.__new__(Carrier)
    rank._comm = rank._carrier._comm = SimpleNamespace(rank=2, size=4)
    rank._carrier._raw_stream, rank._carrier._exchange = 77, None
    launches = rank.launches("step", 8, overlap=True)
    assert asked == [{"overlap": False, "follows": False}] and [op for op, _ in launches] == list(plan.ops)
    for op, group in launches:
        assert [type(x) for x in group] == [NcclMove] * len(op.stage.moves) if op.stage.moves else group == ["kernel"]
    # An exchange is one launch for all moves of a collective, which begins under the launch before it where that may be.
    rank._carrier.name, rank._carrier._exchange = "peer", SimpleNamespace(launch=lambda name, moves, dependent: (name, len(moves), dependent))
    for overlap in (True, False):
        launches = rank.launches("step", 8, overlap=overlap)
        assert asked[-1] == {"overlap": overlap, "follows": False}
        assert [group for op, group in launches if op.stage.moves] == [[(str(op), len(op.stage.moves), overlap)] for op in plan.ops if op.stage.moves]
    said = []
    rank._building, rank._kernels, rank._carrier.meet = lambda: said.append("building") or nullcontext(), {8: "built"}, lambda: said.append("met")
    assert rank.kernels(8) == "built" and said == ["building", "met"]
    assert not CudaRank.overlaps and CudaRank.most_rows == DECODE_ROWS and CudaBackend.most_rows == MAX_ROWS   # what one process has stays as it was
    with pytest.raises(UsageError, match="rank 1 is another process"):
        rank.buffer("logits", 1)


@pytest.mark.parametrize("loopback", [False, True])
def test_a_process_stands_in_every_place_and_is_itself(loopback):
    """Only looped back it embeds the tokens of others, too: a sum over real ranks would count them twice."""
    from k3cuda.runtime.cuda_memory import RankMemory

    plan, arena = build_plan(made_config(), TP), SimpleNamespace(data=SimpleNamespace(ptr=1 << 20))
    memory = SimpleNamespace(plan=plan, tables=tables_of(plan), dims=tables_of(plan).dims, arena=arena, session={}, mla_work=None, mla_partials=0)
    made = RankMemory.step_struct(memory, 2, [memory], loopback)
    assert (made.rank, made.loopback, list(made.peers)[:TP]) == (2, loopback, [1 << 20] * TP)


def test_a_call_that_fails_is_named():
    lib = MovesMemory(1)
    lib.ncclAllGather = lambda *arguments: 5
    with pytest.raises(DeviceError, match="ncclAllGather: invalid usage"):
        nccl.Communicator(bytes(nccl.ID_BYTES), 0, 1, lib).all_gather(0, 0, 4, 77)
