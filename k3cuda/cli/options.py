"""The flags, each once. Aliases are accepted and not shown; every flag has a variable K3CUDA_<COMMAND>_<FLAG>."""
import json

import click

from ..errors import UsageError
from ..runtime.named_models import NAMED, WITHOUT_REASONING, default_effort, listed
from .flag_kinds import SPECULATIVE, Command, NotNeeded, Number, Option, Text, flag, flags  # noqa: F401 - commands take all from here
from .model_argument import model, model_and_file  # noqa: F401 - as above
from .pasted import OF_A_MODEL, flags_of

DEFAULT_EFFORT = f"max; none for {' and '.join(WITHOUT_REASONING)}"   # what `effort` gives, for --help
OUTPUT = flag("--output", metavar="FILE", help="Write the result there instead of stdout.")
prompt = flags(
    flag("--prompt", "-p", type=Text(), metavar="TEXT", help="The prompt; '-' reads stdin, as does a pipe without this flag."),
    flag("--file", "-f", metavar="FILE", help="File with the prompt; '-' is stdin."),
)

conversation = flags(
    flag("--system", "-S", type=Text(), metavar="TEXT", aliases=["--system-prompt", "-sys"], help="System message."),
    flag("--reasoning-effort", type=click.Choice(["none", "low", "high", "max"], False), aliases=["--thinking-effort"],
          help=f"How much the model is told to think; none: not at all.  [default: {DEFAULT_EFFORT}]"),
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
DCP_ALIASES = ["--decode-context-parallel-size", "-dcp"]


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
    ctx.meta[SPECULATIVE] = {"draft_model": found["model"], "num_speculative_tokens": found["num_speculative_tokens"]}


DRAFT = (
    flag("--draft-model", metavar="PATH", aliases=["--speculative-draft-model-path", "-md"], envvar="K3CUDA_DRAFT_MODEL",
         help=(f"DSpark draft model: folder or file, or {', '.join(f'{listed(drafts)} for {model!r}' for model, drafts in NAMED.items())}.  "
               "[default: no speculation]")),
    flag("--num-speculative-tokens", "-k", type=click.IntRange(min=1), metavar="N",
         aliases=["--speculative-num-draft-tokens", "--draft-tokens", "--draft"],
         help="Tokens proposed a step; one more position is verified.  [default: the draft's block]"),
    flag("--speculative-config", hidden=True, expose_value=False, callback=_speculative_config),
)
DRAFT_ROWS = flag("--draft-rows", metavar="WIDTH", help="Rows the draft computes: block or drafts.  [default: block]")
_DRAFTING = (
    flag("--acceptance", metavar="RULE", help="standard, block or synthetic.  [default: standard]"),
    flag("--acceptance-length", type=float, metavar="L", help="Synthetic acceptance of L tokens a step, for timing: the text means nothing."),
    flag("--draft-sampling", metavar="HOW", help="probabilistic or greedy.  [default: probabilistic]"),
    DRAFT_ROWS,
    flag("--confidence-threshold", type=float, metavar="P", help="Verify drafts before the first that is less sure.  [default: all]"),
)
LOAD_MODE = flag("--load-mode", default="auto", metavar="NAME", aliases=["--load-format"],
                 callback=lambda ctx, option, value: "auto" if value == "safetensors" else value,   # vLLM's word for the files, which are no others here
                 help="How files are read: auto, direct, buffered or mmap.  [default: auto]")
ENGINE = (
    flag("--tp", type=click.IntRange(min=1), metavar="N", aliases=TP_ALIASES, help="Ranks to cut the model over.  [default: 1; a repacked model's own]"),
    flag("--dcp", type=click.IntRange(min=1), default=1, metavar="N", aliases=DCP_ALIASES,
         help="Ranks that hold the MLA cache together, a divisor of --tp.  [default: 1, each holds all of it]"),
    flag("--ranks", default="auto", metavar="HOW", help="virtual, in one process, or processes.  [default: auto, processes where a launcher or the GPUs say so]"),
    flag("--collectives", default="nccl", metavar="HOW", help="Between ranks that have a GPU each: nccl, or peer, inside a kernel.  [default: nccl]"),
    flag("--rendezvous-timeout", type=Number(0, min_open=True), default=60, metavar="SECONDS", help="For ranks that are processes to find each other.  [default: 60]"),
    flag("--max-model-len", type=click.IntRange(min=1), metavar="N", aliases=["--context-length", "--ctx-size", "-c", "--max-seq-len"],
          help="Longest context, in tokens.  [default: what fits]"),
    flag("--max-batch", type=click.IntRange(min=1), default=1, metavar="N",
          aliases=["--max-num-seqs", "--max-running-requests", "-np", "--max-batch-size"], help="Sequences at a time.  [default: 1]"),
    flag("--kv-cache-dtype", default="auto", metavar="TYPE", help="auto, bf16 or fp8_e4m3.  [default: auto]"),
    flag("--decode-backend", default="auto", metavar="NAME", aliases=["--decode-attention-backend", "--attention-backend"],
          help="What runs the decode step; an unknown name lists them.  [default: auto]"),
    flag("--no-progress", is_flag=True, aliases=["--disable-tqdm"], help="No progress while loading."),
    *DRAFT, *_DRAFTING,
    LOAD_MODE,
    *flags_of(OF_A_MODEL),
)
engine = flags(*ENGINE)
_ENGINE_NAMES = ("tp", "dcp", "ranks", "collectives", "rendezvous_timeout", "max_model_len", "max_batch", "kv_cache_dtype", "decode_backend",
                 "load_mode", "draft_model", "acceptance", "acceptance_length", "draft_sampling", "draft_rows", "confidence_threshold")


def engine_arguments(flags: dict) -> dict:
    """Takes the flags of `engine` that say how a model is opened out of `flags`, under the names of `k3cuda.LLM`."""
    return {name: flags.pop(name) for name in _ENGINE_NAMES} | {"num_drafts": flags.pop("num_speculative_tokens")}


def server_engine(max_batch: int):
    """The flags of `engine` with another default for --max-batch."""
    batch = {"default": max_batch, "help": f"Sequences at a time.  [default: {max_batch}]"}
    return flags(*((names, attributes | batch if "--max-batch" in names else attributes) for names, attributes in ENGINE))


def effort(reasoning_effort: str | None, no_think: bool, model: str) -> str:
    """One effort from the flag, its alias and the model's default."""
    if no_think and reasoning_effort not in (None, "none"):
        raise UsageError(f"--no-think and --reasoning-effort {reasoning_effort} exclude each other", "give one of them")
    return "none" if no_think else reasoning_effort or default_effort(model)


def sampling_arguments(flags: dict) -> dict:
    """What the flags of `sampling` are called by SamplingParams."""
    renamed = {"stop_token_id": "stop_token_ids"}
    return {renamed.get(name, name): value for name, value in flags.items()}
