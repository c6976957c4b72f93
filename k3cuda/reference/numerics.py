"""Arithmetic that every stage shares: row-invariant matrix products, norms, activations, and where BF16 rounding falls.

A row must give the same bytes whatever stands in the other rows. Elementwise work and sums along a row's own axis do that by
themselves; a matrix product does it only if its shape never depends on the batch, hence one matrix-vector product a row. For
the one row of a decode step it is also the fast way: a product of several rows packs the whole matrix first.
"""
import ml_dtypes
import numpy as np

F32 = np.float32
FP8_MAX = 448.0  # largest finite e4m3: values beyond it saturate, as on the GPU


def bf16(x: np.ndarray) -> np.ndarray:
    """Nearest BF16 of each value, ties to even, as F32."""
    return x.astype(ml_dtypes.bfloat16).astype(F32)


def fp8_e4m3(x: np.ndarray) -> np.ndarray:
    """Nearest e4m3 of each value, as F32."""
    return np.clip(x, -FP8_MAX, FP8_MAX).astype(ml_dtypes.float8_e4m3fn).astype(F32)


def exact(x: np.ndarray) -> np.ndarray:
    return x


CACHE_ROUNDING = {"f32": exact, "bf16": bf16, "fp8_e4m3": fp8_e4m3}


class Numerics:
    """`round` falls where docs/numerics.md says the release rounds; it is exact in F32 mode."""

    def __init__(self, activation_dtype: str = "f32", kv_cache_dtype: str = "auto"):
        self.round = {"f32": exact, "bf16": bf16}[activation_dtype]
        self.round_cache = CACHE_ROUNDING[activation_dtype if kv_cache_dtype == "auto" else kv_cache_dtype]


def linear(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """x [n, k] times w [m, k] transposed, F32 [n, m], row by row."""
    x, out = np.ascontiguousarray(x), np.empty((len(x), len(w)), F32)
    for row, target in zip(x, out):
        np.matmul(w, row, out=target)
    return out


def linear_by_head(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """x [n, h, k] times w [h, k, m], F32 [n, h, m], row by row."""
    out = np.empty((*x.shape[:2], w.shape[2]), F32)
    for row, target in zip(x, out):
        target[:] = np.matmul(row[:, None, :], w)[:, 0]
    return out


def tree_sum(parts: np.ndarray) -> np.ndarray:
    """Sum over the first axis, a power of two long, by adding neighbours: the upper part of the tree over K."""
    while len(parts) > 1:
        parts = parts[0::2] + parts[1::2]
    return parts[0]


def inverse_rms(x: np.ndarray, eps: float) -> np.ndarray:
    """1 / sqrt(mean(x^2) + eps) over the last axis, which stays as an axis of length 1."""
    return 1 / np.sqrt(np.vecdot(x, x)[..., None] / F32(x.shape[-1]) + F32(eps))


def rms_norm(x: np.ndarray, w: np.ndarray, eps: float, num: Numerics) -> np.ndarray:
    """w x / rms(x) over the last axis; the release rounds the normalised value before it multiplies."""
    return num.round(num.round(x * inverse_rms(x, eps)) * w)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))  # exp overflows to inf for x < -88, which gives the right 0


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def situ(gate: np.ndarray, up: np.ndarray, cfg) -> np.ndarray:
    """[b tanh(g/b) sigmoid(g)] [c tanh(u/c)]: the sigmoid takes the raw gate, not the squashed one."""
    b, c = F32(cfg.activation_situ_beta), F32(cfg.activation_situ_linear_beta)
    return (b * np.tanh(gate / b) * sigmoid(gate)) * (c * np.tanh(up / c))
