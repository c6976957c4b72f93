"""Which steps a backend runs in one launch, what it counts, and what it says of a launch that ended itself; without a GPU."""
import ctypes
import gc
import json
import os
import re
import subprocess
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cupy", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")

from command import ENVIRONMENT  # noqa: E402
from cupy.cuda.runtime import CUDARuntimeError  # noqa: E402
from host_step import Memory  # noqa: E402
from test_step_io import library, make  # noqa: E402, F401 - fixtures
from test_step_io import pytestmark as shim  # noqa: E402

from k3cuda import launch_source as ls  # noqa: E402
from k3cuda.cli.model_argument import config_of  # noqa: E402
from k3cuda.config import RELEASED_FOLDER, K3Config  # noqa: E402
from k3cuda.emit import NO_PROBES, Probes  # noqa: E402
from k3cuda.emit_sizes import ROW_BUCKETS  # noqa: E402
from k3cuda.errors import CompileError, DeviceError, PlanError, StepTimeout, loses_model  # noqa: E402
from k3cuda.packing import PACKED  # noqa: E402
from k3cuda.plan import Taps, build_plan  # noqa: E402
from k3cuda.runtime import cuda_driver, cuda_launch  # noqa: E402
from k3cuda.runtime.backend import StepRows  # noqa: E402
from k3cuda.runtime.cuda_backend import CudaBackend  # noqa: E402
from k3cuda.runtime.cuda_driver import Device  # noqa: E402
from k3cuda.runtime.cuda_jit import KERNELS  # noqa: E402
from k3cuda.runtime.launch_pointers import Places, Pointers  # noqa: E402
from k3cuda.runtime.launch_program import BUCKETS, CLUSTER, KERNEL, LOOPBACK, MEET_S, NOT_THERE, RANK, ROOM, TOO_MANY_ROWS, WAITS, launched, misfit, trouble_text  # noqa: E402
from k3cuda.runtime.loading import Loading  # noqa: E402
from k3cuda.runtime.machine import LATENCY_SPECIALIZED, NCCL, PEER, STANDARD, VIRTUAL  # noqa: E402
from k3cuda.runtime.made_config import made_config  # noqa: E402
from k3cuda.runtime.made_model import MadeCheckpoint  # noqa: E402
from k3cuda.tables import tables_of  # noqa: E402

RELEASE = K3Config.from_json(RELEASED_FOLDER)
TP, SLOTS, SLOT_PAGES = 16, 4, 8
# Whose sizes the phases can do: whole vectors of 16 ranks, sixteen leaves of experts.
FITTING = made_config(head_dim=128, v_head_dim=128, qk_nope_head_dim=128, qk_rope_head_dim=64, kv_lora_rank=512, q_lora_rank=256, hidden_size=256, num_experts=64,
                      routed_expert_hidden_size=512)


@pytest.fixture(scope="module")
def plan():
    return build_plan(RELEASE, TP)


@pytest.mark.parametrize("options, ranks, probes, words", [
    ({}, LOOPBACK, NO_PROBES, None), ({"tp": 1}, "nccl", NO_PROBES, None), ({}, VIRTUAL, NO_PROBES, None), ({}, PEER, NO_PROBES, None), ({}, NCCL, NO_PROBES, "not mapped"),
    ({"dcp": 2}, LOOPBACK, NO_PROBES, "split over ranks"), ({"taps": Taps((1,), "prefix")}, LOOPBACK, NO_PROBES, None),
    ({}, LOOPBACK, Probes(forced_experts=4), "forced experts"), ({}, LOOPBACK, Probes(trace=True), None), ({}, LOOPBACK, Probes(hop_cycles=9), None)])
def test_what_no_step_of_a_backend_can_do(options, ranks, probes, words):
    found = misfit(build_plan(made_config(), **{"tp": 2} | options), ranks, probes)
    assert found is None if words is None else words in found


