"""`k3cuda bench compare`: two decode backends on the same load in one run. docs/bench.md defines the numbers."""
from contextlib import ExitStack

import click

from .. import __version__
from ..errors import UsageError
from . import options
from .answers import open_llm
from .bench import bench
from .bench_table import end, failures
from .output import Result, say

BATCH, SEED = 1, 0
_OWN = ("--max-batch", "--decode-backend")   # flags of an open model that this benchmark sets itself
_FLAGS = tuple(f for f in options.ENGINE if not set(_OWN) & set(f[0]))
# What a backend may have besides its name: flag without dashes -> (parameter, type).
_PARTS = {names[0][2:]: (names[0][2:].replace("-", "_"), attributes.get("type", click.STRING)) for names, attributes in _FLAGS
          if not attributes.get("is_flag") and not attributes.get("hidden") and attributes.get("cls") is not options.NotNeeded}
_PARTS["activation-dtype"] = ("activation_dtype", click.STRING)


class _Backends(click.ParamType):
    """Two of NAME[:FLAG=VALUE]... with a comma between them, as [(text, {"decode_backend": NAME, parameter: value})]."""

    name = "A,B"

    def convert(self, value, param, ctx):
        if not isinstance(value, str):
            return value
        found = [(text, self._one(text, param, ctx)) for text in value.split(",")]
        if len(found) != 2:
            self.fail(f"found {value!r:.80}, wanted two backends with a comma between them", param, ctx)
        return found

    def _one(self, text: str, param, ctx) -> dict:
        name, *parts = text.split(":")
        found = {"decode_backend": name}
        for part in parts:
            flag, equals, given = part.partition("=")
            if not equals or flag.replace("_", "-") not in _PARTS:
                self.fail(f"found {part!r:.60} in {text!r:.80}, wanted FLAG=VALUE with one of {', '.join(_PARTS)}", param, ctx)
            parameter, kind = _PARTS[flag.replace("_", "-")]
            found[parameter] = click.types.convert_type(kind).convert(given, param, ctx)
        return found


@bench.command(cls=options.Command)
@options.model()
@options.flags(
    options.flag("--backends", type=_Backends(), required=True, metavar="A,B", help="What to compare: NAME, or NAME:FLAG=VALUE with other values of flags below."),
    options.flag("--num-iters-warmup", type=click.IntRange(min=0), default=1, show_default=True, metavar="N", help="Rounds that are not counted."),
    options.flag("--num-iters", type=click.IntRange(min=1), default=6, show_default=True, metavar="N", help="Rounds that are counted."),
    options.flag("--batch-size", type=click.IntRange(min=1), default=BATCH, show_default=True, metavar="N", help="Requests of a round, all at once."),
    options.flag("--input-len", type=click.IntRange(min=1), default=32, show_default=True, metavar="N", help="Tokens of every prompt, drawn at random."),
    options.flag("--output-len", type=click.IntRange(min=1), default=128, show_default=True, metavar="N", help="Tokens of every answer."),
    options.flag("--one-at-a-time", is_flag=True, help="All rounds of A, then B: for models of which memory holds only one. What drifts is then in the ratio."),
    options.flag("--temperature", "-t", type=float, default=0.0, aliases=["--temp"], help="[default: 0, exact argmax]"),
    options.flag("--seed", "-s", type=int, default=SEED, help="Of prompts and answers.  [default: 0]"), options.OUTPUT, *_FLAGS)
