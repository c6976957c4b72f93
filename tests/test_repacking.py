"""`repack`: files in kernel order are the same model for every TP and reader, and a run may end anywhere without leaving half a model."""
import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import weakref
from collections import Counter

import numpy as np
import pytest
from command import ENVIRONMENT, ROOT, k3, k3_json
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from damage import SMALL, edit_json, fail_reads_after, key, shard
from k3cuda import LLM, SamplingParams
from k3cuda.config import RELEASED_FOLDER, K3Config
from k3cuda.errors import CheckpointError, OutOfMemory, UsageError
from k3cuda.packing import PACKED
from k3cuda.plan import build_plan
from k3cuda.runtime import repacking
from k3cuda.runtime.checkpoint import Checkpoint
from k3cuda.runtime.load_plan import ALIGN, whole_layers
from k3cuda.runtime.loading import Loading
from k3cuda.runtime.made_config import made_config
from k3cuda.runtime.made_model import MadeCheckpoint
from k3cuda.runtime.preflight import check
from k3cuda.runtime.rank_files import LAYOUT_VERSION, rank_file, repack_units, stored_arrays
from k3cuda.runtime.repack_manifest import MANIFEST, UNFINISHED, repack_command
from k3cuda.runtime.repacked import RepackedModel, packed_ops
from k3cuda.runtime.repacking import repack
from k3cuda.runtime.write_checkpoint import write_checkpoint
from k3cuda.weights import BY_NAME, LEGAL_TP, all_weights, checkpoint_bytes, layer_weights, model_bytes, rank_bytes
from models import FEW_PIECES, backend, feed, op_arrays, open_slot

CFG = made_config()   # divides over 1 to 16 ranks
# SHA-256 over all rank files of the position-coded model for two ranks. A byte that moves needs a new LAYOUT_VERSION, then a new line here.
GOOD = {"tp": 2, "source": "m", "source_files": {}, "files": {}, "complete": True, "layout_version": LAYOUT_VERSION, "k3cuda_version": "0"}
JSON = st.recursive(st.one_of(st.none(), st.booleans(), st.integers(-3, 20), st.integers(), st.text(max_size=5)),
                    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)), max_leaves=6)
LAYOUT_DIGEST = {1: "ad61b9c817455b44984aa3ca84bdd011a19e13748bbf13c77217097fa1644a5a",
                 2: "0121b6a80a5b11521f3a6bf3c85c502530f501964c392cd95e15124937a1dcb6"}


@pytest.fixture(scope="module")
def coded():
    return MadeCheckpoint(CFG, fill="positions")


@pytest.fixture(scope="module")
def stored(coded, tmp_path_factory):
    return write_checkpoint(coded, tmp_path_factory.mktemp("coded") / "m", vision=True)


@pytest.fixture(scope="module")
def repacked(stored, tmp_path_factory):
    """tp -> the folder that `stored` was repacked into, made when first asked for."""
    made, parent = {}, tmp_path_factory.mktemp("repacked")

    def get(tp):
        if tp not in made:
            found = repack(stored, tp, parent / str(tp))
            assert found["loading"]["wanted_bytes"] == checkpoint_bytes(CFG) - 3 * 4 * (128 - 16)   # once; A_log without its padding
            made[tp] = parent / str(tp)
        return made[tp]

    return get