def launches(monkeypatch, build, **more):
    """StepLaunches whose launches `build` makes."""
    memory = lambda nbytes: bytearray(nbytes)
    monkeypatch.setattr(cuda_launch, "cupy", SimpleNamespace(cuda=SimpleNamespace(alloc_pinned_memory=memory, runtime=SimpleNamespace(CUDARuntimeError=CUDARuntimeError))))
    monkeypatch.setattr(cuda_launch.StepLaunches, "_build", build)
    values = {"plan": build_plan(made_config(), 2), "memories": [None], "device": None, "stream": 0, "kv_cache_dtype": "bf16", "ranks": LOOPBACK, "probes": NO_PROBES, "loading": Loading()}
    return cuda_launch.StepLaunches(**values | more)


def test_who_asks_for_one_launch_and_cannot_have_it_is_told(monkeypatch, caplog):
    """By a warning each: of a backend when it opens, of a number of rows when it is first asked for."""
    def build(self, bucket):
        raise PlanError("sizes that no phase has")

    launches(monkeypatch, build, ranks=NCCL)
    found = launches(monkeypatch, build)
    for _ in range(2):
        assert found.declines(2)
    first, second = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert first.startswith("no step runs in one launch: the ranks' memory is not mapped") and second == "steps of 2 rows do not run in one launch: sizes that no phase has"


def test_reasons_of_row_counts_are_found_once(monkeypatch):
    asked = []

    def build(self, bucket):
        asked.append(bucket)
        if bucket == 2:
            raise PlanError("sizes that no phase has")
        if bucket == 4:
            raise CompileError("no room", "look")
        return SimpleNamespace(launches=[bucket], program=None, module=SimpleNamespace(close=lambda: None))

    found = launches(monkeypatch, build)
    want = {1: None, 2: "sizes that no phase has", 4: "no room", 8: None}
    for _ in range(2):
        assert {b: found.declines(b) for b in ROW_BUCKETS} == {b: want.get(b, TOO_MANY_ROWS) for b in ROW_BUCKETS}
    assert asked == list(BUCKETS) and found.launches(8) == [8]
    found.close()
    assert found.failure not in cuda_driver.explanations
    apart = launches(monkeypatch, build, ranks=NCCL)
    assert all("not mapped" in apart.declines(b) for b in ROW_BUCKETS) and asked == list(BUCKETS)
    apart.close()


def test_what_knows_of_failures_outlives_launches_that_nobody_closed(monkeypatch):
    """It is asked as long as the process lasts, and holds nothing that the GPU has: memory of a backend that was dropped must be free."""
    found = launches(monkeypatch, None)
    gone, ask = weakref.ref(found), found.failure
    assert ask in cuda_driver.explanations
    del found
    gc.collect()
    assert gone() is None and ask in cuda_driver.explanations
    cuda_driver.explanations.remove(ask)


class OnHost(np.ndarray):
    """An array that shows its address as CuPy's do."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)


@pytest.fixture
def on_host(monkeypatch):
    """What a launch is made of, in the host's memory: (of an array its view with an address, launches that were made, programs that were compiled, modules that were closed)."""
    array = lambda a: np.ascontiguousarray(a).view(OnHost)
    stream = SimpleNamespace(synchronize=lambda: None)
    cupy = SimpleNamespace(asarray=array, zeros=lambda n, dtype: array(np.zeros(n, dtype)), full=lambda n, v, dtype: array(np.full(n, v, dtype)), uint8=np.uint8, uint32=np.uint32, ndarray=np.ndarray,
                           cuda=SimpleNamespace(get_current_stream=lambda: stream, alloc_pinned_memory=lambda nbytes: bytearray(nbytes)))
    made, compiled, closed = [], [], []

    def launch(function, grid, block, arguments, **options):
        made.append(SimpleNamespace(function=function, grid=grid, arguments=arguments, launch=lambda: None, **options, config=grid))
        return made[-1]

    constants = lambda name, count: (576, 230_000, CLUSTER, 16)
    module = SimpleNamespace(constants=constants, function=lambda name, shared=0: name, close=lambda: closed.append(True))
    cu = SimpleNamespace(cuOccupancyMaxActiveClusters=lambda function, grid: 64, cuOccupancyMaxActiveBlocksPerMultiprocessor=lambda function, threads, shared: 1, cuStreamSynchronize=lambda stream: None)
    for name, value in {"cupy": cupy, "Launch": launch, "Module": lambda cubin: module, "check": lambda result: result, "driver": lambda: cu,
                        "compiled_launch": lambda plan, program, arch, ranks_here, probes: compiled.append(program) or SimpleNamespace(cubin=b"")}.items():
        monkeypatch.setattr(cuda_launch, name, value)
    return array, made, compiled, closed


