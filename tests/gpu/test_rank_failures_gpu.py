"""A rank that dies or hangs in the middle of an answer, while the others' GPUs wait for it inside a kernel: the job ends in time, and no process is left."""
import os
import signal
import time

import pytest
from command import COMMAND
from rank_processes import all_gone, ends, running, start

from k3cuda.runtime.machine import probe_driver

pytestmark = pytest.mark.gpu
pytest.importorskip("cupy", reason="CuPy holds the device's memory; install k3cuda[cu13] or k3cuda[cu12]")

IN_TIME = 15   # seconds, as promised in docs/multi-node.md


@pytest.mark.parametrize("how", ["nccl", "peer"])
@pytest.mark.parametrize(("number", "text"), [(signal.SIGKILL, "ended by SIGKILL"), (signal.SIGSTOP, "gave no sign of life for 8 s")], ids=["killed", "stopped"])
def test_a_rank_in_trouble_ends_the_job(number, text, how):
    share = {"K3CUDA_SHARE_GPU": "1"} if len(probe_driver().gpus) < 2 else {}
    process = start([*COMMAND, "generate", "tiny-random", "--tp", "2", "--ranks", "processes", "--decode-backend", "standard", "--collectives", how, "--max-model-len", "4096",
                     "-p", "hi", "-n", "4000", "--ignore-eos", "-s", "7", "--jsonl"], **share)
    assert b'"start"' in process.stdout.readline() and b'"delta"' in process.stdout.readline(), process.stderr.read().decode()
    other, = (pid for pid in running(process.mark) if pid != process.pid)
    begin = time.monotonic()
    os.kill(other, number)
    (code, _, words), = ends(process)
    assert code == 9 and "rank 1 (" in words and text in words, words
    assert time.monotonic() - begin < IN_TIME and all_gone(process.mark, 2)
