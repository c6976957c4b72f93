"""What `k3cuda plan --timeline` prints and draws: the predicted course of the step in one launch."""
import html

import numpy as np

from ..dataflow import distinct_experts
from ..phases import ARRANGEMENTS
from ..schedule import build
from ..timeline import Timeline, floor_us, simulate

PERIOD = 4                  # three layers of KDA and one of latent attention
TB_S = 4.48                 # what one H200 reads: docs/megakernel.md
_PIXELS, _BLOCK = 1200, 4   # of a picture: its width, and the height of one block's line
_HUES = 47                  # degrees between the colours of neighbouring phases


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
    """A line a block, time to the right: a bar from where a phase may begin to where the block ends its part; blank is waiting."""
    shown = [s for s in timeline.spans if schedule.phases[s.phase].layer in layers]
    begin, end = shown[0].ready, shown[-1].end
    x = lambda t: round((t - begin) / (end - begin) * _PIXELS, 1)
    names = list(dict.fromkeys(schedule.phases[s.phase].name for s in shown))
    colour = {name: f"hsl({i * _HUES % 360},60%,55%)" for i, name in enumerate(names)}
    height = schedule.grid.sms * _BLOCK
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{_PIXELS}" height="{height + 60}" font-family="sans-serif" font-size="12">',
           f'<text x="0" y="14">{html.escape(title)}</text>',
           f'<text x="0" y="{height + 36}">layers {layers[0]} to {layers[-1]}, {end - begin:.1f} microseconds, a line a block</text>']
    for span in shown:
        name = schedule.phases[span.phase].name
        for block in np.flatnonzero(~np.isnan(timeline.ends[span.phase])):
            width = x(timeline.ends[span.phase][block]) - x(span.ready)
            out.append(f'<rect x="{x(span.ready)}" y="{20 + block * _BLOCK}" width="{max(width, 0.2):.1f}" height="{_BLOCK - 1}" fill="{colour[name]}"/>')
    for i, name in enumerate(names):
        out.append(f'<text x="{i * 100}" y="{height + 54}" fill="{colour[name]}">{html.escape(name)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"
