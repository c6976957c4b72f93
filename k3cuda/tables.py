"""What emission, packing and memory read of a description, the target's or a draft's, under one set of names."""
import functools
from dataclasses import dataclass

from . import packing
from .buffers import BUFFERS, DTYPE_BYTES, Buffer, step_dims
from .config import DECODE_ROWS, MAX_ROWS, K3Config
from .draft_buffers import DRAFT_BUFFERS, draft_dims
from .draft_config import GQA
from .draft_plan import DraftPlan
from .draft_stages import DRAFT_STAGES
from .draft_weights import BY_NAME as DRAFT_WEIGHT
from .packing import DRAFT_PACKED, PACKED, Packed
from .plan import Op, Plan
from .stages import STAGES, Stage
from .weights import BY_NAME as WEIGHT
from .weights import Weight, rank_shape


def _session(buffers) -> tuple[str, ...]:
    return tuple(b.name for b in buffers if b.life == "session") + ("page_table",)


SESSION = _session(BUFFERS)   # of the target
GQA_CLASSES = 32   # of pages, that blocks of a draft's grouped-query attention take (stages/draft_gqa.cuh)


@dataclass(frozen=True)
class Tables:
    """One description over the ranks of a plan.

    Attributes:
        buffers: by name, in the order in which those of `arena` lie there.
        session: buffers that come as pointers and not as offsets: they exist once a slot or page, so their sizes are the machine's, or they
            are the target's. lent: those of the target.
        packed: stage -> the arrays that its kernels read. weights: by name.
        stages: in order. ops: of every launch.
        dims: sizes by name.
        absent: buffers that other drafts of the family have, or this one under other options.
        work: what passes between kernels and is no buffer: name -> (C type, bytes).
    """

    buffers: dict[str, Buffer]
    session: tuple[str, ...]
    weights: dict[str, Weight]
    packed: dict[str, tuple[Packed, ...]]
    stages: tuple[Stage, ...]
    ops: tuple[Op, ...]
    dims: dict[str, int]
    work: dict[str, tuple[str, int]]
    absent: tuple[Buffer, ...] = ()
    lent: tuple[str, ...] = ()

    @property
    def arena(self) -> dict[str, Buffer]:
        """Buffers that lie in an arena."""
        return {name: b for name, b in self.buffers.items() if name not in self.session}


def tables_of(plan: Plan | DraftPlan, slots: int = 1, pages: int = 1, slot_pages: int = 1) -> Tables:
    """Sizes of the machine change what comes as a pointer, never an arena."""
    machine = {"tp": plan.tp, "slots": slots, "pages": pages, "slot_pages": slot_pages}
    if isinstance(plan, DraftPlan):
        return _draft(plan, machine)
    dims = step_dims(plan.cfg, dcp=plan.dcp, num_taps=plan.num_taps, **machine)
    return Tables({b.name: b for b in BUFFERS}, SESSION, WEIGHT, PACKED, STAGES, plan.ops + plan.commit, dims, _target_work(plan, dims))


def _draft(plan: DraftPlan, machine: dict[str, int]) -> Tables:
    dims = draft_dims(plan.cfg, num_drafts=plan.num_drafts, seqs=plan.padded_seqs(DECODE_ROWS), **machine)
    packed = {name: group for name, group in DRAFT_PACKED.items() if all(s in DRAFT_WEIGHT and _has(s, plan) for p in group for s in p.sources)}
    taps = DECODE_ROWS * dims["taps_dim"] * DTYPE_BYTES["bf16"]
    work = {"product_work": ("u8", 0)} | {"taps_normed": ("bf16", taps if plan.cfg.fc_norm else 0)} | ({"mla_next": ("int", 4), "mla_own_last": ("int", 0)} if "mla_cache" in plan.buffers else {})
    session = tuple(n for n in (*_session(plan.buffers.values()), "taps") if n in plan.buffers)
    if plan.cfg.family == GQA:
        of_classes = dims["rows"] * dims["num_attention_heads"] // plan.tp * GQA_CLASSES * DTYPE_BYTES["f32"]
        work |= {"gqa_top_sum": ("float", 2 * of_classes), "gqa_mean": ("float", plan.cfg.head_dim * of_classes)}
    absent = tuple(b for b in DRAFT_BUFFERS if b.name not in plan.buffers)
    return Tables(plan.buffers, session, DRAFT_WEIGHT, packed, DRAFT_STAGES, plan.context + plan.ops, dims, work, absent, ("page_table", "taps"))


def _has(weight: str, plan: DraftPlan) -> bool:
    """Whether the draft's sizes give the weight a shape: every weight of its family has one, also where it has no use for it."""
    return set(DRAFT_WEIGHT[weight].shape) <= set(plan.cfg.dims())


def _target_work(plan: Plan, dims: dict[str, int]) -> dict[str, tuple[str, int]]:
    items = MAX_ROWS * plan.cfg.num_experts_per_token
    kda = 4 * MAX_ROWS * dims["kda_dim"] // plan.tp
    return {"expert_list": ("u8", 8 + 4 * (items + 1) + 2 * items), "mla_next": ("int", 4), "mla_own_last": ("int", 4 * MAX_ROWS * (plan.dcp > 1)),
            "kda_rows": ("float", 3 * kda), "kda_values": ("float", kda), "kda_o": ("float", kda), "product_work": ("u8", max(_leaf_sums(plan.cfg, plan.tp).values()))}


@functools.cache
def _leaf_sums(cfg: K3Config, tp: int) -> dict[str, int]:
    """Bytes of what a widest step keeps of a product before the last sum, F32: leaf sums (wide_core.cuh), results of items (expert_wide.cuh)."""
    dims, f32 = cfg.dims(), DTYPE_BYTES["f32"]
    leaves, _ = packing.leaves_and_steps("expert_w2", cfg, tp)
    out = {"expert_w2": leaves * MAX_ROWS * cfg.num_experts_per_token * cfg.routed_expert_hidden_size * f32}
    for p in (p for group in PACKED.values() for p in group if p.how in (packing.TILES, packing.PAIRS)):
        rows = [rank_shape(WEIGHT[name], dims, tp)[0] for name in p.sources]
        tokens = DECODE_ROWS if p.name == "lm_head" else MAX_ROWS
        out[p.name] = packing.leaves_and_steps(p.sources[-1], cfg, tp)[0] * sum(-(-n // 16) * 16 for n in rows) * tokens * f32
    return out
