"""Kernel order of the weights: nothing is lost, padding is zero, and a packed word expands to the right values."""
import numpy as np
import pytest

from k3cuda import packing
from k3cuda.errors import CheckpointError
from k3cuda.packing import PACKED
from k3cuda.plan import build_plan
from k3cuda.reference.mxfp4 import E2M1
from k3cuda.runtime import repack
from k3cuda.runtime.cuda_weights import packed_array, packed_bytes
from k3cuda.runtime.made_config import made_config
from k3cuda.runtime.made_model import MadeCheckpoint


@pytest.mark.parametrize("rows, leaves, steps", [(16, 1, 1), (32, 16, 2), (6, 16, 28), (56, 4, 3), (33, 2, 5)])
def test_bf16_round_trip(rows, leaves, steps):
    w = np.random.default_rng(0).integers(0, 2**16, (rows, leaves * steps * 16), dtype=np.uint16)
    packed = repack.pack_bf16(w, leaves)
    assert packed.shape == (-(-rows // 16), leaves, steps, 32, 8)
    assert (repack.unpack_bf16(packed, rows) == w).all()
    assert not repack.unpack_bf16(packed, len(packed) * 16)[rows:].any()


def test_bf16_fragment_order():
    """Lane 4 g + q, register 2 (k half) + (row half): the fragment of mma.m16n8k16 under our order of k."""
    row, k = np.meshgrid(np.arange(16), np.arange(96), indexing="ij")
    packed = repack.pack_bf16((row * 256 + k).astype(np.uint16), leaves=2)   # 48 inputs a leaf: a pair of steps and one alone
    for leaf in range(2):
        for step in range(3):
            for lane in range(32):
                g, q = divmod(lane, 4)
                for i in range(8):
                    half, low_row, odd = i // 4, i // 2 % 2, i % 2
                    k = 8 * q + 4 * step + 2 * half + odd if step < 2 else 32 + 4 * q + 2 * half + odd
                    assert packed[0, leaf, step, lane, i] == (g + 8 * low_row) * 256 + leaf * 48 + k


def test_join():
    a, b = (repack.pack_bf16(np.full((32, 16), v, np.uint16), 1) for v in (1, 2))
    assert repack.join([a, b])[:, 0, 0, 0, 0].tolist() == [1, 1, 2, 2]
    assert repack.join([a, b], interleave=True)[:, 0, 0, 0, 0].tolist() == [1, 2, 1, 2]


@pytest.mark.parametrize("experts, rows, leaves, groups", [(2, 32, 2, 7), (1, 20, 1, 6), (3, 16, 4, 1)])
def test_mxfp4_round_trip(experts, rows, leaves, groups):
    rng = np.random.default_rng(1)
    packed = rng.integers(0, 256, (experts, rows, leaves * groups * 16), dtype=np.uint8)
    scale = rng.integers(0, repack.MAX_SCALE_CODE + 1, (experts, rows, leaves * groups), dtype=np.uint8)
    scale[0, 3, 0] = 255
    out = repack.pack_mxfp4(packed, scale, leaves)
    assert out.shape == (experts, -(-rows // 16), leaves, repack.leaf_bytes(groups)) and out.shape[-1] % 16 == 0
    again = repack.unpack_mxfp4(out, rows, groups)
    assert (again[0] == packed).all() and (again[1] == scale).all()


def test_mxfp4_word_expands_to_its_values():
    codes = np.random.default_rng(2).integers(0, 16, (500, 4, 2))
    for code in codes:
        word = 0
        for pair in range(4):
            for half in range(2):
                word ^= int(repack.NIBBLE_TABLES[pair, half, code[pair, half]])
        for pair, register in enumerate(repack.expand(word)):
            for half in range(2):
                value = np.uint32((register >> 16 * half & 0xFFFF) << 16).view(np.float32)
                want = E2M1[code[pair, half]]
                assert np.float64(value) * 2.0**126 == want and np.signbit(value) == np.signbit(want)


def test_nibble_tables_fill_a_word():
    """Every word is that of some codes, and of no others."""
    span = {0}
    for bit in (int(repack.NIBBLE_TABLES[p, h, 1 << b]) for p in range(4) for h in range(2) for b in range(4)):
        while bit and (same := next((s for s in span if s.bit_length() == bit.bit_length()), 0)):
            bit ^= same
        assert bit
        span.add(bit)


def test_mxfp4_scale_out_of_range():
    with pytest.raises(CheckpointError, match="scale code is 200, wanted at most 192"):
        repack.pack_mxfp4(np.zeros((16, 16), np.uint8), np.full((16, 1), 200, np.uint8), 1)


@pytest.mark.parametrize("tp", [1, 2, 16])
def test_bytes_of_packed_arrays(tp):
    """The table of sizes that devices and files are laid out by."""
    made, seen = MadeCheckpoint(made_config()), set()
    for op in build_plan(made.cfg, tp).ops:
        for p in PACKED.get(op.stage.name, ()):
            array = packed_array(p, made.cfg, tp, lambda name: made.rank_slices(name, op.layer, tp, tp - 1))
            assert array.nbytes == packed_bytes(p, made.cfg, tp), p
            seen.add(p.how)
    assert seen == {packing.TILES, packing.PAIRS, packing.HEADS, packing.HEADS_TURNED, packing.EXPERTS, packing.EXPERT_PAIRS, packing.PLAIN, packing.FOLDED}
