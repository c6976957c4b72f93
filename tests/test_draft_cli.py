"""Draft models as users meet them: the command, its documents and refusals, and Python."""
import json
from contextlib import closing

import numpy as np
import pytest
from command import k3, k3_json
from test_draft_config import edit

from k3cuda import LLM, SamplingParams
from k3cuda.cli.model_argument import MODEL
from k3cuda.cli.options import DRAFT
from k3cuda.errors import CheckpointError, ConfigError, UsageError
from k3cuda.runtime.tiny_random import open_tiny_random, open_tiny_random_draft
from k3cuda.runtime.made_config import made_config
from k3cuda.runtime.made_draft import MadeDraft, made_draft_json, write_draft
from k3cuda.runtime.made_model import MadeCheckpoint
from k3cuda.runtime.named_models import DEMO, NAMED, TINY_RANDOM, TINY_RANDOM_DRAFTS, listed
from k3cuda.runtime.preflight import check
from k3cuda.runtime.write_checkpoint import write_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    """A written GQA draft of tiny-random, beside the one that is made in memory."""
    cfg = open_tiny_random().cfg
    return write_draft(MadeDraft(made_draft_json(cfg, "gqa"), cfg), tmp_path_factory.mktemp("drafts") / "gqa")


# Command

def test_generate_with_a_draft_gives_the_same_greedy_answer(draft):
    plain = k3_json("generate", "tiny-random", "-p", "hi", "-n", 6, "-t", 0, "--json")
    found = k3_json("generate", "tiny-random", "-p", "hi", "-n", 6, "-t", 0, "--json", "--draft-model", draft, "-k", 3, "--acceptance", "block")
    assert found["token_ids"] == plain["token_ids"]
    assert found["sampling"]["num_drafts"] == found["speculative"]["k"] == 3
    assert plain["speculative"] is None


def test_synthetic_acceptance_from_the_command():
    done = k3("generate", "tiny-random", "-p", "hi", "-n", 31, "--ignore-eos", "-s", 1, "--json", "-v", "--draft-model", "tiny-random-draft", "--draft-tokens", 7,
              "--acceptance-length", 6)
    found = json.loads(done.stdout)["speculative"]
    assert found == {"k": 7, "steps": 5, "proposed": 33, "accepted": 25, "acceptance_rate": 25 / 33, "acceptance_length": 6.0,
                     "per_position": [1.0] * 5 + [0.0] * 2}
    log = done.stderr.decode()
    assert "synthetic acceptance of length 6: the text means nothing" in log and "6.00 tokens a verify step with 7 drafts, 76% of them accepted" in log
    assert "from the prefix stream, block of 7 rows, mask id 639" in log


def test_a_config_as_vllm_takes_it():
    config = {"method": "dspark", "model": "tiny-random-draft", "num_speculative_tokens": 2}
    assert k3_json("generate", "tiny-random", "-p", "hi", "-n", 3, "--json", "--speculative-config", json.dumps(config))["speculative"]["k"] == 2
    for broken, words in ((config | {"rejection": "block"}, b"'rejection' is missing or unknown"), (config | {"method": "eagle3"}, b"found 'eagle3', wanted 'dspark'")):
        assert words in k3("generate", "tiny-random", "-p", "hi", "--speculative-config", json.dumps(broken), code=2).stderr
    assert b"give one of them" in k3("generate", "tiny-random", "-p", "hi", "-k", 3, "--speculative-config", json.dumps(config), code=2).stderr


@pytest.mark.parametrize("flags, code, words", [
    (["-k", 3], 2, b"num_drafts: found 3, but there is no draft model"), (["--draft-model", "tiny-random-draft", "-k", 8], 2, b"num_drafts: found 8, wanted 1 to 7"),
    (["--draft-model", "/no/such"], 3, b"no such folder")])
def test_refusals_of_the_command(flags, code, words):
    assert words in k3("generate", "tiny-random", "-p", "hi", "-n", 2, *flags, code=code).stderr


def test_check_names_everything_wrong_with_a_draft(tmp_path, draft):
    found = k3_json("check", "tiny-random", "--draft-model", draft, "--json")
    assert found["ok"] and found["facts"]["draft"]["family"] == "gqa" and found["facts"]["draft"]["tap_stream"] == "attn_res"
    cfg = open_tiny_random().cfg
    other = write_draft(MadeDraft(made_draft_json(cfg, max_position_embeddings=100), cfg), tmp_path / "other")
    assert any("speculation stops near position 100" in note for note in check("tiny-random", draft=other).notes)
    edit(other / "config.json", mask_token_id=5, markov_rank=32, target_hidden_size=128)
    found = k3_json("check", "tiny-random", "--draft-model", other, "-k", 9, "--tp", 32, "--json", code=3)
    text = json.dumps(found["findings"])
    for words in ("target_hidden_size: the draft has 128, the target 256", "with a wrong shape", "a block of 7 rows, so at most 7 drafts",
                  "a draft model that cannot be cut over 32 ranks"):
        assert words in text
    assert b"there is no draft model" in k3("check", "tiny-random", "-k", 3, code=2).stderr


def test_a_target_as_its_own_draft(tmp_path):
    folder = write_checkpoint(open_tiny_random(), tmp_path / "model")
    assert b"that is a Kimi K3 itself" in k3("generate", folder, "--draft-model", folder, "-p", "hi", code=3).stderr


# Python

