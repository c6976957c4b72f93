"""Every tensor of the text model, once: checkpoint key, our name, shape, dtype, and how it is cut over ranks.

Shapes are names from `K3Config.dims()`, rows (output features) first. A weight of the experts has one checkpoint tensor an
expert and is held as one array with the expert first.
"""
from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd, prod

from .config import MXFP4_GROUP, K3Config
from .errors import ConfigError

PREFIX = "language_model."
LAYER_PREFIX = "language_model.model.layers.{layer}."
SKIPPED_PREFIXES = ("vision_tower.", "mm_projector.")  # the picture half of the release: never opened
LEGAL_TP = (1, 2, 4, 8, 16)
TREE_LEAVES = 16    # chunks of K in every dot product, so that one tree serves every TP (docs/numerics.md)
MMA_K = 16          # a chunk is whole k-steps of mma.m16n8k16
DTYPE_BYTES = {"BF16": 2, "F32": 4, "U8": 1}


@dataclass(frozen=True)
class Cut:
    """`axis` of the (per-expert) tensor is cut into equal pieces: see `cut_parts`.

    limits: (size, leaf): no piece splits a unit of the size or, where `leaf` is not 0, a leaf of the tree over it, which is whole units of `leaf`.
    padded: ranks may outnumber the pieces. Those that have none hold zeros of the same shape, which add 0 to what all ranks sum.
    """

    axis: int
    limits: tuple[tuple[str, int], ...]
    padded: bool = False


@dataclass(frozen=True)
class Weight:
    name: str
    key: str                      # checkpoint name after PREFIX or LAYER_PREFIX
    shape: tuple[str, ...]        # as the step uses it
    dtype: str                    # as stored: BF16, F32, U8
    where: str                    # all, kda, mla, dense, moe (layers) or once
    cut: Cut | None = None        # None: every rank holds all of it
    stored: tuple[tuple[str, ...], ...] = ()  # shapes accepted in a file, the release's first; () means `shape`
    count: str = ""               # size that counts its checkpoint tensors, which are held as one array, the count first; "": it is one
    mxfp4: str = ""               # "packed" or "scale": which half of an MXFP4 pair this is
    uses_rows: bool = False       # a step reads single rows of it, not the whole: no part of the byte floor

    @property
    def per_expert(self) -> bool:
        return self.count == "num_experts"


def _bf16(name, key, shape, where, cut=None, **more):
    return Weight(name, key, tuple(shape.split()), "BF16", where, cut, **more)


def _f32(name, key, shape, where, cut=None, **more):
    return Weight(name, key, tuple(shape.split()), "F32", where, cut, **more)


def _norm(name, key, size, where):
    return _bf16(name, key, size, where)


def _score(name, key, where):
    return _bf16(name, key, "hidden_size", where, stored=(("one", "hidden_size"),))


def _conv(which):
    return _f32(f"kda_{which}_conv", f"self_attn.{which}_conv1d.weight", "kda_dim conv_width", "kda", _BY_HEADS,
                stored=(("kda_dim", "one", "conv_width"), ("kda_dim", "conv_width")))


def _expert(which, rows, packed, groups, cut):
    base = f"block_sparse_moe.experts.{{expert}}.{which}."
    return (Weight(f"expert_{which}", base + "weight_packed", (rows, packed), "U8", "moe", cut, count="num_experts", mxfp4="packed"),
            Weight(f"expert_{which}_scale", base + "weight_scale", (rows, groups), "U8", "moe", cut, count="num_experts", mxfp4="scale"))


# Both kinds of heads meet one o_proj, so all three are cut at the same places: between heads of either kind, and between leaves of the tree over o_proj's
# inputs, so that the sum over ranks is the tree's upper part.
_HEADS = (("num_attention_heads", 0), ("kda_num_heads", 0), ("kda_dim", MMA_K))
_BY_HEADS = Cut(0, _HEADS, padded=True)


def rows(size):
    """A cut of outputs that ranks gather: each has its part."""
    return Cut(0, ((size, 0),))


def inner(axis, size, leaf=MMA_K):
    """A cut of what lies between two products, the first one's outputs and the second one's inputs: whole leaves of the tree over the latter."""
    return Cut(axis, ((size, leaf),), padded=True)


