"""What a step of the released model should take on machines that nobody here has run it on: a projection, term by term, as a range.

Bytes come from the tables, what a GPU takes beyond them from a measured step of one rank, what crosses GPUs from measured exchanges between
two of them and from published latencies. Every number that is not computed stands in data/projection, with its source.
"""
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import linear_regression

from ..config import RELEASED_FOLDER, K3Config
from ..emit import layout_of
from ..errors import ConfigError
from ..plan import Op, Plan, build_plan
from ..tables import tables_of
from .rank_moves import part_bytes
from .step_bytes import StepBytes

FOLDER = Path(__file__).resolve().parents[1] / "data/projection"
GPU, TPS = "GB300", (8, 16)


@dataclass(frozen=True)
class Term:
    """One part of a step, in milliseconds: at least and at most, and where that comes from."""

    name: str
    low: float
    high: float
    why: str


@dataclass(frozen=True)
class Projection:
    """A step of `rows` rows of `sequences` sequences over `tp` ranks."""

    tp: int
    gpu: str
    rows: int
    sequences: int
    context: int
    kv_cache_dtype: str
    experts: float
    terms: tuple[Term, ...]

    @property
    def ms(self) -> tuple[float, float]:
        return sum(t.low for t in self.terms), sum(t.high for t in self.terms)

    @property
    def tokens_a_second(self) -> tuple[float, float]:
        """With one token a sequence and step, of the slowest and of the fastest step. Drafts multiply it by their acceptance length."""
        low, high = self.ms
        return 1e3 * self.sequences / high, 1e3 * self.sequences / low


