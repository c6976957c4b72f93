"""`k3cuda bench plot`: what the benchmarks wrote, as SVG."""
import json
from pathlib import Path

import click

from ..bench.plots import KINDS, picture
from ..errors import UsageError
from . import options
from .bench import bench
from .output import Result
from .prompts import read_file

PLOT = options.flag("--plot", metavar="FILE.svg", help="Write a plot of the result there as well.")


@bench.command(cls=options.Command)
@click.argument("results", metavar="RESULT.json...", nargs=-1, required=True)
@options.flags(options.flag("--kind", type=click.Choice(list(KINDS)), help="What to plot.  [default: the first that there are numbers for]"), options.OUTPUT)
def plot(results, kind, output):
    """Plot what benchmarks wrote: latency against concurrency, acceptance by position, or the roofline of a step. Several files go into one plot.

    Prints SVG.
    """
    result = Result(output)
    result.write(picture([(Path(name).stem, _read(name)) for name in results], kind))
    result.close()


def _read(name: str) -> dict:
    try:
        found = json.loads(read_file(name))
    except (ValueError, RecursionError) as e:
        raise UsageError(f"{name}: no JSON ({e})") from e
    if not isinstance(found, dict):
        raise UsageError(f"{name}: found {type(found).__name__}, wanted the result of a benchmark")
    return found


class Plot:
    """The file of --plot, or nothing. One that cannot be written is told before a benchmark runs."""

    def __init__(self, path: str | None, kind: str):
        self._result, self._kind = None if path is None else Result(path), kind

    def write(self, name: str, document: dict) -> None:
        """UsageError where the document has no numbers for it."""
        if self._result is not None:
            self._result.write(picture([(name, document)], self._kind))
            self._result.close()
