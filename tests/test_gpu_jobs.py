"""scripts/gpu_jobs.py: what runs beside what, where it says it, and that nothing outlives its time."""
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import ROOT

SCRIPT = ROOT / "scripts/gpu_jobs.py"


def jobs(out, *arguments):
    env = os.environ | {"OUT": str(out), "CUDA_VISIBLE_DEVICES": ""}   # as on one GPU, whatever is here
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=60)


def test_timings_are_alone_and_checks_side_by_side(tmp_path):
    """On one GPU: a check waits for a file that its neighbour makes, and finds what timings left."""
    meet = "test -e second && touch {} && until test -e {}; do sleep 0.05; done"
    done = jobs(tmp_path, "--within", 50, "--check", "a", f"cd $OUT && {meet.format('a', 'b')}", "--check", "b", f"cd $OUT && {meet.format('b', 'a')}",
                "--time", "first", "cd $OUT && test ! -e a && touch first && echo $CUDA_VISIBLE_DEVICES", "--time", "last", "cd $OUT && test -e first && touch second")
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "first.txt").read_text() == "0\n" and [line.split()[1] for line in done.stdout.splitlines()[-4:]] == ["0"] * 4


def test_what_fails_is_shown_and_what_takes_too_long_is_killed_with_its_children(tmp_path):
    begin = time.monotonic()
    done = jobs(tmp_path, "--within", 2, "--at-once", 1, "--check", "bad", "echo why; exit 3", "--check", "slow", "sleep 50 & echo $!; wait", "--check", "late", "true")
    assert done.returncode == 1 and time.monotonic() - begin < 40   # below what `slow` would take
    assert "== bad\nwhy\n" in done.stdout and "== late\nit did not begin" in done.stdout
    assert [line.split()[1] for line in done.stdout.splitlines()[-3:]] == ["3", "cut", "cut"]
    state = Path("/proc", (tmp_path / "slow.txt").read_text().strip(), "stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"   # ended, and nobody has asked how


@pytest.mark.parametrize("arguments", [[], ["--check", "a", "true", "--time", "a", "true"]], ids=["none", "twice"])
def test_names(arguments, tmp_path):
    done = jobs(tmp_path, *arguments)
    assert done.returncode == 2 and "each its own" in done.stderr
