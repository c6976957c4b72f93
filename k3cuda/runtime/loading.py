"""One load of a model's weights: how it reads, what its backend gets, and what it took."""
import logging
import time
from collections import Counter
from typing import Iterator

import numpy as np

from ..weights import model_bytes
from .block_reader import AUTO
from .checkpoint import Checkpoint
from .load_plan import Unit, wanted_bytes, whole_layers
from .loader import Loader
from .progress import LoadProgress
from .slices import HostSlices, check_values

log = logging.getLogger("k3cuda")

PHASES = ("read", "copy", "pack", "compile", "capture")


class Loading:
    """Hands out slices in the order of the layers, and counts.

    Args:
        mode: see block_reader.MODES.
        show: whether progress is shown on stderr; None: if that is a terminal.

    Attributes:
        seconds: by phase. Phases overlap; read and copy are summed over the threads that did them.
        wanted_bytes: of tensors that were read, each once. read_bytes: with what lay between. kept_bytes: in the ranks' slices.
    """

    def __init__(self, mode: str = AUTO, show: bool | None = False):
        self.mode, self.why, self.show = mode, "", show
        self.seconds: Counter[str] = Counter()
        self.wall_s, self.wanted_bytes, self.read_bytes, self.kept_bytes = 0.0, 0, 0, 0

    def slices(self, source, tp: int, ranks: range) -> Iterator[tuple[Unit, dict[str, np.ndarray]]]:
        """(unit, weight name -> [ranks, (experts,) rows, columns ..]) of `ranks` of `tp`, a layer at a time; the part outside the layers first.

        Args:
            source: an open checkpoint, each of whose bytes is read once; or anything with `cfg` and `rank_slices` (tensor_source.py).
        Raises:
            CheckpointError: a file cannot be read, or holds what no trained model does. UsageError: the mode isn't possible.
        """
        units = whole_layers(source.cfg)
        if not isinstance(source, Checkpoint):
            for unit in units:
                yield unit, {w.name: np.stack([source.rank_slices(w, unit.layer, tp, rank) for rank in ranks]) for w in unit.weights}
            return
        dims = source.cfg.dims()
        for unit, target in self.run(source, tp, ranks, units, lambda unit: HostSlices(unit, dims, tp, ranks)):
            check_values(source, unit, target.arrays)
            yield unit, target.arrays

    def run(self, source: Checkpoint, tp: int, ranks: range, units, open_target, **options):
        """As `Loader`, whose `options` these are, with progress and counts."""
        progress = LoadProgress(wanted_bytes(source.cfg, tp, ranks), self.show)
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
            self.seconds += Counter(read=counts.read_s, copy=counts.copy_s, pack=wall - counts.wait_s)
            self.wanted_bytes += counts.wanted_bytes
            self.read_bytes += counts.read_bytes
        self.kept_bytes += model_bytes(source.cfg, tp) * len(ranks)

    def summary(self) -> str:
        """One line about what was read, or "" where nothing was."""
        if not self.kept_bytes:
            return ""
        amplified = self.read_bytes / self.kept_bytes
        phases = ", ".join(f"{name} {self.seconds[name]:.1f} s" for name in PHASES if self.seconds[name] >= 0.05)
        return (f"loaded {self.kept_bytes / 1e9:.2f} GB in {self.wall_s:.1f} s, read {self.read_bytes / 1e9:.2f} GB at "
                f"{self.read_bytes / 1e9 / max(self.wall_s, 1e-9):.2f} GB/s ({amplified:.1f} bytes for each one kept)"
                + (f"; overlapping: {phases}" if phases else ""))
