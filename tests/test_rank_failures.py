"""Whatever happens to one process of a job ends the whole job in time, with the first error and its exit code, and leaves no process behind."""
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from command import COMMAND

from k3cuda.runtime import rank_watch
from rank_processes import MARK, STARTED, all_gone, ends, free_port, running, start

IN_TIME, SIGNAL_IN_TIME = 15, 10   # seconds, as promised in docs/multi-node.md
GENERATE = [*COMMAND, "generate", "tiny-random", "--tp", "2", "--ranks", "processes", "-p", "hi", "-n", "4000", "--ignore-eos", "-s", "7", "--jsonl"]

# A script under a launcher; on the rank that is told so something goes wrong at the third token, or while its weights are loaded.
SCRIPT = """
import os, sys, time
from dataclasses import replace
from k3cuda import LLM, SamplingParams
from k3cuda.errors import K3Error
from k3cuda.runtime import numpy_backend
kind, draws_seen, sample, load = sys.argv[1], 0, numpy_backend.NumpyBackend.sample, numpy_backend._load_weights

def goes_wrong(self, draws):
    global draws_seen
    draws_seen += 1
    drawn = sample(self, draws)
    if draws_seen == 3:
        {"hang": lambda: time.sleep(1000), "odd": lambda: int("odd"), "memory": lambda: bytearray(1 << 60), "exit": lambda: os._exit(5)}.get(kind, int)()
        if kind == "differ":
            drawn = [replace(d, token_id=d.token_id ^ 1) for d in drawn]
    return drawn

def loads_wrong(*args):
    raise MemoryError

if kind == "load":
    numpy_backend._load_weights = loads_wrong
elif kind not in ("sound", "none"):
    numpy_backend.NumpyBackend.sample = goes_wrong
try:
    with LLM("tiny-random", tp=2, max_model_len=256) as llm:
        [output] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=40, ignore_eos=True, seed=1))
        if output.error:
            raise output.error
    if kind == "sound":
        LLM("tiny-random", tp=2, max_model_len=256)   # the other rank has ended with the first
except K3Error as e:
    print(e)
    sys.exit(e.code)
"""
TROUBLE = {   # kind -> (code of rank 0, code of the other, what rank 0 says)
    "hang": (9, 9, "rank 1 ({host}) hung: no rank got on for 8 s in the middle of a step"), "odd": (1, 1, "rank 1 ({host}): ValueError: invalid literal"),
    "memory": (4, 4, "rank 1 ({host}): not enough host memory"), "exit": (9, 5, "rank 1 ({host}) ended without a word"),
    "differ": (7, 7, "rank 1 decided other tokens than rank 0"), "load": (4, 4, "rank 1 ({host}): not enough host memory"),
    "none": (2, 0, "a second model in one job: the other ranks have ended with the first one"),
}


@pytest.fixture(scope="module")
def troubled():
    """kind -> what both ranks did; all at the same time, since most of it is waiting."""
    pairs = {}
    for kind in TROUBLE:
        port = free_port()
        pairs[kind] = [start([sys.executable, "-c", SCRIPT, "sound" if r == 0 else kind], STARTED["torchrun"](r, 2), MASTER_PORT=port, **{MARK: kind}) for r in (0, 1)]
    return {kind: (pair, ends(*pair)) for kind, pair in pairs.items()}


@pytest.mark.parametrize("kind", TROUBLE)
def test_what_goes_wrong_on_another_rank(kind, troubled):
    (_, other), results = troubled[kind]
    first_code, other_code, text = TROUBLE[kind]
    assert [code for code, _, _ in results] == [first_code, other_code], results
    said = results[0][1].decode() + results[0][2]   # in the log where its main thread was busy for 3 s more
    assert text.split("{host}")[0] in said and text.split("{host}")[-1] in said
    assert "Traceback" not in results[0][2] + results[1][2]


def decoding():
    """A command in the middle of its answer, and its other rank's process."""
    process = start(GENERATE)
    assert b'"start"' in process.stdout.readline() and b'"delta"' in process.stdout.readline()
    other, = (pid for pid in running(process.mark) if pid != process.pid)
    return process, other


