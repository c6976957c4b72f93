"""The model `demo`: its manifest says what it is, its files are those of the manifest, pages say the same; and how a trained one gets there."""
import hashlib
import json
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from command import ROOT, k3, k3_json

from k3cuda import LLM, SamplingParams, __license__
from k3cuda.cli import main as command
from k3cuda.errors import CheckpointError
from k3cuda.runtime import named_models
from k3cuda.runtime.demo_tasks import TASKS, task_of
from k3cuda.runtime.draft_checkpoint import DraftSurvey
from k3cuda.runtime.made_config import made_config
from k3cuda.runtime.made_draft import MadeDraft, made_draft_json, write_draft
from k3cuda.runtime.made_model import MadeCheckpoint
from k3cuda.runtime.named_models import DATA, DEMO, DEMO_DRAFTS, PACKAGED, TRAINED, read_manifest, resolved
from k3cuda.runtime.tiny_random import TINY_RANDOM, TINY_RANDOM_DRAFTS
from k3cuda.runtime.write_checkpoint import write_checkpoint

sys.path.append(str(ROOT / "scripts"))
import install_demo  # noqa: E402
import make_demo_page  # noqa: E402
import quality  # noqa: E402

MANIFEST = read_manifest(DATA)
IS_TRAINED = MANIFEST["weights"] == TRAINED


# ---- as it is in this version ----

def test_files_are_those_of_the_manifest():
    found = {str(f.relative_to(DATA)): hashlib.sha256(f.read_bytes()).hexdigest() for f in DATA.rglob("*") if f.is_file() and f.name != named_models.MANIFEST}
    assert found == MANIFEST.get("sha256", {})
    assert sum((DATA / name).stat().st_size for name in found) == MANIFEST.get("bytes", 0) <= install_demo.MOST_BYTES


def test_pages_say_what_it_is():
    assert make_demo_page.PAGE.read_text(encoding="utf-8") == make_demo_page.page(), "run scripts/make_demo_page.py"
    for path in make_demo_page.SENTENCES:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert make_demo_page.right(path, IS_TRAINED, text) == text, path


@pytest.mark.parametrize("draft", [None, *DEMO_DRAFTS])
def test_it_answers_with_each_draft(draft):
    """Greedy answers, which no draft changes; of a trained one the right answer."""
    flags = ["--draft-model", draft] if draft else []
    found = k3_json("generate", DEMO, "-p", "17 + 25 =", "-n", 8, "--temperature", 0, "--json", *flags)
    assert found["model"] == DEMO and 0 < found["completion_tokens"] <= 8 and (found["speculative"] is None) == (draft is None)
    if IS_TRAINED:
        assert found["text"] == "42"
    else:
        assert found["token_ids"] == k3_json("generate", TINY_RANDOM, "-p", "17 + 25 =", "-n", 8, "--temperature", 0, "--json")["token_ids"]


@pytest.mark.parametrize("tp, draft", [(8, None), (8, DEMO_DRAFTS[0]), (16, DEMO_DRAFTS[1])])
def test_more_ranks_than_heads_give_the_same_text(tp, draft):
    texts = []
    for ranks in (1, tp):
        with LLM(DEMO, draft, tp=ranks, max_model_len=128, max_batch=2) as llm:
            chats = [[{"role": "user", "content": text}] for text in ("17 + 25 =", "Sort: 59 96 13 56 95")]
            texts.append([o.text for o in llm.chat(chats, SamplingParams(temperature=0, max_tokens=24), reasoning_effort="none")])
    assert texts[0] == texts[1] and (not IS_TRAINED or texts[0] == ["42", "13 56 59 95 96"])


def test_info_says_what_it_is():
    assert k3_json("info", "--json")["demo"]["weights"] == MANIFEST["weights"]


# ---- a trained one, from its files to an answer ----

