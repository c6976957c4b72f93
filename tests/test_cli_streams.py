"""Signals, pipes that break, closed streams, narrow encodings, strange users: a code, never a traceback."""
import json
import os
import signal
import subprocess
import sys
import sysconfig

import pytest
from command import COMMAND, ENVIRONMENT, hears_interrupts, k3, on_terminal, start

ENDLESS = ["generate", "tiny-random", "-p", "hi", "--ignore-eos"]


def shell(line: str, code: int):
    """Runs a line of sh, with k3 for the command; its stdout and stderr."""
    script = line.replace("k3 ", " ".join(COMMAND) + " ")
    done = subprocess.run(["bash", "-o", "pipefail", "-c", script], env=ENVIRONMENT, capture_output=True, timeout=120)
    assert done.returncode == code, (done.returncode, done.stderr)
    assert b"Traceback" not in done.stderr and b"Exception ignored" not in done.stderr, done.stderr.decode()
    return done.stdout, done.stderr


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_first_signal_stops_cleanly_with_what_there_is(number, code):
    process = start(*ENDLESS, "--jsonl")
    lines = [process.stdout.readline() for _ in range(4)]   # the start and three tokens
    process.send_signal(number)
    rest, errors = process.communicate(timeout=30)
    *_, end = [json.loads(line) for line in lines + rest.splitlines()]
    assert process.returncode == code and errors == b""
    assert (end["event"], end["finish_reason"]) == ("end", "abort") and end["completion_tokens"] == len(end["token_ids"]) >= 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("module", ["k3cuda.cli", "click", "k3cuda.cli.generate", "numpy", "k3cuda.llm", "tiktoken"])
def test_signal_while_loading_leaves_nothing(module, number, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import importlib.abc, os, sys\nclass Signal(importlib.abc.MetaPathFinder):\n"
                                               f"    def find_spec(self, name, path, target=None):\n        if name == {module!r}:\n"
                                               f"            os.kill(os.getpid(), {int(number)})\nsys.meta_path.insert(0, Signal())\n")
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), ENVIRONMENT["PYTHONPATH"]])}
    done = subprocess.run([*COMMAND, *ENDLESS], env=ENVIRONMENT | path, stdin=subprocess.DEVNULL, capture_output=True, preexec_fn=hears_interrupts, timeout=60)
    # Before there is a handler a signal simply kills.
    assert done.returncode in (128 + number, -number) and (done.stdout, done.stderr) == (b"", b"")


def test_reader_that_leaves():
    assert shell("k3 generate tiny-random -p hi --ignore-eos --stream | head -c 1", 141)[1] == b""
    assert shell("k3 plan --markdown | true", 141)[1] == b""


def test_closed_streams():
    assert shell("k3 generate tiny-random -p hi -n 2 2>&-", 0)[0]
    shell("k3 info >&-", 141)
    shell("k3 tokenize tiny-random <&-", 2)
    shell("k3 tokenize tiny-random -p hi >&- 2>&- <&-", 141)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_full_disk():
    for command in ("tokenize tiny-random -p hi", "info --json", "--version", "generate --help"):
        assert b"No space left" in shell(f"k3 {command} >/dev/full", 4)[1], command


def test_stdout_that_cannot_be_written():
    for command in ("tokenize tiny-random -p hi", "generate tiny-random -p hi -n 2 --json"):
        assert b"could not be written: Bad file descriptor" in shell(f"k3 {command} 1</dev/null", 2)[1], command


def test_narrow_encodings():
    narrow = {"LC_ALL": "C", "LANG": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert json.loads(k3("tokenize", "tiny-random", "-p", "w\u00f6rld \U0001f600", "--json", env=narrow).stdout)["count"] == 10
    assert k3("tokenize", "tiny-random", "--decode", "-p", "195 182", env=narrow).stdout == b"\\xf6\n"
    assert k3("tokenize", "tiny-random", "--decode", "-p", "195 182", env={"LC_ALL": "C"}).stdout.decode() == "\u00f6\n"


def test_unknown_user_without_home_in_a_tree_that_is_not_theirs():
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")

    def as_nobody(*command):
        return subprocess.run(["env", "-i", f"PATH={os.environ['PATH']}", f"PYTHONPATH={os.pathsep.join(path)}", *command], cwd="/", capture_output=True,
                              stdin=subprocess.DEVNULL, preexec_fn=lambda: (os.setgroups([]), os.setgid(54321), os.setuid(54321)))

    path = [ENVIRONMENT["PYTHONPATH"], sysconfig.get_path("purelib")]
    # Ours may lie in the home of root; the system's of the same version can use our packages.
    pythons = [p for p in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}") if as_nobody(p, "-c", "import numpy, click").returncode == 0]
    if not pythons:
        pytest.skip("this Python lies where no other user may read it")
    for args in (["generate", "tiny-random", "-p", "hi", "-n", "2", "-s", "1"], ["info"], ["check", "tiny-random"]):
        done = as_nobody(pythons[0], "-m", "k3cuda", *args)
        assert done.returncode == 0 and done.stdout and done.stderr == b"", (args, done.stderr)


def test_terminal_shows_dimmed_thinking_and_a_summary():
    request = ["generate", "tiny-random", "-p", "hi", "-n", 6, "-s", 3, "--ignore-eos", "--reasoning-effort", "low"]
    out, code = on_terminal(*request)
    assert code == 0 and "\x1b[2m" in out and "answer 6 tokens" in out and "seed 3" in out and "loading tiny-random" in out
    out, code = on_terminal(*request, "--hide-thinking", "--no-progress", "-q", env={"NO_COLOR": "1"})
    assert (out, code) == ("", 0)