def files(folder) -> dict[str, str]:
    """Rank files by name, with the SHA-256 of each."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.glob("rank-*"))}


def slices(model, tp, ranks, mode="buffered", **options):
    return {(unit.layer, name): array for unit, arrays in Loading(mode).slices(model, tp, ranks, **options) for name, array in arrays.items()}


@pytest.mark.parametrize("tp", LEGAL_TP)
def test_every_tp_gives_the_slices_and_the_logits_of_the_original(coded, stored, repacked, tp):
    model = RepackedModel.open(repacked(tp))
    assert (model.cfg, model.tp) == (CFG, tp)
    found = slices(model, tp, range(tp))
    assert found.keys() == {(layer, w.name) for layer, w in all_weights(CFG)}
    for (layer, name), arrays in found.items():
        for rank, got in enumerate(arrays):
            want = coded.rank_slices(name, layer, tp, rank)
            assert (got.dtype, got.shape) == (want.dtype, want.shape) and got.tobytes() == want.tobytes(), (layer, name, rank)
    logits = []
    for source in (Checkpoint.open(stored), model):
        be = backend(source, tp)
        open_slot(be, 0)
        logits.append(feed(be, 0, [5, 6, 7, 8], chunks=[3, 1]))
    assert logits[0].tobytes() == logits[1].tobytes() and np.isfinite(logits[0]).all() and logits[0].std() > 0


@pytest.mark.parametrize("tp", [8, 16])
def test_ranks_without_a_piece(tmp_path, tp):
    """Of heads or experts: their files hold zeros there, and what is whole is put together from the others'."""
    few = MadeCheckpoint(FEW_PIECES, seed=3)
    repack(write_checkpoint(few, tmp_path / "m"), tp, tmp_path / "r")
    model = RepackedModel.open(tmp_path / "r")
    for (layer, name), arrays in slices(model, tp, range(tp)).items():
        assert [a.tobytes() for a in arrays] == [few.rank_slices(name, layer, tp, rank).tobytes() for rank in range(tp)], (layer, name)
    for name in ("kda_q_proj", "kda_a_log", "o_proj", "expert_w2_scale", "shared_up_proj"):
        expert = 3 if BY_NAME[name].per_expert else None
        assert model.stored(BY_NAME[name], 1, expert).tobytes() == few.stored(BY_NAME[name], 1, expert).tobytes(), name
    logits = []
    for source in (few, model):
        be = backend(source, tp)
        open_slot(be, 0)
        logits.append(feed(be, 0, [5, 6, 7, 8], chunks=[3, 1]))
    assert logits[0].tobytes() == logits[1].tobytes()


@pytest.mark.parametrize("mode", ["direct", "buffered", "mmap"])
@pytest.mark.parametrize("tp, rank", [(1, 0), (4, 3), (16, 5)])
def test_a_lone_rank_streams_what_its_kernels_read(coded, repacked, mode, tp, rank):
    model, plan, loading = RepackedModel.open(repacked(tp)), build_plan(CFG, tp), Loading(mode)
    found = dict(packed_ops(plan, model, rank, loading))
    ops = {(op.layer, op.stage.name): op for op in plan.ops if op.stage.name in PACKED}
    assert found.keys() == ops.keys()
    for at, arrays in found.items():
        want = op_arrays(ops[at], CFG, tp, lambda name: coded.rank_slices(name, at[0], tp, rank))
        assert [a.tobytes() for a in arrays] == [np.ascontiguousarray(w).tobytes() for w in want], at
    own = sum((repacked(tp) / rank_file(rank, tp, layer)).stat().st_size for layer in (None, *range(CFG.num_hidden_layers)))
    assert 0.9 * own < loading.read_bytes == loading.kept_bytes < own and loading.mode == mode   # all of its files but their headers, once


def test_small_buffers_and_some_ranks(coded, repacked):
    model = RepackedModel.open(repacked(8))
    for (layer, name), arrays in slices(model, 8, range(2, 5), "direct", units=list(whole_layers(CFG)), capacity=4 * ALIGN).items():
        assert [a.tobytes() for a in arrays] == [coded.rank_slices(name, layer, 8, rank).tobytes() for rank in range(2, 5)], (layer, name)


def test_any_part_can_be_had(coded, repacked):
    """As of every source of tensors: whole ones, and slices of another cut."""
    model = RepackedModel.open(repacked(4))
    for layer in (None, 0, 1, 3):
        for w in layer_weights(CFG, layer):
            expert = 7 if w.per_expert else None
            assert model.stored(w, layer, expert).tobytes() == coded.stored(w, layer, expert).tobytes(), w
    for name in ("o_proj", "mla_kv_b_proj", "mla_q_b_proj", "mlp_res_norm"):
        assert model.rank_slices(name, 3, 2, 1).tobytes() == coded.rank_slices(name, 3, 2, 1).tobytes()
    assert repack_command("a {b} c", 2, "d e") == "k3cuda repack 'a {b} c' --tp 2 --out 'd e'"
    with pytest.raises(KeyError, match="no kda_q_proj at layer 3"):
        model.rank_slices("kda_q_proj", 3, 4, 0)
    with pytest.raises(CheckpointError, match="found a model repacked for tp 4, wanted tp 2; use tp 4, or k3cuda repack .* --tp 2 --out DIR"):
        slices(model, 2, range(2))


def test_the_layout_has_its_version(repacked):
    digest = hashlib.sha256(json.dumps(files(repacked(2))).encode()).hexdigest()
    assert digest == LAYOUT_DIGEST[LAYOUT_VERSION], f"the bytes of rank files have changed: raise LAYOUT_VERSION and record {digest}"


