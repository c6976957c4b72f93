"""Small models that have a name, in one launch: the standard path's tokens, without a draft and with drafts that read either stream."""
from functools import partial
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.gpu
pytest.importorskip("cupy", reason="CuPy holds the device's memory; install k3cuda[cu13] or k3cuda[cu12]")

from k3cuda import LLM  # noqa: E402
from k3cuda.cli.model_argument import config_of, draft_config_of  # noqa: E402
from k3cuda.draft_plan import build_draft_plan  # noqa: E402
from k3cuda.plan import build_plan  # noqa: E402
from k3cuda.runtime.cuda_driver import open_device  # noqa: E402
from k3cuda.runtime.cuda_kernels import compile_accept, compile_bucket, compile_step_io, draft_buckets, side_by_side  # noqa: E402
from k3cuda.runtime.drafting import Drafting  # noqa: E402
from k3cuda.runtime.launch_program import BUCKETS, TOO_MANY_ROWS, compile_launch  # noqa: E402
from k3cuda.runtime.machine import LATENCY_SPECIALIZED, STANDARD  # noqa: E402
from k3cuda.runtime.sampling import SamplingParams  # noqa: E402

CASES = [("demo", None, "bf16"), ("demo", None, "fp8_e4m3"), ("demo", "demo-draft", "bf16"), ("demo", "demo-draft-gqa", "bf16"), ("tiny-random", None, "bf16")]
QUESTION, TOKENS = [{"role": "user", "content": "Sort: 31 4 15 92 65"}], 24
PROMPT = 64   # rows of its bucket


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """All kernels, side by side: of the prompt's rows, and of a step's, which are one, or drafts and one; towards the end there are fewer drafts."""
    device, jobs = open_device(), []
    for name, draft, kv in CASES:
        cfg, buckets = config_of(name), BUCKETS if draft else (1,)
        drafting = Drafting(SimpleNamespace(cfg=draft_config_of(draft, cfg))) if draft else None
        plan = build_plan(cfg, 1, drafting and drafting.taps)
        jobs += [partial(compile_launch, plan, rows, kv, device.arch, sms=device.sms) for rows in buckets]
        jobs += [partial(compile_bucket, plan, rows, kv, device.arch, sms=device.sms) for rows in (*buckets, PROMPT)]
        jobs.append(partial(compile_step_io, cfg.vocab_size, device.arch))
        if drafting:
            own = build_draft_plan(drafting.source.cfg, 1, drafting.num_drafts, drafting.block_rows)
            jobs += [partial(compile_bucket, own, rows, "bf16", device.arch, sms=device.sms) for rows in draft_buckets(own, (*buckets, PROMPT))]
            jobs.append(partial(compile_accept, cfg.vocab_size, device.arch))
    side_by_side(jobs)


@pytest.mark.parametrize("name, draft, kv", CASES)
def test_the_tokens_of_the_standard_path(name, draft, kv):
    """The prompt has more rows than one launch takes: its step runs stage by stage. Drafts read what either left them, and are accepted alike."""
    answers = {}
    for way in (STANDARD, LATENCY_SPECIALIZED):
        with LLM(name, draft, decode_backend=way, kv_cache_dtype=kv, max_batch=1, max_model_len=256) as llm:
            found, counts = llm.chat(QUESTION, SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True), reasoning_effort="none"), llm.backend.counts
            answers[way] = found.token_ids, found.stats.speculative
    print(f"\n{name} {draft} {kv}: {dict(counts.steps)} {found.stats.speculative}")
    assert answers[STANDARD] == answers[LATENCY_SPECIALIZED] and len(found.token_ids) == TOKENS and 8 < len(found.prompt_token_ids) <= PROMPT
    assert counts.steps[STANDARD] == 1 and counts.reasons == {TOO_MANY_ROWS: 1}
    assert counts.steps[LATENCY_SPECIALIZED] >= (found.stats.speculative.steps if draft else TOKENS - 1)
    assert draft is None or found.stats.speculative.accepted
