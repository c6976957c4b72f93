"""`k3cuda compile`: what it writes is what the backend looks for, and what it refuses."""
import json
import re
import sys
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

pytest.importorskip("cuda.bindings", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")
pytest.importorskip("cupy", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")

from click.testing import CliRunner  # noqa: E402
from command import ROOT, k3  # noqa: E402
from models import headdims  # noqa: E402
from test_jit import spilling  # noqa: E402

from k3cuda.cli import compile_cubins, main  # noqa: E402
from k3cuda.cli.model_argument import config_of, draft_config_of  # noqa: E402
from k3cuda.draft_plan import build_draft_plan  # noqa: E402
from k3cuda.emit import NO_PROBES  # noqa: E402
from k3cuda.plan import Taps, build_plan  # noqa: E402
from k3cuda.runtime import cuda_draft, cuda_graphs, cuda_jit, cuda_kernels  # noqa: E402
from k3cuda.runtime.cuda_backend import CudaBackend  # noqa: E402
from k3cuda.runtime.cuda_draft import CudaDraft  # noqa: E402
from k3cuda.runtime.cuda_driver import Device  # noqa: E402
from k3cuda.runtime.drafting import Drafting  # noqa: E402
from k3cuda.runtime.loading import Loading  # noqa: E402
from k3cuda.runtime.made_draft import made_draft_json  # noqa: E402

MODEL = ROOT / "tests/data/k3-headdims"
H200 = Device(0, "NVIDIA H200", "sm_90a", 132, 227 << 10)


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """(folder, the document) of one run."""
    folder = tmp_path_factory.mktemp("kernels") / "made" / "cubin"
    args = ["compile", MODEL, "--tp", 1, "--rows", "16,32", "--arch", "sm_90a", "--output", folder, "--json"]
    done = k3(*args)
    assert len(done.stderr.splitlines()) == 3 and b"3 of 3: sm_90a, " in done.stderr
    assert b"sm_90a, step, 132 multiprocessors, 16 rows, bf16" in done.stderr and b"sm_90a, inputs and sampler" in done.stderr
    return folder, json.loads(done.stdout)


def test_the_document(filled):
    folder, found = filled
    assert found["folder"] == str(folder) and found["files"] == 3 and found["nvrtc"] == cuda_jit.nvrtc_version()
    assert [(c["arch"], c["sms"], c["rows"], c["kv_cache_dtype"], c["part"], c["was_there"]) for c in found["cubins"]] == [
        ("sm_90a", 132, 16, "bf16", "step", False), ("sm_90a", 132, 32, "bf16", "step", False), ("sm_90a", None, None, None, "inputs and sampler", False)]
    assert found["bytes"] == sum((folder / c["folder"] / "kernel.cubin").stat().st_size for c in found["cubins"])
    shown, = re.findall(r"```json compile\n(.*?)```", (ROOT / "docs/cli.md").read_text(encoding="utf-8"), re.S)
    shown = json.loads(shown)
    assert set(shown) == set(found) and set(shown["cubins"][0]) == set(found["cubins"][0])


def test_the_backend_finds_it_and_compiles_nothing(filled, monkeypatch, tmp_path):
    """A backend on a GPU of that kind, made without its memory: its own call for kernels."""
    folder, _ = filled
    monkeypatch.setenv("K3CUDA_CUBIN_DIR", str(folder))
    monkeypatch.setenv("K3CUDA_CACHE_DIR", str(tmp_path / "unused"))
    monkeypatch.setattr(cuda_jit, "_run", lambda *args: pytest.fail("it compiles"))
    monkeypatch.setattr(cuda_graphs, "BucketKernels", lambda plan, rows, compiled, ride: SimpleNamespace(compiled=compiled))
    be = object.__new__(CudaBackend)
    be.plan, be.kv_cache_dtype, be.device, be.ride, be.probes, be._kernels, be._loading = build_plan(headdims().cfg, 1), "bf16", H200, True, NO_PROBES, {}, Loading()
    for rows in (16, 32):
        compiled = be.kernels(rows).compiled
        assert compiled.from_cache and compiled.folder.parent == folder
    around = cuda_kernels.compile_step_io(be.plan.cfg.vocab_size, be.device.arch)   # the call of StepIO
    assert around.from_cache and around.folder.parent == folder
    assert not (tmp_path / "unused").exists()


def test_again_it_finds_everything(filled):
    folder, _ = filled
    done = k3("compile", MODEL, "--tp", 1, "--rows", "16", "--arch", "sm_90a", "--output", folder)
    assert b"was there" in done.stderr and re.match(rb"2 cubins, \d\.\d MB, ", done.stdout)


def test_another_number_of_multiprocessors_is_another_cubin(filled, monkeypatch):
    folder, found = filled
    done = json.loads(k3("compile", MODEL, "--tp", 1, "--rows", "16", "--arch", "sm_90a", "--sms", "114", "--output", folder, "--json").stdout)
    assert done["cubins"][0]["folder"] not in {c["folder"] for c in found["cubins"]} and done["cubins"][0]["sms"] == 114


@pytest.mark.parametrize("model, draft, k, width, tp", [("tiny-random", "tiny-random-draft", 2, "drafts", 1), ("kimi-k3", "kimi-k3-dspark", None, "block", 16)])
def test_with_a_draft_backends_find_every_cubin(tmp_path, monkeypatch, model, draft, k, width, tp):
    """Nothing is compiled, only looked for: a target that leaves taps, its draft at every number of sequences, and what judges the drafts. With several
    ranks by those of a rank that is a process."""
    monkeypatch.setattr(cuda_jit, "_run", lambda *args: (b"cubin", "", True))
    buckets, verified = {1, 16, 64} | ({256} if tp == 1 else set()), 0
    words = ["compile", model, "--tp", str(tp), "--rows", ",".join(map(str, buckets)), "--arch", "sm_90a", "--output", str(tmp_path / "cubin"), "--json",
             "--draft-model", draft, "--draft-rows", width]
    done = CliRunner().invoke(main, words + (["-k", str(k)] if k else []))
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["draft_model"] == draft and Counter(c["part"] for c in found["cubins"]) >= Counter(
        {"step": len(buckets), "step with taps": len(buckets), "draft": 3, "inputs and sampler": 1, "acceptance": 1}
        | ({"step in one launch": 1, "step with taps in one launch": 1} if tp == 1 else {}))
    monkeypatch.setenv("K3CUDA_CUBIN_DIR", str(tmp_path / "cubin"))
    monkeypatch.setattr(cuda_jit, "_run", lambda *args: pytest.fail("it compiles"))
    for module in (cuda_graphs, cuda_draft):
        monkeypatch.setattr(module, "BucketKernels", lambda plan, rows, compiled, ride: SimpleNamespace(compiled=compiled))
    cfg = config_of(model)
    drafting = Drafting(SimpleNamespace(cfg=draft_config_of(draft, cfg)), k, width)
    be, own = object.__new__(CudaBackend), object.__new__(CudaDraft)
    be.plan, be.kv_cache_dtype, be.device, be.ride, be.probes, be._kernels, be._loading = (
        build_plan(cfg, tp, drafting.taps), "bf16", H200, tp == 1, NO_PROBES, {}, Loading())
    own.plan, own.device, own._carry, own._building, own._kernels, own._loading = (
        build_draft_plan(drafting.source.cfg, tp, drafting.num_drafts, drafting.block_rows), H200, None if tp == 1 else list, nullcontext, {}, Loading())
    for seqs in range(1, drafting.max_batch + 1):
        if (bucket := cuda_kernels.bucket_of(seqs * (drafting.num_drafts + 1))) in buckets:
            verified += 1
            own.kernels(bucket), own.kernels(cuda_kernels.bucket_of(seqs * drafting.block_rows))
    for bucket in buckets:
        be.kernels(bucket), own.kernels(min(bucket, 64))   # of a prompt, too
    cuda_kernels.compile_accept(cfg.vocab_size, H200.arch)
    assert verified > 1 and all(kernels.compiled.from_cache for holder in (be, own) for kernels in holder._kernels.values())


@pytest.mark.parametrize("ranks", ["virtual", "processes"])
def test_with_ranks_and_a_cache_over_them(tmp_path, monkeypatch, ranks):
    """Each way of joining them has kernels of its own, and so has a cache that they hold together."""
    monkeypatch.setattr(cuda_jit, "_run", lambda *args: (b"cubin", "", True))
    words = ["compile", MODEL, "--tp", "2", "--dcp", "2", "--ranks", ranks, "--rows", "8", "--arch", "sm_90a", "--output", tmp_path / "cubin", "--json"]
    found = json.loads(CliRunner().invoke(main, list(map(str, words))).stdout)
    assert (found["tp"], found["dcp"], found["ranks"]) == (2, 2, ranks)
    monkeypatch.setenv("K3CUDA_CUBIN_DIR", str(tmp_path / "cubin"))
    monkeypatch.setenv("K3CUDA_CACHE_DIR", str(tmp_path / "others"))
    for dcp in (1, 2):
        for ride in (False, True):
            compiled = cuda_kernels.compile_bucket(build_plan(headdims().cfg, 2, dcp=dcp), 8, "bf16", "sm_90a", ride=ride)
            assert compiled.from_cache == (dcp == 2 and ride == (ranks == "virtual"))
    assert cuda_kernels.compile_moves("sm_90a").from_cache == (ranks == "processes")


@pytest.mark.parametrize("args, code, words", [
    (["--rows", "8,65"], 2, "--rows: found 65, wanted at most 64 where ranks are processes"),
    (["--dcp", "3"], 2, "dcp: found 3, wanted 1, 2, 4, 8 or 16 with a tp of 16"),
    (["-k", "3"], 2, "num_drafts: found 3, but there is no draft model"),
    (["--draft-model", "kimi-k3-dspark", "-k", "9"], 2, "num_drafts: found 9, wanted 1 to 7"),
    (["--draft-model", "tiny-random-draft"], 3, "--draft-model tiny-random-draft: vocab_size: the draft has"),
    (["--draft-model", "kimi-k3"], 3, "kimi-k3"),
])
def test_refusals(tmp_path, args, code, words):
    done = CliRunner().invoke(main, ["compile", "--output", str(tmp_path / "out"), *args])
    assert done.exit_code == code and words in done.stderr and not (tmp_path / "out").exists()


def test_a_draft_without_kernels_is_refused(tmp_path):
    windows = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9}
    (tmp_path / "config.json").write_text(json.dumps(made_draft_json(config_of("tiny-random"), "mla", **windows)))
    done = CliRunner().invoke(main, ["compile", "tiny-random", "--tp", "1", "--output", str(tmp_path / "out"), "--draft-model", str(tmp_path)])
    assert done.exit_code == 3 and "sliding_attention" in done.stderr and not (tmp_path / "out").exists(), done.stderr


def test_spills_are_refused_or_named(tmp_path, monkeypatch):
    """A step of one kernel that spills."""
    def spilled(plan, rows, kv_cache_dtype, arch, *, sms, ride, **options):
        return cuda_jit.compile_cuda(spilling(), arch, **options)

    monkeypatch.setattr(compile_cubins, "compile_bucket", spilled)
    words = ["compile", str(MODEL), "--tp", "1", "--rows", "16", "--arch", "sm_90a", "--output", str(tmp_path / "cubin"), "--json"]
    refused, kept = CliRunner().invoke(main, words), CliRunner().invoke(main, [*words, "--allow-spills"])
    assert (refused.exit_code, kept.exit_code) == (5, 0) and "spilled" in refused.stderr, kept.stderr
    step, around = json.loads(kept.stdout)["cubins"]
    assert step["spills"].keys() == {"k"} and step["spills"]["k"] > 0 and around["spills"] == {}
    assert f"16 rows, bf16, k spills {step['spills']['k']} bytes" in kept.stderr


@pytest.mark.parametrize("args, code, words", [
    (["--arch", "sm_90a,sm_120a"], 5, "--arch: sm_120a isn't supported: a block has 99 KB of shared memory there"),
    (["--arch", "sm_80"], 2, "--arch: found 'sm_80', wanted sm_90a, sm_100a, sm_103a"),
    (["--kv-cache-dtype", "bf16,fp4"], 2, "--kv-cache-dtype: found 'fp4', wanted bf16, fp8_e4m3"),
    (["--rows", "0"], 2, "wanted integers from 1 to"),
    (["--tp", "3"], 3, "1, 2, 4, 8, 16"),
])
def test_refusals(tmp_path, args, code, words):
    done = k3("compile", "--output", tmp_path / "out", *args, code=code)
    assert words in done.stderr.decode() and done.stdout == b"" and not (tmp_path / "out").exists()


def test_folder_that_cannot_be_filled(tmp_path):
    (tmp_path / "file").write_text("x")
    assert b"file" in k3("compile", "--output", tmp_path / "file", code=2).stderr
    assert b"cannot be written: Not a directory" in k3("compile", "--output", tmp_path / "file" / "below", code=2).stderr
    assert b"found no name" in k3("compile", "--output", "", code=2).stderr
    assert b"--output" in k3("compile", code=2).stderr


@pytest.mark.parametrize("ride", [True, False])
def test_steps_in_one_launch_are_compiled_where_all_ranks_are_here(ride, capsys):
    """For the rows that one launch takes; kernels of both kinds stand for the same step."""
    cfg, most = config_of("kimi-k3"), {"step in one launch": 12 * ride, "step with taps in one launch": 12 * ride}
    plans = {"step": build_plan(cfg, 16), "step with taps": build_plan(cfg, 16, Taps((1,), "prefix"))}
    found = [c.keys for c in compile_cubins.cubins_of(plans, ["sm_90a", "sm_100a"], None, [1, 8, 16], ["bf16", "fp8_e4m3"], ride) if c.keys["part"] in most]
    sms = {("sm_90a", 132), ("sm_100a", 148), ("sm_100a", 152)}
    assert {(c["arch"], c["sms"], c["rows"], c["kv_cache_dtype"]) for c in found} == ({(*m, rows, kv) for m in sms for rows in (1, 8) for kv in ("bf16", "fp8_e4m3")} if ride else set())
    assert Counter(c["part"] for c in found) == Counter(most) and not capsys.readouterr().err
