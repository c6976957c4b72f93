"""How a process ends that may have had work on a GPU."""
import os
import sys
from contextlib import suppress
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """Ends the process. Where its work on the GPU is gone, at once: an interpreter's end frees what was there, and nobody knows what comes of that."""
    driver = sys.modules.get("k3cuda.runtime.cuda_driver")   # else nothing was on a GPU
    if driver is not None and driver.known_failure():
        driver.remove_folders()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)
    sys.exit(code)
