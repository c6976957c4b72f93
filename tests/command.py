"""Runs the command as users do: a process of its own, with pipes."""
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
ANSWERING = b"\x1b[2m"   # the dim of thoughts: an answer has begun, and nobody reads keys
COMMAND = [sys.executable, "-m", "k3cuda"]
# Nothing of the caller's settings, and no install needed.
ENVIRONMENT = {n: v for n, v in os.environ.items() if not n.startswith("K3CUDA_") and n not in ("NO_COLOR", "PYTHONIOENCODING")}
ENVIRONMENT["PYTHONPATH"] = str(ROOT)
ENVIRONMENT["K3CUDA_DECODE_BACKEND"] = "reference"   # where nobody names one: the same on every machine
ENVIRONMENT["XDG_STATE_HOME"] = os.devnull   # no folder: nothing is left where the caller keeps things


def hears_interrupts():
    signal.signal(signal.SIGINT, signal.default_int_handler)   # a parent may have started us deaf to it


def k3(*args, code=0, stdin=None, env=None, may_trace=False, **options):
    """The finished process; `code` is the exit code it must have. Output is bytes. Tracebacks are never wanted but in -v."""
    done = subprocess.run([*COMMAND, *map(str, args)], input=stdin, env=ENVIRONMENT | (env or {}), capture_output=True, timeout=120,
                          **({} if stdin is not None else {"stdin": subprocess.DEVNULL}), **options)
    assert done.returncode == code, (done.returncode, done.stdout[-500:], done.stderr[-2000:])
    assert may_trace or b"Traceback" not in done.stderr, done.stderr.decode()
    return done


def k3_json(*args, **options):
    """The one document on stdout; NaN and Infinity are refused."""
    return json.loads(k3(*args, **options).stdout, parse_constant=lambda name: 1 / 0)


def start(*args, **options) -> subprocess.Popen:
    return subprocess.Popen([*COMMAND, *map(str, args)], env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, **{"preexec_fn": hears_interrupts} | options)


def sleeps(pid: int) -> bool:
    """Whether a process waits in a system call, which one that has said its prompt does for keys alone. Where no Linux tells, time has to do."""
    try:
        return Path(f"/proc/{pid}/syscall").read_text().split()[0] not in ("running", "-1")
    except OSError:
        time.sleep(0.3)
        return True


def on_terminal(*args, typed=(), env=None, python=("-m", "k3cuda")) -> tuple[str, int]:
    """Output and exit code on a terminal, of what `python` is told to run. `typed`: pairs of what to wait for in the output, and the bytes to type then.

    Behind anything but ANSWERING they are typed once the command waits for them: an interrupt between readline's prompt and its wait for a key would be
    heard with the next key only (CPython looks for signals where the wait is broken off).
    """
    pid, fd = pty.fork()
    if pid == 0:
        hears_interrupts()
        os.execve(sys.executable, [sys.executable, *python, *map(str, args)], ENVIRONMENT | {"TERM": "xterm"} | (env or {}))
    out, seen, typed, deadline = b"", 0, list(typed), time.monotonic() + 120
    while time.monotonic() < deadline:
        if typed and typed[0][0] in out[seen:] and (typed[0][0] == ANSWERING or sleeps(pid)):
            seen = len(out)
            os.write(fd, typed.pop(0)[1])
        if select.select([fd], [], [], 0.02)[0]:
            try:
                data = os.read(fd, 65536)
            except OSError:   # the other side closed
                break
            if not data:
                break
            out += data
    else:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(fd)
    return out.decode(errors="replace").replace("\r\n", "\n"), code
