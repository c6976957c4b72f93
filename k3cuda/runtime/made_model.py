"""Random tensors of any model, made where they are asked for: each follows from the seed and its own name."""
import math
from zlib import crc32

import ml_dtypes
import numpy as np

from ..config import MXFP4_GROUP, K3Config
from ..weights import Weight, checkpoint_key, stored_shapes
from .tensor_source import TensorSource
from .tokenizer import MINI_TOKENIZER_DIR, Tokenizer

# Uniform on [-1, 1] has this standard deviation; E2M1 values of random bits and random scales of 2^-1, 1, 2 have this one.
_UNIFORM_STD, _MXFP4_STD = 3**-0.5, 2.926 * 1.32
_ROW, _COLUMN = np.uint32(2654435761), np.uint32(40503 * 2 + 1)  # odd, so that neighbours never share a code


class MadeCheckpoint(TensorSource):
    """A checkpoint that is not stored anywhere: each tensor follows from `seed` and its name, whatever was made before it.

    Args:
        cfg: the model.
        seed: of all tensors.
        fill: "random", numerically alive (activations near 1, spread routing and decays), or "positions", where the bits of
            every value are a code of its tensor, expert, row and column (`position_codes`).
    """

    def __init__(self, cfg: K3Config, seed: int = 0, fill: str = "random"):
        self.cfg, self.seed, self.fill = cfg, seed, {"random": random_values, "positions": _positions}[fill]
        self.generation_config = {"temperature": 1.0, "top_p": 0.95}  # the release's advice

    def stored(self, weight: Weight, layer: int | None, expert: int | None) -> np.ndarray:
        key = checkpoint_key(weight, layer, expert)
        shape = stored_shapes(weight, self._dims)[0]
        array = self.fill(weight, self._dims, math.prod(shape), self.seed, key)
        array[math.prod(self._dims[name] for name in weight.shape):] = 0  # padding
        return array.reshape(shape)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_dir(MINI_TOKENIZER_DIR)


def random_values(weight: Weight, dims: dict[str, int], n: int, seed: int, key: str) -> np.ndarray:
    # Raw bits of PCG64 and single IEEE operations: the same bytes with every NumPy on every machine.
    bits = np.random.PCG64([seed, crc32(key.encode())]).random_raw(-(-n // 4)).astype("<u8")
    if weight.mxfp4 == "packed":
        return bits.view(np.uint8)[:n].copy()
    if weight.mxfp4 == "scale":
        return np.uint8(scale_byte(weight, dims)) + bits.view(np.uint8)[:n] % np.uint8(3)
    low, high = value_range(weight, dims)
    unit = bits.view("<u2")[:n].astype(np.float32) / np.float32(32768) - np.float32(1)
    values = unit * np.float32((high - low) / 2) + np.float32((high + low) / 2)
    return values.astype(np.float32 if weight.dtype == "F32" else ml_dtypes.bfloat16)


def value_range(weight: Weight, dims: dict[str, int]) -> tuple[float, float]:
    """Bounds of a weight's random values. Linears have standard deviation fan_in^-1/2."""
    if weight.name in _RANGES:
        return _RANGES[weight.name]
    if "norm" in weight.name:
        return 0.5, 1.5
    bound = dims[weight.shape[-1]] ** -0.5 / _UNIFORM_STD
    return -bound, bound


_RANGES = {
    "embed_tokens": (-1.75, 1.75), "markov_w1": (-1.75, 1.75),
    "kda_a_log": (-0.3, 0.3),
    "kda_dt_bias": (-6.5, 1.5),  # decays of one step from 0.01 to 0.99
    "e_score_correction_bias": (-0.1, 0.1),
}


def scale_byte(weight: Weight, dims: dict[str, int]) -> int:
    """The lowest of the three E8M0 bytes of a random scale, which gives MXFP4 weights a standard deviation near fan_in^-1/2."""
    fan_in = dims[weight.shape[-1]] * MXFP4_GROUP
    return 127 - 1 + round(math.log2(1 / (_MXFP4_STD * fan_in**0.5)))


def position_codes(key: str, rows: range, columns: int) -> np.ndarray:
    """uint32 [rows, columns]: a code of the tensor `key` (which names layer and expert), the row and the column."""
    row = np.arange(rows.start, rows.stop, dtype=np.uint32)[:, None] * _ROW
    column = np.arange(columns, dtype=np.uint32)[None, :] * _COLUMN
    code = (row + column + np.uint32(crc32(key.encode()))).astype(np.uint32)
    return code ^ (code >> np.uint32(15)) * np.uint32(0x2C1B3C6D)


def position_values(weight: Weight, key: str, rows: range, columns: int) -> np.ndarray:
    """[rows, columns]: the bits of position codes as finite values of the stored dtype; scales at most 2^0."""
    codes = position_codes(key, rows, columns)
    if weight.dtype == "U8":
        return (codes & np.uint32(0x7F if weight.mxfp4 == "scale" else 0xFF)).astype(np.uint8)
    if weight.dtype == "F32":
        return (codes & np.uint32(0x3FFFFFFF)).view(np.float32)
    return (codes & np.uint32(0x3FFF)).astype(np.uint16).view(ml_dtypes.bfloat16)


def _positions(weight: Weight, dims: dict[str, int], n: int, seed: int, key: str) -> np.ndarray:
    columns = dims[weight.shape[-1]] if len(weight.shape) > 1 else 1
    return position_values(weight, key, range(n // columns), columns).reshape(-1)
