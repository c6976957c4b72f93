"""What a release's config.json says, every key checked, and the sizes that follow from it."""
import json
import logging
from dataclasses import dataclass, fields
from pathlib import Path

from .errors import ConfigError

log = logging.getLogger("k3cuda")

MODEL_TYPE, TEXT_MODEL_TYPE = "kimi_k3", "kimi_linear"
F32_RANGE = (2.0**-126, 2.0**128 - 2.0**104)  # smallest normal number, largest number
PAGE_SIZE = 64      # tokens in one page of the MLA cache; a page divides every chunk of a split context
DECODE_ROWS = 64    # slots, and rows of a step that may want logits; a step of more rows has prompts in it
MAX_ROWS = 1024     # rows of one step
MXFP4_GROUP = 32    # weights that share one E8M0 scale, along the input axis
MXFP4_PER_BYTE = 2

RELEASED = "kimi-k3"  # the name under which the released configuration, without weights, is known to plan and bench
RELEASED_FOLDER = Path(__file__).parent / "data" / "kimi_k3"

# The release code gives these two norms its class default, not rms_norm_eps.
MLA_NORM_EPS = 1e-6
L2NORM_EPS = 1e-6   # added to the sum of squares of KDA's q and k, not to their mean

# The arithmetic we implement is the release's own. A config that asks for another is refused here, not half-obeyed.
FIXED = {
    "hidden_act": "situ", "mla_use_nope": True, "mla_use_output_gate": True, "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc", "num_expert_group": 1, "topk_group": 1, "use_grouped_topk": True, "moe_renormalize": True,
    "latent_moe_use_norm": True, "moe_layer_freq": 1, "num_nextn_predict_layers": 0, "tie_word_embeddings": False,
}
FIXED_LINEAR = {"use_full_rank_gate": True}
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_ALL_TOKEN_IDS = (*TOKEN_IDS, "media_placeholder_token_id")
# Keys that never change the text model's arithmetic. quantization_config: formats are decided by tensor names and dtypes.
_SILENT = {"architectures", "model_type", "dtype", "torch_dtype", "quantization_config", "initializer_range", "transformers_version",
           "auto_map", "use_cache", "vision_config", "text_config", "tie_word_embeddings", "_name_or_path", *_ALL_TOKEN_IDS}


@dataclass(frozen=True)
class LinearAttnConfig:
    """`linear_attn_config`: KDA. Layer lists are 1-based, as the release writes them."""

    num_heads: int
    head_dim: int
    short_conv_kernel_size: int
    gate_lower_bound: float
    full_attn_layers: tuple[int, ...]
    kda_layers: tuple[int, ...]


