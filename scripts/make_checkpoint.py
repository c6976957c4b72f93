"""Writes a random model in the released layout, for tests and benchmarks.

    python scripts/make_checkpoint.py tiny
    python scripts/make_checkpoint.py wide --set hidden_size=1024 --set num_hidden_layers=12 --vision
    python scripts/make_checkpoint.py real --config K3/config.json        # 1.56 TB
"""
import json
import logging

import click

from k3cuda.config import K3Config
from k3cuda.errors import K3Error
from k3cuda.runtime.made_config import made_config
from k3cuda.runtime.made_model import MadeCheckpoint
from k3cuda.runtime.tiny_random import TINY_RANDOM, open_tiny_random
from k3cuda.runtime.write_checkpoint import write_checkpoint
from k3cuda.weights import checkpoint_bytes


def _changes(pairs) -> dict:
    changes = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        try:
            changes[key] = json.loads(value)
        except ValueError:
            equals = ""
        if not equals:
            raise click.BadParameter(f"{pair!r}, wanted KEY=JSON", param_hint="--set")
    return changes


@click.command(help=__doc__.partition("\n")[0])
@click.argument("out", type=click.Path())
@click.option("--config", type=click.Path(exists=True), help="config.json to follow. Default: a small one that fits 1 to 16 ranks.")
@click.option("--set", "pairs", metavar="KEY=JSON", multiple=True, help="Change a key of the small config's text_config.")
@click.option("--tiny-random", is_flag=True, help=f"The model {TINY_RANDOM!r}.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0))
@click.option("--fill", default="random", show_default=True, type=click.Choice(["random", "positions"]),
              help="positions: bits that encode tensor, expert, row and column.")
@click.option("--vision", is_flag=True, help="Add shards of picture tensors, which readers skip.")
@click.option("--single-file", is_flag=True, help="One model.safetensors and no index.")
def main(out, config, pairs, tiny_random, seed, fill, vision, single_file):
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if bool(config) + bool(pairs) + tiny_random > 1:
        raise click.UsageError("--config, --set and --tiny-random exclude each other")
    try:
        cfg = K3Config.from_json(config) if config else made_config(**_changes(pairs))
        source = open_tiny_random() if tiny_random else MadeCheckpoint(cfg, seed, fill)
        click.echo(f"{out}: {checkpoint_bytes(source.cfg):,} bytes of tensors", err=True)
        write_checkpoint(source, out, vision=vision, single_file=single_file)
    except K3Error as e:
        click.echo(f"error: {e}", err=True)
        raise SystemExit(e.code) from None


if __name__ == "__main__":
    main()
