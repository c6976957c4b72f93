"""Commands and links of README and docs: whatever stands in a fenced shell block runs here, or the tables below say where it runs or why it does
not; then it is read as far as possible. A command is unclassified never: what the tables don't name is run."""
import ast
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
from typing import NamedTuple

import click
import pytest
from command import ENVIRONMENT, ROOT, hears_interrupts

from k3cuda.cli import main
from k3cuda.runtime.tiny_random import open_tiny_random
from k3cuda.runtime.write_checkpoint import write_checkpoint

sys.path.insert(0, str(ROOT / "scripts"))
import locks  # noqa: E402

PAGES = {str(p.relative_to(ROOT)): p.read_text(encoding="utf-8") for p in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
EXTRAS = re.search(r"extras_require=(\{.*\})", (ROOT / "setup.py").read_text(encoding="utf-8"))[1]
DOCKER_FLAGS = {"--rm": 0, "--gpus": 1, "--read-only": 0, "--tmpfs": 1, "--network": 1, "--user": 1, "--shm-size": 1, "-v": 1, "-p": 1, "-e": 1}   # and words behind each

# A page -> the file that runs all its commands.
WHOLE_PAGES = {"docs/start.md": "tests/test_start_page.py"}
# How a command begins -> the file that runs it, by reading the page.
ELSEWHERE = {
    "python3 -m venv .venv": ".ci/run", ".venv/bin/pip install .": ".ci/run", ".venv-cu13/bin/": ".ci/run",
    "k3cuda eval demo questions.jsonl": "tests/test_docs.py",
    "k3cuda bench latency": "tests/test_request_times.py", "k3cuda bench throughput": "tests/test_request_times.py", "k3cuda bench decode": "tests/test_request_times.py",
    "k3cuda bench compare": "tests/test_bench_compare.py", "k3cuda bench plot": "tests/test_bench_plot.py",
    "k3cuda bench serve": "tests/test_bench_own_server.py", "k3cuda bench replay tiny-random": "tests/test_bench_replay.py",
    "k3cuda bench replay trace.jsonl": "tests/test_bench_own_server.py",
    "python examples/": "tests/test_examples.py", "mpirun -n 2 k3cuda": "tests/test_launchers.py", "srun -n 2 k3cuda": "tests/test_launchers.py",
    "python3 -m venv lm-eval": "scripts/lm_eval_recipe.py", "lm-eval/bin/": "scripts/lm_eval_recipe.py",
}
# How a command begins -> why nothing runs it here.
NOT_RUN = {
    "k3cuda serve /models/Kimi-K3 --tp 8": "needs eight GPUs", "MASTER_ADDR=gb01 RANK=5": "needs 16", "mpirun -n 16": "needs four machines",
    "export MASTER_ADDR": "of the command behind it", "sbatch ": "needs Slurm; tests/test_container.py reads the script",
    "scripts/gpu.sh collectives": "needs GPUs; without one tests/test_nccl.py runs the script behind it",
    "scripts/gpu.sh ranks": "needs GPUs",
    "docker ": "needs a container runtime", "python -m pip wheel": "its package needs a build environment from an index",
    "pip install 'k3cuda[": "needs a release in an index; CI installs the same extra from the tree", "python scripts/locks.py": "asks a package index for 2 GB",
    "sh scripts/gpu.sh": "needs a GPU", "k3cuda bench step --rank": "needs a GPU", "python scripts/check_demo.py": "needs PyTorch and trained weights", "python scripts/mistakes.py": "needs trained weights",
    "python scripts/install_demo.py": "changes the package; tests/test_demo.py calls its parts",
    "k3cuda eval OUT/demo": "needs trained weights",
}
# What a command gets besides, where random weights or a slow machine would take minutes.
SMALLER = {".venv/bin/k3cuda generate /models/Kimi-K3": ["-n", "4", "--no-think"], "k3cuda eval demo --temperature 0": ["--limit", "1", "-n", "4"]}
NOT_BUILT = set()   # commands that a page says are missing
OF_A_MODEL = {"generation_config.json", "modeling_kimi_linear.py", "repack.json"}   # files that come with weights
# Pages whose ```python blocks a test runs.
PYTHON_RUNS = {"README.md": "tests/test_docs.py", "docs/serve.md": "tests/test_serve.py", "docs/scripting.md": "tests/test_examples.py"}


class Command(NamedTuple):
    page: str
    text: str

    def __str__(self):
        return f"{self.page}: {self.text}"


def commands():
    for page, text in PAGES.items():
        for block in re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S):
            for line in block.replace("\\\n", " ").splitlines():
                line = re.sub(r"\s+", " ", re.sub(r" +# .*$", "", line))
                yield from (Command(page, part.strip()) for part in line.split("&&"))


