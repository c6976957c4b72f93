"""What bounds the step in one launch, by the model of k3cuda/timeline.py: the table of docs/megakernel.md. Needs no GPU; takes a minute."""
import dataclasses

from k3cuda import timeline
from k3cuda.config import RELEASED_FOLDER, K3Config
from k3cuda.phases import ARRANGEMENTS, Grid
from k3cuda.plan import build_plan
from k3cuda.schedule import build

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


def main():
    plan = build_plan(K3Config.from_json(RELEASED_FOLDER), 16)
    plan = dataclasses.replace(plan, ops=tuple(op for op in plan.ops if op.layer is None or op.layer < LAYERS))
    for change, what in CHANGES.items():
        row = [us_a_layer(plan, *case, kb * 1024, **what) for case in CASES.values() for kb in (160, 340)]
        print(f"{change:18}" + "".join(f"{us:8.1f}" for us in row))


if __name__ == "__main__":
    main()
