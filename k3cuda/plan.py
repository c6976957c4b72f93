"""The ordered operations of a step: which stage at which layer, and what each must wait for."""
from dataclasses import dataclass, replace
from typing import Callable, Iterable

from . import buffers, weights
from .buffers import Buffer
from .config import K3Config
from .context_split import check_dcp
from .errors import PlanError
from .stages import BY_NAME as STAGE
from .stages import STAGES, Stage, runs_in

OUTPUTS = ("logits", "taps")


@dataclass(frozen=True)
class Op:
    """A stage at a layer (None before and after the layers).

    `kind_index` counts the layers of one attention kind: where the stage finds its layer in buffers that have one. Of a stage that takes
    a tap it is the tap's number.
    `num_blocks` is how many AttnRes snapshots exist when it starts.
    `waits` are the positions in `Plan.ops` (or `.commit`) that it must follow; what they imply is left out.
    `phase` is 0, or one more than the highest phase it waits for: operations of one phase need no barrier between them.
    """

    stage: Stage
    layer: int | None
    kind_index: int
    num_blocks: int
    waits: tuple[int, ...] = ()
    phase: int = 0

    def __str__(self):
        return self.stage.name if self.layer is None else f"{self.stage.name} (layer {self.layer})"


@dataclass(frozen=True)
class Taps:
    """What a step leaves for a draft model: of each of `layers` (0-based, ascending) its output, from the "prefix" or "attn_res" stream."""

    layers: tuple[int, ...]
    stream: str


@dataclass(frozen=True)
class Plan:
    """`ops` of one step on each of `tp` ranks, in an order that satisfies every wait, and those of its `commit`.

    `dcp` of them hold the MLA cache together (context_split.py).
    """

    cfg: K3Config
    tp: int
    ops: tuple[Op, ...]
    commit: tuple[Op, ...]
    taps: Taps | None = None
    dcp: int = 1

    @property
    def aliases(self) -> dict[str, str]:
        return aliases(STAGES, self.tp)

    @property
    def num_taps(self) -> int:
        return len(self.taps.layers) if self.taps else 0


def aliases(stages: Iterable[Stage], tp: int) -> dict[str, str]:
    """With one rank there is nothing to exchange: target of each collective -> the buffer that is the same memory. One rank is no group."""
    return {m.target: m.source for s in stages for m in s.moves if not m.in_group} if tp == 1 else {}


def build_plan(cfg: K3Config, tp: int = 1, taps: Taps | None = None, dcp: int = 1) -> Plan:
    """Orders the stages for a model cut over `tp` ranks, whose MLA cache `dcp` of them hold together, and derives every wait.

    Raises ConfigError if the model cannot be cut so, UsageError if `dcp` does not divide `tp`, PlanError if the tables contradict themselves.
    """
    weights.check_tp(cfg, tp)
    check_dcp(tp, dcp)
    stages = [s for s in STAGES if tp > 1 or not s.moves]
    ops, commit, kinds, blocks = [], [], {True: 0, False: 0}, 0
    ops += [Op(s, None, 0, blocks) for s in stages if s.where == "start"]
    for layer in range(cfg.num_hidden_layers):
        ops += _tap_ops(taps, layer, blocks)
        kda = cfg.is_kda(layer)
        for stage in stages:
            if runs_in(stage, cfg, layer, dcp > 1):
                (commit if stage.where == "commit" else ops).append(Op(stage, layer, kinds[kda], blocks))
                blocks += stage.name == "attn_mix" and cfg.opens_res_block(layer)
        kinds[kda] += 1
    ops += _tap_ops(taps, cfg.num_hidden_layers, blocks, is_end=True)
    ops += [Op(s, None, 0, blocks) for s in stages if s.where == "end"]
    plan = Plan(cfg, tp, tuple(ops), tuple(commit), taps, dcp)
    validate(plan)
    return replace(plan, ops=with_waits(ops, plan.aliases), commit=with_waits(commit, plan.aliases))


