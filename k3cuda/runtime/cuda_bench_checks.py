"""What a timed step must pass before its time means anything. Each failure is a BenchmarkError; docs/performance.md lists the checks."""
import cupy
import numpy as np

from ..buffers import BUFFERS
from ..buffers import BY_NAME as BUFFER
from ..config import PAGE_SIZE
from ..dataflow import layer_kinds
from ..emit import sums_ranks
from ..emit_sizes import DECODE_BUCKETS
from ..errors import BenchmarkError
from ..stages import GATHER, SCATTER, STACK
from .cuda_compare import Compare, launch_groups
from .cuda_kernels import bucket_of

WAY_OUT = "this is a bug: report the command"
STATES = ("kda_state", "conv_state")
RECORDS = tuple(b.name for b in BUFFERS if b.life == "record" and b.is_layered)
SPREAD = 1e-3   # standard deviation that logits of a step have at least, were they made from random weights


def check_time(ms: float, floor_ms: float) -> None:
    """Nothing is faster than its bytes."""
    if ms < floor_ms:
        raise BenchmarkError(f"a step of {ms:.3f} ms beats its floor of {floor_ms:.3f} ms", "something was not read: report the command")


def check_experts(bench, experts: dict[int, int]) -> None:
    """A forced routing reads as many experts as it was told to, in every layer."""
    forced = bench.backend.probes.forced_experts
    for layer, count in experts.items():
        if forced and count != forced:
            raise BenchmarkError(f"layer {layer} read {count} experts, forced were {forced}", WAY_OUT)


def same_step(got: dict, want: dict, what: str, rows: int | None = None) -> None:
    """The same bytes in the first `rows` rows."""
    for name in want:
        a, b = got[name][:rows], want[name][:rows]
        if a.tobytes() != b.tobytes():
            different = np.flatnonzero((a.view(np.uint32) != b.view(np.uint32)).any(-1))
            raise BenchmarkError(f"{what}: {name} of rows {different[:8].tolist()} are other bytes than those of the same rows before", WAY_OUT)