def compare(model, backends, num_iters_warmup, num_iters, batch_size, input_len, output_len, one_at_a_time, temperature, seed, output, no_progress, **flags):
    """Time two decode backends on the same requests, in turns: decode, prefill, first token and whole request apart.

    Prints one JSON document: how many times as fast B is as A, and which answers differ.
    """
    import numpy as np

    from ..bench.compare import batches, differences, in_turns, ratios
    from ..runtime.launch import launched
    from ..runtime.sampling import SamplingParams

    def params(number: int):
        return SamplingParams(temperature=temperature, max_tokens=output_len, ignore_eos=True, seed=number)

    if flags["ranks"] != "virtual" and launched() is not None:
        raise UsageError("compare opens two models in one process, a launcher started several", "run k3cuda bench decode for each backend, or give --ranks virtual")
    params(seed)   # refused before a model is loaded
    result, names = Result(output), [name for name, _ in backends]
    engines = [_engine(flags, own, batch_size) for _, own in backends]
    load, setups = [], []

    def heard(side: int, number: int, took: float) -> None:
        say(f"{'warm-up' if number < num_iters_warmup else 'round'} {number + 1}/{num_iters_warmup + num_iters}, {'AB'[side]} {names[side]}: {took:.3f} s")

    def opened(stack, engine):
        llm = stack.enter_context(open_llm(model, not no_progress, **engine))
        be = llm.backend
        setups.append({"decode_backend": be.name, "tp": be.tp, "kv_cache_dtype": be.kv_cache_dtype, "gpu": be.gpu, "max_model_len": llm.max_model_len,
                       "draft_model": engine["draft_model"], "num_drafts": engine["num_drafts"], "acceptance": engine["acceptance"],
                       "activation_dtype": engine.get("activation_dtype")})
        if not load:
            load.extend(batches(np.random.default_rng(seed), num_iters_warmup + num_iters, batch_size, input_len, llm.cfg.vocab_size, params))
        return llm

    if one_at_a_time:
        sides = []
        for i, engine in enumerate(engines):
            with ExitStack() as stack:
                sides += in_turns([opened(stack, engine)], load, num_iters_warmup, lambda _, *rest, i=i: heard(i, *rest))
    else:
        with ExitStack() as stack:
            sides = in_turns([opened(stack, engine) for engine in engines], load, num_iters_warmup, heard)
    found, tokens = ratios(*sides), differences(*sides)
    document = {"backends": [_side(name, side, setup) for name, side, setup in zip(names, sides, setups)], "ratio": found, "tokens": tokens,
                "setup": {"version": __version__, "model": model, "batch_size": batch_size, "input_len": input_len, "output_len": output_len,
                          "num_iters_warmup": num_iters_warmup, "num_iters": num_iters, "one_at_a_time": one_at_a_time, "temperature": temperature, "seed": seed}}
    _show(names, document)
    result.document(document, 1)
    result.close()
    end([t for side in sides for t in side.times])


def _engine(flags: dict, own: dict, batch_size: int) -> dict:
    found = options.engine_arguments(flags | {"max_batch": batch_size} | {name: value for name, value in own.items() if name != "activation_dtype"})
    if found["decode_backend"] == "":
        raise UsageError("--backends: found no name, wanted NAME or NAME:FLAG=VALUE")
    return found | {name: own[name] for name in ("activation_dtype",) if name in own}


def _side(name: str, side, setup: dict) -> dict:
    import numpy as np

    from ..bench.compare import seconds
    from ..runtime.request_times import summary

    per_round = [seconds(times) for times, _ in side.rounds]

    def rate(quantity: str):
        found = [1 / s[quantity] for s in per_round if s[quantity]]
        return float(np.median(found)) if found else None

    return {"name": name, "decode_tokens_per_second": rate("decode"), "prefill_tokens_per_second": rate("prefill"),
            "requests": summary(side.times, sum(took for _, took in side.rounds)), "failures": failures(side.times), "setup": setup}


def _show(names, document) -> None:
    a, b = document["backends"]
    say(f"A {names[0]}, B {names[1]}: how many times as fast B is")
    rows = {"decode": ("decode_tokens_per_second", "tok/s"), "prefill": ("prefill_tokens_per_second", "tok/s"), "ttft": ("median_ttft_ms", "ms"), "e2el": ("median_e2el_ms", "ms")}
    for name, (key, unit) in rows.items():
        if (ratio := document["ratio"][name]) is not None:
            of = [side.get(key, side["requests"].get(key)) for side in (a, b)]
            say(f"  {name:8} {ratio['median']:6.3f} x  ({ratio['low']:.3f} to {ratio['high']:.3f})   A {of[0]:.2f} {unit}, B {of[1]:.2f} {unit}")
    tokens = document["tokens"]
    say(f"  answers  {tokens['equal']} of {tokens['answers']} have the same tokens"
        + (f"; the first difference is at token {min(d['at'] for d in tokens['differ'])}" if tokens["differ"] else ""))
