"""MODEL: how a command gets it, and the configuration it names."""
import functools

import click

from ..errors import UsageError
from ..runtime.named_models import DEMO, NAMED, TINY_RANDOM, TINY_RANDOM_DRAFTS, draft_named, listed, model_named
from .flag_kinds import flag, flags

MODEL = flag("--model", "-m", metavar="PATH", aliases=["--model-path"], envvar="K3CUDA_MODEL", help=f"Checkpoint folder or file, or {listed(NAMED)}.")


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


def model_and_file(command=None, *, word: str = "FILE", unless: str | None = None):
    """MODEL as `model` takes it, and a FILE behind it: a single word is the file, of which `demo` brings its model along.

    Args:
        word: what --help calls the file, and the command in lower case. unless: the parameter that names a server, whose model it is then: it may be
            left out, and K3CUDA_MODEL is no name of it.
    """
    if command is None:
        return functools.partial(model_and_file, word=word, unless=unless)

    @click.argument("words", metavar=f"[MODEL] {word}", nargs=-1, required=True)
    @flags(MODEL)
    @click.pass_context
    @functools.wraps(command)
    def run(ctx, *args, model, words, **kwargs):
        if len(words) > 2:
            raise click.UsageError(f"found {len(words)} words, wanted [MODEL] {word}", ctx)
        is_server = unless is not None and kwargs[unless] is not None
        if is_server and ctx.get_parameter_source("model") is not click.core.ParameterSource.COMMANDLINE:
            model = None
        default, argument = DEMO if words[-1] == DEMO else None, words[0] if len(words) == 2 else None
        chosen = None if is_server and model is None and argument is None else _one_model(ctx, model, argument, default)
        return command(*args, model=chosen, **{word.lower(): words[-1]}, **kwargs)
    return run


def _one_model(ctx, by_flag: str | None, argument: str | None, default: str | None) -> str:
    is_flag = ctx.get_parameter_source("model") is click.core.ParameterSource.COMMANDLINE
    if is_flag and argument is not None and by_flag != argument:
        raise click.UsageError(f"two models: {argument!r} and --model {by_flag!r}; give one", ctx)
    chosen = by_flag if argument is None else argument
    if not (chosen or default):
        raise click.UsageError(f"no model; give the folder of a checkpoint, or {listed(NAMED)}, or set K3CUDA_MODEL", ctx)
    return chosen or default


def config_of(model: str, layers: int | None = None):
    """The K3Config that MODEL names, for commands that need no weights; `layers` cuts it short.

    Raises UsageError: more layers than there are. ConfigError: as K3Config.from_json.
    """
    from dataclasses import replace

    from ..config import RELEASED, RELEASED_FOLDER, K3Config
    from ..runtime.tiny_random import open_tiny_random

    model = model_named(model)
    cfg = open_tiny_random().cfg if model == TINY_RANDOM else K3Config.from_json(RELEASED_FOLDER if model == RELEASED else _config_file(model))
    if layers is None or layers == cfg.num_hidden_layers:
        return cfg
    if layers > cfg.num_hidden_layers:
        raise UsageError(f"--layers: found {layers}, the model has {cfg.num_hidden_layers}")
    lin = cfg.linear_attn_config
    lin = replace(lin, **{name: tuple(i for i in getattr(lin, name) if i <= layers) for name in ("kda_layers", "full_attn_layers")})
    return replace(cfg, num_hidden_layers=layers, linear_attn_config=lin)


def draft_config_of(draft: str, target):
    """The DraftConfig that --draft-model names, for commands that need no weights; `target` is the K3Config of its model.

    Raises ConfigError: as DraftConfig.from_json, or a draft of another target.
    """
    from dataclasses import replace

    from ..draft_config import RELEASED_DRAFT, RELEASED_DRAFT_NAME, DraftConfig, misfits
    from ..errors import ConfigError
    from ..runtime.tiny_random import open_tiny_random_draft

    found = draft_named(draft)
    if found in TINY_RANDOM_DRAFTS:
        cfg = open_tiny_random_draft(found).cfg
    else:
        cfg = DraftConfig.from_json(RELEASED_DRAFT if found == RELEASED_DRAFT_NAME else _config_file(found, "a DSpark draft"))
    if bad := misfits(replace(cfg, own_embedding=True, own_head=True), target):   # weights alone say whether it has them; its kernels are the same
        raise ConfigError(f"--draft-model {draft}: " + "; ".join(bad), "use a draft of this target")
    return cfg


def _config_file(model: str, what: str = "a Kimi K3 release"):
    """The config.json of MODEL, which may also be a file of weights beside it. ConfigError where reading it could not end."""
    from pathlib import Path

    from ..errors import ConfigError
    from ..runtime.downloads import check_is_here, no_text

    check_is_here(model)
    path = Path(model)
    path = path.parent / "config.json" if path.suffix == ".safetensors" else path / "config.json" if path.is_dir() else path
    if kind := no_text(path):
        raise ConfigError(f"{path}: found {kind[0]}, wanted the config of {what}", kind[1])
    return path
