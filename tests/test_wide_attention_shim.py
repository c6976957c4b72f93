"""Latent attention of a wide step under g++: its slices give every row the bytes of steps of 64 rows."""
import ml_dtypes
import numpy as np
import pytest
from shim import host

pytest.importorskip("cupy", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")   # ctypes' view of Step lies beside it

from host_step import Kernels, Memory  # noqa: E402

from k3cuda.config import DECODE_ROWS, PAGE_SIZE  # noqa: E402

pytestmark = pytest.mark.skipif(host.COMPILER is None, reason="needs g++")
WIDE, STAGES, SLOT_PAGES = 256, {"mla_attend": ()}, 10
# (slot, first position, rows): of one chunk; over three chunks and most slices; padding fills the last slice, and more.
SEQUENCES = [(2, 17, 9), (0, 460, 150), (1, 254, 20)]
SLOT = np.concatenate([np.full(n, slot) for slot, _, n in SEQUENCES])
POSITION = np.concatenate([np.arange(first, first + n) for _, first, n in SEQUENCES])
LIVE = len(SLOT)


def attended(rows, folder):
    """mla_o_latent of every row in steps of up to `rows` rows."""
    kernels, rng = Kernels(rows, 1, True, STAGES, folder), np.random.default_rng(2)
    memory = Memory(kernels.plan, kernels.source, slot_pages=SLOT_PAGES)
    memory.poison()
    memory.mla_work[:] = 0xFF
    cache = rng.standard_normal(memory.buffer("mla_cache").shape[1:]).astype(ml_dtypes.bfloat16).view(np.uint16)
    query = rng.standard_normal((LIVE, *memory.buffer("mla_q_absorbed").shape[1:])).astype(ml_dtypes.bfloat16).view(np.uint16)
    table, out = rng.permutation(cache.shape[0])[:3 * SLOT_PAGES].reshape(3, SLOT_PAGES), []
    for part in np.array_split(np.arange(LIVE), -(-LIVE // rows)):
        memory.buffer("row_slot")[:], memory.buffer("row_position")[:] = -1, 0
        memory.buffer("row_slot")[:len(part)], memory.buffer("row_position")[:len(part)] = SLOT[part], POSITION[part]
        memory.buffer("page_table")[:3] = table
        op = kernels.last("mla_attend")
        memory.buffer("mla_cache")[op.kind_index] = cache
        memory.buffer("mla_q_absorbed")[:len(part)] = query[part]
        kernels.run(op, memory)
        out.append(memory.buffer("mla_o_latent")[:len(part)].copy())
    return np.concatenate(out)


def test_slices_give_the_bytes_of_small_steps(tmp_path):
    assert LIVE > 2 * DECODE_ROWS   # a slice begins inside a sequence
    assert POSITION.max() < SLOT_PAGES * PAGE_SIZE
    got = attended(WIDE, tmp_path / "wide")
    want = attended(DECODE_ROWS, tmp_path / "narrow")
    assert np.isfinite(want.view(ml_dtypes.bfloat16).astype(np.float32)).all() and got.tobytes() == want.tobytes()
