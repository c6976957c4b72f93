"""Slices of a unit in host memory: filled from whole rows by several threads, each byte going to the ranks that hold it."""
from math import prod

import numpy as np

from ..errors import CheckpointError
from ..weights import DTYPE_BYTES, Weight, checkpoint_key, num_pieces, rank_shape
from .load_plan import Segment, Unit
from .safetensors_file import numpy_dtype

_ALIGN = 64   # of an array in the memory of its unit


class HostSlices:
    """Arrays of one unit.

    Args:
        memory: uint8 [`slices_bytes`] that holds them, zeros before anything is put there; None: memory of their own.
    Attributes:
        arrays: weight name -> [ranks, (experts of the unit,) rows, columns ..] in the stored dtype, as `rank_slices` gives them: zeros of a rank that has no
            piece.
    """

    def __init__(self, unit: Unit, dims: dict[str, int], tp: int, ranks: range, memory: np.ndarray | None = None):
        self._first_rank, self._first_expert, at = ranks.start, unit.experts.start, 0
        self.arrays, self._bytes = {}, {}
        for w in unit.weights:
            shape, dtype = _shape(w, unit, dims, tp, ranks), numpy_dtype(w.dtype)
            nbytes = prod(shape) * dtype.itemsize
            self.arrays[w.name] = array = np.empty(shape, dtype) if memory is None else memory[at:at + nbytes].view(dtype).reshape(shape)
            bytes_of = array.view(np.uint8).reshape(len(ranks), len(unit.experts) if w.count else 1, rank_shape(w, dims, tp)[0], -1)
            with_piece = ranks_with_piece(w, dims, tp, ranks)
            self._bytes[w.name] = bytes_of[:with_piece]
            if memory is None:
                array[with_piece:] = 0
            at += -(-nbytes // _ALIGN) * _ALIGN

    def put(self, segment: Segment, view: np.ndarray) -> None:
        """Copies the rows `view`, uint8, to every rank's part of them."""
        expert = 0 if segment.expert is None else segment.expert - self._first_expert
        share_out(self._bytes[segment.weight.name][:, expert], segment, view, self._first_rank)

    def flush(self) -> None:
        """Nothing is left to do: `put` copies."""


def slices_bytes(unit: Unit, dims: dict[str, int], tp: int, ranks: range) -> int:
    """Bytes of the memory that holds all slices of a unit."""
    return sum(-(-prod(_shape(w, unit, dims, tp, ranks)) * DTYPE_BYTES[w.dtype] // _ALIGN) * _ALIGN for w in unit.weights)


def _shape(w: Weight, unit: Unit, dims: dict[str, int], tp: int, ranks: range) -> tuple[int, ...]:
    return len(ranks), *((len(unit.experts),) if w.count else ()), *rank_shape(w, dims, tp)


def ranks_with_piece(weight: Weight, dims: dict[str, int], tp: int, ranks: range) -> int:
    """How many of `ranks` of `tp` have a piece of a weight, the first ones: all of one that is not cut."""
    return len(ranks) if weight.cut is None else max(0, min(ranks.stop, num_pieces(weight, dims, tp)) - ranks.start)


def share_out(parts: np.ndarray, segment: Segment, view: np.ndarray, first_rank: int) -> None:
    """Copies whole rows of a tensor to the parts of ranks with a piece: uint8 [ranks, rows of a part, bytes of its row], the first being `first_rank`'s."""
    rows, first, cut = segment.rows, segment.first_row, segment.weight.cut
    source, (ranks, part_rows, part_bytes) = view.reshape(rows, -1), parts.shape
    if cut is None:
        parts[:, first:first + rows] = source
    elif cut.axis:
        own = source[:, first_rank * part_bytes:(first_rank + ranks) * part_bytes]
        parts[:, first:first + rows] = own.reshape(rows, ranks, part_bytes).transpose(1, 0, 2)
    else:
        rank, row = divmod(first - first_rank * part_rows, part_rows)
        if row == 0 and rows % part_rows == 0:
            parts[rank:rank + rows // part_rows] = source.reshape(-1, part_rows, part_bytes)
            return
        done = 0
        while done < rows:   # a large tensor is read in pieces, which do not end where a rank's part ends
            count = min(rows - done, part_rows - row)
            parts[rank, row:row + count] = source[done:done + count]
            rank, row, done = rank + 1, 0, done + count


def check_values(checkpoint, unit: Unit, arrays: dict[str, np.ndarray]) -> None:
    """Raises CheckpointError for damage that would never show as a logit that is not finite. `arrays` are those of `HostSlices`."""
    for w in unit.weights:
        if w.name in arrays and not w.count:
            for array in arrays[w.name]:
                if trouble := trouble_of(w, array):
                    key = checkpoint_key(w, unit.layer)
                    raise bad_values(checkpoint.shards.owner[key], key, trouble)


def bad_values(file, key: str, trouble: str) -> CheckpointError:
    return CheckpointError(f"{file.path}: found {key} with {trouble}, wanted numbers of a trained model", "download the file again")


def trouble_of(weight: Weight, array: np.ndarray) -> str:
    """What is wrong with a rank's part of one tensor, or ""."""
    if weight.dtype == "F32" and not np.isfinite(array).all():   # few and small; a router's bias only selects
        return "values that are not finite"
    # A download may set its space aside and end before the data: every shard has one of these, and token 0 would win for ever.
    if is_never_zero(weight):
        data = array.reshape(-1).view(np.uint8)
        if not (data[:4096].any() or data.any()):
            return "nothing but zeros"
    return ""


def is_never_zero(weight: Weight) -> bool:
    return weight.name.endswith(("norm", "embed_tokens", "lm_head"))