def memory_of(array, plan, rank=0):
    """As a RankMemory, but in the host's memory."""
    memory = Memory(plan, MadeCheckpoint(plan.cfg), rank)
    buffers = {name: array(memory.buffer(name)) for name in memory.tables.buffers}
    return SimpleNamespace(tables=memory.tables, buffer=buffers.get, weights={(op.layer, op.stage.name): [array(a) for a in memory.weights_of(op)] for op in plan.ops},
                           mla_work=array(memory.mla_work), mla_partials=memory.step.mla_partials)


@shim
def test_blocks_without_clusters_are_counted_one_by_one(on_host):
    """The driver has no clusters of one block: a kernel whose blocks share nothing was taken for one that the GPU cannot hold."""
    array, *_ = on_host
    plan = build_plan(FITTING, 1)
    found = cuda_launch.StepLaunches(plan, [memory_of(array, plan)], Device(0, "a GPU", "sm_90a", 133, 227 << 10), 5, "bf16", LOOPBACK, NO_PROBES, Loading())
    launch = SimpleNamespace(function="one", config=133)
    assert [found._resident(launch, 640, 230_000, cluster) for cluster in (1, 2)] == [133, 128]
    found.close()


@shim
def test_ranks_of_one_gpu_share_a_launch(on_host):
    """As groups of its blocks, whole clusters each: an argument a rank, with its own exchange and counts, its own rows and weights, and the table of all."""
    array, _, compiled, _ = on_host
    plan = build_plan(made_config(moe_intermediate_size=64, **{k: getattr(FITTING, k) for k in ("v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank", "q_lora_rank")},
                                  head_dim=128, hidden_size=256, routed_expert_hidden_size=512), 2)
    memories = [memory_of(array, plan, rank) for rank in range(2)]
    found = cuda_launch.StepLaunches(plan, memories, Device(0, "a GPU", "sm_90a", 133, 227 << 10), 5, "bf16", VIRTUAL, NO_PROBES, Loading())
    try:
        assert found.declines(1) is None and [(p.grid.sms, p.ranks) for p in compiled] == [(66, 2), (64, 2)]
        one, = found.launches(1)
        assert one.grid == 128
        args = (ls.LaunchArgs * 2).from_address(one.arguments[0].value)
        peers = (ls.LaunchPeer * 2).from_address(args[0].peers)
        assert [a.rank for a in args] == [0, 1] and args[1].peers == args[0].peers and args[1].programs == args[0].programs and args[1].failed == args[0].failed
        for own, peer, memory in zip(args, peers, memories):
            assert (own.exchange, own.result, own.counts) == (peer.exchange, peer.result, peer.counts) and own.result == memory.buffer("logits").ctypes.data
            table = (ctypes.c_uint64 * own.phases).from_address(own.weights)
            assert table[own.phases - 1] == memory.weights[None, "lm_head"][0].ctypes.data
        assert len({a for peer in peers for a in (peer.exchange, peer.counts)}) == 4
    finally:
        found.close()


