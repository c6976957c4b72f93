"""Every key of config.json is checked, and everything that is wrong is said at once."""
import json
import logging

import pytest

from k3cuda.config import FIXED, FIXED_LINEAR, RELEASED_FOLDER, K3Config
from k3cuda.errors import ConfigError
from k3cuda.runtime.made_config import config_json, made_config
from real_config import MLA_LAYERS, real_config

NUMBERS = [key for key, value in real_config()["text_config"].items() if type(value) in (int, float) and key not in FIXED]
NUMBERS = [key for key in NUMBERS if key != "initializer_range"]
LINEAR = list(real_config()["text_config"]["linear_attn_config"])


def problem_of(change) -> str:
    """What `from_json` says of the released config after `change` has edited it."""
    config = real_config()
    change(config)
    with pytest.raises(ConfigError) as caught:
        K3Config.from_json(config)
    assert caught.value.code == 3
    return str(caught.value)


def text_key(key, value):
    return lambda config: config["text_config"].__setitem__(key, value)


def linear_key(key, value):
    return lambda config: config["text_config"]["linear_attn_config"].__setitem__(key, value)


def test_the_release():
    cfg = K3Config.from_json(real_config())
    assert cfg == K3Config.from_json(RELEASED_FOLDER)
    assert (cfg.num_hidden_layers, cfg.hidden_size) == (93, 7168)
    assert (cfg.eos_token_id, cfg.bos_token_id, cfg.pad_token_id) == ((163586,), 163584, 163839)
    assert [i + 1 for i in range(93) if not cfg.is_kda(i)] == MLA_LAYERS
    assert [i for i in range(93) if cfg.is_dense(i)] == [0]
    assert [i for i in range(93) if cfg.opens_res_block(i)] == [0, 12, 24, 36, 48, 60, 72, 84]
    dims = cfg.dims()
    assert dims["mla_cache_dim"] == 576 and dims["num_res_blocks"] == 8 and dims["kda_dim"] == 12288 and dims["a_log_padded"] == 128
    assert dims["num_kda_layers"] == 69 and dims["num_mla_layers"] == 24


def test_reads_a_folder_or_a_file_or_a_dictionary(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(real_config()))
    cfg = K3Config.from_json(real_config())
    assert K3Config.from_json(tmp_path) == K3Config.from_json(tmp_path / "config.json") == cfg


@pytest.mark.parametrize("cfg", [K3Config.from_json(real_config()), made_config(), made_config(num_hidden_layers=3, vocab_size=100)])
def test_written_and_read_again(cfg):
    assert K3Config.from_json(json.loads(json.dumps(config_json(cfg)))) == cfg


@pytest.mark.parametrize("key", [*NUMBERS, *FIXED])
def test_missing_key(key):
    assert f"text_config.{key}: missing" in problem_of(lambda config: config["text_config"].pop(key))


@pytest.mark.parametrize("key", LINEAR)
def test_missing_key_of_linear_attn_config(key):
    assert f"linear_attn_config.{key}: missing" in problem_of(lambda config: config["text_config"]["linear_attn_config"].pop(key))


@pytest.mark.parametrize("value", ["7", None, True, -1, float("nan"), [1]], ids=str)
@pytest.mark.parametrize("key", NUMBERS)
def test_value_of_the_wrong_kind(key, value):
    assert f"{key}: found {value!r}, wanted" in problem_of(text_key(key, value)) or value == -1


@pytest.mark.parametrize("key", FIXED)
def test_arithmetic_that_we_do_not_implement(key):
    value = not FIXED[key] if isinstance(FIXED[key], bool) else "other" if isinstance(FIXED[key], str) else FIXED[key] + 1
    assert f"text_config.{key}: found {value!r}, wanted {FIXED[key]!r}" in problem_of(text_key(key, value))
    if isinstance(FIXED[key], int) and FIXED[key] in (0, 1):  # 1 is no true, 0 no false
        other = bool(FIXED[key]) if type(FIXED[key]) is int else int(FIXED[key])
        assert f"text_config.{key}: found {other!r}" in problem_of(text_key(key, other))


def test_low_rank_gate():
    assert FIXED_LINEAR == {"use_full_rank_gate": True}
    assert "use_full_rank_gate: found False, wanted True" in problem_of(linear_key("use_full_rank_gate", False))


