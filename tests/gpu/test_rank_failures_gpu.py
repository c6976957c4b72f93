"""A rank that dies or hangs in the middle of an answer, while the others' GPUs wait for it inside a kernel, and signals to the job: it ends in time, and no
process is left."""
import os
import signal
import sys
import time

import pytest
from command import COMMAND
from rank_processes import STARTED, all_gone, ends, free_port, running, start

from k3cuda.runtime.machine import probe_driver

pytestmark = pytest.mark.gpu
pytest.importorskip("cupy", reason="CuPy holds the device's memory; install k3cuda[cu13] or k3cuda[cu12]")


HOW = "nccl", "peer"
TROUBLE = {"killed": (signal.SIGKILL, "ended by SIGKILL"), "stopped": (signal.SIGSTOP, "gave no sign of life for 8 s")}
IN_TIME, SIGNAL_IN_TIME = 15, 10   # seconds, as promised in docs/multi-node.md
GENERATE = [*COMMAND, "generate", "tiny-random", "--tp", "2", "--ranks", "processes", "--decode-backend", "standard", "--max-model-len", "4096",
            "-p", "hi", "-n", "4000", "--ignore-eos", "-s", "7", "--jsonl", "--collectives"]

# A rank, of which the second finds its GPU nearly full: NCCL has room, and less than the part of the memory that is left alone remains.
CROWDED = """
import os, sys
import cupy
from k3cuda import LLM
from k3cuda.errors import K3Error
if os.environ["RANK"] == "1":
    with cupy.cuda.Device(1):
        held = cupy.cuda.Memory(cupy.cuda.runtime.memGetInfo()[0] - (6 << 30))
try:
    LLM("tiny-random", tp=2, decode_backend="standard", max_model_len=256).close()
except K3Error as e:
    print(e)
    sys.exit(e.code)
"""


def decoding(how: str):
    """A command in the middle of its answer, and its other rank's process."""
    share = {"K3CUDA_SHARE_GPU": "1"} if len(probe_driver().gpus) < 2 else {}
    process = start([*GENERATE, how], **share)
    assert b'"start"' in process.stdout.readline() and b'"delta"' in process.stdout.readline(), process.stderr.read().decode()
    other, = (pid for pid in running(process.mark) if pid != process.pid)
    return process, other


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("what", TROUBLE)
def test_a_rank_in_trouble_ends_the_job(what, how):
    number, text = TROUBLE[what]
    process, other = decoding(how)
    begin = time.monotonic()
    os.kill(other, number)
    (code, _, words), = ends(process)
    assert code == 9 and "rank 1 (" in words and text in words, words
    assert all_gone(process.mark, IN_TIME - (time.monotonic() - begin))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_a_signal_in_the_middle_of_an_answer(number, how):
    process, _ = decoding(how)
    begin = time.monotonic()
    process.send_signal(number)
    (code, _, words), = ends(process)
    assert code == (-number if number == signal.SIGKILL else 128 + number) and "Traceback" not in words, words
    assert all_gone(process.mark, SIGNAL_IN_TIME - (time.monotonic() - begin))


def test_the_full_gpu_of_another_rank():
    if len(probe_driver().gpus) < 2:
        pytest.skip("ranks that share a GPU find it full together")
    port, begin = free_port(), time.monotonic()
    (code, out, words), (other, _, _) = ends(*(start([sys.executable, "-c", CROWDED], STARTED["torchrun"](r, 2), MASTER_PORT=port, K3CUDA_JOB_TOKEN="t") for r in range(2)))
    assert (code, other) == (4, 4) and "rank 1 (" in out.decode() + words and "weights leave 0.00 GB" in out.decode() + words, out.decode() + words
    assert time.monotonic() - begin < 60   # imports and contexts included
