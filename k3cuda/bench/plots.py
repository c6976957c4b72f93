"""Charts of what the benchmarks write: latency against concurrency, acceptance by position, and the roofline of a step."""
from ..errors import UsageError
from .svg import Axis, Chart, Series

_LEAST, _MOST = 1e-30, 1e30   # of any number that is drawn: far outside what a benchmark writes, far inside what an axis can be made of
_LATENCIES = (("tpot", "TPOT"), ("ttft", "TTFT"), ("e2el", "E2EL"))


def latency(documents: list[tuple[str, dict]]) -> Chart | None:
    """Of `bench serve`: the median and the 90th percentile at each number of requests at a time. None where there are none."""
    series, ticks, several = [], set(), len(documents) > 1
    for name, document in documents:
        runs = sorted((r for r in _listed(document, "runs") if r.get("max_concurrency")), key=lambda r: r["max_concurrency"])
        for i, (key, label) in enumerate(_LATENCIES):
            for which, short in (("median", "p50"), ("p90", "p90")):
                points = tuple((r["max_concurrency"], v) for r in runs if (v := r["requests"].get(f"{which}_{key}_ms")))
                if points:
                    ticks |= {x for x, _ in points}
                    series.append(Series(points, f"{name}: " * several + f"{label} {short}", len(series) // 2 if several else i, dashed=which == "p90"))
    if not series:
        return None
    return Chart("Latency against concurrency", Axis("requests at a time", True, tuple(sorted(ticks))), Axis("ms", True), tuple(series))


def acceptance(documents: list[tuple[str, dict]]) -> Chart | None:
    """Of any benchmark with drafts: the share of verify steps whose draft at each place stood."""
    found = [(name + place, r) for name, document in documents for place, r in _requests(document) if r.get("spec_decode_per_position_acceptance_rates")]
    if not found:
        return None
    series = tuple(Series(tuple((i + 1, rate) for i, rate in enumerate(r["spec_decode_per_position_acceptance_rates"])),
                          f"{name}: {r['spec_decode_acceptance_length']:.2f} a step", i, bar=(i, len(found))) for i, (name, r) in enumerate(found))
    if not all(1 <= r["spec_decode_acceptance_length"] <= _MOST for _, r in found):
        raise ValueError("spec_decode_acceptance_length: wanted numbers from 1")
    most = max(len(s.points) for s in series)
    return Chart("Acceptance by position", Axis("place of the draft", ticks=tuple(range(1, most + 1)), low=0.5, high=most + 0.5),
                 Axis("share of verify steps whose draft there stood", low=0.0, high=1.0), series)


def roofline(documents: list[tuple[str, dict]]) -> Chart | None:
    """Of `bench step`: the rate at which a step, and each stage of the step with the fewest rows, reads what it must read, below the read ceiling."""
    series, ceilings = [], []
    for name, document in documents:
        steps = [s for s in _listed(document, "steps") if s.get("floor_bytes") and s.get("ms")]
        ceilings += [s["ceiling_tb_s"] for s in steps]
        if steps:
            points = tuple((s["floor_bytes"] / 1e6, s["floor_bytes"] / s["ms"] / 1e9) for s in steps)
            series.append(Series(points, f"{name}: steps", 2 * len(series), line=False, radius=5, names=tuple(f"{s['rows']} x {_short(s['context'])}" for s in steps)))
        groups = sorted((g for g in _listed(document, "stages") if isinstance(g, dict) and g.get("stages")), key=lambda g: g["rows"])
        for g in groups[:1]:
            ceilings.append(g["ceiling_tb_s"])
            stages = [s for s in g["stages"] if s["mb"] and s["gb_s"]]
            series.append(Series(tuple((s["mb"], s["gb_s"] / 1e3) for s in stages), f"{name}: stages, {g['rows']} x {_short(g['context'])}", len(series), line=False,
                                 names=tuple(s["stage"] for s in stages)))
    if not series:
        return None
    xs = [x for s in series for x, _ in s.points]
    roof = Series(((min(xs), max(ceilings)), (max(xs), max(ceilings))), f"read ceiling, {max(ceilings):.2f} TB/s", 6, radius=0)
    return Chart("Roofline of a step: rows x context", Axis("MB that must be read", True), Axis("TB/s", True), (roof, *series))


KINDS = {"latency": latency, "acceptance": acceptance, "roofline": roofline}


def picture(documents: list[tuple[str, dict]], kind: str | None = None) -> str:
    """SVG of the first kind that there are numbers for, or of `kind`. `documents`: (name for the legend, what a benchmark wrote).

    Raises UsageError where there are no such numbers, or where they are none that a benchmark writes.
    """
    try:
        found = next((c for name, make in KINDS.items() if kind in (None, name) and (c := make(documents)) is not None), None)
        if found is not None:
            _check(found)
            return found.svg()
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as e:
        raise UsageError(f"no result of a benchmark: {type(e).__name__}: {e!s:.120}", "give what k3cuda bench wrote") from e
    raise UsageError(f"found no numbers for {kind or 'any plot'}", "latency needs --max-concurrency of bench serve, acceptance a draft model, roofline bench step")


def _check(found: Chart) -> None:
    """ValueError for a point that is on neither axis of the chart."""
    for axis, values in ((found.x, [x for s in found.series for x, _ in s.points]), (found.y, [y for s in found.series for _, y in s.points])):
        low, high = _LEAST if axis.log else axis.low or 0.0, _MOST if axis.high is None else axis.high
        for v in values:
            if isinstance(v, bool) or not low <= v <= high:   # nan is in no range; TypeError for what is no number
                raise ValueError(f"{axis.label}: found {v!r:.40}, wanted {low:g} to {high:g}")


def _listed(document: dict, name: str) -> list[dict]:
    found = document.get(name)
    return found if isinstance(found, list) else []


def _requests(document: dict):
    """(what it was, numbers of requests) of everything in a document that has some."""
    if isinstance(document.get("requests"), dict):
        yield "", document["requests"]
    for name, label, key in (("runs", " concurrency", "max_concurrency"), ("steps", " batch", "batch"), ("backends", "", "name")):
        for part in _listed(document, name):
            if isinstance(part.get("requests"), dict):
                yield f"{label} {part.get(key)}", part["requests"]


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)
