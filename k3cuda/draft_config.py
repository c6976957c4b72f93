"""What the config.json of a DSpark draft says, in each of the layouts that K3 drafts come in, and whether the draft fits its target."""
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

from .config import MODEL_TYPE, RELEASED_FOLDER, TEXT_MODEL_TYPE, K3Config, load_json
from .draft_keys import REQUIRED, Keys
from .draft_rope import Rope, read_rope
from .errors import ConfigError

# A public draft for the released model: what commands that need no weights call it, and its config.
RELEASED_DRAFT_NAME, RELEASED_DRAFT = "kimi-k3-dspark", RELEASED_FOLDER.parent / "kimi_k3_dspark" / "config.json"
MLA, GQA = "mla", "gqa"
MLA_TYPE, GQA_TYPE, SPECULATORS_TYPE = "k3_dspark", "qwen3", "dspark"
PREFIX, ATTN_RES = "prefix", "attn_res"  # the two tensors that public code calls the hidden state behind a layer (docs/dspark.md)
MAX_DRAFT_ROWS = 8   # of one sequence in a draft step
DEFAULT_BLOCK = 7    # of MLA drafts, whose config does not say: the width their published acceptance belongs to

# Architecture -> the stream of taps it was trained on, where the config has no aux_hidden_stream. The first was captured by vLLM at its
# defaults, the second by SGLang's hook, the third is vLLM's own name.
STREAMS = {"K3DSparkModel": PREFIX, "DSparkDraftModel": ATTN_RES, "Qwen3DSparkModel": PREFIX}
_ARCHITECTURES = {MLA: ("K3DSparkModel",), GQA: ("DSparkDraftModel", "Qwen3DSparkModel")}