def other_bucket(rows: int) -> tuple[int, int]:
    """(bucket, rows): another bucket that the same step, or the first half of its rows, can run in."""
    wider = [b for b in DECODE_BUCKETS if b > bucket_of(rows)]
    return (wider[0], rows) if wider else (bucket_of(rows // 2), rows // 2)


def check_step(bench, walk: bool) -> dict:
    """Checks the placed step of a StepBench and leaves it as it was; what was checked, for the result."""
    placed, single = (bench.sequences, bench.rows_each, bench.context), bench.single
    if single:
        poison(bench)
        bench.memory.buffer("mla_cache")[cache_rows(bench)] = 0xFF   # no token's, and to be written over
        cupy.cuda.get_current_stream().synchronize()
    want = bench.replay()
    kept = left(bench) if single else {}
    logits = want["logits"]
    if not np.isfinite(logits).all() or logits.std() < SPREAD:
        raise BenchmarkError(f"the step's logits are not numbers of a model (standard deviation {logits.std():.3g})", WAY_OUT)
    if len(np.unique(logits[:, :64], axis=0)) < len(logits):
        raise BenchmarkError("two rows with different tokens gave the same logits", WAY_OUT)

    bucket, rows = other_bucket(bench.rows)
    poison(bench)
    for _, launches in launch_groups(bench.backend, "step", bucket, overlap=False):
        for launch in launches:
            launch.launch()
    same_step(bench.outputs(), want, f"kernel by kernel in the bucket of {bucket}", rows)
    same_step(left(bench) if single else {}, kept, "what a step leaves to its commit and to later steps, kernel by kernel", rows)

    bench.place(*placed, seed=6)
    other = bench.replay()["logits"]
    bench.place(*placed)
    if other.tobytes() == logits.tobytes():
        raise BenchmarkError("other tokens gave the same logits", WAY_OUT)
    same_step(bench.replay(), want, "behind a step of other tokens, whose values lie in every exchange buffer")

    found = {"finite": True, "same_bytes_in_bucket": bucket, "same_bytes_rows": rows, "stale_exchange_buffers": True}
    if bench.replayed == ("advance",):
        check_advance(bench, want)
        found["same_states_as_commit"] = True
    if single:   # behind it no buffer of a stage has been written
        return found | {"same_bytes_left": sorted(kept)}
    if bench.tp > 1:
        found["parts_read"] = check_places(bench)
        found["copies_written"] = found["parts_read"] - 1
        if walk:
            found["part_of_allowed_error"] = check_layers(bench)
    return found


def check_advance(bench, want: dict) -> None:
    """A step all of whose rows stand gives what one with a commit behind it gives, and leaves the same states."""
    def states() -> list[np.ndarray]:   # a layer at a time: of many sequences they are larger than what else is copied
        bench.backend.stream.synchronize()
        return [layer.get().reshape(len(layer), -1).view(np.uint32) for name in STATES for layer in bench.memory.buffer(name)]

    bucket = bucket_of(bench.rows)
    for part in ("step", "commit"):
        bench.backend.replay(part, bucket)
    committed = states()
    bench.restore()
    bench.backend.replay("advance", bucket)
    same_step(bench.outputs(), want, "a step that advances")
    for i, (got, wanted) in enumerate(zip(states(), committed, strict=True)):
        same_step({"state": got}, {"state": wanted}, f"a step that advances, array {i} of KDA states and windows by layer")
    bench.restore()


def poison(bench) -> None:
    """NaN in every buffer that a step must write before it reads it."""
    be, memory = bench.backend, bench.memory
    start, stop = be._io.input_bytes, memory.offsets["expert_list"]   # behind it lies what kernels keep for themselves
    (memory.arena.data + start).memset_async(0xFF, stop - start, be.stream)


def cache_rows(bench) -> tuple:
    """Index of the cache rows that the placed step writes."""
    positions = np.tile(np.arange(bench.context - bench.rows_each, bench.context), bench.sequences)
    pages = np.repeat(np.arange(bench.sequences), bench.rows_each) * bench.pages_a_slot + positions // PAGE_SIZE
    return slice(None), cupy.asarray(pages), cupy.asarray(positions % PAGE_SIZE)


def left(bench) -> dict[str, np.ndarray]:
    """[rows, words] of the records that a commit reads, and of new cache rows, of all layers; and of what a draft model reads, where there is one."""
    bench.backend.stream.synchronize()
    found = {name: bench.memory.buffer(name)[:, :bench.rows].get() for name in RECORDS} | {"mla_cache": bench.memory.buffer("mla_cache")[cache_rows(bench)].get()}
    if bench.backend.plan.taps:   # rows come first there
        found["taps"] = bench.memory.buffer("taps")[None, :bench.rows].get()
    return {name: np.ascontiguousarray(np.moveaxis(array, 1, 0)).reshape(bench.rows, -1).view(np.uint32) for name, array in found.items()}


def check_places(bench) -> int:
    """Looped back, every rank's place of every collective holds this rank's part, or a slice that it scattered; how many places there are."""
    be, summed = bench.backend, sums_ranks(bench.backend.plan, bucket_of(bench.rows), bench.backend.ride)
    for op in be.plan.ops:
        for move in op.stage.moves:
            if summed and move.how == STACK:   # check_layers sees the sum
                continue
            target = bench.memory.buffer(move.target)
            if move.how == GATHER:
                parts = np.split(target[:bench.rows].get(), bench.tp, axis=BUFFER[move.source].cut)
            else:
                parts = list(target[:, :bench.rows].get())
            # Slices differ from rank to rank: here it only shows that none is missing.
            wrong = [rank for rank, part in enumerate(parts)
                     if (np.isnan(part).any() if move.how == SCATTER else part.tobytes() != parts[bench.rank].tobytes())]
            if wrong:
                raise BenchmarkError(f"{move.target}: the places of ranks {wrong} hold something else than what the rank sent", WAY_OUT)
    return bench.tp


def check_layers(bench) -> dict[str, float]:
    """One layer of every kind, the ends of the step, and their commit against the reference, operation by operation.

    After a run's first time only of the kinds that look at the context. Returns the largest part of an allowed error that a stage used.
    """
    be, rows = bench.backend, bench.rows
    kinds = [of_kind for of_kind in layer_kinds(bench.cfg).values() if bench.unpacked is None or not bench.cfg.is_kda(of_kind[0])]
    layers = {of_kind[len(of_kind) // 2] for of_kind in kinds} | ({None} if bench.unpacked is None else set())
    positions = np.arange(bench.context - bench.rows_each, bench.context) // PAGE_SIZE
    written = np.unique(np.arange(bench.sequences)[:, None] * bench.pages_a_slot + positions)
    compare = Compare(be, bench.sequences * bench.pages_a_slot, written, bench.unpacked)
    bench.unpacked, found = compare.weights, {}
    for what in ("step", "commit"):
        for ops, launches in launch_groups(be, what, bucket_of(rows)):
            # A forced choice is no router's; check_experts judges it.
            chosen = [op for op in ops if op.layer in layers and not (be.probes.forced_experts and op.stage.name == "route")]
            be.stream.synchronize()
            bound = [compare.bind(op, rows) for op in chosen]
            for launch in launches:
                launch.launch()
            be.stream.synchronize()
            for op, b in zip(chosen, bound):
                compare.compare(op, b, rows, found)
    bench.restore()
    if problems := [p for f in found.values() for p in f.problems]:
        raise BenchmarkError(f"{len(problems)} operations differ from the reference, first: {problems[0]}", WAY_OUT)
    return {stage: round(max(f.used.values()), 3) for stage, f in found.items() if f.used}
