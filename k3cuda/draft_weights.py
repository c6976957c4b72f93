"""Every tensor of a DSpark draft, once, as weights.py has those of its target.

`where` says which drafts have a weight: its part ("once" or "layer") and the traits it asks for (`DraftConfig.traits`).
"""
from math import prod

from .draft_config import GQA, DraftConfig
from .weights import MMA_K, Cut, Weight, inner, rank_bytes, rows

LAYER_PREFIX = "layers.{layer}."
# Where the GQA family calls a tensor otherwise than the MLA family.
_GQA_KEYS = {"context_proj.weight": "fc.weight", "context_norm.weight": "hidden_norm.weight", "final_norm.weight": "norm.weight"}


def _w(name, key, shape, where, cut=None, count="", uses_rows=False):
    return Weight(name, key, tuple(shape.split()), "BF16", where, cut, count=count, uses_rows=uses_rows)


_HEADS = (("num_attention_heads", 0), ("num_key_value_heads", 0), ("mixer_dim", MMA_K))   # no key heads of their own, 0: no limit
_BY_HEADS = Cut(0, _HEADS, padded=True)

DRAFT_WEIGHTS: tuple[Weight, ...] = (
    _w("embed_tokens", "embed_tokens.weight", "vocab_size hidden_size", "once", rows("vocab_size"), uses_rows=True),
    _w("context_proj", "context_proj.weight", "hidden_size taps_dim", "once", rows("hidden_size")),
    _w("context_norm", "context_norm.weight", "hidden_size", "once"),
    _w("fc_norm", "fc_norm.{part}.weight", "target_hidden_size", "once fc_norm", count="num_taps"),
    # The key and value projections of all layers once more: the context rows of every layer come from one product.
    _w("context_kv_proj", "layers.{part}.self_attn.kv_a_proj_with_mqa.weight", "mla_cache_dim hidden_size", "once mla", rows("mla_cache_dim"),
       count="num_hidden_layers"),
    _w("context_k_proj", "layers.{part}.self_attn.k_proj.weight", "gqa_kv_dim hidden_size", "once gqa", _BY_HEADS, count="num_hidden_layers"),
    _w("context_v_proj", "layers.{part}.self_attn.v_proj.weight", "gqa_kv_dim hidden_size", "once gqa", _BY_HEADS, count="num_hidden_layers"),
    _w("final_norm", "final_norm.weight", "hidden_size", "once"),
    _w("lm_head", "lm_head.weight", "vocab_size hidden_size", "once", rows("vocab_size")),
    _w("markov_w1", "markov_head.markov_w1.weight", "vocab_size markov_rank", "once", uses_rows=True),
    _w("markov_w2", "markov_head.markov_w2.weight", "vocab_size markov_rank", "once", rows("vocab_size")),
    _w("confidence_proj", "confidence_head.proj.weight", "one confidence_dim", "once confidence"),
    _w("confidence_bias", "confidence_head.proj.bias", "one", "once confidence"),

    _w("input_layernorm", "input_layernorm.weight", "hidden_size", "layer"),
    _w("post_attention_layernorm", "post_attention_layernorm.weight", "hidden_size", "layer"),
    _w("o_proj", "self_attn.o_proj.weight", "hidden_size mixer_dim", "layer", Cut(1, _HEADS, padded=True)),

    _w("mla_q_a_proj", "self_attn.q_a_proj.weight", "q_lora_rank hidden_size", "layer mla", rows("q_lora_rank")),
    _w("mla_q_a_layernorm", "self_attn.q_a_layernorm.weight", "q_lora_rank", "layer mla"),
    _w("mla_q_b_proj", "self_attn.q_b_proj.weight", "mla_q_dim q_lora_rank", "layer mla", _BY_HEADS),
    _w("mla_kv_a_proj", "self_attn.kv_a_proj_with_mqa.weight", "mla_cache_dim hidden_size", "layer mla", rows("mla_cache_dim")),
    _w("mla_kv_a_layernorm", "self_attn.kv_a_layernorm.weight", "kv_lora_rank", "layer mla"),
    _w("mla_kv_b_proj", "self_attn.kv_b_proj.weight", "mla_kv_b_dim kv_lora_rank", "layer mla", _BY_HEADS),
    _w("mla_g_proj", "self_attn.g_proj.weight", "mla_v_dim hidden_size", "layer mla gated", _BY_HEADS),

    _w("gqa_q_proj", "self_attn.q_proj.weight", "mixer_dim hidden_size", "layer gqa", _BY_HEADS),
    _w("gqa_k_proj", "self_attn.k_proj.weight", "gqa_kv_dim hidden_size", "layer gqa", _BY_HEADS),
    _w("gqa_v_proj", "self_attn.v_proj.weight", "gqa_kv_dim hidden_size", "layer gqa", _BY_HEADS),
    _w("gqa_q_norm", "self_attn.q_norm.weight", "head_dim", "layer gqa"),
    _w("gqa_k_norm", "self_attn.k_norm.weight", "head_dim", "layer gqa"),

    _w("dense_gate_proj", "mlp.gate_proj.weight", "intermediate_size hidden_size", "layer", inner(0, "intermediate_size")),
    _w("dense_up_proj", "mlp.up_proj.weight", "intermediate_size hidden_size", "layer", inner(0, "intermediate_size")),
    _w("dense_down_proj", "mlp.down_proj.weight", "hidden_size intermediate_size", "layer", inner(1, "intermediate_size")),
)
BY_NAME = {w.name: w for w in DRAFT_WEIGHTS}


