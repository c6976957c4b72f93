"""Every stage against its reference function: at the real shapes of one rank of 16 and of 8, and on a small model.

Weights of the real shapes are drawn on the device; four layers hold every kind of layer. One rank runs alone with its
collectives looped back, so its numbers mean nothing, but every stage has real inputs that another stage made.
"""
from dataclasses import replace
from functools import partial
from importlib.resources import files
from types import SimpleNamespace

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cp = pytest.importorskip("cupy", reason="CuPy holds the device's memory; install k3cuda[cu13] or k3cuda[cu12]")

from models import PAGES_A_SLOT, headdims, step_rows  # noqa: E402
from stage_walk import Walk  # noqa: E402

from k3cuda.config import PAGE_SIZE, K3Config  # noqa: E402
from k3cuda.runtime.cuda_backend import CudaBackend  # noqa: E402
from k3cuda.runtime.cuda_driver import open_device  # noqa: E402
from k3cuda.runtime.cuda_kernels import compile_buckets  # noqa: E402
from k3cuda.runtime.cuda_synthetic import synthetic_weights  # noqa: E402
from k3cuda.stages import STAGES  # noqa: E402

# name -> (ranks, the one that runs, dtype of the cache, whether collectives ride on stores)
CASES = {"headdims": (2, 1, "bf16", False), "headdims-riding": (4, 2, "fp8_e4m3", True), "tp16": (16, 3, "bf16", True),
         "tp8": (8, 3, "fp8_e4m3", False)}
ROWS = (1, 8, 64)
ELIGIBLE = 64   # experts that can be chosen: 64 rows then share each 16 times over, and the host unpacks only so many
SLOTS = 36


def real_config() -> K3Config:
    """The release's widths in four layers: KDA + dense, KDA + MoE twice, MLA + MoE; a snapshot before each."""
    cfg = K3Config.from_json(files("k3cuda") / "data" / "kimi_k3")
    linear = replace(cfg.linear_attn_config, kda_layers=(1, 2, 3), full_attn_layers=(4,))
    return replace(cfg, num_hidden_layers=4, attn_res_block_size=1, linear_attn_config=linear)


def few_experts(plan, source, tp, rank, arch) -> dict:
    """Random weights whose router can only choose ELIGIBLE experts, the first and the last among them."""
    held = synthetic_weights(plan, source, tp, rank, arch=arch)
    experts = cp.asarray(np.linspace(0, source.cfg.num_experts - 1, ELIGIBLE).astype(int))
    for (_, stage), arrays in held.items():
        if stage == "route":
            arrays[0].view(cp.float32)[experts] += 1   # more than any score
    return held


def make(case) -> CudaBackend:
    tp, rank, kv, ride = CASES[case]
    options = {"only_rank": rank, "max_batch": SLOTS, "max_model_len": PAGES_A_SLOT * PAGE_SIZE, "kv_cache_dtype": kv, "ride": ride}
    if case.startswith("headdims"):
        return CudaBackend(headdims(), tp, **options)
    return CudaBackend(SimpleNamespace(cfg=real_config()), tp, **options, weights=partial(few_experts, arch=open_device().arch))


def walk(case) -> dict[int, dict]:
    """Rows of a step -> stage -> what was found. The steps are of one run, so later ones have longer contexts."""
    be = make(case)
    compile_buckets(be.plan, ROWS, be.kv_cache_dtype, be.device.arch, sms=be.device.sms, ride=be.ride)
    vocab, rng = be.cfg.vocab_size // be.tp, np.random.default_rng(5)
    lengths = dict.fromkeys(range(SLOTS), 0)

    def rows(*counts):
        """Tokens of this rank's part of the vocabulary, and one of the first rank's."""
        parts = []
        for slot, n in counts:
            ids = CASES[case][1] * vocab + rng.integers(0, vocab, n)
            parts.append((slot, lengths[slot], ids))
            lengths[slot] += n
        step = step_rows(*parts)
        if len(step) > 1:
            step.token_ids[len(step) // 2] %= vocab
        return step

    try:
        pages = rng.permutation(be.num_pages).reshape(SLOTS, PAGES_A_SLOT)
        for slot in range(SLOTS):
            be.open_slot(slot, pages[slot])
        for memory in be.memories:
            memory.session["mla_cache"].fill(0xFF)   # NaN wherever no token has been
        singles = [(slot, 1) for slot in range(4, SLOTS)]
        for history in ([(2, 47), (3, 17)], [(2, 23), (1, 3), *singles]):   # slot 2 ends in its second page
            step = rows(*history)
            be.step(step)
            be.commit(np.ones(len(step), bool))
        walker, out = Walk(be), {}
        for counts in ([(2, 1)], [(1, 3), (0, 1), (2, 4)], [(2, 9), (0, 20), (3, 3), *singles]):
            before = dict(lengths)
            step = rows(*counts)
            accepted = np.ones(len(step), bool)
            for at, (slot, n) in zip(np.cumsum([n for _, n in counts]), counts):
                if n > 1:   # the last row is a draft that is refused
                    accepted[at - 1] = False
                    lengths[slot] = before[slot] + n - 1
            out[len(step)] = walker.step(step) | walker.commit(accepted)
        return out
    finally:
        be.close()


@pytest.fixture(scope="module", params=CASES)
def found(request):
    return walk(request.param)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("stage", [s for s in STAGES if s.where not in ("tap", "mla_split")], ids=lambda s: s.name)
def test_stage(found, stage, rows):
    """Complete and right from its declared inputs alone, and not a byte outside its declared outputs. Taps and caches that ranks share have tests of their own."""
    assert not found[rows][stage.name].problems
