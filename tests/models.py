"""Models and drivers that several tests share."""
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from k3cuda.config import PAGE_SIZE
from k3cuda.packing import PACKED
from k3cuda.runtime.backend import StepRows
from k3cuda.runtime.checkpoint import Checkpoint
from k3cuda.runtime.cuda_weights import packed_array
from k3cuda.runtime.made_config import made_config
from k3cuda.runtime.numpy_backend import NumpyBackend
from k3cuda.weights import BY_NAME

HEADDIMS = Path(__file__).parent / "data" / "k3-headdims"
# Over 16 ranks its heads fall into 4 pieces, the dense MLP into 2, the shared expert into 2, the experts' inner size, of three scale groups, into one.
FEW_PIECES = made_config(num_attention_heads=4, head_dim=64, v_head_dim=64, intermediate_size=96, moe_intermediate_size=96)
PAGES_A_SLOT = 2  # 128 tokens: the goldens have 16, the rest is room for batches that cross a page


def headdims() -> Checkpoint:
    return Checkpoint.open(HEADDIMS)


def golden() -> dict[str, np.ndarray]:
    return load_file(HEADDIMS / "golden.safetensors")


def backend(checkpoint, tp=1, **options) -> NumpyBackend:
    return NumpyBackend(checkpoint, tp, **{"max_batch": 4, "max_model_len": PAGES_A_SLOT * PAGE_SIZE} | options)


def step_rows(*sequences) -> StepRows:
    """Each sequence is (slot, first position, token ids); logits of every row are wanted."""
    ids, slots, positions = [], [], []
    for slot, first, tokens in sequences:
        ids += list(tokens)
        slots += [slot] * len(tokens)
        positions += range(first, first + len(tokens))
    as_i32 = [np.array(x, np.int32) for x in (ids, slots, positions, range(len(ids)))]
    return StepRows(*as_i32)


def feed(be, slot, ids, chunks=None, observe=None, first=0) -> np.ndarray:
    """Commits `ids` in steps of the given sizes (one token each by default); logits float32 [len(ids), vocab]."""
    out, done = [], 0
    for n in chunks or [1] * len(ids):
        be.step(step_rows((slot, first + done, ids[done:done + n])), observe)
        out.append(be.logits().copy())
        be.commit(np.ones(n, bool))
        done += n
    assert done == len(ids)
    return np.concatenate(out)


def open_slot(be, slot, pages=None):
    be.open_slot(slot, pages if pages is not None else range(slot * PAGES_A_SLOT, (slot + 1) * PAGES_A_SLOT))


def relative(got, want) -> float:
    """L2 of the difference over L2 of what was wanted, in float64."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def op_arrays(op, cfg, tp: int, read, packed=PACKED, weights=BY_NAME) -> list[np.ndarray]:
    """The packed arrays of one operation on one of `tp` ranks, in the order of `OpArgs.w`; `read` as of packed_array."""
    return [packed_array(p, cfg, tp, read, weights) for p in packed.get(op.stage.name, ())]
