"""Runs the command as users do: a process of its own, with pipes."""
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-m", "k3cuda"]
# Nothing of the caller's settings, and no install needed.
ENVIRONMENT = {n: v for n, v in os.environ.items() if not n.startswith("K3CUDA_") and n not in ("NO_COLOR", "PYTHONIOENCODING")}
ENVIRONMENT["PYTHONPATH"] = str(ROOT)


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
