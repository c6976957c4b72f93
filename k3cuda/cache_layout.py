"""Where a GPU has the values of the latent cache."""
from types import ModuleType

import numpy as np

UNIT = 16   # bytes


def in_order(pages, xp: ModuleType = np):
    """Pages as a GPU holds them -> the same with the values of every row in order, or back: it is its own inverse.

    Attention copies pages as they are and wants them free of bank conflicts, so 16-byte units change places inside blocks of 64 values, as
    `mla_swizzle` of mla_work.cuh says.

    Args:
        pages: [.., PAGE_SIZE, n], n a multiple of 64, of 1 or 2 bytes a value: whole pages of buffer mla_cache.
        xp: NumPy, or CuPy where `pages` is CuPy's.
    Returns: a new array.
    """
    unit = xp.arange(pages.shape[-2] * pages.shape[-1] * pages.itemsize // UNIT)
    units = xp.ascontiguousarray(pages).reshape(-1).view(np.uint8).reshape(-1, len(unit), UNIT)
    return units[:, unit ^ (unit >> 3 & 4 * pages.itemsize - 1)].reshape(-1).view(pages.dtype).reshape(pages.shape)
