"""Percentiles, TPOT, ITL and interactivity against values computed by hand, on clocks that are not the machine's."""
import json
import re

import numpy as np
import pytest
from command import ROOT, k3, k3_json
from scripted import fake  # noqa: F401
from test_draft_config import INFERACT

from k3cuda import SamplingParams
from k3cuda.cli.bench_table import end, failures
from k3cuda.draft_config import RELEASED_DRAFT
from k3cuda.errors import BenchmarkError
from k3cuda.runtime.machine import probe_driver
from k3cuda.runtime.request import Speculative
from k3cuda.runtime.request_times import Times, decoding, measure, percentiles, summary


def test_percentiles_interpolate_between_the_closest_ranks():
    assert percentiles([10.0, 20.0, 30.0, 40.0]) == {50: 25.0, 90: pytest.approx(37.0), 99: pytest.approx(39.7)}   # places 1.5, 2.7, 2.97 of 0 to 3
    assert percentiles([], (90,)) == {90: None} and percentiles([3.0]) == {50: 3.0, 90: 3.0, 99: 3.0}


def test_one_request_by_hand():
    t = Times(5, sent=10.0, outputs=[(10.5, 1), (10.75, 3), (11.5, 2)])   # three steps, six tokens
    assert (t.ttft, t.e2el, t.tokens, t.itl) == (0.5, 1.5, 6, [0.25, 0.75])
    assert t.tpot == 1.0 / 5   # of the five tokens after the first; a gap is a step's time
    assert Times(5, 10.0, [(10.5, 1)]).tpot is None


def test_summary_by_hand():
    times = [Times(4, 0.0, [(1.0, 1), (2.0, 1), (3.0, 1)]),   # TPOT 1, E2EL 3 for 3 tokens
             Times(4, 0.0, [(2.0, 1), (2.5, 2)]),             # TPOT 0.25, E2EL 2.5 for 3 tokens
             Times(4, 0.0, [(4.0, 1)]),                       # no TPOT, E2EL 4 for 1 token
             Times(9, 0.0, [(1.0, 1)], error="failed")]
    found = summary(times, 8.0)
    want = {"duration": 8.0, "completed": 3, "failed": 1, "total_input_tokens": 12, "total_cached_tokens": None, "total_output_tokens": 7, "request_throughput": 3 / 8,
            "output_throughput": 7 / 8, "total_token_throughput": 19 / 8,
            "mean_ttft_ms": 7000 / 3, "median_ttft_ms": 2000.0, "p90_ttft_ms": 3600.0, "p99_ttft_ms": 3960.0,
            "mean_tpot_ms": 625.0, "median_tpot_ms": 625.0, "p90_tpot_ms": 925.0, "p99_tpot_ms": 992.5,
            "mean_itl_ms": 2500 / 3, "median_itl_ms": 1000.0, "p90_itl_ms": 1000.0, "p99_itl_ms": 1000.0,
            "mean_e2el_ms": 9500 / 3, "median_e2el_ms": 3000.0, "p90_e2el_ms": 3800.0, "p99_e2el_ms": 3980.0,
            "p50_interactivity": 1.6, "p90_interactivity": 1 / 0.925, "p99_interactivity": 1 / 0.9925,
            # seconds a token: 2.5 / 3, 1, 4; places 1, 1.8, 1.98
            "p50_e2e_normalized_interactivity": 1.0, "p90_e2e_normalized_interactivity": 1 / 3.4, "p99_e2e_normalized_interactivity": 1 / 3.94,
            "spec_decode_num_drafts": 0, "spec_decode_draft_tokens": 0, "spec_decode_accepted_tokens": 0, "spec_decode_acceptance_rate": None,
            "spec_decode_acceptance_length": None}
    assert found.pop("spec_decode_per_position_acceptance_rates") == []
    assert found == pytest.approx(want)


def test_draft_counts_are_those_of_all_steps():
    def of(steps, proposed, accepted, length, per_position):
        return Times(1, 0.0, [(1.0, 1)], Speculative(2, steps, proposed, accepted, accepted / proposed, length, per_position))

    found = summary([of(1, 2, 2, 3.0, (1.0, 1.0)), of(3, 6, 0, 1.0, (0.0, 0.0)), Times(1, 0.0, [(1.0, 1)], Speculative(2, 0, 0, 0, None, None, None))], 1.0)
    assert (found["spec_decode_num_drafts"], found["spec_decode_draft_tokens"], found["spec_decode_accepted_tokens"]) == (4, 8, 2)
    assert found["spec_decode_acceptance_rate"] == 0.25 and found["spec_decode_acceptance_length"] == 1.5
    assert found["spec_decode_per_position_acceptance_rates"] == [0.25, 0.25]


def test_nothing_done_has_no_times():
    found = summary([Times(1, 0.0, error="failed")], 2.0)
    assert found["failed"] == 1 and found["output_throughput"] == 0 and found["mean_ttft_ms"] is None and found["p90_interactivity"] is None


def test_decoding_begins_where_the_last_request_has_its_first_token():
    times = [Times(4, 0.0, [(1.0, 1), (2.0, 3), (2.5, 2), (4.0, 1)]),   # of it 3 tokens come behind 2.0
             Times(4, 0.0, [(2.0, 1), (2.5, 4), (4.0, 2), (4.25, 1)]),   # and of this one 7
             Times(4, 0.0, [(3.0, 1)], error="failed")]
    assert decoding(times) == {"ms": 500.0, "decode_steps": 3, "decode_tokens": 10, "tokens_per_second": 10 / 2.25}
    assert decoding(times[:1]) == {"ms": 1000.0, "decode_steps": 3, "decode_tokens": 6, "tokens_per_second": 2.0}
    for nothing in ([Times(4, 0.0, [(1.0, 1)])], times[2:]):
        assert decoding(nothing) == {"ms": None, "decode_steps": 0, "decode_tokens": 0, "tokens_per_second": None}