def has_traits(where: str, cfg: DraftConfig) -> bool:
    """Whether a draft has all traits that `where` names behind its part."""
    return set(where.split()[1:]) <= cfg.traits


def exists_in_draft(weight: Weight, cfg: DraftConfig, layer: int | None) -> bool:
    """Whether `layer` (None: the part outside the layers) of the draft uses this weight, its own or its target's."""
    return (weight.where.split()[0] == "once") == (layer is None) and has_traits(weight.where, cfg)


def all_draft_weights(cfg: DraftConfig):
    """Yields (layer, weight), the part outside the layers (None) first."""
    for layer in (None, *range(cfg.num_hidden_layers)):
        for w in DRAFT_WEIGHTS:
            if exists_in_draft(w, cfg, layer):
                yield layer, w


def cut_weights(cfg: DraftConfig) -> list[Weight]:
    """The weights of this draft, for `weights.check_cuts`."""
    return [w for w in DRAFT_WEIGHTS if has_traits(w.where, cfg)]


def is_shared(weight: Weight, cfg: DraftConfig) -> bool:
    """Whether the draft takes this weight from its target."""
    return weight.name == "embed_tokens" and not cfg.own_embedding or weight.name == "lm_head" and not cfg.own_head


def draft_key(weight: Weight, cfg: DraftConfig, layer: int | None = None, part: int | None = None) -> str:
    """The tensor's name in a draft's file."""
    key = weight.key.format(part=part) if weight.count else weight.key
    key = _GQA_KEYS.get(key, key) if cfg.family == GQA else key
    return key if layer is None else LAYER_PREFIX.format(layer=layer) + key


def expected_draft_tensors(cfg: DraftConfig) -> dict[str, tuple[Weight, int | None, int | None]]:
    """Tensor name -> (weight, layer, part) of everything a draft's files must hold, each name once."""
    out = {}
    for layer, w in all_draft_weights(cfg):
        for part in range(cfg.dims()[w.count]) if w.count else (None,):
            if not is_shared(w, cfg):
                out.setdefault(draft_key(w, cfg, layer, part), (w, layer, part))
    return out


def num_parameters(cfg: DraftConfig) -> int:
    """Values in a draft's files."""
    dims = cfg.dims()
    return sum(prod(dims[n] for n in w.shape) for w, _, _ in expected_draft_tensors(cfg).values())


def draft_bytes(cfg: DraftConfig, tp: int = 1, widened: bool = False) -> int:
    """Bytes of all weights that one of `tp` ranks holds for the draft, those of its target left out; `widened`: as F32."""
    dims = cfg.dims()
    return sum(rank_bytes(w, dims, tp) * (2 if widened else 1) for _, w in all_draft_weights(cfg) if not is_shared(w, cfg))