def test_llm_with_a_draft_and_without_in_one_batch(draft):
    with LLM("tiny-random") as llm:
        want = [o.token_ids for o in llm.generate(["a", "b", "c"], GREEDY)]
    with LLM("tiny-random", draft, num_drafts=4, draft_rows="drafts") as llm:
        outputs = llm.generate(["a", "b", "c"], [GREEDY, SamplingParams(temperature=0, max_tokens=12, num_drafts=0), GREEDY])
        assert [o.token_ids for o in outputs] == want
        assert outputs[1].stats.speculative is None and outputs[0].stats.speculative.k == 4
        chunks = list(llm.stream("a", GREEDY))
        assert sum((c.token_ids for c in chunks), ()) == want[0] and any(c.from_draft for c in chunks) == (outputs[0].stats.speculative.accepted > 0)
        with pytest.raises(UsageError, match="num_drafts: found 5, the model was opened with 4"):
            llm.generate("a", SamplingParams(num_drafts=5))
        session = llm.prefill("a")
        assert np.isfinite(session.fork().logits).all()
        session.close()


@pytest.mark.parametrize("arguments, error, words", [
    ({"num_drafts": 3}, UsageError, "num_drafts: found 3, but there is no draft model"), ({"drafts": 3}, UsageError, "'drafts' is no argument"),
    ({"draft_model": 3}, UsageError, "draft_model: found int"), ({"draft_model": "x/y"}, CheckpointError, "x/y: found no folder"),
    ({"draft_model": "tiny-random-draft", "num_drafts": True}, UsageError, "num_drafts: found True"), ({"draft_model": "tiny-random-draft", "tp": 32}, Exception, "tp 32 is not one of"),
    ({"draft_model": "tiny-random-draft", "draft_rows": 3}, UsageError, "draft_rows: found 3"), ({"draft_model": "tiny-random-draft", "acceptance": "synthetic"}, UsageError, "found None with acceptance 'synthetic'"),
    ({"draft_model": "tiny-random-draft", "max_batch": 9}, UsageError, "max_batch: found 9, but with 7 drafts of a block of 7 rows 64 rows hold 8 sequences"),
    ({"draft_model": "tiny-random-draft", "acceptance": "typical"}, UsageError, "acceptance: found 'typical', wanted standard, block, synthetic"),
    ({"draft_model": "tiny-random-draft", "acceptance": "block", "acceptance_length": 3.0}, UsageError, "acceptance_length: found 3.0 with acceptance 'block'"),
    ({"draft_model": "tiny-random-draft", "acceptance_length": 9}, UsageError, "acceptance_length: found 9, wanted 1 to 8"),
    ({"draft_model": "tiny-random-draft", "confidence_threshold": 1.5}, UsageError, "confidence_threshold: found 1.5, wanted 0 to 1")])
def test_refusals_in_python(arguments, error, words):
    with pytest.raises(error, match=words):
        LLM("tiny-random", **arguments)


def test_open_drafts_and_targets_must_fit():
    small = made_config()
    with pytest.raises(ConfigError, match="hidden_size: the draft has 256, the target 64"):
        LLM(MadeCheckpoint(small), open_tiny_random_draft())
    with LLM("tiny-random", open_tiny_random_draft(), num_drafts=1, max_batch=9) as llm:   # 9 blocks of 7 rows fit 64
        assert len(llm.generate("hi", GREEDY)[0].token_ids) > 0


@pytest.mark.parametrize("name", TINY_RANDOM_DRAFTS)
def test_a_name_of_a_draft_beside_a_model_that_is_open(name):
    """As beside a model that has a name: the draft that is made, which must fit."""
    for draft, target in ((name, TINY_RANDOM), (name.replace(TINY_RANDOM, DEMO), DEMO)):
        with closing(check(target).open()) as checkpoint, LLM(checkpoint, draft, num_drafts=2, max_model_len=64) as llm:
            assert llm.generate("hi", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))[0].stats.speculative.k == 2
    with pytest.raises(ConfigError, match="hidden_size: the draft has 256, the target 64"):
        LLM(MadeCheckpoint(made_config()), name)


def test_every_name_is_said_where_one_is_wanted():
    drafts = sum(NAMED.values(), ())
    for names, flag, ask in ((tuple(NAMED), MODEL, lambda: LLM(3)), (drafts, DRAFT[0], lambda: LLM(TINY_RANDOM, 3))):
        with pytest.raises(UsageError) as refused:
            ask()
        assert [name for name in names if f"'{name}'" not in flag[1]["help"] or f"'{name}'" not in refused.value.message] == []
    assert set(drafts) > {*TINY_RANDOM_DRAFTS, "demo-draft"} and listed("abc") == "'a', 'b' or 'c'" and listed("a") == "'a'"


def test_a_stored_prefix_holds_the_draft_s_context_too():
    text = "a beginning that several prompts share, longer than a page of the cache, so that a whole page is kept "
    params = [SamplingParams(temperature=1.0, max_tokens=4, seed=i, ignore_eos=True) for i in range(2)]
    runs = []
    for stored in (0, 2):
        with LLM("tiny-random", "tiny-random-draft", prefix_cache=stored, max_batch=2) as llm:
            runs.append([(o.token_ids, o.stats.speculative) for end, p in zip("xy", params) for o in llm.generate([text + end], p)])
            assert stored == 0 or llm._engine.prefixes.hit > 0
    assert runs[0] == runs[1]


def test_seeds_repeat_a_drawn_answer_alone_and_in_a_batch():
    params = [SamplingParams(temperature=1.0, max_tokens=8, seed=i, ignore_eos=True) for i in range(3)]
    with LLM("tiny-random", "tiny-random-draft", acceptance="block") as llm:
        together = [o.token_ids for o in llm.generate(["x", "y", "z"], params)]
        assert [llm.generate(p, q)[0].token_ids for p, q in zip("xyz", params)] == together
