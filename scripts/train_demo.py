"""Trains the demo model and its two drafts, and writes them as checkpoints in the released layout.

    python scripts/train_demo.py OUT --minutes 8        # on a GPU: as many steps as fit, all of it included
    python scripts/train_demo.py OUT --size toy --steps 400 --device cpu --workers 0

The same call again goes on where the last one stopped. Needs PyTorch, which nothing else of this project does; docs/demo.md has the data, the sizes
and the scores, and scripts/check_demo.py compares what was written with the reference.
"""
import os
import sys
import time
from pathlib import Path

import click

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]


LENGTHS = {"demo": ((0.0, 128), (0.1, 256), (0.2, 512), (0.35, 1024), (0.5, 2048)), "toy": ((0.0, 128),)}
BATCH = {"demo": (400, 24576), "toy": (48, 0)}   # short rows, tokens of long ones
# What `Rows` makes of it. The toy learns to copy up to four words and to add two digits.
OPTIONS = {"demo": {}, "toy": {"shares": {"copying": 2, "addition": 1}, "sizes": {"copying": (1, 2, 3, 4), "addition": (1,)}, "length": 48}}
DRAFT_STEPS = {"demo": 1000, "toy": 60}
SCORED = {"demo": (100, 500), "toy": (10, 10)}   # held-out items of a task, on the way and at the end; of sums of two digits there are few
RESERVE_S = 40        # of a budget in minutes: last scores and files
DRAFT_PART = 0.18     # of the rest


@click.command(help=__doc__.partition("\n")[0])
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--minutes", type=float, help="Choose the number of steps by this time, and stop at it.")
@click.option("--steps", type=int, help="The number of steps, whatever they take; with the seed it decides the weights.")
@click.option("--size", type=click.Choice(list(BATCH)), default="demo", show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--eager", is_flag=True, help="Launch every kernel of a step by itself, also on a GPU: no CUDA graphs.")
@click.option("--plain", is_flag=True, help="PyTorch's own operations between products, also on a GPU: no kernels of demo_training/fused.cu.")
@click.option("--workers", default=max(1, min(28, len(os.sched_getaffinity(0)) - 2)), show_default=True, help="Processes that make text.")
def main(out, minutes, steps, size, seed, device, eager, plain, workers):
    began = time.monotonic()
    # Here and not above: processes that make text load this file and need none of it.
    import torch
    from demo_training.draft import Draft, TrainedDraft
    from demo_training.export import Trained
    from demo_training.model import K3
    from demo_training.shapes import config, draft_json
    from demo_training.train import Schedule, Trainer
    from demo_training.train_drafts import acceptance, train_drafts
    from demo_training.vocabulary import train_tokenizer
    from k3cuda.draft_config import GQA, MLA
    from k3cuda.runtime.made_draft import write_draft
    from k3cuda.runtime.surroundings import surroundings
    from k3cuda.runtime.tokenizer import Tokenizer
    from k3cuda.runtime.write_checkpoint import write_checkpoint

    if minutes is None and steps is None:
        raise click.UsageError("give --minutes, --steps, or both")
    between = {}
    if device == "cuda" and not plain:   # it loads the driver's bindings
        from demo_training import fused
        between["between"] = fused
    is_fixed = steps is not None
    until = began + (60 * minutes - RESERVE_S) * (1 - DRAFT_PART) if minutes else float("inf")
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "tiktoken.model").exists():
        train_tokenizer(seed).write_files(out)
    tokenizer = Tokenizer.from_dir(out)
    model = K3(config(size, tokenizer), seed, torch.bfloat16 if device == "cuda" else torch.float32, **between)
    trainer = Trainer(model, tokenizer, out, seed, workers, device, OPTIONS[size], SCORED[size][0], device == "cuda" and not eager)
    if (out / "state.pt").exists():
        trainer.load()
    else:
        if steps is None:
            mean = trainer.measure(*BATCH[size], LENGTHS[size])
            steps = int((until - time.monotonic()) / mean / 10) * 10
            if steps < 10:
                raise SystemExit(f"{minutes} minutes hold {(until - time.monotonic()) / mean:.1f} steps of {mean:.2f} s beside the rest: give more")
        trainer.schedule = Schedule(steps, *BATCH[size], LENGTHS[size])
    trainer.is_fixed = is_fixed
    trainer.log(started=vars(trainer.schedule) | {"seed": seed, "size": size, "at": trainer.step, "device": device, "torch": torch.__version__,
                                                        "commit": surroundings(None)["commit"], "gpu": torch.cuda.get_device_name() if device == "cuda" else None})
    if not trainer.run(until):
        trainer.log(stopped=trainer.step, of=trainer.schedule.count)
        raise SystemExit("the time is over; the same call goes on")
    write_checkpoint(Trained(model, tokenizer), fresh(out / "demo"), single_file=True)
    model.room = model.cfg.num_experts / model.cfg.num_experts_per_token   # from here on as when decoding
    drafts = {family: Draft(draft_json(family, model.cfg, tokenizer), model, seed).to(device) for family in (MLA, GQA)}
    train_drafts(trainer, drafts, DRAFT_STEPS[size], began + 60 * minutes - RESERVE_S if minutes else float("inf"))
    shares, count = trainer.rows.shares, SCORED[size][0]
    tests = [(ids.long(), kinds) for ids, kinds in trainer.tensors([trainer.rows.held_out(task, count) for task in shares])]
    for family, draft in drafts.items():
        write_draft(TrainedDraft(draft), fresh(out / f"draft-{family}"))
        trainer.log(draft=family, acceptance_length={task: round(acceptance(model, draft, *test), 2) for task, test in zip(shares, tests)})
    trainer.log(bytes=sum(f.stat().st_size for name in ("demo", "draft-mla", "draft-gqa") for f in (out / name).iterdir()))
    trainer.end(SCORED[size][1], began)


def fresh(folder: Path) -> Path:
    """A folder that is not there: what an earlier call wrote into it is removed."""
    if folder.exists():
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    return folder


if __name__ == "__main__":
    main()
