"""What fits a GPU is known from sizes alone: a table of every number of ranks, and a refusal before anything is loaded. No GPU is needed."""
import json

import pytest
from drafts import GOLDEN

from k3cuda.cli import main
from k3cuda.config import RELEASED_FOLDER, K3Config
from k3cuda.draft_weights import draft_bytes
from k3cuda.errors import ConfigError, OutOfMemory
from k3cuda.plan import build_plan
from k3cuda.runtime import cuda_driver, machine, open_model
from k3cuda.runtime.tiny_random import open_tiny_random_draft
from k3cuda.runtime.draft_checkpoint import DraftCheckpoint
from k3cuda.runtime.gpu_room import gpu_findings, gpu_rows, gpu_table
from k3cuda.runtime.machine import Driver, Gpu
from k3cuda.runtime.preflight import add_gpu_memory, check, check_gpu
from k3cuda.runtime.step_room import KERNEL_BYTES, MEMORY_UTILIZATION, rank_room
from k3cuda.weights import LEGAL_TP, model_bytes

CFG = K3Config.from_json(RELEASED_FOLDER)
H200 = Gpu(0, "NVIDIA H200", "9.0", 150_000_000_000)
SMALL = Gpu(1, "a small one", "10.0", 1 << 30)
OLD = Gpu(2, "an old one", "8.0", 80 << 30)
CUTS = [(tp, dcp) for tp in LEGAL_TP for dcp in LEGAL_TP if dcp <= tp]   # tiny-random has four heads, and runs on more ranks than these


def test_the_release_on_gpus_of_150_gb():
    rows = {row["tp"]: row for row in gpu_rows(CFG, H200) if row["dcp"] == 1}
    assert list(rows) == [1, 2, 4, 8, 16]
    for tp, row in rows.items():
        assert 0 <= row["weights_bytes"] - model_bytes(CFG, tp) < 0.02 * model_bytes(CFG, tp)   # padding to whole tiles
        assert row["room_bytes"] == int(150e9 * MEMORY_UTILIZATION) - row["weights_bytes"] - KERNEL_BYTES
        assert (row["room_bytes"] > 0) == (tp == 16) and bool(row["max_model_len"]["bf16"]) == (tp == 16)
    plan, row = build_plan(CFG, 16), rows[16]
    for kv, tokens in row["max_model_len"].items():
        assert rank_room(plan, 1, tokens, kv) <= row["room_bytes"]
        assert tokens == CFG.max_position_embeddings or rank_room(plan, 1, tokens + 64, kv) > row["room_bytes"]


def test_ranks_that_hold_the_cache_together_hold_so_much_more():
    """All but all of it: states, and what a step needs beside the cache, take their own whatever the cut."""
    rows = {row["dcp"]: row["max_model_len"] for row in gpu_rows(CFG, H200, sequences=64) if row["tp"] == 16}
    assert list(rows) == [1, 2, 4, 8, 16]
    for dcp, fits in rows.items():
        for kv, tokens in fits.items():
            assert 0.94 * dcp < tokens / rows[1][kv] <= 1.01 * dcp and tokens % (64 * dcp) == 0
            plan, room = build_plan(CFG, 16, dcp=dcp), gpu_rows(CFG, H200)[-1]["room_bytes"]
            assert rank_room(plan, 64, tokens, kv) <= room < rank_room(plan, 64, tokens + 64 * dcp, kv)


def test_more_sequences_leave_each_less():
    cfg = check("tiny-random").cfg
    short = Gpu(0, "short", "9.0", 700 << 20)
    lengths = [gpu_rows(cfg, short, sequences=n)[-1]["max_model_len"]["bf16"] for n in (1, 8, 64)]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[2] > 0


def test_one_row_a_kind_of_gpu_that_runs_the_kernels():
    cfg = check("tiny-random").cfg
    assert [(row["gpu"], row["tp"], row["dcp"]) for row in gpu_table(cfg, [H200, OLD, SMALL, H200])] == [
        (gpu.name, *cut) for gpu in (H200, SMALL) for cut in CUTS]
    assert gpu_table(cfg, [OLD]) == gpu_table(cfg, []) == []


