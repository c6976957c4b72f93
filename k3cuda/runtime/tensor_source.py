"""What every kind of checkpoint offers, whether its tensors lie in files or are made up: logical arrays, and slices for a rank."""
from functools import cached_property

import numpy as np

from ..config import K3Config
from ..weights import BY_NAME, Weight, exists_in, num_pieces, rank_shape, rank_slice
from .safetensors_file import numpy_dtype


class TensorSource:
    """Weights of one model by table entry.

    Subclasses set `cfg` and `path` and give `stored`. `weight` is an entry of `weights.WEIGHTS` or its name; `layer` is
    0-based, None outside the layers; `expert` is None but for weights with one tensor an expert.
    """

    cfg: K3Config
    path = None            # folder or file; None for a model made in memory
    tp = None              # ranks that its files are for; None: any
    generation_config = {}  # sampling defaults of the release
    _table = BY_NAME

    def stored(self, weight: Weight, layer: int | None, expert: int | None) -> np.ndarray:
        """One tensor in the shape it is stored in: float32, ml_dtypes.bfloat16 or uint8."""
        raise NotImplementedError

    def stored_rows(self, weight: Weight, layer: int | None, expert: int | None, rows: slice) -> np.ndarray:
        """Some rows of `stored`; for sources that can make or read them alone."""
        return self.stored(weight, layer, expert)[rows]

    def tokenizer(self):
        """The tokenizer of the model, read at each call."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes files; the next read opens them again."""

    def read(self, weight: Weight | str, layer: int | None = None, expert: int | None = None) -> np.ndarray:
        """One tensor in its logical shape, as stored (not widened).

        Raises:
            KeyError: the model has no such tensor.
        """
        weight = self._table[weight] if isinstance(weight, str) else weight
        return self._part(weight, layer, expert, tuple(slice(0, self._dims[name]) for name in weight.shape))

    def rank_slices(self, weight: Weight | str, layer: int | None, tp: int, rank: int) -> np.ndarray:
        """The part of a weight that `rank` of `tp` holds, in its logical shape; experts are stacked on axis 0. Zeros where the rank has no piece.

        Of a weight that is cut by rows only those rows are read.
        """
        weight = self._table[weight] if isinstance(weight, str) else weight
        if not self._has(weight, layer, 0 if weight.count else None):
            raise KeyError(f"no {weight.name} at layer {layer}")
        if weight.cut and rank >= num_pieces(weight, self._dims, tp):
            count = (self._dims[weight.count],) if weight.count else ()
            return np.zeros((*count, *rank_shape(weight, self._dims, tp)), numpy_dtype(weight.dtype))
        part = rank_slice(weight, self._dims, tp, rank)
        if not weight.count:
            return self._part(weight, layer, None, part)
        first, count = self._part(weight, layer, 0, part), self._dims[weight.count]
        out = np.empty((count, *first.shape), first.dtype)
        out[0] = first
        for expert in range(1, count):
            out[expert] = self._part(weight, layer, expert, part)
        return out

    def _part(self, weight: Weight, layer: int | None, expert: int | None, part: tuple[slice, ...]) -> np.ndarray:
        if not self._has(weight, layer, expert):
            raise KeyError(f"no {weight.name} at layer {layer}, expert {expert}")
        # Stored shapes differ from logical ones by axes of size 1; of A_log, which is padded, this takes the rows that are heads.
        if weight.cut and weight.cut.axis == 0:
            array, part = self.stored_rows(weight, layer, expert, part[0]), (slice(None), *part[1:])
            shape = len(array), *(self._dims[name] for name in weight.shape[1:])
        else:
            array = self.stored(weight, layer, expert)
            shape = tuple(self._dims[name] for name in weight.shape)
        return np.ascontiguousarray(array.reshape(shape)[part])

    def _has(self, weight: Weight, layer: int | None, expert: int | None) -> bool:
        experts = range(self._dims[weight.count]) if weight.count else (None,)
        return (layer is None or layer in range(self.cfg.num_hidden_layers)) and self._exists(weight, layer) and expert in experts

    def _exists(self, weight: Weight, layer: int | None) -> bool:
        return exists_in(weight, self.cfg, layer)

    @cached_property
    def _dims(self) -> dict[str, int]:
        return self.cfg.dims()