@shim
def test_what_a_launch_is_made_of(monkeypatch, on_host):
    """As many blocks as the driver says fit, cooperative, in clusters; its tables and the addresses of the memory's own buffers."""
    array, _, compiled, closed = on_host
    plan = build_plan(FITTING, TP)
    rank = memory_of(array, plan)
    buffers = {name: rank.buffer(name) for name in rank.tables.buffers}
    found = cuda_launch.StepLaunches(plan, [rank], Device(0, "a GPU", "sm_90a", 133, 227 << 10), 5, "bf16", LOOPBACK, NO_PROBES, Loading())
    try:
        assert found.declines(2) is None and [p.grid.sms for p in compiled] == [132, 128]
        one, = found.launches(2)
        assert (one.function, one.grid, one.cluster, one.cooperative, one.stream) == (KERNEL, 128, CLUSTER, True, 5)
        args, = one.arguments
        assert args.result == buffers["logits"].ctypes.data and args.row_slot == buffers["row_slot"].ctypes.data and args.input is None and args.rows == 2
        exchange = (ctypes.c_uint32 * (args.slot_vectors * 4 * compiled[-1].slots)).from_address(args.exchange)
        assert set(exchange) == {NOT_THERE} and not any((ctypes.c_uint8 * ls.COUNT_BYTES).from_address(args.counts))
        table = (ctypes.c_uint64 * args.phases).from_address(args.weights)
        assert table[args.phases - 1] == rank.weights[None, "lm_head"][0].ctypes.data
        assert found.declines(8) is None and found.launches(8)[0].arguments[0].exchange == args.exchange and found.launches(8)[0].arguments[0].counts != args.counts

        def full(*_):
            raise PlanError("the plan has not that")

        monkeypatch.setattr(cuda_launch, "Pointers", full)
        before = len(closed)
        assert found.declines(4) == "the plan has not that" and len(closed) == before + 2   # of 132 blocks, which do not fit, and of 128
    finally:
        found.close()


@shim
def test_steps_are_counted_by_who_ran_them(make, monkeypatch):   # noqa: F811
    """Step by step, one launch or the standard path's, and why not the one that was asked for."""
    backend, ran = make(), []
    plain = backend.replay

    def replay(what, bucket, half=None, single=False):
        ran.append((what, bucket, single))
        plain(what, bucket, half)

    backend.name, backend.replay = LATENCY_SPECIALIZED, replay
    backend.step_launches = SimpleNamespace(declines=lambda bucket: {1: None, 2: "not two"}.get(bucket, TOO_MANY_ROWS), failure=lambda: None)
    backend.open_slot(0, [])
    at = 0
    for rows in (1, 2, 9, 1):
        ids = np.arange(rows, dtype=np.int32) % 5
        backend.step(StepRows(ids, np.zeros(rows, np.int32), np.arange(at, at + rows, dtype=np.int32), np.array([rows - 1], np.int32)))
        backend.commit(np.ones(rows, bool))
        at += rows
    assert [step for step in ran if step[0] == "step"] == [("step", 1, True), ("step", 2, False), ("step", 16, False), ("step", 1, True)]
    assert not any(single for what, _, single in ran if what == "commit")
    assert backend.counts.steps == {LATENCY_SPECIALIZED: 2, STANDARD: 2} and backend.counts.reasons == {"not two": 1, TOO_MANY_ROWS: 1}


