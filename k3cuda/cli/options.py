"""The flags, each once. Aliases are accepted and not shown; every flag has a variable K3CUDA_<COMMAND>_<FLAG>."""
import functools
import json

import click

from ..errors import UsageError
from . import output


class Option(click.Option):
    """An option with further spellings that work and that --help doesn't show."""

    def __init__(self, *declarations, aliases=(), **attributes):
        super().__init__(*declarations, **attributes)
        self.aliases = list(aliases)

    def add_to_parser(self, parser, ctx):
        shown = self.opts
        self.opts = shown + self.aliases
        try:
            super().add_to_parser(parser, ctx)
        finally:
            self.opts = shown


class Text(click.types.StringParamType):
    """Text for the model. In a variable several values stand on lines of their own, since each may hold blanks."""

    envvar_list_splitter = "\n"

    def convert(self, value, param, ctx):
        value = super().convert(value, param, ctx)
        if any("\udc80" <= c <= "\udcff" for c in value):   # bytes that the locale could not read: text is UTF-8
            value = value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        return value


class NotYet(Option):
    """A flag of a later version: refused by name, because ignoring it would change what the user believes to have run."""

    def __init__(self, *declarations, what: str, **attributes):
        super().__init__(*declarations, hidden=True, callback=self._refuse, expose_value=False, **attributes)
        self.what = what

    @staticmethod
    def _refuse(ctx, option, value):
        if value is not None and not ctx.resilient_parsing:
            raise click.UsageError(f"{option.opts[0]}: {option.what} is not in this version yet; leave it out", ctx)


class NotNeeded(Option):
    """A flag of vLLM that says what is so here anyway, or what is not so: accepted, with one line that says why it changes nothing."""

    def __init__(self, *declarations, why: str, **attributes):
        super().__init__(*declarations, hidden=True, callback=self._explain, expose_value=False, **attributes)
        self.why = why

    @staticmethod
    def _explain(ctx, option, value):
        if value not in (None, False, ()) and not ctx.resilient_parsing:
            output.say(f"{option.opts[0]} is not needed: {option.why}")


def flags(*options):
    """A decorator that adds `options` in this order."""
    def decorate(command):
        for declarations, attributes in reversed(options):
            command = click.option(*declarations, **{"cls": Option} | attributes)(command)
        return command
    return decorate


def flag(*declarations, **attributes):
    return declarations, attributes


MODEL = flag("--model", "-m", metavar="PATH", aliases=["--model-path"], envvar="K3CUDA_MODEL", help="Checkpoint folder or file, or 'demo'.")
OUTPUT = flag("--output", metavar="FILE", help="Write the result there instead of stdout.")
LOG_FLAGS = (
    flag("--quiet", "-q", is_flag=True, aliases=["--log-disable"], help="Errors only on stderr."),
    flag("--verbose", "-v", is_flag=True, help="Everything on stderr, tracebacks too."),
    flag("--log-level", type=click.Choice(["debug", "info", "warning", "error"], False), envvar="K3CUDA_LOG_LEVEL",
          help="[default: info on a terminal, else warning]"),
    flag("--log-format", type=click.Choice(["text", "json"], False), default="text", envvar="K3CUDA_LOG_FORMAT", show_default=True,
          help="Form of the lines on stderr."),
)


class Command(click.Command):
    """A command with the log flags; they are obeyed before it starts."""

    def __init__(self, *args, **attributes):
        super().__init__(*args, **attributes)
        self.params += [Option(declarations, **rest) for declarations, rest in LOG_FLAGS]

    def invoke(self, ctx):
        for name, value in ctx.meta.get(_SPECULATIVE, {}).items():
            if ctx.params[name] not in (None, value):
                raise click.UsageError(f"--speculative-config: {name} {value!r:.60} beside {ctx.params[name]!r:.60}; give one of them", ctx)
            ctx.params[name] = value
        output.configure_logging(*(ctx.params.pop(name) for name in ("log_level", "quiet", "verbose", "log_format")))
        if ctx.obj:   # what the group had to say before there was a log
            output.log.warning(ctx.obj)
        return super().invoke(ctx)


