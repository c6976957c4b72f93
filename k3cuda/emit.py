"""The tables as C++: sizes, buffer and weight accessors, and one kernel a stage. Generated text only; it knows no arithmetic.

Files of a build, all in one folder that is first on the include path:

- config.cuh   sizes of one rank, as kCamelCase constants (emit_sizes.py)
- buffers.cuh  `Step`, `OpArgs` and an accessor for every buffer and every packed weight
- kernels.cu   for every stage of the plan a kernel `k_<stage>` and its launch shape `k_<stage>_launch`

A plan is the target's or a draft's; what differs is in their tables (tables.py).
"""
from dataclasses import dataclass
from math import prod

from . import packing
from .buffers import DTYPE_BYTES, Buffer, buffer_bytes, buffer_shape
from .config import DECODE_ROWS, MAX_ROWS
from .draft_config import MLA, DraftConfig
from .draft_plan import DraftPlan
from .emit_sizes import CACHE_BLOCK, H200_SMS, MAX_SHARED, has_leaf_sums, sizes
from .errors import ConfigError
from .plan import Op, Plan
from .stages import GATHER, SCATTER, STACK, STAGES, Move, Stage
from .tables import Tables, tables_of
from .weights import LEGAL_TP

ALIGN = 256  # bytes between starts of buffers: a bulk copy wants 16, a cache line 128
C_TYPES = {"f32": "float", "bf16": "bf16", "i32": "int", "u8": "u8", "kv": "kv_t"}
KV_TYPES = {"bf16": "bf16", "fp8_e4m3": "u8"}
_MACHINE_SIZES = ("slots", "pages", "slot_pages")
SUMMED_ROWS = 32  # from so many on, giving every rank every part costs more than one more kernel
SUM = "_tree"  # behind a wide product's name: the kernel that adds its leaf sums


@dataclass(frozen=True)
class Probes:
    """What a benchmark builds into the kernels to measure something; other builds hold nothing of it.

    forced_experts: experts that the rows of a step choose together, whatever their scores say; 0: the router's choice.
    hop_cycles: clock cycles that a stage behind a collective goes on waiting for it, or in one launch a phase (launch_step.hop_kinds).
    trace: every launch notes when its blocks begin, stop waiting and end (`traced` in stages/common.cuh), a whole step's its phases (LaunchStamps).
    traced_layers: of a whole step's launch the layers whose times are kept; None: all of the step.
    """

    forced_experts: int = 0
    hop_cycles: int = 0
    trace: bool = False
    traced_layers: range | None = None


NO_PROBES = Probes()

_PUT_ALL = """// v into every rank's memory, `at` bytes from its start on, `slot` more for every rank before the one that gives it. Looped back, the one rank
// stands for all: it fills every place.
template <class T>
K3_DEVICE void put_all(const Step& s, size_t at, u32 slot, T v) {
  at += size_t(s.loopback ? 0 : s.rank) * slot;
  const u32 next = s.loopback ? slot : 0;
  K3_UNROLL
  for (int peer = 0; peer < kRanks; ++peer) *(T*)(s.peers[peer] + (at + size_t(peer) * next)) = v;
}"""