@dataclass(frozen=True)
class K3Config:
    """The text model of one release. Fields are the keys of `text_config`, under their own names.

    Layers are 0-based everywhere but in `linear_attn_config`.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    rms_norm_eps: float
    activation_situ_beta: float
    activation_situ_linear_beta: float
    intermediate_size: int
    first_k_dense_replace: int
    num_attention_heads: int
    num_key_value_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int
    routed_scaling_factor: float
    attn_res_block_size: int
    max_position_embeddings: int
    linear_attn_config: LinearAttnConfig
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @classmethod
    def from_json(cls, source) -> "K3Config":
        """Reads a release's nested config.

        Args:
            source: the folder of a checkpoint, the path of a config.json, or the dictionary it holds.
        Raises:
            ConfigError: file or key missing, value of the wrong kind, unknown key, or contradiction. It lists all of them.
        """
        top, where = (source, "config") if isinstance(source, dict) else (load_json(Path(source)), source)
        problems: list[str] = []
        values = _read_keys(top, problems)
        if problems:
            raise ConfigError(f"{where}: " + "; ".join(problems), "use the config.json of a Kimi K3 release unchanged")
        cfg = cls(**values)
        problems = _contradictions(cfg)
        if problems:
            raise ConfigError(f"{where}: " + "; ".join(problems))
        return cfg

    # ---- layer kinds, 0-based ----
    def is_kda(self, layer: int) -> bool:
        return layer + 1 in self.linear_attn_config.kda_layers

    def is_dense(self, layer: int) -> bool:
        return layer < self.first_k_dense_replace

    def opens_res_block(self, layer: int) -> bool:
        """True where AttnRes snapshots the prefix sum and starts it afresh."""
        return layer % self.attn_res_block_size == 0

    def dims(self) -> dict[str, int]:
        """Every size that a shape in the tables may name, by name; counts of the whole model, before any cut over ranks."""
        lin = self.linear_attn_config
        num_kda = sum(self.is_kda(i) for i in range(self.num_hidden_layers))
        shared = self.num_shared_experts * self.moe_intermediate_size
        return {f.name: getattr(self, f.name) for f in fields(self) if f.type is int} | {
            "kda_num_heads": lin.num_heads, "kda_head_dim": lin.head_dim, "kda_dim": lin.num_heads * lin.head_dim,
            "conv_width": lin.short_conv_kernel_size, "conv_history": lin.short_conv_kernel_size - 1,
            "a_log_padded": -(-lin.num_heads // 128) * 128,  # the release pads the heads of A_log with zeros
            "num_kda_layers": num_kda, "num_mla_layers": self.num_hidden_layers - num_kda,
            "mla_qk_head_dim": self.qk_nope_head_dim + self.qk_rope_head_dim,
            "mla_q_dim": self.num_attention_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim),
            "mla_kv_b_dim": self.num_attention_heads * (self.qk_nope_head_dim + self.v_head_dim),
            "mla_v_dim": self.num_attention_heads * self.v_head_dim,
            "mla_cache_dim": self.kv_lora_rank + self.qk_rope_head_dim,
            "mla_own_dim": self.kv_lora_rank + 2,  # a sum of latents, and the two numbers that say what it weighs
            "shared_intermediate_size": shared,
            "latent_packed": self.routed_expert_hidden_size // MXFP4_PER_BYTE,
            "latent_groups": self.routed_expert_hidden_size // MXFP4_GROUP,
            "moe_packed": self.moe_intermediate_size // MXFP4_PER_BYTE, "moe_groups": self.moe_intermediate_size // MXFP4_GROUP,
            "num_res_blocks": -(-self.num_hidden_layers // self.attn_res_block_size),
            "one": 1,
        }


def load_json(path: Path) -> dict:
    path = path / "config.json" if path.is_dir() else path
    try:
        top = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_each_once)
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror or e}", "give the folder of a Kimi K3 checkpoint") from e
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path}: not JSON ({e})", "download the file again") from e
    if not isinstance(top, dict):
        raise ConfigError(f"{path}: found a JSON {type(top).__name__}, wanted an object", "download the file again")
    return top


def _each_once(pairs: list) -> dict:
    level = dict(pairs)
    if len(level) < len(pairs):
        seen = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"a key given twice in one object: {twice[:60]}")
    return level


def _read_keys(top: dict, problems: list[str]) -> dict:
    text = top.get("text_config")
    for prefix, level, wanted in ("", top, MODEL_TYPE), ("text_config.", text, TEXT_MODEL_TYPE):
        if not isinstance(level, dict):
            problems.append(f"text_config: found {type(level).__name__}, wanted an object")
            return {}
        if level.get("model_type") != wanted:
            problems.append(f"{prefix}model_type: found {level.get('model_type')!r:.60}, wanted {wanted!r}")
        formats = level.get("quantization_config")
        if isinstance(formats, dict) and (scheme := formats.get("kv_cache_scheme")) is not None:
            problems.append(f"{prefix}quantization_config.kv_cache_scheme: found {scheme!r:.60}, wanted null: caches are scaled by 1")
    if top.get("tie_word_embeddings", False) is not False:
        problems.append(f"tie_word_embeddings: found {top['tie_word_embeddings']!r}, wanted False")
    linear, values = text.get("linear_attn_config"), {}
    _read_level(text, K3Config, FIXED, "text_config.", values, problems, skip={"linear_attn_config", *TOKEN_IDS})
    if isinstance(linear, dict):
        inner = {}
        _read_level(linear, LinearAttnConfig, FIXED_LINEAR, "text_config.linear_attn_config.", inner, problems)
        values["linear_attn_config"] = None if problems else LinearAttnConfig(**inner)
    else:
        problems.append(f"text_config.linear_attn_config: found {type(linear).__name__}, wanted an object")
    for key in TOKEN_IDS:
        values[key] = _token_id(key, top, text, problems)
    _refuse_unknown(top, set(), "", problems)
    return values


def _read_level(level: dict, cls, fixed: dict, prefix: str, values: dict, problems: list[str], skip=frozenset()) -> None:
    known = set(fixed) | {"linear_attn_config"}
    for key, want in fixed.items():
        if key not in level:
            problems.append(f"{prefix}{key}: missing, wanted {want!r}")
        elif level[key] != want or type(level[key]) is not type(want):
            problems.append(f"{prefix}{key}: found {level[key]!r:.60}, wanted {want!r}")
    for field in fields(cls):
        if field.name in skip:
            continue
        known.add(field.name)
        if field.name not in level:
            problems.append(f"{prefix}{field.name}: missing, wanted {_wanted(field.type)}")
            continue
        values[field.name] = checked_value(level[field.name], field.type, prefix + field.name, problems)
    _refuse_unknown(level, known, prefix, problems)


def checked_value(found, kind, name: str, problems: list[str]):
    number = isinstance(found, (int, float)) and not isinstance(found, bool)
    if kind is int:
        if isinstance(found, int) and number and 0 <= found < 2**40:
            return found
        problems.append(f"{name}: found {found!r:.60}, wanted {_wanted(kind)}")
    elif kind is float:
        if number and (found == 0 or F32_RANGE[0] <= abs(found) <= F32_RANGE[1]):  # else 0 or infinity where it is used
            return float(found)
        problems.append(f"{name}: found {found!r:.60}, wanted {_wanted(kind)}")
    elif isinstance(found, list) and all(isinstance(x, int) and not isinstance(x, bool) for x in found):
        return tuple(found)
    else:
        problems.append(f"{name}: found {found!r:.60}, wanted {_wanted(kind)}")
    return None


def _wanted(kind) -> str:
    return {int: "a non-negative integer", float: "a number that F32 holds"}.get(kind, "a list of integers")


def _token_id(key: str, top: dict, text: dict, problems: list[str]):
    """An id may stand at either level; two different answers are a contradiction."""
    found = [level[key] for level in (top, text) if level.get(key) is not None]
    if len(found) == 2 and found[0] != found[1]:
        problems.append(f"{key}: {found[0]!r} at the top, {found[1]!r} in text_config")
    value = found[0] if found else None
    ids = token_ids(value)
    if ids is None or isinstance(value, list) and key != "eos_token_id":
        problems.append(f"{key}: found {value!r:.60}, wanted a token id")
    return ids if key == "eos_token_id" else value


def token_ids(value) -> tuple[int, ...] | None:
    """The ids of a JSON value that is null, an id or a list of ids; None where it is anything else."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(ids) if all(type(i) is int and i >= 0 for i in ids) else None


