"""The ordered operations of a draft: those that turn committed rows into context, and those that propose tokens."""
from dataclasses import dataclass

from .config import DECODE_ROWS
from .draft_buffers import BY_NAME, Buffer
from .draft_config import DraftConfig
from .draft_stages import DRAFT_STAGES
from .draft_weights import BY_NAME as WEIGHT
from .draft_weights import all_draft_weights, cut_weights, exists_in_draft, has_traits
from .errors import PlanError
from .plan import Op, aliases, check_flow, with_waits
from .weights import check_cuts

OUTPUTS = ("draft_ids", "draft_logits", "draft_confidence")


@dataclass(frozen=True)
class DraftPlan:
    """Two lists of operations on each of `tp` ranks. In both `Op.kind_index` is the layer, or behind the layers the number of the draft.

    Attributes:
        context: after a target step is committed, over its rows.
        ops: a block of every sequence, then `num_drafts` tokens of each.
        block_rows: rows of a sequence in a block.
    """

    cfg: DraftConfig
    tp: int
    num_drafts: int
    context: tuple[Op, ...]
    ops: tuple[Op, ...]
    block_rows: int

    dcp = 1   # its cache is whole on every rank, whatever the target's is

    @property
    def max_seqs(self) -> int:
        """Sequences whose blocks fit one step, and one verify step with all their drafts."""
        return DECODE_ROWS // max(self.num_drafts + 1, self.block_rows)

    def padded_seqs(self, rows: int) -> int:
        """Sequences of a step of up to `rows` rows as its products count them: a power of two, 0 where a block does not fit."""
        fit = min(rows // self.block_rows, self.max_seqs)
        return fit and 1 << (fit - 1).bit_length()

    @property
    def aliases(self) -> dict[str, str]:
        return aliases(DRAFT_STAGES, self.tp)

    @property
    def buffers(self) -> dict[str, Buffer]:
        """Those that this draft's stages name; the table has those of every kind of draft."""
        used = {name for op in self.context + self.ops for name in op.stage.inputs + op.stage.outputs}
        return {name: b for name, b in BY_NAME.items() if name in used}


def build_draft_plan(cfg: DraftConfig, tp: int = 1, num_drafts: int | None = None, block_rows: int | None = None) -> DraftPlan:
    """Orders the stages for a draft cut over `tp` ranks that proposes `num_drafts` tokens at a time (None: the most it can) from blocks of
    `block_rows` rows (None: those it was trained with).

    Raises ConfigError if it cannot be cut so, PlanError if the tables contradict themselves.
    """
    check_cuts(cut_weights(cfg), cfg.dims(), tp, "draft")
    num_drafts = num_drafts or cfg.max_drafts
    parts: dict[str, list] = {}
    for s in DRAFT_STAGES:
        if has_traits(s.where, cfg) and (tp > 1 or not s.moves):
            parts.setdefault(s.where.split()[0], []).append(s)

    def once(part):
        return [Op(s, None, 0, 0) for s in parts.get(part, ())]

    def layers(part):
        return [Op(s, layer, layer, 0) for layer in range(cfg.num_hidden_layers) for s in parts.get(part, ())]

    context = once("context") + layers("context_layer")
    ops = once("start") + layers("layer") + once("end") + [Op(s, None, i, 0) for i in range(num_drafts) for s in parts["draft"]]
    same = aliases(DRAFT_STAGES, tp)
    has = lambda name, layer: name in WEIGHT and exists_in_draft(WEIGHT[name], cfg, layer)
    used = check_flow(context, same, BY_NAME, OUTPUTS + ("mla_cache", "gqa_cache"), has) | check_flow(ops, same, BY_NAME, OUTPUTS, has)
    for layer, w in all_draft_weights(cfg):
        if (w.name, layer) not in used:
            raise PlanError(f"no stage uses weight {w.name!r} of layer {layer}")
    return DraftPlan(cfg, tp, num_drafts, with_waits(context, same, BY_NAME), with_waits(ops, same, BY_NAME), block_rows or cfg.block_size)
