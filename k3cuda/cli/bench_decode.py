"""`k3cuda bench decode`: tokens a second once prompts are read, with and without a draft model. docs/bench.md defines the numbers."""
import time

import click

from .. import __version__
from ..config import DECODE_ROWS
from ..errors import BenchmarkError
from . import options
from .answers import open_llm, work_for_rank_0
from .bench import Counts, bench
from .output import Result, say

_BATCH = next(attributes for names, attributes in options.ENGINE if "--max-batch" in names)
# What an open model takes. The batch is the benchmark's own.
_ENGINE = tuple(f for f in options.ENGINE if "--max-batch" not in f[0])


@bench.command(cls=options.Command)
@options.model()
@options.flags(
    options.flag("--batch", type=Counts(DECODE_ROWS), default="1", show_default=True, metavar="LIST", aliases=["--batch-size", *_BATCH["aliases"], "--max-batch"],
                 help="Requests at a time, with commas."),
    options.flag("--input-len", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Tokens of every prompt, drawn at random."),
    options.flag("--output-len", type=click.IntRange(min=2), default=1000, show_default=True, metavar="N", help="Tokens of every answer."),
    options.flag("--temperature", "-t", type=float, aliases=["--temp"], help="0 is exact argmax.  [default: the checkpoint's, else 1]"),
    options.flag("--seed", "-s", type=int, default=0, help="Of prompts and answers.  [default: 0]"), options.OUTPUT, *_ENGINE)
def decode(batch, input_len, output_len, temperature, seed, output, no_progress, model, **flags):
    """Time decoding alone: requests that start together, from when all have their first token.

    Prints one JSON document: an object for each batch, with the times of its requests.
    """
    import numpy as np

    from ..runtime.request_times import decoding, measure, summary
    from ..runtime.sampling import SamplingParams
    from ..runtime.surroundings import surroundings

    engine = options.engine_arguments(flags | {"max_batch": max(batch)})
    work_for_rank_0(model, **engine)
    result = Result(output)
    ask = {"temperature": temperature, "max_tokens": output_len, "ignore_eos": True}
    SamplingParams(**ask, seed=seed)   # refused before a model is loaded
    steps, failed = [], []
    with open_llm(model, not no_progress, **engine) as llm:
        be, rng = llm.backend, np.random.default_rng(seed)
        drafting = be.drafting
        k = drafting.num_drafts if drafting else 0
        for n in batch:
            prompts = rng.integers(0, llm.cfg.vocab_size, (n, input_len))
            times, seconds = measure(llm, prompts, [SamplingParams(**ask, seed=int(s)) for s in rng.integers(0, 1 << 63, n)], time.perf_counter)
            failed += [t.error for t in times if t.error is not None]
            steps.append({"decode_backend": be.name, "batch": n, "draft_tokens": k, "rows": n * (k + 1), "tp": be.tp, "rank": None,
                          "context": input_len + output_len, "kv_cache_dtype": be.kv_cache_dtype, **decoding(times),
                          # Of one rank on a GPU: `bench step` has them.
                          "floor_ms": None, "ratio_to_floor": None, "ceiling_tb_s": None, "distinct_experts": None, "requests": summary(times, seconds)})
            say(_line(steps[-1]))
        setup = {"version": __version__, "model": model, "input_len": input_len, "output_len": output_len, "temperature": temperature, "seed": seed,
                 "max_model_len": llm.max_model_len, "draft_model": engine["draft_model"], "num_drafts": k or None,
                 "acceptance": drafting.acceptance if drafting else None, "acceptance_length": drafting.acceptance_length if drafting else None}
    result.document({"steps": steps, "setup": setup} | surroundings(None), 1)
    result.close()
    if failed:
        raise BenchmarkError(f"{len(failed)} of {sum(batch)} requests failed, the first one: {failed[0]}", "rates and percentiles are of the others")


def _line(found: dict) -> str:
    rate = "nothing was decoded" if found["tokens_per_second"] is None else (
        f"{found['tokens_per_second']:.1f} tokens a second behind the first ones, {found['ms']:.3f} ms a step")
    length = found["requests"]["spec_decode_acceptance_length"]
    return f"batch {found['batch']}: {rate}" + (f", {length:.2f} tokens a verify step with {found['draft_tokens']} drafts" if length else "")
