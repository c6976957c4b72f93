"""The other ranks of a job that no launcher started: processes of this machine that never outlive the one that started them."""
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from ..errors import RankDied

END_S = 3.0      # that a worker has to end by itself
PARENT_GONE = 9  # exit code of a worker whose parent ended


class Workers:
    """Ranks 1 to size - 1, each a process of its own.

    Args:
        work: what each runs, JSON-ready; it also gets its `rank` and `parent`. It goes through a pipe, which others cannot read as they can
            arguments and environment: it holds the token.
    """

    def __init__(self, size: int, work: dict):
        package = str(Path(__file__).parents[2])
        env = os.environ | {"PYTHONPATH": os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])}
        is_main = threading.current_thread() is threading.main_thread()
        log = logging.getLogger("k3cuda")
        self._processes = {}
        try:
            for rank in range(1, size):
                # stdout is the result's. A signal of the terminal reaches them too, and they leave it to rank 0.
                worker = subprocess.Popen([sys.executable, "-P", "-m", "k3cuda.runtime.rank_worker"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=env)
                self._processes[rank] = worker
                told = work | {"rank": rank, "parent": os.getpid() if is_main else None, "log_level": log.getEffectiveLevel()}
                worker.stdin.write(json.dumps(told).encode() + b"\n")
                worker.stdin.flush()   # and it stays open: its end is ours
        except BaseException:
            self.close(at_once=True)
            raise

    def check(self) -> None:
        """Raises RankDied where one has ended."""
        for rank, worker in self._processes.items():
            if worker.poll() is not None:
                raise RankDied(f"rank {rank} (pid {worker.pid}) ended {_how(worker.returncode)} before the job began", "its own output says why")

    def words(self, rank: int) -> str:
        """How the process of a rank ended, or "" where it has not, or is none of these."""
        worker = self._processes.get(rank)
        try:
            return "" if worker is None else _how(worker.wait(1))
        except subprocess.TimeoutExpired:
            return ""

    def close(self, at_once: bool = False) -> None:
        """Ends all of them; none is left when it returns."""
        end = time.monotonic() + (0 if at_once else END_S)
        for worker in self._processes.values():
            if worker.stdin and not at_once:
                _close(worker.stdin)
        for worker in self._processes.values():
            try:
                worker.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
            _close(worker.stdin)


def _how(code: int) -> str:
    if code >= 0:
        return f"with code {code}"
    name = signal.Signals(-code).name if -code in signal.Signals._value2member_map_ else f"signal {-code}"
    return f"by {name}" + (": its machine may have run out of memory" if name == "SIGKILL" else "")


def _close(pipe) -> None:
    try:
        pipe.close()
    except OSError:   # it is gone, with something of ours unread
        pass


def tie_to_parent(parent: int | None) -> None:
    """The calling process ends when the process `parent` ends, or the thread of it that is the main one; None: by its pipe alone."""
    if parent is not None and sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)   # PR_SET_PDEATHSIG
        if os.getppid() != parent:   # it ended before we asked
            os._exit(PARENT_GONE)
    threading.Thread(target=_wait_for_end, name="k3cuda-parent", daemon=True).start()


def _wait_for_end() -> None:
    while os.read(0, 1):
        pass
    time.sleep(0.2)   # a clean end also comes over the watch, with code 0
    os._exit(PARENT_GONE)
