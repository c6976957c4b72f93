"""`k3cuda plan`: the decode step, operation by operation."""
import click

from . import options
from .output import Result


@click.command(cls=options.Command)
@options.model(default="demo")
@options.flags(
    options.flag("--tp", type=click.IntRange(min=1), metavar="N", help="Ranks to cut the model over.  [default: 1; with --markdown the most]"),
    options.flag("--markdown", is_flag=True, help="The whole page, with bytes, buffers and weights."), options.OUTPUT)
def plan(model, tp, markdown, output):
    """Print the operations of one decode step. Only the model's config.json is read."""
    from .. import dataflow
    from ..config import K3Config
    from ..plan import build_plan
    from ..runtime.demo import DEMO, open_demo

    result = Result(output)
    cfg = open_demo().cfg if model == DEMO else K3Config.from_json(model)
    if markdown:
        result.write(dataflow.markdown(cfg, tp))
    else:
        built = build_plan(cfg, tp or 1)
        result.write("".join(f"{op.phase:5}  {op}\n" for op in built.ops))
        result.write("".join(f"commit {op}\n" for op in built.commit))
    result.close()
