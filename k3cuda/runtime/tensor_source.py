"""What every kind of checkpoint offers, whether its tensors lie in files or are made up: logical arrays, and slices for a rank."""
from math import prod

import numpy as np

from ..config import K3Config
from ..weights import BY_NAME, Weight, rank_slice


class TensorSource:
    """Weights of one model by table entry.

    Subclasses set `cfg` and `path` and give `stored`. `weight` is an entry of `weights.WEIGHTS` or its name; `layer` is
    0-based, None outside the layers; `expert` is None but for weights with one tensor an expert.
    """

    cfg: K3Config
    path = None            # folder or file; None for a model made in memory
    generation_config = {}  # sampling defaults of the release

    def stored(self, weight: Weight, layer: int | None, expert: int | None) -> np.ndarray:
        """One tensor in the shape it is stored in: float32, ml_dtypes.bfloat16 or uint8."""
        raise NotImplementedError

    def tokenizer(self):
        """The tokenizer of the model, read at each call."""
        raise NotImplementedError

    def close(self) -> None:
        """Lets go of open files; arrays handed out stay valid."""

    def read(self, weight: Weight | str, layer: int | None = None, expert: int | None = None) -> np.ndarray:
        """One tensor in its logical shape, as stored (not widened); read-only and memory-mapped where it can be.

        Raises:
            KeyError: the model has no such tensor.
        """
        weight = _entry(weight)
        shape = self._shape(weight)
        array = self.stored(weight, layer, expert)
        if array.size > prod(shape):  # A_log is padded with zeros at its end
            array = array.reshape(-1)[: prod(shape)]
        return array.reshape(shape)

    def rank_slices(self, weight: Weight | str, layer: int | None, tp: int, rank: int) -> np.ndarray:
        """The part of a weight that `rank` of `tp` holds, in its logical shape; experts are stacked on axis 0.

        Only the bytes of the slice are read where rows allow it. Weights with one tensor an expert come as a new array, others
        as a read-only view.
        """
        weight = _entry(weight)
        part = rank_slice(weight, self._dims, tp, rank)
        if not weight.per_expert:
            return self.read(weight, layer)[part]
        first = self.read(weight, layer, 0)[part]
        out = np.empty((self.cfg.num_experts, *first.shape), first.dtype)
        out[0] = first
        for expert in range(1, self.cfg.num_experts):
            out[expert] = self.read(weight, layer, expert)[part]
        return out

    @property
    def _dims(self) -> dict[str, int]:
        cached = self.__dict__.get("_dims_of_cfg")
        if cached is None:
            cached = self.__dict__["_dims_of_cfg"] = self.cfg.dims()
        return cached

    def _shape(self, weight: Weight) -> tuple[int, ...]:
        return tuple(self._dims[name] for name in weight.shape)


def _entry(weight: Weight | str) -> Weight:
    return BY_NAME[weight] if isinstance(weight, str) else weight
