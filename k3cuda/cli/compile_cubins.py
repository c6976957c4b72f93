"""What `k3cuda compile` compiles: the plans, and the cubins of each."""
from functools import partial
from types import SimpleNamespace
from typing import Callable, NamedTuple

from ..buffers import KV_BYTES
from ..draft_plan import build_draft_plan
from ..emit import no_kernels
from ..emit_sizes import GPU_SMS, H200_SMS, ROW_BUCKETS
from ..errors import ConfigError, PlanError, UsageError
from ..plan import build_plan
from ..runtime.cuda_kernels import bucket_of, compile_accept, compile_bucket, compile_moves, compile_step_io, draft_buckets, no_sampler
from ..runtime.drafting import Drafting, check_options
from ..runtime.launch_program import BUCKETS, LOOPBACK, compile_launch, launched, misfit
from ..runtime.machine import VIRTUAL
from .model_argument import draft_config_of
from .output import say

STEP, TAPS, DRAFT = "step", "step with taps", "draft"   # parts: plans that need a cubin a bucket
LAUNCHED = {STEP: "step in one launch", TAPS: "step with taps in one launch"}


class Cubin(NamedTuple):
    """What is compiled at once: what --json says of it, and how, given the options of compile_cuda."""

    keys: dict
    compile: Callable

    def __str__(self):
        arch, sms, rows, kv, part = self.keys.values()
        return f"{arch}, {part}" + ("" if rows is None else f", {sms} multiprocessors, {rows} rows, {kv}")


def draft_plans(cfg, tp: int, dcp: int, draft_model: str | None, num_drafts: int | None, draft_rows: str | None) -> dict:
    """Part -> plan of what a draft model adds: a step of the model that leaves it taps, and its own."""
    given = check_options({"num_drafts": num_drafts, "draft_rows": draft_rows}, draft_model is not None)
    if draft_model is None:
        return {}
    draft = draft_config_of(draft_model, cfg)
    if why := no_kernels(draft):
        raise ConfigError(f"--draft-model {draft_model}: {why}", "it runs with --decode-backend reference alone")
    drafting = Drafting(SimpleNamespace(cfg=draft), **given)
    return {TAPS: build_plan(cfg, tp, drafting.taps, dcp), DRAFT: build_draft_plan(draft, tp, drafting.num_drafts, drafting.block_rows)}


def buckets_of(rows: list[int] | None, most: int) -> list[int]:
    if rows and max(rows) > most:
        raise UsageError(f"--rows: found {max(rows)}, wanted at most {most} where ranks are processes", f"leave it out, or give --ranks {VIRTUAL}")
    return sorted({bucket_of(r) for r in rows or ROW_BUCKETS if r <= most})


def cubins_of(plans: dict, archs, sms, buckets, kv_cache_dtypes, ride: bool) -> list[Cubin]:
    """Every plan's for every kind of GPU, and an architecture's that know only the vocabulary. `ride`: as compile_bucket; a step in one launch has no other
    collectives than those that ride."""
    def keys(part, arch, sms=None, rows=None, kv=None):
        return {"arch": arch, "sms": sms, "rows": rows, "kv_cache_dtype": kv, "part": part}

    cubins, vocab_size = [], plans[STEP].cfg.vocab_size
    launches = [(LAUNCHED[part], plan, rows) for part, plan in plans.items() if part in LAUNCHED for rows in BUCKETS if rows in buckets] if ride and not _misfit(plans[STEP]) else []
    for arch in archs:
        cubins += [Cubin(keys(part, arch, n, rows, kv), partial(compile_launch, plan, rows, kv, arch, sms=n))
                   for n in sms or GPU_SMS[arch] for kv in kv_cache_dtypes for part, plan, rows in launches]
        for part, plan in plans.items():
            is_draft = part == DRAFT   # whose own cache is BF16
            cubins += [Cubin(keys(part, arch, n, rows, kv), partial(compile_bucket, plan, rows, kv, arch, sms=n, ride=ride))
                       for n in sms or GPU_SMS[arch] for kv in (["bf16"] if is_draft else kv_cache_dtypes)
                       for rows in (draft_buckets(plan, buckets) if is_draft else buckets)]
        cubins.append(Cubin(keys("inputs and sampler", arch), partial(compile_step_io, vocab_size, arch)))
        if not ride:
            cubins.append(Cubin(keys("moves between ranks", arch), partial(compile_moves, arch)))
        if DRAFT in plans and not no_sampler(vocab_size):
            cubins.append(Cubin(keys("acceptance", arch), partial(compile_accept, vocab_size, arch)))
    return cubins


def _misfit(plan) -> str | None:
    """Why there are no steps in one launch, or None. What only the compiler knows, it says."""
    why = misfit(plan, LOOPBACK)
    try:
        launched(plan, 1, H200_SMS, next(iter(KV_BYTES)))
    except PlanError as e:
        why = why or e.message
    if why:
        say(f"no {LAUNCHED[STEP]}: {why}")
    return why
