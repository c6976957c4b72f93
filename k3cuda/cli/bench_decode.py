"""`k3cuda bench decode`: tokens a second once prompts are read, with and without a draft model. docs/bench.md defines the numbers."""
import time
from contextlib import contextmanager

import click

from .. import __version__
from ..config import DECODE_ROWS, RELEASED
from ..errors import BenchmarkError, UsageError
from . import options
from .answers import open_llm, work_for_rank_0
from .bench import Counts, bench, check_rank
from .model_argument import config_of
from .output import Result, say

_BATCH = next(attributes for names, attributes in options.ENGINE if "--max-batch" in names)
# What an open model takes. The batch is the benchmark's own.
_ENGINE = tuple(f for f in options.ENGINE if "--max-batch" not in f[0])
NO_PARTS = dict.fromkeys(("floor_ms", "ratio_to_floor", "ceiling_tb_s", "distinct_experts"))   # of one rank on a GPU


@bench.command(cls=options.Command)
@options.model(default=RELEASED)
@options.flags(
    options.flag("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Without a MODEL: the one rank that runs, collectives looped back."),
    options.flag("--batch", type=Counts(DECODE_ROWS), default="1", show_default=True, metavar="LIST", aliases=["--batch-size", *_BATCH["aliases"], "--max-batch"],
                 help="Requests at a time, with commas."),
    options.flag("--input-len", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Tokens of every prompt, drawn at random."),
    options.flag("--output-len", type=click.IntRange(min=2), default=1000, show_default=True, metavar="N", help="Tokens of every answer."),
    options.flag("--temperature", "-t", type=float, aliases=["--temp"], help="0 is exact argmax.  [default: the checkpoint's, else 1]"),
    options.flag("--seed", "-s", type=int, default=0, help="Of prompts and answers.  [default: 0]"), options.OUTPUT, *_ENGINE)
def decode(batch, input_len, output_len, temperature, seed, output, no_progress, model, rank, **flags):
    """Time decoding alone: requests that start together, from when all have their first token.

    Without a MODEL one true rank of the released model runs on a GPU, with weights made there, and with --draft-tokens a draft of a public shape beside
    it. Prints one JSON document: an object for each batch, with the times of its requests.
    """
    import numpy as np

    from ..runtime.request_times import decoding, measure, summary
    from ..runtime.sampling import SamplingParams
    from ..runtime.surroundings import surroundings

    engine = options.engine_arguments(flags | {"max_batch": max(batch)})
    if model != RELEASED:
        work_for_rank_0(model, **engine)
    result = Result(output)
    ask = {"temperature": temperature, "max_tokens": output_len, "ignore_eos": True}
    SamplingParams(**ask, seed=seed)   # refused before a model is loaded
    steps, failed = [], []
    with (_one_rank(engine, rank, max(batch), input_len, output_len) if model == RELEASED else _opened(model, not no_progress, engine)) as (llm, rank_bench):
        be, rng = llm.backend, np.random.default_rng(seed)
        drafting = be.drafting
        k = drafting.num_drafts if drafting else 0
        for n in batch:
            parts = rank_bench.parts(n, input_len + output_len // 2) if rank_bench else NO_PARTS
            prompts = rng.integers(0, llm.cfg.vocab_size, (n, input_len))
            times, seconds = measure(llm, prompts, [SamplingParams(**ask, seed=int(s)) for s in rng.integers(0, 1 << 63, n)], time.perf_counter)
            failed += [t.error for t in times if t.error is not None]
            steps.append({"decode_backend": be.name, "batch": n, "draft_tokens": k, "rows": n * (k + 1), "tp": be.tp, "rank": rank if rank_bench else None,
                          "context": input_len + output_len, "kv_cache_dtype": be.kv_cache_dtype, **decoding(times),
                          **{name: parts[name] for name in NO_PARTS if name in parts}, "step": parts if rank_bench else None, "requests": summary(times, seconds)})
            say(_line(steps[-1]))
        device = rank_bench.device if rank_bench else None
        setup = {"version": __version__, "model": model, "input_len": input_len, "output_len": output_len, "temperature": temperature, "seed": seed,
                 "max_model_len": llm.max_model_len, "draft_model": engine["draft_model"], "num_drafts": k or None,
                 "acceptance": drafting.acceptance if drafting else None, "acceptance_length": drafting.acceptance_length if drafting else None}
    result.document({"steps": steps, "setup": setup} | surroundings(device), 1)
    result.close()
    if failed:
        raise BenchmarkError(f"{len(failed)} of {sum(batch)} requests failed, the first one: {failed[0]}", "rates and percentiles are of the others")


@contextmanager
def _opened(model: str, shows_progress: bool, engine: dict):
    with open_llm(model, shows_progress, **engine) as llm:
        yield llm, None


@contextmanager
def _one_rank(engine: dict, rank: int, batch: int, input_len: int, output_len: int):
    """(LLM, DecodeBench) of one rank of the released model."""
    from ..llm import LLM
    from ..runtime.cuda_driver import require_gpu
    from ..runtime.drafting import OPTIONS
    from ..runtime.machine import LATENCY_SPECIALIZED, ON_GPU

    fixed = {"draft_model": None, "ranks": ("auto", "virtual"), "decode_backend": ("auto", *ON_GPU), "load_mode": "auto"}
    for name, only in fixed.items():
        if engine[name] not in (only if isinstance(only, tuple) else (only,)):
            raise UsageError(f"--{name.replace('_', '-')}: found {engine[name]!r:.60} without a MODEL, whose one rank is made on the GPU", "leave it out, or name a MODEL")
    cfg, tp = config_of(RELEASED), engine["tp"] or 16
    check_rank(tp, rank)
    require_gpu()
    from ..runtime.cuda_decode import DecodeBench, released_draft

    options_of_draft = {name: engine[name] for name in OPTIONS if engine[name] is not None}
    if options_of_draft and "num_drafts" not in options_of_draft:
        raise UsageError(f"{next(iter(options_of_draft))}: without a MODEL a draft is made where its tokens a step are said", "add --draft-tokens 7")
    drafting = released_draft(cfg, **options_of_draft) if options_of_draft else None
    if drafting:
        drafting.check_batch(batch)
    kv = "fp8_e4m3" if engine["kv_cache_dtype"] in ("auto", "fp8") else engine["kv_cache_dtype"]
    made = DecodeBench(cfg, tp, rank, kv, drafting, batch, max(engine["max_model_len"] or 0, input_len + output_len), input_len,
                       specialized=engine["decode_backend"] == LATENCY_SPECIALIZED)
    made.prepare()
    with LLM(made.model) as llm:
        yield llm, made


def _line(found: dict) -> str:
    rate = "nothing was decoded" if found["tokens_per_second"] is None else (
        f"{found['tokens_per_second']:.1f} tokens a second behind the first ones, {found['ms']:.3f} ms a step")
    length, step = found["requests"]["spec_decode_acceptance_length"], found["step"]
    drafts = f", {length:.2f} tokens a verify step with {found['draft_tokens']} drafts" if length else ""
    if step:
        drafts += f"; a step of {step['rows']} rows takes {step['ms']:.3f} ms of it"
        if "draft_share" in step:
            drafts += (f", context rows, drafts and acceptance {step['context_us']:.0f} + {step['draft_us']:.0f} + {step['accept_us']:.0f} us, which is "
                       f"{100 * step['draft_share']:.1f} % of it")
        drafts += f"; {step['decode_backend']}: {step['declined']}" if step["declined"] else ""
    return f"batch {found['batch']}: {rate}" + drafts
