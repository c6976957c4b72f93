"""The small model `tiny-random` and its drafts: real structure, random weights, made in memory. Its text means nothing."""
import numpy as np

from ..weights import Weight
from .made_config import made_config
from .made_model import MadeCheckpoint
from .named_models import TINY_RANDOM, TINY_RANDOM_DRAFTS

_HEAD_SCALE = 4  # logits spread so that a choice is likely to be one of the tokens kept below


class TinyRandom(MadeCheckpoint):
    """Random but for the head, which leaves tokens that are no readable text, and every special token but the ends, at logit 0."""

    path = TINY_RANDOM

    def stored(self, weight: Weight, layer: int | None, expert: int | None) -> np.ndarray:
        array = super().stored(weight, layer, expert)
        if weight.name == "lm_head":
            kept = np.zeros((len(array), 1), array.dtype)
            kept[self._readable()] = _HEAD_SCALE  # a power of two: exact in BF16
            array = array * kept
        return array

    def _readable(self) -> list[int]:
        tokenizer = self.tokenizer()
        text = [i for i in range(tokenizer.vocab_size) if (b := tokenizer.token_bytes(i)) and b.isascii() and b.decode().isprintable()]
        return text + list(self.cfg.eos_token_id)


def open_tiny_random() -> TinyRandom:
    """The model; the same bytes on every machine.

    8 layers (six KDA, two MLA; the first with a dense MLP, seven with 16 experts of which 4 are used), 4 heads of 128,
    9 million parameters, and the 582 ids of the mini tokenizer.
    """
    return TinyRandom(made_config(
        hidden_size=256, num_hidden_layers=8, num_attention_heads=4, head_dim=128, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, q_lora_rank=64, kv_lora_rank=128, intermediate_size=512, moe_intermediate_size=128, routed_expert_hidden_size=64,
        attn_res_block_size=3, num_experts=16, num_experts_per_token=4))


def open_tiny_random_draft(name: str = next(iter(TINY_RANDOM_DRAFTS))):
    """One of its drafts: two layers, the target's embedding and head. Random too, so few of its drafts are accepted."""
    from .made_draft import MadeDraft, made_draft_json

    cfg = open_tiny_random().cfg
    draft = MadeDraft(made_draft_json(cfg, TINY_RANDOM_DRAFTS[name]), cfg)
    draft.path = name
    return draft