def arena_offsets(plan: Plan | DraftPlan) -> tuple[dict[str, int], int]:
    """Byte offset of every buffer of a rank that lies in its arena, aliases included, and the size of the whole.

    No two buffers share memory: any of them can be read after a step, and no derived wait can be broken by reuse.
    """
    t, offsets, at = tables_of(plan), {}, 0
    sizes = {name: buffer_bytes(b, t.dims) for name, b in t.arena.items() if name not in plan.aliases} | {n: size for n, (_, size) in t.work.items()}
    for name, nbytes in sizes.items():
        offsets[name] = at
        at += -(-nbytes // ALIGN) * ALIGN
    return offsets | {target: offsets[source] for target, source in plan.aliases.items() if source in offsets}, at


def build_files(plan: Plan | DraftPlan, rows: int, kv_cache_dtype: str, *, sms: int = H200_SMS, ride: bool = True,
                probes: Probes = NO_PROBES) -> dict[str, str]:
    """Name -> text of a build for steps of up to `rows` rows; MLA cache rows are "bf16" or "fp8_e4m3". A draft's are "bf16".

    `sms`: multiprocessors that persistent kernels spread over; any number is right, the device's own is fast.
    `ride`: collectives have no kernels: a stage stores what a collective would move into every rank's target itself.
    """
    if isinstance(plan, DraftPlan) and kv_cache_dtype != "bf16":
        raise ValueError("a draft's cache is bf16")
    if isinstance(plan, DraftPlan) and (why := no_kernels(plan.cfg)):
        raise ConfigError(why, "use the reference backend")
    tables = tables_of(plan)
    return {"config.cuh": sizes(plan, rows, kv_cache_dtype, sms, probes.forced_experts, 1 if sums_ranks(plan, rows, ride) else plan.tp), "buffers.cuh": _buffers(plan, tables, rows, kv_cache_dtype, ride),
            "kernels.cu": _kernels(plan, tables, rows, ride, sms, probes)}


def no_kernels(draft: DraftConfig) -> str | None:
    """Why only the reference runs a draft model, or None."""
    if draft.family == MLA and any(draft.windows):
        return "layer_types: found sliding_attention in a draft with MLA attention, whose kernels see the whole context"
    size = draft.dims().get("mla_cache_dim", 0)
    return f"kv_lora_rank + qk_rope_head_dim: found {size} in a draft model, its kernels want a multiple of {CACHE_BLOCK}" if size % CACHE_BLOCK else None


def ops_of(plan: Plan | DraftPlan, rows: int) -> tuple[Op, ...]:
    """Operations that a build for steps of up to `rows` rows has kernels for: a draft's context alone where a block does not fit."""
    return plan.context if isinstance(plan, DraftPlan) and not plan.padded_seqs(rows) else tables_of(plan).ops


def sums_ranks(plan: Plan | DraftPlan, rows: int, ride: bool) -> bool:
    """Whether in a step of up to `rows` rows each rank sums its share of what is stacked and gives it to all, in place of the part: the target
    of such a move is the source's memory. Else every part is with everyone, and readers sum."""
    return not isinstance(plan, DraftPlan) and (rows > DECODE_ROWS or ride and rows >= SUMMED_ROWS)


def launches_of(stage: Stage, plan: Plan | DraftPlan, rows: int, ride: bool) -> tuple[tuple[str, int], ...]:
    """The launches that run a stage in a step of up to `rows` rows, in order: name of the kernel, without its `k_`, and the first row it is for.

    None where a collective rides on the stores of the stages before it. A kernel may turn out to have no blocks: it is not needed then.
    """
    wide = rows > DECODE_ROWS
    if stage.moves:
        alone = not ride or any(m.in_group or m.how == STACK and sums_ranks(plan, rows, ride) for m in stage.moves)
        return ((stage.name, 0),) if alone else ()
    names = packing.WIDE_KERNELS.get(stage.name) if wide else None
    out, group = [], []
    for name in names or packing.KERNELS.get(stage.name, (stage.name,)):
        if wide and name in packing.SLICED:
            group.append(name)   # neighbours take turns: what passes between them is of one slice
            continue
        out += [(name, 0), (name + SUM, 0)] if has_leaf_sums(plan, rows) and name in packing.PRODUCTS else [(name, 0)]
    return (*out, *((name, first) for first in range(0, rows, DECODE_ROWS) for name in group))


def kernels_of(stage: Stage, plan: Plan, rows: int = 1, ride: bool = True) -> tuple[str, ...]:
    """Names of the kernels of a stage in a step of up to `rows` rows, each once."""
    return tuple(dict.fromkeys(name for name, _ in launches_of(stage, plan, rows, ride)))


def follows_collective(stage: Stage) -> bool:
    """Whether a stage is the first to read what some collective brought: later ones find it there."""
    for at, collective in enumerate(STAGES):
        readers = [s for s in STAGES if {m.target for m in collective.moves} & set(s.inputs)]
        same_layer = [s for s in readers if STAGES.index(s) > at and s.where not in ("tap", "end")]
        if stage in (same_layer[:1] or readers):   # else what the next layer, or the end behind the last one, begins with
            return True
    return False


def _buffers(plan: Plan | DraftPlan, t: Tables, rows: int, kv: str, ride: bool) -> str:
    offsets, size = arena_offsets(plan)
    summed = sums_ranks(plan, rows, ride)
    if summed:
        offsets |= {m.target: offsets[m.source] for s in t.stages for m in s.moves if m.how == STACK}
    lines = ['#pragma once', '#include "prims.cuh"', '#include "config.cuh"', f"typedef {KV_TYPES[kv]} kv_t;", "",
             f"// One step of one rank: where its memory begins. The arena has {size} bytes.", "struct Step {", "  u8* arena;"]
    lines += [f"  {C_TYPES[t.buffers[n].dtype]}* {n}_base;" for n in t.session]
    lines += [f"  u8* peers[{LEGAL_TP[-1]}];   // arenas of all ranks; loopback: this one, as often", "  u8* mla_work;   // partial results of the split context",
              "  u64* trace;     // 8 words a launch, where the build traces",
              "  int slots, pages, slot_pages, rank, loopback, mla_partials;", "};", "",
              "// One operation. `opens_block`: attn_mix takes a snapshot. `kv_scale`: of this layer's FP8 cache rows. `first_row`: of a slice of the step. `advances`: as in KdaMix.",
              "struct OpArgs {", f"  const void* w[{packing.MAX_PACKED}];", "  int layer, kind_index, num_blocks, opens_block, launch, first_row, advances;", "  float kv_scale;", "};", ""]
    lines += [_accessor(b, offsets, t) for b in t.buffers.values()]
    lines += [f"K3_DEVICE {kind}* {n}(const Step& s) {{ return ({kind}*)(s.arena + {offsets[n]}ull); }}" for n, (kind, _) in t.work.items()]
    lines += dict.fromkeys(f"K3_DEVICE const {_weight_type(p, t)}* w_{p.name}(const OpArgs& op) {{ return (const {_weight_type(p, t)}*)op.w[{i}]; }}"
                           for group in t.packed.values() for i, p in enumerate(group))
    lines += [_PUT_ALL] if ride and plan.tp > 1 else []
    lines += [_put(m, plan, t, offsets, ride and not (summed and m.how == STACK)) for s in t.stages for m in s.moves if m.source in t.buffers and not m.in_group]
    # Stages that a draft shares with the target store by `put` what no collective of a draft moves, and name buffers that this draft has not.
    moved = {m.source for s in t.stages for m in s.moves}
    lines += [_put(m, plan, t, offsets, False) for s in STAGES for m in s.moves if m.source in t.buffers and m.source not in moved]
    lines += [f"K3_DEVICE {C_TYPES[b.dtype]}* {b.name}(const Step&) {{ return nullptr; }}" for b in t.absent]
    return "\n".join(lines) + "\n"


def _put(m: Move, plan: Plan | DraftPlan, t: Tables, offsets: dict[str, int], ride: bool) -> str:
    """`put_<source>`: one value of what a collective moves, to where it belongs: the buffer itself, or every rank's target.

    A token's values are those from the cut axis on; where axes stand before it, `token` counts through them.
    """
    source, shape = t.buffers[m.source], buffer_shape(t.buffers[m.source], t.dims)
    kind, width = C_TYPES[source.dtype], prod(shape[source.cut or 1:])
    layered = ", const OpArgs& op" if source.is_layered else ""
    name, args = f"K3_DEVICE void put_{m.source}(const Step& s{layered}, int token, int column,", f"s{', op' if layered else ''}"
    one = f"{name} {kind} v) {{ put_{m.source}({args}, token, column, Neighbours<{kind}, 1>{{{{v}}}}); }}"
    return f"template <int kCount> {name} const Neighbours<{kind}, kCount>& v) {{{_put_run(m, plan, t, offsets, ride, args)}}}\n{one}"


def _put_run(m: Move, plan: Plan | DraftPlan, t: Tables, offsets: dict[str, int], ride: bool, args: str) -> str:
    """The body of it for neighbours `v` of a token, which go to one place: a run starts at a multiple of its length, and all lengths are multiples of it."""
    source, shape = t.buffers[m.source], buffer_shape(t.buffers[m.source], t.dims)
    kind, width = C_TYPES[source.dtype], prod(shape[source.cut or 1:])
    if not ride or plan.tp == 1:
        return f" *(Neighbours<{kind}, kCount>*)({m.source}({args}) + size_t(token) * {width} + column) = v; "
    if m.how == SCATTER:   # one receiver; looped back, the one rank stands for all: it has the place of whoever it is
        own = width // plan.tp
        return (f"\n  int peer = column / {own}, place = s.loopback ? peer : s.rank;\n"
                f"  *(Neighbours<{kind}, kCount>*)(({kind}*)(s.peers[peer] + {offsets[m.target]}ull) + (size_t(place) * kMaxRows + token) * {own} + column % {own}) = v;\n")
    first = f"size_t({plan.tp * prod(shape[1:])}) * op.kind_index + " if source.is_layered else ""
    row, slot = (f"size_t(token) * kRanks * {width}", str(width)) if m.how == GATHER else (f"token * {width}", f"kDecodeRows * {width}")
    return f" put_all(s, {offsets[m.target]}ull + sizeof({kind}) * ({first}{row} + column), sizeof({kind}) * {slot}, v); "


def _accessor(b: Buffer, offsets: dict[str, int], t: Tables) -> str:
    """Pointer to the buffer, or to the part of the layer that an operation belongs to."""
    kind, layered, dims = C_TYPES[b.dtype], b.is_layered, t.dims
    if b.name in t.session:
        factors = [f"s.{n}" for n in b.shape[1:] if n in _MACHINE_SIZES]
        fixed = prod(v for n, v in zip(b.shape[1:], buffer_shape(b, dims)[1:]) if n not in _MACHINE_SIZES)
        stride = " * ".join([f"size_t({fixed})", *factors])
        tail = f" + {stride} * op.kind_index" if layered else ""
        head = "const Step& s, const OpArgs& op" if layered else "const Step& s"
        return f"K3_DEVICE {kind}* {b.name}({head}) {{ return s.{b.name}_base{tail}; }}"
    base = f"({kind}*)(s.arena + {offsets[b.name]}ull)"
    if not layered:
        return f"K3_DEVICE {kind}* {b.name}(const Step& s) {{ return {base}; }}"
    part = prod(buffer_shape(b, dims)[1:])
    return f"K3_DEVICE {kind}* {b.name}(const Step& s, const OpArgs& op) {{ return {base} + size_t({part}) * op.kind_index; }}"


def _weight_type(p: packing.Packed, t: Tables) -> str:
    if p.how == packing.FOLDED:
        return "float"
    if p.how != packing.PLAIN:
        return "uint4"
    return "float" if t.weights[p.sources[0]].dtype == "F32" else "bf16"


def _kernels(plan: Plan | DraftPlan, t: Tables, rows: int, ride: bool, sms: int, probes: Probes) -> str:
    used = {op.stage.name for op in ops_of(plan, rows)}
    stages = [s for s in t.stages if s.name in used and launches_of(s, plan, rows, ride)]
    headers = dict.fromkeys(s.header or "collective" for s in stages)
    lines = [f"#define K3_HOP_CYCLES {probes.hop_cycles}"] * bool(probes.hop_cycles) + ["#define K3_TRACE"] * probes.trace
    lines += ['#include "buffers.cuh"', *(f'#include "stages/{h}.cuh"' for h in headers), ""]
    behind = {kernels_of(s, plan, rows, ride)[0] for s in stages if follows_collective(s)}
    lines += [_collective(s, plan, t, rows, sms, ride) for s in stages if s.moves]
    for name in (k for s in stages for k in kernels_of(s, plan, rows, ride)):
        of = f"TreeOf<stage::{name.removesuffix(SUM)}>" if name.endswith(SUM) else f"stage::{name}"
        lines.append(f"static_assert({of}::kSmem <= {MAX_SHARED}, \"a block of {name} does not fit an SM\");")
        lines.append(f'extern "C" __constant__ int k_{name}_launch[6] = '
                     f"{{{of}::kBlocks, {of}::kBlocksY, {of}::kBlocksZ, {of}::kThreads, {of}::kCluster, {of}::kSmem}};")
        hop = f"K3_HOP({int(name in behind)}); " if probes.hop_cycles else ""
        lines.append(f'extern "C" __global__ void __launch_bounds__({of}::kThreads + {of}::kBeside, {of}::kResident) '
                     f"k_{name}(const __grid_constant__ Step s, const __grid_constant__ OpArgs op) {{ {hop}traced<{of}>(s, op); }}")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class MoveLayout:
    """Where a move takes and leaves bytes.

    Attributes:
        rows: of it, which may be several a row of the step.
        slice: of one row that a rank sends to one other.
        source_row, target_row: from row to row there.
        slot: from rank to rank in the target.
        is_cut: the slice depends on who receives it: it stands behind those for the ranks before.
        ranks: neighbours that take part, all of them or a group.
        source_layer, target_layer: from layer to layer, or draft to draft, where buffers have them; else 0.
    """

    rows: int
    slice: int
    source_row: int
    target_row: int
    slot: int
    is_cut: bool
    ranks: int
    source_layer: int
    target_layer: int


def layout_of(move: Move, plan: Plan | DraftPlan, t: Tables, rows: int) -> MoveLayout:
    """The layout of a move in a step of up to `rows` rows, at most DECODE_ROWS of what is stacked, from the shapes of its buffers."""
    source, target = t.buffers[move.source], t.buffers[move.target]
    shape, size, first = buffer_shape(source, t.dims), DTYPE_BYTES[source.dtype], int(source.is_layered)
    cut = source.cut if move.how == GATHER else first + 1   # what stands before a cut axis counts as rows
    width, ranks = prod(shape[cut:]), t.dims["group"] if move.in_group else plan.tp
    part = width // ranks if move.how == SCATTER else width
    slot = part if move.how == GATHER else part * (DECODE_ROWS if move.how == STACK else MAX_ROWS)
    count = {"seqs": lambda: plan.padded_seqs(rows), "head_rows": lambda: min(rows, DECODE_ROWS)}.get(source.shape[first], lambda: rows)()
    layers = [prod(buffer_shape(b, t.dims)[1:]) * size if b.is_layered else 0 for b in (source, target)]
    return MoveLayout(count * prod(shape[first + 1:cut]), part * size, width * size, (width * ranks if move.how == GATHER else part) * size, slot * size,
                      move.how == SCATTER, ranks, *layers)


def _collective(stage: Stage, plan: Plan, t: Tables, rows: int, sms: int, ride: bool) -> str:
    """A struct that moves what the stage says, for `rows` rows; see kernels_cu/stages/collective.cuh."""
    offsets, dims, moves, units = arena_offsets(plan)[0], t.dims, [], 0
    for m in stage.moves:
        if m.how == STACK and sums_ranks(plan, rows, ride):
            width = prod(buffer_shape(t.buffers[m.source], dims)[1:])
            units += rows * width // 4
            moves.append(f"sum_ranks<{offsets[m.source]}ull, kRows, {width}>(s);")
            continue
        if ride and not m.in_group:
            continue
        at = layout_of(m, plan, t, rows)
        units += at.ranks * at.rows * at.slice // 16
        layers = f", {at.source_layer}ull * op.kind_index, {at.target_layer}ull * op.kind_index" if at.source_layer else ""
        moves.append(f"move<{offsets[m.source]}ull, {offsets[m.target]}ull, {at.rows}, {at.slice}, {at.source_row}, {at.target_row}, {at.slot}ull, "
                     f"{str(at.is_cut).lower()}, {at.ranks}>(s{layers});")
    return (f"namespace stage {{ struct {stage.name} : StageDefaults {{\n  static constexpr int kBlocks = {max(1, min(sms, units // 256))}, kThreads = 256;\n"
            "  static __device__ void run(const Step& s, const OpArgs& op) {\n    grid_launch_next();\n    grid_wait();\n    "
            + "\n    ".join(moves) + "\n  }\n}; }")
