"""Files that are none, or hold something else, or numbers that are none: told by name, and never waited for."""
import errno
import os

import numpy as np
import pytest
from command import k3

from damage import key, shard
from k3cuda import LLM
from k3cuda.errors import CheckpointError
from k3cuda.runtime.checkpoint import Checkpoint
from k3cuda.runtime.preflight import check
from k3cuda.runtime.shards import INDEX


SMALL_FILES = ["config.json", "generation_config.json", "tokenizer_config.json", "tiktoken.model", INDEX]


@pytest.mark.parametrize("name", SMALL_FILES)
def test_small_files_that_are_none(folder, name):
    """A pipe would be waited for, a device read for ever."""
    path = folder / name
    for make in (lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero"), path.mkdir):
        path.unlink()
        make()
        (found,) = [f for f in check(folder).findings if f.file == str(path)]
        assert (found.found, found.way_out) == ("no regular file", "put the file itself there")
    path.rmdir()


@pytest.mark.parametrize("content, words", [(b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"), (b"<!doctype html>", "an HTML or XML page")])
@pytest.mark.parametrize("name", SMALL_FILES)
def test_small_files_under_which_something_else_was_saved(folder, name, content, words):
    (folder / name).write_bytes(content)
    (found,) = [f for f in check(folder).findings if f.file == str(folder / name)]
    assert found.found == words and found.way_out


@pytest.mark.parametrize("layer, name", [(0, "self_attn.A_log"), (0, "self_attn.dt_bias"), (1, "block_sparse_moe.gate.e_score_correction_bias")])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_f32_weights_that_are_not_finite(folder, layer, name, value):
    owner = Checkpoint.open(folder).shards.owner[key(layer, name)]
    with open(owner.path, "r+b") as file:
        file.seek(owner.data_start + owner.tensors[key(layer, name)].begin)
        file.write(np.float32(value).tobytes())
    with pytest.raises(CheckpointError, match=f"{owner.path.name}: found {key(layer, name)} with values that are not finite"):
        LLM(folder, max_model_len=64)


@pytest.mark.parametrize("number", range(1, 6))
def test_a_shard_whose_data_never_came(folder, number):
    """Its space was set aside and its header written: all sizes are right."""
    path = folder / shard(number)
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    path.write_bytes(whole[:start] + bytes(len(whole) - start))
    assert check(folder).ok
    with pytest.raises(CheckpointError, match=f"{path.name}: found .* with nothing but zeros"):
        LLM(folder, max_model_len=64)


def test_an_error_of_the_disk(folder, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    checkpoint = Checkpoint.open(folder)
    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(CheckpointError, match=f"{shard(5)}: an error on reading .Input/output error.; check the disk"):
        checkpoint.read("lm_head")


def test_plan_needs_only_a_config(folder):
    shown = k3("plan", folder).stdout
    assert shown == k3("plan", folder / "config.json").stdout == k3("plan", folder / shard(1)).stdout   # a file of weights has it beside it
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    for model in (folder, folder / "config.json", folder / shard(1)):
        assert b"config.json: found no regular file" in k3("plan", model, code=3).stderr
