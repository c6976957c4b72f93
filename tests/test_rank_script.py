"""Scripts whose ranks are processes: whichever fails ends all of them with its code; what carries collectives is never called by another name."""
import sys
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest
from command import ROOT
from rank_processes import ends, start

from k3cuda.errors import BenchmarkError

sys.path.append(str(ROOT / "scripts"))
pytest.importorskip("cuda.bindings", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")
pytest.importorskip("cupy", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")
import bench_ranks  # noqa: E402
import rank_script  # noqa: E402

# Ranks without a GPU, of which one does what it is told; the others wait for it, but not for ever.
SCRIPT = """
import argparse, os, sys, time
sys.path.insert(0, {scripts!r})
from types import SimpleNamespace
import cupy, rank_script
from k3cuda.errors import BenchmarkError
from k3cuda.runtime import nccl, surroundings
nccl.Communicator = lambda made, rank, size: SimpleNamespace(rank=rank)
rank_script._open = lambda rank, is_shared: None
cupy.cuda.Stream = lambda **_: open(os.devnull)   # something with a context
surroundings.surroundings = lambda *_: {{}}

def work(comm, device, stream):
    {work}
    return {{"found": 1}}

given = rank_script.flags(argparse.ArgumentParser()).parse_args(["--ranks", "3"])
sys.exit(rank_script.main(given, work))
"""


CASES = {   # what ranks do -> (the script's code, what it says)
    "sound": ("pass", 0, ""),
    "another fails": ("if comm.rank == 2: raise BenchmarkError('bytes differ')\n    else: time.sleep(60)", 8, "rank 2 ended with code 8"),
    "another is killed": ("if comm.rank == 2: os.kill(os.getpid(), 9)\n    time.sleep(60 * (comm.rank < 2))", 9, "rank 2 ended with code -9"),
    "another fails behind rank 0": ("if comm.rank == 1: time.sleep(1); raise BenchmarkError('late')", 8, "rank 1 ended with code 8"),
    "rank 0": ("if comm.rank == 0: raise BenchmarkError('first')", 8, "Error: first"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_code_of_whichever_rank_fails(case, tmp_path):
    work, code, said = CASES[case]
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).format(scripts=str(ROOT / "scripts"), work=work))
    (found, out, words), = ends(start([sys.executable, script]))
    assert found == code and said in words, words
    assert (b'"found": 1' in out) == (code == 0 or "late" in work)


def test_times_never_stand_under_a_false_name():
    ways = {"nccl": SimpleNamespace(ranks="nccl"), "peer": SimpleNamespace(ranks="peer")}
    bench_ranks.check_ways(ways)
    ways["peer"].ranks = "nccl"
    with pytest.raises(BenchmarkError, match="collectives by peer: nccl carries them"):
        bench_ranks.check_ways(ways)


def test_no_time_is_taken_of_logits_that_differ(monkeypatch):
    """From those of the way before, from other ranks' where they exchange them, or from numbers."""
    logits, others = np.arange(4, dtype=np.float32), [0]
    monkeypatch.setattr(rank_script, "gathered", lambda comm, stream, own: np.stack([own, own + np.uint8(others[0])]))
    check = lambda got, wanted=None, is_alone=False: bench_ranks.check_logits(SimpleNamespace(rank=1), None, 8, "a way", got, wanted, is_alone)
    check(logits)
    check(logits, logits.copy())
    with pytest.raises(BenchmarkError, match="rank 1, 8 rows, a way: logits have other bytes than those of the way before"):
        check(logits, logits + np.float32([0, 0, 0, 1]))
    with pytest.raises(BenchmarkError, match="not finite"):
        check(np.full(4, np.inf, np.float32))
    others[0] = 1
    check(logits, is_alone=True)   # each rank looped back is another model
    with pytest.raises(BenchmarkError, match="the ranks' logits have different bytes"):
        check(logits)


@pytest.mark.parametrize(("words", "said"), [(["--ranks", "1"], "found --ranks 1"), (["--layers", "3"], "found --layers 3, wanted 4 or more")], ids=["one rank", "too few layers"])
def test_a_trace_that_cannot_be_made_is_refused_before_anything_is_timed(words, said, tmp_path):
    (code, _, errors), = ends(start([sys.executable, ROOT / "scripts/bench_ranks.py", "--trace", "--output", tmp_path / "steps.json", *words]))
    assert code == 2 and said in errors, errors
