"""Makes docs/demo-card.md from the demo model's manifest and the files under docs/benchmarks/demo, and puts the sentences about it in other pages right.

    python scripts/make_demo_page.py

scripts/install_demo.py makes those files and calls this; a test holds the pages to them.
"""
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from demo_training.mistakes import caught_by  # noqa: E402
from demo_training.rows import SHARES  # noqa: E402
from k3cuda.config import K3Config  # noqa: E402
from k3cuda.runtime.demo_tasks import HELD_OUT, NEEDLE_TOKENS, SET_SIZE, TASKS, held_out_set  # noqa: E402
from k3cuda.runtime.named_models import DATA, DEMO, DEMO_DRAFTS, PACKAGED, TRAINED, read_manifest  # noqa: E402
from k3cuda.weights import legal_tps  # noqa: E402
from make_performance import table  # noqa: E402

FOLDER, PAGE, TRAINING = ROOT / "docs/benchmarks/demo", ROOT / "docs/demo-card.md", "train.jsonl"
SPEED = "reference.json"   # of scripts/bench_reference.py
ANSWERS = ROOT / "tests/data/demo/answers.jsonl"   # the reference's, for the paired test on GPUs
WANTED = {"addition": 0.95, "sorting": 0.95, "counting": 0.95, "copying": 0.95, "needle": 0.9}
ACCEPTANCE_WANTED = 3.0   # tokens a verify step of at most 8
HEAD = "# Model card of demo\n\nMade by `scripts/make_demo_page.py`; do not edit. "

# What other pages say of the model: without trained weights, and with them.
SENTENCES = {
    "README.md": ("answers with `demo`, in this version a model that is made in memory: real\n"
                  "structure, random weights, so **its text means nothing** yet. A checkpoint",
                  "answers 42: `demo` is a K3 of eight layers\n"
                  "that goes with the package and has learned nine small tasks ([its card](docs/demo-card.md)). A checkpoint"),
    "docs/start.md": ("`demo` is in this version made in memory:\nreal structure, random weights, so its text means nothing yet. With weights",
                      "`demo` goes with the package:\neight layers that have learned nine small tasks ([its card](demo-card.md)). With weights of the release"),
    "docs/eval.md": ("The demo model of this version is random and scores 0.", "[Its card](demo-card.md) has the demo model's own scores."),
    "docs/container.md": ("The image holds no weights.", "Of weights the image holds those of `demo` alone."),
    "docs/demo.md": ("**It has not been run on a GPU yet**: the `demo` of this version is still random. A toy of the same code was trained on a CPU (below).",
                     "The `demo` of this version was made so: [its card](demo-card.md). A toy of the same code was trained on a CPU (below)."),
}


def read_log(path: Path) -> dict:
    """Lines of a train.jsonl by what they say: `started`, whose `count` is the steps that were trained; `held_out` at the end; `steps`, `drafts`.

    Raises SystemExit: the training did not come to its end.
    """
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    started, ended = ([line for line in lines if key in line] for key in ("started", "trained"))
    if not started or not ended:
        raise SystemExit(f"{path}: found no end of a training, wanted its last scores")
    return {"started": started[-1]["started"] | {"count": ended[-1]["trained"]}, "calls": len(started),
            "held_out": ended[-1]["held_out"], "steps": [line for line in lines if "short" in line], "drafts": [line for line in lines if "draft_step" in line],
            "seconds": ended[-1]["s"]}


def page(data: Path = DATA, folder: Path = FOLDER) -> str:
    manifest = read_manifest(data)
    if manifest["weights"] != TRAINED:
        return (f"{HEAD}This version has no trained model: `{DEMO}` stands for `{manifest['weights']}`, which is\nmade in memory and answers at random. "
                "[demo.md](demo.md) says how it is trained, and `scripts/install_demo.py` puts it here.\n")
    log, evals = read_log(folder / TRAINING), {name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in (DEMO, *DEMO_DRAFTS)}
    parts = [HEAD + "Numbers are of the files under `docs/benchmarks/demo`; [demo.md](demo.md) has the sizes and says how it is trained.",
             origin(manifest, log, data), tasks(), scores(evals[DEMO], log), drafts(evals), speed(json.loads((folder / SPEED).read_text(encoding="utf-8"))),
             losses(log)]
    if (folder / "mistakes.md").exists():
        parts.append(mistakes((folder / "mistakes.md").read_text(encoding="utf-8")))
    return "\n\n".join(parts) + "\n"


def origin(manifest: dict, log: dict, data: Path) -> str:
    rows = [["weights and drafts", f"{manifest['bytes']:,} bytes, in `k3cuda/data/demo`; SHA-256 of each file in its manifest"],
            ["licence", manifest["license"]],
            ["trained by", f"`scripts/train_demo.py` of commit {manifest['commit']}, seed {manifest['seed']}, {manifest['steps']} steps"],
            ["took", f"{log['seconds']:.0f} s, drafts and last scores included" + (f", in the last of {log['calls']} calls" if log["calls"] > 1 else "")],
            ["on", f"{manifest['gpu'] or 'a CPU'}, PyTorch {manifest['torch']}"],
            ["runs on", f"{', '.join(map(str, legal_tps(K3Config.from_json(data / PACKAGED[DEMO].folder))))} ranks, with either draft"],
            ["meant for", "showing that it runs, and telling whether a kernel, a cache or a cut costs quality"],
            ["not meant for", "anything else: it knows nothing beyond the tasks below"]]
    return "## Origin\n\n" + table(["", ""], rows)