COMMANDS = [c for c in commands() if c.page not in WHOLE_PAGES]


def matching(command: Command, table: dict) -> list[str]:
    return [start for start in table if command.text.startswith(start)]


RUN = [c for c in COMMANDS if not matching(c, ELSEWHERE) and not matching(c, NOT_RUN)]
LINTED = [c for c in COMMANDS if c not in RUN]


def takes(words) -> None:
    """click reads a command line as a user's and starts nothing."""
    command, rest = main, list(words)
    while isinstance(command, click.Group):
        command = command.commands[rest.pop(0)]
    command.make_context(command.name, rest)


def docker(words) -> None:
    if words[1] == "build":
        for given in (words[i + 1] for i, word in enumerate(words) if word == "--build-arg"):
            name, _, value = given.partition("=")
            assert f"\nARG {name}=" in DOCKERFILE and (name != "CUDA_LINE" or value in locks.LINES), given
        assert words[-1] == "."
        return
    at = 2
    while words[at] in DOCKER_FLAGS:
        if words[at] == "-e":
            assert words[at + 1] in main.variables()
        at += 1 + DOCKER_FLAGS[words[at]]
    assert re.fullmatch(r"k3cuda:cu1[23]", words[at]), words[at]
    if words[at + 1:]:
        takes(words[at + 1:])


def lint(text: str) -> None:
    words = shlex.split(text)
    while re.fullmatch(r"[A-Z_]+=\S+", words[0]):
        words.pop(0)
    if words[0].endswith("k3cuda"):
        takes(words[1:])
    elif words[0] in ("mpirun", "srun"):
        assert words[1] == "-n" and words[2] == words[words.index("--tp") + 1]   # a process a rank
        takes(words[words.index("k3cuda") + 1:])
    elif words[0] == "sbatch":
        assert (ROOT / words[-1]).exists()
    elif words[0] == "docker":
        docker(words)
    elif words[0].startswith("python") and words[1] != "-m":
        script = (ROOT / words[1]).read_text(encoding="utf-8")
        assert f"python {words[1]}" in ast.get_docstring(ast.parse(script))
        assert all(f'"{word}"' in script for word in words[2:] if word.startswith("--")), "no such flag"
    elif words[0] == "sh":
        assert f"\n  {words[2]})" in (ROOT / words[1]).read_text(encoding="utf-8"), "no such name"
    for extra in re.findall(r"(?:k3cuda|\.)\[(.*?)\]", text):
        assert all(f'"{name}"' in EXTRAS for name in extra.split(",")), extra
    for option, word in zip(words, words[1:]):
        if option == "--include_path":
            assert (ROOT / word).is_dir()


@pytest.mark.parametrize("command", LINTED, ids=str)
def test_commands_that_run_elsewhere_or_nowhere_are_read(command):
    lint(command.text)


@pytest.mark.parametrize("start, file", ELSEWHERE.items())
def test_what_runs_elsewhere_reads_the_page(start, file):
    pages = {c.page for c in COMMANDS if c.text.startswith(start)}
    assert pages and all(page in (ROOT / file).read_text(encoding="utf-8") for page in pages)


def test_no_entry_of_the_tables_is_stale_or_doubtful():
    for page, file in WHOLE_PAGES.items():
        assert page in PAGES and page in (ROOT / file).read_text(encoding="utf-8")
    for command in COMMANDS:
        assert len(matching(command, ELSEWHERE) + matching(command, NOT_RUN)) <= 1, command
    for start in [*NOT_RUN, *SMALLER]:
        assert any(c.text.startswith(start) for c in COMMANDS), start


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder where commands run: what is in the repository's, and tiny-random in the released layout in the place of the reader's own."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("examples", "scripts", "docs"):
        (folder / name).symlink_to(ROOT / name)
    write_checkpoint(open_tiny_random(), folder / "Kimi-K3")
    return folder


