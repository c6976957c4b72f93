"""The way of a checkpoint into a device's memory, with NumPy memory and the device's kernels under g++: the same code that drives a GPU."""
import gc
import os

import numpy as np
import pytest
from shim import host
from shim.device import HostDevice, build

from damage import fail_reads_after, key, shard
from k3cuda.config import RELEASED_FOLDER, K3Config
from k3cuda.errors import CheckpointError, OutOfMemory
from k3cuda.packing import PACKED
from k3cuda.plan import build_plan
from k3cuda.runtime import device_load
from k3cuda.runtime.checkpoint import Checkpoint
from k3cuda.runtime.device_load import load_weights
from k3cuda.runtime.loading import Loading
from k3cuda.runtime.made_config import made_config
from k3cuda.runtime.made_model import MadeCheckpoint
from k3cuda.runtime.write_checkpoint import write_checkpoint
from k3cuda.weights import BY_NAME, all_weights, model_bytes, rank_bytes
from models import FEW_PIECES, op_arrays

pytestmark = pytest.mark.skipif(host.COMPILER is None, reason="needs g++")
CFG = made_config()


@pytest.fixture(scope="module")
def coded():
    return MadeCheckpoint(CFG, fill="positions")


@pytest.fixture(scope="module")
def stored(coded, tmp_path_factory):
    return Checkpoint.open(write_checkpoint(coded, tmp_path_factory.mktemp("coded") / "m"))


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def device(library):
    return HostDevice(library)


def check(held, coded, tp, ranks):
    plan = build_plan(coded.cfg, tp)
    for arrays, rank in zip(held, ranks, strict=True):
        ops = [op for op in plan.ops if op.stage.name in PACKED]
        assert arrays.keys() == {(op.layer, op.stage.name) for op in ops}
        for op in ops:
            want = op_arrays(op, coded.cfg, tp, lambda name: coded.rank_slices(name, op.layer, tp, rank))
            got = arrays[op.layer, op.stage.name]
            assert [g.tobytes() for g in got] == [np.ascontiguousarray(w).tobytes() for w in want], (op.stage.name, op.layer, rank)


@pytest.mark.parametrize("mode", ["direct", "buffered", "mmap"])
@pytest.mark.parametrize("tp, ranks", [(1, range(1)), (4, range(4)), (16, range(5, 6)), (16, range(12, 16))])
def test_every_array_of_every_rank(stored, coded, device, monkeypatch, mode, tp, ranks):
    monkeypatch.setattr(device_load, "STAGING_BYTES", 100_000)   # experts come in lots
    held = load_weights(build_plan(CFG, tp), stored, tp, ranks, device, loading := Loading(mode))
    check(held, coded, tp, ranks)
    small = sum(rank_bytes(w, CFG.dims(), tp) for _, w in all_weights(CFG) if device_load._is_small(w))
    assert device.copied == (model_bytes(CFG, tp) - small) * len(ranks) and loading.seconds["repack"] > 0


@pytest.mark.parametrize("tp, ranks", [(8, range(8)), (16, range(2, 6)), (16, range(7, 8))])
def test_ranks_without_a_piece(tmp_path, device, tp, ranks):
    few = MadeCheckpoint(FEW_PIECES, fill="positions")
    checkpoint = Checkpoint.open(write_checkpoint(few, tmp_path / "m"))
    check(load_weights(build_plan(FEW_PIECES, tp), checkpoint, tp, ranks, device, Loading()), few, tp, ranks)


def test_a_source_that_is_no_file(coded, device):
    held = load_weights(build_plan(CFG, 2), coded, 2, range(2), device, Loading())
    check(held, coded, 2, range(2))


# ---- trouble: told, and nothing left on the device ----

def fails(checkpoint, device, words, error=CheckpointError):
    with pytest.raises(error, match=words) as caught:
        load_weights(build_plan(checkpoint.cfg, 2), checkpoint, 2, range(2), device, Loading("buffered"))
    code = caught.value.code
    del caught
    gc.collect()
    assert device.arrays_left == 0
    return code


@pytest.mark.parametrize("nth", [0, 3, 6, 9])
def test_a_disk_that_fails_in_the_middle(folder, device, monkeypatch, nth):
    checkpoint = Checkpoint.open(folder)
    fail_reads_after(monkeypatch, nth)
    assert fails(checkpoint, device, "an error on reading at byte") == 3


@pytest.mark.parametrize("number", range(1, 6))
def test_a_shard_whose_data_never_came(folder, device, number):
    path = folder / shard(number)
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    path.write_bytes(whole[:start] + bytes(len(whole) - start))
    assert fails(Checkpoint.open(folder), device, f"{path.name}: found .* with nothing but zeros") == 3


def test_a_head_whose_end_never_came(folder, device):
    """The second rank's rows of the head are zero: a download that set its space aside."""
    checkpoint = Checkpoint.open(folder)
    owner = checkpoint.shards.owner["language_model.lm_head.weight"]
    place = owner.tensors["language_model.lm_head.weight"]
    with open(owner.path, "r+b") as f:
        f.seek(owner.data_start + (place.begin + place.end) // 2)
        f.write(bytes((place.end - place.begin) // 2))
    assert fails(checkpoint, device, "found language_model.lm_head.weight with nothing but zeros") == 3


def test_a_scale_that_no_trained_model_has(folder, device):
    checkpoint = Checkpoint.open(folder)
    name = key(2, "block_sparse_moe.experts.3.w2.weight_scale")
    owner = checkpoint.shards.owner[name]
    with open(owner.path, "r+b") as f:
        f.seek(owner.data_start + owner.tensors[name].begin)
        f.write(bytes([230]))
    assert fails(checkpoint, device, "layer 2 has an MXFP4 scale code of 230, wanted at most 192") == 3


def test_too_little_memory_is_told_before_anything_is_read(folder, library, monkeypatch):
    monkeypatch.setattr(os, "preadv", lambda *_: pytest.fail("something was read"))
    device = HostDevice(library, free=1000)
    assert fails(Checkpoint.open(folder), device, r"the weights of 2 ranks of 2 need .* GB of GPU memory while they are loaded, 0.0 GB are free", OutOfMemory) == 4


def test_memory_that_runs_out_in_the_middle(folder, device, monkeypatch):
    def full(nbytes):
        raise OutOfMemory("no more")

    array, count = device.array, iter(range(20))
    monkeypatch.setattr(device, "array", lambda nbytes: array(nbytes) if next(count) < 15 else full(nbytes))
    assert fails(Checkpoint.open(folder), device, "no more", OutOfMemory) == 4


def test_small_means_few_bytes():
    """What stays on the host until it is packed: under 1 MB a weight and rank in the released model."""
    dims = K3Config.from_json(RELEASED_FOLDER).dims()
    assert max(rank_bytes(w, dims) for w in BY_NAME.values() if device_load._is_small(w)) <= 1 << 20