def model(default: str | None = None):
    """MODEL, as an argument or by flag or variable; the command gets one `model`."""
    def decorate(command):
        @click.argument("model_argument", metavar="[MODEL]", required=False)
        @flags((MODEL[0], MODEL[1] | {"help": MODEL[1]["help"] + (f"  [default: {default}]" if default else "")}))
        @click.pass_context
        @functools.wraps(command)
        def run(ctx, *args, model, model_argument, **kwargs):
            return command(*args, model=_one_model(ctx, model, model_argument, default), **kwargs)
        return run
    return decorate


def model_and_file(command):
    """MODEL as `model` takes it, and a FILE behind it: a single word is the file."""
    @click.argument("words", metavar="[MODEL] FILE", nargs=-1, required=True)
    @flags(MODEL)
    @click.pass_context
    @functools.wraps(command)
    def run(ctx, *args, model, words, **kwargs):
        if len(words) > 2:
            raise click.UsageError(f"found {len(words)} words, wanted [MODEL] FILE", ctx)
        return command(*args, model=_one_model(ctx, model, words[0] if len(words) == 2 else None, None), file=words[-1], **kwargs)
    return run


def _one_model(ctx, by_flag: str | None, argument: str | None, default: str | None) -> str:
    is_flag = ctx.get_parameter_source("model") is click.core.ParameterSource.COMMANDLINE
    if is_flag and argument is not None and by_flag != argument:
        raise click.UsageError(f"two models: {argument!r} and --model {by_flag!r}; give one", ctx)
    chosen = by_flag if argument is None else argument
    if not (chosen or default):
        raise click.UsageError("no model; give the folder of a checkpoint, or 'demo', or set K3CUDA_MODEL", ctx)
    return chosen or default


prompt = flags(
    flag("--prompt", "-p", type=Text(), metavar="TEXT", help="The prompt; '-' reads stdin, as does a pipe without this flag."),
    flag("--file", "-f", metavar="FILE", help="File with the prompt; '-' is stdin."),
)

conversation = flags(
    flag("--system", "-S", type=Text(), metavar="TEXT", aliases=["--system-prompt", "-sys"], help="System message."),
    flag("--reasoning-effort", type=click.Choice(["none", "low", "high", "max"], False), aliases=["--thinking-effort"],
          help="How much the model is told to think; none: not at all.  [default: max; none for demo]"),
    flag("--no-think", is_flag=True, hidden=True),
)

documents = flags(
    flag("--messages", metavar="FILE.json", help="Whole conversation instead of a prompt; '-' is stdin."),
    flag("--tools", metavar="FILE.json", help="Tools the model may call."),
)

thinking = flags(
    flag("--show-thinking/--hide-thinking", default=None, help="Reasoning on stderr.  [default: shown on a terminal]"),
)

sampling = flags(
    flag("--max-tokens", "-n", type=int, aliases=["--max-new-tokens", "--n-predict", "--predict"],
          help="Longest answer.  [default: rest of the context]"),
    flag("--temperature", "-t", type=float, aliases=["--temp"], help="0 is exact argmax.  [default: the checkpoint's, else 1]"),
    flag("--top-p", type=float, help="[default: the checkpoint's, else 1]"),
    flag("--top-k", type=int, help="0 or -1: off.  [default: the checkpoint's, else 0]"),
    flag("--min-p", type=float, help="0: off.  [default: the checkpoint's, else 0]"),
    flag("--seed", "-s", type=int, aliases=["--sampling-seed", "--random-seed"], help="[default: random, and printed]"),
    flag("--stop", multiple=True, type=Text(), metavar="TEXT", help="End the answer before this text; may be repeated."),
    flag("--stop-token-id", multiple=True, type=int, help="End the answer at this token; may be repeated."),
    flag("--ignore-eos", is_flag=True, help="Go on after the model's own end."),
    flag("--presence-penalty", type=float, default=0.0, help="-2 to 2.  [default: 0]"),
    flag("--frequency-penalty", type=float, default=0.0, help="-2 to 2.  [default: 0]"),
    flag("--repetition-penalty", type=float, default=1.0, aliases=["--repeat-penalty"], help="Above 0, up to 2.  [default: 1]"),
)

