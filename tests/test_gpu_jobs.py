"""scripts/gpu_jobs.py: what runs beside what, where it says it, and that nothing outlives it. scripts/gpu.sh: which tests it runs."""
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import gpu_jobs  # noqa: E402

CHILD = "sleep 300 & echo $!; wait"   # longer than any test may take


def start(out, *arguments):
    env = os.environ | {"OUT": str(out), "CUDA_VISIBLE_DEVICES": ""}   # as on one GPU, whatever is here
    return subprocess.Popen([sys.executable, ROOT / "scripts/gpu_jobs.py", *map(str, arguments)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def jobs(out, *arguments):
    """(exit code, lines of stdout, stderr)"""
    process = start(out, *arguments)
    said, errors = process.communicate(timeout=100)
    return process.returncode, said.splitlines(), errors


def is_gone(file: Path) -> bool:
    """Whether the process whose number it holds has ended; who asks how may be late."""
    state = Path("/proc", file.read_text().strip(), "stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_timings_are_alone_and_checks_side_by_side(tmp_path):
    """A check waits for a file that its neighbour makes, and finds what timings left. The folder is made."""
    meet = "test -e second && touch {} && until test -e {}; do sleep 0.05; done"
    out = tmp_path / "new"
    code, lines, _ = jobs(out, "--within", 90, "--check", "a", f"cd $OUT && {meet.format('a', 'b')}", "--check", "b", f"cd $OUT && {meet.format('b', 'a')}",
                          "--time", "first", "cd $OUT && test ! -e a && touch first && echo $CUDA_VISIBLE_DEVICES", "--time", "last", "cd $OUT && test -e first && touch second")
    assert code == 0 and (out / "first.txt").read_text() == "0\n" and [line.split()[1] for line in lines[-4:]] == ["0"] * 4


def test_what_fails_is_shown_and_what_takes_too_long_is_killed_with_its_children(tmp_path):
    code, lines, _ = jobs(tmp_path, "--within", 4, "--at-once", 1, "--time", "bad", "echo why; exit 3", "--check", "slow", CHILD, "--check", "late", "true")
    assert code == 1 and is_gone(tmp_path / "slow.txt")
    assert lines[lines.index("== bad") + 1] == "why" and lines[lines.index("== late") + 1] == "it did not begin"
    assert {line.split()[0]: line.split()[1] for line in lines[-3:]} == {"slow": "cut", "late": "cut", "bad": "3"}


def test_one_that_takes_too_long_leaves_the_others_their_time(tmp_path):
    code, lines, _ = jobs(tmp_path, "--within", 90, "--each", 2, "--at-once", 1, "--check", "slow", CHILD, "--check", "next", "true")
    assert code == 1 and is_gone(tmp_path / "slow.txt") and {line.split()[0]: line.split()[1] for line in lines[-2:]} == {"slow": "cut", "next": "0"}


def test_what_a_job_leaves_running_ends_with_it(tmp_path):
    code, _, _ = jobs(tmp_path, "--within", 90, "--time", "one", "sleep 300 & echo $!")
    assert code == 0 and is_gone(tmp_path / "one.txt")


def test_a_folder_that_cannot_be_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    code, _, errors = jobs(tmp_path / "file", "--check", "a", "true")
    assert code == 2 and "wanted a folder" in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_job(tmp_path, number):
    process = start(tmp_path, "--check", "one", CHILD, "--at-once", "1", "--check", "two", "touch $OUT/begun")
    while not (tmp_path / "one.txt").exists() or not (tmp_path / "one.txt").read_text().endswith("\n"):
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate(timeout=100)
    assert process.returncode == 128 + number and is_gone(tmp_path / "one.txt") and not (tmp_path / "begun").exists()


def test_it_keeps_to_the_gpus_that_it_was_given(monkeypatch):
    monkeypatch.setattr(gpu_jobs, "probe_driver", lambda: type("Driver", (), {"gpus": ["a GPU"] * 2}))
    for given, found in (("5,7", ["5", "7"]), ("GPU-12ab, GPU-34cd", ["GPU-12ab", "GPU-34cd"]), ("", ["0", "1"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        assert gpu_jobs.gpus() == found
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert gpu_jobs.gpus() == ["0", "1"]


@pytest.mark.parametrize("arguments", [[], ["--check", "a", "true", "--time", "a", "true"], ["--check", "a/b", "true"], ["--check", "", "true"],
                                       ["--check", "a", "true", "--at-once", "0"], ["--check", "a", "true", "--within", "0"], ["--check", "a", "true", "--within", "nan"], ["--check", "a", "true", "--each", "0"],
                                       ["--check", "a" * 300, "true"]],
                         ids=["none", "twice", "a path", "empty", "nothing at once", "no time", "no number", "no time each", "a long name"])
def test_refusals(arguments, tmp_path):
    code, lines, errors = jobs(tmp_path / "out", *arguments)
    assert code == 2 and "found" in errors and "wanted" in errors and not lines and not (tmp_path / "out").exists()


@pytest.mark.parametrize("given, run", [([], ["tests/gpu"]), (["-k", "core"], ["tests/gpu", "-k", "core"]), (["-v", "tests/gpu/test_core.py"], ["-v", "tests/gpu/test_core.py"])], ids=str)
def test_tests_that_are_named_are_run_alone(tmp_path, given, run):
    """A GPU's minutes are few: the file that was meant, not all of them before it."""
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(["sh", ROOT / "scripts/gpu.sh", "tests", *given], env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, capture_output=True, text=True, check=True, timeout=20)
    assert done.stdout.split() == ["-m", "pytest", "-m", "gpu", *run]
