"""Whether a way to run a model answers as well as another: the same held-out problems, and an exact sign test on those whose score changed."""
import itertools

from make_demo_page import ANSWERS   # test_demo.py has put scripts on the path

from k3cuda import LLM, SamplingParams
from k3cuda.cli.eval_results import read_results
from k3cuda.runtime.demo_tasks import held_out_lines
from k3cuda.runtime.evaluation import compare, read_items, run
from k3cuda.runtime.named_models import DEMO_DRAFTS
from k3cuda.runtime.scorers import SCORERS
from k3cuda.weights import LEGAL_TP

ALPHA = 0.05   # that any of all configurations is called another by chance
CACHES, DRAFTS = ("bf16", "fp8_e4m3"), (None, *DEMO_DRAFTS)
# Backend, cache, ranks, draft. Ranks of one launch are groups of its blocks: two of them stand for all.
CONFIGURATIONS = [*itertools.product(("standard",), CACHES, LEGAL_TP, DRAFTS), *itertools.product(("latency_specialized",), CACHES, (1,), DRAFTS),
                  ("latency_specialized", "bf16", 2, None)]
CONTEXT = 2304   # the longest prompt has 2,000 tokens
SEQUENCES, FEW = 32, 8   # of a step; few where each has a block of rows to verify, or a step in one launch shall have them all


def stored() -> list[dict]:
    """The reference's answers, as scripts/install_demo.py left them."""
    return list(read_results(str(ANSWERS))[1].values())


def answers(model: str, count: int, **options) -> list[dict]:
    """Greedy answers to the first `count` held-out problems, as `k3cuda eval MODEL demo` has them; `options` of LLM."""
    batch = FEW if options.get("draft_model") or options.get("decode_backend") == "latency_specialized" else SEQUENCES
    scorer, params = SCORERS["exact"], SamplingParams(temperature=0)
    items = read_items(held_out_lines(count), "demo", scorer)
    with LLM(model, **{"max_model_len": CONTEXT, "max_batch": batch} | options) as llm:
        return list(run(llm, [(item, 0) for item in items], params, 0, "none", scorer, 2 * batch))


def verdict(ours: list[dict], theirs: list[dict], among: int = len(CONFIGURATIONS)) -> str | None:
    """What is wrong with `ours`, one of so many configurations that are tested: answers that failed, or scores that a sign test finds to differ
    (two-sided, Bonferroni)."""
    if failed := [a for a in ours if a["error"] is not None]:
        return f"{len(failed)} answers failed, the first: {failed[0]['error']}"
    found = compare(ours, theirs)
    if found["items"] != len(ours):
        return f"{found['items']} of {len(ours)} answers are to problems of both"
    if found["sign_test_p"] is not None and found["sign_test_p"] < ALPHA / among:
        return f"{found['better']} better, {found['worse']} worse of {found['items']}, p = {found['sign_test_p']:.2g}; wanted {ALPHA / among:.2g} or more"
    return None
