"""Steps in one launch that lose a result, in a process of their own: a launch that ends itself takes all of the process's memory on the GPU with it."""
import os
import subprocess
import sys
import threading
import time

from launch_standard import without_a_product
from models import open_slot, step_rows

from k3cuda.runtime import cuda_launch, launch_program


def lose(be, behind: int, limit_ns: int = cuda_launch.LIMIT_NS) -> None:
    """A step of one row by a backend that has made no launch yet, of `without_a_product`. Prints what it ends in, and ends the process."""
    whole = cuda_launch.launched
    cuda_launch.launched = lambda *args: without_a_product(whole(*args), behind)
    cuda_launch.LIMIT_NS = launch_program.LIMIT_NS = limit_ns   # what launches are given, and what is said of them
    open_slot(be, 0)
    be.step_launches.declines(1)   # makes it
    record, start = be.step_launches._records.words[1], time.monotonic()
    threading.Thread(target=_tell, args=(record, start), daemon=True).start()
    try:
        be.step(step_rows((0, 0, [1])))
        be.logits()
    except Exception as e:
        print(type(e).__name__, e)
    print(f"ended after {time.monotonic() - start:.2f} s")
    be.close()
    print("closed", flush=True)
    os._exit(0)   # what is left of CuPy's memory cannot be freed


def _tell(record, start: float) -> None:
    """When a block has written who waited for what."""
    while not record[0]:
        time.sleep(0.002)
    print(f"the record came after {time.monotonic() - start:.2f} s", flush=True)


def said_of_loss(module: str, call: str, timeout: float) -> str:
    """What a process prints that calls `lose` with the names of a test's module: the step ends with a name."""
    script = f"import sys\nsys.path[:0] = {sys.path!r}\nfrom {module} import *\nfrom lost_result import lose\n{call}\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=timeout)
    print(done.stdout)
    assert "StepTimeout a step in one launch ended itself: block" in done.stdout, (done.stdout, done.stderr[-2000:])
    return done.stdout
