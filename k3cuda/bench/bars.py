"""Bars on lines, time to the right, as SVG text; above them a curve, if there is one. The same input gives the same bytes."""
import html
from dataclasses import dataclass
from typing import Iterable, Sequence

WIDTH, LINE = 1200, 4       # of a picture: its width, and the height of one line
HUES = 47                   # degrees between the colours of neighbouring names
CURVE, TOP, GAP = 120, 20, 24   # height of a curve; where the first line of bars begins without one, and what is between them
NAMES = 8                   # side by side


@dataclass(frozen=True)
class Bar:
    """On line `line`, from `begin` to `end`; bars of a name have one colour."""

    line: int
    begin: float
    end: float
    name: str


@dataclass(frozen=True)
class Curve:
    """`values` between neighbouring ones of `edges`, in the bars' unit of time. limit: a value that a dashed line shows."""

    label: str
    edges: Sequence[float]
    values: Sequence[float]
    limit: float


def picture(bars: Iterable[Bar], lines: int, title: str, note: str, curve: Curve | None = None) -> str:
    """The whole file, from the first begin to the last end; blank is waiting. `note`: below the bars, before the names in their colours."""
    bars = list(bars)
    begin, end = min(b.begin for b in bars), max(b.end for b in bars)
    x = lambda t: round((t - begin) / (end - begin) * WIDTH, 1)
    names = list(dict.fromkeys(b.name for b in bars))
    colour = {name: f"hsl({i * HUES % 360},60%,55%)" for i, name in enumerate(names)}
    top, height = TOP + (CURVE + GAP if curve else 0), lines * LINE
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top + height + 40 + 18 * (len(names) // NAMES)}" font-family="sans-serif" font-size="12">',
           f'<text x="0" y="14">{html.escape(title)}</text>', *(_curve(curve, x, begin, end) if curve else ()),
           f'<text x="0" y="{top + height + 16}">{html.escape(note)}</text>']
    for b in bars:
        out.append(f'<rect x="{x(b.begin)}" y="{top + b.line * LINE}" width="{max(x(b.end) - x(b.begin), 0.2):.1f}" height="{LINE - 1}" fill="{colour[b.name]}"/>')
    for i, name in enumerate(names):
        out.append(f'<text x="{i % NAMES * WIDTH // NAMES}" y="{top + height + 34 + 18 * (i // NAMES)}" fill="{colour[name]}">{html.escape(name)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def _curve(curve: Curve, x, begin: float, end: float):
    most, bottom = max(curve.limit, *curve.values), TOP + CURVE
    y = lambda v: round(bottom - v / most * CURVE, 1)
    steps = [(max(a, begin), min(b, end), v) for a, b, v in zip(curve.edges, curve.edges[1:], curve.values) if b > begin and a < end]
    yield f'<path d="M{x(steps[0][0])} {bottom}' + "".join(f"V{y(v)}H{x(b)}" for _, b, v in steps) + f'V{bottom}Z" fill="#9ecae1"/>'
    yield f'<path d="M0 {y(curve.limit)}H{WIDTH}" stroke="#555555" stroke-dasharray="4 4"/>'
    yield f'<text x="4" y="{bottom + 14}">{html.escape(curve.label)}</text>'