@pytest.mark.parametrize(("what", "code", "text"), [
    (lambda pid: os.kill(pid, signal.SIGKILL), 9, "ended by SIGKILL: its machine may have run out of memory"),
    (lambda pid: os.kill(pid, signal.SIGSTOP), 9, "gave no sign of life for 8 s"),
], ids=["killed", "stopped"])
def test_a_worker_in_trouble(what, code, text):
    process, other = decoding()
    begin = time.monotonic()
    what(other)
    (found, _, words), = ends(process)
    assert found == code and "rank 1 (" in words and text in words, words
    assert time.monotonic() - begin < IN_TIME and all_gone(process.mark, 1)


def test_a_job_that_sleeps_as_a_whole_goes_on():
    """Ctrl-Z and fg: each finds the others silent for longer than is allowed, and so was it."""
    process, other = decoding()
    for pid in (process.pid, other):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(rank_watch.SILENCE_S + 1)
    for pid in (other, process.pid):
        os.kill(pid, signal.SIGCONT)
    begin = time.monotonic()
    while time.monotonic() - begin < 3:   # time enough to find somebody guilty
        assert b'"delta"' in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    (code, _, words), = ends(process)
    assert code == 143, words


def test_a_server_ends_with_its_ranks():
    """It waits for requests, not for a rank: nothing but the watch can tell it."""
    process = start([*COMMAND, "serve", "tiny-random", "--tp", "2", "--ranks", "processes", "--port", "0", "--max-model-len", "256"])
    assert b"is served at" in process.stderr.readline()
    other, = (pid for pid in running(process.mark) if pid != process.pid)
    begin = time.monotonic()
    os.kill(other, signal.SIGKILL)
    (code, _, words), = ends(process)
    assert code == 9 and "ended by SIGKILL" in words and time.monotonic() - begin < IN_TIME and all_gone(process.mark, 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda n: n.name)
def test_a_signal_in_the_middle_of_an_answer(number):
    process, _ = decoding()
    begin = time.monotonic()
    process.send_signal(number)
    (code, out, words), = ends(process)
    assert code == (-number if number == signal.SIGKILL else 128 + number) and "Traceback" not in words
    assert number == signal.SIGKILL or b'"finish_reason": "abort"' in out
    assert all_gone(process.mark, SIGNAL_IN_TIME - (time.monotonic() - begin))


def _command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b"gone by now"


@pytest.mark.parametrize(("number", "moments"), [(signal.SIGINT, (None, 0.3)), (signal.SIGTERM, (0.0, 0.7)), (signal.SIGKILL, (None, 0.0, 0.4))])
def test_a_signal_at_any_moment_of_a_start(number, moments):
    """Commands that are hit at a moment of their own: before a worker exists (None), as it begins, while both meet and load."""
    waiting = [(start(GENERATE), moment) for moment in moments]
    begin, hit, seen = time.monotonic(), {}, {}
    while len(hit) < len(waiting):
        for process, moment in waiting:
            now = time.monotonic()
            if moment is not None and process not in seen and len(running(process.mark)) > 1:
                seen[process] = now
            if process not in hit and now > (begin + 0.4 if moment is None else seen.get(process, begin + 60) + moment):
                process.send_signal(number)
                hit[process] = now
        time.sleep(0.1)   # a look at every process of the machine costs more than it seems
    results = ends(*(p for p, _ in waiting))
    assert len(seen) == len(waiting) - moments.count(None), ("a worker was seen of all that were to have one", results)
    for (process, moment), (code, _, words) in zip(waiting, results):
        assert code in (-number, 128 + number), (moment, code, words)
        assert "Traceback" not in words or "k3cuda" not in words, words   # before our first instruction Python speaks
        assert all_gone(process.mark, SIGNAL_IN_TIME - (time.monotonic() - hit[process])), (moment, [_command_of(pid) for pid in running(process.mark)], words)
