"""`check`: every damage is found from headers alone, all of it in one run, with file, found, wanted and way out."""
import json
import os
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from damage import NUM_SHARDS, SMALL, edit_header, edit_index, edit_json, key, rename, shard
from k3cuda.errors import CheckpointError, OutOfMemory
from k3cuda.runtime import preflight
from k3cuda.runtime.checkpoint import Checkpoint
from k3cuda.runtime.preflight import check
from k3cuda.runtime.shards import INDEX
from k3cuda.weights import checkpoint_bytes
from models import HEADDIMS


def append(path, data: bytes) -> None:
    path.write_bytes(path.read_bytes() + data)


def overlap(path) -> None:
    """Lets the second tensor begin inside the first, and all others stay behind it."""
    def move_back(header):
        names = sorted((k for k in header if k != "__metadata__"), key=lambda k: header[k]["data_offsets"])
        for name in names[1:]:
            header[name]["data_offsets"] = [n - 4 for n in header[name]["data_offsets"]]

    edit_header(path, move_back)
    os.truncate(path, path.stat().st_size - 4)


ROUTER = key(1, "block_sparse_moe.gate.weight")
NORM = key(2, "input_layernorm.weight")
# name -> (what is done to shard 2 or to the folder, file that the finding names, what it says)
DAMAGE = {
    "missing shard": (lambda p: (p / shard(2)).unlink(), shard(2), "no such file: 1 of 5 shards missing"),
    "two missing shards": (lambda p: [(p / shard(n)).unlink() for n in (1, 2)], "", f"no {shard(1)}, {shard(2)}: 2 of 5 shards missing"),
    "truncated": (lambda p: os.truncate(p / shard(2), (p / shard(2)).stat().st_size - 1000), shard(2), "truncated by 1,000 bytes"),
    "truncated header": (lambda p: os.truncate(p / shard(2), 100), shard(2), "truncated by at least"),
    "over-long": (lambda p: append(p / shard(2), b"12345"), shard(2), "5 bytes too long"),
    "LFS pointer": (lambda p: (p / shard(2)).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"), shard(2),
                    "a Git LFS pointer"),
    "HTML page": (lambda p: (p / shard(2)).write_text("<!doctype html><title>Sign in</title>"), shard(2), "an HTML or XML page"),
    "zero bytes": (lambda p: (p / shard(2)).write_bytes(b""), shard(2), "0 bytes"),
    "unfinished": (lambda p: (p / shard(2)).rename(p / (shard(2) + ".incomplete")), shard(2), "an unfinished download"),
    "header length 10^12": (lambda p: (p / shard(2)).write_bytes((10**12).to_bytes(8, "little") + b"{}"), shard(2),
                            "header length 1,000,000,000,000"),
    "broken JSON": (lambda p: (p / shard(2)).write_bytes((20).to_bytes(8, "little") + b'{"a": {"dtype": "F32'), shard(2), "no JSON"),
    "overlapping offsets": (lambda p: overlap(p / shard(2)), shard(2), "overlaps"),
    "unknown dtype": (lambda p: edit_header(p / shard(2), lambda h: h[ROUTER].__setitem__("dtype", "BF17")), shard(2), "dtype BF17"),
    "tensor missing from its shard": (lambda p: edit_header(p / shard(2), lambda h: rename(h, ROUTER, "vision_tower.x")), shard(2),
                                      f"no 1 tensor: {ROUTER}, which {INDEX} says lie here"),
    "wrong shape": (lambda p: edit_header(p / shard(2), lambda h: h[ROUTER]["shape"].reverse()), shard(2), f"{ROUTER} with shape [64, 4]"),
    "missing index": (lambda p: (p / INDEX).unlink(), INDEX, "no such file"),
    "missing config": (lambda p: (p / "config.json").unlink(), "config.json", "No such file"),
    "wrong config": (lambda p: edit_json(p / "config.json", lambda c: c.update(model_type="llama")), "config.json",
                     "model_type: found 'llama'"),
    "broken tokenizer": (lambda p: (p / "tiktoken.model").write_bytes(b"AA== x\n"), "tiktoken.model", "line 1: 'AA== x'"),
    "half a tokenizer": (lambda p: (p / "tokenizer_config.json").unlink(), "tokenizer_config.json", "cannot be read"),
}


