"""`k3cuda repack`: a model as files in kernel order, for those who start often."""
import click

from . import options
from .answers import shows_progress
from .output import Result


@click.command(cls=options.Command)
@options.model()
@options.flags(
    options.flag("--tp", type=click.IntRange(min=1), required=True, metavar="N", aliases=options.TP_ALIASES, help="Ranks that the files are for."),
    options.flag("--out", required=True, metavar="DIR", help="Folder to make. Until it is whole its name ends in .unfinished."),
    options.LOAD_MODE,
    options.flag("--verify/--no-verify", default=True, help="Hash the checkpoint first, and compare where there is something to compare with.  [default: verify]"),
    options.flag("--no-progress", is_flag=True, aliases=["--disable-tqdm"], help="No progress."),
    options.flag("--json", is_flag=True, help="One JSON document."), options.OUTPUT)
def repack(model, tp, out, load_mode, verify, no_progress, json, output):
    """Write MODEL as one file a rank and layer, in the order in which kernels read them.

    The folder is a model like any other, for so many ranks only. A run that ended early is taken up again.
    """
    from ..runtime.block_reader import MODES
    from ..runtime.open_model import choice
    from ..runtime.repacking import repack as run

    result = Result(output)
    found = run(model, tp, out, load_mode=choice("load_mode", load_mode, MODES), verify=verify, show=not no_progress and shows_progress())
    if json:
        result.document(found, indent=2)
    else:
        result.write(f"{found['folder']}: {found['files']} files, {found['bytes'] / 1e9:.2f} GB for {tp} rank{'s' * (tp > 1)}, "
                     f"layout version {found['layout_version']}\n")
    result.close()
