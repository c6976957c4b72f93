"""`bench decode` without a MODEL, on a small one: requests run, drafts are accepted by the dice, and every part of a step is timed."""
import numpy as np
import pytest

pytestmark = pytest.mark.gpu
pytest.importorskip("cupy", reason="CuPy holds the device's memory; install k3cuda[cu13] or k3cuda[cu12]")

from models import headdims  # noqa: E402

from k3cuda import LLM, SamplingParams  # noqa: E402
from k3cuda.runtime.cuda_decode import DecodeBench  # noqa: E402
from k3cuda.runtime.drafting import Drafting  # noqa: E402
from k3cuda.runtime.machine import LATENCY_SPECIALIZED, STANDARD  # noqa: E402
from k3cuda.runtime.made_draft import MadeDraft, made_draft_json  # noqa: E402
from k3cuda.runtime.request_times import decoding, measure, summary  # noqa: E402

CFG, TOKENS = headdims().cfg, 32


@pytest.mark.parametrize("drafts, batch, backend", [(0, 2, STANDARD), (7, 2, STANDARD), (0, 2, LATENCY_SPECIALIZED), (7, 1, LATENCY_SPECIALIZED)])
def test_requests_and_parts(drafts, batch, backend):
    drafting = Drafting(MadeDraft(made_draft_json(CFG), CFG), drafts, acceptance_length=6.0) if drafts else None
    bench = DecodeBench(CFG, 4, 0, "fp8_e4m3", drafting, batch, 1 + TOKENS, specialized=backend == LATENCY_SPECIALIZED)
    bench.prepare()
    parts = bench.parts(batch, 1 + TOKENS // 2)
    assert parts["rows"] == batch * (drafts + 1) and parts["ms"] >= parts["floor_ms"] > 0 and parts["decode_backend"] == backend
    if backend == STANDARD:
        assert parts["checks"]["parts_read"] == 4
    else:
        assert ("taps" in parts["checks"]["same_bytes_left"]) == bool(drafts)
    if drafts:
        us = [parts[name] for name in ("context_us", "draft_us", "accept_us")]
        assert min(us) > 1 and parts["draft_share"] == pytest.approx(sum(us) / parts["ms"] / 1e3, rel=0.01)
    with LLM(bench.model) as llm:
        graphs = lambda: len(llm.backend._graphs) + (len(llm.backend.draft._graphs) if drafts else 0)   # noqa: E731
        captured = graphs()
        times, seconds = measure(llm, np.array([[3], [4]])[:batch], [SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=i) for i in range(batch)])
        assert graphs() == captured, "a request waited for a graph"
        found, rates = summary(times, seconds), decoding(times)
        assert found["failed"] == 0 and found["total_output_tokens"] == batch * TOKENS and rates["tokens_per_second"] > 0
        assert found["spec_decode_acceptance_length"] == (6.0 if drafts else None) and set(llm.backend.counts.steps) == {backend}