def test_a_model_that_does_not_fit_is_refused_with_what_would():
    finding, = gpu_findings(CFG, H200, 8)
    assert finding.code == 4 and finding.file == "NVIDIA H200" and finding.found == "150.0 GB of memory, of which 138.0 GB may be used"
    assert finding.wanted.startswith("1,5") or finding.wanted.startswith("15")
    assert finding.way_out == "on GPUs like this the model needs 16 ranks, each on one of its own"
    assert gpu_findings(check("tiny-random").cfg, SMALL, 4) == []
    with pytest.raises(ConfigError):
        gpu_findings(CFG, H200, 3)


def test_a_draft_model_is_counted():
    cfg, draft = check("tiny-random").cfg, open_tiny_random_draft().cfg
    plain, both = gpu_rows(cfg, SMALL)[0], gpu_rows(cfg, SMALL, draft=draft)[0]
    assert 0 < both["weights_bytes"] - plain["weights_bytes"] - draft_bytes(draft) < 0.05 * plain["weights_bytes"]
    assert both["room_bytes"] < plain["room_bytes"]
    tight = Gpu(0, "tight", "9.0", int((plain["weights_bytes"] + KERNEL_BYTES + 1000) / MEMORY_UTILIZATION))
    assert gpu_findings(cfg, tight, 1) == []
    finding, = gpu_findings(cfg, tight, 1, draft)
    assert "the weights of 1 rank, the draft model and the kernels" in finding.wanted
    report = check("tiny-random", draft="tiny-random-draft")
    add_gpu_memory(report, [SMALL])
    assert report.facts["gpu_memory"][0]["weights_bytes"] == both["weights_bytes"]
    check_gpu(report, tight, 1)
    assert [f.wanted for f in report.findings] == [finding.wanted]


def test_a_draft_that_has_no_kernels_is_named_before_a_load():
    """The golden's has a cache of 40 values a token; on the reference it drafts."""
    report = check("tiny-random")
    report.draft_cfg = DraftCheckpoint.open(GOLDEN).cfg
    check_gpu(report, SMALL, 1)
    assert [f.found for f in report.findings] == ["kv_lora_rank + qk_rope_head_dim: found 40 in a draft model, its kernels want a multiple of 64"]


def test_check_shows_the_table(monkeypatch, capsys):
    monkeypatch.setattr(machine, "probe_driver", lambda: Driver("1", "13.0", (SMALL,)))
    assert not main(["check", "tiny-random", "--json"], standalone_mode=False)
    rows = json.loads(capsys.readouterr().out)["facts"]["gpu_memory"]
    assert [row["tp"] for row in rows] == [tp for tp, _ in CUTS] and all(row["max_model_len"]["fp8_e4m3"] == 8192 for row in rows)
    assert not main(["check", "tiny-random"], standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("a small one") and line.endswith("bf16 8,192, fp8_e4m3 8,192") for line in lines) == len(CUTS)
    monkeypatch.setattr(machine, "probe_driver", lambda: Driver(problem="none"))
    main(["check", "tiny-random", "--json"], standalone_mode=False)
    assert "gpu_memory" not in json.loads(capsys.readouterr().out)["facts"]


def test_standard_is_refused_before_a_load(monkeypatch):
    tiny = Gpu(0, "a tiny one", "9.0", 100 << 20)
    monkeypatch.setattr(cuda_driver, "require_gpu", lambda index: None)
    monkeypatch.setattr(open_model, "probe_driver", lambda: Driver("1", "13.0", (tiny,)))
    with pytest.raises(OutOfMemory, match="a tiny one: found 0.1 GB of memory, .* wanted 0.6 GB for the weights of 2 ranks and the kernels; no number of ranks fits"):
        open_model.open_model("tiny-random", tp=2, decode_backend="standard")