@pytest.fixture
def made(tmp_path):
    """What a training leaves, of a model that is small and random."""
    cfg = made_config(num_attention_heads=4)
    out = tmp_path / "out"
    write_checkpoint(MadeCheckpoint(cfg), out / "demo", single_file=True)
    for family in TINY_RANDOM_DRAFTS.values():
        write_draft(MadeDraft(made_draft_json(cfg, family), cfg), out / f"draft-{family}")
    lines = [{"started": {"seed": 3, "size": "demo", "at": 0, "count": 7, "commit": "abc", "torch": "2", "gpu": "a GPU"}},
             # The schedule is shortened on the way, and the time is over behind a tenth of its end.
             *({"step": n, "of": 15 if n < 5 else 10, "s": n, "length": 128, "short": 7 - n / 2, "long": 6.5, "left_out": 0.0} for n in range(1, 10)),
             {"step": 9, "held_out": dict.fromkeys(TASKS, 0.5)}, {"trained": 9, "held_out": dict.fromkeys(TASKS, 0.97), "s": 500.0}]
    (out / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return out


@pytest.fixture
def installed(made, tmp_path, monkeypatch):
    """The same as package data of this process."""
    data = tmp_path / "data"
    install_demo.package(made, make_demo_page.read_log(made / "train.jsonl"), data)
    monkeypatch.setattr(named_models, "DATA", data)
    named_models.manifest.cache_clear()
    yield data
    named_models.manifest.cache_clear()


def test_names_stand_for_the_packaged_files(installed, capsys):
    assert {name: resolved(name) for name in PACKAGED} == {name: str(installed / named.folder) for name, named in PACKAGED.items()}
    for draft in DEMO_DRAFTS:
        with LLM(DEMO, draft, num_drafts=2, max_model_len=64, max_batch=1) as llm:
            assert llm.cfg == made_config(num_attention_heads=4) and llm.generate("hi")[0].stats.speculative.k == 2
    assert not command(["check", DEMO, "--draft-model", DEMO_DRAFTS[1], "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert (found["path"], found["ok"], found["facts"]["shards"], found["facts"]["draft"]["family"]) == (DEMO, True, 1, "gqa")
    for words, said in ((["plan", DEMO], "lm_head"), (["tokenize", DEMO, "-p", "hi"], "104 105")):
        assert not command(words, standalone_mode=False)
        assert said in capsys.readouterr().out, words
    for name in DEMO_DRAFTS:   # each by its family, in whatever order names stand
        assert DraftSurvey(resolved(name)).cfg.family == PACKAGED[name].family == TINY_RANDOM_DRAFTS[PACKAGED[name].until_then]
    manifest = read_manifest(installed)
    assert manifest["license"] == __license__ and install_demo.FILES.keys() == {f.name for f in (installed.parent / "out").iterdir() if f.is_dir()}
    assert (manifest["commit"], manifest["steps"], manifest["seed"]) == ("abc", 9, 3) and len(manifest["sha256"]) == 9


def test_a_package_without_its_files_is_no_random_model(installed):
    (installed / "model" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model"):
        LLM(DEMO)
    (installed / "manifest.json").write_text("{}")
    named_models.manifest.cache_clear()
    with pytest.raises(CheckpointError, match="install k3cuda again"):
        LLM(DEMO)


def test_what_is_refused_before_a_file_changes(made, monkeypatch):
    log = make_demo_page.read_log(made / "train.jsonl")
    install_demo.check(made, log, False)
    with pytest.raises(SystemExit, match="found {'needle': 0.5}, wanted {'needle': 0.9}"):
        install_demo.check(made, log | {"held_out": log["held_out"] | {"needle": 0.5}}, False)
    install_demo.check(made, log | {"held_out": {}}, True)
    monkeypatch.setattr(install_demo, "MOST_BYTES", 1000)
    with pytest.raises(SystemExit, match="wanted at most 1,000"):
        install_demo.check(made, log, False)
    (made / "demo" / "state.pt").write_bytes(b"")
    with pytest.raises(SystemExit, match="state.pt"):
        install_demo.check(made, log, False)
    (made / "train.jsonl").write_text((made / "train.jsonl").read_text().rpartition('{"trained"')[0])
    with pytest.raises(SystemExit, match="no end of a training"):
        make_demo_page.read_log(made / "train.jsonl")


@pytest.mark.parametrize("folder", install_demo.FILES)
def test_values_that_no_trained_model_holds_are_refused(made, folder):
    file = made / folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
    start = 8 + int.from_bytes(data[:8], "little") + next(v for k, v in header.items() if k.endswith("norm.weight"))["data_offsets"][0]
    data[start:start + 4] = b"\xc0\x7f" * 2   # NaN, as F32 and as BF16
    file.write_bytes(data)
    with pytest.raises(SystemExit, match=f"{folder}: values that are not finite in 1 tensors"):
        install_demo.check(made, make_demo_page.read_log(made / "train.jsonl"), False)


def test_drafts_in_each_others_place_are_refused(made):
    for old, new in (("draft-gqa", "third"), ("draft-mla", "draft-gqa"), ("third", "draft-mla")):
        (made / old).rename(made / new)
    with pytest.raises(SystemExit, match="draft-mla: found a draft with gqa attention, wanted one with mla"):
        install_demo.check(made, make_demo_page.read_log(made / "train.jsonl"), False)


@pytest.mark.parametrize("fault", ["copy", "log"])
def test_what_fails_on_the_way_leaves_the_package_as_it_was(made, installed, monkeypatch, fault):
    before = {f: f.read_bytes() for f in sorted(installed.rglob("*")) if f.is_file()}
    log, copies = make_demo_page.read_log(made / "train.jsonl"), []

    def full(source, target):
        copies.append(target)
        if len(copies) == 7:
            raise OSError("No space left on device")
        target.write_bytes(source.read_bytes()[:-1])

    if fault == "copy":
        monkeypatch.setattr(install_demo.shutil, "copyfile", full)
    else:
        del log["started"]["torch"]
    with pytest.raises((OSError, KeyError)):
        install_demo.package(made, log, installed)
    assert {f: f.read_bytes() for f in sorted(installed.rglob("*")) if f.is_file()} == before and not [f for f in installed.parent.iterdir() if f.name.startswith("tmp")]


def test_the_card_of_a_trained_one(made, installed, tmp_path):
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "train.jsonl").write_text((made / "train.jsonl").read_text())
    one = {"items": 100, "score": 0.96, "low": 0.9, "high": 0.985, "acceptance_length": 3.25}
    for name in (DEMO, *DEMO_DRAFTS):
        (folder / f"{name}.json").write_text(json.dumps(one | {"tasks": dict.fromkeys(TASKS, one) | {"needle": one | {"score": 0.5}}}))
    (folder / "reference.json").write_text(json.dumps({"cpus": 2, "cpu": "a CPU", "load_average": 0.1, "load_s": 0.25, "tok_per_s": [80.0] * 5,
                                                       "tok_per_s_median": 80.4, "tokens": 200}))
    page = make_demo_page.page(installed, folder)
    assert "loaded in 0.25 s, then 80 tokens a second" in page
    assert "commit abc, seed 3, 9 steps" in page and "| addition | 0.960 (0.900 to 0.985) | 100 | 0.970 | 0.95 | yes |" in page
    assert "| needle | 0.500 (0.900 to 0.985) | 100 | 0.970 | 0.9 | no |" in page and "| all | 3.25 | 3.25 |" in page and "## Mistakes" not in page
    assert "| 9 | 128 | 2.5 | 6.5 | 0.0 |" in page
    (folder / "mistakes.md").write_text("160 problems, 0.0500 nats an answer\n\n"
                                        "| mistake | rise | standard error | ratio | seen |\n| --- | --- | --- | --- | --- |\n"
                                        "| no SiLU after conv | 3 | 0.1 | 30.0 | yes |\n| router: no renormalisation | 0 | 0 | 0.0 | no |\n")
    assert "| router: no renormalisation | 0 | 0 | 0.0 | no | `test_routing` |" in make_demo_page.page(installed, folder)


def answered(**changed) -> list[dict]:
    """Two answers, the second one wrong."""
    one = {"run": 0, "prompt_sha256": "", "reasoning": None, "found": None, "finish_reason": "stop", "completion_tokens": 2, "reasoning_tokens": 0,
           "speculative": None, "error": None, "decode_s": 0.5}
    return [one | {"id": "addition-0", "text": "42", "score": 1.0}, one | {"id": "addition-1", "text": "7", "score": 0.0} | changed]


@pytest.mark.parametrize("changed", [{"text": "8"}, {"finish_reason": "length"}, {"error": "no room", "text": None, "score": None}, {"id": "addition-2"}, {}])
def test_a_draft_that_changes_an_answer_is_refused(changed, tmp_path, monkeypatch):
    """Also one that makes another wrong answer of a wrong one."""
    def run(words, **_):
        draft = words[words.index("--draft-model") + 1] if "--draft-model" in words else None
        lines = [{"setup": {"draft": draft}}, *answered(**changed if draft == DEMO_DRAFTS[1] else {})]
        (tmp_path / words[words.index("--results") + 1]).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return subprocess.CompletedProcess(words, 0, json.dumps({"score": 0.5}).encode())

    monkeypatch.setattr(install_demo, "FOLDER", tmp_path)
    monkeypatch.setattr(install_demo, "ANSWERS", tmp_path / "kept" / "answers.jsonl")
    monkeypatch.setattr(install_demo, "subprocess", SimpleNamespace(run=run, PIPE=subprocess.PIPE))
    if changed:
        with pytest.raises(SystemExit, match=f"{DEMO_DRAFTS[1]}: .* differ with it, the first: addition-1"):
            install_demo.evaluate(1)
        assert not install_demo.ANSWERS.exists()
    else:
        install_demo.evaluate(1)
        kept = [json.loads(line) for line in install_demo.ANSWERS.read_text().splitlines()]
        assert kept[0] == {"setup": {"draft": None}} and [a["text"] for a in kept[1:]] == ["42", "7"] and "decode_s" not in kept[1]
        assert json.loads((tmp_path / f"{DEMO_DRAFTS[1]}.json").read_text()) == {"score": 0.5}


def test_sentences_change_and_change_back():
    for path, (without, with_it) in make_demo_page.SENTENCES.items():
        assert make_demo_page.right(path, True, f"a {without} b") == f"a {with_it} b"
        assert make_demo_page.right(path, False, f"a {with_it} b") == f"a {without} b"
    with pytest.raises(SystemExit, match="neither"):
        make_demo_page.right("README.md", True, "nothing")


def test_a_name_that_is_no_model():
    assert b"no such folder" in k3("generate", "demo-mini", "-p", "x", code=3).stderr


# ---- the paired test of tests/gpu/test_demo_quality.py ----

def scored(scores) -> list[dict]:
    return [{"id": str(i), "run": 0, "prompt_sha256": "", "score": float(s), "error": None} for i, s in enumerate(scores)]


def test_a_loss_of_two_in_a_hundred_is_found_and_chance_is_not():
    """With as many problems as are stored: 11 that all got worse are enough; as many better as worse never are, and no more than 5 % of fair coins."""
    n = install_demo.ITEMS * len(TASKS)
    right = scored([1] * n)
    assert quality.verdict(right, right) is None
    assert quality.verdict(scored([0] * 10 + [1] * (n - 10)), right) is None and 11 <= 0.02 * n
    assert quality.verdict(scored([0] * 11 + [1] * (n - 11)), right).startswith(f"0 better, 11 worse of {n}, p = 0.00098")
    assert quality.verdict(scored([0] * 10 + [1] * 5), scored([0] * 10 + [1] * 5), 1) is None
    assert quality.verdict(scored([1] * 16), scored([0] * 11 + [1] * 5)).startswith("11 better, 0 worse of 16")
    assert quality.verdict(scored([0] * 20 + [1] * 20), scored([1] * 20 + [0] * 20)) is None
    # Of 40 problems whose score changes by a fair coin, a split that is called another comes up in at most ALPHA of all families of configurations.
    by_chance = sum(math.comb(40, k) / 2**40 for k in range(41) if quality.verdict(scored([1] * k + [0] * (40 - k)), scored([0] * k + [1] * (40 - k))))
    assert 0 < 1 - (1 - by_chance) ** len(quality.CONFIGURATIONS) <= quality.ALPHA


def test_what_did_not_run_is_no_equal():
    right = scored([1, 1])
    assert quality.verdict([right[0], right[1] | {"error": "no room"}], right) == "1 answers failed, the first: no room"
    assert quality.verdict(right, right[:1]) == "1 of 2 answers are to problems of both"


def test_answers_come_from_the_model():
    """The first held-out problems by the very code that asks on a GPU; of a trained model, as its stored answers have it."""
    ours = quality.answers(DEMO, 3, max_model_len=128)   # what is short: random answers end with the context
    assert sorted(a["id"] for a in ours) == ["addition-0", "sorting-0", "subtraction-0"]
    assert len({a["text"] for a in ours}) > 1 and (not IS_TRAINED or quality.verdict(ours, quality.stored()) is None)


@pytest.mark.skipif(not IS_TRAINED, reason="no trained demo in this version")
def test_stored_answers_are_of_all_tasks_alike():
    names = [task_of(a["id"]) for a in quality.stored()]
    assert {names.count(name) for name in TASKS} == {len(names) // len(TASKS)} and len(names) >= 100 * len(TASKS)


@pytest.mark.parametrize("words, found", [
    *((f"{command} {draft}", f"model: found '{draft}', which is a draft model") for command, draft in (
        ("generate", "demo-draft"), ("plan", "demo-draft-gqa"), ("check", "tiny-random-draft"), ("compile --tp 1 --output {new}", "tiny-random-draft-gqa"))),
    *((f"{command} {model} --draft-model {model}", f"draft_model: found '{model}', wanted a draft model") for command, model in (
        ("generate", "demo"), ("check", "tiny-random"), ("compile --tp 1 --output {new}", "tiny-random"))),
    ("generate demo --draft-model=", "draft_model: found '', wanted a draft model")])
def test_a_model_in_the_place_of_a_draft_and_the_other_way_round(tmp_path, words, found):
    done = CliRunner().invoke(command, words.format(new=tmp_path / "new").split(), input="hi")
    assert (done.exit_code, done.stdout) == (2, "") and found in done.stderr and "give" in done.stderr and not (tmp_path / "new").exists()
