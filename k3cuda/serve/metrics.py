"""What the server counts, as Prometheus text under the names that vLLM's dashboards ask for. Written by the engine thread alone."""
import bisect
import time
from collections import Counter

from ..runtime.request import Event, Speculative

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)   # upper ends of buckets
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000)
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Histogram:
    """Counts of values up to each of `ends`, and their sum."""

    def __init__(self, ends=SECONDS):
        self.ends, self.counts, self.sum = ends, [0] * (len(ends) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.ends, value)] += 1
        self.sum += value

    def lines(self, name: str, labels: str):
        total = 0
        for end, count in zip((*self.ends, "+Inf"), self.counts):
            total += count
            yield f'{name}_bucket{{{labels},le="{end}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self.sum:g}"
        yield f"{name}_count{{{labels}}} {total}"


class Metrics:
    """Counters of one server.

    Args:
        model_name: the label of every line.
        clock: seconds, monotonic.

    Attributes:
        engine: what the gauges look at; None until it is open.
    """

    def __init__(self, model_name: str, clock=time.monotonic):
        self.engine, self._clock = None, clock
        self._labels = f'model_name="{model_name.translate(_ESCAPES)}"'
        self._arrived: dict[str, float] = {}
        self._counts, self._finished, self._accepted_at = Counter(), Counter(), Counter()
        self.ttft, self.tpot, self.e2e, self.queue, self.prefill, self.decode = (Histogram() for _ in range(6))
        self.prompt, self.generated = Histogram(TOKENS), Histogram(TOKENS)

    def arrived(self, request_id: str) -> None:
        self._arrived[request_id] = self._clock()

    def left(self, request_id: str) -> None:
        self._arrived.pop(request_id, None)

    def event(self, event: Event) -> None:
        self._counts["generation_tokens"] += len(event.drawn)
        if event.finish_reason is None:
            return
        self._finished[event.finish_reason] += 1
        stats = event.stats
        if stats.ttft_s is not None:   # it had a slot: its prompt was run
            self._counts["prompt_tokens"] += stats.prompt_tokens
            self.ttft.add(stats.ttft_s)
            self.prompt.add(stats.prompt_tokens)
            self.generated.add(stats.completion_tokens)
            self.decode.add(stats.decode_s)
            if stats.prefill_tok_per_s is not None:
                prefill_s = (stats.prompt_tokens - stats.cached_tokens) / stats.prefill_tok_per_s
                self.prefill.add(prefill_s)
                self.queue.add(max(0.0, stats.ttft_s - prefill_s))
        if stats.tpot_ms is not None:
            self.tpot.add(stats.tpot_ms / 1e3)
        if stats.speculative is not None:
            self._speculated(stats.speculative)
        if event.finish_reason in ("stop", "length"):
            self.e2e.add(self._clock() - self._arrived[event.request_id])

    def _speculated(self, drafts: Speculative) -> None:
        self._counts.update(drafts=drafts.steps, draft_tokens=drafts.proposed, accepted_tokens=drafts.accepted)
        for position, share in enumerate(drafts.per_position or ()):
            self._accepted_at[position] += round(share * drafts.steps)

    def text(self) -> str:
        """The whole page."""
        lines = []

        def metric(name: str, kind: str, what: str, samples) -> None:
            lines.extend([f"# HELP {name} {what}", f"# TYPE {name} {kind}", *samples])

        scheduler, prefixes = self.engine.scheduler, self.engine.prefixes
        gauges = {
            "vllm:num_requests_running": ("requests that hold a slot", len(scheduler.running)),
            "vllm:num_requests_waiting": ("requests that wait for one", max(0, len(self._arrived) - len(scheduler.running))),
            "vllm:kv_cache_usage_perc": ("share of the cache pages that is held, 0 to 1", round(1 - scheduler.free[1] / scheduler.num_pages, 6)),
        }
        for name, (what, value) in gauges.items():
            metric(name, "gauge", what, [f"{name}{{{self._labels}}} {value}"])
        counters = {"vllm:prompt_tokens_total": ("tokens of prompts", self._counts["prompt_tokens"]),
                    "vllm:generation_tokens_total": ("tokens generated", self._counts["generation_tokens"]),
                    "vllm:prefix_cache_queries_total": ("prompt tokens that were looked for among stored prefixes", prefixes.queried if prefixes is not None else 0),
                    "vllm:prefix_cache_hits_total": ("those found", prefixes.hit if prefixes is not None else 0),
                    "vllm:num_preemptions_total": ("requests moved out while they ran: none ever is", 0),
                    "vllm:spec_decode_num_drafts_total": ("verify steps of requests that ended", self._counts["drafts"]),
                    "vllm:spec_decode_num_draft_tokens_total": ("drafts that were verified", self._counts["draft_tokens"]),
                    "vllm:spec_decode_num_accepted_tokens_total": ("drafts that stood", self._counts["accepted_tokens"])}
        for name, (what, value) in counters.items():
            metric(name, "counter", what, [f"{name}{{{self._labels}}} {value}"])
        metric("vllm:spec_decode_num_accepted_tokens_per_pos_total", "counter", "drafts that stood, by their place",
               [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{self._labels},position="{p}"}} {n}' for p, n in sorted(dict(self._accepted_at).items())])
        metric("vllm:request_success_total", "counter", "requests that ended, by how",
               [f'vllm:request_success_total{{{self._labels},finished_reason="{reason}"}} {n}' for reason, n in sorted(dict(self._finished).items())])
        for name, what, histogram in (("vllm:time_to_first_token_seconds", "arrival to first token", self.ttft),
                                      ("vllm:request_time_per_output_token_seconds", "decode time a token after the first", self.tpot),
                                      ("vllm:e2e_request_latency_seconds", "arrival to end", self.e2e),
                                      ("vllm:request_queue_time_seconds", "arrival to a slot", self.queue),
                                      ("vllm:request_prefill_time_seconds", "slot to first token", self.prefill),
                                      ("vllm:request_decode_time_seconds", "first token to last", self.decode),
                                      ("vllm:request_prompt_tokens", "tokens of a prompt", self.prompt),
                                      ("vllm:request_generation_tokens", "tokens of an answer", self.generated)):
            metric(name, "histogram", what, histogram.lines(name, self._labels))
        metric("k3cuda:steps_total", "counter", "steps of the engine, by decode backend",
               [f'k3cuda:steps_total{{{self._labels},decode_backend="{name}"}} {n}' for name, n in sorted(dict(self.engine.backend.counts.steps).items())])
        return "\n".join(lines) + "\n"
