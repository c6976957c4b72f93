"""Weights as the reference takes them, unpacked from the arrays on the device that the kernels read."""
from types import SimpleNamespace

import cupy as cp
import numpy as np

from .. import packing
from ..packing import PACKED, Packed
from ..plan import Op
from ..reference.mxfp4 import dequantize
from ..weights import BY_NAME, rank_shape
from .repack import unpack_bf16, unpack_mxfp4
from .unpack import Tiles, tiles_in


class Unpacked:
    """Of the first rank of a CudaBackend. What has been unpacked stays on the host."""

    def __init__(self, backend):
        self.cfg, self.tp, self.held = backend.cfg, backend.tp, backend.memories[0].weights
        self._done: dict = {}

    def of(self, op: Op) -> SimpleNamespace:
        """The weights that `op` declares, F32; experts are unpacked when first asked for."""
        key = op.layer, op.stage.name
        if key not in self._done:
            found = {}
            for p, array in zip(PACKED.get(op.stage.name, ()), self.held.get(key, ()), strict=True):
                found |= self._sources(p, array)
            self._done[key] = SimpleNamespace(**found)
        return self._done[key]

    def _sources(self, p: Packed, array) -> dict:
        first = p.sources[0]
        if p.how == packing.PLAIN:
            values = array.view(cp.float32).get() if BY_NAME[first].dtype == "F32" else f32(array.view(cp.uint16))
            return {first: values.reshape(rank_shape(BY_NAME[first], self.cfg.dims(), self.tp))}
        if p.how == packing.FOLDED:   # only their product is ever used
            product = array.view(cp.float32).get()
            return {first: np.ones_like(product), p.sources[1]: product}
        places = tiles_in(p, array, self.cfg, self.tp)
        if p.how in (packing.HEADS, packing.HEADS_TURNED):
            return {first: self._heads(p, places[first])}
        if p.how in (packing.EXPERTS, packing.EXPERT_PAIRS):
            return {name: Experts(*place) for name, place in places.items()}
        return {name: f32(unpack_bf16(place.tiles, place.rows)) for name, place in places.items()}

    def _heads(self, p: Packed, place: Tiles):
        """kv_b_proj with the half that this array does not hold left NaN."""
        cfg = self.cfg
        whole = np.full((len(place.tiles), cfg.qk_nope_head_dim + cfg.v_head_dim, cfg.kv_lora_rank), np.nan, np.float32)
        for to, tiles in zip(whole, place.tiles):
            matrix = f32(unpack_bf16(tiles, place.rows))
            if p.how == packing.HEADS_TURNED:
                to[:cfg.qk_nope_head_dim] = matrix.T
            else:
                to[cfg.qk_nope_head_dim:] = matrix
        return whole.reshape(-1, cfg.kv_lora_rank)


class Experts:
    """One of w1, w2, w3 of every expert: F32 [rows, columns] when indexed."""

    def __init__(self, tiles, rows: int, groups: int):
        self.tiles, self.rows, self.groups, self._done = tiles, rows, groups, {}

    def __getitem__(self, expert: int) -> np.ndarray:
        if expert not in self._done:
            packed, scale = unpack_mxfp4(self.tiles[expert], self.rows, self.groups)
            self._done[expert] = dequantize(packed.get(), scale.get())
        return self._done[expert]


def f32(bits) -> np.ndarray:
    """BF16 bits on the device as F32 on the host."""
    return (bits.astype(cp.uint32) << cp.uint32(16)).view(cp.float32).get()