def test_a_launch_that_ended_itself_says_who_waited_for_what(monkeypatch, plan):
    """Whatever the driver calls it, in the first of its calls that fails."""
    program, limit = launched(plan, 8, 132, "fp8_e4m3"), f"{ls.LIMIT_NS / 1e9:g}"
    at = next(i for i, step in enumerate(program.steps) if step.name == "o_proj" and step.layer == 40)
    found = launches(monkeypatch, lambda self, bucket: SimpleNamespace(program=program, module=SimpleNamespace(close=lambda: None)))
    code = SimpleNamespace(name="CUDA_ERROR_LAUNCH_FAILED")
    monkeypatch.setattr(cuda_driver, "driver", lambda: SimpleNamespace(CUresult=SimpleNamespace(CUDA_SUCCESS=0), cuGetErrorString=lambda code: (0, b"unspecified launch failure")))
    try:
        found.declines(8)
        with pytest.raises(DeviceError, match="unspecified launch failure"):
            cuda_driver.check((code,))
        assert found.failure() is None
        found._records.words[8][:5] = 3, 17, 4, at, 99
        with pytest.raises(StepTimeout, match=rf"block 17, warp 4 waited {limit} s for a vector in o_proj, layer 40 \(phase {at}, 99\); start the process again, .*; use decode_backend 'standard'"):
            cuda_driver.check((code,))
        assert trouble_text(found._records.words[8], program) in str(found.failure())
        late = lambda wait, phase: trouble_text(np.array([WAITS.index(wait), 0, 0, phase, 3], np.uint32), program)
        assert f"waited {ls.PRODUCER_LIMITS * ls.LIMIT_NS / 1e9:g} s for room in the ring in o_proj" in late(ROOM, at)   # because of others
        assert f"waited {MEET_S:g} s for rank 3 in embed" in late(RANK, 0) and f"waited {limit} s for rank 3 in lm_head" in late(RANK, program.phases - 1)
        with pytest.raises(StepTimeout, match="o_proj, layer 40"), cuda_driver.explained():   # as in each call of a backend
            pytest.fail("a context that is gone is asked")
        found._records.words[8][:5] = WAITS.index(RANK), 0, 0, 0, 3
        assert re.search("for rank 3 .*; that rank's own output says why$", str(found.failure()))   # what else uses this GPU has no part in that
    finally:
        found.close()
    with pytest.raises(DeviceError, match="unspecified"):
        cuda_driver.check((code,))


@pytest.mark.parametrize(("status", "kind"), [(719, DeviceError), (2, CUDARuntimeError)], ids=["lost", "full"])
def test_what_cupy_says_of_a_lost_gpu_is_an_error_of_the_device(status, kind):
    """Nothing that explains it is known; a full GPU loses nothing."""
    with pytest.raises(kind, match="cudaError") as failed, cuda_driver.explained():
        raise CUDARuntimeError(status)
    assert loses_model(failed.value) == (kind is DeviceError)


def test_what_fails_because_a_launch_ended_itself_says_so(monkeypatch):
    """Whatever the call is that finds out, and whatever it calls that."""
    asked = iter((None, StepTimeout("block 17 waited")))
    monkeypatch.setattr(cuda_driver, "explanations", [lambda: next(asked)])
    with pytest.raises(StepTimeout, match="block 17"), cuda_driver.explained():
        raise CUDARuntimeError(719)


@shim
def test_behind_a_launch_that_ended_itself_every_call_says_so_and_none_asks_the_gpu(make, monkeypatch):   # noqa: F811
    """Of this backend, and of those that the process opens later; closing is no call."""
    backend, rows = make(), StepRows(*(np.zeros(1, np.int32) for _ in range(4)))
    backend.open_slot(0, [])
    monkeypatch.setattr(cuda_driver, "explanations", [lambda: StepTimeout("block 17 waited", "start the process again")])
    monkeypatch.setattr(backend, "replay", lambda *_: pytest.fail("a launch"))
    monkeypatch.setattr(backend, "stream", SimpleNamespace(synchronize=lambda: pytest.fail("a wait")))
    calls = {"open_slot": (0, []), "copy_slot": (0, 1, []), "step": (rows,), "logits": (), "new_logits": (1,), "copy_logits": (None,), "buffer": ("logits",), "sample": ([],), "commit": (np.ones(1, bool),),
             "launch": (rows, []), "_unbind": ()}
    for name, arguments in calls.items():
        with pytest.raises(StepTimeout, match="block 17 waited; start the process again"):
            getattr(CudaBackend, name)(backend, *arguments)
    with pytest.raises(StepTimeout, match="block 17"):
        cuda_driver.open_device()
    CudaBackend.close(backend)