def _tap_ops(taps: Taps | None, layer: int, blocks: int, is_end: bool = False) -> list[Op]:
    """What is read off before `layer`, which is the output of the layer before it."""
    if taps is None or layer - 1 not in taps.layers:
        return []
    name = "tap_prefix" if taps.stream == "prefix" else "tap_output_mix" if is_end else "tap_mix"
    return [Op(STAGE[name], None if is_end else layer, taps.layers.index(layer - 1), blocks)]


def instance(name: str, op: Op, table: dict[str, Buffer] = buffers.BY_NAME) -> tuple:
    """What two operations share if they touch the same memory: a buffer, or the part of it that belongs to a layer."""
    return (name, op.kind_index) if table[name].is_layered else (name,)


def with_waits(ops: list[Op], aliases: dict[str, str], table: dict[str, Buffer] = buffers.BY_NAME) -> tuple[Op, ...]:
    """The same operations with `waits` and `phase` filled in; `table` has their buffers."""
    last_write, readers, out = {}, {}, []
    before: list[int] = []  # for each operation the set of all it follows, as bits
    for i, op in enumerate(ops):
        reads = {instance(aliases.get(n, n), op, table) for n in op.stage.inputs}
        writes = {instance(aliases.get(n, n), op, table) for n in op.stage.outputs}
        direct = {last_write[b] for b in reads | writes if b in last_write}
        direct |= {r for b in writes for r in readers.get(b, ())}
        implied = 0
        for w in direct:
            implied |= before[w]
        waits = tuple(sorted(w for w in direct if not implied >> w & 1))
        before.append(implied | sum(1 << w for w in direct))
        for b in reads - writes:
            readers.setdefault(b, []).append(i)
        for b in writes:
            last_write[b], readers[b] = i, []
        phase = 1 + max((out[w].phase for w in waits), default=-1)
        out.append(Op(op.stage, op.layer, op.kind_index, op.num_blocks, waits, phase))
    return tuple(out)


def validate(plan: Plan) -> None:
    """Raises PlanError where a stage names what does not exist, reads what nothing wrote, or leaves something unused."""
    has = lambda name, layer: name in weights.BY_NAME and weights.exists_in(weights.BY_NAME[name], plan.cfg, layer)
    used = check_flow(plan.ops + plan.commit, plan.aliases, buffers.BY_NAME, OUTPUTS, has)
    for layer, w in weights.all_weights(plan.cfg):
        if (w.name, layer) not in used:
            raise PlanError(f"no stage uses weight {w.name!r} of layer {layer}")


def check_flow(ops: Iterable[Op], aliases: dict[str, str], table: dict[str, Buffer], outputs: tuple[str, ...],
               has: Callable[[str, int | None], bool]) -> set[tuple[str, int | None]]:
    """Raises PlanError where the operations contradict the tables or each other; returns every (weight, layer) that they use.

    Args:
        table: their buffers by name. outputs: those that nobody has to read. has: whether a layer has a weight.
    """
    written = {(b.name,) for b in table.values() if b.life == "input"}
    used, read, produced = set(), set(), {}
    for op in ops:
        for name in op.stage.inputs + op.stage.outputs:
            if name not in table:
                raise PlanError(f"stage {op} names buffer {name!r}, which no table has")
        for name in op.stage.weights:
            if not has(name, op.layer):
                raise PlanError(f"stage {op} names weight {name!r}, which its layer does not have")
            used.add((name, op.layer))
        for name in op.stage.inputs:
            part = instance(aliases.get(name, name), op, table)
            # No block: nothing is read there. Taps fill their buffer one by one.
            partly = (name == "res_blocks" and op.num_blocks == 0) or (name == "taps" and name in op.stage.updates)
            if part not in written and table[name].life != "session" and not partly:
                raise PlanError(f"stage {op} reads {name!r} before any stage writes it")
            read.add(part)
        for name in op.stage.outputs:
            part = instance(aliases.get(name, name), op, table)
            written.add(part)
            produced[part] = op
    for part, op in produced.items():
        if part not in read and part[0] not in outputs + tuple(aliases.get(n, n) for n in outputs):
            raise PlanError(f"nothing reads {part[0]!r}, which stage {op} writes")
    return used
