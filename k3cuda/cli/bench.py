"""`k3cuda bench`: times against the bytes that must be read."""
import subprocess
import sys
from pathlib import Path

import click

from .. import __version__
from ..buffers import KV_BYTES
from ..config import MAX_ROWS, PAGE_SIZE
from ..runtime.cuda_driver import require_gpu
from . import options
from .group import Group
from .output import Result, say

LONGEST_CONTEXT = 1 << 20
ONE_SEQUENCE = 8   # rows up to here are those of one sequence that verifies drafts


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


@click.group(cls=Group)
def bench():
    """Measure this machine. Every ratio is to the read ceiling of the same run."""


_RANK = (
    options.flag("--tp", type=click.IntRange(min=1), default=16, show_default=True, metavar="N", aliases=options.TP_ALIASES, help="Ranks the model is cut into."),
    options.flag("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="The one rank that runs; its collectives are looped back."),
    options.flag("--layers", type=click.IntRange(min=1), metavar="N", help="Run the first N layers only.  [default: all]"),
    options.flag("--rows", type=Counts(MAX_ROWS), default="1,8", show_default=True, help=f"Rows of a step: up to {ONE_SEQUENCE} belong to one sequence, more to one each."),
    options.flag("--context", type=Counts(LONGEST_CONTEXT), default="1", show_default=True, help="Tokens of every sequence, the step's own included."),
    options.flag("--kv-cache-dtype", type=click.Choice(list(KV_BYTES)), default="fp8_e4m3", show_default=True, metavar="TYPE",
                 help=f"Format of the MLA cache: {' or '.join(KV_BYTES)}."),
    options.OUTPUT)


@bench.command(cls=options.Command)
@options.model(default="kimi-k3")
@options.flags(*_RANK, options.flag("--stages", is_flag=True, help="Time every stage as well."))
def step(model, tp, rank, layers, rows, context, kv_cache_dtype, output, stages):
    """Time decode steps of one true rank, commit included. Weights are random and made on the device; MODEL gives only the sizes.

    Prints one JSON document: an object for each combination of rows and context.
    """
    cfg = options.config_of(model, layers)
    options.check_rank(tp, rank)
    require_gpu()
    from ..runtime.cuda_bench import StepBench
    from ..runtime.cuda_kernels import bucket_of, compile_buckets

    result = Result(output)
    slots = max(sequences for sequences, _ in map(_shared, rows))
    bench = StepBench(cfg, tp, rank, slots=slots, max_model_len=max(max(context), ONE_SEQUENCE) + PAGE_SIZE, kv_cache_dtype=kv_cache_dtype)
    compile_buckets(bench.backend.plan, {bucket_of(n) for n in rows}, bench.backend.kv_cache_dtype, bench.arch, sms=bench.backend.device.sms)
    steps, by_stage = [], []
    for tokens in context:
        for n in rows:
            sequences, rows_each = _shared(n)
            bench.place(sequences, rows_each, max(tokens, rows_each))
            steps.append(bench.step())
            say(f"{n:3} rows, context {steps[-1]['context']:7}: {steps[-1]['ms']:8.3f} ms, {steps[-1]['ratio_to_floor']:.2f} x the floor")
            if stages:
                by_stage.append({"rows": n, "context": steps[-1]["context"], "stages": bench.stages()})
    result.document({"steps": steps, "stages": by_stage, "model": model, "layers": cfg.num_hidden_layers} | _surroundings(bench), indent=1)
    result.close()


def _shared(rows: int) -> tuple[int, int]:
    """(sequences, rows of each) of a step."""
    return (1, rows) if rows <= ONE_SEQUENCE else (rows, 1)


def _surroundings(bench) -> dict:
    """Versions, commit, GPU, clocks and command: what a number is worth without which nothing can be compared."""
    from ..runtime.cuda_jit import nvrtc_version
    from ..runtime.machine import package_versions

    packages = {"k3cuda": __version__} | {name: version for name, version in package_versions().items() if version}
    return {"commit": _said("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"), "versions": packages | {"nvrtc": nvrtc_version()},
            "gpu": bench.backend.gpu, "arch": bench.arch, "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "clocks": _said("nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,clocks.max.sm", "--format=csv,noheader"),
            "command": " ".join(["k3cuda", *sys.argv[1:]])}


def _said(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