@cache
def read(name: str) -> dict:
    """"measured" or "published"."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def check_model(cfg: K3Config) -> None:
    """Raises ConfigError where the measured steps are of another model than `cfg`."""
    released = K3Config.from_json(RELEASED_FOLDER).dims()
    if bad := [name for name, size in cfg.dims().items() if released[name] != size]:
        raise ConfigError(f"{bad[0]}: found {cfg.dims()[bad[0]]}, the steps that were measured have {released[bad[0]]}", "project the released model, kimi-k3")


def step_floor(plan: Plan, measured: dict) -> float:
    """Bytes that one rank must read for a step of `plan` like a measured one."""
    experts = dict.fromkeys(range(plan.cfg.num_hidden_layers), measured["distinct_experts"])
    return StepBytes(plan, measured["kv_cache_dtype"], measured["sequences"], measured["sequences"] * measured["context"], experts).floor()


@cache
def exchange() -> tuple[float, float]:
    """(microseconds of an exchange inside a kernel before bytes count, bytes a microsecond that a rank receives): the line through the measured ones."""
    found = read("measured")["exchanges"]
    slope, start = linear_regression([e["bytes"] for e in found["times"]], [e["us"] for e in found["times"]])
    return start, 1 / slope


def received(plan: Plan, rows: int) -> list[int]:
    """Bytes that a rank receives in each hop of a step of up to `rows` rows, at most DECODE_ROWS."""
    tables = tables_of(plan)
    layouts = [[layout_of(m, plan, tables, rows) for m in op.stage.moves] for op in hops(plan)]
    return [sum((at.ranks - 1) * part_bytes(at) for at in op) for op in layouts]


def hops(plan: Plan) -> list[Op]:
    return [op for op in plan.ops if op.stage.moves]


@cache
def released_ops(tp: int) -> int:
    """Operations of a step that was measured."""
    return len(build_plan(K3Config.from_json(RELEASED_FOLDER), tp).ops)


def project(plan: Plan, measured: dict, gpu: str = GPU, like: dict | None = None) -> Projection:
    """A step of `plan` like `measured` on another GPU.

    Args:
        measured: an entry of read("measured")["steps"].
        like: the entry that says what a GPU takes beyond bytes; by default the same one.
    """
    source, like = read("measured"), like or measured
    its, theirs = (read("published")["gpus"][name] for name in (gpu, source["gpu"]))
    reached = like["ceiling_tb_s"] / theirs["tb_s"]
    count = step_floor(plan, measured)
    bytes_ms = count / (its["tb_s"] * reached) / 1e9
    # Beyond bytes: either it shrinks with them, as waiting for memory does, or it stays with every operation, as starting kernels does.
    ratio, beyond = like["ms"] / like["floor_ms"], like["ms"] - like["floor_ms"]
    shrinks, stays = bytes_ms * (ratio - 1), beyond * len(plan.ops) / released_ops(like["tp"])
    terms = [Term(f"{count / 1e9:.2f} GB at {its['tb_s'] * reached:.2f} TB/s", bytes_ms, bytes_ms,
                  f"{its['tb_s']:g} TB/s by {its['source']}, of which {reached:.0%}: {like['ceiling_tb_s']} of {theirs['tb_s']:g} was measured on {source['gpu']}"),
             Term("on the GPU beyond bytes", min(shrinks, stays), max(shrinks, stays),
                  f"measured on {source['gpu']} at commit {source['commit'][:7]}: {ratio:.2f} x the bytes' time, or the {beyond:.2f} ms of {released_ops(like['tp']):,} operations")]
    if hops(plan):
        terms.append(_hops(plan, measured["rows"], its))
    return Projection(plan.tp, gpu, measured["rows"], measured["sequences"], measured["context"], measured["kv_cache_dtype"], measured["distinct_experts"], tuple(terms))


def _hops(plan: Plan, rows: int, gpu: dict) -> Term:
    """At least what exchanges of their bytes took between two GPUs, were the rate to grow with the links; at most that rate, and what others have published."""
    found, (start, rate) = read("measured")["exchanges"], exchange()
    links = gpu["link_gb_s"] / read("published")["gpus"][found["gpu"]]["link_gb_s"]
    count, hop = len(hops(plan)), min(read("published")["hops"], key=lambda h: abs(h["rows"] - rows))
    low, high = (start + sum(received(plan, rows)) / count / (rate * times) for times in (links, 1))
    high = max(high, hop["high_us"])
    return Term(f"{count} hops at {low:.1f} to {high:.1f} µs", count * low / 1e3, count * high / 1e3,
                f"measured between {found['ranks']} {found['gpu']} at commit {found['commit'][:7]}: {start:.1f} µs and {rate / 1e3:.0f} GB/s, which links of "
                f"{gpu['link_gb_s']} GB/s by {gpu['source']} may make {links:g} x that; at most that rate, or {hop['high']}")


def text(cfg: K3Config, tp: int | None = None) -> str:
    """Every measured kind of step, projected over `tp` ranks of GPU, by default over each of TPS. Raises ConfigError, as `check_model` and `build_plan`."""
    check_model(cfg)
    plans = [build_plan(cfg, n) for n in ([tp] if tp else TPS)]
    parts = [f"A projection: nothing here was run on {GPU}. Ranks of one NVLink domain, no drafts; a verify step gives its acceptance length\n"
             "in tokens. In its times on a GPU the measured step has the exchanges looped back to one rank, so a little is counted twice.\n"]
    why = {}
    for p in (project(plan, m) for plan in plans for m in read("measured")["steps"]):
        low, high = p.ms
        slow, fast = p.tokens_a_second
        parts.append(f"{p.tp} ranks, {p.rows} row{'s' * (p.rows > 1)} of {p.sequences} sequence{'s' * (p.sequences > 1)}, {p.context:,} tokens each in a "
                     f"{p.kv_cache_dtype} cache, {p.experts:g} experts a layer\n")
        for t in p.terms:
            number = why.setdefault(t.why, len(why) + 1)
            parts.append(f"  {t.low:6.2f} to {t.high:6.2f} ms  {t.name} [{number}]\n")
        parts.append(f"  {low:6.2f} to {high:6.2f} ms  a step: {slow:,.0f} to {fast:,.0f} tokens a second" + " times the acceptance length" * (p.rows > p.sequences) + "\n")
        parts += [f"  {o['ms']:9.2f}        ms  published of others: {o['what']}\n" for o in read("published")["others"] if (o["tp"], o["rows"]) == (p.tp, p.rows)]
        parts.append("\n")
    return "".join(parts + [f"[{number}] {reason}\n" for reason, number in why.items()])
