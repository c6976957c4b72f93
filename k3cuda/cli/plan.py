"""`k3cuda plan`: the decode step, operation by operation."""
import click

from ..errors import UsageError
from . import options
from .model_argument import config_of
from .output import Result


@click.command(cls=options.Command)
@options.model(default="kimi-k3")
@options.flags(
    options.flag("--tp", type=click.IntRange(min=1), metavar="N", aliases=options.TP_ALIASES,
                 help="Ranks to cut the model over.  [default: 1; with --markdown the most; with --project 8 and 16]"),
    options.flag("--markdown", is_flag=True, help="The whole page, with bytes, buffers and weights."),
    options.flag("--project", is_flag=True, help="What a step should take on GB300: a projection, with each term and its source."), options.OUTPUT)
def plan(model, tp, markdown, project, output):
    """Print the operations of one decode step. Only the model's config.json is read; kimi-k3 is the released one."""
    from .. import dataflow
    from ..plan import build_plan
    from ..runtime import projection

    if markdown and project:
        raise UsageError("--markdown and --project exclude each other", "leave out one of them")
    result, cfg = Result(output), config_of(model)
    if markdown:
        result.write(dataflow.markdown(cfg, tp))
    elif project:
        result.write(projection.text(cfg, tp))
    else:
        built = build_plan(cfg, tp or 1)
        result.write("".join(f"{op.phase:5}  {op}\n" for op in built.ops))
        result.write("".join(f"commit {op}\n" for op in built.commit))
    result.close()
