"""MXFP4 as the release packs it: what training sees of an expert's weights is what the file will hold."""
import functools

import numpy as np
import torch

from k3cuda.config import MXFP4_GROUP
from k3cuda.reference.mxfp4 import E2M1, E8M0_BIAS

_LARGEST = float(E2M1.max())


@functools.cache
def _table(device) -> tuple[torch.Tensor, torch.Tensor]:
    """The magnitudes 0 to 6 and the edges between them; a value on an edge rounds down, in the file as in training."""
    values = torch.tensor(np.sort(E2M1[:8]).copy(), device=device)
    return values, (values[1:] + values[:-1]) / 2


def codes(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[.., k] -> magnitudes' places among the E2M1 values [.., k] and exponents of the scales [.., k / 32, 1]: the smallest power of two
    that reaches the largest of a group."""
    groups = w.unflatten(-1, (-1, MXFP4_GROUP))
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=2.0**-60)
    exponents = torch.ceil(torch.log2(largest / _LARGEST))
    places = torch.bucketize(groups.abs() * torch.exp2(-exponents), _table(w.device)[1])
    return places.flatten(-2), exponents


class Rounded(torch.autograd.Function):
    """The nearest MXFP4 weights; the gradient passes through unchanged."""

    @staticmethod
    def forward(ctx, w):
        places, exponents = codes(w)
        values = _table(w.device)[0][places].unflatten(-1, (-1, MXFP4_GROUP)) * torch.exp2(exponents)
        return torch.copysign(values.flatten(-2), w)

    @staticmethod
    def backward(ctx, grad):
        return grad


def packed(w: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """uint8 [.., k / 2], low nibble first, and uint8 scales [.., k / 32]."""
    places, exponents = codes(w.detach().float().cpu())
    nibbles = (places + 8 * torch.signbit(w.detach().cpu())).numpy().astype(np.uint8)
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4, (exponents[..., 0].numpy() + E8M0_BIAS).astype(np.uint8)
