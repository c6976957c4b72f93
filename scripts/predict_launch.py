"""What bounds the step in one launch, by the model of k3cuda/timeline.py: the table of docs/megakernel.md, then what scripts/bench_launch.py should
measure (docs/megakernel-log.md). Needs no GPU; takes a minute."""
import dataclasses

from k3cuda import block_program as bp
from k3cuda import launch_kinds as lk
from k3cuda import launch_rank as lr
from k3cuda import timeline
from k3cuda.config import RELEASED_FOLDER, K3Config
from k3cuda.launch_layer import LAYER_SLOTS, MERGED_ROWS, layer_kinds, layer_steps
from k3cuda.launch_mixes import CLOSED, OUT, SUMS, Mix
from k3cuda.launch_source import COPY
from k3cuda.phases import ARRANGEMENTS, Grid
from k3cuda.plan import build_plan
from k3cuda.runtime.repack import leaf_bytes
from k3cuda.schedule import Schedule, build, deal

CHAINS = (("products", 0, 1), ("products", 0, 8), ("products", 16, 1), ("products", 107, 8), ("layer", 16, 1), ("layer", 107, 8))   # what, distinct experts, rows
FIRST_LAYER = 36                                  # of whole layers: the first one opens a block, three are closed then
ROUNDS = {CLOSED: "mix_closed", SUMS: "mix_sums", OUT: "mix_out"}
BLOCKS = {1: 132, 2: 132, 4: 120}                 # of clusters that an H200 holds at once
# (cluster, rows): copies that the kernel of 21 whole layers has room for (tests/test_predict_launch.py).
SLOTS = {(2, 1): 25, (2, 8): 16, (4, 1): 25, (4, 8): 14}
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


def chain_program(plan, what, experts, rows, cluster, layers):
    """What scripts/bench_launch.py runs."""
    cfg, grid = plan.cfg, Grid(sms=BLOCKS[cluster], cluster=cluster, copy=COPY)
    if what == "layer":
        kinds = layer_kinds(cfg, 16, cluster, rank_parts=16, forced=False, merged=rows <= MERGED_ROWS)
        grid = dataclasses.replace(grid, ring=SLOTS[cluster, rows] * COPY)
        return bp.program(kinds, layer_steps(plan, kinds, range(FIRST_LAYER, FIRST_LAYER + layers)), rows, grid, cfg.num_experts_per_token, slots=LAYER_SLOTS)
    kinds = lr.with_experts(cfg, 16, cluster) if experts else lr.dense_products(cfg, 16, cluster)
    return bp.chain(kinds, layers, rows, grid, cfg.num_experts_per_token if experts else 0)


def chain_us(plan, what, experts, rows, cluster):
    """A layer of what scripts/bench_launch.py runs, as its kernel runs it."""
    program = chain_program(plan, what, experts, rows, cluster, LAYERS)
    grid = program.grid
    phases = []
    for (kind, _), phase in zip(program.weights, program.schedule.phases):
        k, units = program.kinds[kind], phase.units
        does = (ROUNDS[k.round],) if isinstance(k, Mix) else ("kda_head",) if isinstance(k, lk.Kda) else ()
        does = ("mix_out",) if isinstance(k, lk.Product) and k.norm else does
        does = ("choose", "expert_up") if what == "layer" and isinstance(k, lk.ExpertUp) else does
        steps = 2 * k.groups if k.is_chosen else getattr(k, "steps", 0)
        if k.is_chosen:
            count = experts * k.pairs * k.parts if isinstance(k, lk.ExpertUp) else len(units)
            units = (experts * k.expert_leaves * leaf_bytes(k.groups) // count,) * count
        phases.append(dataclasses.replace(phase, units=units, steps=steps, does=does))
    spans = timeline.simulate(Schedule(grid, rows, tuple(phases), deal(phases, grid))).spans
    end = lambda layer: max(span.end for span in spans if phases[span.phase].layer == layer)
    first = phases[0].layer
    return (end(first + LAYERS - 1) - end(first + 1)) / (LAYERS - 2)


def main():
    whole = build_plan(K3Config.from_json(RELEASED_FOLDER), 16)
    plan = dataclasses.replace(whole, ops=tuple(op for op in whole.ops if op.layer is None or op.layer < LAYERS))
    for change, what in CHANGES.items():
        row = [us_a_layer(plan, *case, kb * 1024, **what) for case in CASES.values() for kb in (160, 340)]
        print(f"{change:18}" + "".join(f"{us:8.1f}" for us in row))
    for what, experts, rows in CHAINS:
        found = {c: chain_us(whole, what, experts, rows, c) for c in BLOCKS if c > 1 or not experts}
        print(f"{what}, {experts} experts, {rows} rows: " + ", ".join(f"{us:.1f} in clusters of {c}" for c, us in found.items()))


if __name__ == "__main__":
    main()
