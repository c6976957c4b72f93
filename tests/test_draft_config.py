"""What configs of drafts say, in every public layout, and how contradictions, strangers and other targets are named."""
import json
import logging

import pytest
from drafts import GOLDEN
from real_config import real_config

from k3cuda import LLM
from k3cuda.config import K3Config
from k3cuda.draft_config import DraftConfig
from k3cuda.draft_weights import cut_weights, draft_bytes, expected_draft_tensors, num_parameters
from k3cuda.errors import CheckpointError, ConfigError
from k3cuda.runtime.tiny_random import open_tiny_random
from k3cuda.runtime.draft_checkpoint import DraftCheckpoint
from k3cuda.runtime.made_config import made_config
from k3cuda.runtime.made_draft import MadeDraft, made_draft_json, write_draft
from k3cuda.runtime.write_checkpoint import write_checkpoint
from k3cuda.weights import legal_cuts

TARGET = K3Config.from_json(real_config())
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 32768, "rope_theta": 50000.0, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0}
INFERACT = {
    "architectures": ["K3DSparkModel"], "model_type": "k3_dspark", "hidden_size": 7168, "intermediate_size": 14336, "num_hidden_layers": 5,
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "mla_use_nope": False, "mla_use_output_gate": False, "vocab_size": 163840, "draft_vocab_size": 163840, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1048576, "rope_theta": 50000, "num_target_layers": 5, "target_hidden_size": 7168, "target_num_hidden_layers": 93,
    "target_layer_ids": [2, 23, 47, 71, 89], "mask_token_id": 163837, "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839,
    "markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "_torchspec_version": "0.1.0", "rope_parameters": YARN}
LIGHTSEEK = INFERACT | {"fc_norm": True, "aux_hidden_stream": "attn_res", "target_layer_ids": [7, 31, 47, 63, 87]}
BLOCK5 = INFERACT | {"num_hidden_layers": 3, "num_attention_heads": 96, "num_key_value_heads": 96, "markov_rank": 512, "num_target_layers": 3,
                     "target_layer_ids": [23, 47, 89], "block_size": 5, "is_causal": True}
NEMO = INFERACT | {"mla_use_nope": True, "mla_use_output_gate": True, "hidden_act": "situ", "activation_situ_beta": 4.0, "mask_token_id": 163605,
                   "activation_situ_linear_beta": 25.0, "rope_parameters": None, "num_attention_heads": 96, "num_key_value_heads": 96, "num_hidden_layers": 3,
                   "target_layer_ids": [90, 91, 92], "num_target_layers": 3, "block_size": 5}
RADIXARK = {
    "architectures": ["DSparkDraftModel"], "attention_bias": False, "attention_dropout": 0.0, "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
    "block_size": 7, "bos_token_id": 163584, "dflash_config": {
        "attention_mode": "gqa", "confidence_head_alpha": 1.0, "confidence_head_with_markov": True, "enable_confidence_head": True,
        "markov_head_type": "vanilla", "markov_rank": 256, "mask_token_id": 163824, "projector_type": "dspark", "target_layer_ids": [7, 23, 51, 67, 83]},
    "dtype": "bfloat16", "eos_token_id": 163586, "head_dim": 64, "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02,
    "intermediate_size": 14336, "layer_types": ["full_attention"] * 5, "max_position_embeddings": 1048576, "max_window_layers": 5, "model_type": "qwen3",
    "num_attention_heads": 64, "num_hidden_layers": 5, "num_key_value_heads": 16, "num_target_layers": 93, "pad_token_id": 163839, "rms_norm_eps": 1e-5,
    "rope_parameters": {"factor": 16.0, "original_max_position_embeddings": 65536, "rope_theta": 10000.0, "rope_type": "yarn"}, "sliding_window": None,
    "tie_word_embeddings": False, "use_cache": True, "use_sliding_window": False, "vocab_size": 163840}
REDHAT = {
    "speculators_model_type": "dspark", "architectures": ["DSparkDraftModel"], "aux_hidden_state_layer_ids": [24, 48, 72, 88, 92], "block_size": 8,
    "draft_vocab_size": 163840, "mask_token_id": 163837, "markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True, "sample_from_anchor": True, "sliding_window_non_causal": True, "speculators_config": {"algorithm": "dspark"},
    "transformer_layer_config": {
        "model_type": "qwen3", "hidden_size": 7168, "intermediate_size": 14336, "num_hidden_layers": 5, "num_attention_heads": 96, "num_key_value_heads": 16,
        "head_dim": 64, "hidden_act": "silu", "rms_norm_eps": 1e-5, "vocab_size": 163840, "max_position_embeddings": 262144, "attention_bias": False,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"], "sliding_window": 2048, "use_sliding_window": True, "rope_theta": 10000.0}}
PUBLIC = {"Inferact": INFERACT, "lightseek": LIGHTSEEK, "Block5": BLOCK5, "NeMo": NEMO, "RadixArk": RADIXARK, "RedHat": REDHAT}


def read(top, **changes):
    return DraftConfig.from_json({k: v for k, v in (top | changes).items() if v is not None or k == "sliding_window"}, TARGET)


@pytest.mark.parametrize("name, own, parameters, tensors", [
    ("Inferact", "e", 3_562_312_961, 68), ("lightseek", "e", 3_562_348_801, 73), ("Block5", "e", 2_853_574_145, 44),
    ("RadixArk", "", 2_249_289_601, 62), ("RedHat", "eh", 4_744_900_481, 64)])
def test_public_drafts_have_the_published_number_of_parameters(name, own, parameters, tensors):
    source = MadeDraft(PUBLIC[name], TARGET, own_embedding="e" in own, own_head="h" in own)
    assert num_parameters(source.cfg) == parameters and len(expected_draft_tensors(source.cfg)) == tensors
    assert legal_cuts(cut_weights(source.cfg), source.cfg.dims()) == [1, 2, 4, 8, 16]


@pytest.mark.parametrize("name, want", {
    "Inferact": ("mla", "prefix", 7, (False,) * 5, (None,) * 5, 0.130861), "lightseek": ("mla", "attn_res", 7, (False,) * 5, (None,) * 5, 0.130861),
    "Block5": ("mla", "prefix", 5, (True,) * 3, (None,) * 3, 0.130861), "NeMo": ("mla", "prefix", 5, (False,) * 3, (None,) * 3, 192 ** -0.5),
    "RadixArk": ("gqa", "attn_res", 7, (False,) * 5, (None,) * 5, 0.125),
    "RedHat": ("gqa", "prefix", 8, (False,) * 5, (2048,) * 4 + (None,), 0.125)}.items())
def test_what_public_configs_mean(name, want):
    cfg = read(PUBLIC[name])
    assert (cfg.family, cfg.tap_stream, cfg.block_size, cfg.causal, cfg.windows) == want[:5]
    assert abs(cfg.score_scale - want[5]) < 1e-6


def test_rotary_numbers_are_the_published_ones():
    mla, gqa = read(INFERACT).rope, read(RADIXARK).rope
    assert (mla.ramp_edges(), mla.interleaved, mla.magnitude) == ((15, 26), True, 1)
    assert (gqa.ramp_edges(), gqa.interleaved) == ((20, 33), False) and abs(gqa.magnitude - 1.277259) < 1e-6 and abs(mla.score_factor - 1.813260) < 1e-6
    assert mla.inverse_frequencies()[0] == 1 and mla.inverse_frequencies()[31] == pytest.approx(50000 ** (-62 / 64) / 32)


def test_ids_that_count_the_embedding_are_shifted():
    assert read(REDHAT).target_layer_ids == (23, 47, 71, 87, 91)


def test_what_was_chosen_is_logged(caplog):
    with caplog.at_level(logging.INFO, "k3cuda"), LLM("tiny-random", "tiny-random-draft", num_drafts=3):
        pass
    assert "draft model tiny-random-draft: MLA attention, taps of layers 2, 4, 7 from the prefix stream, block of 7 rows, mask id 639" in caplog.text
    assert "3 drafts a step, so 4 rows to verify, from blocks of 7 rows; probabilistic drafts, standard acceptance" in caplog.text


def test_bytes_of_one_of_sixteen_ranks():
    """Held, without what is the target's: 296 MB of cut weights, w1 whole (84 MB), and norms."""
    cfg = MadeDraft(INFERACT, TARGET).cfg
    assert f"{draft_bytes(cfg, 16) / 1e6:.0f}" == "380"


@pytest.mark.parametrize("top, changes, words", [
    (INFERACT, {"vocab_size": 163584, "draft_vocab_size": 163584, "mask_token_id": 5}, "vocab_size: the draft has 163584, the target 163840"),
    (INFERACT, {"target_hidden_size": 4096}, "target_hidden_size: the draft has 4096, the target 7168"),
    (INFERACT, {"hidden_size": 4096, "target_hidden_size": 7168}, "hidden_size: the draft has 4096, the target 7168, whose embedding"),
    (INFERACT, {"target_layer_ids": [2, 23, 47, 71, 93], "target_num_hidden_layers": None}, "layer 93 is read, the target has layers 0 to 92"),
    (INFERACT, {"target_layer_ids": [2, 23, 47, 71, 93]}, "found layer 93 of a target that has 93"),
    (INFERACT, {"target_num_hidden_layers": 95}, "the draft was trained for 95, the target has 93"),
    (RADIXARK, {"num_target_layers": 61}, "found layer 83 of a target that has 61"),
    (INFERACT, {"target_layer_ids": [23, 2, 47, 71, 89]}, r"target_layer_ids: found \[23, 2"), (INFERACT, {"num_target_layers": 4}, "num_target_layers: found 4, but target_layer_ids has 5"),
    (INFERACT, {"draft_vocab_size": 32000}, "draft_vocab_size: found 32000, vocab_size 163840"), (INFERACT, {"mask_token_id": 163840}, "mask_token_id: found 163840"),
    (INFERACT, {"model_type": "deepseek_v3"}, "found model_type 'deepseek_v3', wanted 'k3_dspark', 'qwen3'"),
    (INFERACT, {"model_type": "kimi_k3"}, "found 'kimi_k3': that is a Kimi K3 itself"), (INFERACT, {"architectures": ["Other"]}, "architectures: found"),
    (RADIXARK, {"architectures": ["KimiK3DSpark5MLADraftModel"]}, "architectures: found"),
    (INFERACT, {"markov_head_type": "gated"}, "markov_head_type: found 'gated', wanted 'vanilla'"), (INFERACT, {"markov_head_type": "rnn"}, "found 'rnn'"),
    (INFERACT, {"markov_rank": 0}, "markov_rank: found 0"), (INFERACT, {"block_size": 9}, "block_size: found 9, wanted 1 to 8"),
    (INFERACT, {"aux_hidden_stream": "input"}, "aux_hidden_stream: found 'input', wanted 'prefix' or 'attn_res'"),
    (INFERACT, {"num_key_value_heads": 8}, "num_key_value_heads: found 8, num_attention_heads 64"), (INFERACT, {"hidden_act": "gelu"}, "hidden_act: found 'gelu'"),
    (INFERACT, {"mla_use_nope": True}, "mla_use_nope: found True beside rope_parameters"), (INFERACT, {"mla_use_qk_norm": True}, "mla_use_qk_norm: unknown key with value 'True'"),
    (INFERACT, {"rope_theta": 10000}, "rope_theta: 10000.0 at the top, 50000.0 in rope_parameters"), (INFERACT, {"q_lora_rank": None}, "q_lora_rank: missing"),
    (INFERACT, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "but rope_scaling"), (INFERACT, {"rms_norm_eps": 0}, "rms_norm_eps: found 0"),
    (INFERACT, {"rope_parameters": YARN | {"rope_type": "longrope"}}, "rope_type: found 'longrope'"),
    (INFERACT, {"rope_parameters": YARN | {"truncate": False}}, "rope_parameters.truncate: unknown key"), (INFERACT, {"tie_word_embeddings": True}, "tie_word_embeddings: found True"),
    (INFERACT, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 50000.0}}, "found factor None"),
    (RADIXARK, {"mask_token_id": 163837}, "dflash_config.mask_token_id: found 163824, but mask_token_id: 163837"), (RADIXARK, {"block_size": None}, "block_size: missing"),
    (RADIXARK, {"num_key_value_heads": 48}, "num_attention_heads 64 is no multiple of num_key_value_heads 48"), (RADIXARK, {"attention_bias": True}, "attention_bias: found True"),
    (RADIXARK, {"layer_types": ["sliding_attention"] * 5}, "use_sliding_window False and sliding_window None"), (RADIXARK, {"layer_types": ["full_attention"]}, "found 1 entries"),
    (RADIXARK, {"layer_types": ["chunked"] * 5}, "layer_types: found 'chunked'"), (REDHAT, {"sample_from_anchor": None}, "sample_from_anchor: missing"),
    (REDHAT, {"speculators_model_type": "eagle3"}, "found speculators_model_type 'eagle3'"), (REDHAT, {"block_size": "8"}, "block_size: found '8'"),
])
def test_contradictions_strangers_and_other_targets(top, changes, words):
    with pytest.raises(ConfigError, match=words):
        read(top, **changes)


def test_everything_is_named_at_once():
    with pytest.raises(ConfigError, match="markov_head_type.*tie_word_embeddings.*surprise"):
        read(INFERACT, markov_head_type="rnn", tie_word_embeddings=True, surprise=3)


# Files

SMALL = made_config(num_hidden_layers=5)


@pytest.fixture
def draft(tmp_path):
    return write_draft(MadeDraft(made_draft_json(SMALL), SMALL), tmp_path / "draft")


@pytest.mark.parametrize("family, own", [("mla", True), ("gqa", False)])
def test_files_give_back_what_was_written(tmp_path, family, own):
    source = MadeDraft(made_draft_json(SMALL, family), SMALL, own_embedding=own, own_head=own)
    found = DraftCheckpoint.open(write_draft(source, tmp_path / "draft"), SMALL)
    assert found.cfg == source.cfg
    for name, where in expected_draft_tensors(source.cfg).items():
        assert (found.stored(*where) == source.stored(*where)).all(), name
    with pytest.raises(Exception, match="not an empty folder"):
        write_draft(source, tmp_path / "draft")


def edit(path, **changes):
    top = json.loads(path.read_text())
    path.write_text(json.dumps(top | changes))


@pytest.mark.parametrize("changes, words", [
    ({"num_attention_heads": 8, "num_key_value_heads": 8}, r"o_proj.weight with shape .64, 64. .the first of 6.*wanted shape .64, 128"),
    ({"num_hidden_layers": 3}, r"no 12 tensors, first layers.2"), ({"fc_norm": True}, "no 3 tensors: fc_norm.0.weight"),
    ({"mla_use_output_gate": True}, "no 2 tensors: layers.0.self_attn.g_proj.weight"), ({"enable_confidence_head": False}, "confidence_head.proj.weight of no known kind"),
    ({"vocab_size": 600, "mask_token_id": 5}, "vocab_size: the draft has 600, the target 640"), ({"model_type": "llama"}, "found model_type 'llama'")])
def test_config_and_tensors_that_do_not_match(draft, changes, words):
    edit(draft / "config.json", **changes)
    with pytest.raises(CheckpointError, match=words):
        DraftCheckpoint.open(draft, SMALL)


def test_heads_below_one_module_are_found(tmp_path):
    from safetensors.numpy import load_file, save_file

    folder = write_draft(MadeDraft(made_draft_json(SMALL), SMALL), tmp_path / "draft")
    tensors = load_file(folder / "model.safetensors")
    save_file({("logit_head." if name.startswith(("markov", "confidence")) else "") + name: x for name, x in tensors.items()}, folder / "model.safetensors")
    found = DraftCheckpoint.open(folder, SMALL)
    assert found.read("markov_w2").shape == (640, 16) and found.read("confidence_bias").shape == (1,)


def test_the_target_is_no_draft_of_its_own(tmp_path):
    folder = write_checkpoint(open_tiny_random(), tmp_path / "tiny-random")
    with pytest.raises(CheckpointError, match="that is a Kimi K3 itself"):
        DraftCheckpoint.open(folder, open_tiny_random().cfg)


def test_golden_opens_without_a_target():
    cfg = DraftCheckpoint.open(GOLDEN).cfg
    assert cfg.own_embedding and cfg.own_head and cfg.max_drafts == 7
