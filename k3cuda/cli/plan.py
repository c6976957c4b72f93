"""`k3cuda plan`: the decode step, operation by operation."""
import click

from ..errors import UsageError
from . import options
from .bench import LONGEST_CONTEXT
from .model_argument import config_of
from .output import Result

TIMED_TP = 16     # ranks of the released model that fit a GPU each
TIMED_ROWS = 8   # more rows are another kernel, whose exchanges the model of time does not know


@click.command(cls=options.Command)
@options.model(default="kimi-k3")
@options.flags(
    options.flag("--tp", type=click.IntRange(min=1), metavar="N", aliases=options.TP_ALIASES,
                 help="Ranks to cut the model over.  [default: 1; with --markdown the most; with --project 8 and 16; with --timeline 16]"),
    options.flag("--markdown", is_flag=True, help="The whole page, with bytes, buffers and weights."),
    options.flag("--project", is_flag=True, help="What a step should take on GB300: a projection, with each term and its source."),
    options.flag("--timeline", is_flag=True, help="The predicted course of a step of up to 8 rows in one launch."),
    options.flag("--rows", type=click.IntRange(1, TIMED_ROWS), default=1, show_default=True, metavar="N", help="Rows of the step, with --timeline."),
    options.flag("--context", type=click.IntRange(0, LONGEST_CONTEXT), default=8192, show_default=True, metavar="N", help="Cached tokens, with --timeline."),
    options.flag("--experts", type=options.Number(min=1), metavar="F", help="Distinct experts a layer, with --timeline.  [default: uniform routing]"),
    options.flag("--svg", type=click.Path(dir_okay=False), metavar="FILE", help="Where --timeline draws it."), options.OUTPUT)
def plan(model, tp, markdown, project, timeline, rows, context, experts, svg, output):
    """Print the operations of one decode step. Only the model's config.json is read; kimi-k3 is the released one."""
    from .. import dataflow
    from ..plan import build_plan

    if len(chosen := [name for name, on in (("--markdown", markdown), ("--project", project), ("--timeline", timeline)) if on]) > 1:
        raise UsageError(f"{' and '.join(chosen)} exclude each other", "leave out all but one of them")
    if svg and not timeline:
        raise UsageError("--svg is what --timeline draws", "add --timeline")
    result, cfg = Result(output), config_of(model)
    if experts is not None and experts > cfg.num_experts:
        raise UsageError(f"--experts: found {experts:g}, wanted up to {cfg.num_experts}, which this model has in a layer")
    if markdown:
        result.write(dataflow.markdown(cfg, tp))
    elif project:
        from ..runtime import projection

        result.write(projection.text(cfg, tp))
    elif timeline:
        from ..runtime.atomic_file import atomic_file
        from .plan_timeline import report

        text, picture = report(build_plan(cfg, tp or TIMED_TP), rows, context, experts)
        result.write(text)
        if svg:
            with atomic_file(svg) as file:
                file.write(picture.encode())
    else:
        built = build_plan(cfg, tp or 1)
        result.write("".join(f"{op.phase:5}  {op}\n" for op in built.ops))
        result.write("".join(f"commit {op}\n" for op in built.commit))
    result.close()
