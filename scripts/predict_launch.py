"""What bounds the step in one launch, by the model of k3cuda/timeline.py: the table of docs/megakernel.md, then what scripts/bench_launch.py should
measure (docs/megakernel-log.md). Needs no GPU; takes a minute."""
import dataclasses

from k3cuda import block_program as bp
from k3cuda import timeline
from k3cuda.config import RELEASED_FOLDER, K3Config
from k3cuda.phases import ARRANGEMENTS, Grid, Phase, Wait
from k3cuda.plan import build_plan
from k3cuda.runtime.repack import leaf_bytes
from k3cuda.schedule import Schedule, build, deal

CHAINS = ((0, 1), (0, 8), (16, 1), (107, 8))        # distinct experts, rows
BLOCKS = {1: 132, 2: 132, 4: 120}                 # of clusters that an H200 holds at once
LAYERS = 9                                        # steady by the fourth: layers 4 to 7 are one period
CASES = {"1 row": (1, 16, "all carried"), "8 rows": (8, 107, "both mixes phases")}
HALF = {name: (few / 2, more / 2) for name, (few, more) in timeline.OWN.items()}
CHANGES = {"nothing": {}, "a quarter read": {"share": 4}, "own work halved": {"OWN": HALF}, "chains halved": {"STEP": timeline.STEP / 2, "TAIL": timeline.TAIL / 2},
           "idle hand-overs": {"EXCHANGE": timeline.IDLE_EXCHANGE},
           "all": {"share": 4, "OWN": HALF, "STEP": timeline.STEP / 2, "TAIL": timeline.TAIL / 2, "EXCHANGE": timeline.IDLE_EXCHANGE}}


def us_a_layer(plan, rows, experts, arrangement, ring, share=1, **costs):
    before = {name: getattr(timeline, name) for name in costs}
    try:
        for name, value in costs.items():
            setattr(timeline, name, value)
        schedule = build(plan, rows, Grid(ring=ring), ARRANGEMENTS[arrangement], experts=experts, context=8192)
        phases = tuple(dataclasses.replace(p, waits=tuple(dataclasses.replace(w, block_bytes=w.block_bytes // share) for w in p.waits)) for p in schedule.phases)
        schedule = dataclasses.replace(schedule, phases=phases)
        spans = timeline.simulate(schedule).spans
    finally:
        for name, value in before.items():
            setattr(timeline, name, value)
    end = lambda layer: max(s.end for s in spans if schedule.phases[s.phase].layer == layer)
    return (end(7) - end(3)) / 4


def chain_us(cfg, experts, rows, cluster):
    """A layer of a chain of products (block_program.chain), as its kernel runs it."""
    kinds = bp.with_experts(cfg, 16, cluster) if experts else bp.dense_products(cfg, 16, cluster)
    grid, phases = Grid(sms=BLOCKS[cluster], cluster=cluster, copy=7680), []
    for layer, k in ((layer, k) for layer in range(LAYERS) for k in kinds):
        units, is_chosen, steps = k.units(grid), not isinstance(k, bp.Product), 0
        if is_chosen:
            count = experts * k.pairs * k.parts if isinstance(k, bp.ExpertUp) else len(units)
            units, steps = (experts * k.expert_leaves * leaf_bytes(k.groups) // count,) * count, 2 * k.groups
        before = kinds[(len(phases) - 1) % len(kinds)]
        items = rows * (16 if isinstance(k, bp.ExpertDown) else 1)
        read = (k.inputs // k.parts if k.parts > 1 else max(k.inputs, before.outputs)) * 2 * items
        phases.append(Phase(k.name, layer, units, (Wait(len(phases) - 1, read),) if phases else (), k.parts, steps or k.steps, is_chosen))
    spans = timeline.simulate(Schedule(grid, rows, tuple(phases), deal(phases, grid))).spans
    return (spans[-1].end - spans[2 * len(kinds) - 1].end) / (LAYERS - 2)


def main():
    plan = build_plan(K3Config.from_json(RELEASED_FOLDER), 16)
    plan = dataclasses.replace(plan, ops=tuple(op for op in plan.ops if op.layer is None or op.layer < LAYERS))
    for change, what in CHANGES.items():
        row = [us_a_layer(plan, *case, kb * 1024, **what) for case in CASES.values() for kb in (160, 340)]
        print(f"{change:18}" + "".join(f"{us:8.1f}" for us in row))
    for experts, rows in CHAINS:
        found = {c: chain_us(plan.cfg, experts, rows, c) for c in BLOCKS if c > 1 or not experts}
        print(f"chain, {experts} experts, {rows} rows: " + ", ".join(f"{us:.1f} in clusters of {c}" for c, us in found.items()))


if __name__ == "__main__":
    main()
