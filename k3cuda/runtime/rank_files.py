"""Files of a repacked model, one a rank and layer: which arrays stand in them, in which order, how large they are, what they are called.

A file is a safetensors file, so that whatever finds damage in a checkpoint finds it here. What is PLAIN stands in its stored dtype and
its rank's shape; everything else as the bytes that kernels read, U8.
"""
import itertools
from collections import defaultdict
from typing import Iterator

from ..config import K3Config
from ..packing import FOLDED, PACKED, PLAIN, Packed
from ..plan import Plan
from ..weights import BY_NAME, rank_bytes, rank_shape
from .cuda_weights import packed_bytes
from .load_plan import Unit
from .write_checkpoint import header_bytes

LAYOUT_VERSION = 2   # of the bytes in a rank file: whatever moves one of them makes a new version


def layers_of(cfg: K3Config) -> tuple:
    """What has files of its own: the part outside the layers, then each layer."""
    return (None, *range(cfg.num_hidden_layers))


def rank_file(rank: int, tp: int, layer: int | None) -> str:
    return f"rank-{rank:02d}-of-{tp:02d}.{'model' if layer is None else f'layer-{layer:03d}'}.safetensors"


def stored_arrays(plan: Plan) -> dict[int | None, tuple[Packed, ...]]:
    """Layer -> its arrays in the order of the file.

    In place of a folded product its two factors stand here, which are small: the product cannot be undone, and the reference takes both.
    """
    arrays = defaultdict(dict)
    for op in plan.ops:
        for p in PACKED.get(op.stage.name, ()):
            for q in [Packed(name, PLAIN, (name,)) for name in p.sources] if p.how == FOLDED else [p]:
                arrays[op.layer].setdefault(q.name, q)
    return {layer: tuple(arrays[layer].values()) for layer in layers_of(plan.cfg)}


def stored_entry(p: Packed, cfg: K3Config, tp: int) -> tuple[str, tuple[int, ...]]:
    """(dtype, shape) of an array in a rank's file."""
    if p.how == PLAIN:
        weight = BY_NAME[p.sources[0]]
        return weight.dtype, rank_shape(weight, cfg.dims(), tp)
    return "U8", (packed_bytes(p, cfg, tp),)


def rank_header(arrays: tuple[Packed, ...], cfg: K3Config, tp: int) -> tuple[bytes, int]:
    """What stands before the first array of a rank's file, and the bytes of the whole file."""
    header, _, size = header_bytes({p.name: stored_entry(p, cfg, tp) for p in arrays})
    return header, len(header) + size


def repack_units(layers: dict[int | None, tuple[Packed, ...]], cfg: K3Config, most: int) -> Iterator[tuple[tuple[Packed, ...], Unit]]:
    """Arrays with what is read to make them, in the order of the files: one at a time, of the experts about `most` bytes."""
    for layer, arrays in layers.items():
        for sources, group in itertools.groupby(arrays, lambda p: p.sources):   # both halves of kv_b_proj are made of one reading
            weights, group = tuple(BY_NAME[name] for name in sources), tuple(group)
            if not weights[0].count:
                yield group, Unit(layer, weights, range(0))
                continue
            weights += tuple(BY_NAME[f"{w.name}_scale"] for w in weights)
            count = max(1, most // sum(rank_bytes(w, cfg.dims(), experts=1) for w in weights))
            for first in range(0, cfg.num_experts, count):
                yield group, Unit(layer, weights, range(first, min(first + count, cfg.num_experts)))