def test_nothing_is_wrong(pristine):
    report = check(pristine, tp=2)
    assert report.ok and report.findings == []
    report.raise_if_bad()
    assert report.notes == ["skipped 9 vision tensors; 2 shards hold nothing else", "the model has 18 more ids than its tokenizer"]
    facts = report.facts
    assert facts["bytes"] == facts["config_bytes"] == checkpoint_bytes(SMALL)
    assert facts["tensors"] == facts["config_tensors"] and facts["shards"] == 5
    assert facts["skipped_tensors"] == 9 and facts["skipped_shards"] == 2 and facts["tokenizer_ids"] == 582
    assert facts["legal_tp"] == [1, 2, 4] and list(facts["bytes_per_rank"]) == ["1", "2", "4"]
    assert facts["bytes_per_rank"]["1"] > facts["bytes_per_rank"]["2"] > facts["bytes_per_rank"]["1"] / 2
    assert facts["bytes_per_rank"]["1"] < facts["reference_memory_bytes"] < 2.1 * facts["bytes_per_rank"]["1"]
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True
    opened = report.open()
    assert isinstance(opened, Checkpoint) and opened.cfg == SMALL


@pytest.mark.parametrize("name", DAMAGE)
def test_damage(folder, name):
    do, file, words = DAMAGE[name]
    do(folder)
    report = check(folder)
    match = [f for f in report.findings if words in f.found]
    assert len(match) == 1 and len(report.findings) == 1, report.findings
    assert match[0].file == str(folder / file) and match[0].wanted and match[0].way_out and match[0].code == 3
    with pytest.raises(CheckpointError) as caught:
        report.open()
    assert caught.value.code == 3 and words in str(caught.value) and str(folder / file) in str(caught.value)
    assert json.loads(json.dumps(report.to_dict()))["findings"][0]["file"] == match[0].file


def test_duplicate_tensor(folder):
    edit_header(folder / shard(3), lambda h: rename(h, NORM, key(1, "input_layernorm.weight")))
    found = [f.found for f in check(folder).findings]
    assert f"1 tensor: {key(1, 'input_layernorm.weight')} that {shard(2)} has too" in found
    edit_header(folder / shard(4), lambda h: rename(h, key(3, "input_layernorm.weight"), key(1, "input_layernorm.weight")))
    where = [f.file for f in check(folder).findings if f.found in found and "has too" in f.found]
    assert where == [str(folder / shard(3)), str(folder / shard(4))]
    content = (folder / shard(1)).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    text = content[8:end].rstrip()[:-1] + b', "a": {"dtype":"U8","shape":[0],"data_offsets":[0,0]}' * 2 + b"}"
    (folder / shard(1)).write_bytes(len(text).to_bytes(8, "little") + text + content[end:])
    assert any("1 repeated name: a" in f.found and f.file == str(folder / shard(1)) for f in check(folder).findings)


@pytest.mark.parametrize("tp", [0, 3, 8, 32])
def test_wrong_tp(folder, tp):
    report = check(folder, tp=tp)
    assert [f.wanted for f in report.findings] == ["a tp of 1, 2, 4"] and str(tp) in report.findings[0].found
    with pytest.raises(CheckpointError) as caught:
        report.raise_if_bad()
    assert caught.value.code == 3


def test_one_run_lists_everything(folder):
    (folder / shard(1)).unlink()
    os.truncate(folder / shard(2), (folder / shard(2)).stat().st_size - 7)
    (folder / shard(4)).write_text("version https://git-lfs.github.com/spec/v1\n")
    edit_header(folder / shard(3), lambda h: (rename(h, NORM, "language_model.odd"), h[key(2, "self_attn.A_log")].update(shape=[2, 64]),
                                              h[key(2, "mlp_res_norm.weight")].update(dtype="F16"),
                                              h[key(2, "self_attn.dt_bias")].update(dtype="F31"),
                                              h[key(2, "block_sparse_moe.experts.0.w1.weight_scale")].update(data_offsets=[0, 128])))
    edit_index(folder, lambda m: (m.update({"language_model.odd": shard(3)}), m.update({"language_model.evil": "../evil"}),
                                  m.pop(key(1, "mlp_res_norm.weight"))))
    (folder / "generation_config.json").write_text("{")
    (folder / "tiktoken.model").write_bytes(b"")
    edit_json(folder / "config.json", lambda c: c["text_config"].update(max_position_embeddings=4096))
    report = check(folder, tp=16)
    text = "\n".join(map(str, report.findings))
    for words in (f"{shard(1)}: found no such file", "truncated by 7 bytes", "a Git LFS pointer",
                  "language_model.evil in the file '../evil'", "A_log with shape [2, 64]; wanted shape [128]", "mlp_res_norm.weight with dtype F16; wanted dtype BF16", "with dtype F31",
                  f"no 1 tensor: {NORM}, which", "language_model.odd of no known kind", "overlaps", "generation_config.json: found no JSON",
                  f"{key(1, 'mlp_res_norm.weight')} that {INDEX} does not list", "over 16 ranks", "tiktoken.model"):
        assert words in text, words
    with pytest.raises(CheckpointError) as caught:
        report.raise_if_bad()
    assert caught.value.findings == tuple(report.findings)
    assert str(caught.value).count("\n") == len(report.findings)


