"""`bench compare`: ratios by hand on a clock of its own, where answers part, and the command with the reference on both sides."""
import json
import re

import numpy as np
import pytest
from click.testing import CliRunner
from command import ROOT, k3, k3_json
from scripted import fake  # noqa: F401, the fixture

from k3cuda import SamplingParams
from k3cuda.bench.compare import Side, batches, differences, in_turns, ratios, seconds
from k3cuda.cli.bench_compare import compare
from k3cuda.runtime.request_times import Times

PAGE = (ROOT / "docs/bench.md").read_text(encoding="utf-8")


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def timed(llm, clock, prefill: float, decode: float):
    """Steps of more than two rows take `prefill` seconds, the others `decode`."""
    step = llm.backend.step

    def take_time(rows):
        clock.now += prefill if len(rows.token_ids) > 2 else decode
        return step(rows)

    llm.backend.step = take_time
    return llm


def test_ratios_by_hand(fake):  # noqa: F811
    clock, heard = Clock(), []
    pair = [timed(fake(num_slots=2), clock, *times) for times in ((1.0, 1.0), (2.0, 0.5))]
    load = batches(np.random.default_rng(0), 4, 2, 5, 50, lambda seed: SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, seed=seed))
    a, b = in_turns(pair, load, 1, lambda *what: heard.append(what), clock)
    assert heard == [(0, 0, 4.0), (1, 0, 3.5), (1, 1, 3.5), (0, 1, 4.0), (0, 2, 4.0), (1, 2, 3.5), (1, 3, 3.5), (0, 3, 4.0)] and len(a.rounds) == len(b.rounds) == 3
    # Ten tokens of prompts in one step that gives both first tokens; behind it three steps with six tokens.
    assert seconds(a.rounds[0][0]) == {"decode": 0.5, "prefill": 0.1, "ttft": 1.0, "e2el": 4.0}
    assert seconds(b.rounds[0][0]) == {"decode": 0.25, "prefill": 0.2, "ttft": 2.0, "e2el": 3.5}
    assert ratios(a, b) == {name: {"median": x, "low": x, "high": x} for name, x in (("decode", 2.0), ("prefill", 0.5), ("ttft", 0.5), ("e2el", 4 / 3.5))}
    assert differences(a, b) == {"answers": 6, "equal": 6, "differ": []}   # they say the same, as fast as they may


def one(outputs, ids=(), error=None):
    return Times(4, 0.0, outputs, token_ids=list(ids), error=error)


def test_a_ratio_is_of_the_same_rounds():
    def side(*ttfts):
        return Side([([one([(t, 1), (t + 1, 1)])], t + 1) for t in ttfts])
    found = ratios(side(1, 2, 6), side(2, 2, 2))
    assert found["ttft"] == {"median": 1.0, "low": 0.5, "high": 3.0} and found["decode"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert ratios(Side([([one([], error="no")], 1)]), side(1)) == dict.fromkeys(("decode", "prefill", "ttft", "e2el"))
    single = Side([([one([(1.0, 1)])], 1)])   # nothing was decoded behind the first token
    assert ratios(single, single)["decode"] is None and ratios(single, single)["ttft"]["median"] == 1


def test_where_answers_part():
    a = Side([([one([], [1, 2, 3]), one([], [4, 5, 6])], 1), ([one([], [7, 8]), one([], [], "no")], 1)])
    b = Side([([one([], [1, 2, 3]), one([], [4, 9, 6])], 1), ([one([], [7, 8, 9]), one([], [1])], 1)])
    assert differences(a, b) == {"answers": 3, "equal": 1, "differ": [{"round": 0, "request": 1, "at": 1}, {"round": 1, "request": 0, "at": 2}]}


def test_the_commands_of_the_page():
    same, other = re.findall(r"^k3cuda (bench compare .+)$", PAGE, re.M)
    found = k3_json(*same.split())
    shown = json.loads(re.findall(r"```json compare\n(.*?)```", PAGE, re.S)[0])
    assert shown.keys() == found.keys() and shown["backends"][0].keys() == found["backends"][0].keys() and shown["ratio"].keys() == found["ratio"].keys()
    assert found["tokens"] == {"answers": 4, "equal": 4, "differ": []}
    for ratio in found["ratio"].values():
        assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
    found = k3_json(*other.split())
    assert [(b["setup"]["draft_model"], b["setup"]["tp"]) for b in found["backends"]] == [(None, 1), ("tiny-random-draft", 2)]
    assert found["backends"][1]["requests"]["spec_decode_num_drafts"] > 0 and found["tokens"]["equal"] == found["tokens"]["answers"] == 1   # greedy: drafts change no token


def test_one_after_the_other_and_a_precision():
    found = k3_json("bench", "compare", "tiny-random", "--backends", "reference,ref:kv-cache-dtype=fp8", "--one-at-a-time", "--num-iters", 1, "--num-iters-warmup", 0,
                    "--output-len", 3, "--input-len", 4)
    assert [b["setup"]["kv_cache_dtype"] for b in found["backends"]] == ["f32", "fp8_e4m3"] and found["tokens"]["answers"] == 1
    assert [b["requests"]["completed"] for b in found["backends"]] == [1, 1]


@pytest.mark.parametrize("given, said", [
    ("reference", "wanted two backends"), ("reference,nix", "found 'nix', wanted auto, reference"), ("reference,reference:nix=1", "wanted FLAG=VALUE with one of tp"),
    ("reference,reference:tp", "wanted FLAG=VALUE"), ("reference,reference:tp=x", "not a valid integer"), ("reference,", "found no name")])
def test_what_is_refused(given, said):
    found = CliRunner().invoke(compare, ["tiny-random", "--backends", given])
    assert said in found.output + str(found.exception) and found.exit_code


def test_several_processes_are_told_the_way():
    said = k3("bench", "compare", "tiny-random", "--backends", "reference,reference", code=2, env={"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"}).stderr
    assert b"run k3cuda bench decode for each backend" in said
