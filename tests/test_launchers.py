"""Ranks started by others: MPICH's and Open MPI's launchers for real, Slurm and torchrun by the variables that they set. Every rank ends alike."""
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import rank_processes
from command import COMMAND, ENVIRONMENT, ROOT

from k3cuda.runtime.tiny_random import open_tiny_random
from k3cuda.runtime.write_checkpoint import write_checkpoint
from rank_processes import MARK, STARTED, ends, free_port

PAGE = (ROOT / "docs/multi-node.md").read_text(encoding="utf-8")
# Both packages bring a mpirun; these names are one's alone.
MPI = {"mpich": ["mpiexec.hydra"], "openmpi": ["prterun", "--personality", "ompi", "--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE"]}
GENERATE = ["generate", "tiny-random", "--tp", "2", "-p", "hi", "-n", "4", "-s", "7", "--max-model-len", "256"]


def words_of(start: str) -> list[str]:
    """The page's command that begins so, without the launcher and its arguments."""
    line, = re.findall(rf"^{start} -n 2 k3cuda (.*)$", PAGE, re.M)
    return shlex.split(line)


@pytest.fixture(scope="module")
def wanted():
    done = subprocess.run([*COMMAND, *words_of("mpirun"), "--ranks", "virtual"], env=ENVIRONMENT, capture_output=True, check=True, timeout=120)
    assert done.stdout.strip()
    return done.stdout


@pytest.fixture
def port():
    return free_port()


def start(place: dict, words, port, **more):
    return rank_processes.start([*COMMAND, *words], place, **{"MASTER_PORT": port, MARK: ""} | more)


@pytest.mark.parametrize("package", MPI)
def test_mpi_launchers(package, port, wanted):
    program, *flags = MPI[package]
    beside = Path(sys.executable).parent / program
    found = str(beside) if beside.exists() else shutil.which(program)
    if found is None and os.environ.get("REQUIRE_CUDA_LINE") is None:
        pytest.skip(f"no {program}; it comes with k3cuda[test] on Linux")
    env = ENVIRONMENT | {"MASTER_PORT": port, "PATH": f"{Path(found).parent}:{os.environ['PATH']}"}
    done = subprocess.run([found, *flags, "-n", "2", *COMMAND, *words_of("mpirun")], env=env, capture_output=True, stdin=subprocess.DEVNULL, timeout=120)
    assert (done.returncode, done.stdout) == (0, wanted), done.stderr.decode()


def test_variables_of_slurm(port, wanted):   # torchrun's start the ranks of tests below, and of test_rank_failures.py
    processes = [start(STARTED["srun"](r, 2), words_of("srun"), port) for r in (1, 0)]
    assert [(code, out) for code, out, _ in ends(*processes)] == [(0, b""), (0, wanted)]


@pytest.mark.parametrize(("words", "code", "text"), [
    (["--tp", "4"], 2, "tp: found 4, but Slurm started 2 processes"), (["--max-model-len", "64"], 3, "ranks differ in max_model_len: rank 0 has 256, rank 1 has 64"),
    (["--decode-backend", "nonsense"], 2, "decode_backend: found 'nonsense'"),
])
def test_what_one_rank_finds_ends_both(words, code, text, port):
    """Rank 1 has other flags than rank 0. Where it can tell rank 0, rank 0 says it; where its number of ranks is not the job's, both find out."""
    other = STARTED["srun"](1, 2)
    if code == 2 and "--tp" in words:
        first = start(STARTED["srun"](0, 2), [*GENERATE, *words], port)
    else:
        first = start(STARTED["srun"](0, 2), GENERATE, port)
    results = ends(first, start(other, [*GENERATE, *words], port))
    assert [c for c, _, _ in results] == [code, code] and text in results[0][2], results


def test_another_checkpoint_on_one_rank(tmp_path, port):
    write_checkpoint(open_tiny_random(), tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    config = tmp_path / "b" / "config.json"
    config.write_text(config.read_text() + "\n")
    results = ends(*(start(STARTED["torchrun"](r, 2), [w.replace("tiny-random", str(tmp_path / name)) for w in GENERATE], port) for r, name in enumerate("ab")))
    assert [c for c, _, _ in results] == [3, 3] and "ranks differ in model: rank 0 has" in results[0][2]


def test_a_rank_that_never_comes_and_one_with_another_token(port):
    words = [*GENERATE, "--rendezvous-timeout", "3"]
    first, other = ends(start(STARTED["torchrun"](0, 2), words, port, K3CUDA_JOB_TOKEN="one secret"),
                        start(STARTED["torchrun"](1, 2), words, port, K3CUDA_JOB_TOKEN="another secret"))
    assert first[0] == 9 and "rank 1 of 2 did not come within 3 s; processes with another token tried from 127.0.0.1" in first[2]
    assert other[0] == 2 and "has another token" in other[2]
    assert "secret" not in first[2] + other[2]


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (code, _, text), = ends(start(STARTED["torchrun"](0, 2), GENERATE, str(taken.getsockname()[1])))
    assert code == 2 and "is in use" in text