def set_memory(monkeypatch, free, limit=None):
    monkeypatch.setattr(preflight, "host", lambda: {"memory_free_bytes": free, "memory_limit_bytes": limit})


def test_memory_alone_is_another_error(folder, monkeypatch):
    needed = check(folder).facts["reference_memory_bytes"]
    for free, limit in ((needed - 1, None), (10 * needed, needed - 1), (None, needed - 1)):
        set_memory(monkeypatch, free, limit)
        report = check(folder)
        with pytest.raises(OutOfMemory, match="host memory: found .* GB free; wanted") as caught:
            report.raise_if_bad()
        assert caught.value.code == 4 and report.findings[0].code == 4
    (folder / shard(1)).unlink()
    with pytest.raises(CheckpointError):
        check(folder).raise_if_bad()
    set_memory(monkeypatch, None)
    assert check(HEADDIMS).facts["host_memory_free_bytes"] is None and check(HEADDIMS).ok


def test_virtual_ranks_need_more_memory(folder):
    assert check(folder, tp=2).facts["reference_memory_bytes"] > check(folder).facts["reference_memory_bytes"]


def test_a_model_without_tokenizer_is_whole(folder):
    assert check(HEADDIMS).ok and "prompts can only be given as token ids" in check(HEADDIMS).notes[0]
    (folder / "tiktoken.model").unlink()
    (folder / "tokenizer.json").write_text("{}")
    report = check(folder)
    assert report.ok and any("there is a tokenizer.json, which is not read" in note for note in report.notes)


def test_a_tokenizer_with_too_many_ids(tmp_path, folder):
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path / name)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(HEADDIMS / name, tmp_path / name)
    report = check(tmp_path)
    assert [(f.found, f.wanted) for f in report.findings] == [("582 token ids", "at most vocab_size 256 of config.json")]


def test_no_end_token_is_worth_a_note(folder):
    edit_json(folder / "config.json", lambda c: c.update(eos_token_id=None))
    report = check(folder)
    assert report.ok and any("names no eos_token_id" in note for note in report.notes)


def test_tiny_random():
    report = check("tiny-random", tp=4)
    assert report.ok and report.open().cfg.num_hidden_layers == 8 and report.facts["legal_tp"] == [1, 2, 4, 8, 16] and not report.notes
    assert check("tiny-random", tp=32).findings[0].file == "tiny-random"


def test_ranks_that_outnumber_pieces_are_worth_a_note():
    report = check("tiny-random", tp=8, draft="tiny-random-draft-gqa")
    assert report.ok and report.facts["draft"]["legal_tp"] == [1, 2, 4, 8, 16]
    own, drafts = (note for note in report.notes if "hold zeros" in note)
    assert own.startswith("of 8 ranks not all have a piece of num_attention_heads (pieces: 4), moe_intermediate_size (pieces: 4): the others")
    assert drafts.startswith("the draft model: of 8 ranks not all have a piece of num_attention_heads (pieces: 2): the others")


def test_a_draft_is_checked_with_its_model(pristine):
    assert any("x" in f.file and "no such folder" in f.found for f in check(pristine, draft="x").findings)


def test_nowhere(tmp_path):
    report = check(tmp_path / "nowhere")
    assert [f.found for f in report.findings] == ["no such folder"] and report.to_dict()["ok"] is False


_names = st.sampled_from([ROUTER, "vision_tower.a", "weight_map", "metadata", "text_config", "model_type", "temperature", "linear_attn_config"])
_values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from([shard(1), shard(2), "kimi_k3"])
_json = st.recursive(_values, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names | st.text(max_size=3), inner, max_size=4),
                     max_leaves=12)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([INDEX, "config.json", "generation_config.json", "tokenizer_config.json", "tiktoken.model", shard(2)]),
       _json | st.dictionaries(st.just("weight_map"), _json, min_size=1), st.binary(max_size=30))
def test_odd_files_end_in_findings(folder, name, values, content):
    before = (folder / name).read_bytes()
    more = json.dumps(json.loads(before) | {"odd": values}).encode() if before[:1] == b"{" else b""
    for data in (json.dumps(values).encode(), content, more):
        (folder / name).write_bytes(data)
        json.dumps(check(folder).to_dict()).encode()
    (folder / name).write_bytes(before)


def test_shards_have_the_release_names():
    assert shard(2) == "model-00002-of-000007.safetensors" and NUM_SHARDS == 7
