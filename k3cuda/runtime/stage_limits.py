"""How far a kernel's output may be from the reference's, element by element: what its format and the length of its sums explain."""
import numpy as np

from .. import packing
from ..buffers import BY_NAME
from ..config import MXFP4_GROUP
from ..weights import MMA_K

# One rounding to the format, relative to the value. Where a sum's last bits move a value over a boundary the two results are
# neighbours, and that is the same distance again; hence twice the unit.
ROUNDING = {"f32": 0.0, "bf16": 2 * 2**-8, "fp8_e4m3": 2 * 2**-4}
SMALLEST = {"f32": 0.0, "bf16": 0.0, "fp8_e4m3": 2**-9}   # distance between e4m3's subnormal values
TWICE_ROUNDED = ("mla_q_latent", "mla_cache")             # the release rounds the normed value before its weight; F32 mode does not
# Sums in another order, relative to the RMS of the row: both sides round each of K additions to 2^-24 of a partial sum, which
# grows as sqrt(K) does; tensor products drop bits instead of rounding them, exp and tanh of a GPU are good to 2^-21, and of a
# million elements some are at six deviations.
SUM = 2**-20
# The weights of attention's mean are rounded to BF16 beside a BF16 cache: each of its terms moves by up to 2^-8 of itself, and a
# term reaches four times the RMS of the mean where few positions have all the weight.
PROBABILITIES = {"mla_attend": 2**-6}


def allowed(be, op, name: str, want: np.ndarray) -> np.ndarray:
    b = BY_NAME[name]
    dtype = be.kv_cache_dtype if b.dtype == "kv" else b.dtype
    size = np.abs(np.nan_to_num(want))
    scale = np.sqrt(np.mean(size.astype(np.float64)**2, axis=-1, keepdims=True))
    roundings = ROUNDING[dtype] * (2 if name in TWICE_ROUNDED else 1)
    return roundings * size + (SUM * sum_length(be, op)**0.5 + PROBABILITIES.get(op.stage.name, 0.0)) * scale + SMALLEST[dtype] + 1e-30


def sum_length(be, op) -> int:
    """Inputs of the longest sum in a stage."""
    cfg, longest = be.cfg, 0
    for p in packing.PACKED.get(op.stage.name, ()):
        if p.how in (packing.HEADS, packing.HEADS_TURNED):
            longest = max(longest, cfg.kv_lora_rank if p.how == packing.HEADS else cfg.qk_nope_head_dim)
        elif p.how not in (packing.PLAIN, packing.FOLDED):
            leaves, steps = packing.leaves_and_steps(p.sources[-1], cfg, be.tp)
            longest = max(longest, leaves * steps * (MXFP4_GROUP if "expert" in p.how else MMA_K))
    return longest or cfg.hidden_size
