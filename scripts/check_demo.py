"""Compares the PyTorch model with the release's golden logits, and what scripts/train_demo.py wrote with the reference. On a CPU.

    python scripts/check_demo.py [OUT] [--problems 3]

OUT holds the folders demo, draft-mla and draft-gqa: logits of both, and greedy answers with and without each draft. Without OUT only the golden
model of the tests is compared. Needs PyTorch.
"""
import json
import sys
from pathlib import Path

import click

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from demo_training.check import drafts_agree, golden_agrees, logits_agree  # noqa: E402
from demo_training.rows import Rows  # noqa: E402
from k3cuda.draft_config import GQA, MLA  # noqa: E402
from k3cuda.runtime.tokenizer import Tokenizer  # noqa: E402


@click.command(help=__doc__.partition("\n")[0])
@click.argument("out", type=click.Path(exists=True, file_okay=False, path_type=Path), required=False)
@click.option("--problems", default=3, show_default=True, help="Of each short task, answered with and without drafts.")
def main(out, problems):
    print(json.dumps({"golden": golden_agrees(Path(__file__).resolve().parents[1] / "tests/data/k3-headdims")}), flush=True)
    if out is None:
        return
    rows = Rows(Tokenizer.from_dir(out / "demo"))
    worst = max(logits_agree(out / "demo", rows.held_out(task, 1)[0][0].tolist()) for task in ("addition", "sorting", "copying"))
    print(json.dumps({"logits": worst} | {family: drafts_agree(out / "demo", out / f"draft-{family}", problems) for family in (MLA, GQA)}))


if __name__ == "__main__":
    main()
