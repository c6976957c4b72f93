"""The tables as C++: sizes, buffer and weight accessors, and one kernel a stage. Generated text only; it knows no arithmetic.

Files of a build, all in one folder that is first on the include path:

- config.cuh   sizes of one rank, as kCamelCase constants
- buffers.cuh  `Step`, `OpArgs` and an accessor for every buffer and every packed weight
- kernels.cu   for every stage of the plan a kernel `k_<stage>` and its launch shape `k_<stage>_launch`
"""
from dataclasses import dataclass
from math import gcd, prod

from . import packing
from .buffers import BUFFERS, BY_NAME, DTYPE_BYTES, Buffer, buffer_bytes, buffer_shape, step_dims
from .config import DECODE_ROWS, L2NORM_EPS, MAX_ROWS, MLA_NORM_EPS, MXFP4_GROUP, PAGE_SIZE, K3Config
from .packing import PACKED
from .plan import Plan
from .stages import GATHER, SCATTER, STACK, STAGES, Move, Stage
from .weights import BY_NAME as WEIGHT
from .weights import LEGAL_TP, MMA_K, tree_leaves

MLA_WORK_COLUMNS = 48  # queries, (row, head) pairs, that share a page and a partial result of the split context
MAX_SHARED = 227 * 1024  # bytes of shared memory a block can have, on every architecture we compile for
ALIGN = 256  # bytes between starts of buffers: a bulk copy wants 16, a cache line 128
C_TYPES = {"f32": "float", "bf16": "bf16", "i32": "int", "u8": "u8", "kv": "kv_t"}
KV_TYPES = {"bf16": "bf16", "fp8_e4m3": "u8"}
# Buffers that exist once a slot or page: their sizes are the machine's, so they come as pointers and not as offsets.
SESSION = tuple(b.name for b in BUFFERS if b.life == "session") + ("page_table",)
_MACHINE_SIZES = ("slots", "pages", "slot_pages")
SUM = "_tree"  # behind a wide product's name: the kernel that adds its leaf sums
H200_SMS = 132  # what a build for no device in particular spreads over


@dataclass(frozen=True)
class Probes:
    """What a benchmark builds into the kernels to measure something; other builds hold nothing of it.

    forced_experts: experts that the rows of a step choose together, whatever their scores say; 0: the router's choice.
    hop_cycles: clock cycles that a stage behind a collective goes on waiting for it.
    trace: every launch notes when its blocks begin, stop waiting and end (`traced` in stages/common.cuh).
    """

    forced_experts: int = 0
    hop_cycles: int = 0
    trace: bool = False


NO_PROBES = Probes()