@dataclass(frozen=True)
class DraftConfig:
    """One draft. Sizes have the names of its config.json; layers, its own and the target's, are 0-based.

    Attributes:
        family: MLA or GQA. Sizes of the other family are 0.
        rope: None where nothing is rotated.
        use_output_gate: attention's output is gated before o_proj (MLA only).
        hidden_act: "silu" or "situ", of the MLP's gate.
        causal: for each layer, whether a row of the block sees only those before it and itself.
        windows: for each layer, how many context positions before the anchor it sees; None: all.
        target_layer_ids: layers of the target whose output is read, ascending.
        tap_stream: PREFIX or ATTN_RES.
        fc_norm: taps are normed one by one before they are fused.
        block_size: rows it was trained with.
        first_row: of the block whose hidden state gives the first draft: 0, or 1 where the anchor's row gives none.
        confidence_head, confidence_with_markov: whether there is one, and whether it sees the Markov embedding.
        target_depth: layers of the target it was trained for; 0: not said.
        own_embedding, own_head: whether its files hold them; else they are the target's.
    """

    family: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Rope | None
    use_output_gate: bool
    hidden_act: str
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    target_layer_ids: tuple[int, ...]
    target_hidden_size: int
    tap_stream: str
    fc_norm: bool
    block_size: int
    first_row: int
    mask_token_id: int
    markov_rank: int
    confidence_head: bool
    confidence_with_markov: bool
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    activation_situ_beta: float = 0.0
    activation_situ_linear_beta: float = 0.0
    target_depth: int = 0
    own_embedding: bool = False
    own_head: bool = False

    @classmethod
    def from_json(cls, source, target: K3Config | None = None) -> "DraftConfig":
        """Reads a draft's config.

        Args:
            source: the folder of a draft, the path of a config.json, or the dictionary it holds.
            target: the model it shall draft for; None: not compared.
        Raises:
            ConfigError: file or key missing, unknown key, contradiction, or another target; it lists all of them, with both values.
        """
        top, where = (source, "draft config") if isinstance(source, dict) else (load_json(Path(source)), source)
        keys = Keys(top)
        values = _read(top, keys)
        if not keys.problems:
            cfg = cls(**values)
            keys.problems += _contradictions(cfg) or (misfits(cfg, target) if target else [])
        if keys.problems:
            raise ConfigError(f"{where}: " + "; ".join(keys.problems), "use a DSpark draft that was trained for this target, its config.json unchanged")
        return cfg

    @property
    def summary(self) -> str:
        """What was chosen where shapes cannot tell, for the log."""
        return (f"{self.family.upper()} attention, taps of layers {', '.join(map(str, self.target_layer_ids))} from the {self.tap_stream} stream, "
                f"block of {self.block_size} rows, mask id {self.mask_token_id}")

    @property
    def max_drafts(self) -> int:
        """The most tokens that one block can propose."""
        return self.block_size - self.first_row

    @cached_property
    def traits(self) -> frozenset[str]:
        """Names of what this draft has, as `where` of its tables (draft_weights.py, draft_stages.py) asks for them."""
        return frozenset((
            self.family, "fc_norm" if self.fc_norm else "raw_taps", "rope" if self.rope else "nope", self.hidden_act,
            "gated" if self.use_output_gate else "ungated",
            *(("confidence", "confidence_markov" if self.confidence_with_markov else "confidence_plain") if self.confidence_head else ())))

    @property
    def score_scale(self) -> float:
        """Factor on the scores of attention."""
        size = self.qk_nope_head_dim + self.qk_rope_head_dim if self.family == MLA else self.head_dim
        return size ** -0.5 * (self.rope.score_factor if self.rope else 1.0)

    def dims(self) -> dict[str, int]:
        """Every size that a shape in the draft's tables may name, by name, before any cut over ranks."""
        sizes = {f.name: getattr(self, f.name) for f in fields(self) if f.type is int}
        sizes |= {"num_taps": len(self.target_layer_ids), "taps_dim": len(self.target_layer_ids) * self.target_hidden_size,
                  "confidence_dim": self.hidden_size + self.markov_rank * self.confidence_with_markov, "one": 1, "two": 2}
        if self.family == MLA:
            qk = self.qk_nope_head_dim + self.qk_rope_head_dim
            sizes |= {"mla_qk_head_dim": qk, "mla_q_dim": self.num_attention_heads * qk,
                      "mla_kv_b_dim": self.num_attention_heads * (self.qk_nope_head_dim + self.v_head_dim),
                      "mla_v_dim": self.num_attention_heads * self.v_head_dim, "mla_cache_dim": self.kv_lora_rank + self.qk_rope_head_dim,
                      "mixer_dim": self.num_attention_heads * self.v_head_dim}
        else:
            sizes |= {"mixer_dim": self.num_attention_heads * self.head_dim, "gqa_kv_dim": self.num_key_value_heads * self.head_dim}
        return sizes


def misfits(draft: DraftConfig, target: K3Config) -> list[str]:
    """What keeps `draft` from drafting for `target`, each with both values."""
    bad = []
    for name, own, other in (("vocab_size", draft.vocab_size, target.vocab_size), ("target_hidden_size", draft.target_hidden_size, target.hidden_size)):
        if own != other:
            bad.append(f"{name}: the draft has {own}, the target {other}")
    if draft.hidden_size != target.hidden_size and not (draft.own_embedding and draft.own_head):
        bad.append(f"hidden_size: the draft has {draft.hidden_size}, the target {target.hidden_size}, whose embedding or head it shares")
    if draft.target_depth not in (0, target.num_hidden_layers):
        bad.append(f"layers of the target: the draft was trained for {draft.target_depth}, the target has {target.num_hidden_layers}")
    for layer in draft.target_layer_ids:
        if layer >= target.num_hidden_layers:
            bad.append(f"target_layer_ids: layer {layer} is read, the target has layers 0 to {target.num_hidden_layers - 1}")
    return bad


