"""Checkpoints in the released layout: what is read, what is left alone, and what is refused and why."""
import json
import logging
import os

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from damage import SMALL, edit_header, edit_index, edit_json, key, rename, shard, small_checkpoint
from k3cuda.errors import CheckpointError
from k3cuda.runtime.checkpoint import Checkpoint
from k3cuda.runtime.made_model import MadeCheckpoint
from k3cuda.runtime.shards import INDEX
from k3cuda.weights import BY_NAME, expected_tensors, num_pieces, rank_shape, rank_slice
from models import HEADDIMS

GATE = key(1, "block_sparse_moe.gate.weight")


def findings(path) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    assert caught.value.code == 3
    assert all(str(f) in str(caught.value) and f.wanted and f.way_out for f in caught.value.findings)
    return [str(f) for f in caught.value.findings]


def the_finding(path) -> str:
    found = findings(path)
    assert len(found) == 1, found
    return found[0]


def test_reads_every_tensor_of_the_golden_model():
    checkpoint, want = Checkpoint.open(HEADDIMS), load_file(HEADDIMS / "model.safetensors")
    seen = set()
    for name, weight, layer, expert in expected_tensors(checkpoint.cfg):
        got = checkpoint.read(weight, layer, expert)
        stored = want[name].reshape(-1)[:got.size]
        assert got.tobytes() == stored.tobytes()
        assert got.shape == tuple(checkpoint.cfg.dims()[n] for n in weight.shape)
        seen.add(name)
    assert seen == want.keys()
    assert checkpoint.path == HEADDIMS and checkpoint.generation_config == {}
    with pytest.raises(CheckpointError, match="tiktoken.model"):
        checkpoint.tokenizer()


def test_one_file_beside_its_config():
    a, b = Checkpoint.open(HEADDIMS), Checkpoint.open(str(HEADDIMS / "model.safetensors"))
    assert a.cfg == b.cfg and a.read("lm_head").tobytes() == b.read("lm_head").tobytes()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_slices_of_a_rank(pristine, tp):
    checkpoint, source = Checkpoint.open(pristine), MadeCheckpoint(SMALL)
    for name, layer in (("lm_head", None), ("o_proj", 0), ("kda_a_log", 0), ("mla_kv_b_proj", 3), ("expert_w2", 1), ("expert_w2_scale", 2)):
        weight = BY_NAME[name]
        for rank in range(tp):
            part = rank_slice(weight, SMALL.dims(), tp, rank)
            experts = range(4) if weight.per_expert else (None,)
            want = [source.read(weight, layer, e)[part] for e in experts]
            got = checkpoint.rank_slices(name, layer, tp, rank)
            if rank >= num_pieces(weight, SMALL.dims(), tp) and weight.cut:
                assert got.shape == ((4,) if weight.per_expert else ()) + rank_shape(weight, SMALL.dims(), tp) and not got.any() and got.dtype == want[0].dtype
                continue
            assert got.tobytes() == (np.stack(want) if weight.per_expert else want[0]).tobytes() and got.flags.c_contiguous


def test_closing(pristine):
    checkpoint = Checkpoint.open(pristine)
    head = checkpoint.read("lm_head")
    checkpoint.close()
    checkpoint.close()
    assert head.tobytes() == MadeCheckpoint(SMALL).read("lm_head").tobytes() == checkpoint.read("lm_head").tobytes()


