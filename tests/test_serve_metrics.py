"""Metrics of hand-made events on a fake clock equal what is computed by hand."""
from types import SimpleNamespace

import pytest
import serving  # noqa: F401, skips where the extra is missing
from command import ROOT

from k3cuda.runtime.request import Event, Speculative, Stats
from k3cuda.runtime.sampling import Drawn
from k3cuda.serve.metrics import SECONDS, Metrics


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def page():
    """Lines of a server's page, name to value, after two requests that ended and one that was aborted."""
    clock = Clock()
    metrics = Metrics('a "model"\\', clock)
    scheduler = SimpleNamespace(running=[None] * 2, free=(1, 25), num_pages=100)
    metrics.engine = SimpleNamespace(scheduler=scheduler, prefixes=SimpleNamespace(queried=90, hit=64),
                                     backend=SimpleNamespace(counts=SimpleNamespace(steps={"reference": 7})))
    for name in "abcde":
        metrics.arrived(name)
    drafts = Speculative(3, 4, 12, 6, 0.5, 2.5, (0.75, 0.5, 0.25))
    for name, seconds, event in (
            ("a", 2.5, Event("a", (Drawn(1), Drawn(2)), finish_reason="stop", stats=Stats(10, 3, 0, 0.25, 0.02, 10.0, 100.0, 32.0, drafts, 6))),
            ("b", 0.5, Event("b", (Drawn(1),), finish_reason="length", stats=Stats(5, 1, 0, 2.0, 0.0, None, None, None, speculative=drafts))),
            ("c", 9.0, Event("c", finish_reason="abort", stats=Stats(7, 0, 0, None, None, None, None, None)))):
        metrics.event(Event(name, (Drawn(9),)))
        clock.now += seconds
        metrics.event(event)
        metrics.left(name)
    return metrics.text().splitlines()


def test_values(page):
    lines = dict(line.replace('model_name="a \\"model\\"\\\\"', "").replace("{}", "").replace("{,", "{").rsplit(" ", 1) for line in page if line[0] != "#")
    want = {"vllm:num_requests_running": 2, "vllm:num_requests_waiting": 0, "vllm:kv_cache_usage_perc": 0.75, "vllm:prompt_tokens_total": 15,
            "vllm:generation_tokens_total": 6, "vllm:prefix_cache_queries_total": 90, "vllm:prefix_cache_hits_total": 64,
            "vllm:spec_decode_num_drafts_total": 8, "vllm:spec_decode_num_draft_tokens_total": 24, "vllm:spec_decode_num_accepted_tokens_total": 12,
            'vllm:request_success_total{finished_reason="stop"}': 1, 'vllm:request_success_total{finished_reason="abort"}': 1,
            "vllm:time_to_first_token_seconds_sum": 2.25, "vllm:time_to_first_token_seconds_count": 2, 'vllm:time_to_first_token_seconds_bucket{le="0.1"}': 0,
            'vllm:time_to_first_token_seconds_bucket{le="0.25"}': 1, 'vllm:time_to_first_token_seconds_bucket{le="2.5"}': 2,
            "vllm:request_time_per_output_token_seconds_sum": 0.01, "vllm:request_time_per_output_token_seconds_count": 1,
            # 4 of 10 tokens were run, at 32 a second: 1/8 s of the 1/4 s to the first token.
            "vllm:request_prefill_time_seconds_sum": 0.125, "vllm:request_queue_time_seconds_sum": 0.125, "vllm:request_queue_time_seconds_count": 1,
            "vllm:request_decode_time_seconds_sum": 0.02, "vllm:request_prompt_tokens_sum": 15, "vllm:request_generation_tokens_sum": 4,
            'vllm:request_prompt_tokens_bucket{le="5"}': 1, 'vllm:request_prompt_tokens_bucket{le="10"}': 2, "vllm:num_preemptions_total": 0,
            "vllm:e2e_request_latency_seconds_sum": 2.5 + 3.0, "vllm:e2e_request_latency_seconds_count": 2, 'k3cuda:steps_total{decode_backend="reference"}': 7}
    want |= {f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{p}"}}': n for p, n in enumerate((6, 4, 2))}
    assert {name: float(lines[name]) for name in want} == want
    buckets = [int(lines[f'vllm:e2e_request_latency_seconds_bucket{{le="{end}"}}']) for end in (*SECONDS, "+Inf")]
    assert buckets == sorted(buckets) and buckets[-1] == 2


def test_every_name_is_on_the_docs_page_and_has_help_and_type(page):
    text = (ROOT / "docs/serve.md").read_text(encoding="utf-8")
    kinds = [line.split()[2:] for line in page if line.startswith("# TYPE")]
    assert all(f"`{name}`" in text and kind in ("counter", "gauge", "histogram") for name, kind in kinds) and len(kinds) == len({n for n, _ in kinds})
    assert [line.split()[2] for line in page if line.startswith("# HELP")] == [name for name, _ in kinds]
    assert {line.split("{")[0].removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for line in page if line[0] != "#"} <= {n for n, _ in kinds}
