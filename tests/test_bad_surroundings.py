"""Every command where little is as it should be: no network, no home, no rights, streams closed or read by nobody. A code, never a traceback.

The commands are those of the command's own tree: one that RUNS doesn't know is run without arguments.
"""
import os
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import click
import pytest
from command import COMMAND, ENVIRONMENT, hears_interrupts

from k3cuda.cli import main

DATA = Path(__file__).parent / "data"
TEXT = "w\u00f6rld \U0001f600"
SHORT = ["--input-len", "4", "--output-len", "2"]
NOWHERE = "http://127.0.0.1:9/v1"   # the port of discard, where nobody answers
# Arguments for a short run, the codes of its ends, and what is on stdin.
RUNS = {
    "generate": (["tiny-random", "-p", TEXT, "-n", "2", "-s", "1"], {0}, ""),
    "chat": (["tiny-random", "-n", "2", "-s", "1"], {0}, f"{TEXT}\n/tokens\n/exit\n"),
    "serve": (["tiny-random"], {143}, ""),
    "tokenize": (["tiny-random", "-p", TEXT], {0}, ""),
    "info": ([], {0}, ""),
    "check": (["tiny-random"], {0}, ""),
    "plan": (["tiny-random"], {0}, ""),
    "compile": (["--output", "{folder}/cubin", "--arch", "sm_90a", "--rows", "1", "--sms", "132", "-m", "tiny-random", "--tp", "1"], {0, 2, 5}, ""),   # 2: a folder that is not ours; 5: no NVRTC
    "repack": (["tiny-random", "--tp", "1", "--out", "{folder}/{new}"], {0, 2}, ""),
    "bench step": ([], {5}, ""),
    "bench stage": ([], {5}, ""),
    "bench prefill": ([], {5}, ""),
    "bench decode": (["tiny-random", "--batch", "1", *SHORT], {0}, ""),
    "bench latency": (["tiny-random", *SHORT, "--batch-size", "1", "--num-iters", "1", "--num-iters-warmup", "0"], {0}, ""),
    "bench throughput": (["tiny-random", *SHORT, "--num-prompts", "1"], {0}, ""),
    "bench replay": (["tiny-random", str(DATA / "trace.jsonl"), "--concurrency", "1"], {0}, ""),
    "bench serve": (["--base-url", NOWHERE, "--num-prompts", "1"], {2, 8}, ""),
    "eval": (["tiny-random", "demo", "--limit", "1", "-n", "2"], {0}, ""),
}
WITHOUT_ARGUMENTS = ([], {0, 2, 3, 4, 5, 6, 8}, "")
NARROW = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
NOBODY = 54321


def commands(group=main, path=()):
    for name, command in group.commands.items():
        yield from commands(command, (*path, name)) if isinstance(command, click.Group) else [" ".join((*path, name))]


each = pytest.mark.parametrize("name", list(commands()))


def test_no_run_is_of_a_command_that_is_gone():
    assert RUNS.keys() <= set(commands())


def environment(**more):
    path = os.pathsep.join([str(DATA / "no_network"), ENVIRONMENT["PYTHONPATH"]])
    return ENVIRONMENT | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""} | more


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One for all: kernels that a command compiled there are found by the next."""
    return tmp_path_factory.mktemp("surroundings")


def run(name: str, tail: str, folder, *, python=None, env=None, codes=None, **options) -> str:
    """Runs a command in a shell, with `tail` behind it: its stdout."""
    given, expected, stdin = RUNS.get(name, WITHOUT_ARGUMENTS)
    if name == "serve":
        pytest.importorskip("uvicorn", reason="the extra serve is not installed")
    port = free_port()
    words = [python or sys.executable, *COMMAND[1:], *name.split(), *(a.format(folder=folder, new=f"new-{port}") for a in given)]
    words += ["--port", str(port)] * (name == "serve")
    quoted = " ".join("'" + w + "'" for w in words)
    process = subprocess.Popen(["bash", "-o", "pipefail", "-c", f"{'' if '|' in tail else 'exec '}{quoted} {tail}"], env=environment() if env is None else env,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **{"preexec_fn": hears_interrupts, "cwd": folder} | options)
    if name == "serve":
        wait_for(port, process)
        process.terminate()
    try:
        out, err = process.communicate(stdin.encode(), timeout=120)
    finally:
        process.kill()
    said = out + err
    assert process.returncode in (codes or expected), (process.returncode, said[-2000:])
    for bad in (b"Traceback", b"Exception ignored", b"NETWORK", b"internal error"):
        assert bad not in said, said.decode(errors="replace")
    return out.decode(errors="replace")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for(port: int, process) -> None:
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)


@each
def test_a_bare_container(name):
    """An unknown uid without a home in a folder and with a cache that are not its own, no network, and a locale of ASCII."""
    bare = {"PATH": os.environ["PATH"], "K3CUDA_CACHE_DIR": str(DATA), "PYTHONDONTWRITEBYTECODE": "1"} | NARROW
    path = [str(DATA / "no_network"), ENVIRONMENT["PYTHONPATH"], sysconfig.get_path("purelib")]
    env = bare | {"PYTHONPATH": os.pathsep.join(path), "CUDA_VISIBLE_DEVICES": ""}
    python, options = stranger(env)
    if not options:
        env["HOME"] = "/nonexistent"
    run(name, "", DATA, python=python, env=env, cwd="/", **options)


_found = []


def stranger(env) -> tuple[str, dict]:
    """A Python that somebody without rights can run, and how to become them; where that can't be done, this one as we are."""
    if not _found:
        become = {"preexec_fn": lambda: (hears_interrupts(), os.setgroups([]), os.setgid(NOBODY), os.setuid(NOBODY))}
        # Ours may lie in the home of root; the system's of the same version can use our packages.
        pythons = [sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"] if os.getuid() == 0 else []
        usable = [p for p in pythons if os.path.exists(p) and can_import(p, env, become)]
        _found.append((usable[0], become) if usable else (sys.executable, {}))
    return _found[0]


def can_import(python: str, env, become) -> bool:
    try:
        return subprocess.run([python, "-c", "import numpy, click, tiktoken"], env=env, cwd="/", capture_output=True, **become).returncode == 0
    except OSError:
        return False


@each
def test_no_stdin_and_a_reader_that_leaves_after_a_byte(name, folder):
    run(name, "<&-" if name == "serve" else "<&- | head -c 1", folder, codes=RUNS.get(name, WITHOUT_ARGUMENTS)[1] | {141})   # 0 where all was written before it left


@each
def test_stderr_is_closed(name, folder):
    out = run(name, "2>&-", folder)
    assert out or name not in RUNS or RUNS[name][1] != {0}
