"""Several threads that read blocks and share them out, a bounded way ahead of whoever consumes the units in order."""
import mmap
import threading
import time
from dataclasses import dataclass, field
from typing import Callable, Iterator

import numpy as np

from .block_reader import choose_mode, make_reader, memory_bytes
from .load_plan import ALIGN, BLOCK_BYTES, Block, Unit
from .machine import host

AHEAD = 2                  # units that may be begun before the oldest is consumed, unless a caller says otherwise
LEAST_WORKERS, MOST_WORKERS = 4, 16


@dataclass
class Counts:
    """What a load did so far. Seconds of workers are summed over them: they overlap each other and the consumer."""

    wanted_bytes: int = 0   # of tensors, each once
    read_bytes: int = 0     # with gaps that were read along
    read_s: float = 0.0
    copy_s: float = 0.0
    wait_s: float = 0.0     # of the consumer, for the next unit
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)


def page_buffer(nbytes: int) -> np.ndarray:
    """uint8 [nbytes], starting on a page; pages that are never touched take no memory."""
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def default_workers() -> int:
    return min(MOST_WORKERS, max(LEAST_WORKERS, 2 * (host()["cores"] or 1)))


class Loader:
    """Reads units of a checkpoint in order.

    Args:
        checkpoint: an open runtime/checkpoint.py or runtime/repacked.py: has `shards` and `blocks`.
        tp, ranks: the ranks of this node, neighbours, which share every byte that is read.
        units: in the order in which they are wanted (load_plan.py).
        open_target: makes what takes a unit's parts: has `put(segment, view)`, which several threads call, and `flush()`, which each of them
            calls before its buffer is used again. It is itself called by those threads, one at a time.
        mode: see block_reader.MODES.
        make_buffer: bytes -> a buffer, uint8, starting on a page; called by the thread that uses it.
        progress: is told bytes of tensors as they arrive, from any thread; or None.
        ahead: units that may be begun before the oldest is consumed.
    """

    def __init__(self, checkpoint, tp: int, ranks: range, units: Iterator[Unit], open_target: Callable[[Unit], object], *, mode: str,
                 make_buffer=page_buffer, workers: int | None = None, capacity: int = BLOCK_BYTES, progress=None,
                 ahead: int = AHEAD):
        files = list(checkpoint.shards.files.values())
        self.mode, self.why = choose_mode(mode, files, checkpoint.shards.text_bytes)
        self.reader = make_reader(self.mode, keep=checkpoint.shards.text_bytes <= memory_bytes() // 2)
        self.counts, self.workers = Counts(), workers or default_workers()
        capacity = min(capacity, (-(-checkpoint.shards.text_bytes // ALIGN) + 2) * ALIGN)   # a small model's buffers are small
        self._ahead, self._blocks = ahead, lambda unit: checkpoint.blocks(unit, tp, ranks, capacity)
        self._units, self._open_target, self._progress = iter(units), open_target, progress
        self._make_buffer = (lambda: make_buffer(capacity)) if self.reader.needs_buffer else lambda: None
        self._state = threading.Condition()
        self._begun: list[_Begun] = []     # units that are not consumed yet, oldest first
        self._error: BaseException | None = None
        self._ended = self._stopped = False   # no unit is left to begin; nothing more is to be done
        self._threads = [threading.Thread(target=self._work, name=f"k3cuda-load-{i}", daemon=True) for i in range(self.workers)]

    def __iter__(self) -> Iterator[tuple[Unit, object]]:
        """(unit, target with all its parts), in order. What a worker could not do is raised here; every thread has then ended."""
        for thread in self._threads:
            thread.start()
        try:
            while (begun := self._next_ready()) is not None:
                yield begun.unit, begun.target
                with self._state:
                    self._begun.remove(begun)
                    self._state.notify_all()
        finally:
            with self._state:
                self._stopped = True
                self._state.notify_all()
            for thread in self._threads:
                thread.join()
            self.reader.close()

    def _next_ready(self) -> "_Begun | None":
        start = time.perf_counter()
        with self._state:
            self._state.wait_for(lambda: self._error or (self._begun[0].left == 0 if self._begun else self._ended))
            self.counts.wait_s += time.perf_counter() - start
            if self._error:
                raise self._error
            return self._begun[0] if self._begun else None

    # ---- workers ----

    def _work(self) -> None:
        try:
            buffer = self._make_buffer()
            while self._do_next(buffer):
                pass
        except BaseException as e:   # of whatever kind: the consumer waits for it
            with self._state:
                self._error = self._error or e
                self._stopped = True
                self._state.notify_all()

    def _do_next(self, buffer: np.ndarray | None) -> bool:
        """Does one block; False: none is left. A function of its own, so that a thread that waits for the next unit keeps no older one."""
        if (job := self._next_block()) is None:
            return False
        begun, block = job
        self._do(buffer, begun.target, block)
        with self._state:
            begun.left -= 1
            if begun.left == 0:
                self._state.notify_all()
            del job, begun   # before the consumer can go on
        return True

    def _next_block(self) -> "tuple[_Begun, Block] | None":
        with self._state:
            while not self._stopped:
                if ready := [begun for begun in self._begun if begun.blocks]:
                    return ready[0], ready[0].blocks.pop()
                if self._ended:
                    return None
                if len(self._begun) <= self._ahead:
                    self._begin()
                else:
                    self._state.wait()
        return None

    def _begin(self) -> None:
        unit = next(self._units, None)
        if unit is None:
            self._ended = True
        else:
            blocks = self._blocks(unit)
            blocks.reverse()   # they are taken from the end
            self._begun.append(_Begun(unit, self._open_target(unit), blocks, len(blocks)))
        self._state.notify_all()

    def _do(self, buffer: np.ndarray | None, target, block: Block) -> None:
        start = time.perf_counter()
        views = self.reader.read(block, buffer)
        read = time.perf_counter()
        for r, view in zip(block.ranges, views):
            for segment in r.segments:
                begin = segment.start - r.start
                target.put(segment, view[begin:begin + segment.nbytes])
        target.flush()
        end, wanted = time.perf_counter(), block.wanted_bytes
        with self.counts.lock:
            self.counts.read_s += read - start
            self.counts.copy_s += end - read
            self.counts.wanted_bytes += wanted
            self.counts.read_bytes += sum(r.stop - r.start for r in block.ranges)
        if self._progress:
            self._progress.add(wanted)


@dataclass(eq=False)
class _Begun:
    unit: Unit
    target: object
    blocks: list[Block]   # not taken yet, last first
    left: int             # not finished yet
