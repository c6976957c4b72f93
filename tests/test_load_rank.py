"""scripts/load_rank.py on a small stand-in with the device's kernels under g++: all that it does on a GPU but for the GPU."""
import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest
from command import ENVIRONMENT, ROOT
from shim import host
from shim.device import HostDevice, build

from k3cuda.errors import CheckpointError
from k3cuda.plan import build_plan
from k3cuda.runtime.checkpoint import Checkpoint
from k3cuda.runtime.device_load import load_weights
from k3cuda.runtime.loading import Loading
from k3cuda.runtime.machine import probe_driver
from k3cuda.runtime.made_config import made_config
from k3cuda.runtime.standin import samples, write_standin
from k3cuda.weights import model_bytes

pytestmark = pytest.mark.skipif(host.COMPILER is None, reason="needs g++")
CFG = made_config()

spec = importlib.util.spec_from_file_location("load_rank", ROOT / "scripts/load_rank.py")
load_rank = importlib.util.module_from_spec(spec)
spec.loader.exec_module(load_rank)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("shim"))


@pytest.mark.parametrize("tp, rank", [(1, 0), (4, 3), (16, 5)])
def test_a_rank_is_loaded_and_looked_at(library, tmp_path, tp, rank):
    found = json.loads(json.dumps(load_rank.run(CFG, tmp_path, tp, rank, HostDevice(library), "auto", 1, lambda: 0)))
    assert (found["tp"], found["rank"], found["layers"]) == (tp, rank, 4) and found["label"].startswith("synthetic")
    assert found["samples"] > len(list(samples(CFG))) / (2 * tp) and found["samples_wrong"] == 0 and found["first_wrong"] == []
    assert found["weights_bytes"] == model_bytes(CFG, tp) <= found["packed_bytes"] and found["weights_gb_s"] > 0 < found["read_gb_s"]
    assert found["is_host_memory_bounded"] and 0 <= found["host_bytes"] <= found["host_bytes_allowed"] == found["ring_bytes"] + 2_000_000_000
    assert found["loading"]["read_bytes"] >= found["weights_bytes"] and found["check_s"] > 0 and found["check_peak_bytes"] > 1 << 20
    assert found["storage"]["bytes"] == 32 << 20 and found["storage"]["read_gb_s"] > 0 and not (tmp_path / "storage.bin").exists()
    assert (tmp_path / "standin").is_dir()   # the next run takes it as it is
    assert load_rank.run(CFG, tmp_path, tp, rank, HostDevice(library), "buffered", 1, lambda: 0)["samples"] == found["samples"]


@pytest.mark.parametrize("stage, layer", [("expert_up", 1), ("moe_down", 2), ("kda_in", 0), ("attn_mix", 3), ("mla_absorb", 3), ("lm_head", None)])
def test_what_is_wrong_is_seen(library, tmp_path, stage, layer):
    source = Checkpoint.open(write_standin(CFG, tmp_path / "m"))
    held, = load_weights(build_plan(CFG, 4), source, 4, range(2, 3), HostDevice(library), Loading())
    _, wrong = load_rank.sampled_wrong(held, CFG, 4, 2)
    assert wrong == []
    array = held[layer, stage][0]
    if stage in ("expert_up", "moe_down"):   # every expert is another one's
        array[:] = np.roll(array.reshape(CFG.num_experts, -1), 1, axis=0).reshape(-1)
    else:
        array ^= 64
    _, wrong = load_rank.sampled_wrong(held, CFG, 4, 2)
    assert wrong and all(f"layer {layer}" in name for name in wrong)


@pytest.mark.skipif(bool(probe_driver().gpus), reason="would load the release")
def test_without_a_gpu_it_says_so(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "scripts/load_rank.py", "--folder", tmp_path], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 1 and "Error: " in done.stderr and "Traceback" not in done.stderr and not list(tmp_path.iterdir())


def test_damage_ends_it(library, tmp_path):
    write_standin(CFG, tmp_path / "standin")
    path = min((tmp_path / "standin").glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated by 1 bytes"):
        load_rank.run(CFG, tmp_path, 4, 0, HostDevice(library), "auto", 1, lambda: 0)
