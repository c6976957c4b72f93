"""A rank that dies or hangs in the middle of an answer, while the others' GPUs wait for it inside a kernel: the job ends, and no process is left."""
import os
import signal

import pytest
from command import COMMAND
from rank_processes import all_gone, ends, running, start

from k3cuda.runtime.machine import probe_driver

pytestmark = pytest.mark.gpu
pytest.importorskip("cupy", reason="CuPy holds the device's memory; install k3cuda[cu13] or k3cuda[cu12]")


TROUBLE = {"killed": (signal.SIGKILL, "ended by SIGKILL"), "stopped": (signal.SIGSTOP, "gave no sign of life for 8 s")}
GENERATE = [*COMMAND, "generate", "tiny-random", "--tp", "2", "--ranks", "processes", "--decode-backend", "standard", "--max-model-len", "4096",
            "-p", "hi", "-n", "4000", "--ignore-eos", "-s", "7", "--jsonl", "--collectives"]


@pytest.mark.parametrize("how", ["nccl", "peer"])
@pytest.mark.parametrize("what", TROUBLE)
def test_a_rank_in_trouble_ends_the_job(what, how):
    number, text = TROUBLE[what]
    share = {"K3CUDA_SHARE_GPU": "1"} if len(probe_driver().gpus) < 2 else {}
    process = start([*GENERATE, how], **share)
    assert b'"start"' in process.stdout.readline() and b'"delta"' in process.stdout.readline(), process.stderr.read().decode()
    other, = (pid for pid in running(process.mark) if pid != process.pid)
    os.kill(other, number)
    (code, _, words), = ends(process)
    assert code == 9 and "rank 1 (" in words and text in words, words
    assert all_gone(process.mark, 10)
