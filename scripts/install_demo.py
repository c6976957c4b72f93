"""Makes what scripts/train_demo.py wrote the package's `demo`: weights, the reference's answers, its page.

    python scripts/install_demo.py OUT [--items 100] [--mistakes 20] [--below-target] [--commit C]

OUT holds demo.tar, or the folders demo, draft-mla and draft-gqa, and train.jsonl. Everything is checked before a file of the package changes: sizes, the
released layout, held-out scores of the training, a finite forward pass of the reference with each draft. Then the reference answers the held-out sets
with and without drafts and scores with each known mistake, which takes most of an hour, and scripts/make_demo_page.py makes the model card. Needs no PyTorch.
"""
import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import click
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from make_demo_page import ANSWERS, FOLDER, SPEED, TRAINING, WANTED, read_log, write_pages  # noqa: E402
from k3cuda import LLM, SamplingParams, __license__  # noqa: E402
from k3cuda.cli.eval_results import read_results  # noqa: E402
from k3cuda.draft_config import GQA, MLA  # noqa: E402
from k3cuda.runtime.demo_tasks import TASKS  # noqa: E402
from k3cuda.runtime.draft_checkpoint import DraftSurvey  # noqa: E402
from k3cuda.runtime.named_models import DATA, DEMO, DEMO_DRAFTS, MANIFEST, PACKAGED, TRAINED  # noqa: E402
from k3cuda.runtime.safetensors_file import SafetensorsFile  # noqa: E402

MOST_BYTES = 16_000_000
ITEMS = 100   # of a task: a loss of one answer in 90 is then found beside the other configurations (tests/quality.py)
# What train_demo.py calls its folders, and what they are called in the package.
FOLDERS = {f"draft-{named.family}" if named.family else DEMO: named.folder for named in PACKAGED.values()}
FILES = {name: {"config.json", "model.safetensors"} | ({"generation_config.json", "tiktoken.model", "tokenizer_config.json"} if name == DEMO else set())
         for name in FOLDERS}


def check(out: Path, log: dict, below_target: bool) -> None:
    """SystemExit with what is wrong; CheckpointError where files are not those of a model."""
    for name, wanted in FILES.items():
        if (found := {f.name for f in (out / name).glob("*")}) != wanted:
            raise SystemExit(f"{out / name}: found {sorted(found)}, wanted {sorted(wanted)}")
    size = sum((out / name / file).stat().st_size for name, files in FILES.items() for file in files)
    if size > MOST_BYTES:
        raise SystemExit(f"{out}: found {size:,} bytes, wanted at most {MOST_BYTES:,}")
    for name in FILES:
        with contextlib.closing(SafetensorsFile.open(out / name / "model.safetensors")) as file:
            floats = [key for key, tensor in file.tensors.items() if tensor.dtype in ("F32", "BF16")]
            if bad := [key for key in floats if not np.isfinite(file.array(key).astype(np.float32)).all()]:
                raise SystemExit(f"{out / name}: values that are not finite in {len(bad)} tensors, the first: {bad[0]}")
    for family in (MLA, GQA):   # everything that headers can say is checked on opening
        if (found := DraftSurvey(out / f"draft-{family}").cfg) is None or found.family != family:
            raise SystemExit(f"{out / f'draft-{family}'}: found {f'a draft with {found.family} attention' if found else 'no draft'}, wanted one with {family}")
        with LLM(str(out / "demo"), str(out / f"draft-{family}"), max_model_len=128, max_batch=1) as llm:
            ids = llm.tokenizer.encode("17 + 25 =")
            if not np.isfinite(llm.logits(ids)).all():
                raise SystemExit(f"{out / 'demo'}: logits that are not finite")
            llm.generate([ids], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    held_out = log["held_out"]
    if missed := {task: held_out.get(task) for task, score in WANTED.items() if (held_out.get(task) or 0) < score}:
        said = f"held-out scores of the training: found {missed}, wanted {({task: WANTED[task] for task in missed})}"
        if not below_target:
            raise SystemExit(f"{said}; train longer, or give --below-target, and the page will say so")
        click.echo(said, err=True)


def package(out: Path, log: dict, data: Path = DATA) -> None:
    """Puts the folders into `data`, with a manifest that says how they were made."""
    started, size, sums = log["started"], 0, {}
    found = {"weights": TRAINED, "commit": started["commit"], "seed": started["seed"], "steps": started["count"], "torch": started["torch"],
             "gpu": started["gpu"], "license": __license__}
    data.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=data.parent) as new:   # all of it beside what is there, which a disk that is full leaves as it was
        for name, files in FILES.items():
            (folder := Path(new) / FOLDERS[name]).mkdir()
            for file in sorted(files):
                shutil.copyfile(out / name / file, folder / file)
                size += (folder / file).stat().st_size
                sums[f"{folder.name}/{file}"] = hashlib.sha256((folder / file).read_bytes()).hexdigest()
        (Path(new) / MANIFEST).write_text(json.dumps(found | {"bytes": size, "sha256": sums}, indent=1) + "\n", encoding="utf-8")
        for name in (*FOLDERS.values(), MANIFEST):
            if (data / name).is_dir():
                shutil.rmtree(data / name)
            (Path(new) / name).replace(data / name)