def arena_offsets(plan: Plan) -> tuple[dict[str, int], int]:
    """Byte offset of every buffer of a rank that is not in SESSION, aliases included, and the size of the whole.

    No two buffers share memory: any of them can be read after a step, and no derived wait can be broken by reuse.
    """
    dims = _dims(plan)
    offsets, at = {}, 0
    for b in BUFFERS:
        if b.name in SESSION or b.name in plan.aliases:
            continue
        offsets[b.name] = at
        at += -(-buffer_bytes(b, dims) // ALIGN) * ALIGN
    for name, nbytes in work_bytes(plan).items():
        offsets[name] = at
        at += -(-nbytes // ALIGN) * ALIGN
    return offsets | {target: offsets[source] for target, source in plan.aliases.items()}, at


def build_files(plan: Plan, rows: int, kv_cache_dtype: str, *, sms: int = H200_SMS, ride: bool = True,
                probes: Probes = NO_PROBES) -> dict[str, str]:
    """Name -> text of a build for steps of up to `rows` rows; MLA cache rows are "bf16" or "fp8_e4m3".

    `sms`: multiprocessors that persistent kernels spread over; any number is right, the device's own is fast.
    `ride`: collectives have no kernels: a stage stores what a collective would move into every rank's target itself.
    """
    return {"config.cuh": _config(plan, rows, kv_cache_dtype, sms, probes.forced_experts), "buffers.cuh": _buffers(plan, rows, kv_cache_dtype, ride),
            "kernels.cu": _kernels(plan, rows, ride, sms, probes)}


def launches_of(stage: Stage, plan: Plan, rows: int, ride: bool) -> tuple[tuple[str, int], ...]:
    """The launches that run a stage in a step of up to `rows` rows, in order: name of the kernel, without its `k_`, and the first row it is for.

    None where a collective rides on the stores of the stages before it. A kernel may turn out to have no blocks: it is not needed then.
    """
    wide = rows > DECODE_ROWS
    if stage.moves:
        alone = not ride or wide and any(m.how == STACK for m in stage.moves)
        return ((stage.name, 0),) if alone else ()
    names = packing.WIDE_KERNELS.get(stage.name) if wide else None
    out, group = [], []
    for name in names or packing.KERNELS.get(stage.name, (stage.name,)):
        if wide and name in packing.SLICED:
            group.append(name)   # neighbours take turns: what passes between them is of one slice
            continue
        out += [(name, 0), (name + SUM, 0)] if wide and name in packing.PRODUCTS else [(name, 0)]
    return (*out, *((name, first) for first in range(0, rows, DECODE_ROWS) for name in group))


def kernels_of(stage: Stage, plan: Plan, rows: int = 1, ride: bool = True) -> tuple[str, ...]:
    """Names of the kernels of a stage in a step of up to `rows` rows, each once."""
    return tuple(dict.fromkeys(name for name, _ in launches_of(stage, plan, rows, ride)))


def work_bytes(plan: Plan) -> dict[str, int]:
    """Work space in the arena that passes between kernels and is no buffer of the description: name -> bytes."""
    cfg, dims = plan.cfg, _dims(plan)
    items = MAX_ROWS * cfg.num_experts_per_token
    kda = 4 * MAX_ROWS * dims["kda_dim"] // plan.tp
    return {"expert_list": 8 + 4 * (items + 1) + 2 * items, "mla_info": 16 * DECODE_ROWS, "mla_next": 4,
            "kda_q": kda, "kda_fade": kda, "kda_o": kda, "product_work": max(_leaf_sums(plan).values())}


def _leaf_sums(plan: Plan) -> dict[str, int]:
    """Bytes of what a widest step keeps of a product before the last sum, F32: leaf sums (wide_core.cuh), results of items (expert_wide.cuh)."""
    cfg, dims = plan.cfg, plan.cfg.dims()
    leaves, _ = packing.leaves_and_steps("expert_w2", cfg, plan.tp)
    out = {"expert_w2": leaves * MAX_ROWS * cfg.num_experts_per_token * cfg.routed_expert_hidden_size * 4}
    for p in (p for group in PACKED.values() for p in group if p.how in (packing.TILES, packing.PAIRS)):
        rows = [dims[w.shape[0]] // (plan.tp if w.cut and w.cut.axis == 0 else 1) for w in map(WEIGHT.get, p.sources)]
        out[p.name] = packing.leaves_and_steps(p.sources[-1], cfg, plan.tp)[0] * sum(-(-n // 16) * 16 for n in rows) * MAX_ROWS * 4
    return out | {"lm_head": 0}


def _dims(plan: Plan) -> dict[str, int]:
    return step_dims(plan.cfg, tp=plan.tp, slots=1, pages=1, slot_pages=1)


def camel(name: str) -> str:
    return "k" + "".join(part.capitalize() for part in name.split("_"))


def follows_collective(stage: Stage) -> bool:
    """Whether a stage is the first to read what some collective brought: later ones find it there."""
    for at, collective in enumerate(STAGES):
        readers = [s for s in STAGES if {m.target for m in collective.moves} & set(s.inputs)]
        same_layer = [s for s in readers if STAGES.index(s) > at and s.where not in ("tap", "end")]
        if stage in (same_layer[:1] or readers):   # else what the next layer, or the end behind the last one, begins with
            return True
    return False


def _config(plan: Plan, rows: int, kv: str, sms: int, forced_experts: int) -> str:
    cfg, tp = plan.cfg, plan.tp
    lines = ["#pragma once", "// Sizes of the whole model."]
    sizes = cfg.dims() | {"max_rows": MAX_ROWS, "decode_rows": DECODE_ROWS, "max_shared": MAX_SHARED, "page_size": PAGE_SIZE, "mxfp4_group": MXFP4_GROUP}
    lines += [f"constexpr int {camel(n)} = {v};" for n, v in sizes.items()]
    lines += ["// One rank's part of a size that is cut.", f"constexpr int kRanks = {tp}, kRows = {rows}, kSms = {sms}, kMlaWorkColumns = {MLA_WORK_COLUMNS};",
              f"constexpr int kHeadRows = {min(rows, DECODE_ROWS)};",
              f"constexpr int kParts = {1 if rows > DECODE_ROWS else tp};   // of a stacked buffer: the ranks', or their sum"]
    cut = sorted({b.shape[b.cut] for b in BUFFERS if b.cut is not None} | {"mla_q_dim"})
    lines += [f"constexpr int {camel('own_' + n)} = {cfg.dims()[n] // tp};" for n in cut]
    lines += ["// Numbers of the arithmetic."]
    reals = {"rms_norm_eps": cfg.rms_norm_eps, "mla_norm_eps": MLA_NORM_EPS, "l2norm_eps": L2NORM_EPS,
             "situ_beta": cfg.activation_situ_beta, "situ_linear_beta": cfg.activation_situ_linear_beta,
             "gate_lower_bound": cfg.linear_attn_config.gate_lower_bound, "routed_scaling_factor": cfg.routed_scaling_factor}
    lines += [f"constexpr float {camel(n)} = {float(v)!r}f;" for n, v in reals.items()]
    stride = next(n for n in range(cfg.num_experts * 5 // 8, 2 * cfg.num_experts) if gcd(n, cfg.num_experts) == 1)
    lines += ["// Routing of a benchmark, 0: none; item i takes expert i kForcedStride mod kNumExperts, all different.",
              f"constexpr int kForcedExperts = {forced_experts}, kForcedStride = {stride};"]
    lines += [f"constexpr bool kKvFp8 = {str(kv == 'fp8_e4m3').lower()};", "// Leaves of the tree over K on this rank, and k-steps (experts: groups) in a leaf."]
    for name, (leaves, steps) in _trees(plan).items():
        lines.append(f"constexpr int {camel(name)}Leaves = {leaves}, {camel(name)}Steps = {steps};")
    return "\n".join(lines) + "\n"


def _trees(plan: Plan) -> dict[str, tuple[int, int]]:
    """Tree of every product, by the name of its packed array; `hidden` and `latent` are those of the row norms."""
    cfg, out = plan.cfg, {}
    for packed in (p for group in PACKED.values() for p in group):
        if packed.how in (packing.HEADS, packing.HEADS_TURNED):
            inputs = cfg.kv_lora_rank if packed.how == packing.HEADS else cfg.qk_nope_head_dim
            out[packed.name] = packing.inputs_leaves_and_steps(inputs)
        elif packed.how not in (packing.PLAIN, packing.FOLDED):
            out[packed.name] = packing.leaves_and_steps(packed.sources[-1], cfg, plan.tp)
    for name, size in (("hidden_norm", cfg.hidden_size), ("latent_norm", cfg.routed_expert_hidden_size),
                       ("q_latent_norm", cfg.q_lora_rank), ("kv_latent_norm", cfg.kv_lora_rank)):
        out[name] = (tree_leaves(size), size // tree_leaves(size) // MMA_K)
    return out


def _buffers(plan: Plan, rows: int, kv: str, ride: bool) -> str:
    offsets, size = arena_offsets(plan)
    if rows > DECODE_ROWS:   # added up over the ranks in place
        offsets |= {m.target: offsets[m.source] for s in STAGES for m in s.moves if m.how == STACK}
    lines = ['#pragma once', '#include "prims.cuh"', '#include "config.cuh"', f"typedef {KV_TYPES[kv]} kv_t;", "",
             f"// One step of one rank: where its memory begins. The arena has {size} bytes.", "struct Step {", "  u8* arena;"]
    lines += [f"  {C_TYPES[BY_NAME[n].dtype]}* {n}_base;" for n in SESSION]
    lines += [f"  u8* peers[{LEGAL_TP[-1]}];   // arenas of all ranks; loopback: this one, as often", "  u8* mla_work;   // partial results of the split context", "  u8* mla_map;    // the MLA cache for the copy engine",
              "  u64* trace;     // 8 words a launch, where the build traces",
              "  int slots, pages, slot_pages, rank, loopback, mla_partials;", "};", "",
              "// One operation. `opens_block`: attn_mix takes a snapshot. `kv_scale`: of this layer's FP8 cache rows. `first_row`: of a slice of the step.",
              "struct OpArgs {", f"  const void* w[{packing.MAX_PACKED}];", "  int layer, kind_index, num_blocks, opens_block, launch, first_row;", "  float kv_scale;", "};", ""]
    lines += [_accessor(b, offsets, plan) for b in BUFFERS]
    lines += [f"K3_DEVICE {kind}* {n}(const Step& s) {{ return ({kind}*)(s.arena + {offsets[n]}ull); }}"
              for n, kind in (("expert_list", "u8"), ("mla_info", "u8"), ("mla_next", "int"), ("kda_q", "float"), ("kda_fade", "float"), ("kda_o", "float"),
                              ("product_work", "u8"))]
    lines += [f"K3_DEVICE const {_weight_type(p)}* w_{p.name}(const OpArgs& op) {{ return (const {_weight_type(p)}*)op.w[{i}]; }}"
              for group in PACKED.values() for i, p in enumerate(group)]
    lines += [_put(m, plan, offsets, ride and not (rows > DECODE_ROWS and m.how == STACK)) for s in STAGES for m in s.moves]
    return "\n".join(lines) + "\n"


def _put(m: Move, plan: Plan, offsets: dict[str, int], ride: bool) -> str:
    """`put_<source>`: one value of what a collective moves, to where it belongs: the buffer itself, or every rank's target."""
    source = BY_NAME[m.source]
    kind, width = C_TYPES[source.dtype], prod(buffer_shape(source, _dims(plan))[1:])
    head = f"K3_DEVICE void put_{m.source}(const Step& s, int token, int column, {kind} v) {{"
    if not ride or plan.tp == 1:
        return f"{head} {m.source}(s)[size_t(token) * {width} + column] = v; }}"
    at = {GATHER: f"(size_t(token) * kRanks + place) * {width} + column",
          STACK: f"(size_t(place) * kDecodeRows + token) * {width} + column",
          SCATTER: f"(size_t(place) * kMaxRows + token) * {width // plan.tp} + column % {width // plan.tp}"}[m.how]
    # A scattered value has one receiver. Looped back, the one rank stands for all: it has the place of whoever it is.
    store = f"int place = s.loopback ? peer : s.rank; (({kind}*)(s.peers[peer] + {offsets[m.target]}ull))[{at}] = v;"
    if m.how == SCATTER:
        return f"{head}\n  int peer = column / {width // plan.tp};\n  {store}\n}}"
    return f"{head}\n  K3_UNROLL\n  for (int peer = 0; peer < kRanks; ++peer) {{ {store} }}\n}}"


def _accessor(b: Buffer, offsets: dict[str, int], plan: Plan) -> str:
    """Pointer to the buffer, or to the part of the layer that an operation belongs to."""
    kind, layered, dims = C_TYPES[b.dtype], b.is_layered, _dims(plan)
    if b.name in SESSION:
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


def _weight_type(p: packing.Packed) -> str:
    if p.how == packing.FOLDED:
        return "float"
    if p.how != packing.PLAIN:
        return "uint4"
    return "float" if WEIGHT[p.sources[0]].dtype == "F32" else "bf16"


def _kernels(plan: Plan, rows: int, ride: bool, sms: int, probes: Probes) -> str:
    used = {op.stage.name for op in plan.ops + plan.commit}
    stages = [s for s in STAGES if s.name in used and launches_of(s, plan, rows, ride)]
    headers = dict.fromkeys(s.header or "collective" for s in stages)
    lines = [f"#define K3_HOP_CYCLES {probes.hop_cycles}"] * bool(probes.hop_cycles) + ["#define K3_TRACE"] * probes.trace
    lines += ['#include "buffers.cuh"', *(f'#include "stages/{h}.cuh"' for h in headers), ""]
    behind = {kernels_of(s, plan, rows, ride)[0] for s in stages if follows_collective(s)}
    lines += [_collective(s, plan, rows, sms, ride) for s in stages if s.moves]
    for name in (k for s in stages for k in kernels_of(s, plan, rows, ride)):
        t = f"TreeOf<stage::{name.removesuffix(SUM)}>" if name.endswith(SUM) else f"stage::{name}"
        lines.append(f"static_assert({t}::kSmem <= {MAX_SHARED}, \"a block of {name} does not fit an SM\");")
        lines.append(f'extern "C" __constant__ int k_{name}_launch[6] = '
                     f"{{{t}::kBlocks, {t}::kBlocksY, {t}::kBlocksZ, {t}::kThreads, {t}::kCluster, {t}::kSmem}};")
        hop = f"K3_HOP({int(name in behind)}); " if probes.hop_cycles else ""
        lines.append(f'extern "C" __global__ void __launch_bounds__({t}::kThreads, {t}::kResident) '
                     f"k_{name}(const __grid_constant__ Step s, const __grid_constant__ OpArgs op) {{ {hop}traced<{t}>(s, op); }}")
    return "\n".join(lines) + "\n"


def _collective(stage: Stage, plan: Plan, rows: int, sms: int, ride: bool) -> str:
    """A struct that moves what the stage says, for `rows` rows; see kernels_cu/stages/collective.cuh. In a wide step what would be stacked
    is added up in place: every rank sums its share of the columns and gives it to all, so the parts need not be with everyone."""
    offsets, dims, moves, units = arena_offsets(plan)[0], _dims(plan), [], 0
    for m in stage.moves:
        if m.how == STACK and rows > DECODE_ROWS:
            width = prod(buffer_shape(BY_NAME[m.source], dims)[1:])
            units += rows * width // 4
            moves.append(f"sum_ranks<{offsets[m.source]}ull, kRows, {width}>(s);")
            continue
        if ride:
            continue
        source, target = BY_NAME[m.source], BY_NAME[m.target]
        size, width = DTYPE_BYTES[source.dtype], prod(buffer_shape(source, dims)[1:])
        part = width // plan.tp if m.how == SCATTER else width
        target_row = width * plan.tp if m.how == GATHER else part
        slot = part if m.how == GATHER else part * (DECODE_ROWS if m.how == STACK else MAX_ROWS)
        units += plan.tp * rows * part * size // 16
        moves.append(f"move<{offsets[m.source]}ull, {offsets[m.target]}ull, kRows, {part * size}, {width * size}, {target_row * size}, {slot * size}ull, "
                     f"{str(m.how == SCATTER).lower()}>(s);")
    return (f"namespace stage {{ struct {stage.name} : StageDefaults {{\n  static constexpr int kBlocks = {max(1, min(sms, units // 256))}, kThreads = 256;\n"
            "  static __device__ void run(const Step& s, const OpArgs&) {\n    grid_wait();\n    grid_launch_next();\n    "
            + "\n    ".join(moves) + "\n  }\n}; }")