TP_ALIASES = ["--tensor-parallel-size", "-tp", "--tp-size"]
_SPECULATIVE = "k3cuda.speculative_config"   # where its two values wait in click's context until all flags are read


def _speculative_config(ctx, option, value):
    """What users of vLLM write: a JSON object with exactly method, model and num_speculative_tokens."""
    if value is None or ctx.resilient_parsing:
        return
    try:
        found = json.loads(value)
    except ValueError as e:
        raise click.UsageError(f"{option.opts[0]}: no JSON ({e})", ctx) from e
    wanted = {"method", "model", "num_speculative_tokens"}
    if not isinstance(found, dict) or set(found) != wanted:
        other = sorted(set(found) ^ wanted)[0] if isinstance(found, dict) else type(found).__name__
        raise click.UsageError(f"{option.opts[0]}: {other!r:.60} is missing or unknown, wanted exactly {', '.join(sorted(wanted))}", ctx)
    if found["method"] != "dspark":
        raise click.UsageError(f"{option.opts[0]}: method: found {found['method']!r:.60}, wanted 'dspark'", ctx)
    ctx.meta[_SPECULATIVE] = {"draft_model": found["model"], "num_speculative_tokens": found["num_speculative_tokens"]}


DRAFT = (
    flag("--draft-model", metavar="PATH", aliases=["--speculative-draft-model-path", "-md"], envvar="K3CUDA_DRAFT_MODEL",
         help="DSpark draft model: folder or file, or 'demo-draft'.  [default: no speculation]"),
    flag("--num-speculative-tokens", "-k", type=click.IntRange(min=1), metavar="N",
         aliases=["--speculative-num-draft-tokens", "--draft-tokens", "--draft"],
         help="Tokens proposed a step; one more position is verified.  [default: the draft's block]"),
    flag("--speculative-config", hidden=True, expose_value=False, callback=_speculative_config),
)
_DRAFTING = (
    flag("--acceptance", metavar="RULE", help="standard, block or synthetic.  [default: standard]"),
    flag("--acceptance-length", type=float, metavar="L", help="Synthetic acceptance of L tokens a step, for timing: the text means nothing."),
    flag("--draft-sampling", metavar="HOW", help="probabilistic or greedy.  [default: probabilistic]"),
    flag("--draft-rows", metavar="WIDTH", help="Rows the draft computes: block or drafts.  [default: block]"),
    flag("--confidence-threshold", type=float, metavar="P", help="Verify drafts before the first that is less sure.  [default: all]"),
)
ENGINE = (
    flag("--tp", type=click.IntRange(min=1), default=1, metavar="N", aliases=TP_ALIASES,
          help="Ranks to cut the model over.  [default: 1]"),
    flag("--max-model-len", type=click.IntRange(min=1), metavar="N", aliases=["--context-length", "--ctx-size", "-c", "--max-seq-len"],
          help="Longest context, in tokens.  [default: what fits]"),
    flag("--max-batch", type=click.IntRange(min=1), default=1, metavar="N",
          aliases=["--max-num-seqs", "--max-running-requests", "-np", "--max-batch-size"], help="Sequences at a time.  [default: 1]"),
    flag("--kv-cache-dtype", default="auto", metavar="TYPE", help="auto, bf16 or fp8_e4m3.  [default: auto]"),
    flag("--decode-backend", default="auto", metavar="NAME", aliases=["--decode-attention-backend", "--attention-backend"],
          help="What runs the decode step; an unknown name lists them.  [default: auto]"),
    flag("--no-progress", is_flag=True, aliases=["--disable-tqdm"], help="No progress while loading."),
    *DRAFT, *_DRAFTING,
    flag("--load-mode", default="auto", metavar="NAME", aliases=["--load-format"], help="How files are read: auto, direct, buffered or mmap.  [default: auto]"),
    flag("--gpu-memory-utilization", cls=NotYet, what="a GPU memory budget",
          aliases=["--mem-fraction-static", "--kv-cache-free-gpu-memory-fraction"]),
)
engine = flags(*ENGINE)
_ENGINE_NAMES = ("tp", "max_model_len", "max_batch", "kv_cache_dtype", "decode_backend", "load_mode", "draft_model", "acceptance", "acceptance_length",
                 "draft_sampling", "draft_rows", "confidence_threshold")


