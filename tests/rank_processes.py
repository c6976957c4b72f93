"""Processes of a job, as a launcher would start them, and whether any is left."""
import os
import secrets
import socket
import subprocess
import time
from pathlib import Path

from command import ENVIRONMENT, hears_interrupts

MARK = "K3CUDA_JOB_TOKEN"   # every process of a job inherits it
STARTED = {   # what a launcher tells rank r of n
    "torchrun": lambda r, n: {"RANK": r, "WORLD_SIZE": n, "LOCAL_RANK": r, "LOCAL_WORLD_SIZE": n, "MASTER_ADDR": "localhost"},
    "srun": lambda r, n: {"SLURM_PROCID": r, "SLURM_STEP_NUM_TASKS": n, "SLURM_NTASKS": n, "SLURM_LOCALID": r, "SLURM_JOB_ID": 5, "SLURM_STEP_ID": 0,
                          "SLURM_STEP_NODELIST": socket.gethostname(), "SLURM_STEP_NUM_NODES": 1},
}


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def start(words, place: dict = {}, **more) -> subprocess.Popen:
    """A process with what its launcher says, and a token of its own unless `more` has one; `mark` is it."""
    place = {MARK: secrets.token_hex(8)} | place | more
    process = subprocess.Popen(list(map(str, words)), env=ENVIRONMENT | {name: str(value) for name, value in place.items()}, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=hears_interrupts)
    process.mark = place[MARK]
    return process


def ends(*processes, timeout=60):
    """(code, stdout, stderr) of each."""
    out = [p.communicate(timeout=timeout) for p in processes]
    return [(p.returncode, stdout, stderr.decode()) for p, (stdout, stderr) in zip(processes, out)]


def running(mark: str) -> list[int]:
    """Processes of the job `mark`, those that are but waited for left out."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and int(folder.name) != os.getpid() and f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:   # gone, or another user's
            continue
    return found


def all_gone(mark: str, within: float) -> bool:
    end = time.monotonic() + within
    while running(mark):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