@pytest.mark.parametrize("command", RUN, ids=str)
def test_commands_run(command, place):
    words = [str(place / "Kimi-K3") if word == "/models/Kimi-K3" else word for word in shlex.split(command.text)]
    assert words[0].endswith("k3cuda") or words[0] == "python", "no such program here: say in ELSEWHERE or NOT_RUN who runs it"
    words = [sys.executable, *(["-m", "k3cuda"] if words[0] != "python" else []), *words[1:]]
    words += [word for start in matching(command, SMALLER) for word in SMALLER[start]]
    if "serve" in words:
        if importlib.util.find_spec("uvicorn") is None and "REQUIRE_CUDA_LINE" not in os.environ:
            pytest.skip("no uvicorn; it comes with k3cuda[test]")
        until_it_is_ready([*words, "--port", "0"], place)
    else:
        done = subprocess.run(words, cwd=place, env=ENVIRONMENT, stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
        assert done.returncode == 0 and done.stdout, done.stderr.decode()


def until_it_is_ready(words, place) -> None:
    server = subprocess.Popen(words, cwd=place, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=hears_interrupts)
    said = []
    while not said or "is served at" not in said[-1]:
        said.append(server.stderr.readline())
        assert said[-1], said
    server.send_signal(signal.SIGTERM)
    server.communicate(timeout=60)
    assert server.returncode == 128 + signal.SIGTERM


def test_python_blocks_run_in_a_test():
    for page, text in PAGES.items():
        kinds = re.findall(r"^```(python.*)\n", text, re.M)
        assert "python" not in kinds or page in (ROOT / PYTHON_RUNS[page]).read_text(encoding="utf-8"), page
        for block in re.findall(r"^```python gpu\n(.*?)^```", text, re.M | re.S):
            compile(block, page, "exec")


INLINE = [(page, words) for page, text in PAGES.items() for words in re.findall(r"`k3cuda ([A-Za-z][^`]*)`", text)]


@pytest.mark.parametrize("page, words", INLINE, ids=lambda v: v)
def test_commands_inside_the_text_are_read(page, words):
    """Flags and names of commands; words in capitals stand for the reader's own, brackets for what may be left out."""
    command, *words = [word.strip("[]") for word in shlex.split(words)]
    assert command not in NOT_BUILT & set(main.commands), "there it is; take it out of NOT_BUILT and correct the page"
    if command not in NOT_BUILT | {"COMMAND"}:
        command = main.commands[command]
        while isinstance(command, click.Group) and words:
            command = command.commands[words.pop(0)]
        known = {s.replace("_", "-") for o in command.params for s in [*o.opts, *o.secondary_opts, *getattr(o, "aliases", ())]} | {"-h", "--help"}
        assert {word.partition("=")[0] for word in words if word.startswith("-")} <= known, words


def anchors(text: str) -> set[str]:
    """Of the headings outside code, as the usual viewers make them."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", text, re.M)}


def test_links_lead_somewhere():
    found = 0
    for page, text in PAGES.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = target.partition("#")
            assert not re.match(r"\w+:", path), f"{page}: {target}: a page must be readable without a network"
            file = (ROOT / page).parent / path if path else ROOT / page
            assert file.exists(), f"{page}: {target}"
            assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), f"{page}: {target}"
            found += 1
    assert found


def test_the_index_has_every_page_in_one_order():
    targets = re.findall(r"^1\. \[.+?\]\((.+?)\): \S.*$", PAGES["docs/index.md"], re.M)
    assert targets[0] == "../README.md"
    assert sorted(targets[1:]) == sorted(page.removeprefix("docs/") for page in PAGES.keys() - {"README.md", "docs/index.md"})
    assert "(docs/index.md)" in PAGES["README.md"]


def test_files_that_are_named_exist():
    """`name.md`, `folder/name.py` in the text of a page is the end of the path of a file of this repository, or a file of a model."""
    folders = ("k3cuda", "docs", "scripts", "tests", "examples", "container")
    paths = [f"/{p.relative_to(ROOT)}" for p in [*ROOT.glob("*.*"), *(p for folder in folders for p in (ROOT / folder).rglob("*.*"))]]
    for page, text in PAGES.items():
        for name in re.findall(r"`([\w/-][\w/.-]*\.(?:md|py|sh|cuh|json|yaml|lock))`", text):
            assert name in OF_A_MODEL or any(path.endswith(f"/{name}") for path in paths), f"{page}: {name}"
