"""A trained model as a checkpoint: tensors in the form that they are stored in, so that k3cuda's own writer puts them where they belong."""
import ml_dtypes
import numpy as np
import torch

from k3cuda.runtime.tensor_source import TensorSource
from k3cuda.weights import stored_shapes

from .quantize import packed


class Trained(TensorSource):
    """A `K3` and its tokenizer. Answers are meant to be the likeliest ones, so that is the advice of its generation_config."""

    def __init__(self, model, tokenizer):
        self.model, self.cfg, self._tokenizer, self._packed = model, model.cfg, tokenizer, {}
        self.generation_config = {"temperature": 0.0}

    def tokenizer(self):
        return self._tokenizer

    def stored(self, weight, layer, expert) -> np.ndarray:
        shape = stored_shapes(weight, self._dims)[0]
        if weight.mxfp4:
            name = weight.name.removesuffix("_scale")
            if (layer, name) not in self._packed:   # files want an expert's scales far behind its weights
                self._packed[layer, name] = packed(self.model.weight(layer, name))
            return self._packed[layer, name][weight.mxfp4 == "scale"][expert].reshape(shape)
        return as_stored(self.model.weight(layer, weight.name), weight.dtype, shape)


def as_stored(value: torch.Tensor, dtype: str, shape) -> np.ndarray:
    """float32, or BF16 rounded to nearest even; padded with zeros to `shape`."""
    flat = value.detach().float().cpu().numpy().reshape(-1)
    array = np.zeros(int(np.prod(shape)), np.float32)
    array[:len(flat)] = flat
    return array.reshape(shape).astype(np.float32 if dtype == "F32" else ml_dtypes.bfloat16)
