"""config.cuh of a build: the sizes and numbers of one rank, of the target or of a draft."""
from math import gcd, pi

from . import packing
from .config import DECODE_ROWS, L2NORM_EPS, MAX_ROWS, MLA_NORM_EPS, MXFP4_GROUP, PAGE_SIZE, K3Config
from .draft_config import DraftConfig
from .draft_plan import DraftPlan
from .plan import Plan
from .tables import tables_of
from .weights import MMA_K, tree_leaves

MAX_SHARED = 227 * 1024  # bytes of shared memory a block can have, on every architecture we compile for
CACHE_BLOCK = 64   # elements of a cache row inside which its 16-byte units change places (mla_work.cuh)
DECODE_BUCKETS = (1, 2, 4, 8, 16, 32, DECODE_ROWS)
ROW_BUCKETS = (*DECODE_BUCKETS, 128, 256, 512, MAX_ROWS)  # a step runs in the smallest that holds its rows
FEW_ROWS = 8  # the most of a step in whose middle of KDA several blocks share a head, and whose states a commit advances: there it costs less (docs/kernels.md)
LEAF_SUM_ROWS = 16  # the fewest of a step with which a product may leave sums of leaves in memory
H200_SMS = 132  # what a build for no device in particular spreads over
# Multiprocessors of the GPUs of an architecture: a cubin is for one number, since kernels spread over all of them. H200 as its driver
# says; others as published: H100 SXM 132, B200 148, GB200 152, GB300 152, B300 148. Any other GPU compiles for itself at its first step.
GPU_SMS = {"sm_90a": (H200_SMS,), "sm_100a": (148, 152), "sm_103a": (152, 148)}


def has_leaf_sums(plan: Plan | DraftPlan, rows: int) -> bool:
    """Whether in a step of up to `rows` rows a product may leave sums of leaves in memory, for a second kernel: a draft has no memory for them."""
    return rows >= LEAF_SUM_ROWS and not isinstance(plan, DraftPlan)


def camel(name: str) -> str:
    return "k" + "".join(part.capitalize() for part in name.split("_"))


