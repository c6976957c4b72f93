"""Charts as SVG text: points, lines and bars on two axes, nothing else. The same input gives the same bytes."""
import math
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 860, 500
LEFT, RIGHT, TOP, BOTTOM = 78, 210, 46, 58   # margins; the legend is in the right one
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")   # told apart by colour-blind readers too (Okabe and Ito)
TEXT, SMALL = 12, 10   # px


@dataclass(frozen=True)
class Series:
    """Points with one look.

    Attributes:
        points: (x, y) in the units of the axes. label: in the legend; "" leaves it out. colour: index into COLOURS.
        line, dashed: whether lines join the points. radius: of a marker, 0 for none. names: text beside each point.
        bar: (which, of how many) bars stand side by side at an x, instead of points.
    """

    points: tuple[tuple[float, float], ...]
    label: str = ""
    colour: int = 0
    line: bool = True
    dashed: bool = False
    radius: float = 3
    names: tuple[str, ...] = ()
    bar: tuple[int, int] | None = None


@dataclass(frozen=True)
class Axis:
    """One axis. `ticks`: where numbers stand; None: round ones. `low`, `high`: its ends; None: round numbers around the data."""

    label: str
    log: bool = False
    ticks: tuple[float, ...] | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Chart:
    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]

    def svg(self) -> str:
        """The whole file."""
        xs, ys = ([p[i] for s in self.series for p in s.points] for i in (0, 1))
        to_x, x_ticks = _scale(self.x, xs, LEFT, WIDTH - RIGHT)
        to_y, y_ticks = _scale(self.y, ys, HEIGHT - BOTTOM, TOP)
        names = []   # where names stand already: (left, right, base line)
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="{TEXT}">',
            f"<title>{escape(self.title)}</title>", f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
            _text(LEFT, TOP - 20, self.title, size=15),
            *self._axes(to_x, x_ticks, to_y, y_ticks), *(line for s in self.series for line in self._drawn(s, to_x, to_y, names)), *self._legend(), "</svg>", ""])

    def _axes(self, to_x, x_ticks, to_y, y_ticks):
        left, right, top, bottom = LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM
        for value in x_ticks:
            yield f'<path d="M{_n(to_x(value))} {top}V{bottom}" stroke="#e0e0e0"/>'
            yield _text(to_x(value), bottom + 18, _number(value), anchor="middle")
        for value in y_ticks:
            yield f'<path d="M{left} {_n(to_y(value))}H{right}" stroke="#e0e0e0"/>'
            yield _text(left - 8, to_y(value) + 4, _number(value), anchor="end")
        yield f'<path d="M{left} {top}V{bottom}H{right}" stroke="#404040" fill="none"/>'
        yield _text((left + right) / 2, HEIGHT - 16, self.x.label, anchor="middle")
        yield f'<text transform="translate(20 {_n((top + bottom) / 2)}) rotate(-90)" text-anchor="middle">{escape(self.y.label)}</text>'

    def _drawn(self, s: Series, to_x, to_y, taken: list):
        colour, places = COLOURS[s.colour % len(COLOURS)], [(to_x(x), to_y(y)) for x, y in s.points]
        if s.bar is not None:
            which, count = s.bar
            wide = 0.8 * (to_x(1) - to_x(0)) / count
            for x, y in places:
                yield f'<rect x="{_n(x + (which - count / 2) * wide)}" y="{_n(y)}" width="{_n(wide)}" height="{_n(HEIGHT - BOTTOM - y)}" fill="{colour}"/>'
            return
        if s.line and len(places) > 1:
            dash = ' stroke-dasharray="6 4"' if s.dashed else ""
            yield f'<path d="M{"L".join(f"{_n(x)} {_n(y)}" for x, y in places)}" stroke="{colour}" stroke-width="2" fill="none"{dash}/>'
        for x, y in places:
            if s.radius:
                yield f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(s.radius)}" fill="{colour}"/>'
        for (x, y), name in zip(places, s.names):
            yield _text(*_free(x + s.radius + 3, y + 3, name, taken), name, size=SMALL)

    def _legend(self):
        for i, s in enumerate(s for s in self.series if s.label):
            y, x, colour = TOP + 8 + 20 * i, WIDTH - RIGHT + 16, COLOURS[s.colour % len(COLOURS)]
            dash = ' stroke-dasharray="6 4"' if s.dashed else ""
            if s.bar is None and s.line:
                yield f'<path d="M{x} {y}h24" stroke="{colour}" stroke-width="2"{dash}/>'
            else:
                yield f'<circle cx="{x + 12}" cy="{y}" r="5" fill="{colour}"/>'
            yield _text(x + 32, y + 4, s.label)


def _free(x: float, y: float, text: str, taken: list) -> tuple[float, float]:
    """A place for a name near (x, y) where none is yet; it is taken then."""
    wide = 0.6 * SMALL * len(text)
    if x + wide > WIDTH - RIGHT:   # it would run into the legend: to the left of its point
        x -= wide + 14
    for step in range(24):
        at = y + (step + 1) // 2 * (SMALL if step % 2 else -SMALL)
        if all(x + wide < a or b < x or abs(at - other) >= SMALL for a, b, other in taken):
            break
    taken.append((x, x + wide, at))
    return x, at


def _scale(axis: Axis, values: list[float], start: float, end: float):
    """(value -> pixel, ticks) of an axis between two pixels."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if axis.log:
        low, high = (_down(low) if axis.low is None else axis.low), (_up(high) if axis.high is None else axis.high)
        low, high = (low / 2, high * 2) if low == high else (low, high)
        ticks = axis.ticks or tuple(t for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1) for m in (1, 2, 5)
                                    if low <= (t := m * 10.0 ** e) * 1.0000001 and t <= high * 1.0000001 and (m == 1 or high / low < 2000))
        return lambda v: start + (end - start) * math.log(v / low) / math.log(high / low), ticks
    low, high = (min(low, 0.0) if axis.low is None else axis.low), high if axis.high is None else axis.high
    step = _up((high - low or 1) / 8)
    high = low + step * math.ceil((high - low) / step - 1e-9) if axis.high is None else high
    high = low + step if high <= low else high
    ticks = axis.ticks or tuple(low + step * i for i in range(round((high - low) / step) + 1))
    return lambda v: start + (end - start) * (v - low) / (high - low), ticks


def _up(value: float) -> float:
    """The next of 1, 2, 5, 10 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value) + 1e-9)
    return next(m * power for m in (1, 2, 5, 10) if m * power >= value * (1 - 1e-9))


def _down(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value) + 1e-9)
    return next(m * power for m in (5, 2, 1) if m * power <= value * (1 + 1e-9))


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = TEXT) -> str:
    return f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _number(value: float) -> str:
    return f"{value:,.6g}" if abs(value) < 1e6 else f"{value:g}"
