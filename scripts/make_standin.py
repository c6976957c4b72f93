"""Writes the whole layout of the release in holes: 96 shards, 497,220 tensors, 1.56 TB that take less than 200 MB of disk.

    python scripts/make_standin.py standin
    python scripts/make_standin.py small --layers 4

Samples of every kind of tensor carry position codes. For headers, preflight, slicing and the whole load path at real scale; what is
read from holes says nothing about a disk.
"""
import click

from k3cuda.cli.model_argument import config_of
from k3cuda.config import RELEASED
from k3cuda.errors import K3Error
from k3cuda.runtime.standin import write_standin


@click.command(help=__doc__.partition("\n")[0])
@click.argument("out", type=click.Path())
@click.option("--config", default=RELEASED, show_default=True, help="config.json to follow, or its folder.")
@click.option("--layers", type=click.IntRange(min=1), help="The first so many layers only.")
def main(out, config, layers):
    try:
        folder = write_standin(config_of(config, layers), out)
    except K3Error as e:
        raise click.ClickException(str(e)) from None
    sizes = [f.stat() for f in folder.iterdir()]
    click.echo(f"{folder}: {sum(s.st_size for s in sizes):,} bytes, {sum(s.st_blocks for s in sizes) * 512:,} of them on the disk", err=True)


if __name__ == "__main__":
    main()
