"""`k3cuda bench`: times against the bytes that must be read."""
import click

from ..buffers import KV_BYTES
from ..config import DECODE_ROWS, MAX_ROWS
from ..emit_sizes import ROW_BUCKETS
from ..errors import OutOfMemory, UsageError
from ..runtime.cuda_driver import require_gpu
from ..runtime.machine import LATENCY_SPECIALIZED, ON_GPU, STANDARD
from . import options
from .bench_trace import Layers, StepTrace
from .group import Group
from .model_argument import config_of
from .output import Result, say

LONGEST_CONTEXT = 1 << 20
ONE_SEQUENCE = 8   # rows up to here are those of one sequence that verifies drafts
LONGEST_HOP = 1e6  # microseconds


class Counts(click.ParamType):
    """Integers from 1 to `most` with commas between them; `K` stands for 1,024."""

    name = "list"

    def __init__(self, most: int):
        self.most = most

    def convert(self, value, param, ctx):
        if not isinstance(value, str):
            return value
        try:
            numbers = [int(part[:-1]) * 1024 if part[-1:] in "kK" and part[:-1] else int(part) for part in value.split(",")]
        except ValueError:
            numbers = []
        if not numbers or min(numbers) < 1 or max(numbers) > self.most:
            self.fail(f"found {value!r}, wanted integers from 1 to {self.most} with commas between them", param, ctx)
        return numbers


class Delays(click.ParamType):
    """Microseconds with commas between them."""

    name = "list"

    def convert(self, value, param, ctx):
        if not isinstance(value, str):
            return value
        try:
            numbers = [float(part) for part in value.split(",")]
        except ValueError:
            numbers = [-1.0]
        if not all(0 <= n <= LONGEST_HOP for n in numbers):
            self.fail(f"found {value!r}, wanted microseconds with commas between them", param, ctx)
        return numbers


@click.group(cls=Group)
def bench():
    """Measure this machine. Every ratio is to the read ceiling of the same run."""


