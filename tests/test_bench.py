"""Benchmarks without a GPU: the floor they divide by, the checks that make a result void, and what they build into kernels."""
import inspect
import re
import subprocess
import tempfile
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")
pytest.importorskip("cupy", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")

from models import headdims  # noqa: E402
from test_jit import NVDISASM  # noqa: E402

from k3cuda import weights  # noqa: E402
from k3cuda.buffers import buffer_shape, step_dims  # noqa: E402
from k3cuda.config import DECODE_ROWS, RELEASED_FOLDER, K3Config  # noqa: E402
from k3cuda.emit import Probes, build_files  # noqa: E402
from k3cuda.emit_sizes import DECODE_BUCKETS  # noqa: E402
from k3cuda.errors import BenchmarkError, OutOfMemory  # noqa: E402
from k3cuda.plan import Taps, build_plan  # noqa: E402
from k3cuda.runtime import cuda_bench  # noqa: E402
from k3cuda.runtime import cuda_bench_checks as checks  # noqa: E402
from k3cuda.runtime.cuda_bench import StepBench  # noqa: E402
from k3cuda.runtime.cuda_decode import DecodeBench  # noqa: E402
from k3cuda.runtime.cuda_kernels import compile_bucket  # noqa: E402
from k3cuda.runtime.step_bytes import StepBytes  # noqa: E402
from k3cuda.stages import GATHER, SCATTER  # noqa: E402


@pytest.fixture(scope="module")
def released():
    return build_plan(K3Config.from_json(RELEASED_FOLDER), 16)


def of(plan, **changes) -> StepBytes:
    experts = {op.layer: 16 for op in plan.ops if op.stage.name == "route"}
    return StepBytes(**{"plan": plan, "kv_cache_dtype": "fp8_e4m3", "sequences": 1, "cache_tokens": 0, "experts": experts} | changes)


# ---- the floor ----

def test_floor_of_one_row_is_all_weights_but_the_experts_that_are_not_chosen(released):
    cfg, dims = released.cfg, released.cfg.dims()
    held = weights.model_bytes(cfg, 16)
    for layer, w in weights.all_weights(cfg):
        if w.per_expert:
            held -= weights.rank_bytes(w, dims, 16, experts=cfg.num_experts - 16)
    held -= weights.rank_bytes(weights.BY_NAME["embed_tokens"], dims, 16)
    states = 69 * 6 * 128 * 128 * 4
    assert of(released).floor() == held + states


def test_floor_counts_experts_caches_and_states(released):
    one = of(released).floor()
    more = {layer: n + 1 for layer, n in of(released).experts.items()}
    assert of(released, experts=more).floor() - one == 92 * 192 * 3584 * 3 * 17 / 32   # a scale byte for every 16 bytes of weights
    assert of(released, cache_tokens=64 * 8192).floor() - one == 24 * 64 * 8192 * 576
    assert of(released, cache_tokens=100, kv_cache_dtype="bf16").floor() - one == 24 * 100 * 576 * 2
    assert of(released, sequences=64).floor() - one == 63 * 69 * 6 * 128 * 128 * 4


def test_commit_is_no_part_of_the_floor_but_has_bytes_of_its_own(released):
    b = of(released, sequences=2)
    assert [b.op(op) for op in released.commit] == [b.states()] * 69


# ---- what makes a result void ----

@pytest.mark.parametrize("rows", range(1, DECODE_ROWS + 1))
def test_the_other_bucket_is_another_one_and_holds_the_rows(rows):
    own = next(b for b in DECODE_BUCKETS if b >= rows)
    bucket, checked = checks.other_bucket(rows)
    assert bucket != own and bucket in DECODE_BUCKETS and rows // 2 <= checked <= min(rows, bucket) and checked


def test_faster_than_the_bytes():
    checks.check_time(2.0, 1.99)
    with pytest.raises(BenchmarkError, match="beats its floor") as e:
        checks.check_time(1.98, 1.99)
    assert e.value.code == 8


def test_a_forced_routing_must_be_read():
    bench = SimpleNamespace(backend=SimpleNamespace(probes=Probes(forced_experts=120)))
    checks.check_experts(bench, {1: 120, 2: 120})
    with pytest.raises(BenchmarkError, match="layer 2 read 119 experts, forced were 120"):
        checks.check_experts(bench, {1: 120, 2: 119})


def test_other_bytes_are_named_by_row():
    want = {"logits": np.zeros((4, 8), np.float32)}
    got = {"logits": want["logits"].copy()}
    got["logits"][2, 7] = -0.0
    checks.same_step(got, want, "here", rows=2)
    with pytest.raises(BenchmarkError, match=r"here: logits of rows \[2\]"):
        checks.same_step(got, want, "here")


class OnDevice(np.ndarray):
    """An array that is fetched like CuPy's."""

    def get(self):
        return np.array(self)


@pytest.mark.parametrize("taps", [None, Taps((0, 2), "prefix")], ids=["alone", "with a draft"])
def test_what_a_step_leaves_has_what_a_draft_reads(taps, monkeypatch):
    """Of its rows alone: one other value there is found, one behind them is nobody's business."""
    monkeypatch.setattr(checks, "cache_rows", lambda bench: (slice(None), [0, 1, 3], [5, 5, 7]))
    plan, rng = build_plan(headdims().cfg, 4, taps), np.random.default_rng(1)
    dims = step_dims(plan.cfg, tp=4, slots=1, pages=4, slot_pages=4, num_taps=len(taps.layers) if taps else 0)
    bits = lambda name: rng.integers(0, 1 << 16, buffer_shape(checks.BUFFER[name], dims)).astype(np.uint32 if checks.BUFFER[name].dtype == "f32" else np.uint16).view(OnDevice)
    held = {name: bits(name) for name in (*checks.RECORDS, "mla_cache", *(["taps"] if taps else []))}
    bench = SimpleNamespace(backend=SimpleNamespace(plan=plan, stream=SimpleNamespace(synchronize=lambda: None)), memory=SimpleNamespace(buffer=held.__getitem__), rows=3)
    left = checks.left(bench)
    assert left.keys() == held.keys() and all(len(rows) == 3 for rows in left.values())
    if taps:
        held["taps"][3:] += 1
        checks.same_step(checks.left(bench), left, "here")
        held["taps"][2, 1, 8] += 1
        with pytest.raises(BenchmarkError, match=r"here: taps of rows \[2\] are other bytes"):
            checks.same_step(checks.left(bench), left, "here")


@pytest.mark.parametrize("stale", ["router_logits", "attn_parts", "shared_parts", None])
def test_every_rank_place_must_hold_the_part(stale):
    plan, rng = build_plan(headdims().cfg, 4), np.random.default_rng(1)
    dims, held = step_dims(plan.cfg, tp=4, slots=1, pages=1, slot_pages=1), {}
    for op in plan.ops:
        for m in op.stage.moves:
            shape = buffer_shape(checks.BUFFER[m.target], dims)
            part = rng.random((shape[0], shape[1] // 4) if m.how == GATHER else shape[1:], np.float32)
            held[m.target] = (np.tile(part, 4) if m.how == GATHER else np.stack([part] * 4)).view(OnDevice)
            held[m.target][(DECODE_ROWS - 1 if m.how == GATHER else (2, DECODE_ROWS - 1))] = np.nan   # a padding row: nobody's business
            assert m.how != SCATTER or m.target == "shared_parts"
    if stale:
        held[stale][(0, slice(-3, None)) if held[stale].ndim == 2 else (2, 0, 5)] = np.nan if stale == "shared_parts" else 9
    bench = SimpleNamespace(backend=SimpleNamespace(plan=plan, ride=True), memory=SimpleNamespace(buffer=held.get), rows=3, tp=4, rank=1)
    if stale is None:
        assert checks.check_places(bench) == 4
    else:
        with pytest.raises(BenchmarkError, match=f"{stale}: the places of ranks"):
            checks.check_places(bench)


def test_weights_that_do_not_fit_are_no_matter_of_host_memory(monkeypatch):
    def full(*_):
        raise cuda_bench.cupy.cuda.memory.OutOfMemoryError(1 << 30, 80 << 30)

    monkeypatch.setattr(cuda_bench, "open_device", lambda index: SimpleNamespace(arch="sm_90a", name="full"))
    monkeypatch.setattr(cuda_bench, "Filler", lambda arch: SimpleNamespace(run=lambda *_: None))
    monkeypatch.setattr(cuda_bench, "Timer", lambda arch: SimpleNamespace(cycles_a_us=1980, read_ceiling=lambda *_: 4.5e12))
    for missing in ("empty", "weights"):   # of the pool that is read for the ceiling, and of the weights behind it
        monkeypatch.setattr(cuda_bench.cupy, "empty", full if missing == "empty" else lambda *_: SimpleNamespace(nbytes=0))
        monkeypatch.setattr(cuda_bench.cupy, "get_default_memory_pool", lambda: SimpleNamespace(free_all_blocks=lambda: None))
        monkeypatch.setattr(cuda_bench, "synthetic_weights", lambda *_, **__: full())
        with pytest.raises(OutOfMemory, match="a rank of 4 do not fit on the GPU"):
            StepBench(headdims().cfg, 4, 2, "bf16")


def test_no_attribute_of_a_bench_hides_a_method():
    """A subclass's method that has the name of what `place` sets is there until something is placed."""
    kept = {name for f in vars(StepBench).values() if inspect.isfunction(f)
            for name in re.findall(r"self\.(\w+)(?=(?:, self\.\w+)* = )", inspect.getsource(f))}
    assert {"single", "sequences"} <= kept
    methods = {name for cls in (StepBench, DecodeBench) for name, f in vars(cls).items() if inspect.isfunction(f) or isinstance(f, property)}
    assert not kept & methods


@pytest.mark.parametrize("wrong", [None, "kda_state", "conv_state", "logits"])
def test_a_step_that_advances_must_leave_what_a_commit_leaves(wrong):
    session = {"kda_state": np.zeros((2, 3, 4), np.float32).view(OnDevice), "conv_state": np.zeros((2, 3, 4), np.uint16).view(OnDevice)}
    out, ran = {"logits": np.zeros((3, 2), np.float32)}, []

    def replay(part, bucket):
        ran.append((part, bucket))
        for name in session if part != "step" else ():
            session[name] += 1
            session[name][1, 2, 3] += part == "advance" and wrong == name
        out["logits"][2] = part == "advance" and wrong == "logits"

    def restore():
        for array in session.values():
            array[:] = 0
    bench = SimpleNamespace(rows=3, backend=SimpleNamespace(replay=replay, stream=SimpleNamespace(synchronize=lambda: None)), restore=restore,
                            memory=SimpleNamespace(buffer=session.__getitem__), outputs=lambda: {n: a.copy() for n, a in out.items()})
    if wrong:
        with pytest.raises(BenchmarkError, match=rf"a step that advances.*{'logits' if wrong == 'logits' else 'state'} of rows \[2\]"):
            checks.check_advance(bench, bench.outputs())
    else:
        checks.check_advance(bench, bench.outputs())
        assert ran == [("step", 4), ("commit", 4), ("advance", 4)] and not session["kda_state"].any()


# ---- stages ----

class ToyStep:
    """A backend whose stages are host code: a mix adds to a residual that `embed` clears, and a router whose residual is no step's chooses one expert only."""

    def __init__(self, plan, rows: int):
        self.plan, self.stream = plan, SimpleNamespace(synchronize=lambda: None)
        self.ids, self.residual, self.read = np.zeros((rows, 16), np.int32), 0, []

    def launches(self, what, bucket, overlap=True):
        if what == "commit":
            return []
        return [(op, [SimpleNamespace(launch=lambda op=op: self._run(op))]) for op in self.plan.ops]

    def replay(self, what, bucket):
        for _, (launch,) in self.launches(what, bucket):
            launch.launch()

    def _run(self, op):
        name = op.stage.name
        if name == "embed":
            self.residual = 0
        elif name == "attn_mix":
            self.residual += 1
        elif name == "route":
            self.ids[:] = np.arange(self.ids.size).reshape(self.ids.shape) if self.residual == op.layer + 1 else 7
        elif name in ("expert_up", "moe_down"):
            self.read.append(len(np.unique(self.ids)))


@pytest.mark.parametrize("names", [(), ("attn_mix", "route", "expert_up")], ids=str)
def test_stages_find_what_a_step_leaves_and_are_judged_by_the_experts_they_read(released, names):
    be = ToyStep(released, rows=3)
    bench = object.__new__(StepBench)   # nothing of a device
    bench.backend, bench.cfg, bench.kv_cache_dtype, bench._states, bench.ceiling = be, released.cfg, "fp8_e4m3", {}, 1e30
    bench.rows, bench.sequences, bench.context, bench.replayed = 3, 3, 1, ("step", "commit")
    bench.memory = SimpleNamespace(buffer={"expert_ids": be.ids.view(OnDevice)}.get)
    read = []

    def time(launches) -> float:
        be.read.clear()
        for launch in launches * 2:
            launch.launch()
        read.append(set(be.read))
        return 1.0

    bench.timer = SimpleNamespace(graph=time)
    stages = {s["stage"]: s for s in bench.stages(names)}
    assert {frozenset(r) for r in read} == {frozenset(), frozenset({48})}
    floor = of(released, experts={op.layer: 48 for op in released.ops if op.stage.name == "route"})
    op = next(op for op in released.ops if op.stage.name == "expert_up")
    assert stages["expert_up"]["mb"] == round(floor.op(op) / 1e6, 3)


# ---- what a benchmark builds into kernels ----

def test_builds_without_probes_hold_nothing_of_them(released):
    text = build_files(released, 8, "bf16")
    assert "K3_HOP" not in text["kernels.cu"] and "kForcedExperts = 0," in text["config.cuh"]


@pytest.mark.parametrize("experts", [16, 120, 613, 896])
def test_forced_experts_are_all_different(released, experts):
    text = build_files(released, 64, "bf16", probes=Probes(forced_experts=experts))["config.cuh"]
    forced, stride = map(int, re.search(r"kForcedExperts = (\d+), kForcedStride = (\d+);", text).groups())
    assert len({i % forced * stride % 896 for i in range(64 * 16)}) == experts
    assert all(len({i % forced for i in range(row * 16, row * 16 + 16)}) == 16 for row in range(64))


def test_delay_is_in_kernels_behind_a_collective_and_in_no_other():
    if NVDISASM is None:
        pytest.skip("nvdisasm isn't installed: pip install 'k3cuda[test]'")
    plan = build_plan(headdims().cfg, 2)
    compiled = compile_bucket(plan, 1, "bf16", "sm_90a", strict=True, probes=Probes(hop_cycles=1000))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(compiled.cubin)
        f.flush()
        text = subprocess.run([NVDISASM, "-c", f.name], check=True, capture_output=True, text=True).stdout
    parts = re.split(r"\.section\s+\.text\.k_(\w+),", text)[1:]
    clocks = {name for name, code in zip(parts[::2], parts[1::2]) if "SR_CLOCK" in code}
    # Behind each collective the first kernel that reads of it; ffn_out is read by the next layer or by the end.
    assert clocks == {"embed_sum", "attn_mix", "kda_mix", "mla_norm", "ffn_mix", "dense_sum", "route", "routed_norm", "output_mix"}


# ---- what stands beside a number ----

@pytest.mark.parametrize("known, changed, wanted", [(True, "", "abc"), (True, " M runtime/cuda_jit.py", "abc-dirty"), (False, "", "abc-untracked")])
def test_commit_is_of_the_package_that_runs(monkeypatch, known, changed, wanted):
    from k3cuda.runtime import surroundings

    monkeypatch.delenv("K3CUDA_COMMIT", raising=False)
    answers = {"rev-parse": "abc", "ls-files": "__init__.py" if known else None, "status": changed or None}
    monkeypatch.setattr(surroundings, "_said", lambda *command: answers[command[3]])
    assert surroundings._commit() == wanted
    monkeypatch.setattr(surroundings, "_said", lambda *command: None)
    assert surroundings._commit() is None
    monkeypatch.setenv("K3CUDA_COMMIT", "def")
    assert surroundings._commit() == "def"


def test_command_is_written_down_without_where_its_result_went():
    from k3cuda.runtime.surroundings import _without_output

    assert _without_output(["bench", "--output", "a/b.json", "--rows", "1"]) == _without_output(["bench", "--output=c", "--rows", "1"]) == ["bench", "--rows", "1"]


@pytest.mark.parametrize("visible, wanted", [(None, "1"), ("", "1"), ("3, 5", "5"), ("GPU-a,GPU-b", "GPU-b"), ("3", "1")])
def test_clocks_are_of_the_gpu_that_is_used(monkeypatch, visible, wanted):
    """A machine with several said a line for each, and documents had all of them."""
    from k3cuda.runtime import surroundings
    from k3cuda.runtime.cuda_driver import Device

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    asked = []
    monkeypatch.setattr(surroundings, "_said", lambda *command: asked.append(command) or "x")
    assert surroundings.surroundings(Device(1, "NVIDIA H200", "sm_90a", 132, 1))["clocks"] == "x"
    assert [c[1] for c in asked if c[0] == "nvidia-smi"] == [f"--id={wanted}"] * 2


def test_surroundings_have_the_keys_that_programs_read():
    from k3cuda.runtime.cuda_driver import Device
    from k3cuda.runtime.surroundings import surroundings

    found = surroundings(Device(0, "NVIDIA H200", "sm_90a", 132, 1))
    assert {"commit", "versions", "gpu", "clocks", "command"} <= set(found) and found["gpu"] == "NVIDIA H200"
    assert {"k3cuda", "nvrtc", "numpy"} <= set(found["versions"])