WEIGHTS: tuple[Weight, ...] = (
    _bf16("embed_tokens", "model.embed_tokens.weight", "vocab_size hidden_size", "once", rows("vocab_size"), uses_rows=True),
    _norm("final_norm", "model.norm.weight", "hidden_size", "once"),
    _norm("output_attn_res_norm", "model.output_attn_res_norm.weight", "hidden_size", "once"),
    _score("output_attn_res_proj", "model.output_attn_res_proj.weight", "once"),
    _bf16("lm_head", "lm_head.weight", "vocab_size hidden_size", "once", rows("vocab_size")),

    _norm("input_layernorm", "input_layernorm.weight", "hidden_size", "all"),
    _norm("post_attention_layernorm", "post_attention_layernorm.weight", "hidden_size", "all"),
    _norm("self_attention_res_norm", "self_attention_res_norm.weight", "hidden_size", "all"),
    _score("self_attention_res_proj", "self_attention_res_proj.weight", "all"),
    _norm("mlp_res_norm", "mlp_res_norm.weight", "hidden_size", "all"),
    _score("mlp_res_proj", "mlp_res_proj.weight", "all"),
    _bf16("o_proj", "self_attn.o_proj.weight", "hidden_size kda_dim", "all", Cut(1, _HEADS, padded=True)),

    _bf16("kda_q_proj", "self_attn.q_proj.weight", "kda_dim hidden_size", "kda", _BY_HEADS),
    _bf16("kda_k_proj", "self_attn.k_proj.weight", "kda_dim hidden_size", "kda", _BY_HEADS),
    _bf16("kda_v_proj", "self_attn.v_proj.weight", "kda_dim hidden_size", "kda", _BY_HEADS),
    _bf16("kda_g_proj", "self_attn.g_proj.weight", "kda_dim hidden_size", "kda", _BY_HEADS),
    _conv("q"), _conv("k"), _conv("v"),
    _bf16("kda_f_a_proj", "self_attn.f_a_proj.weight", "kda_head_dim hidden_size", "kda", rows("kda_head_dim")),
    _bf16("kda_f_b_proj", "self_attn.f_b_proj.weight", "kda_dim kda_head_dim", "kda", _BY_HEADS),
    _bf16("kda_b_proj", "self_attn.b_proj.weight", "kda_num_heads hidden_size", "kda", _BY_HEADS),
    # One value a head, though the file is padded to 128 entries, which happens to be the head size too.
    _f32("kda_a_log", "self_attn.A_log", "kda_num_heads", "kda", _BY_HEADS, stored=(("a_log_padded",), ("kda_num_heads",))),
    _f32("kda_dt_bias", "self_attn.dt_bias", "kda_dim", "kda", _BY_HEADS),
    _f32("kda_o_norm", "self_attn.o_norm.weight", "kda_head_dim", "kda"),

    _bf16("mla_q_a_proj", "self_attn.q_a_proj.weight", "q_lora_rank hidden_size", "mla", rows("q_lora_rank")),
    _norm("mla_q_a_layernorm", "self_attn.q_a_layernorm.weight", "q_lora_rank", "mla"),
    _bf16("mla_q_b_proj", "self_attn.q_b_proj.weight", "mla_q_dim q_lora_rank", "mla", _BY_HEADS),
    _bf16("mla_kv_a_proj", "self_attn.kv_a_proj_with_mqa.weight", "mla_cache_dim hidden_size", "mla", rows("mla_cache_dim")),
    _norm("mla_kv_a_layernorm", "self_attn.kv_a_layernorm.weight", "kv_lora_rank", "mla"),
    _bf16("mla_kv_b_proj", "self_attn.kv_b_proj.weight", "mla_kv_b_dim kv_lora_rank", "mla", _BY_HEADS),
    _bf16("mla_g_proj", "self_attn.g_proj.weight", "mla_v_dim hidden_size", "mla", _BY_HEADS),

    _bf16("dense_gate_proj", "mlp.gate_proj.weight", "intermediate_size hidden_size", "dense", inner(0, "intermediate_size")),
    _bf16("dense_up_proj", "mlp.up_proj.weight", "intermediate_size hidden_size", "dense", inner(0, "intermediate_size")),
    _bf16("dense_down_proj", "mlp.down_proj.weight", "hidden_size intermediate_size", "dense", inner(1, "intermediate_size")),

    _bf16("router", "block_sparse_moe.gate.weight", "num_experts hidden_size", "moe", rows("num_experts")),
    _f32("e_score_correction_bias", "block_sparse_moe.gate.e_score_correction_bias", "num_experts", "moe"),
    _bf16("latent_down", "block_sparse_moe.routed_expert_down_proj.weight", "routed_expert_hidden_size hidden_size", "moe",
          rows("routed_expert_hidden_size")),
    _norm("routed_expert_norm", "block_sparse_moe.routed_expert_norm.weight", "routed_expert_hidden_size", "moe"),
    _bf16("latent_up", "block_sparse_moe.routed_expert_up_proj.weight", "hidden_size routed_expert_hidden_size", "moe", rows("hidden_size")),
    _bf16("shared_gate_proj", "block_sparse_moe.shared_experts.gate_proj.weight", "shared_intermediate_size hidden_size", "moe",
          inner(0, "shared_intermediate_size")),
    _bf16("shared_up_proj", "block_sparse_moe.shared_experts.up_proj.weight", "shared_intermediate_size hidden_size", "moe",
          inner(0, "shared_intermediate_size")),
    _bf16("shared_down_proj", "block_sparse_moe.shared_experts.down_proj.weight", "hidden_size shared_intermediate_size", "moe",
          inner(1, "shared_intermediate_size")),
    # A chunk of w2 is whole scale groups, and w1 and w3 are cut at the same places.
    *_expert("w1", "moe_intermediate_size", "latent_packed", "latent_groups", inner(0, "moe_intermediate_size", MXFP4_GROUP)),
    *_expert("w3", "moe_intermediate_size", "latent_packed", "latent_groups", inner(0, "moe_intermediate_size", MXFP4_GROUP)),
    *_expert("w2", "routed_expert_hidden_size", "moe_packed", "moe_groups", inner(1, "moe_intermediate_size", MXFP4_GROUP)),
)
BY_NAME = {w.name: w for w in WEIGHTS}