_FLAGS = (
    options.flag("--tp", type=click.IntRange(min=1), default=16, show_default=True, metavar="N", aliases=options.TP_ALIASES, help="Ranks the model is cut into."),
    options.flag("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="The one rank that runs; its collectives are looped back."),
    options.flag("--layers", type=click.IntRange(min=1), metavar="N", help="Run the first N layers only.  [default: all]"),
    options.flag("--rows", type=Counts(DECODE_ROWS), default="1,8", show_default=True, help="Rows of a step."),
    options.flag("--sequences", type=click.IntRange(1, DECODE_ROWS), metavar="N",
                 help=f"Sequences that the rows belong to.  [default: 1 for up to {ONE_SEQUENCE} rows, else one for each]"),
    options.flag("--context", type=Counts(LONGEST_CONTEXT), default="1", show_default=True, help="Tokens of every sequence, the step's own included."),
    options.flag("--kv-cache-dtype", type=click.Choice(list(KV_BYTES)), default="fp8_e4m3", show_default=True, metavar="TYPE",
                 help=f"Format of the MLA cache: {' or '.join(KV_BYTES)}."),
    options.flag("--experts", type=Counts(1 << 16), metavar="LIST", help="Force the rows to choose so many distinct experts.  [default: the router's choice]"),
    options.flag("--hop-delay-us", type=Delays(), default="0", show_default=True, metavar="LIST", help="Let what a collective brings arrive so much later."),
    options.OUTPUT)


@bench.command(cls=options.Command)
@options.model(default="kimi-k3")
@options.flags(*_FLAGS, options.flag("--stages", type=Counts(DECODE_ROWS), metavar="ROWS", help="Time every stage as well, in steps of so many rows."),
               options.flag("--decode-backend", default=STANDARD, show_default=True, metavar="NAME",
                            help=f"What runs the steps: {' or '.join(ON_GPU)}, which does where it can."),
               options.flag("--trace", multiple=True, type=click.Path(dir_okay=False), metavar="FILE",
                            help=f"Also record one more step: FILE.json, a Chrome trace; FILE.svg, a picture of a {LATENCY_SPECIALIZED} step. May be repeated."),
               options.flag("--trace-layers", type=Layers(), metavar="FIRST-LAST", help="Layers that --trace records, or all.  [default: four in the middle]"))
def step(stages, output, **what):
    """Time decode steps of one true rank, commit included, and check them. Weights are random and made on the device; MODEL gives only the sizes.

    Prints one JSON document: an object for each combination of rows, context, experts and delay.
    """
    def each(bench, walk):
        found = bench.step(walk)
        say(f"{found['rows']:3} rows of {found['sequences']:2}, context {found['context']:7}: {found['ms']:8.3f} ms, "
            f"{found['ratio_to_floor']:.2f} x the floor, {found['distinct_experts']} experts a layer" + (f"; {STANDARD}: {found['declined']}" if found["declined"] else ""))
        return found, _stages(bench) if bench.rows in (stages or ()) else None

    _run(output, each, **what)


@bench.command(cls=options.Command)
@options.model(default="kimi-k3")
@options.flags(*_FLAGS, options.flag("--stage", "names", multiple=True, metavar="NAME", help="This stage only; may be repeated."))
def stage(names, output, **what):
    """Time every stage of a decode step of one true rank: all its layers in turn, each with weights of its own.

    Prints one JSON document: for each combination of rows, context, experts and delay a list of stages.
    """
    from ..stages import BY_NAME

    if unknown := [name for name in names if name not in BY_NAME or BY_NAME[name].moves]:
        raise UsageError(f"--stage: found {unknown[0]!r}, wanted one of {', '.join(n for n, s in BY_NAME.items() if not s.moves)}")
    _run(output, lambda bench, walk: (None, _stages(bench, names)), **what)


@bench.command(cls=options.Command)
@options.model(default="kimi-k3")
@options.flags(*(f for f in _FLAGS if f[0][0] in ("--tp", "--rank", "--layers", "--kv-cache-dtype", "--experts", "--output")),
               options.flag("--prompt", type=Counts(LONGEST_CONTEXT), default="8K", show_default=True, metavar="LIST", help="Tokens of the prompt."),
               options.flag("--stages", is_flag=True, help="Time every stage of a step in the middle of the prompt as well."))
def prefill(model, tp, rank, layers, kv_cache_dtype, experts, prompt, stages, output):
    """Time whole prompts of one sequence on one true rank, commits included, and check them.

    Prints one JSON document: an object for each prompt and number of experts.
    """
    cfg = config_of(model, layers)
    check_rank(tp, rank)
    _check_experts(cfg, experts, MAX_ROWS)
    require_gpu()
    from ..emit import Probes
    from ..runtime.cuda_bench import StepBench
    from ..runtime.cuda_prefill import prefill
    from ..runtime.surroundings import surroundings

    result, bench = Result(output), StepBench(cfg, tp, rank, kv_cache_dtype)
    probes = [Probes(n) for n in experts or (0,)]
    bench.compile((), probes, more=[b for b in ROW_BUCKETS if b > DECODE_ROWS])
    document = {"prompts": [], "stages": []}
    for probe in probes:
        for tokens in prompt:
            bench.open(1, tokens, probe)
            found = prefill(bench, tokens)
            document["prompts"].append(found)
            say(f"{tokens} tokens, {found['distinct_experts']} experts a layer: {found['ms']:.1f} ms, {found['rows_a_second']:.0f} tokens a second, "
                f"{found['ratio_to_floor']:.2f} x the floor")
            document["stages"] += [_stages(bench)] if stages else []
    result.document(document | {"model": model, "layers": cfg.num_hidden_layers} | surroundings(bench.device), indent=1)
    result.close()


def _stages(bench, names=()) -> dict:
    found = bench.stages(names)
    say(f"{bench.rows} rows of {bench.sequences}, context {bench.context}: stage, us an operation, GB/s, % of the read ceiling")
    for s in found:
        say(f"  {s['stage']:12} {s['us']:9.2f} {s['gb_s']:7.0f} {100 * s['of_ceiling']:5.1f}{' (fits a cache)' if s['fits_cache'] and s['mb'] else ''}")
    be = bench.backend
    return {"decode_backend": STANDARD, "rows": bench.rows, "sequences": bench.sequences, "tp": bench.tp, "rank": bench.rank, "context": bench.context,
            "kv_cache_dtype": be.kv_cache_dtype, "ceiling_tb_s": round(bench.ceiling / 1e12, 3), "forced_experts": be.probes.forced_experts, "stages": found}


def _run(output, each, model, tp, rank, layers, rows, sequences, context, kv_cache_dtype, experts, hop_delay_us, decode_backend=STANDARD, trace=(),
         trace_layers=None) -> None:
    """Calls `each(bench, walk)` for every combination; its (step, stages) go into the document."""
    from ..runtime.open_model import choice

    decode_backend = choice("--decode-backend", decode_backend, ON_GPU)
    cfg = config_of(model, layers)
    check_rank(tp, rank)
    shapes = [_shared(n, sequences) for n in rows]
    top_k = cfg.num_experts_per_token
    _check_experts(cfg, experts, max(rows))
    traced = StepTrace(trace, trace_layers, cfg.num_hidden_layers, decode_backend, len(rows) * len(context), bool(experts) or any(hop_delay_us))
    require_gpu()
    from ..emit import Probes
    from ..runtime.cuda_bench import StepBench
    from ..runtime.surroundings import surroundings

    result, bench = Result(output), StepBench(cfg, tp, rank, kv_cache_dtype, specialized=decode_backend == LATENCY_SPECIALIZED)
    probes = [Probes(n, round(us * bench.cycles_a_us)) for n in experts or (0,) for us in hop_delay_us]
    bench.compile(rows, probes + traced.probes)
    document = {"steps": [], "stages": [], "skipped": []}
    for probe in probes:
        for tokens in context:
            _context(bench, probe, tokens, shapes, top_k, each, document)
    if traced and document["steps"]:
        traced.write(bench, *shapes[0], max(context[0], shapes[0][1]))
    result.document(document | {"model": model, "layers": cfg.num_hidden_layers} | surroundings(bench.device), indent=1)
    result.close()


def check_rank(tp: int, rank: int) -> None:
    if rank >= tp:
        raise UsageError(f"--rank: found {rank}, wanted 0 to {tp - 1}", "ranks are counted from 0")


def _check_experts(cfg, experts, rows: int) -> None:
    top_k = cfg.num_experts_per_token
    if bad := [n for n in experts or () if not top_k <= n <= min(cfg.num_experts, rows * top_k)]:
        raise UsageError(f"--experts: found {bad[0]}, wanted {top_k} to {min(cfg.num_experts, rows * top_k)}: "
                         f"a row chooses {top_k} of {cfg.num_experts}, and there are {rows} rows at most")


def _context(bench, probe, tokens, shapes, top_k, each, document) -> None:
    """All row counts of one context, as far as their caches fit."""
    fit = [(s, each_of) for s, each_of in shapes if s * each_of * top_k >= probe.forced_experts]
    while fit:
        try:
            bench.open(max(s for s, _ in fit), max(tokens, max(n for _, n in fit)), probe)
            break
        except OutOfMemory as e:
            widest = max(s for s, _ in fit)
            for s, n in [shape for shape in fit if shape[0] == widest]:
                fit.remove((s, n))
                document["skipped"].append({"rows": s * n, "sequences": s, "context": tokens, "reason": e.message})
                say(f"{s * n:3} rows of {s:2}, context {tokens:7}: skipped, {e.message}")
    walked = 0 if probe.forced_experts or probe.hop_cycles else max((s * n for s, n in fit if s * n <= ONE_SEQUENCE), default=0)
    for s, n in fit:
        bench.place(s, n, max(tokens, n))
        step, stages = each(bench, s * n == walked)
        document["steps"] += [step] if step else []
        document["stages"] += [stages] if stages else []


def _shared(rows: int, sequences: int | None) -> tuple[int, int]:
    """(sequences, rows of each) of a step."""
    if sequences is None:
        return (1, rows) if rows <= ONE_SEQUENCE else (rows, 1)
    if rows % sequences:
        raise UsageError(f"--sequences: found {sequences}, which does not divide {rows} rows")
    return sequences, rows // sequences
