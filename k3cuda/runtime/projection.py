"""What a step of the released model should take on machines that nobody here has run it on: a projection, term by term, as a range.

Bytes come from the tables, what a GPU takes beyond them from a measured step of one rank, what crosses GPUs from published latencies. Every
number that is not computed stands in data/projection, with its source.
"""
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..config import RELEASED_FOLDER, K3Config
from ..errors import ConfigError
from ..plan import Plan, build_plan
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
    # Beyond bytes: either it shrinks with them, as waiting for memory does, or it stays, as starting kernels does.
    shrinks, stays = bytes_ms * (like["ms"] / like["floor_ms"] - 1), like["ms"] - like["floor_ms"]
    ratio = like["ms"] / like["floor_ms"]
    terms = [Term(f"{count / 1e9:.2f} GB at {its['tb_s'] * reached:.2f} TB/s", bytes_ms, bytes_ms,
                  f"{its['tb_s']:g} TB/s by {its['source']}, of which {reached:.0%}: {like['ceiling_tb_s']} of {theirs['tb_s']:g} was measured on {source['gpu']}"),
             Term("on the GPU beyond bytes", min(shrinks, stays), max(shrinks, stays),
                  f"measured on {source['gpu']} at commit {source['commit'][:7]}: {ratio:.2f} x the bytes' time, or the {stays:.2f} ms themselves")]
    hops = sum(bool(op.stage.moves) for op in plan.ops)
    if hops:
        hop = min(read("published")["hops"], key=lambda h: abs(h["rows"] - measured["rows"]))
        terms.append(Term(f"{hops} hops at {hop['low_us']} to {hop['high_us']} µs", hops * hop["low_us"] / 1e3, hops * hop["high_us"] / 1e3,
                          f"{hop['low']}; {hop['high']}"))
    return Projection(plan.tp, gpu, measured["rows"], measured["sequences"], measured["context"], measured["kv_cache_dtype"], measured["distinct_experts"], tuple(terms))


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
