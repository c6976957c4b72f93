"""Runs several jobs on the GPUs of this machine, and says how each ended: checks side by side, timings one after another with a GPU to themselves.

    python3 scripts/gpu_jobs.py --within 280 --check core 'sh scripts/gpu.sh tests -k core' --check load 'sh scripts/gpu.sh load' --time step 'sh scripts/gpu.sh step'

Timings have the first GPU. Checks have the others, or begin when the timings have ended where there is no other. What a job says goes to $OUT/NAME.txt.
"""
import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from k3cuda.runtime.machine import probe_driver  # noqa: E402

TAIL_LINES = 12   # of what failed
CUT_OFF = "cut off"
MOST_S = 86_400


class Jobs:
    """Jobs that end before `end` (time.monotonic()) and within `each` seconds, or are killed then, children and all. A file in `out` has what each of them says."""

    def __init__(self, out: Path, end: float, each: float):
        self.out, self.end, self.each, self.results, self.running = out, end, each, {}, set()
        self.lock = threading.Lock()

    def run(self, name: str, command: str, gpu: str) -> None:
        start, process = time.monotonic(), self._start(name, command, gpu)
        code = CUT_OFF
        if process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(max(0.0, min(self.end - start, self.each)))
            _kill(process)   # or what it left running, which would share the next one's GPU
            with self.lock:
                self.running.discard(process)
        with self.lock:
            self.results[name] = (code, time.monotonic() - start)
            print(f"{name}: {code}, {self.results[name][1]:.0f} s", flush=True)

    def _start(self, name, command, gpu):
        with self.lock:
            if time.monotonic() >= self.end:
                return None
            with (self.out / f"{name}.txt").open("wb") as file:
                process = subprocess.Popen(["bash", "-c", command], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                                           env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu, "OUT": str(self.out)})
            self.running.add(process)
            return process

    def stop(self, number, frame) -> None:
        """A signal: nothing begins any more, what runs is killed."""
        self.end = 0.0   # of the machine's clock: long ago
        for process in list(self.running):
            _kill(process)
        sys.exit(128 + number)


def _kill(process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls the GPUs that are visible here; one where there is none, for jobs that need none."""
    count = max(1, len(probe_driver().gpus))
    given = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return given[:count] or list(map(str, range(count)))


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", nargs=2, action="append", default=[], metavar=("NAME", "COMMAND"), help="a job that may share its GPU; its name is also its file's")
    parser.add_argument("--time", nargs=2, action="append", default=[], metavar=("NAME", "COMMAND"), help="a job that may not")
    parser.add_argument("--within", type=float, default=570, metavar="SECONDS", help="for all of them; what runs then is killed  [default: %(default)s]")
    parser.add_argument("--each", type=float, default=MOST_S, metavar="SECONDS", help="for one of them, likewise  [default: as long as all of them have]")
    parser.add_argument("--at-once", type=int, default=4, metavar="N", help="checks that run at a time on a GPU  [default: %(default)s]")
    args = parser.parse_args(arguments)
    names = [name for name, _ in args.check + args.time]
    if len(set(names)) < len(names) or not names or any(not re.fullmatch(r"[\w.-]{1,100}", name) for name in names):
        parser.error(f"found the names {', '.join(map(repr, names)) or 'of no job'}; wanted one or more, each its own, of letters, digits and . - _")
    if args.at_once < 1 or not all(0 < seconds <= MOST_S for seconds in (args.within, args.each)):
        parser.error(f"found --at-once {args.at_once}, --within {args.within:g} and --each {args.each:g}; wanted 1 or more, and more than 0 seconds, up to {MOST_S}")
    out = Path(os.environ.get("OUT", ".")).resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        parser.error(f"OUT: found {out} ({e.strerror}), wanted a folder, or a place for one")
    first, *others = gpus()
    jobs = Jobs(out, time.monotonic() + args.within, args.each)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, jobs.stop)

    def time_all():
        for name, command in args.time:
            jobs.run(name, command, first)

    timings = threading.Thread(target=time_all)
    timings.start()
    if not others:
        timings.join()
    for_checks = others or [first]
    with ThreadPoolExecutor(args.at_once * len(for_checks)) as pool:
        list(pool.map(lambda at: jobs.run(*args.check[at], for_checks[at % len(for_checks)]), range(len(args.check))))
    timings.join()
    failed = [name for name in names if jobs.results[name][0] != 0]
    for name in failed:
        path = out / f"{name}.txt"
        tail = path.read_text(errors="replace").splitlines()[-TAIL_LINES:] if path.exists() else ["it did not begin"]
        print(f"== {name}", *tail, sep="\n")
    print("\n".join(f"{name:24} {jobs.results[name][0]!s:>8} {jobs.results[name][1]:6.0f} s" for name in names))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
