"""What `k3cuda plan --timeline` prints and draws: the predicted course of the step in one launch."""
import numpy as np

from ..bench.bars import Bar, picture
from ..dataflow import distinct_experts
from ..phases import ARRANGEMENTS
from ..schedule import build
from ..timeline import Timeline, floor_us, simulate
from .bench_trace import PERIOD

TB_S = 4.48                 # what one H200 reads: docs/megakernel.md


def report(plan, rows: int, context: int, experts: float | None) -> tuple[str, str]:
    """(text, SVG) of the fastest arrangement: the phases of one layer of each kind in the middle of the model, and a picture of PERIOD layers."""
    experts = distinct_experts(plan.cfg, rows) if experts is None else experts
    tried = {}
    for name, how in ARRANGEMENTS.items():
        schedule = build(plan, rows, arrangement=how, experts=experts, context=context)
        tried[name] = schedule, simulate(schedule, TB_S)
    best = min(tried, key=lambda name: tried[name][1].us)
    schedule, timeline = tried[best]
    lines = [f"A prediction, not a measurement: {plan.cfg.num_hidden_layers} layers on one of {plan.tp} ranks, {rows} rows at context {context}, {experts:.1f} experts a layer, "
             f"{schedule.grid.sms} blocks, {TB_S} TB/s, hops of no time.", "", f"{'arrangement':22}{'ms':>8}{'x floor':>9}"]
    lines += [f"{name:22}{t.us / 1e3:8.3f}{t.ratio(TB_S):9.2f}{'  shown' if name == best else ''}" for name, (_, t) in tried.items()]
    lines += [f"{'floor':22}{floor_us(timeline.nbytes, TB_S) / 1e3:8.3f}{1:9.2f}"]
    middle = plan.cfg.num_hidden_layers // 2
    layers = range(middle, min(middle + PERIOD, plan.cfg.num_hidden_layers))
    for layer in dict.fromkeys(next(i for i in layers if plan.cfg.is_kda(i) == plan.cfg.is_kda(k)) for k in layers):
        lines += ["", f"layer {layer}: microseconds since it began", f"{'phase':12}{'begins':>8}{'ends':>8}{'last byte':>11}{'MB':>8}{'KB read':>9}"]
        shown = [s for s in timeline.spans if schedule.phases[s.phase].layer == layer]
        zero = timeline.spans[shown[0].phase - 1].end if shown[0].phase else 0.0
        for span in shown:
            phase = schedule.phases[span.phase]
            lines.append(f"{phase.name:12}{span.ready - zero:8.2f}{span.end - zero:8.2f}{span.landed - zero:11.2f}{sum(phase.units) / 1e6:8.1f}"
                         f"{sum(w.block_bytes for w in phase.waits) / 1024:9.1f}")
    return "\n".join(lines) + "\n", _picture(schedule, timeline, layers, lines[0])


def _picture(schedule, timeline: Timeline, layers: range, title: str) -> str:
    """A line a block: a bar from where a phase may begin to where the block ends its part."""
    shown = [s for s in timeline.spans if schedule.phases[s.phase].layer in layers]
    bars = (Bar(int(block), span.ready, float(timeline.ends[span.phase][block]), schedule.phases[span.phase].name)
            for span in shown for block in np.flatnonzero(~np.isnan(timeline.ends[span.phase])))
    return picture(bars, schedule.grid.sms, title, f"layers {layers[0]} to {layers[-1]}, {shown[-1].end - shown[0].ready:.1f} microseconds, a line a block")