# ---- the manifest and the command ----

def test_manifest_and_check(pristine, tmp_path):
    found = k3_json("repack", pristine, "--tp", "2", "--out", tmp_path / "r", "--json")
    manifest = json.loads((tmp_path / "r" / MANIFEST).read_text())
    assert manifest["complete"] and manifest["tp"] == 2 and manifest["layout_version"] == LAYOUT_VERSION and manifest["source"] == str(pristine)
    assert {n: e["sha256"] for n, e in manifest["source_files"].items()} == {
        shard(n): hashlib.sha256((pristine / shard(n)).read_bytes()).hexdigest() for n in range(1, 6)}
    here = {p.name: {"bytes": p.stat().st_size, "sha256": hashlib.sha256(p.read_bytes()).hexdigest()} for p in (tmp_path / "r").iterdir()}
    here.pop(MANIFEST)
    assert here == manifest["files"] and {"config.json", "generation_config.json", "tiktoken.model", "tokenizer_config.json"} < here.keys()
    assert found["files"] == len(here) and found["bytes"] == sum(e["bytes"] for e in here.values()) and found["folder"] == str(tmp_path / "r")
    shown = json.loads(re.findall(r"```json repack\n(.*?)```", (ROOT / "docs/cli.md").read_text(), re.S)[0])
    assert shown.keys() == found.keys() and shown["loading"].keys() == found["loading"].keys()
    facts = k3_json("check", tmp_path / "r", "--hash", "--hash-manifest", tmp_path / "h.json", "--json")["facts"]
    assert facts["repacked_tp"] == 2 and facts["verified_files"] == len(here) and facts["shards"] == 2 * 5
    assert facts["bytes_per_rank"] == check(pristine).facts["bytes_per_rank"]


def test_it_answers_like_the_original(pristine, tmp_path):
    k3("repack", pristine, "--tp", "2", "--out", tmp_path / "r", "--no-verify")
    assert {e["sha256"] for e in json.loads((tmp_path / "r" / MANIFEST).read_text())["source_files"].values()} == {None}
    ask = ["-p", "hi", "-n", "6", "--no-think", "--seed", "3", "--json"]
    want = k3_json("generate", pristine, "--tp", "2", *ask)
    for more in ([], ["--tp", "2", "--load-mode", "direct"]):   # its own tp need not be said
        got = k3_json("generate", "--model", tmp_path / "r", *more, *ask)
        assert got["token_ids"] == want["token_ids"] and got["engine"]["tp"] == 2 and got["timing"]["load_s"] > 0


def test_the_demo_too(tmp_path):
    repack("tiny-random", 4, tmp_path / "r")
    answers = []
    for model, tp in (("tiny-random", 4), (tmp_path / "r", None)):
        with LLM(model, tp=tp) as llm:
            answers.append(llm.generate("hi", SamplingParams(max_tokens=4, seed=3))[0].token_ids)
    assert answers[0] == answers[1]


def test_another_tp_and_another_version_are_refused(pristine, tmp_path):
    out = tmp_path / "r"
    repack(pristine, 2, out)
    error = k3("generate", out, "--tp", "1", "-p", "hi", code=3).stderr.decode()
    assert f"{out / MANIFEST}: found a model repacked for tp 2; wanted tp 1; use --tp 2, or k3cuda repack {pristine} --tp 1 --out DIR" in error
    edit_json(out / MANIFEST, lambda m: m.update(layout_version=99, k3cuda_version="7.0"))
    error = k3("generate", out, "-p", "hi", code=3).stderr.decode()
    assert f"found layout version 99, of k3cuda 7.0; wanted layout version {LAYOUT_VERSION}, of k3cuda 0" in error
    assert f"k3cuda repack {pristine} --tp 2 --out DIR" in error
    assert k3("repack", pristine, "--tp", "2", "--out", out, code=2)


@pytest.mark.parametrize("content, words", [
    ("", "no JSON"), ("[]", "no layout_version"), ("{", "no JSON"), ('{"layout_version": true}', "no layout_version"),
    (json.dumps({"layout_version": LAYOUT_VERSION}), "fields that are missing"), ("[" * 100_000, "no JSON")])