def sizes(plan: Plan | DraftPlan, rows: int, kv: str, sms: int, forced_experts: int, parts: int) -> str:
    """The text, for steps of up to `rows` rows; `parts` of what is stacked: the ranks', or their sum."""
    t, tp, is_draft = tables_of(plan), plan.tp, isinstance(plan, DraftPlan)
    most = DECODE_ROWS if is_draft else MAX_ROWS
    taps = {} if is_draft or not plan.num_taps else {"num_taps": plan.num_taps}   # of a draft they are one of its own sizes
    whole = plan.cfg.dims() | {"max_rows": most, "decode_rows": DECODE_ROWS, "max_shared": MAX_SHARED, "page_size": PAGE_SIZE, "mxfp4_group": MXFP4_GROUP} | taps
    lines = ["#pragma once", "// Sizes of the whole model.", *_integers(whole)]
    lines += ["// One rank's part of a size that is cut.", f"constexpr int kRanks = {tp}, kRows = {rows}, kSms = {sms};",
              f"constexpr int kGroup = {plan.dcp};   // ranks that hold the MLA cache together",
              f"constexpr int kHeadRows = {min(rows, DECODE_ROWS)}, kFewRows = {FEW_ROWS};",
              f"constexpr bool kHasLeafSums = {str(has_leaf_sums(plan, rows)).lower()};   // a product may have a second kernel, which adds them",
              f"constexpr int kParts = {parts};   // of a stacked buffer: the ranks', or their sum"]
    cut = sorted(({b.shape[b.cut] for b in (*t.buffers.values(), *t.absent) if b.cut is not None} | {"mla_q_dim"}) & set(whole))
    lines += _integers({f"own_{n}": t.dims[n] // tp for n in cut} | {"group_heads": t.dims["num_attention_heads"] // tp * plan.dcp})
    lines += ["// Numbers of the arithmetic."]
    lines += _draft_numbers(plan, rows, t.dims["mixer_dim"] // tp) if is_draft else _target_numbers(plan.cfg, forced_experts)
    lines += [f"constexpr bool kKvFp8 = {str(kv == 'fp8_e4m3').lower()};", "// Leaves of the tree over K on this rank, and k-steps (experts: groups) in a leaf."]
    for name, (leaves, steps) in _trees(plan).items():
        lines.append(f"constexpr int {camel(name)}Leaves = {leaves}, {camel(name)}Steps = {steps};")
    return "\n".join(lines) + "\n"


def _integers(values: dict[str, int]) -> list[str]:
    return [f"constexpr int {camel(n)} = {v};" for n, v in values.items()]


def _reals(values: dict[str, float]) -> list[str]:
    return [f"constexpr float {camel(n)} = {float(v)!r}f;" for n, v in values.items()]


def _target_numbers(cfg: K3Config, forced_experts: int) -> list[str]:
    reals = {"rms_norm_eps": cfg.rms_norm_eps, "mla_norm_eps": MLA_NORM_EPS, "l2norm_eps": L2NORM_EPS,
             "situ_beta": cfg.activation_situ_beta, "situ_linear_beta": cfg.activation_situ_linear_beta,
             "gate_lower_bound": cfg.linear_attn_config.gate_lower_bound, "routed_scaling_factor": cfg.routed_scaling_factor}
    stride = next(n for n in range(cfg.num_experts * 5 // 8, 2 * cfg.num_experts) if gcd(n, cfg.num_experts) == 1)
    return [*_reals(reals), "// Routing of a benchmark, 0: none; item i takes expert i kForcedStride mod kNumExperts, all different.",
            f"constexpr int kForcedExperts = {forced_experts}, kForcedStride = {stride};"]


def _draft_numbers(plan: DraftPlan, rows: int, own_width: int) -> list[str]:
    cfg: DraftConfig = plan.cfg
    reals = {"rms_norm_eps": cfg.rms_norm_eps, "mla_norm_eps": cfg.rms_norm_eps, "situ_beta": cfg.activation_situ_beta,
             "situ_linear_beta": cfg.activation_situ_linear_beta, "score_scale": cfg.score_scale, "rope_magnitude": cfg.rope.magnitude if cfg.rope else 1.0}
    lines = _reals(reals) + _integers({"own_kda_dim": own_width}) + ["// The name that stages of the target have for the width of mixer_out."]
    lines += _integers({"num_drafts": plan.num_drafts, "block_rows": plan.block_rows, "seqs": plan.padded_seqs(rows)})
    lines += [f"constexpr bool kRope = {str(cfg.rope is not None).lower()}, kRopeInterleaved = {str(bool(cfg.rope and cfg.rope.interleaved)).lower()};"]
    dim = cfg.rope.dim if cfg.rope else 2
    frequencies = cfg.rope.inverse_frequencies() if cfg.rope else (0.0,)
    per_layer = {"Causal": ("bool", [str(c).lower() for c in cfg.causal]), "Window": ("int", [str(w or 0) for w in cfg.windows]),   # 0: all of the context
                 "Turns": ("double", [repr(f / (2 * pi)) for f in frequencies])}   # a position
    lines += [f"constexpr int kRopeDim = {dim};"]
    return lines + [f"__constant__ {kind} k{name}[] = {{{', '.join(v)}}};" for name, (kind, v) in per_layer.items()]


def _trees(plan: Plan | DraftPlan) -> dict[str, tuple[int, int]]:
    """Tree of every product, by the name of its packed array; `hidden` and `latent` are those of the row norms."""
    cfg, t, out = plan.cfg, tables_of(plan), {}
    for packed in (p for group in t.packed.values() for p in group):
        if packed.how in (packing.HEADS, packing.HEADS_TURNED):
            inputs = cfg.kv_lora_rank if packed.how == packing.HEADS else cfg.qk_nope_head_dim
            out[packed.name] = packing.inputs_leaves_and_steps(inputs)
        elif packed.how not in (packing.PLAIN, packing.FOLDED):
            out[packed.name] = packing.leaves_and_steps(packed.sources[-1], cfg, plan.tp, t.weights)
    dims = cfg.dims()
    for name, size in (("hidden_norm", "hidden_size"), ("latent_norm", "routed_expert_hidden_size"), ("q_latent_norm", "q_lora_rank"),
                       ("kv_latent_norm", "kv_lora_rank"), ("tap_norm", "target_hidden_size")):
        if dims.get(size):
            out[name] = (tree_leaves(dims[size]), dims[size] // tree_leaves(dims[size]) // MMA_K)
    return out