def test_only_the_rows_of_a_rank_are_read(pristine, monkeypatch):
    checkpoint, sizes = Checkpoint.open(pristine), []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: sizes.append(sum(len(b) for b in buffers)) or preadv(fd, buffers, offset))
    checkpoint.rank_slices("lm_head", None, 2, 1)
    checkpoint.rank_slices("expert_w1", 1, 2, 0)
    assert sizes == [600 * 64 * 2 // 2] + [64 * 32 // 2] * 4


def test_a_file_that_shrinks_after_the_check(folder):
    checkpoint = Checkpoint.open(folder)
    os.truncate(folder / shard(5), 2000)
    with pytest.raises(CheckpointError, match=f"{shard(5)}: ended while it was read"):
        checkpoint.read("lm_head")


def test_unknown_places_are_key_errors(pristine):
    checkpoint = Checkpoint.open(pristine)
    for wrong in (("router", 0), ("lm_head", 0), ("kda_q_proj", 3), ("expert_w1", 1, 4), ("surprise",)):
        with pytest.raises(KeyError):
            checkpoint.read(*wrong)


def test_vision_is_skipped_said_once_and_never_opened(folder, caplog):
    (folder / shard(6)).write_bytes(b"no safetensors file at all")
    (folder / shard(7)).unlink()
    with caplog.at_level(logging.INFO, "k3cuda"):
        checkpoint = Checkpoint.open(folder)
        checkpoint.read("lm_head")
    assert [r.message for r in caplog.records] == ["skipped 9 vision tensors; 2 shards hold nothing else"]
    assert checkpoint.generation_config == {"temperature": 1.0, "top_p": 0.95} and checkpoint.tokenizer().vocab_size == 582


def test_vision_tensors_among_text_are_skipped_too(folder):
    name = "vision_tower.extra"
    content = (folder / shard(5)).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    size = len(content) - end
    edit_header(folder / shard(5), lambda h: h.__setitem__(name, {"dtype": "U8", "shape": [3], "data_offsets": [size, size + 3]}),
                content[end:] + b"abc")
    edit_index(folder, lambda m: m.__setitem__(name, shard(5)))
    assert Checkpoint.open(folder).read("lm_head").tobytes() == MadeCheckpoint(SMALL).read("lm_head").tobytes()


def test_shapes_of_other_writers(folder):
    """A conv without the middle 1, A_log without padding, score vectors are as stored in the release only."""
    for layer in range(3):
        edit_header(folder / shard(layer + 1), lambda h: h[key(layer, "self_attn.q_conv1d.weight")].__setitem__("shape", [256, 4]))
    assert Checkpoint.open(folder).read("kda_q_conv", 1).tobytes() == MadeCheckpoint(SMALL).read("kda_q_conv", 1).tobytes()


def test_a_log_without_padding(tmp_path):
    full = MadeCheckpoint(SMALL).stored(BY_NAME["kda_a_log"], 0, None)
    path = small_checkpoint(tmp_path / "m")
    content = (path / shard(1)).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header, data, parts, at = json.loads(content[8:end]), content[end:], [], 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, stop = entry["data_offsets"]
        if name.endswith("A_log"):
            entry["shape"], stop = [16], begin + 64
        parts.append(data[begin:stop])
        entry["data_offsets"] = [at, at + stop - begin]
        at += stop - begin
    edit_header(path / shard(1), lambda h: (h.clear(), h.update(header)), b"".join(parts))
    edit_json(path / INDEX, lambda top: top.pop("metadata"))
    assert Checkpoint.open(path).read("kda_a_log", 0).tobytes() == full[:16].tobytes()


def test_hub_snapshots_are_links(folder, tmp_path):
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "abc", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in list(folder.iterdir()):
        path.rename(blobs / path.name[::-1])
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name[::-1]}")
    assert Checkpoint.open(snapshot).read("final_norm").dtype == ml_dtypes.bfloat16
    (blobs / shard(1)[::-1]).unlink()
    assert f"{shard(1)}: found a link to ../../blobs/{shard(1)[::-1]}, which does not exist" in the_finding(snapshot)


# ---- what is wrong with the index ----

@pytest.mark.parametrize("content, words", [
    (b"", "0 bytes"), (b"{", "no JSON"), (b"\xff", "no JSON"), (b"[" * 100_000, "no JSON"), (b"[]", "no weight_map"),
    (b"{}", "no weight_map"), (b'{"weight_map": []}', "weight_map []"), (b'{"weight_map": {}}', "weight_map {}"),
    (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"), (b"<html>", "an HTML or XML page"),
])
def test_broken_index(folder, content, words):
    (folder / INDEX).write_bytes(content)
    assert f"{INDEX}: found {words}" in the_finding(folder)


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/passwd", "sub/a.safetensors", "..\\a", "..", ".", "", "a\0b",
                                  7, None, ["a"], {"a": 1}])