def _refuse_unknown(level: dict, known: set, prefix: str, problems: list[str]) -> None:
    harmless = []
    for key in sorted(set(level) - known - _SILENT):
        # Rotary keys and every unknown switch could change the arithmetic; an unset one can't.
        if level[key] is None or level[key] is False:
            harmless.append(prefix + key)
        else:
            problems.append(f"{prefix}{key[:60]}: unknown key with value {str(level[key])[:60]!r} could change the model")
    if harmless:
        log.info("config: ignored unset keys %s", ", ".join(harmless))


def _contradictions(cfg: K3Config) -> list[str]:
    bad = []

    def want(ok: bool, text: str):
        if not ok:
            bad.append(text)

    lin, layers = cfg.linear_attn_config, range(1, cfg.num_hidden_layers + 1)
    for field in fields(cfg):
        if field.type is int and field.name != "first_k_dense_replace":
            want(getattr(cfg, field.name) > 0, f"text_config.{field.name}: found 0, wanted at least 1")
    for name in ("num_heads", "head_dim"):
        want(getattr(lin, name) > 0, f"linear_attn_config.{name}: found 0, wanted at least 1")
    want(lin.short_conv_kernel_size >= 2, f"linear_attn_config.short_conv_kernel_size: found {lin.short_conv_kernel_size}, wanted at least 2")
    want(lin.gate_lower_bound < 0, f"linear_attn_config.gate_lower_bound: found {lin.gate_lower_bound}, wanted a negative bound")
    both = sorted(lin.kda_layers + lin.full_attn_layers)
    want(len(both) == len(layers) and both == list(layers), f"linear_attn_config: kda_layers and full_attn_layers name {_short_list(both)}, wanted each of "
                               f"1..{cfg.num_hidden_layers} once")
    want(cfg.num_key_value_heads == cfg.num_attention_heads,
         f"num_key_value_heads {cfg.num_key_value_heads} differs from num_attention_heads {cfg.num_attention_heads}")
    want(lin.num_heads * lin.head_dim == cfg.num_attention_heads * cfg.v_head_dim,
         f"KDA's width {lin.num_heads} x {lin.head_dim} differs from MLA's {cfg.num_attention_heads} x {cfg.v_head_dim}: "
         "both feed an o_proj of one shape")
    want(cfg.num_experts_per_token <= cfg.num_experts,
         f"num_experts_per_token {cfg.num_experts_per_token} is more than num_experts {cfg.num_experts}")
    for name in ("moe_intermediate_size", "routed_expert_hidden_size"):
        want(getattr(cfg, name) % MXFP4_GROUP == 0, f"{name} {getattr(cfg, name)} is no multiple of the MXFP4 group of {MXFP4_GROUP}")
    want(0 < cfg.rms_norm_eps < 1, f"rms_norm_eps: found {cfg.rms_norm_eps}, wanted more than 0 and less than 1")
    for name in ("activation_situ_beta", "activation_situ_linear_beta", "routed_scaling_factor"):
        want(getattr(cfg, name) > 0, f"{name}: found {getattr(cfg, name)}, wanted more than 0")
    for key in TOKEN_IDS:
        value = getattr(cfg, key)
        for i in value if isinstance(value, tuple) else [value] if value is not None else []:
            want(i < cfg.vocab_size, f"{key} {i} is outside the vocabulary of {cfg.vocab_size}")
    return bad


def _short_list(xs) -> str:
    xs = list(xs)
    return str(xs) if len(xs) <= 12 else f"{len(xs)} layers from {xs[0]} to {xs[-1]}"
