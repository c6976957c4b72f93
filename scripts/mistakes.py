"""What known mistakes cost a trained model: the held-out negative log-likelihood with each of them put into the reference.

    python scripts/mistakes.py MODEL [--items 20] [--output FILE.md]

A row is a mistake, the mean rise over problems of what an answer costs (nats), its standard error over the paired problems, and their
ratio. The reference scores without a mistake first. Needs no PyTorch and no GPU.
"""
import sys
from pathlib import Path

import click
import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from demo_training.mistakes import MISTAKES, injected  # noqa: E402
from demo_training.rows import ANSWER, LONG, PADDING, Rows  # noqa: E402
from k3cuda import LLM  # noqa: E402
from k3cuda.cli.tokenize import open_tokenizer  # noqa: E402
from k3cuda.config import DECODE_ROWS  # noqa: E402
from k3cuda.runtime.demo_tasks import TASKS  # noqa: E402

SEEN = 3.0   # standard errors


def costs(model: str, rows) -> np.ndarray:
    """Of every row of (ids, kinds) the negative log-likelihood of its answer tokens, in nats."""
    found = []
    with LLM(model, max_batch=1, max_model_len=max(len(ids) for ids, _ in rows) + 1) as llm:
        for ids, kinds in rows:
            ids, kinds = ids[kinds != PADDING].tolist(), kinds[kinds != PADDING]
            with llm.prefill(ids[:1]) as session:
                logits = np.concatenate([session.logits.copy()[None], *(session.step(ids[at:at + DECODE_ROWS]) for at in range(1, len(ids) - 1, DECODE_ROWS))])
            z = logits[:len(ids) - 1].astype(np.float64)
            z = np.where(np.isfinite(z), z, 0)   # of a model that is broken altogether: it says nothing
            largest = z.max(1, keepdims=True)
            of_token = largest[:, 0] + np.log(np.exp(z - largest).sum(1)) - z[np.arange(len(z)), ids[1:]]
            found.append(of_token[kinds[1:] == ANSWER].sum())
    return np.array(found)


@click.command(help=__doc__.partition("\n")[0])
@click.argument("model")
@click.option("--items", default=20, show_default=True, help="Problems of each task.")
@click.option("--tasks", default=",".join(t for t in TASKS if t != "needle"), show_default=True, help="With commas.")
@click.option("--size", "sizes", multiple=True, metavar="TASK=N", help="Problems of another size than those of the held-out set.")
@click.option("--output", type=click.Path(dir_okay=False), help="Write the table there as well.")
def main(model, items, tasks, sizes, output):
    # Room for any tokenizer's problems; padding costs nothing here.
    rows = Rows(open_tokenizer(model), sizes={task: (int(n),) for task, n in (pair.split("=") for pair in sizes)}, length=LONG)
    tests = [pair for task in tasks.split(",") for pair in zip(*rows.held_out(task, items))]
    right = costs(model, tests)
    lines = [f"{len(tests)} problems, {right.mean():.4f} nats an answer", "", "| mistake | rise | standard error | ratio | seen |", "| --- | --- | --- | --- | --- |"]
    print("\n".join(lines), flush=True)
    for name in MISTAKES:
        with injected(name):
            rise = costs(model, tests) - right
        error = rise.std(ddof=1) / len(rise) ** 0.5
        ratio = rise.mean() / error if error else 0.0
        lines.append(f"| {name} | {rise.mean():.3g} | {error:.2g} | {ratio:.1f} | {'yes' if ratio > SEEN else 'no'} |")
        print(lines[-1], flush=True)
    assert np.array_equal(costs(model, tests[:3]), right[:3]), "the reference is not as it was"
    if output:
        Path(output).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