def _read(top: dict, keys: Keys) -> dict:
    """Fields of a DraftConfig; only complete where no problem was found."""
    kind, speculators = top.get("model_type"), top.get("speculators_model_type")
    if kind in (MODEL_TYPE, TEXT_MODEL_TYPE):
        keys.problems.append(f"model_type: found {kind!r}: that is a Kimi K3 itself; a draft is a model of its own")
        return {}
    if speculators is not None:
        kind = (top.get("transformer_layer_config") or {}).get("model_type") if speculators == SPECULATORS_TYPE else None
    family = {MLA_TYPE: MLA, GQA_TYPE: GQA}.get(kind)
    if family is None or (speculators is not None and family != GQA):
        found = f"speculators_model_type {speculators!r:.40} over model_type {kind!r:.40}" if speculators is not None else f"model_type {kind!r:.60}"
        keys.problems.append(f"found {found}, wanted {MLA_TYPE!r}, {GQA_TYPE!r}, or speculators_model_type {SPECULATORS_TYPE!r} over {GQA_TYPE!r}")
        return {}
    stream = PREFIX if speculators is not None else _stream_by_architecture(top, family, keys)
    values = {"family": family} | _sizes(keys, family) | _layers(keys, family) | _taps(keys, family, stream, speculators is not None) | _heads(keys)
    keys.fixed("tie_word_embeddings", False)
    keys.fixed("attention_bias", False)
    keys.fixed("projector_type", "dspark")
    keys.fixed("attention_mode", family)
    keys.fixed("draft_adapter_rank", 0)
    draft_vocab = keys.take("draft_vocab_size", int, values["vocab_size"])
    if draft_vocab != values["vocab_size"]:
        keys.problems.append(f"draft_vocab_size: found {draft_vocab}, vocab_size {values['vocab_size']}: reduced vocabularies are not supported")
    keys.refuse_rest()
    return values


def _stream_by_architecture(top: dict, family: str, keys: Keys) -> str | None:
    found = top.get("architectures")
    name = found[0] if isinstance(found, list) and len(found) == 1 else None
    if name in _ARCHITECTURES[family]:
        return STREAMS[name]
    keys.problems.append(f"architectures: found {found!r:.80}, wanted one of {', '.join(_ARCHITECTURES[family])}")
    return None


def _sizes(keys: Keys, family: str) -> dict:
    names = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
    names += ["q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"] if family == MLA else ["num_key_value_heads", "head_dim"]
    values = {name: keys.take(name, int) for name in (*names, "max_position_embeddings")}
    values["rms_norm_eps"] = keys.take("rms_norm_eps", float)
    if family == MLA and (found := keys.take("num_key_value_heads", int, values["num_attention_heads"])) != values["num_attention_heads"]:
        keys.problems.append(f"num_key_value_heads: found {found}, num_attention_heads {values['num_attention_heads']}: MLA has one key a head")
    return values


def _layers(keys: Keys, family: str) -> dict:
    """Attention and MLP: what is rotated, gated, causal and windowed."""
    nope, gated = family == MLA and keys.take("mla_use_nope", bool, False), family == MLA and keys.take("mla_use_output_gate", bool, False)
    act, count = keys.take("hidden_act", str, "silu"), keys.take("num_hidden_layers", int, None)
    if act not in ("silu", "situ"):
        keys.problems.append(f"hidden_act: found {act!r}, wanted 'silu' or 'situ'")
    values = {"use_output_gate": gated, "hidden_act": act}
    if act == "situ":
        values |= {name: keys.take(name, float) for name in ("activation_situ_beta", "activation_situ_linear_beta")}
    if nope and (found := keys.take("rope_parameters", dict, keys.take("rope_scaling", dict, None))):
        keys.problems.append(f"mla_use_nope: found True beside rope_parameters {str(found)[:60]}")
    if nope:
        keys.take("rope_theta", float, None)  # of the base class of training code: nothing is rotated
    keys.fixed("rope_interleave", family == MLA)
    dim = keys.take("qk_rope_head_dim" if family == MLA else "head_dim", int, None)
    return values | {"rope": None if nope else read_rope(keys, dim, family == MLA)} | _masks(keys, count or 0)


def _masks(keys: Keys, count: int) -> dict:
    kinds, window = keys.take("layer_types", list, ["full_attention"] * count) or [], keys.take("sliding_window", int, None)
    uses = keys.take("use_sliding_window", bool, None)
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        keys.problems.append(f"layer_types: found {sorted(unknown)[0]!r:.60}, wanted full_attention or sliding_attention")
    if len(kinds) != count:
        keys.problems.append(f"layer_types: found {len(kinds)} entries for num_hidden_layers {count}")
    slides = [kind == "sliding_attention" for kind in kinds]
    if any(slides) and (uses is False or not window):
        keys.problems.append(f"layer_types: found sliding_attention, but use_sliding_window {uses} and sliding_window {window}")
    whole = keys.take("is_causal", bool, None)
    inner = keys.take("causal", bool, None)
    inside = keys.take("sliding_window_non_causal", bool, False)
    causal = whole if whole is not None else inner
    return {"causal": tuple(s and not inside if causal is None else causal for s in slides), "windows": tuple(window if s else None for s in slides)}