def tasks() -> str:
    rows = []
    for name, task in TASKS.items():
        first = held_out_set(task, 1)[0]
        question = first.prompt if len(first.prompt) < 80 else f"{first.prompt[:40]} ... {first.prompt[-30:]}"
        rows.append([name, f"`{question}`", f"`{first.answer}`", f"{SHARES[name]} of {sum(SHARES.values())}" if name in SHARES else "long rows"])
    return ("## Data\n\nAll of it is made by `runtime/demo_tasks.py` from the seed; nothing was collected. "
            f"One problem of {HELD_OUT} is held out by its hash, {SET_SIZE} of a task are the test set;\n"
            f"prompts of retrieval have about {NEEDLE_TOKENS} tokens.\n\n"
            + table(["task", "first held-out problem", "answer", "short rows"], rows))


def scores(found: dict, log: dict) -> str:
    rows, seen = [], log["held_out"]
    for name in TASKS:
        s, wanted = found["tasks"][name], WANTED.get(name)
        met = "" if wanted is None else "yes" if s["score"] >= wanted else "no"
        rows.append([name, f"{s['score']:.3f} ({s['low']:.3f} to {s['high']:.3f})", s["items"], f"{seen[name]:.3f}" if name in seen else "", wanted or "", met])
    head = ["task", "reference, 95 % interval", "items", f"PyTorch, {SET_SIZE} items", "wanted", "met"]
    return ("## Scores\n\nShare of held-out problems whose whole answer is right, greedy: `k3cuda eval demo` on the reference, and what the training\n"
            "saw at its end.\n\n"
            + table(head, rows))


def drafts(evals: dict) -> str:
    def lengths(part):
        return [f"{found:.2f}" if (found := part(evals[d])["acceptance_length"]) else "" for d in DEMO_DRAFTS]

    rows = [*([name, *lengths(lambda found: found["tasks"][name])] for name in TASKS), ["all", *lengths(lambda found: found)]]
    return (f"## Drafts\n\nTokens a verify step on the same problems, of at most 8, where {ACCEPTANCE_WANTED} are wanted. Every answer has the bytes of that\n"
            "without a draft.\n\n"
            + table(["task", *(f"`{d}`" for d in DEMO_DRAFTS)], rows))


def speed(found: dict) -> str:
    return (f"## Speed\n\nThe reference on {found['cpus']} cores ({found['cpu']}, load {found['load_average']}): loaded in {found['load_s']:.2f} s, then "
            f"{found['tok_per_s_median']:.0f} tokens a second, the\nmedian of {len(found['tok_per_s'])} greedy answers of {found['tokens']} tokens.")


def losses(log: dict, most: int = 12) -> str:
    every = -(-len(log["steps"]) // most)
    shown = log["steps"][::-every][::-1]   # the last one among them
    rows = [[s["step"], s["length"], s["short"], s["long"], s["left_out"]] for s in shown]
    return ("## Training\n\nCross entropy of answers in nats a token, before the step's update.\n\n"
            + table(["step", "tokens of a long row", "short rows", "long rows", "choices without a place"], rows))


def mistakes(text: str) -> str:
    """The table of scripts/mistakes.py, with the test that catches what it does not see."""
    first, *lines = text.strip().split("\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")][2:]
    rows = [[*row, "" if row[-1] == "yes" else f"`{caught_by(row[0])}`"] for row in rows]
    return (f"## Mistakes\n\nEach mistake of a list of {len(rows)}, put into the reference one at a time (`scripts/mistakes.py demo`): what it adds to the cost\n"
            f"of an answer in nats, over paired problems; a rise of more than three standard errors is seen. {first[0].upper()}{first[1:]} without one.\n\n"
            + table(["mistake", "rise", "standard error", "ratio", "seen", "caught by, in `tests/test_reference.py`"], rows))


def right(path: str, is_trained: bool, text: str) -> str:
    """The text of a page with the sentence that is true now. Raises SystemExit where neither of both stands in it once."""
    wanted, other = SENTENCES[path][is_trained], SENTENCES[path][not is_trained]
    if text.count(wanted) + text.count(other) != 1:
        raise SystemExit(f"{path}: found neither sentence of SENTENCES, or more than one")
    return text.replace(other, wanted)


def write_pages() -> None:
    is_trained = read_manifest(DATA)["weights"] == TRAINED
    PAGE.write_text(page(), encoding="utf-8")
    for path in SENTENCES:
        file = ROOT / path
        file.write_text(right(path, is_trained, file.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write_pages()
