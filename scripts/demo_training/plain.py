"""What a training step does between its matrix products, in PyTorch's own operations: what fused.py must give. Formulas: docs/model.md."""
import torch
import torch.nn.functional as F

from k3cuda.config import L2NORM_EPS

from .experts import Collect, Spread
from .kda import factors, unit_lower_inverse  # noqa: F401 - two of them


def conv_heads(y, taps, heads: int, scale: float | None):
    """y [b, t, c] through the short convolution taps [c, 4] and SiLU -> F32 [b x heads, t, d]; with `scale` each head has that length."""
    t, y = y.shape[1], y.float()
    padded = F.pad(y, (0, 0, taps.shape[1] - 1, 0))
    y = F.silu(sum(padded[:, j:j + t] * taps[:, j] for j in range(taps.shape[1])))
    y = _by_head(y, heads)
    return y if scale is None else y * torch.rsqrt(y.square().sum(-1, keepdim=True) + L2NORM_EPS) * scale


def decay_sums(f, bias, steep, chunk: int, bound: float):
    """Sums of log decays inside chunks: f [b, t, c], bias [c], steep [heads] -> F32 [b x heads, t, d]."""
    decay = bound * torch.sigmoid(steep[:, None] * (f.float() + bias).unflatten(-1, (len(steep), -1)))
    decay = _by_head(decay.flatten(2), len(steep))
    return decay.unflatten(1, (-1, chunk)).cumsum(2).flatten(1, 2)


def gated_norm(o, weight, gate, heads: int, eps: float):
    """o F32 [b x heads, t, d], each normalised, by its gate [b, t, c] -> like gate."""
    o = F.rms_norm(o.unflatten(0, (-1, heads)).transpose(1, 2), weight.shape, weight, eps)
    return (o.flatten(2) * torch.sigmoid(gate.float())).to(gate.dtype)


def situ(gate, up, b: float, c: float):
    dtype, gate, up = gate.dtype, gate.float(), up.float()
    return ((b * torch.tanh(gate / b) * torch.sigmoid(gate)) * (c * torch.tanh(up / c))).to(dtype)


def rms_norm(x, weight, eps: float):
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def mix(sources, vector, eps: float):
    """The mixture over depth of tensors of one shape [.., c], scored by `vector` [c]."""
    dtype, sources = sources[-1].dtype, torch.stack(sources).float()
    scores = (sources @ vector) * torch.rsqrt(sources.square().mean(-1) + eps)
    return (scores.softmax(0)[..., None] * sources).sum(0).to(dtype)


def spread(x, places):
    """x [n, z] -> [experts x room, z], zeros in empty places."""
    return Spread.apply(x, places.of_choice, places.row_of)


def collect(y, places, share):
    """y [experts x room, z] by share F32 [n, k] of each choice -> [n, z]."""
    return (share[..., None] * Collect.apply(y, places.of_choice, places.row_of).float()).sum(1).to(y.dtype)


def _by_head(y, heads: int):
    return y.unflatten(-1, (heads, -1)).transpose(1, 2).flatten(0, 1)
