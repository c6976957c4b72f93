"""Files that are there whole or not at all."""
import contextlib
import errno
import os
import tempfile
from pathlib import Path

from ..errors import OutOfMemory, UsageError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)   # no more fits on the disk


@contextlib.contextmanager
def atomic_file(path):
    """A binary file that becomes `path` when the block ends, and vanishes when it raises; its data is on the disk by then.

    Raises:
        OutOfMemory: the disk is full. UsageError: the folder cannot be written.
    """
    path = Path(path)
    try:
        fd, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    except OSError as e:
        raise unwritable(path, e) from e
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(fd)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException as e:
        with contextlib.suppress(OSError):
            os.unlink(name)
        if isinstance(e, OSError):
            raise unwritable(path, e) from e
        raise


def unwritable(path: Path, e: OSError):
    """What a file that could not be written is called."""
    if e.errno in FULL:
        return OutOfMemory(f"{path}: {e.strerror}: nothing half-written is left of it", "free some space, or name another disk, and run it again")
    return UsageError(f"{path} cannot be written ({e.strerror or e})", "name a place that can be written")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
