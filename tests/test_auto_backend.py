"""What `auto` is, by what the machine has, the model needs, and was asked for. No kernel runs: a GPU is only said to be there."""
import json
import logging
import os

import pytest

from command import k3
from k3cuda import LLM
from k3cuda.config import RELEASED_FOLDER
from k3cuda.draft_config import RELEASED_DRAFT
from k3cuda.errors import UsageError
from k3cuda.runtime import auto_backend as module
from k3cuda.runtime import machine as info_machine
from k3cuda.runtime import open_model
from k3cuda.runtime.auto_backend import VARIABLE, auto_backend
from k3cuda.runtime.launch import Launch
from k3cuda.runtime.machine import LATENCY_SPECIALIZED, REFERENCE, STANDARD, Driver, Gpu
from k3cuda.runtime.made_config import made_config
from k3cuda.runtime.made_model import MadeCheckpoint
from k3cuda.runtime.tiny_random import TINY_RANDOM

ONE = Driver("580.1", "13.0", (Gpu(0, "NVIDIA H200", "9.0", 150 << 30),))


@pytest.fixture(autouse=True)
def machine(monkeypatch, caplog):
    """Sets what GPUs there are and what keeps kernels from running; at first one GPU and nothing. What is logged is looked at."""
    def put(driver=ONE, problems=()):
        monkeypatch.setattr(module, "probe_driver", lambda: driver)
        monkeypatch.setattr(module, "cuda_problems", lambda *_: list(problems))
    monkeypatch.delenv(VARIABLE, raising=False)
    caplog.set_level(logging.INFO, "k3cuda")
    put()
    return put


def of_ranks(here: int | None) -> Launch:
    return Launch("Slurm", 0, 4, 0, here, "127.0.0.1", 1, "t")


def test_the_fastest_that_runs_here(machine, caplog):
    assert auto_backend("demo") == STANDARD and LATENCY_SPECIALIZED in caplog.text and "slower" in caplog.text
    caplog.clear()
    machine(Driver(problem="no NVIDIA driver"))
    assert auto_backend("demo") == REFERENCE and not caplog.records   # nothing else could run: nothing to say


def test_a_gpu_that_lies_idle_is_a_warning_with_a_way_out(machine, caplog):
    machine(problems=["the CUDA packages aren't installed: pip install 'k3cuda[cu13]'"])
    assert auto_backend("demo") == REFERENCE
    assert [(r.levelname, "pip install 'k3cuda[cu13]'" in r.message) for r in caplog.records] == [("WARNING", True)]


SMALL = dict(head_dim=128, v_head_dim=128, qk_nope_head_dim=128, qk_rope_head_dim=64, kv_lora_rank=512)


@pytest.mark.parametrize("change, said", (
    ({"activation_dtype": "bf16"}, "activation_dtype 'bf16'"), ({"kv_cache_dtype": "f32"}, "kv_cache_dtype 'f32'"),
    ({"tp": 2, "ranks": "processes"}, "2 ranks as processes here, 1 GPU"), ({"tp": 4, "place": of_ranks(4)}, "4 ranks as processes here, 1 GPU"),
    ({"model": MadeCheckpoint(made_config(**SMALL | {"qk_nope_head_dim": 24}), 0)}, "qk_nope_head_dim: found 24")), ids=str)
def test_what_only_the_reference_does(change, said, caplog):
    assert auto_backend(**{"model": "demo", **change}) == REFERENCE and said in caplog.text


@pytest.mark.parametrize("change", (
    {"kv_cache_dtype": "fp8_e4m3"}, {"activation_dtype": "f32"}, {"tp": 2}, {"tp": 4, "ranks": "virtual", "place": of_ranks(4)}, {"tp": 4, "place": of_ranks(1)},
    {"tp": 4, "place": of_ranks(None)}, {"model": MadeCheckpoint(made_config(**SMALL), 0)}, {"model": TINY_RANDOM, "draft_model": "tiny-random-draft"},
    {"draft_model": "demo-draft-gqa"}, {"model": "not/there"}, {"model": 7}, {"tp": 5}, {"draft_model": "not/there"}), ids=str)
def test_what_kernels_do_and_what_opening_has_to_refuse(change):
    assert auto_backend(**{"model": "demo", **change}) == STANDARD


def test_a_draft_without_kernels(tmp_path, caplog):
    config = json.loads(RELEASED_DRAFT.read_text(encoding="utf-8"))
    layers = config["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"layer_types": ["sliding_attention"] * layers, "sliding_window": 64}), encoding="utf-8")
    found = auto_backend(RELEASED_FOLDER, tmp_path)
    assert (found == REFERENCE) == ("sliding_attention" in caplog.text) and found == REFERENCE


def test_a_pipe_in_the_place_of_a_config_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    assert auto_backend(tmp_path) == STANDARD


def test_the_variable_settles_it(monkeypatch):
    for told in (REFERENCE, STANDARD, LATENCY_SPECIALIZED):
        monkeypatch.setenv(VARIABLE, told)
        assert auto_backend("demo") == told
    monkeypatch.setenv(VARIABLE, "auto")
    assert auto_backend("demo") == STANDARD
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(UsageError, match=f"{VARIABLE}: found 'fast', wanted"):
        auto_backend("demo")


def test_opening_takes_it_and_a_name_given_comes_first(monkeypatch):
    asked = []
    monkeypatch.setattr(open_model, "auto_backend", lambda *args, **how: asked.append((args, how)) or REFERENCE)
    with LLM(TINY_RANDOM, max_batch=1, max_model_len=64) as llm:
        assert llm.backend.name == REFERENCE and asked[0][0] == (TINY_RANDOM, None) and asked[0][1]["tp"] == 1
    with LLM(TINY_RANDOM, decode_backend="ref", max_batch=1, max_model_len=64):
        assert len(asked) == 1


def test_the_command_has_the_variable(tmp_path):
    words = ("generate", TINY_RANDOM, "-p", "x", "-n", 1)
    assert b"wanted reference, standard" in k3(*words, env={VARIABLE: "fast"}, code=2).stderr
    assert k3(*words, env={VARIABLE: STANDARD, "CUDA_VISIBLE_DEVICES": ""}, code=5).stderr
    assert k3(*words, env={VARIABLE: REFERENCE}).stdout


@pytest.mark.parametrize("problems, auto", (((), STANDARD), (("a driver of long ago",), REFERENCE)))
def test_info_says_of_every_other_backend_why_auto_leaves_it(monkeypatch, problems, auto):
    monkeypatch.setattr(info_machine, "cuda_problems", lambda *_: list(problems))
    found = info_machine.decode_backends(ONE, info_machine.package_versions())
    assert [b["name"] for b in found if b["runs"] and not b["not_auto"]] == [auto]