def test_shards_must_lie_in_the_folder(folder, name):
    edit_index(folder, lambda m: m.__setitem__(GATE, name))
    found = findings(folder)
    assert GATE in found[0] and "wanted a file name without a folder" in found[0]
    assert all(GATE in f for f in found)  # and it lies in its shard, unlisted: no second tensor is named


def test_tensor_named_twice_in_the_index(folder):
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace('"weight_map": {', '"weight_map": {"%s": "%s", ' % (GATE, shard(3))))
    assert f"1 name: {GATE}, given more than once" in the_finding(folder)


def test_index_without_a_needed_tensor(folder):
    edit_index(folder, lambda m: m.pop(GATE))
    assert f"1 tensor: {GATE} that {INDEX} does not list" in the_finding(folder)


def test_index_names_another_shard(folder):
    edit_index(folder, lambda m: m.__setitem__(GATE, shard(1)))
    assert f"1 tensor: {GATE} listed in {shard(1)}; wanted {shard(2)}, where it lies" in the_finding(folder)


@pytest.mark.parametrize("total", [1, "many", True, -5, 1.5])
def test_total_size_that_contradicts(folder, total):
    edit_json(folder / INDEX, lambda top: top["metadata"].__setitem__("total_size", total))
    assert "metadata.total_size" in the_finding(folder)


def test_total_size_without_vision_is_exact(folder):
    edit_index(folder, lambda m: [m.pop(k) for k in list(m) if not k.startswith("language_model.")])
    assert "metadata.total_size" in the_finding(folder)
    edit_json(folder / INDEX, lambda top: top.pop("metadata"))
    Checkpoint.open(folder)


def test_shards_without_an_index(folder):
    (folder / INDEX).unlink()
    assert "no such file, but 7 shards, first model-00001" in the_finding(folder)


# ---- what is wrong with the tensors ----

def test_tensor_missing_from_its_shard(folder):
    edit_header(folder / shard(2), lambda h: rename(h, GATE, "language_model.other"))
    edit_index(folder, lambda m: m.__setitem__("language_model.other", shard(2)))
    found = findings(folder)
    assert f"{shard(2)}: found no 1 tensor: {GATE}, which {INDEX} says lie here" in found[0]
    assert "1 tensor: language_model.other of no known kind" in found[1] and len(found) == 2


def test_tensor_missing_everywhere(folder):
    expert = key(2, "block_sparse_moe.experts.3.w2.weight_scale")
    edit_index(folder, lambda m: [m.pop(k) for k in list(m) if ".2.block_sparse_moe.experts." in k])
    edit_header(folder / shard(3), lambda h: [rename(h, k, "vision_tower." + k) for k in list(h) if ".experts." in k])
    found = the_finding(folder)
    assert f"{INDEX}: found no 24 tensors, first language_model.model.layers.2" in found
    assert "every tensor that config.json calls for" in found
    assert expert not in found


def test_tensor_in_two_shards(folder):
    edit_header(folder / shard(3), lambda h: rename(h, key(2, "input_layernorm.weight"), key(1, "input_layernorm.weight")))
    found = "\n".join(findings(folder))
    assert f"{shard(3)}: found 1 tensor: {key(1, 'input_layernorm.weight')} that {shard(2)} has too" in found
    assert f"{shard(3)}: found no 1 tensor: {key(2, 'input_layernorm.weight')}" in found


def test_wrong_shapes_first_and_count(folder):
    def flip(header):
        for name in (k for k in header if k.endswith("w1.weight_packed")):
            header[name]["shape"].reverse()

    edit_header(folder / shard(2), flip)
    found = the_finding(folder)
    assert f"{shard(2)}: found {key(1, 'block_sparse_moe.experts.0.w1.weight_packed')} with shape [32, 64] (the first of 4" in found
    assert "wanted shape [64, 32]" in found


def test_wrong_dtype(folder):
    edit_header(folder / shard(2), lambda h: h[GATE].__setitem__("dtype", "F16"))
    assert f"{GATE} with dtype F16; wanted dtype BF16" in the_finding(folder)


