"""README and docs/cli.md say what is so: the commands of the table run, fields are those of real documents, no flag is left out."""
import json
import re
import shlex

import click
import pytest
from command import ROOT, k3, k3_json

from k3cuda import errors
from k3cuda.cli import main
from k3cuda.runtime.named_models import TINY_RANDOM

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
NOT_HERE = {"bench", "compile", "serve", "eval", "repack"}   # these need a GPU, minutes, a signal, a file and a folder: all but the first have tests of their own


def options(command, name):
    """(command line, option) of a command and of the commands below it."""
    yield from ((name, option) for option in command.params if isinstance(option, click.Option))
    for below, sub in getattr(command, "commands", {}).items():
        yield from options(sub, f"{name} {below}".strip())


OPTIONS = {pair for name, command in main.commands.items() for pair in options(command, name)}
COMMANDS = [[{"MODEL": "tiny-random", "TEXT": "hi"}.get(word, word) for word in row.split()] for row in re.findall(r"^\| `k3cuda (.+?)` \|", README, re.M)]


def test_readme_is_short_and_shows_every_command():
    assert len(README.splitlines()) <= 80
    assert {words[0] for words in COMMANDS} == set(main.commands)


@pytest.mark.parametrize("words", [words for words in COMMANDS if words[0] not in NOT_HERE], ids=" ".join)
def test_commands_of_the_table_run(words):
    if words[0] in ("generate", "chat"):
        words = [*words, "-n", "4", "--no-think"]   # random weights know neither when to answer nor when to end
    assert k3(*words, stdin=b"hi\n" if words[0] == "chat" else None).stdout


def test_python_of_the_readme_runs():
    block, = re.findall(r"```python\n(.*?)```", README, re.S)
    printed = []
    exec(block, {"print": lambda *values: printed.append(values)})
    (text, finish_reason), = printed
    assert text and finish_reason in ("stop", "length")


def keys(value):
    """The shape of a document: names of its fields, and of those of the first element of a list."""
    if isinstance(value, dict):
        return {name: keys(v) for name, v in value.items()}
    return [keys(v) for v in value[:1] if isinstance(v, dict)] if isinstance(value, list) else None


@pytest.mark.parametrize("name, args, code", [
    ("generate", ["tiny-random", "-p", "hi", "-n", "2"], 0), ("tokenize", ["tiny-random", "-p", "hi"], 0), ("info", [], 0),
    ("check", ["tiny-random", "--tp", "3"], 3)])
def test_fields_of_documents(name, args, code):
    block, = re.findall(rf"```json {name}\n(.*?)```", PAGE, re.S)
    shown, found = json.loads(block), k3_json(name, *args, "--json", code=code)
    if name == "info":   # its packages and variables are this machine's
        found["packages"] = {"numpy": found["packages"]["numpy"]}
        found["variables"], found["driver"]["gpus"], found["demo"] = {}, [], {"weights": None}
    if name == "check":
        found["facts"]["bytes_per_rank"] = {"1": found["facts"]["bytes_per_rank"]["1"]}
    assert keys(shown) == keys(found)


def test_the_command_and_fields_of_an_evaluation(tmp_path):
    guide = (ROOT / "docs/eval.md").read_text(encoding="utf-8")
    (tmp_path / "questions.jsonl").write_text(re.findall(r"```json\n(.*?)```", guide, re.S)[0].splitlines()[0])
    first, tasks, second = (shlex.split(block)[1:] for block in re.findall(r"```sh\n(k3cuda eval .*?)```", guide, re.S))
    k3(*first, "-n", "5", cwd=tmp_path)
    found = k3_json(*second, "-n", "5", "--json", cwd=tmp_path)
    shown = json.loads(re.findall(r"```json eval\n(.*?)```", PAGE, re.S)[0])
    assert found["setup"].pop("sampling").keys() > shown["setup"].pop("sampling").keys()
    assert found["comparison"]["differs"] == ["draft"] and found["setup"].pop("draft")["draft_model"] == "demo-draft"
    assert shown["setup"].pop("draft") is None and found["acceptance_length"] >= 1
    shown["comparison"]["changed"] = []
    assert keys(shown) == keys(found)
    assert k3_json(*tasks, "-n", "2", "--limit", "2", "--json", cwd=tmp_path)["tasks"].keys() == {"addition", "subtraction"}


def test_every_flag_is_on_the_page():
    flags = PAGE[PAGE.index("## Flags"):PAGE.index("## JSON")]
    for name, option in OPTIONS:
        for spelling in [*option.opts, *option.secondary_opts, *option.aliases]:
            if not option.hidden or spelling == option.opts[0]:
                assert f"`{spelling}`" in flags, (name, spelling)
    known = {spelling for _, o in OPTIONS for spelling in [*o.opts, *o.secondary_opts, *o.aliases]} | {"--help", "-h", "--version", "-sys"}
    shown = {s for row in flags.splitlines() if row.startswith("| `") for cell in row.split("|")[1:3] for s in re.findall(r"`(-[\w-]+)`", cell)}
    assert shown <= known


def test_every_exit_code_is_on_the_page():
    codes = {cls.code for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.K3Error)}
    table = PAGE[PAGE.index("## Exit codes"):]
    assert codes | {0, 8, 143, 141} == {int(n) for cell in re.findall(r"^\| ([\d, ]+) \|", table, re.M) for n in cell.split(",")}


def test_speed_in_the_readme_is_the_recorded_one():
    record = json.loads((ROOT / "docs/benchmarks/reference.json").read_text(encoding="utf-8"))
    shown, = re.findall(rf"`{TINY_RANDOM}`: (\d+) tokens/s", README)
    # A record keeps the name that its commit had for the model; a note says which one it is now.
    assert TINY_RANDOM in (record["model"], *record.get("note", "").split())
    assert int(shown) == round(record["tok_per_s_median"])
