"""The command `k3cuda`. Each command calls one function of the package and prints what it returns; heavy imports wait until then."""
import click

from .. import __version__
from . import bench_compare, bench_decode, bench_plot, bench_replay, bench_requests, bench_serve  # noqa: F401 - they add commands to bench
from .bench import bench
from .chat import chat
from .check import check
from .compile import compile
from .eval import evaluate
from .generate import generate
from .group import Group
from .info import info
from .plan import plan
from .repack import repack
from .serve import serve
from .tokenize import tokenize


def _dashes(name: str) -> str:
    return name.replace("_", "-")   # --max_tokens is --max-tokens


@click.group(cls=Group, context_settings={
    "help_option_names": ["-h", "--help"], "auto_envvar_prefix": "K3CUDA", "token_normalize_func": _dashes, "max_content_width": 110})
@click.version_option(__version__, prog_name="k3cuda", message="%(prog)s %(version)s")
def main():
    """Kimi K3 without torch: decode on NVIDIA GPUs, a NumPy reference everywhere else.

    stdout carries only the result, stderr everything else. Every flag has a variable: K3CUDA_GENERATE_MAX_TOKENS=64.
    """


for command in (generate, chat, serve, tokenize, info, check, repack, plan, compile, bench, evaluate):
    main.add_command(command)
