"""Sizes that the CUDA kernels are built for, beside those that the model's own config must have. No device is needed to know them.

Everything inside these bounds compiles for every number of rows; tests/test_kernel_sizes.py tries their ends.
"""
from typing import Iterator

from ..config import MXFP4_GROUP, MXFP4_PER_BYTE, K3Config
from ..emit_sizes import CACHE_BLOCK
from ..packing import FOLDED, PACKED, PLAIN, leaves_and_steps
from ..weights import BY_NAME, MMA_K, tree_leaves

KDA_HEAD_DIM = 128      # a warp holds a leaf of four keys a lane (kda_state.cuh)
CONV_WIDTH = 4          # a channel's taps are one vector (kda_state.cuh)
MAX_RES_BLOCKS = 8      # a warp combines two sums of every closed block (norm_core.cuh)
MAX_TOP_K = 32          # a chosen expert is a lane (route_core.cuh)
ODD_LEAF = 65           # k-steps that a copy brings at once where a leaf has no even part (row_shape.cuh)
MAX_EXPERT_GROUPS = 16  # 32-groups of a leaf of experts: a warp holds its tokens' part of it (expert_core.cuh)


def size_misfits(cfg: K3Config, tp: int = 1) -> list[str]:
    """What of the model the kernels are not built for, as "name: found ..., wanted ..."; [] where they run it. `tp` must be legal."""
    lin, dims = cfg.linear_attn_config, cfg.dims()
    found = {"linear_attn_config.head_dim": (lin.head_dim, KDA_HEAD_DIM), "linear_attn_config.short_conv_kernel_size": (lin.short_conv_kernel_size, CONV_WIDTH)}
    bad = [f"{name}: found {value}, wanted {wanted}" for name, (value, wanted) in found.items() if value != wanted]
    if dims["num_res_blocks"] > MAX_RES_BLOCKS:
        bad.append(f"num_hidden_layers / attn_res_block_size: found {dims['num_res_blocks']} blocks, wanted at most {MAX_RES_BLOCKS}")
    if cfg.num_experts_per_token > MAX_TOP_K:
        bad.append(f"num_experts_per_token: found {cfg.num_experts_per_token}, wanted at most {MAX_TOP_K}")
    if dims["mla_cache_dim"] % CACHE_BLOCK:
        bad.append(f"kv_lora_rank + qk_rope_head_dim: found {dims['mla_cache_dim']}, wanted a multiple of {CACHE_BLOCK}")
    return bad + list(dict.fromkeys(_inputs(cfg, tp, dims)))


def _inputs(cfg: K3Config, tp: int, dims: dict[str, int]) -> Iterator[str]:
    """Of the inputs of every product."""
    for source in (name for group in PACKED.values() for p in group if p.how not in (PLAIN, FOLDED) for name in p.sources):
        w = BY_NAME[source]
        if source == "mla_kv_b_proj":   # two matrices: see packing.py
            for name in ("kv_lora_rank", "qk_nope_head_dim"):
                yield from _leaf(name, dims[name], tree_leaves(dims[name]))
        elif w.mxfp4:
            leaves, groups = leaves_and_steps(source, cfg, tp)
            if groups > MAX_EXPERT_GROUPS:
                yield (f"{_expert_size(w.shape[1])}: found {dims[w.shape[1]] * MXFP4_PER_BYTE}, whose sums fall into parts of {groups * MXFP4_GROUP}, "
                       f"wanted at most {MAX_EXPERT_GROUPS * MXFP4_GROUP} in a part")
        else:
            yield from _leaf(w.shape[1], dims[w.shape[1]], tree_leaves(dims[w.shape[1]]))


def _leaf(name: str, size: int, leaves: int) -> Iterator[str]:
    if size % MMA_K:
        yield f"{name}: found {size}, wanted a multiple of {MMA_K}"
    elif (steps := size // leaves // MMA_K) % 2 and steps > ODD_LEAF:
        yield f"{name}: found {size}, whose sums fall into parts of {size // leaves}, wanted parts of a multiple of {2 * MMA_K}, or of at most {ODD_LEAF * MMA_K}"


def _expert_size(packed: str) -> str:
    return {"latent_packed": "routed_expert_hidden_size", "moe_packed": "moe_intermediate_size"}[packed]
