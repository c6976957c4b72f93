"""MXFP4: E2M1 values two to a byte, low nibble first, with one E8M0 scale for 32 values along the input axis."""
import numpy as np

from ..config import MXFP4_GROUP

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_PAIRS = np.stack([E2M1[np.arange(256) & 15], E2M1[np.arange(256) >> 4]], axis=-1)  # byte -> its two columns
E8M0_BIAS = 127


def dequantize(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """packed uint8 [.., k / 2] and scale uint8 [.., k / 32] -> float32 [.., k]; exact, also in BF16. Code 255 is NaN."""
    values = _PAIRS[packed].reshape(*scale.shape, MXFP4_GROUP)
    factor = np.ldexp(np.float32(1), scale.astype(np.int32) - E8M0_BIAS)
    factor = np.where(scale == 255, np.float32(np.nan), factor)
    return (values * factor[..., None]).reshape(*packed.shape[:-1], packed.shape[-1] * 2)


class ExpertMatrix:
    """One of w1, w2, w3 of every expert, expanded when first used. Indexing gives F32 [rows, columns]."""

    def __init__(self, packed: np.ndarray, scale: np.ndarray):
        self.packed, self.scale, self._expanded = packed, scale, {}

    def __getitem__(self, expert: int) -> np.ndarray:
        if expert not in self._expanded:
            self._expanded[expert] = dequantize(self.packed[expert], self.scale[expert])
        return self._expanded[expert]
