"""The config.json of the Kimi K3 release, as its documentation gives it."""
MLA_LAYERS = [*range(4, 93, 4), 93]  # 1-based
LAYERS = 93


def real_config() -> dict:
    """A fresh copy of the released config.json, token ids and fixed switches included."""
    return {
        "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "bfloat16",
        "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839, "media_placeholder_token_id": 163605,
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "vocab_size": 163840, "hidden_size": 7168,
            "num_hidden_layers": LAYERS, "rms_norm_eps": 1e-5, "hidden_act": "situ", "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0, "intermediate_size": 33792, "first_k_dense_replace": 1, "moe_layer_freq": 1,
            "num_attention_heads": 96, "num_key_value_heads": 96, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True, "mla_use_output_gate": True,
            "linear_attn_config": {
                "num_heads": 96, "head_dim": 128, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0, "use_full_rank_gate": True,
                "full_attn_layers": MLA_LAYERS, "kda_layers": [i for i in range(1, LAYERS + 1) if i not in MLA_LAYERS],
            },
            "num_experts": 896, "num_experts_per_token": 16, "num_shared_experts": 2, "moe_intermediate_size": 3072,
            "routed_expert_hidden_size": 3584, "latent_moe_use_norm": True, "moe_router_activation_func": "sigmoid",
            "topk_method": "noaux_tc", "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1, "moe_renormalize": True,
            "routed_scaling_factor": 1.0, "attn_res_block_size": 12, "num_nextn_predict_layers": 0, "max_position_embeddings": 1048576,
            "initializer_range": 0.02, "tie_word_embeddings": False,
            "quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "kv_cache_scheme": None},
        },
        "vision_config": {"hidden_size": 1152},
    }
