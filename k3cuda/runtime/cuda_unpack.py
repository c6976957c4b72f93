"""Weights as the reference takes them, unpacked from the arrays on the device that the kernels read."""
from types import SimpleNamespace

import cupy as cp
import numpy as np

from .. import packing
from ..packing import PACKED, Packed
from ..plan import Op
from ..reference.mxfp4 import dequantize
from ..weights import BY_NAME, rank_slice
from .repack import LANES, leaf_bytes, tiles_of, unpack_bf16, unpack_mxfp4


class Unpacked:
    """Of one rank of a CudaBackend. What has been unpacked stays on the host."""

    def __init__(self, backend, rank_index: int = 0):
        self.cfg, self.tp, self.held = backend.cfg, backend.tp, backend.memories[rank_index].weights
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

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(s.stop - s.start for s in rank_slice(BY_NAME[name], self.cfg.dims(), self.tp, 0))

    def _sources(self, p: Packed, array) -> dict:
        first = p.sources[0]
        if p.how == packing.PLAIN:
            values = array.view(cp.float32).get() if BY_NAME[first].dtype == "F32" else f32(array.view(cp.uint16))
            return {first: values.reshape(self.shape(first))}
        if p.how == packing.FOLDED:   # only their product is ever used
            product = array.view(cp.float32).get()
            return {first: np.ones_like(product), p.sources[1]: product}
        if p.how in (packing.HEADS, packing.HEADS_TURNED):
            return {first: self._heads(p, array)}
        leaves, steps = packing.leaves_and_steps(p.sources[-1], self.cfg, self.tp)
        if p.how in (packing.EXPERTS, packing.EXPERT_PAIRS):
            rows, n = self.shape(first)[0], len(p.sources)
            tiles = array.reshape(self.cfg.num_experts, tiles_of(rows), n, leaves, leaf_bytes(steps))
            return {name: Experts(tiles[:, :, i], rows, steps) for i, name in enumerate(p.sources)}
        return self._joined(p, array.view(cp.uint16).reshape(-1, leaves, steps, LANES, 8))

    def _joined(self, p: Packed, tiles) -> dict:
        """Matrices behind each other; of PAIRS the last two come first, tile by tile in turn."""
        found, at, names = {}, 0, list(p.sources)
        if p.how == packing.PAIRS:
            at, (*names, gate, up) = 2 * tiles_of(self.shape(names[-1])[0]), names
            found = {gate: self._matrix(gate, tiles[0:at:2]), up: self._matrix(up, tiles[1:at:2])}
        for name in names:
            n = tiles_of(self.shape(name)[0])
            found[name] = self._matrix(name, tiles[at:at + n])
            at += n
        assert at == len(tiles), (p, at, len(tiles))
        return found

    def _matrix(self, name: str, tiles):
        return f32(unpack_bf16(tiles, self.shape(name)[0]))

    def _heads(self, p: Packed, array):
        """kv_b_proj with the half that this array does not hold left NaN."""
        cfg, turned = self.cfg, p.how == packing.HEADS_TURNED
        rows, k = (cfg.kv_lora_rank, cfg.qk_nope_head_dim) if turned else (cfg.v_head_dim, cfg.kv_lora_rank)
        heads = array.view(cp.uint16).reshape(cfg.num_attention_heads // self.tp, tiles_of(rows), *packing.inputs_leaves_and_steps(k), LANES, 8)
        whole = np.full((len(heads), cfg.qk_nope_head_dim + cfg.v_head_dim, cfg.kv_lora_rank), np.nan, np.float32)
        for to, tiles in zip(whole, heads):
            matrix = f32(unpack_bf16(tiles, rows))
            if turned:
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
