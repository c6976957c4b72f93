"""`k3cuda bench serve`: load on a server that runs, ours or another one. docs/bench.md defines the numbers."""
import time

import click

from .. import __version__
from ..errors import UsageError
from . import bench_target, interruptible, options
from .bench import Counts, bench
from .bench_plot import PLOT, Plot
from .bench_table import end, failures, show
from .output import Result
from .pasted import OF_A_BENCHMARK, flags_of

MOST_AT_A_TIME = 1 << 16
_IN_LEN, _OUT_LEN = ["--random-input-len"], ["--random-output-len"]


class Rate(click.ParamType):
    """Requests a second, above 0; `inf` for all at once."""

    name = "rate"

    def convert(self, value, param, ctx):
        try:
            found = float(value)
        except ValueError:
            found = 0.0
        if not found > 0:
            self.fail(f"found {value!r}, wanted requests a second, or inf", param, ctx)
        return found


@bench.command(cls=options.Command)
@options.flags(
    options.flag("--model", "-m", metavar="NAME", aliases=["--served-model-name"], help="What the server calls the model.  [default: the first one it names]"),
    options.flag("--base-url", default=bench_target.URL, metavar="URL", help=f"Where the server is.  [default: {bench_target.URL}]"),
    options.flag("--host", hidden=True), options.flag("--port", type=click.IntRange(1, 65535), hidden=True),
    options.flag("--num-prompts", type=click.IntRange(min=1), default=1000, metavar="N", help="Requests of a run.  [default: 1000]"),
    options.flag("--num-warmups", type=click.IntRange(min=0), default=0, metavar="N", help="Requests before them that are not counted.  [default: 0]"),
    options.flag("--request-rate", type=Rate(), default="inf", metavar="R", help="Requests that arrive a second; inf: all at once.  [default: inf]"),
    options.flag("--burstiness", type=options.Number(0, min_open=True), default=1.0, metavar="B",
                 help="Of arrivals at a rate: 1 is a Poisson process, less comes in bursts, more is more even.  [default: 1]"),
    options.flag("--max-concurrency", type=Counts(MOST_AT_A_TIME), metavar="LIST",
                 help="Requests at a time; with commas between several numbers a run for each.  [default: no limit]"),
    options.flag("--input-len", type=click.IntRange(min=1), default=32, metavar="N", aliases=_IN_LEN, help="Tokens of every prompt, drawn at random.  [default: 32]"),
    options.flag("--output-len", type=click.IntRange(min=1), default=128, metavar="N", aliases=_OUT_LEN, help="Longest answer, in tokens.  [default: 128]"),
    options.flag("--ignore-eos", is_flag=True, help="Ask for answers that go on behind the model's own end."),
    options.flag("--text-prompts", is_flag=True, help="Send words instead of token ids to /v1/completions, which not every server takes."),
    options.flag("--temperature", "-t", type=float, aliases=["--temp"], help="[default: the server's]"),
    options.flag("--seed", "-s", type=click.IntRange(min=0), default=0, help="Of prompts and arrivals.  [default: 0]"),
    *bench_target.ASKING, *bench_target.COUNTING, PLOT, (options.OUTPUT[0], options.OUTPUT[1] | {"aliases": ["--result-filename"]}), *flags_of(OF_A_BENCHMARK))
def serve(model, base_url, host, port, num_prompts, num_warmups, request_rate, burstiness, max_concurrency, input_len, output_len, ignore_eos, text_prompts,
          temperature, seed, endpoint, api_key, extra_body, timeout, stall_timeout, metric_percentiles, save_detailed, allow_failures, plot, output):
    """Time requests to an OpenAI-style server that runs, as its clients see them.

    Prints one JSON document with a run for each --max-concurrency. Failed requests are counted and listed by reason, and make code 8.
    """
    import asyncio

    from ..runtime.open_files import raise_file_limit
    from ..runtime.request_times import summary

    if host is not None or port is not None:   # as vLLM takes them
        base_url = f"http://{host or '127.0.0.1'}:{port or 8000}"
    which = bench_target.percentile_list(metric_percentiles)
    ours = {name: value for name, value in (("ignore_eos", ignore_eos or None), ("temperature", temperature)) if value is not None}
    target = bench_target.make_target(base_url, endpoint or bench_target.COMPLETIONS, model, api_key, ours | extra_body, timeout, stall_timeout)
    if text_prompts and target.takes_messages:
        raise UsageError(f"--text-prompts: {target.endpoint} takes text anyway", "leave it out")
    result, all_times, runs, plot = Result(output), [], [], Plot(plot, "latency")
    raise_file_limit()
    with asyncio.Runner() as runner:
        target, vocab_size, tokens_a_word = interruptible.run(runner, _introduced(target, text_prompts))
        for most in max_concurrency or [None]:
            times, seconds, drafts = interruptible.run(runner, _run(
                target, num_prompts, num_warmups, request_rate, burstiness, most, input_len, output_len, vocab_size, tokens_a_word, seed))
            found = summary(times, seconds, which) | drafts
            show(f"max concurrency {most or 'open'}", found)
            runs.append({"max_concurrency": most, "request_rate": request_rate, "requests": found, "tokens_counted_by": bench_target.counted_by(times),
                         "failures": failures(times)} | ({"detail": bench_target.detail(times)} if save_detailed else {}))
            all_times += times
    document = {"runs": runs, "setup": {
        "version": __version__, "base_url": base_url, "endpoint": target.endpoint, "model": target.model, "num_prompts": num_prompts, "num_warmups": num_warmups,
        "burstiness": burstiness, "input_len": input_len, "output_len": output_len, "prompts": "words" if vocab_size is None else "token ids",
        "vocab_size": vocab_size, "tokens_a_word": tokens_a_word, "ignore_eos": ignore_eos, "temperature": temperature, "seed": seed, "extra_body": extra_body}}
    result.document(document, 1)
    result.close()
    plot.write(str(target.model), document)
    end(all_times, allow_failures)


async def _introduced(target, text_prompts: bool):
    """(the target with a model, the vocabulary that ids are drawn from, None; or None, tokens of a word) for prompts that are text."""
    from dataclasses import replace

    target = target if target.model is not None else replace(target, model=await target.first_model())
    return (target, None, await target.tokens_a_word()) if text_prompts or target.takes_messages else (target, await target.vocab_size(), None)


async def _run(target, num_prompts, num_warmups, request_rate, burstiness, most, input_len, output_len, vocab_size, tokens_a_word, seed):
    """(times, seconds, numbers of drafts) of one run. Every run of a sweep has prompts of its own: the ones before may be cached."""
    from functools import partial

    import numpy as np

    from ..bench.load import arrivals, run
    from ..bench.target import drafts_between, random_prompt, random_words

    rng = np.random.default_rng([seed, most or 0])

    def ask():
        if vocab_size is not None:
            prompt = random_prompt(rng, input_len, vocab_size)
        else:
            text = random_words(rng, max(1, round(input_len / tokens_a_word)))
            prompt = [{"role": "user", "content": text}] if target.takes_messages else text
        return partial(target.ask, prompt, input_len, output_len, time.perf_counter)

    await run([ask() for _ in range(num_warmups)], [0.0] * num_warmups, most)
    before = await target.draft_counts()
    found, seconds = await run([ask() for _ in range(num_prompts)], arrivals(num_prompts, request_rate, burstiness, rng), most)
    return [times for times, _ in found], seconds, drafts_between(before, await target.draft_counts())
