"""The step as a page: what `k3cuda plan` prints and docs/dataflow.md holds. Everything here is read off the tables."""
from . import weights
from .buffers import BUFFERS, buffer_bytes, step_dims
from .config import PAGE_SIZE, K3Config
from .plan import Op, Plan, build_plan
from .stages import STAGES
from .weights import legal_tps, rank_bytes

ROW_COUNTS = (1, 8)


def distinct_experts(cfg: K3Config, rows: int) -> float:
    """Experts a layer that `rows` rows read under uniform routing; real routing of neighbours overlaps more."""
    return cfg.num_experts * (1 - (1 - cfg.num_experts_per_token / cfg.num_experts) ** rows)


def op_bytes(cfg: K3Config, op: Op, tp: int, rows: int) -> float:
    """Weight bytes an operation reads on one rank for `rows` rows."""
    dims, total = cfg.dims(), 0.0
    for name in op.stage.weights:
        w = weights.BY_NAME[name]
        # Stages that share a weight (kv_b_proj) read a part of it each; what takes a tap reads its own mix's weights once more.
        users = sum(name in s.weights for s in STAGES if (s.where == "tap") == (op.stage.where == "tap"))
        if w.per_expert:
            total += rank_bytes(w, dims, tp, experts=1) * distinct_experts(cfg, rows) / users
        elif not w.uses_rows:
            total += rank_bytes(w, dims, tp) / users
    return total


def layer_kinds(cfg: K3Config) -> dict[str, list[int]]:
    """Layers by kind, kinds in order of first appearance; the layers of one kind differ only in AttnRes snapshots."""
    kinds: dict[str, list[int]] = {}
    for layer in range(cfg.num_hidden_layers):
        name = f"{'KDA' if cfg.is_kda(layer) else 'MLA'} + {'dense MLP' if cfg.is_dense(layer) else 'MoE'}"
        kinds.setdefault(name, []).append(layer)
    return kinds


def hops(plan: Plan, layer: int | None) -> tuple[int, int]:
    """(collectives, those on the longest chain of waits) of one layer."""
    ops = [op for op in plan.ops if op.layer == layer]
    chain = {}
    for op in ops:
        index = plan.ops.index(op)
        before = max((chain[w] for w in op.waits if w in chain), default=(0, 0))
        chain[index] = (before[0] + 1, before[1] + bool(op.stage.moves))
    return sum(bool(op.stage.moves) for op in ops), max(chain.values(), default=(0, 0))[1]


def markdown(cfg: K3Config, tp: int | None = None) -> str:
    """The whole page for one model over `tp` ranks, by default the most it can be cut into."""
    tp = tp or legal_tps(cfg)[-1]
    plan = build_plan(cfg, tp)
    parts = [_intro(cfg, tp, plan), _totals(cfg)]
    parts += [_section(plan, "Start of the step", None, "start")]
    for name, layers in layer_kinds(cfg).items():
        title = f"{name}: layer {layers[0]}" + (f" and {len(layers) - 1} more" if len(layers) > 1 else "")
        parts.append(_section(plan, title, layers[0]))
    parts += [_section(plan, "End of the step", None, "end"), _commit(plan), _buffers(cfg, tp), _weights(cfg, tp)]
    return "\n\n".join(parts) + "\n"


def _table(head: list[str], rows: list[list]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(c) for c in line) + " |" for line in lines)


def _mb(n: float) -> str:
    return f"{n / 1e6:.1f}" if n else ""


def _intro(cfg, tp, plan) -> str:
    return (f"# Dataflow of one step\n\nPrinted by `k3cuda plan --markdown` from `k3cuda/weights.py`, `buffers.py` and `stages.py`; do not edit.\n\n"
            f"{cfg.num_hidden_layers} layers over {tp} ranks: {len(plan.ops)} operations in {1 + plan.ops[-1].phase} phases "
            "(operations of one phase need no barrier between them). L: the hand-over stays on the GPU; X: it crosses ranks. "
            f"MB are decimal and of one rank; rows read experts as uniform routing predicts."
            + (f"\n\n{text[0].upper()}{text[1:]}." if (text := weights.outnumbered(weights.WEIGHTS, cfg.dims(), tp)) else ""))