def tree_leaves(k: int, unit: int = MMA_K) -> int:
    """Chunks of a dot product over `k` inputs: 16, or the largest power of two that leaves whole units of `unit`."""
    leaves = TREE_LEAVES
    while leaves > 1 and k % (leaves * unit):
        leaves //= 2
    return leaves


def cut_parts(cut: Cut, dims: dict[str, int]) -> int:
    """In how many pieces the axis of a cut may fall at most; where it isn't padded a legal TP divides it."""
    return gcd(*(tree_leaves(dims[size], leaf) if leaf else dims[size] for size, leaf in cut.limits))


def num_pieces(weight: Weight, dims: dict[str, int], tp: int) -> int:
    """In how many pieces a weight falls that `tp` ranks hold: the first so many ranks have one each."""
    return 1 if weight.cut is None else gcd(cut_parts(weight.cut, dims), tp) if weight.cut.padded else tp


def rank_shape(weight: Weight, dims: dict[str, int], tp: int) -> tuple[int, ...]:
    """The shape of one rank's part of the (per-expert) tensor."""
    return tuple(dims[n] // (num_pieces(weight, dims, tp) if weight.cut and weight.cut.axis == i else 1) for i, n in enumerate(weight.shape))


def padded_dims(dims: dict[str, int], tp: int, table: Iterable[Weight] | None = None) -> dict[str, int]:
    """The same sizes, but those that cuts pad as if every rank had a piece: what one of `tp` ranks has, times `tp`. `table`: of the model; None: WEIGHTS."""
    out = dict(dims)
    for w in WEIGHTS if table is None else table:
        if w.cut and w.cut.padded:
            pieces = num_pieces(w, dims, tp)
            out |= {name: dims[name] // pieces * tp for name in (w.shape[w.cut.axis], *(size for size, _ in w.cut.limits))}
    return out


def exists_in(weight: Weight, cfg: K3Config, layer: int | None) -> bool:
    """Whether `layer` (None: the part outside the layers) has this weight."""
    if layer is None:
        return weight.where == "once"
    return {"once": False, "all": True, "kda": cfg.is_kda(layer), "mla": not cfg.is_kda(layer),
            "dense": cfg.is_dense(layer), "moe": not cfg.is_dense(layer)}[weight.where]


def layer_weights(cfg: K3Config, layer: int | None) -> list[Weight]:
    return [w for w in WEIGHTS if exists_in(w, cfg, layer)]


def all_weights(cfg: K3Config):
    """Yields (layer, weight), once for every layer that has the weight; the part outside the layers (None) comes first."""
    for layer in (None, *range(cfg.num_hidden_layers)):
        for w in layer_weights(cfg, layer):
            yield layer, w


def checkpoint_key(weight: Weight, layer: int | None = None, expert: int | None = None) -> str:
    """The tensor's name in a released checkpoint."""
    prefix = PREFIX if weight.where == "once" else LAYER_PREFIX.format(layer=layer)
    return prefix + (weight.key.format(expert=expert) if weight.per_expert else weight.key)


def stored_shapes(weight: Weight, dims: dict[str, int]) -> list[tuple[int, ...]]:
    """Shapes a file may give one checkpoint tensor, the release's own first."""
    return [tuple(dims[n] for n in names) for names in weight.stored or (weight.shape,)]


def checkpoint_keys(weight: Weight, layer: int | None, cfg: K3Config) -> list[str]:
    """The names of a weight's tensors: one, or one an expert."""
    if not weight.per_expert:
        return [checkpoint_key(weight, layer)]
    before, after = checkpoint_key(weight, layer, "*").split("*")
    return [f"{before}{expert}{after}" for expert in range(cfg.num_experts)]


def expected_tensors(cfg: K3Config):
    """Yields (checkpoint key, weight, layer, expert) for every tensor of the released text model."""
    for layer, w in all_weights(cfg):
        for expert, key in enumerate(checkpoint_keys(w, layer, cfg)):
            yield key, w, layer, expert if w.per_expert else None


def num_tensors(cfg: K3Config) -> int:
    """How many tensors `expected_tensors` yields."""
    return sum(cfg.num_experts if w.per_expert else 1 for _, w in all_weights(cfg))


def rank_bytes(weight: Weight, dims: dict[str, int], tp: int = 1, experts: int | None = None) -> int:
    """Bytes of one layer's `weight` that one of `tp` ranks holds; of `experts` experts where it has them, all by default."""
    n = prod(rank_shape(weight, dims, tp)) * DTYPE_BYTES[weight.dtype]
    if not weight.count:
        return n
    return n * (experts if weight.per_expert and experts is not None else dims[weight.count])


def model_bytes(cfg: K3Config, tp: int = 1, widened: bool = False) -> int:
    """Bytes of all weights that one of `tp` ranks holds; `widened`: as the reference does, with BF16 held as F32."""
    dims = cfg.dims()
    return sum(rank_bytes(w, dims, tp) * (2 if widened and w.dtype == "BF16" else 1) for _, w in all_weights(cfg))


def checkpoint_bytes(cfg: K3Config) -> int:
    """Bytes of all text tensors in the released layout."""
    dims = cfg.dims()
    return sum(prod(stored_shapes(w, dims)[0]) * DTYPE_BYTES[w.dtype] * (cfg.num_experts if w.per_expert else 1)
               for _, w in all_weights(cfg))


def legal_tps(cfg: K3Config) -> list[int]:
    """Every number of ranks this model can be cut into."""
    return legal_cuts(WEIGHTS, cfg.dims())


def check_tp(cfg: K3Config, tp: int) -> None:
    """Raises ConfigError if the model does not divide over `tp` ranks; the message names the sizes and the legal values."""
    check_cuts(WEIGHTS, cfg.dims(), tp)


def legal_cuts(table, dims: dict[str, int]) -> list[int]:
    """Every number of ranks that the weights of `table` can be cut into."""
    return [tp for tp in LEGAL_TP if not _uneven(table, dims, tp)]


def check_cuts(table, dims: dict[str, int], tp: int, what: str = "model") -> None:
    """Raises ConfigError if the weights of `table` do not divide over `tp` ranks."""
    fit = f"{', '.join(map(str, legal_cuts(table, dims)))} fit this {what}"
    if tp not in LEGAL_TP:
        raise ConfigError(f"tp {tp} is not one of {', '.join(map(str, LEGAL_TP))}", fit)
    if bad := _uneven(table, dims, tp):
        names = ", ".join(f"{name} (in at most {parts} pieces)" for name, parts in bad.items())
        raise ConfigError(f"{names} cannot be cut over {tp} ranks: of what ranks gather each has an equal part", fit)


def _uneven(table, dims: dict[str, int], tp: int) -> dict[str, int]:
    return {w.cut.limits[0][0]: parts for w in table if w.cut and not w.cut.padded and (parts := cut_parts(w.cut, dims)) % tp}


def outnumbered(table, dims: dict[str, int], tp: int) -> str:
    """One line about what falls into fewer pieces than `tp` ranks, or ""."""
    few = ", ".join(dict.fromkeys(f"{w.cut.limits[0][0]} (pieces: {n})" for w in table if w.cut and (n := num_pieces(w, dims, tp)) < tp))
    return few and f"of {tp} ranks not all have a piece of {few}: the others hold zeros of the same bytes, which change no result"


def rank_slice(weight: Weight, dims: dict[str, int], tp: int, rank: int) -> tuple[slice, ...]:
    """The part of the (per-expert) tensor, in its `shape`, that `rank` of `tp` holds; of a rank without a piece it lies behind the tensor's end."""
    shape = rank_shape(weight, dims, tp)
    first = rank * shape[weight.cut.axis] if weight.cut else 0
    return tuple(slice(first, first + size) if weight.cut and weight.cut.axis == i else slice(0, size) for i, size in enumerate(shape))
