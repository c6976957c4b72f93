"""Ways to get a range of a file into memory: past the page cache, through it, or mapped."""
import errno
import mmap
import os

import numpy as np

from ..errors import CheckpointError, UsageError
from .findings import AGAIN
from .load_plan import ALIGN, Block
from .machine import host

AUTO, DIRECT, BUFFERED, MAPPED = MODES = ("auto", "direct", "buffered", "mmap")


def choose_mode(asked: str, files, nbytes: int) -> tuple[str, str]:
    """(mode, why) for reading `nbytes` of `files` (SafetensorsFile).

    Raises:
        UsageError: direct reads were asked for, and a file's file system has none.
    """
    if asked in (BUFFERED, MAPPED):
        return asked, "as asked"
    refused = _without_direct(files)
    if asked == DIRECT:
        if refused:
            raise UsageError(f"load_mode direct: {refused}", "use auto or buffered")
        return DIRECT, "as asked"
    if nbytes <= memory_bytes() // 2:
        return BUFFERED, "the page cache can keep it for the next start"
    return (BUFFERED, refused) if refused else (DIRECT, "larger than half of the memory")


def memory_bytes() -> int:
    """Memory that this process may use: the machine's, or the container's."""
    found = host()
    return min(n for n in (found["memory_bytes"], found["memory_limit_bytes"], 1 << 62) if n)


def _without_direct(files) -> str:
    """Why some file cannot be read directly, or "". One file of each file system is tried."""
    tried = set()
    for file in files:
        try:
            if (device := os.stat(file.path).st_dev) in tried:
                continue
            tried.add(device)
            fd = os.open(file.path, os.O_RDONLY | os.O_DIRECT)
            try:
                os.preadv(fd, [mmap.mmap(-1, ALIGN)], 0)
            finally:
                os.close(fd)
        except OSError as e:
            if e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise read_error(file.path, 0, e) from e
            return f"the file system of {file.path} has no direct reads ({os.strerror(e.errno)})"
    return ""


def make_reader(mode: str, keep: bool):
    """A reader for all threads. `keep`: what was read may stay in the page cache."""
    return MappedReader() if mode == MAPPED else FileReader(mode == DIRECT, keep)


class FileReader:
    """Reads into a buffer of the caller's, which starts on a page.

    Args:
        direct: past the page cache; the file must be readable with O_DIRECT.
        keep: leave what was read in the page cache.
    """

    needs_buffer = True

    def __init__(self, direct: bool, keep: bool):
        self._direct, self._keep, self._open = direct, keep, {}

    def read(self, block: Block, buffer: np.ndarray) -> list[np.ndarray]:
        """The bytes of every range of a block, as views of `buffer`, uint8.

        Raises CheckpointError: the disk fails, or the file has become shorter since it was checked.
        """
        fd, views, at = self._descriptor(block.file), [], 0
        for r in block.ranges:
            first = r.start // ALIGN * ALIGN
            size = -(-(r.stop - first) // ALIGN) * ALIGN
            self._fill(fd, block.file.path, buffer[at:at + size], first, r.stop - first)
            views.append(buffer[at + r.start - first:at + r.stop - first])
            at += size
        return views

    def _fill(self, fd: int, path, into: np.ndarray, offset: int, needed: int) -> None:
        done = 0
        while done < needed:   # a direct read starts on a page; the last one may end with the file
            try:
                count = os.preadv(fd, [into[done:]], offset + done)
            except OSError as e:
                raise read_error(path, offset + done, e) from e
            if not count or self._direct and count % ALIGN and done + count < needed:
                raise CheckpointError(f"{path}: ended at byte {offset + done + count:,} while it was read: it has become shorter since it was checked", AGAIN)
            done += count
        if not (self._direct or self._keep):
            os.posix_fadvise(fd, offset, needed, os.POSIX_FADV_DONTNEED)

    def _descriptor(self, file) -> int:
        # Two threads may open the same file; setdefault keeps one.
        if file.path not in self._open:
            fd = open_file(file.path, os.O_DIRECT if self._direct else 0)
            if self._open.setdefault(file.path, fd) != fd:
                os.close(fd)
        return self._open[file.path]

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


class MappedReader:
    """Hands out views of the mapped file. A file that shrinks ends the process: for small models and tests."""

    needs_buffer = False

    def __init__(self):
        self._maps: dict[object, np.ndarray] = {}

    def read(self, block: Block, buffer: None) -> list[np.ndarray]:
        path = block.file.path
        if path not in self._maps:
            self._maps.setdefault(path, self._map(path))
        if (size := os.stat(path).st_size) < block.ranges[-1].stop:
            raise CheckpointError(f"{path}: ended at byte {size:,} while it was read: it has become shorter since it was checked", AGAIN)
        whole = self._maps[path]
        return [whole[r.start:r.stop] for r in block.ranges]

    @staticmethod
    def _map(path) -> np.ndarray:
        fd = open_file(path, 0)
        try:
            return np.frombuffer(mmap.mmap(fd, 0, prot=mmap.PROT_READ), np.uint8)
        except OSError as e:
            raise read_error(path, 0, e) from e
        finally:
            os.close(fd)

    def close(self) -> None:
        self._maps.clear()


def open_file(path, flags: int) -> int:
    try:
        return os.open(path, os.O_RDONLY | flags)
    except OSError as e:
        raise read_error(path, 0, e) from e


def read_error(path, offset: int, e: OSError) -> CheckpointError:
    way_out = "download it, or correct the path" if e.errno == errno.ENOENT else "check the disk, or download the file again"
    return CheckpointError(f"{path}: an error on reading at byte {offset:,} ({e.strerror or e})", way_out)