@pytest.mark.parametrize("change, words", [
    (lambda c: c.__setitem__("model_type", "kimi_k2"), "model_type: found 'kimi_k2', wanted 'kimi_k3'"),
    (lambda c: c.pop("model_type"), "model_type: found None"),
    (lambda c: c.pop("text_config"), "text_config"),
    (lambda c: c.__setitem__("text_config", []), "text_config"),
    (text_key("model_type", "llama"), "text_config.model_type: found 'llama', wanted 'kimi_linear'"),
    (lambda c: c["text_config"].pop("linear_attn_config"), "linear_attn_config: found NoneType"),
    (lambda c: c.__setitem__("tie_word_embeddings", True), "tie_word_embeddings: found True"),
    (text_key("rope_theta", 10000.0), "text_config.rope_theta: unknown key with value '10000.0'"),
    (lambda c: c.__setitem__("sliding_window", 4096), "sliding_window: unknown key"),
    (linear_key("allow_neg_eigval", True), "linear_attn_config.allow_neg_eigval: unknown key"),
    (text_key("eos_token_id", 1), "eos_token_id: 163586 at the top, 1 in text_config"),
    (lambda c: c.__setitem__("eos_token_id", "end"), "eos_token_id: found 'end', wanted a token id"),
    (lambda c: c.__setitem__("bos_token_id", 163840), "bos_token_id 163840 is outside the vocabulary of 163840"),
    (text_key("num_key_value_heads", 8), "num_key_value_heads 8 differs from num_attention_heads 96"),
    (text_key("v_head_dim", 64), "both feed an o_proj of one shape"),
    (text_key("num_experts_per_token", 897), "num_experts_per_token 897 is more than num_experts 896"),
    (text_key("moe_intermediate_size", 3080), "moe_intermediate_size 3080 is no multiple of the MXFP4 group of 32"),
    (text_key("routed_expert_hidden_size", 3600), "routed_expert_hidden_size 3600 is no multiple"),
    (text_key("hidden_size", 0), "text_config.hidden_size: found 0"),
    (text_key("rms_norm_eps", 0), "rms_norm_eps: found 0"),
    (text_key("rms_norm_eps", 1e30), "rms_norm_eps: found 1e+30, wanted more than 0 and less than 1"),  # it would drown every logit
    *((text_key(key, value), f"{key}: found {value!r}, wanted a number that F32 holds")
      for key in ("rms_norm_eps", "activation_situ_beta", "activation_situ_linear_beta", "routed_scaling_factor")
      for value in (1e300, 1e-300, float("inf"), 10**40)),
    (linear_key("gate_lower_bound", -1e300), "gate_lower_bound: found -1e+300, wanted a number that F32 holds"),
    (lambda c: c.__setitem__("bos_token_id", [1, 2]), "bos_token_id: found [1, 2], wanted a token id"),
    (lambda c: c.__setitem__("pad_token_id", [1]), "pad_token_id: found [1], wanted a token id"),
    (lambda c: c.__setitem__("eos_token_id", [[1]]), "eos_token_id: found [[1]], wanted a token id"),
    (text_key("activation_situ_beta", 0.0), "activation_situ_beta: found 0"),
    (linear_key("gate_lower_bound", 5.0), "gate_lower_bound: found 5.0, wanted a negative bound"),
    (linear_key("short_conv_kernel_size", 1), "short_conv_kernel_size: found 1, wanted at least 2"),
    (linear_key("full_attn_layers", MLA_LAYERS[:-1]), "wanted each of 1..93 once"),
    (linear_key("full_attn_layers", [*MLA_LAYERS, 1]), "wanted each of 1..93 once"),
    (linear_key("full_attn_layers", [*MLA_LAYERS[:-1], 94]), "wanted each of 1..93 once"),
    (linear_key("kda_layers", "all"), "kda_layers: found 'all', wanted a list of integers"),
    (linear_key("kda_layers", [True]), "kda_layers: found [True]"),
    (lambda c: c["text_config"]["quantization_config"].__setitem__("kv_cache_scheme", {"num_bits": 8, "type": "float"}),
     "text_config.quantization_config.kv_cache_scheme: found {'num_bits': 8, 'type': 'float'}, wanted null: caches are scaled by 1"),
    (lambda c: c.__setitem__("quantization_config", {"kv_cache_scheme": {}}), "quantization_config.kv_cache_scheme: found {}, wanted null"),
])
def test_contradictions_and_unknown_keys(change, words):
    assert words in problem_of(change)


def test_everything_at_once():
    def change(config):
        config["model_type"] = "other"
        del config["text_config"]["hidden_size"]
        config["text_config"]["q_lora_rank"] = "x"
        config["text_config"]["linear_attn_config"]["surprise"] = 3

    text = problem_of(change)
    for words in ("model_type", "hidden_size: missing", "q_lora_rank: found 'x'", "surprise: unknown key"):
        assert words in text, words


def test_unset_unknown_keys_are_harmless(caplog):
    config = real_config()
    config["text_config"]["rope_scaling"] = None
    with caplog.at_level(logging.INFO, "k3cuda"):
        assert K3Config.from_json(config) == K3Config.from_json(real_config())
    assert "text_config.rope_scaling" in caplog.text


@pytest.mark.parametrize("level", [(), ("text_config",), ("text_config", "linear_attn_config")], ids="/".join)
def test_key_given_twice(tmp_path, level):
    whole = json.dumps(real_config())
    for name in level:
        whole = whole.replace(f'"{name}": {{', f'"{name}": {{"twice": 1, "twice": 2, ')
    (tmp_path / "config.json").write_text(whole if level else whole.replace("{", '{"twice": 1, "twice": 2, ', 1))
    with pytest.raises(ConfigError, match="a key given twice in one object: twice"):
        K3Config.from_json(tmp_path)


@pytest.mark.parametrize("key", ["model_type", *NUMBERS])
def test_messages_stay_short(key):
    assert len(problem_of(text_key(key, "x" * 100_000))) < 1000


@pytest.mark.parametrize("content, words", [(b"", "not JSON"), (b"[]", "wanted an object"), (b"[" * 100_000, "not JSON"),
                                            (b"\xff", "not JSON")])
def test_broken_files(tmp_path, content, words):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        K3Config.from_json(tmp_path)


def test_no_file(tmp_path):
    with pytest.raises(ConfigError, match="config.json: No such file"):
        K3Config.from_json(tmp_path)