def _taps(keys: Keys, family: str, stream: str | None, is_speculators: bool) -> dict:
    if is_speculators:  # their ids count the embedding as layer 0
        ids = tuple(i - 1 for i in keys.take("aux_hidden_state_layer_ids", tuple) or ())
        from_anchor = keys.take("sample_from_anchor", bool)
    else:
        ids, from_anchor = keys.take("target_layer_ids", tuple), keys.take("sample_from_anchor", bool, True)
    named = keys.take("aux_hidden_stream", str, stream)
    if named not in (PREFIX, ATTN_RES, None):
        keys.problems.append(f"aux_hidden_stream: found {named!r:.60}, wanted {PREFIX!r} or {ATTN_RES!r}")
    count, depth = keys.take("num_target_layers", int, None), keys.take("target_num_hidden_layers", int, None)
    if family == MLA and ids and count not in (None, len(ids)):
        keys.problems.append(f"num_target_layers: found {count}, but target_layer_ids has {len(ids)} entries")
    depth = depth if family == MLA or count is None else count
    if ids and depth is not None and max(ids) >= depth:
        keys.problems.append(f"target_layer_ids: found layer {max(ids)} of a target that has {depth}")
    block = keys.take("block_size", int, DEFAULT_BLOCK if family == MLA else REQUIRED)
    return {"target_layer_ids": ids, "target_hidden_size": keys.take("target_hidden_size", int, keys.take("hidden_size", int, None)),
            "tap_stream": named, "fc_norm": keys.take("fc_norm", bool, False), "block_size": block, "first_row": 0 if from_anchor else 1,
            "target_depth": depth or 0, "mask_token_id": keys.take("mask_token_id", int)}


def _heads(keys: Keys) -> dict:
    kind = keys.take("markov_head_type", str, "vanilla")
    if kind != "vanilla":
        keys.problems.append(f"markov_head_type: found {kind!r:.60}, wanted 'vanilla'")
    has = keys.take("enable_confidence_head", bool, False)
    return {"markov_rank": keys.take("markov_rank", int), "confidence_head": has,
            "confidence_with_markov": bool(keys.take("confidence_head_with_markov", bool, False) and has)}


def _contradictions(cfg: DraftConfig) -> list[str]:
    bad = []

    def want(ok: bool, text: str):
        if not ok:
            bad.append(text)

    other = ("num_key_value_heads", "head_dim") if cfg.family == MLA else ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    for field in fields(cfg):
        if field.type is int and field.name not in (*other, "first_row", "mask_token_id", "target_depth"):
            want(getattr(cfg, field.name) > 0, f"{field.name}: found 0, wanted at least 1")
    want(0 < cfg.rms_norm_eps < 1, f"rms_norm_eps: found {cfg.rms_norm_eps}, wanted more than 0 and less than 1")
    want(cfg.mask_token_id < cfg.vocab_size, f"mask_token_id: found {cfg.mask_token_id}, the vocabulary has {cfg.vocab_size}")
    want(cfg.first_row < cfg.block_size <= MAX_DRAFT_ROWS, f"block_size: found {cfg.block_size}, wanted {cfg.first_row + 1} to {MAX_DRAFT_ROWS}")
    ids = cfg.target_layer_ids
    want(bool(ids) and list(ids) == sorted(set(ids)) and min(ids) >= 0, f"target_layer_ids: found {list(ids)}, wanted layers from 0 up, ascending, each once")
    if cfg.family == GQA and cfg.num_key_value_heads:
        want(cfg.num_attention_heads % cfg.num_key_value_heads == 0,
             f"num_attention_heads {cfg.num_attention_heads} is no multiple of num_key_value_heads {cfg.num_key_value_heads}")
    return bad