def test_manifests_that_are_none(pristine, tmp_path, content, words):
    folder = shutil.copytree(pristine, tmp_path / "m")
    (folder / MANIFEST).write_text(content)
    finding, = check(folder).findings
    assert finding.file == str(folder / MANIFEST) and words in finding.found and finding.code == 3


@given(st.one_of(st.binary(max_size=200), st.builds(lambda changes, drop: json.dumps({k: v for k, v in (GOOD | changes).items() if k not in drop}).encode(),
       st.dictionaries(st.sampled_from(sorted(GOOD)), JSON, max_size=2), st.sets(st.sampled_from(sorted(GOOD)), max_size=1))))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_manifest_ends_in_findings(small, content):
    before = (small / MANIFEST).read_bytes()
    try:
        (small / MANIFEST).write_bytes(content)
        report = check(small)
        assert {f.code for f in report.findings} <= {3}
        if report.ok:
            assert json.loads(content)["tp"] == 2 and report.open().tp == 2
    finally:
        (small / MANIFEST).write_bytes(before)


def test_a_manifest_that_is_no_file(whole):
    (whole / MANIFEST).unlink()
    os.mkfifo(whole / MANIFEST)
    assert "no regular file" in check(whole).findings[0].found
    (whole / MANIFEST).unlink()
    with open(whole / MANIFEST, "wb") as f:
        f.truncate(100_000_000)
    assert check(whole).findings[0].found == "100,000,000 bytes"


# ---- damage ----

@pytest.fixture(scope="module")
def small(pristine, tmp_path_factory):
    out = tmp_path_factory.mktemp("small") / "r"
    repack(pristine, 2, out)
    return out


@pytest.fixture
def whole(small, tmp_path):
    return shutil.copytree(small, tmp_path / "r")


