"""Drafts with random weights for any target, of both families. What they propose means nothing."""
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np

from ..config import K3Config
from ..draft_config import GQA, GQA_TYPE, MLA, MLA_TYPE, DraftConfig
from ..draft_weights import draft_key, expected_draft_tensors
from ..errors import UsageError
from ..weights import Weight, stored_shapes
from .checkpoint import CONFIG
from .draft_checkpoint import DraftTensors
from .made_model import random_values
from .shards import SINGLE
from .write_checkpoint import write_file, write_json

_COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "block_size": 7, "markov_rank": 16, "markov_head_type": "vanilla",
           "enable_confidence_head": True, "confidence_head_with_markov": True, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
_FAMILY = {
    MLA: {"architectures": ["K3DSparkModel"], "model_type": MLA_TYPE, "q_lora_rank": 32, "kv_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
          "v_head_dim": 16, "mla_use_nope": False, "mla_use_output_gate": False,
          "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 256, "rope_theta": 50000.0,
                              "mscale": 1.0, "mscale_all_dim": 1.0}},
    GQA: {"architectures": ["DSparkDraftModel"], "model_type": GQA_TYPE, "num_key_value_heads": 2, "head_dim": 16, "attention_bias": False,
          "rope_parameters": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256, "rope_theta": 10000.0}},
}


def made_draft_json(target: K3Config, family: str = MLA, **changes) -> dict:
    """The config.json of a small draft for `target`, as public drafts of the family have it, with `changes`; a change to None takes a key out."""
    layers = target.num_hidden_layers
    ids = changes.get("target_layer_ids") or sorted({layers // 4, layers // 2, layers - 1})
    sizes = {"hidden_size": target.hidden_size, "intermediate_size": 2 * target.hidden_size, "num_hidden_layers": 2, "num_attention_heads": 4,
             "vocab_size": target.vocab_size, "max_position_embeddings": target.max_position_embeddings, "mask_token_id": target.vocab_size - 1,
             "target_layer_ids": ids, "num_target_layers": len(ids) if family == MLA else layers}
    top = sizes | _COMMON | _FAMILY[family] | changes
    return {key: value for key, value in top.items() if value is not None}


class MadeDraft(DraftTensors):
    """A draft that is not stored anywhere: each tensor follows from `seed` and its name.

    Args:
        top: what its config.json holds. target: the model it is for.
        own_embedding, own_head: whether it has these, or takes its target's.
    """

    def __init__(self, top: dict, target: K3Config, seed: int = 0, *, own_embedding: bool = False, own_head: bool = False):
        self.top, self.seed = top, seed
        self.cfg = replace(DraftConfig.from_json(top, target), own_embedding=own_embedding, own_head=own_head)

    def stored(self, weight: Weight, layer: int | None, expert: int | None) -> np.ndarray:
        shape = stored_shapes(weight, self._dims)[0]
        return random_values(weight, self._dims, prod(shape), self.seed, draft_key(weight, self.cfg, layer, expert)).reshape(shape)


def write_draft(source: MadeDraft, path) -> Path:
    """Writes a made draft as public ones are: one model.safetensors and config.json, in a folder that is made.

    Raises UsageError: the folder is not empty.
    """
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"{path} exists and is not an empty folder", "name a folder that does not exist")
    path.mkdir(parents=True, exist_ok=True)
    dims, entries = source.cfg.dims(), {}
    for name, (weight, layer, part) in expected_draft_tensors(source.cfg).items():
        make = lambda weight=weight, layer=layer, part=part: source.stored(weight, layer, part)
        entries[name] = (weight.dtype, stored_shapes(weight, dims)[0], make)
    write_file(path / SINGLE, entries)
    write_json(path / CONFIG, source.top)
    return path