def test_every_file_with_a_wrong_tensor_is_named_in_one_run(folder):
    bias = "block_sparse_moe.gate.e_score_correction_bias"
    edit_header(folder / shard(2), lambda h: h[GATE].__setitem__("dtype", "F16"))
    edit_header(folder / shard(3), lambda h: h[key(2, bias)].__setitem__("dtype", "I32"))
    assert f"(the first of 2 tensors with a wrong dtype, in 2 files: {shard(2)}, {shard(3)})" in the_finding(folder)


def test_every_file_with_a_tensor_of_another_is_named_in_one_run(folder):
    norm = "input_layernorm.weight"
    for n in (3, 4):
        edit_header(folder / shard(n), lambda h: rename(h, key(n - 1, norm), key(n - 3, norm)))
    found = "\n".join(findings(folder))
    assert f"{shard(3)}: found 1 tensor: {key(0, norm)} that {shard(1)} has too" in found
    assert f"{shard(4)}: found 1 tensor: {key(1, norm)} that {shard(2)} has too" in found


def test_unknown_text_tensors(folder):
    name = "language_model.model.layers.9.input_layernorm.weight"
    edit_header(folder / shard(5), lambda h: rename(h, "language_model.model.norm.weight", name))
    edit_index(folder, lambda m: (m.pop("language_model.model.norm.weight"), m.__setitem__(name, shard(5))))
    found = findings(folder)
    assert "no 1 tensor: language_model.model.norm.weight" in found[0] and f"1 tensor: {name} of no known kind" in found[1]


def test_scale_of_a_cache_is_no_tensor_of_the_release(folder):
    """Caches are scaled by 1: a scale that nobody reads must not be passed over."""
    name = key(0, "self_attn.kv_scale")
    edit_header(folder / shard(1), lambda h: rename(h, key(0, "input_layernorm.weight"), name))
    edit_index(folder, lambda m: m.__setitem__(name, shard(1)))
    assert f"1 tensor: {name} of no known kind" in "\n".join(findings(folder))


def test_config_for_another_model(folder):
    edit_json(folder / "config.json", lambda c: c["text_config"].__setitem__("num_experts", 8))
    found = "\n".join(findings(folder))
    assert "no 72 tensors" in found and "gate.weight with shape [4, 64] (the first of 6" in found


def test_config_that_calls_for_a_billion_tensors(folder):
    edit_json(folder / "config.json", lambda c: c["text_config"].__setitem__("num_experts", 2**39))
    assert "tensors called for" in the_finding(folder)
    edit_json(folder / "config.json", lambda c: c["text_config"].__setitem__("num_hidden_layers", 2**39))
    assert "wanted each of 1..549755813888 once" in the_finding(folder)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"temperature": "hot"}', b'{"top_p": 7}', b'{"eos_token_id": "end"}', b'{"eos_token_id": 600}'])
def test_broken_generation_config(folder, content):
    (folder / "generation_config.json").write_bytes(content)
    assert "generation_config.json: found" in the_finding(folder)


def test_generation_config_may_be_absent(folder):
    (folder / "generation_config.json").unlink()
    assert Checkpoint.open(folder).generation_config == {}


@pytest.mark.parametrize("content", [None, b"", b"{}", b"version https://git-lfs.github.com/spec/v1\n"])
def test_config_missing_or_broken(folder, content):
    (folder / "config.json").unlink() if content is None else (folder / "config.json").write_bytes(content)
    found = the_finding(folder)
    assert "config.json: found" in found and ("a Git LFS pointer" in found) == bool(content and content.startswith(b"version"))


@pytest.mark.parametrize("name, words", [("nowhere", "no such folder"), ("file", "no folder and no .safetensors file"),
                                         ("no.safetensors", "no such file"), ("", "model.safetensors: found no such file")])
def test_paths_that_are_no_checkpoint(tmp_path, name, words):
    (tmp_path / "file").write_text("")
    assert words in "\n".join(findings(tmp_path / name))