def steps_of(llm):
    """A clock on which every step takes a second."""
    return lambda: float(len(llm.backend.row_counts))


def test_requests_on_a_clock_of_steps(fake):  # noqa: F811
    llm = fake(num_slots=2)
    found, seconds = measure(llm, np.ones((3, 5), int), [SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)] * 3, steps_of(llm))
    # The prompts of two are one step, whose last row gives the first token; the third starts when they have ended.
    assert [t.outputs for t in found] == [[(1, 1), (2, 1), (3, 1), (4, 1)]] * 2 + [[(5, 1), (6, 1), (7, 1), (8, 1)]] and seconds == 8
    numbers = summary(found, seconds)
    assert (numbers["median_ttft_ms"], numbers["p90_ttft_ms"], numbers["p90_e2el_ms"]) == pytest.approx((1000, 4200, 7200))
    assert numbers["p99_tpot_ms"] == 1000 and numbers["p90_interactivity"] == 1 and numbers["output_throughput"] == 1.5 and not llm._has_work


def test_failed_requests_are_told_apart(fake):  # noqa: F811
    llm = fake(bad=lambda tokens: tokens[0] == 2 and len(tokens) > 6)
    found, _ = measure(llm, np.array([[1] * 5, [2] * 5]), [SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)] * 2, steps_of(llm))
    assert found[0].error is None and found[0].tokens == 4 and "finite" in found[1].error


def test_failures_make_code_8_unless_they_are_allowed():
    times = [Times(1, 0.0, error=error) for error in ("no room", None, "lost", "no room")]
    assert failures(times) == [{"reason": "no room", "requests": 2}, {"reason": "lost", "requests": 1}]
    end(times, 3)
    with pytest.raises(BenchmarkError, match="3 of 4 requests failed, the first one: no room") as e:
        end(times, 2)
    assert e.value.code == 8


@pytest.mark.parametrize("command, requests", [("latency", 4), ("throughput", 4)])
def test_the_commands_of_the_page(command, requests):
    page = (ROOT / "docs/bench.md").read_text(encoding="utf-8")
    words, = re.findall(rf"^k3cuda (bench {command} .+)$", page, re.M)
    found = k3_json(*words.split())
    shown, = re.findall(rf"```json {command}\n(.*?)```", page, re.S)
    numbers = found["requests"]
    assert set(json.loads(shown)) == set(found) and (numbers["completed"], numbers["total_output_tokens"]) == (requests, 8 * requests)
    assert 0 < numbers["median_ttft_ms"] < numbers["median_e2el_ms"]
    for name in numbers:
        assert re.sub(r"^(mean|median|p\d+)_", "", name) in page, name


def test_a_flag_that_is_wrong_is_told_before_a_model_is_looked_for():
    assert b"temperature: found 3" in k3("bench", "latency", "/no/such", "-t", 3, code=2).stderr


@pytest.mark.parametrize("flags, rows, length", [
    (["--batch", "1,3", "--tp", 2], [1, 3], None),
    (["--batch", "1,4", "--draft-model", "tiny-random-draft", "--draft-tokens", 7, "--acceptance-length", 6], [8, 32], 6.0)], ids=["plain", "drafts"])
def test_decoding_alone(flags, rows, length):
    """Synthetic acceptance of length 6 with 7 drafts gives 6 tokens in every step: of 18 behind the first one three steps."""
    found = k3_json("bench", "decode", "tiny-random", "--output-len", 19, "--temperature", 0, *flags)
    assert [s["rows"] for s in found["steps"]] == rows and found["command"].startswith("k3cuda bench decode tiny-random") and found["gpu"] is None
    page = (ROOT / "docs/bench.md").read_text(encoding="utf-8")
    for s in found["steps"]:
        assert s["decode_tokens"] == 18 * s["batch"] and s["decode_steps"] == (3 if length else 18) and s["tokens_per_second"] > 0 and s["ms"] > 0
        assert s["requests"]["spec_decode_acceptance_length"] == length and s["requests"]["total_input_tokens"] == s["batch"]
        assert s["requests"]["median_tpot_ms"] > 0 and s["requests"]["median_ttft_ms"] > 0
        assert all(f"`{name}`" in page for name in s)
    assert found["setup"]["acceptance_length"] == length
    shown, = re.findall(r"```json decode\n(.*?)```", page, re.S)
    assert set(json.loads(shown)) == set(found)


def test_a_batch_that_does_not_fit_with_its_drafts_is_refused():
    done = k3("bench", "decode", "tiny-random", "--batch", "1,16", "--draft-model", "tiny-random-draft", code=2)
    assert b"max_batch: found 16, but with 7 drafts" in done.stderr


@pytest.mark.parametrize("flags, code, words", [
    ([], 5, b"no NVIDIA driver"), (["--draft-tokens", 7, "--acceptance-length", 6, "--decode-backend", "latency_specialized"], 5, b"no NVIDIA driver"),
    (["--decode-backend", "reference"], 2, b"--decode-backend: found 'reference' without a MODEL"), (["--ranks", "processes"], 2, b"--ranks: found 'processes'"),
    (["--draft-model", "x"], 2, b"--draft-model: found 'x'"), (["--rank", 16], 2, b"--rank: found 16, wanted 0 to 15")])
def test_one_rank_without_a_model(flags, code, words):
    if code == 5 and probe_driver().gpus:
        pytest.skip("there is a GPU")
    assert words in k3("bench", "decode", *flags, code=code).stderr


def test_the_draft_that_is_made_for_it_is_a_public_one():
    assert json.loads(RELEASED_DRAFT.read_text(encoding="utf-8")) == INFERACT