NAME = rank_file(1, 2, 2)
DAMAGE = {
    "truncated by one byte": (lambda p: os.truncate(p, p.stat().st_size - 1), "truncated by 1 bytes"),
    "grown": (lambda p: os.truncate(p, p.stat().st_size + 1), "1 bytes too long"),
    "deleted": (lambda p: p.unlink(), "no such file: 1 of 10 files missing"),
    "zero bytes": (lambda p: p.write_bytes(b""), "0 bytes"),
    "an LFS pointer": (lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"), "a Git LFS pointer"),
    "of another layer": (lambda p: shutil.copy(p.parent / rank_file(1, 2, 3), p), "other arrays"),
    "half a header": (lambda p: os.truncate(p, 40), "truncated by at least"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_before_a_load_and_mended_by_repacking(whole, small, pristine, kind):
    harm, words = DAMAGE[kind]
    harm(whole / NAME)
    finding, = check(whole).findings
    assert finding.file == str(whole / NAME) and words in finding.found and f"k3cuda repack {pristine} --tp 2 --out {whole}` again" in finding.way_out
    with pytest.raises(CheckpointError, match=NAME):
        RepackedModel.open(whole)
    if kind == "of another layer":   # as large as it should be: left alone unless it is removed, as the finding says
        (whole / NAME).unlink()
    kept = {p.name: p.stat().st_mtime_ns for p in whole.glob("rank-*") if "layer-002" not in p.name}
    repack(pristine, 2, whole)
    assert files(whole) == files(small) and {name: (whole / name).stat().st_mtime_ns for name in kept} == kept


def test_damage_ends_the_command(whole):
    os.truncate(whole / NAME, (whole / NAME).stat().st_size - 1)
    error = k3("generate", whole, "-p", "hi", code=3).stderr.decode()
    assert f"{whole / NAME}: found " in error and "truncated by 1 bytes" in error


def test_a_changed_bit_is_found_by_its_hash(whole, tmp_path):
    content = bytearray((whole / NAME).read_bytes())
    content[-1] ^= 1
    (whole / NAME).write_bytes(content)
    assert check(whole).ok
    found = k3_json("check", whole, "--hash", "--hash-manifest", tmp_path / "h.json", "--json", code=3)
    finding, = found["findings"]
    assert finding["file"] == str(whole / NAME) and finding["wanted"].endswith(f", by {MANIFEST}") and "remove it and run `k3cuda repack" in finding["way_out"]


@pytest.mark.parametrize("nth", [0, 3, 8])
def test_a_disk_that_fails_while_it_is_loaded(whole, monkeypatch, nth):
    model = RepackedModel.open(whole)
    fail_reads_after(monkeypatch, nth)
    with pytest.raises(CheckpointError, match=r"rank-\d\d-of-02.*safetensors: an error on reading at byte \d"):
        slices(model, 2, range(2))


def test_files_that_change_under_a_load(whole):
    model = RepackedModel.open(whole)
    os.truncate(whole / NAME, (whole / NAME).stat().st_size - 1)
    with pytest.raises(CheckpointError, match=f"{NAME}: ended at byte"):
        slices(model, 2, range(2))


def test_zeros_that_no_trained_model_has(whole):
    path = whole / rank_file(1, 2, None)
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    path.write_bytes(content[:start] + bytes(len(content) - start))
    for load in (lambda m: slices(m, 2, range(2)), lambda m: list(packed_ops(build_plan(m.cfg, 2), m, 1, Loading()))):
        with pytest.raises(CheckpointError, match=f"{path.name}: found .* with nothing but zeros"):
            load(RepackedModel.open(whole))


# ---- runs that end early ----

# Dies before the n-th time that a file, or at last the folder, gets its name.
KILLED = """
import os, signal, sys
from k3cuda.runtime import repacking
replace, left = os.replace, [int(sys.argv[4])]
def kill(*names):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return replace(*names)
os.replace = kill
repacking.repack(sys.argv[1], int(sys.argv[2]), sys.argv[3])
"""


@pytest.mark.parametrize("points", [(0, 1, 2, 9), (12, 30), (27,)])
def test_a_run_that_was_killed_goes_on(pristine, small, tmp_path, points):
    out, unfinished, done = tmp_path / "r", tmp_path / f"r{UNFINISHED}", {}
    for point in points:
        code = subprocess.run([sys.executable, "-c", KILLED, pristine, "2", out, str(point)], env=ENVIRONMENT, stderr=subprocess.DEVNULL).returncode
        if code == 0:   # nothing was left to be killed at
            break
        assert code == -9 and not out.exists()
        for folder in (unfinished, out):
            report = check(folder)
            assert not report.ok and {f.code for f in report.findings} == {3}
            assert (unfinished / MANIFEST).exists() or folder == unfinished or report.findings[0].found == "no such folder"
        if (unfinished / MANIFEST).exists():
            assert f"an unfinished repack of {len(json.loads((unfinished / MANIFEST).read_text())['files'])} files" in " ".join(f.found for f in report.findings)
            listed = {n for n in json.loads((unfinished / MANIFEST).read_text())["files"] if n.startswith("rank")}
            now = {n: (unfinished / n).stat().st_mtime_ns for n in listed}
            assert {n: now[n] for n in done} == done   # what was finished is not made again
            done = now
    repack(pristine, 2, out)
    assert not unfinished.exists() and files(out) == files(small) and check(out).ok
    assert sorted(os.listdir(out)) == sorted(os.listdir(small))


def test_killed_before_the_folder_got_its_name(pristine, small, tmp_path, monkeypatch):
    renamed, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda *names: renamed.append(names) or replace(*names))
    repack(pristine, 2, tmp_path / "counted")
    assert renamed[-1] == (tmp_path / f"counted{UNFINISHED}", tmp_path / "counted")
    monkeypatch.undo()
    out, unfinished = tmp_path / "r", tmp_path / f"r{UNFINISHED}"
    done = subprocess.run([sys.executable, "-c", KILLED, pristine, "2", out, str(len(renamed) - 1)], env=ENVIRONMENT)
    assert done.returncode == -9 and not out.exists() and json.loads((unfinished / MANIFEST).read_text())["complete"]
    repack(pristine, 2, out)
    assert files(out) == files(small) and not unfinished.exists()


def test_a_full_disk(pristine, small, tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))   # layers have more

    out, unfinished = tmp_path / "r", tmp_path / f"r{UNFINISHED}"
    error = k3("repack", pristine, "--tp", "2", "--out", out, code=4, preexec_fn=limit).stderr.decode()
    assert f"{unfinished}{os.sep}rank-0" in error and "File too large: nothing half-written is left of it" in error and "run it again" in error
    assert not out.exists() and not list(unfinished.glob(".*")) and not check(unfinished).ok
    k3("repack", pristine, "--tp", "2", "--out", out)
    assert files(out) == files(small) and not unfinished.exists()


def test_a_disk_that_is_too_small_is_told_before_anything_is_read(pristine, tmp_path, monkeypatch):
    monkeypatch.setattr(repacking.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 30, 1 << 30, 1000))
    monkeypatch.setattr(os, "preadv", lambda *_: pytest.fail("something was read"))
    with pytest.raises(OutOfMemory, match=rf"r{UNFINISHED}: 0.1 GB are needed and 0.0 GB free"):
        repack(pristine, 2, tmp_path / "r")