def evaluate(items: int) -> None:
    """The reference's greedy answers to the held-out sets: kept for the paired test on GPUs, and the documents of three evaluations for the page."""
    with tempfile.TemporaryDirectory() as folder:
        answers = {}
        for draft in (None, *DEMO_DRAFTS):
            results = Path(folder) / f"{draft or DEMO}.jsonl"
            words = ["eval", DEMO, "--temperature", "0", "--limit", str(items * len(TASKS)), "--json", "--results", str(results)]
            words += ["--draft-model", draft] if draft else []
            done = subprocess.run([sys.executable, "-m", "k3cuda", *words], cwd=ROOT, stdout=subprocess.PIPE, check=True)
            answers[draft] = read_results(str(results))[1]
            if other := unlike(answers[draft], answers[None]):
                raise SystemExit(f"{draft}: {len(other)} of the reference's greedy answers differ with it, the first: {other[0]}")
            (FOLDER / f"{draft or DEMO}.json").write_text(json.dumps(json.loads(done.stdout), indent=1) + "\n", encoding="utf-8")
        ANSWERS.parent.mkdir(parents=True, exist_ok=True)
        ANSWERS.write_text("".join(json.dumps({name: value for name, value in json.loads(line).items() if not name.endswith("_s")}) + "\n"
                                   for line in (Path(folder) / f"{DEMO}.jsonl").read_text(encoding="utf-8").splitlines()), encoding="utf-8")


def unlike(ours: dict, theirs: dict) -> list[str]:
    """Ids of answers (of `read_results`) that are not the same text, right or wrong, or that only one of both has."""
    def said(answer):
        return answer and [answer[name] for name in ("text", "reasoning", "finish_reason", "error")]

    return [key[0] for key in dict.fromkeys([*theirs, *ours]) if said(ours.get(key)) != said(theirs.get(key))]


@click.command(help=__doc__.partition("\n")[0])
@click.argument("out", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--items", type=click.IntRange(min=1), default=ITEMS, show_default=True, help="Held-out problems of a task that the reference answers.")
@click.option("--mistakes", type=click.IntRange(min=0), default=20, show_default=True, help="Problems of a task that each known mistake is scored on; 0: leave out.")
@click.option("--below-target", is_flag=True, help="Also a model that misses a target.")
@click.option("--commit", help="Of the code that trained, where that machine had no git and no K3CUDA_COMMIT.")
def main(out, items, mistakes, below_target, commit):
    log = read_log(out / TRAINING)
    log["started"]["commit"] = log["started"]["commit"] or commit
    if log["started"]["commit"] is None:
        raise click.UsageError(f"{out / TRAINING} has no commit; give --commit")
    with tempfile.TemporaryDirectory() as unpacked:
        if (out / "demo.tar").exists():
            with tarfile.open(out / "demo.tar") as tar:
                tar.extractall(unpacked, filter="data")
            folder = Path(unpacked)
        else:
            folder = out
        check(folder, log, below_target)
        package(folder, log)
    FOLDER.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(out / TRAINING, FOLDER / TRAINING)
    # Its command is in the file: no path of this machine.
    speed = ["scripts/bench_reference.py", "--model", DEMO, "--output", (FOLDER / SPEED).relative_to(ROOT)]
    subprocess.run([sys.executable, *speed], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    evaluate(items)
    if mistakes:
        subprocess.run([sys.executable, ROOT / "scripts/mistakes.py", DEMO, "--items", str(mistakes), "--output", FOLDER / "mistakes.md"], check=True)
    write_pages()


if __name__ == "__main__":
    main()
