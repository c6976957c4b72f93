"""Sizes: of the demo model and its drafts, which go with the package and so are 16 MB together, and of a toy that a CPU trains in minutes."""
from k3cuda.draft_config import GQA, MLA
from k3cuda.runtime.made_config import made_config
from k3cuda.runtime.made_draft import made_draft_json

from .vocabulary import MASK_OFFSET

_HEADS = {"head_dim": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
# Two thirds of the bytes are KDA's: five matrices of hidden size x heads x 128. Four heads are cut over four ranks, and more have zeros; sixteen
# do not fit 16 MB even at hidden size 64. 32 experts of 25,000 weights each are 3 MB as MXFP4.
_SIZES = {
    "demo": {"hidden_size": 192, "num_hidden_layers": 8, "num_attention_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64, "intermediate_size": 384,
             "moe_intermediate_size": 128, "routed_expert_hidden_size": 64, "num_experts": 32, "num_experts_per_token": 4, "attn_res_block_size": 3},
    "toy": {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "intermediate_size": 128,
            "moe_intermediate_size": 32, "routed_expert_hidden_size": 32, "num_experts": 8, "num_experts_per_token": 2, "attn_res_block_size": 2},
}
_DRAFTS = {MLA: {"num_hidden_layers": 1, "q_lora_rank": 32, "kv_lora_rank": 48},
           GQA: {"num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}}   # cut over four ranks as their target


def config(size: str, tokenizer):
    special = tokenizer.special
    return made_config(**_HEADS, **_SIZES[size], vocab_size=tokenizer.vocab_size, bos_token_id=special["[BOS]"], eos_token_id=special["<|end_of_msg|>"],
                       pad_token_id=special["[PAD]"])


def draft_json(family: str, target, tokenizer) -> dict:
    """config.json of a draft that shares its target's embedding and head; MLA reads the prefix stream, GQA the mixtures."""
    return made_draft_json(target, family, intermediate_size=256, mask_token_id=tokenizer.num_base + MASK_OFFSET, **_DRAFTS[family])