@pytest.mark.parametrize("nth", [0, 2, 7])
def test_a_checkpoint_that_cannot_be_read(pristine, small, tmp_path, nth):
    with pytest.MonkeyPatch.context() as patch:
        fail_reads_after(patch, nth)
        with pytest.raises(CheckpointError, match=r"model-\d{5}-of-000007.safetensors: .*an error on reading at byte"):
            repack(pristine, 2, tmp_path / "r")
    assert not (tmp_path / "r").exists() and not list((tmp_path / f"r{UNFINISHED}").glob(".*"))
    repack(pristine, 2, tmp_path / "r")
    assert files(tmp_path / "r") == files(small)


def test_a_scale_that_kernels_cannot_hold(folder, tmp_path):
    name = key(2, "block_sparse_moe.experts.3.w2.weight_scale")
    owner = Checkpoint.open(folder).shards.owner[name]
    with open(owner.path, "r+b") as f:
        f.seek(owner.data_start + owner.tensors[name].begin)
        f.write(bytes([230]))
    with pytest.raises(CheckpointError, match="layer 2, expert_w2: an MXFP4 scale code is 230, wanted at most 192"):
        repack(folder, 2, tmp_path / "r")


def test_a_source_whose_sums_do_not_fit(folder, tmp_path):
    (folder / "SHA256SUMS").write_text(f"{'ab' * 32}  {shard(3)}\n")
    with pytest.raises(CheckpointError, match=f"{shard(3)}: found SHA-256 .*; wanted {'ab' * 32}, by SHA256SUMS"):
        repack(folder, 2, tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_what_is_no_place_for_it(pristine, small, folder, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="found a repack of .* for tp 2, wanted one of .* for tp 1; remove it, or name another folder"):
        repack(pristine, 1, small)
    with pytest.raises(UsageError, match="neither empty nor a repacked model"):
        repack(pristine, 2, folder)
    with pytest.raises(UsageError, match="repacked already, wanted the checkpoint"):
        repack(small, 2, tmp_path / "again")
    repack(folder, 2, tmp_path / "r")
    os.utime(folder / shard(3))
    with pytest.raises(UsageError, match=f"begun from another {shard(3)}: size or time of 1 files"):
        repack(folder, 2, tmp_path / "r")
    monkeypatch.setattr(repacking.Repacking, "_write", lambda self, *_: repack(pristine, 2, tmp_path / "two"))
    with pytest.raises(UsageError, match=f"two{UNFINISHED}: another process is repacking there"):
        repack(pristine, 2, tmp_path / "two")


def test_memory_is_bounded(stored, tmp_path, monkeypatch):
    """Raw slices of three units at most: the one that is written, the one before it, the one that is read."""
    monkeypatch.setattr(repacking, "LOT_BYTES", 100_000)
    alive, most = Counter(), Counter()
    open_target = Checkpoint.open_target

    def counted(self, unit, tp, ranks):
        target = open_target(self, unit, tp, ranks)
        alive[unit] = sum(a.nbytes for a in target.arrays.values())
        most.update(units=max(0, len(alive) - most["units"]), bytes=max(0, alive.total() - most["bytes"]))
        weakref.finalize(next(iter(target.arrays.values())), alive.pop, unit)
        return target

    monkeypatch.setattr(Checkpoint, "open_target", counted)
    repack(stored, 4, tmp_path / "r")
    expert = 3 * 512 * 64 // 2 + 3 * 512 * 64 // 32
    assert 1 < most["units"] <= 3 and most["bytes"] <= 3 * (100_000 + expert) and not alive


def test_of_the_release_three_units_are_hardly_more_than_its_largest_tensor():
    cfg = K3Config.from_json(RELEASED_FOLDER)
    sizes = [sum(rank_bytes(w, cfg.dims(), experts=len(unit.experts)) for w in unit.weights)
             for _, unit in repack_units(stored_arrays(build_plan(cfg, 16)), cfg, repacking.LOT_BYTES)]
    assert sum(sizes) == model_bytes(cfg)
    assert max(map(sum, zip(sizes, sizes[1:], sizes[2:]))) < 1.01 * 163_840 * 7168 * 2   # the head