def engine_arguments(flags: dict) -> dict:
    """Takes the flags of `engine` that say how a model is opened out of `flags`, under the names of `k3cuda.LLM`."""
    return {name: flags.pop(name) for name in _ENGINE_NAMES} | {"num_drafts": flags.pop("num_speculative_tokens")}


def server_engine(max_batch: int):
    """The flags of `engine` with another default for --max-batch."""
    batch = {"default": max_batch, "help": f"Sequences at a time.  [default: {max_batch}]"}
    return flags(*((names, attributes | batch if "--max-batch" in names else attributes) for names, attributes in ENGINE))


def effort(reasoning_effort: str | None, no_think: bool, model: str) -> str:
    """One effort from the flag, its alias and the default. Random weights would never close their reasoning: demo answers at once."""
    from ..runtime.demo import DEMO

    if no_think and reasoning_effort not in (None, "none"):
        raise UsageError(f"--no-think and --reasoning-effort {reasoning_effort} exclude each other", "give one of them")
    return "none" if no_think else reasoning_effort or ("none" if model == DEMO else "max")


def sampling_arguments(flags: dict) -> dict:
    """What the flags of `sampling` are called by SamplingParams."""
    renamed = {"stop_token_id": "stop_token_ids"}
    return {renamed.get(name, name): value for name, value in flags.items()}


def config_of(model: str, layers: int | None = None):
    """The K3Config that MODEL names, for commands that need no weights; `layers` cuts it short.

    Raises UsageError: more layers than there are. ConfigError: as K3Config.from_json.
    """
    from dataclasses import replace

    from ..config import RELEASED, RELEASED_FOLDER, K3Config
    from ..runtime.demo import DEMO, open_demo

    cfg = open_demo().cfg if model == DEMO else K3Config.from_json(RELEASED_FOLDER if model == RELEASED else _config_file(model))
    if layers is None or layers == cfg.num_hidden_layers:
        return cfg
    if layers > cfg.num_hidden_layers:
        raise UsageError(f"--layers: found {layers}, the model has {cfg.num_hidden_layers}")
    lin = cfg.linear_attn_config
    lin = replace(lin, **{name: tuple(i for i in getattr(lin, name) if i <= layers) for name in ("kda_layers", "full_attn_layers")})
    return replace(cfg, num_hidden_layers=layers, linear_attn_config=lin)


def _config_file(model: str):
    """The config.json of MODEL, which may also be a file of weights beside it. ConfigError where reading it could not end."""
    from pathlib import Path

    from ..errors import ConfigError
    from ..runtime.downloads import no_text

    path = Path(model)
    path = path.parent / "config.json" if path.suffix == ".safetensors" else path / "config.json" if path.is_dir() else path
    if kind := no_text(path):
        raise ConfigError(f"{path}: found {kind[0]}, wanted the config of a Kimi K3 release", kind[1])
    return path


def check_rank(tp: int, rank: int) -> None:
    if rank >= tp:
        raise UsageError(f"--rank: found {rank}, wanted 0 to {tp - 1}", "ranks are counted from 0")