def _totals(cfg) -> str:
    rows = []
    for tp in legal_tps(cfg):
        ops = build_plan(cfg, tp).ops
        read = [sum(op_bytes(cfg, op, tp, n) for op in ops) for n in ROW_COUNTS]
        rows.append([tp, f"{weights.model_bytes(cfg, tp) / 1e9:.3f}", *(f"{r / 1e9:.3f}" for r in read), sum(bool(op.stage.moves) for op in ops)])
    head = ["ranks", "weights held, GB", *(f"weights read, {n} row{'s' * (n > 1)}, GB" for n in ROW_COUNTS), "hops a step"]
    return "## Bytes and hops of one rank\n\n" + _table(head, rows)


def _section(plan: Plan, title: str, layer: int | None, where: str | None = None) -> str:
    """The operations of a layer, or of one end of the step (`where`)."""
    chosen = [op for op in plan.ops if op.layer == layer and where in (None, op.stage.where)]
    first, rows = chosen[0].phase, []
    for op in chosen:
        s = op.stage
        waits = ", ".join(plan.ops[w].stage.name + ("" if plan.ops[w].layer == layer else " (before)") for w in op.waits)
        rows.append([op.phase - first, f"`{s.name}`", "X" if s.moves else "L", waits, ", ".join(s.reads),
                     ", ".join(list(s.writes) + [f"+{u}" for u in s.updates]),
                     *(_mb(op_bytes(plan.cfg, op, plan.tp, n)) for n in ROW_COUNTS)])
    head = ["phase", "stage", "hop", "waits for", "reads", "writes, +updates", *(f"MB, {n} row{'s' * (n > 1)}" for n in ROW_COUNTS)]
    note = ""
    if layer is not None:
        total, longest = hops(plan, layer)
        read = " / ".join(_mb(sum(op_bytes(plan.cfg, op, plan.tp, n) for op in chosen)) for n in ROW_COUNTS)
        note = f"{total} cross-rank hops, {longest} on the longest chain; {read} MB of weights for {' / '.join(map(str, ROW_COUNTS))} rows.\n\n"
    return f"## {title}\n\n{note}{_table(head, rows)}"


def _commit(plan) -> str:
    s = plan.commit[0].stage if plan.commit else None
    return "## Commit\n\n" + (f"`{s.name}` in each of {len(plan.commit)} KDA layers: reads {', '.join(s.reads)}; updates {', '.join(s.updates)}."
                              if s else "No layer keeps a state.")


def _buffers(cfg, tp) -> str:
    dims = step_dims(cfg, tp=tp, slots=1, pages=1, slot_pages=1)
    rows = [[f"`{b.name}`", " × ".join(b.shape), b.dtype, b.life, "" if b.cut is None else b.shape[b.cut], _mb(buffer_bytes(b, dims)), b.unit]
            for b in BUFFERS]
    return (f"## Buffers\n\nMB of one rank with {dims['rows']} rows, one slot and one page of {PAGE_SIZE} tokens.\n\n"
            + _table(["buffer", "shape", "dtype", "life", "cut over ranks", "MB", "unit"], rows))


def _weights(cfg, tp) -> str:
    dims = cfg.dims()
    rows = [[f"`{w.name}`", f"`{w.key}`", " × ".join(w.shape), w.dtype, w.where, w.shape[w.cut.axis] if w.cut else "", _mb(rank_bytes(w, dims, tp))]
            for w in weights.WEIGHTS]
    return "## Weights\n\nMB of one layer on one rank, all experts counted.\n\n" + _table(
        ["weight", "checkpoint key", "shape", "dtype", "layers", "cut over ranks", "MB"], rows)