@pytest.mark.parametrize(("main", "code"), [("from k3cuda.__main__ import main; sys.argv[1:] = ['--version']", 0), ("from k3cuda.runtime.rank_worker import main", 5),
                                            ("from k3cuda.__main__ import main; sys.argv[1:] = ['generate', 'tiny-random', '--prompt', 'a']", 5)], ids=["command", "worker", "rank"])
def test_a_process_whose_context_is_gone_frees_nothing(tmp_path, main, code):
    """A command, also as a rank that a launcher started, and a rank that none did: its output is whole, and of what the interpreter would call at its end only the folder is
    removed that CuPy had."""
    script = ("import atexit, sys; from k3cuda.errors import StepTimeout; from k3cuda.runtime import cuda_driver, open_model\n"
              "def ended(*_, **__): raise SystemExit(5)\n"
              f"cuda_driver._give_cupy_a_folder(); open_model.open_model = ended; {main}\n"
              "cuda_driver.explanations.append(lambda: StepTimeout('block 17 waited')); atexit.register(print, 'freed'); main()")
    env = {n: v for n, v in ENVIRONMENT.items() if n != "CUPY_CACHE_DIR"} | {"HOME": os.devnull, "TMPDIR": str(tmp_path)}
    work = {"parent": None, "rank": 1, "size": 2, "port": 1, "token": "", "arguments": {}, "log_level": 30}
    process = subprocess.Popen([sys.executable, "-c", script], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdin.write(json.dumps(work) + "\n")
    process.stdin.flush()   # and it stays open: a worker ends with it
    assert process.wait(60) == code, process.stderr.read()
    said = process.stdout.read()
    assert said.startswith("k3cuda ") == ("--version" in main) and "freed" not in said and not list(tmp_path.iterdir())
    process.communicate()


@shim
def test_a_rank_leaves_what_ended_with_its_context(monkeypatch):
    """Mappings, kernels and NCCL's communicator: their own complaints would hide why, or never come back."""
    from k3cuda.runtime.cuda_rank import CudaRank

    rank = CudaRank.__new__(CudaRank)
    rank._carrier, rank._comm = SimpleNamespace(close=lambda: pytest.fail("mappings")), SimpleNamespace(abort=lambda: pytest.fail("NCCL"))
    monkeypatch.setattr(cuda_driver, "explanations", [lambda: StepTimeout("block 17 waited")])
    rank.close()
    monkeypatch.setattr("k3cuda.runtime.cuda_rank.CudaBackend.__init__", lambda self, *_, **__: cuda_driver.open_device())
    with pytest.raises(StepTimeout, match="block 17") as failed:
        CudaRank(None, SimpleNamespace(rank=0, size=2, abort=lambda: pytest.fail("NCCL")), 0)
    assert failed.value.__context__ is None


def test_a_probe_of_hops_is_built_in_and_its_hops_are_counted(monkeypatch, plan):
    program, built = launched(plan, 1, 132, "fp8_e4m3"), []
    monkeypatch.setattr(cuda_launch, "launched", lambda *_: program)
    monkeypatch.setattr(cuda_launch, "compiled_launch", lambda *_, **options: built.append(options["probes"]) or SimpleNamespace(cubin=b""))
    monkeypatch.setattr(cuda_launch, "Module", lambda cubin: SimpleNamespace(constants=lambda name, count: (576, 230_000, CLUSTER, 16), function=lambda name, shared: name, close=lambda: None))
    monkeypatch.setattr(cuda_launch.StepLaunches, "_resident", lambda *_: 132)
    monkeypatch.setattr(cuda_launch, "Launch", lambda *_, **__: None)
    for probes, hops in ((NO_PROBES, 0), (Probes(hop_cycles=9), 465)):
        found = launches(monkeypatch, lambda self, bucket: SimpleNamespace(program=self._compiled(bucket)[0], module=SimpleNamespace(close=lambda: None)), plan=plan, probes=probes,
                         device=Device(0, "a GPU", "sm_90a", 132, 227 << 10))
        assert found.declines(1) is None and found.hops(1) == hops
        cuda_driver.explanations.remove(found.failure)
    assert built == [NO_PROBES, Probes(hop_cycles=9)]


def test_every_wait_of_the_kernel_has_words():
    names = re.search(r"enum LaunchWait \{ (.*?) \}", (KERNELS / "launch_ring.cuh").read_text(encoding="utf-8"), re.S).group(1)
    assert len(names.split(",")) == len(WAITS) - 1


def test_pointers_of_a_released_step(plan):
    """Weights are those of the phase's own stage and layer; a layer's states, records and cache rows are its own part of theirs."""
    tables = tables_of(plan, SLOTS, SLOTS * SLOT_PAGES, SLOT_PAGES)
    weights = {(op.layer, op.stage.name): tuple(1 << 50 | at << 20 | i for i in range(len(PACKED.get(op.stage.name, ())))) for at, op in enumerate(plan.ops)}
    places = Places(plan, tables, "fp8_e4m3", {name: at << 40 for at, name in enumerate(tables.buffers)}, weights, 1 << 51, 1000, 0.1)
    program = launched(plan, 8, 132, "fp8_e4m3")
    found = Pointers(program, places)
    table, base = found.table(1 << 54), 1 << 54
    by_phase = {(program.steps[i].name, program.steps[i].layer): int(at) for i, at in enumerate(table)}
    assert by_phase["o_proj", 40] == weights[40, "o_proj"][0] and by_phase["shared_down", 40] == weights[40, "route"][1] and by_phase["route", 40] == weights[40, "route"][0]
    assert by_phase["lm_head", 93] == weights[None, "lm_head"][0] and by_phase["expert_up", 1] == weights[1, "expert_up"][0] and by_phase["dense_up", 0] == weights[0, "dense_up"][0]
    mla = next(layer for layer in range(93) if not RELEASE.is_kda(layer))
    assert by_phase["mla_norm", mla] == by_phase["mla_attend", mla] == by_phase["mla_combine", mla] >= base
    assert all(base <= at < base + len(found.structures) for (name, _), at in by_phase.items() if name in ("embed", "kda_mix") or name.startswith(("attn_mix", "ffn_mix", "routed_norm")))
    op = [op for op in plan.ops if op.stage.name == "kda_mix"][5]
    at = places.part("kda_state", op) - places.buffers["kda_state"]
    assert at == 5 * SLOTS * (96 // TP) * 128 * 128 * 4
    op = [op for op in plan.ops if op.stage.name == "mla_norm"][3]
    assert places.part("mla_cache", op) - places.buffers["mla_cache"] == 3 * SLOTS * SLOT_PAGES * 64 * 576


@pytest.mark.parametrize("changes, tp, words", [({}, 1, "wanted a multiple of 32"), ({"num_experts": 16}, 16, "wanted multiples of 8")])
def test_models_that_its_phases_cannot_do(changes, tp, words):
    with pytest.raises(PlanError, match=words):
        launched(build_plan(made_config(**changes), tp), 1, 132, "bf16")


@pytest.mark.parametrize("name, tps", [("demo", (1, 2)), ("tiny-random", (1, 2, 4))])
def test_small_models_fit(name, tps):
    for tp in tps:
        for rows in BUCKETS:
            assert launched(build_plan(config_of(name), tp), rows, 132, "bf16").rows == rows


def test_which_ranks_of_the_released_model_fit():
    """Leaves of w2 are no matter; what a rank's dense layer multiplies lies in shared memory as a whole."""
    for tp, fits in {8: 8, 4: 4, 2: 2, 1: 1}.items():
        assert launched(build_plan(RELEASE, tp), fits, 132, "fp8_e4m3").rows == fits
        if fits < BUCKETS[-1]:
            with pytest.raises(PlanError, match=f"dense_down multiplies {2 * fits} rows of {33792 // tp} values"):
                launched(build_plan(RELEASE, tp), 2 * fits, 132, "fp8_e4m3")
