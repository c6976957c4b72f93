"""`k3cuda bench replay`: the trace of an agent, on a model in this process or on a server. docs/bench.md has its form and the numbers."""
import time

import click

from .. import __version__
from ..errors import UsageError
from . import bench_target, interruptible, options
from .answers import open_llm, work_for_rank_0
from .bench import bench
from .bench_requests import BATCH
from .bench_table import end, failures, show
from .output import Result, say
from .prompts import read_file

PREFIX_CACHE = 8
_ASKING = tuple((names, attributes | {"help": f"{attributes['help']} With --base-url."}) for names, attributes in bench_target.ASKING)


@bench.command(cls=options.Command)
@options.model_and_file(word="TRACE", unless="base_url")
@options.flags(
    options.flag("--base-url", metavar="URL", help="Ask the server there instead of a model in this process; MODEL is then what it calls the model."),
    options.flag("--concurrency", type=click.IntRange(min=1), default=1, metavar="N", help="Sessions at a time.  [default: 1]"),
    options.flag("--duration", type=options.Number(0, min_open=True), metavar="SECONDS", help="Play the trace over and over for so long.  [default: once]"),
    options.flag("--idle-gap-cap", type=options.Number(0), metavar="SECONDS", help="No gap is longer than that.  [default: as in the trace]"),
    options.flag("--prefix-cache", type=click.IntRange(min=0), default=PREFIX_CACHE, metavar="N", help=f"As for serve.  [default: {PREFIX_CACHE}]"),
    options.flag("--temperature", "-t", type=float, aliases=["--temp"], help="[default: the checkpoint's, else 1; a server's own]"),
    options.flag("--seed", "-s", type=click.IntRange(min=0), default=0, help="Of filler and answers.  [default: 0]"),
    *_ASKING, *bench_target.COUNTING, options.OUTPUT)
@options.server_engine(BATCH)
def replay(model, trace, base_url, concurrency, duration, idle_gap_cap, prefix_cache, temperature, seed, endpoint, api_key, extra_body, timeout, stall_timeout,
           metric_percentiles, save_detailed, allow_failures, output, no_progress, **flags):
    """Play the trace of an agent: turns with gaps between them, on a context that grows.

    Prints one JSON document: numbers of all requests, and of each turn.
    """
    import asyncio

    from ..bench.replay import by_turn
    from ..bench.trace import read_trace
    from ..runtime.request_times import summary

    _check_given(base_url is not None, [*flags, "prefix_cache"])
    which, engine = bench_target.percentile_list(metric_percentiles), options.engine_arguments(flags)
    engine |= {"prefix_cache": prefix_cache}
    if base_url is None:
        work_for_rank_0(model, **engine)
    sessions = read_trace(read_file(trace), trace)
    played_as = {"users": concurrency, "duration": duration, "gap_cap": idle_gap_cap, "seed": seed}
    result = Result(output)
    with asyncio.Runner() as runner:
        if base_url is None:
            found, setup = _here(runner, model, sessions, played_as, temperature, engine, not no_progress)
        else:
            ours = {"ignore_eos": True} | ({} if temperature is None else {"temperature": temperature})
            target = bench_target.make_target(base_url, endpoint or bench_target.CHAT, model, api_key, ours | extra_body, timeout, stall_timeout)
            found, setup = interruptible.run(runner, _there(target, sessions, played_as))
            setup |= {"base_url": base_url, "extra_body": extra_body}
    played, skipped, seconds = found
    times = [p.times for p in played]
    numbers = summary(times, seconds, which)
    show(f"{len(sessions)} sessions, {concurrency} at a time", numbers)
    cached, inputs = numbers["total_cached_tokens"], numbers["total_input_tokens"]
    share = cached / inputs if inputs and cached is not None else None
    say("  cached tokens          " + ("the server does not say" if cached is None else f"{cached} of {inputs}, {100 * (share or 0):.1f} %"))
    document = {"requests": numbers, "cached_share": share, "turns": by_turn(played), "skipped_turns": skipped, "failures": failures(times),
                "tokens_counted_by": None if base_url is None else bench_target.counted_by(times)}
    if save_detailed:
        document["detail"] = bench_target.detail(times) | {"sessions": [p.session for p in played], "turns": [p.turn for p in played],
                                                           "cached_tokens": [t.cached_tokens for t in times]}
    result.document(document | {"setup": {
        "version": __version__, "trace": trace, "sessions": len(sessions), "trace_turns": sum(len(s.turns) for s in sessions), "concurrency": concurrency,
        "duration": duration, "idle_gap_cap": idle_gap_cap, "temperature": temperature, "seed": seed} | setup}, 1)
    result.close()
    end(times, allow_failures)


def _check_given(is_server: bool, of_a_model: list[str]) -> None:
    """Refuses flags that would change nothing; a variable may be set for other commands."""
    of_a_server = ["endpoint", "api_key", "extra_body", "timeout", "stall_timeout"]
    source = click.get_current_context().get_parameter_source
    for name in of_a_model if is_server else of_a_server:
        if source(name) is click.core.ParameterSource.COMMANDLINE:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is for a model in this process", "leave it out, or --base-url") if is_server else UsageError(
                f"{flag} is for a server", "leave it out, or give the --base-url of one")


def _here(runner, model, sessions, played_as, temperature, engine, show_progress):
    from ..bench.contexts import IdContext
    from ..bench.replay import LocalModel, play
    from ..runtime.sampling import SamplingParams

    def params(tokens: int):
        return SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True, seed=played_as["seed"])

    params(1)   # refused before a model is loaded
    with open_llm(model, show_progress, **engine) as llm:
        async def work():
            async with LocalModel(llm, params) as local:
                return await play(sessions, lambda session, rngs: IdContext(session, rngs, llm.cfg.vocab_size), local.ask, **played_as)

        found = interruptible.run(runner, work())
        be = llm.backend
        return found, {"model": model, "max_model_len": llm.max_model_len, "tp": be.tp, "kv_cache_dtype": be.kv_cache_dtype, "decode_backend": be.name,
                       "gpu": be.gpu, "draft_model": engine["draft_model"], "num_drafts": engine["num_drafts"], "acceptance": engine["acceptance"],
                       "prefix_cache": engine["prefix_cache"]}


async def _there(target, sessions, played_as):
    from dataclasses import replace

    from ..bench.contexts import TextContext
    from ..bench.replay import play

    target = target if target.model is not None else replace(target, model=await target.first_model())
    per_word = await target.tokens_a_word()

    async def ask(context, tokens: int):
        return await target.ask(context.prompt, context.tokens, tokens, time.perf_counter)

    found = await play(sessions, lambda session, rngs: TextContext(session, rngs, per_word, not target.takes_messages), ask, **played_as)
    return found, {"endpoint": target.endpoint, "model": target.model, "tokens_a_word": per_word}
