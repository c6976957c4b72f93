"""One load of a model's weights: how it reads, what its backend gets, and what it took."""
import contextlib
import logging
import time
from collections import Counter
from typing import Iterator

import numpy as np

from ..weights import Weight
from .block_reader import AUTO
from .load_plan import Unit, whole_layers
from .loader import Loader
from .progress import LoadProgress

log = logging.getLogger("k3cuda")

PHASES = ("read", "copy", "repack", "compile", "capture")


class Loading:
    """Hands out slices in the order of the layers, and counts.

    Args:
        mode: see block_reader.MODES.
        show: whether progress is shown on stderr; None: if that is a terminal. verb: what it says is done.

    Attributes:
        seconds: by phase. Phases overlap; read and copy are summed over the threads that did them.
        wanted_bytes: of tensors that were read, each once. read_bytes: with what lay between. kept_bytes: in the ranks' slices.
    """

    reads_itself = True   # so that whoever consumes may say where its bytes go

    def __init__(self, mode: str = AUTO, show: bool | None = False, verb: str = "loading"):
        self.mode, self.why, self.show, self.verb = mode, "", show, verb
        self.seconds: Counter[str] = Counter()
        self.wall_s, self.wanted_bytes, self.read_bytes, self.kept_bytes = 0.0, 0, 0, 0

    def slices(self, source, tp: int, ranks: range, units=None, **options) -> Iterator[tuple[Unit, dict[str, np.ndarray]]]:
        """(unit, weight name -> [ranks, (experts,) rows, columns ..]) of `ranks` of `tp`, in order.

        Args:
            source: an open checkpoint or repacked model, each of whose bytes is read once; or anything with `cfg` and `rank_slices` (tensor_source.py).
            units: None: a layer at a time, the part outside the layers first. options: of `run`.
        Raises:
            CheckpointError: a file cannot be read, or holds what no trained model does. UsageError: the mode isn't possible.
        """
        units = whole_layers(source.cfg) if units is None else units
        if not hasattr(source, "blocks"):   # made where it is asked for
            for unit in units:
                yield unit, {w.name: np.stack([_part(source.rank_slices(w, unit.layer, tp, rank), w, unit) for rank in ranks]) for w in unit.weights}
            return
        for unit, target in self.run(source, tp, ranks, units, **options):
            yield unit, source.slices_of(unit, target, ranks)

    def run(self, source, tp: int, ranks: range, units, open_target=None, *, total: int | None = None, **options):
        """As `Loader`, whose `options` these are, with progress and counts.

        Args:
            open_target: None: the source's own.
            total: bytes of the tensors of `units`, where these are not all there are and every one of their bytes stays.
        """
        wanted, kept = source.load_bytes(tp, ranks)
        wanted, kept = (wanted, kept) if total is None else (total, total)
        progress = LoadProgress(wanted, self.show, self.verb)
        open_target = open_target or (lambda unit: source.open_target(unit, tp, ranks))
        loader = Loader(source, tp, ranks, units, open_target, mode=self.mode, progress=progress, **options)
        self.mode, self.why = loader.mode, loader.why
        log.info("reading %s: %s (%s), %d at a time", source.path, loader.mode, loader.why, loader.workers)
        start = time.perf_counter()
        try:
            yield from loader
        finally:
            progress.close()
            counts, wall = loader.counts, time.perf_counter() - start
            self.wall_s += wall
            self.seconds += Counter(read=counts.read_s, copy=counts.copy_s, repack=wall - counts.wait_s)
            self.wanted_bytes += counts.wanted_bytes
            self.read_bytes += counts.read_bytes
        self.kept_bytes += kept

    @contextlib.contextmanager
    def phase(self, name: str):
        """Counts the seconds of a block to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def to_dict(self) -> dict:
        """JSON-ready: docs/cli.md has its keys. A phase that there was not is 0."""
        return {"mode": self.mode if self.read_bytes else None, "wall_s": self.wall_s, "wanted_bytes": self.wanted_bytes, "read_bytes": self.read_bytes,
                "kept_bytes": self.kept_bytes, **{f"{name}_s": float(self.seconds[name]) for name in PHASES}}

    def summary(self) -> str:
        """One line about what was read, or "" where nothing was."""
        if not self.kept_bytes:
            return ""
        if not self.read_bytes:
            return f"loaded {self.kept_bytes / 1e9:.2f} GB in {self.wall_s:.1f} s: {self.why}"
        amplified = self.read_bytes / self.kept_bytes
        phases = ", ".join(f"{name} {self.seconds[name]:.1f} s" for name in PHASES if self.seconds[name] >= 0.05)
        return (f"loaded {self.kept_bytes / 1e9:.2f} GB in {self.wall_s:.1f} s, read {self.read_bytes / 1e9:.2f} GB at "
                f"{self.read_bytes / 1e9 / max(self.wall_s, 1e-9):.2f} GB/s ({amplified:.1f} bytes for each one kept)"
                + (f"; overlapping: {phases}" if phases else ""))


def _part(array: np.ndarray, weight: Weight, unit: Unit) -> np.ndarray:
    """Of what every expert has, the unit's experts."""
    return array[unit.experts.start:unit.experts.stop] if weight.count else array
