"""Configs of made models, and a release's config.json written from a config."""
from dataclasses import asdict

from ..config import FIXED, FIXED_LINEAR, MODEL_TYPE, MXFP4_GROUP, TEXT_MODEL_TYPE, TOKEN_IDS, K3Config, LinearAttnConfig

_MINI_IDS = dict(zip(TOKEN_IDS, (326, 328, 581)))  # of the mini tokenizer

# 2.3 M parameters that divide over 16 ranks: every size has 16 pieces, w2 and the MLPs 16 chunks of K.
_BASE = {
    "vocab_size": 640, "hidden_size": 64, "num_hidden_layers": 4, "rms_norm_eps": 1e-5, "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0, "intermediate_size": 256, "first_k_dense_replace": 1, "num_attention_heads": 16, "q_lora_rank": 32,
    "kv_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "num_experts": 16, "num_experts_per_token": 4,
    "num_shared_experts": 1, "moe_intermediate_size": 512, "routed_expert_hidden_size": 64, "routed_scaling_factor": 1.0,
    "attn_res_block_size": 3, "max_position_embeddings": 8192,
}
_BASE_LINEAR = {"head_dim": 16, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0}

_QUANTIZATION = {
    "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "kv_cache_scheme": None,
    "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, "weights": {
        "num_bits": 4, "type": "float", "group_size": MXFP4_GROUP, "strategy": "group", "symmetric": True, "scale_dtype": "torch.uint8"}}},
    "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*",
               "re:.*vision_tower.*", "re:.*mm_projector.*"],
}


def made_config(**changes) -> K3Config:
    """A small config that can be cut over 1 to 16 ranks, with `changes` to keys of text_config or of its linear_attn_config.

    Where the changes leave them out, key heads and KDA's heads follow the attention's heads, and every fourth layer is MLA.

    Raises:
        ConfigError: a key is unknown, or the changes contradict each other.
    """
    linear = _BASE_LINEAR | {key: changes.pop(key) for key in list(changes) if key in LinearAttnConfig.__dataclass_fields__}
    text = _BASE | changes
    layers, heads = range(1, text["num_hidden_layers"] + 1), text["num_attention_heads"]
    text.setdefault("num_key_value_heads", heads)
    linear.setdefault("num_heads", heads)
    linear.setdefault("full_attn_layers", [i for i in layers if i % 4 == 0])
    linear.setdefault("kda_layers", [i for i in layers if i not in linear["full_attn_layers"]])
    ids = {key: text.pop(key, _MINI_IDS[key] if _MINI_IDS[key] < text["vocab_size"] else None) for key in TOKEN_IDS}
    return K3Config.from_json(_nested(text, linear, ids))


def config_json(cfg: K3Config) -> dict:
    """What a release's config.json says for `cfg`; `K3Config.from_json` gives `cfg` back."""
    text = asdict(cfg)
    linear = {key: list(value) if isinstance(value, tuple) else value for key, value in text.pop("linear_attn_config").items()}
    ids = {key: text.pop(key) for key in TOKEN_IDS}
    eos = ids["eos_token_id"]
    ids["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos) or None
    return _nested(text, linear, ids)


def _nested(text: dict, linear: dict, ids: dict) -> dict:
    return {
        "architectures": ["KimiK3ForConditionalGeneration"], "model_type": MODEL_TYPE, "dtype": "bfloat16", **ids,
        "tie_word_embeddings": FIXED["tie_word_embeddings"],
        "text_config": {
            "architectures": ["KimiLinearForCausalLM"], "model_type": TEXT_MODEL_TYPE, "dtype": "bfloat16", **FIXED, **text,
            "linear_attn_config": FIXED_LINEAR | linear, "quantization_config": _QUANTIZATION,
        },
    }
