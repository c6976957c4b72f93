"""What ranks must bring each other, whatever carries it: what virtual ranks of one process do."""
import threading

import numpy as np

from k3cuda.runtime.collectives import VirtualRanks


def check_moves(ranks, shapes, rng) -> None:
    """Every collective of `ranks`, between all of them and in groups, one a thread, on random parts of each shape: the arrays of virtual ranks."""
    tp = len(ranks)
    for shape in shapes:
        sources = [rng.normal(size=shape).astype(np.float32) for _ in range(tp)]
        for name, group in ((n, g) for n in ("gather", "scatter") for g in range(1, tp + 1) if tp % g == 0):
            got = [None] * tp

            def run(r, name=name, group=group, got=got, sources=sources):
                got[r] = getattr(ranks[r], name)([sources[r]], group)[0]

            threads = [threading.Thread(target=run, args=(r,)) for r in range(tp)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for mine, wanted in zip(got, getattr(VirtualRanks(tp), name)(sources, group), strict=True):
                for a, b in zip(mine, wanted, strict=True):
                    np.testing.assert_array_equal(a, b)
