"""The device's repacking under g++ against NumPy's, byte for byte: every shape of leaf, padding, strides, tiles in turn."""
import ctypes

import numpy as np
import pytest
from shim import device, host

from k3cuda import packing
from k3cuda.packing import PACKED
from k3cuda.plan import build_plan
from k3cuda.runtime import repack
from k3cuda.runtime.cuda_weights import packed_array, packed_bytes
from k3cuda.runtime.made_config import made_config
from k3cuda.runtime.made_model import MadeCheckpoint
from k3cuda.runtime.repack_calls import calls_of
from k3cuda.weights import BY_NAME

pytestmark = pytest.mark.skipif(host.COMPILER is None, reason="needs g++")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return device.build(tmp_path_factory.mktemp("shim"))


def i32(*values):
    return [ctypes.c_int(v) for v in values]


def u64(*values):
    return [ctypes.c_uint64(v) for v in values]


def bf16(library, src, matrices, rows, leaves, steps, strides, dst_matrix, dst_step, out):
    host.launch(library, "repack_bf16", 3, 64, [src, out, *i32(matrices, rows, leaves, steps), *u64(*strides), *i32(dst_matrix, dst_step)], seed=1)
    return out


@pytest.mark.parametrize("rows, leaves, steps", [(16, 1, 1), (32, 16, 2), (6, 16, 28), (56, 4, 3), (33, 2, 5)])
def test_bf16(library, rows, leaves, steps):
    k = leaves * steps * 16
    w = np.random.default_rng(0).integers(0, 2**16, (rows, k), dtype=np.uint16)
    want = repack.pack_bf16(w, leaves)
    assert (bf16(library, w, 1, rows, leaves, steps, (0, k, 1), 0, 1, np.full_like(want, 7)) == want).all()


def test_tiles_in_turn(library):
    parts = [np.random.default_rng(i).integers(0, 2**16, (40, 96), dtype=np.uint16) for i in range(2)]
    packed = [repack.pack_bf16(w, 2) for w in parts]
    want = repack.join(packed, interleave=True)
    out = np.full_like(want, 7)
    for i, w in enumerate(parts):
        bf16(library, w, 1, 40, 2, 3, (0, 96, 1), 0, 2, out[i:])
    assert (out == want).all()


def test_heads_and_their_transposes(library):
    heads, keys, values, rank = 3, 32, 48, 64   # kv_b_proj: per head so many rows of keys, then of values
    kv = np.random.default_rng(2).integers(0, 2**16, (heads, keys + values, rank), dtype=np.uint16)
    want = np.stack([repack.pack_bf16(h[keys:], 4) for h in kv])
    got = bf16(library, kv.reshape(-1)[keys * rank:], heads, values, 4, 1, ((keys + values) * rank, rank, 1), want.shape[1], 1, np.full_like(want, 7))
    assert (got == want).all()
    want = np.stack([repack.pack_bf16(np.ascontiguousarray(h[:keys].T), 2) for h in kv])
    got = bf16(library, kv, heads, rank, 2, 1, ((keys + values) * rank, 1, rank), want.shape[1], 1, np.full_like(want, 7))
    assert (got == want).all()


def mxfp4(library, packed, scale, leaves, dst_step, out, worst):
    experts, rows, groups = scale.shape
    host.launch(library, "repack_mxfp4", 5, 96, [packed, scale, out, repack.NIBBLE_TABLES, worst, *i32(experts, rows, leaves, groups // leaves, repack.SCALE_SHIFT,
                                                                                                      repack.MAX_SCALE_CODE, dst_step)], seed=2)
    return out


@pytest.mark.parametrize("experts, rows, leaves, groups", [(2, 32, 2, 7), (1, 20, 1, 6), (3, 16, 4, 1), (2, 48, 16, 4)])
def test_mxfp4(library, experts, rows, leaves, groups):
    rng = np.random.default_rng(1)
    packed = rng.integers(0, 256, (experts, rows, leaves * groups * 16), dtype=np.uint8)
    scale = rng.integers(0, repack.MAX_SCALE_CODE + 1, (experts, rows, leaves * groups), dtype=np.uint8)
    scale[0, 3, 0] = 255
    want, worst = repack.pack_mxfp4(packed, scale, leaves), np.zeros(1, np.uint32)
    assert (mxfp4(library, packed, scale, leaves, 1, np.full_like(want, 7), worst) == want).all() and worst[0] == 0
    pairs = np.stack([want, want], axis=2).reshape(experts, -1, *want.shape[2:])
    out = np.full_like(pairs, 7)
    mxfp4(library, packed, scale, leaves, 2, out, worst)
    mxfp4(library, packed, scale, leaves, 2, out.reshape(-1)[want[0, 0].size:], worst)
    assert (out == pairs).all()
    scale[-1, 1, 0] = repack.MAX_SCALE_CODE + 3
    mxfp4(library, packed, scale, leaves, 1, np.empty_like(want), worst)
    assert worst[0] == repack.MAX_SCALE_CODE + 3


def run(library, call, raw, out):
    """A call as the device gets it, on host arrays: `raw` slices by name."""
    ints, to = [ctypes.c_int(n) for n in call.ints], out[call.out:]
    if call.kernel == "repack_bf16":
        source = raw[call.source].reshape(-1).view(np.uint16)[call.skip:]
        arguments = [source, to, *ints[:4], *u64(*call.longs), *ints[4:]]
    else:
        worst = np.zeros(1, np.uint32)
        arguments = [raw[call.source], raw[call.source + "_scale"], to, repack.NIBBLE_TABLES, worst, *ints]
    host.launch(library, call.kernel, 4, 64, arguments, seed=3)


@pytest.mark.parametrize("tp", [1, 2, 16])
def test_every_packed_array_of_a_model(library, tp):
    """The same calls that a GPU gets: all weights of two layers, and experts in two lots."""
    made, seen = MadeCheckpoint(made_config(), fill="positions"), set()
    cfg, rank = made.cfg, tp - 1
    for op in build_plan(cfg, tp).ops:
        for p in PACKED.get(op.stage.name, ()):
            if op.layer not in (None, 0, 3) or p.how in (packing.PLAIN, packing.FOLDED):
                continue
            want = packed_array(p, cfg, tp, lambda name: made.rank_slices(name, op.layer, tp, rank))
            out = np.full(packed_bytes(p, cfg, tp), 7, np.uint8)
            names = [n for source in p.sources for n in ((source, source + "_scale") if p.how in (packing.EXPERTS, packing.EXPERT_PAIRS) else (source,))]
            raw = {n: made.rank_slices(n, op.layer, tp, rank) for n in names}
            lots = [range(9), range(9, 16)] if BY_NAME[p.sources[0]].per_expert else [range(1)]
            for lot in lots:
                part = {n: np.ascontiguousarray(x[lot.start:lot.stop]) for n, x in raw.items()} if len(lots) > 1 else raw
                for call in calls_of(p, cfg, tp, len(lot)):
                    run(library, call, part, out[lot.start * (len(out) // cfg.num_experts) if len(lots) > 1 else 0:])
            assert out.tobytes() == want.tobytes(), (p, op.layer)
            seen.add(p.how)
    assert seen == {packing.TILES, packing.PAIRS, packing.HEADS, packing.HEADS_TURNED, packing.EXPERTS, packing.EXPERT_PAIRS}
