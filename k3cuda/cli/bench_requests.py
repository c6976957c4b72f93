"""`k3cuda bench latency` and `throughput`: whole requests on an open model, without a server. docs/bench.md defines the numbers."""
import time

import click

from .. import __version__
from . import options
from .answers import open_llm, work_for_rank_0
from .bench import bench
from .bench_plot import PLOT, Plot
from .bench_table import ALLOW, end, show
from .output import Result, say

BATCH, SEED = 8, 0
LATENCY_PERCENTILES = (10, 25, 50, 75, 90, 99)   # those of `vllm bench latency`
_LENGTHS = (
    options.flag("--input-len", type=click.IntRange(min=1), default=32, show_default=True, metavar="N", help="Tokens of every prompt, drawn at random."),
    options.flag("--output-len", type=click.IntRange(min=1), default=128, show_default=True, metavar="N", help="Tokens of every answer."),
    options.flag("--temperature", "-t", type=float, aliases=["--temp"], help="0 is exact argmax.  [default: the checkpoint's, else 1]"),
    options.flag("--seed", "-s", type=int, default=SEED, help="Of prompts and answers.  [default: 0]"), PLOT, ALLOW, options.OUTPUT)
_BATCH = options.flag("--batch-size", type=click.IntRange(min=1), default=BATCH, show_default=True, metavar="N",
                      aliases=next(attributes["aliases"] for names, attributes in options.ENGINE if "--max-batch" in names), help="Requests at a time.")


@bench.command(cls=options.Command)
@options.model()
@options.flags(
    options.flag("--num-iters-warmup", type=click.IntRange(min=0), default=10, show_default=True, metavar="N", help="Batches that are not counted."),
    options.flag("--num-iters", type=click.IntRange(min=1), default=30, show_default=True, metavar="N", help="Batches that are counted."),
    *_LENGTHS, *(_BATCH if "--max-batch" in names else (names, attributes) for names, attributes in options.ENGINE))
def latency(num_iters_warmup, num_iters, batch_size, **flags):
    """Time batches of requests that start together, one batch after the other.

    Prints one JSON document: the time of each batch, and the times of the requests in them.
    """
    from ..runtime.request_times import percentiles, summary

    times, latencies = [], []

    def batches(run):
        for i in range(num_iters_warmup + num_iters):
            found, seconds = run(batch_size)
            say(f"{'warm-up' if i < num_iters_warmup else 'batch'} {i + 1}/{num_iters_warmup + num_iters}: {seconds:.3f} s")
            if i >= num_iters_warmup:
                times.extend(found)
                latencies.append(seconds)

    def document():
        found = summary(times, sum(latencies))
        show(f"batches of {batch_size}", found)
        return {"avg_latency": sum(latencies) / num_iters, "latencies": latencies, "percentiles": percentiles(latencies, LATENCY_PERCENTILES), "requests": found}

    _run(batches, document, times, {"batch_size": batch_size}, max_batch=batch_size, **flags)


@bench.command(cls=options.Command)
@options.model()
@options.flags(options.flag("--num-prompts", type=click.IntRange(min=1), default=1000, show_default=True, metavar="N", help="Requests, all there at once."),
               *_LENGTHS)
@options.server_engine(BATCH)
def throughput(num_prompts, max_batch, **flags):
    """Time many requests that are all there at once, --max-batch of them at a time.

    Prints one JSON document. The time to a first token has the wait for a slot in it.
    """
    from ..runtime.request_times import summary

    times, elapsed = [], []

    def all_at_once(run):
        found, seconds = run(num_prompts)
        times.extend(found)
        elapsed.append(seconds)

    def document():
        found = summary(times, elapsed[0])
        show(f"{max_batch} at a time", found)
        return {"elapsed_time": elapsed[0], "num_requests": num_prompts, "total_num_tokens": found["total_input_tokens"] + found["total_output_tokens"],
                "requests_per_second": found["request_throughput"], "tokens_per_second": found["total_token_throughput"], "requests": found}

    _run(all_at_once, document, times, {"max_batch": max_batch}, max_batch=max_batch, **flags)


def _run(benchmark, document, times, what: dict, *, model, input_len, output_len, temperature, seed, plot, allow_failures, output, no_progress, **flags) -> None:
    """Calls `benchmark(run)`, where run(n) measures n requests with new prompts, and prints what `document` says then."""
    import numpy as np

    from ..runtime.request_times import measure
    from ..runtime.sampling import SamplingParams

    engine = options.engine_arguments(flags)
    work_for_rank_0(model, **engine)
    result, plot = Result(output), Plot(plot, "acceptance")
    ask = {"temperature": temperature, "max_tokens": output_len, "ignore_eos": True}
    SamplingParams(**ask, seed=seed)   # refused before a model is loaded
    with open_llm(model, not no_progress, **engine) as llm:
        rng = np.random.default_rng(seed)

        def run(n: int):
            prompts = rng.integers(0, llm.cfg.vocab_size, (n, input_len))
            params = [SamplingParams(**ask, seed=int(s)) for s in rng.integers(0, 1 << 63, n)]
            return measure(llm, prompts, params, time.perf_counter)

        benchmark(run)
        be = llm.backend
        setup = {"version": __version__, "model": model, "input_len": input_len, "output_len": output_len, **what, "temperature": temperature, "seed": seed,
                 "max_model_len": llm.max_model_len, "tp": be.tp, "kv_cache_dtype": be.kv_cache_dtype, "decode_backend": be.name, "gpu": be.gpu,
                 "draft_model": engine["draft_model"], "num_drafts": engine["num_drafts"], "acceptance": engine["acceptance"]}
    found = document() | {"setup": setup}
    result.document(found, 1)
    result.close()
    plot.write(model, found)
    end(times, allow_failures)
