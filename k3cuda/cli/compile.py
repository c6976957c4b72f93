"""`k3cuda compile`: kernels for GPUs that need not be here."""
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Callable, NamedTuple

import click

from ..buffers import KV_BYTES
from ..config import DECODE_ROWS
from ..emit_sizes import H200_SMS
from ..errors import CompileError, ConfigError, DeviceError, PlanError, UsageError
from ..runtime.cuda_jit import ARCHS, REFUSED, nvrtc_version
from ..runtime.cuda_kernels import (GPU_SMS, ROW_BUCKETS, bucket_of, compile_accept, compile_bucket, compile_moves, compile_step_io, draft_buckets, no_sampler,
                                    side_by_side)
from ..runtime.launch_program import BUCKETS, LOOPBACK, compile_launch, launched, misfit
from ..runtime.machine import PROCESSES, VIRTUAL
from . import options
from .bench import Counts
from .model_argument import config_of, draft_config_of
from .output import Result, say

MOST_SMS = 1024
STEP, TAPS, DRAFT = "step", "step with taps", "draft"   # parts: plans that need a cubin a bucket
LAUNCHED = {STEP: "step in one launch", TAPS: "step with taps in one launch"}


class Names(click.ParamType):
    """Names with commas between them."""

    name = "list"

    def convert(self, value, param, ctx):
        return list(dict.fromkeys(value.split(","))) if isinstance(value, str) else value


class Folder(click.Path):
    """A folder; an empty name, which a shell's unset variable gives, is not the current one."""

    def convert(self, value, param, ctx):
        if value == "":
            self.fail("found no name, wanted that of a folder", param, ctx)
        return super().convert(value, param, ctx)


@click.command(cls=options.Command)
@options.model(default="kimi-k3")
@options.flags(
    options.flag("--output", required=True, metavar="DIR", type=Folder(file_okay=False, path_type=Path),
                 help="Folder to fill; it is made where it is missing. Set K3CUDA_CUBIN_DIR to it where the kernels are to run."),
    options.flag("--arch", type=Names(), default=",".join(ARCHS), show_default=True, metavar="LIST", help="Architectures."),
    options.flag("--tp", type=click.IntRange(min=1), default=16, show_default=True, metavar="N", aliases=options.TP_ALIASES, help="Ranks the model is cut into."),
    options.flag("--dcp", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", aliases=options.DCP_ALIASES,
                 help="Ranks that will hold the MLA cache together."),
    options.flag("--ranks", type=click.Choice([VIRTUAL, PROCESSES]), default=PROCESSES, show_default=True,
                 help="How they will be joined: each a process, or all in one; the same for one rank."),
    options.flag("--rows", type=Counts(max(ROW_BUCKETS)), metavar="LIST",
                 help=f"Rows of the steps that will run.  [default: {','.join(map(str, ROW_BUCKETS))}; processes: up to {DECODE_ROWS}]"),
    options.flag("--kv-cache-dtype", type=Names(), default="bf16", show_default=True, metavar="LIST", help=f"Formats of the MLA cache: {', '.join(KV_BYTES)}."),
    options.flag("--sms", type=Counts(MOST_SMS), metavar="LIST",
                 help="Multiprocessors of the GPUs.  [default: of those that are known: "
                      + "; ".join(f"{arch} {', '.join(map(str, sms))}" for arch, sms in GPU_SMS.items()) + "]"),
    options.flag("--allow-spills", is_flag=True, help="Keep kernels that spill registers, and name them; else they are an error."),
    options.flag("--json", is_flag=True, help="One JSON document."), *options.DRAFT, options.DRAFT_ROWS)
def compile(model, output, arch, tp, dcp, ranks, rows, kv_cache_dtype, sms, allow_spills, json, draft_model, num_speculative_tokens, draft_rows):   # noqa: A001 - the command's name
    """Compile every kernel of a decode step into a folder, without a GPU. A spilled register is an error unless it is allowed.

    MODEL gives only the sizes, and so does a draft model, with which steps with and without it are compiled. Kernels are found again by the same
    version of k3cuda and of NVRTC alone.
    """
    from ..plan import build_plan

    _check_names("--arch", arch, ARCHS, REFUSED)
    _check_names("--kv-cache-dtype", kv_cache_dtype, list(KV_BYTES))
    cfg, are_virtual = config_of(model), tp == 1 or ranks == VIRTUAL
    buckets = _buckets(rows, max(ROW_BUCKETS) if are_virtual else DECODE_ROWS)
    plans = {STEP: build_plan(cfg, tp, dcp=dcp)} | _draft_plans(cfg, tp, dcp, draft_model, num_speculative_tokens, draft_rows)
    _make_folder(output)
    nvrtc = nvrtc_version()
    cubins = _cubins(plans, arch, sms, buckets, kv_cache_dtype, ride=are_virtual)
    start, done = time.perf_counter(), []

    def one(cubin):
        is_launch = cubin.keys["part"] in LAUNCHED.values()   # beside which there are the step's own kernels
        try:
            compiled = cubin.compile(strict=not (allow_spills or is_launch), into=output)
        except CompileError as e:
            if not is_launch:
                raise
            say(f"{cubin}: left out, {e.message}")
            return
        spills = {kernel: used.spills for kernel, used in compiled.resources().items() if used.spills}
        done.append(cubin.keys | {"bytes": len(compiled.cubin), "folder": compiled.folder.name, "was_there": compiled.from_cache, "spills": spills})
        say(f"{len(done)} of {len(cubins)}: {cubin}" + (" was there" if compiled.from_cache else "")
            + "".join(f", {kernel} spills {count} bytes" for kernel, count in spills.items()))

    side_by_side([partial(one, cubin) for cubin in cubins])
    summary = {"folder": str(output), "model": model, "draft_model": draft_model, "tp": tp, "dcp": dcp,
               "ranks": VIRTUAL if are_virtual else PROCESSES, "nvrtc": nvrtc, "files": len(done), "bytes": sum(d["bytes"] for d in done),
               "compile_s": round(time.perf_counter() - start, 2), "cubins": sorted(done, key=lambda d: [str(v) for v in d.values()])}
    result = Result()
    if json:
        result.document(summary, indent=2)
    else:
        result.write(f"{summary['files']} cubins, {summary['bytes'] / 1e6:.1f} MB, {summary['compile_s']} s, NVRTC {nvrtc}: K3CUDA_CUBIN_DIR={output}\n")
    result.close()


class _Cubin(NamedTuple):
    """What is compiled at once: what --json says of it, and how, given the options of compile_cuda."""

    keys: dict
    compile: Callable

    def __str__(self):
        arch, sms, rows, kv, part = self.keys.values()
        return f"{arch}, {part}" + ("" if rows is None else f", {sms} multiprocessors, {rows} rows, {kv}")


def _draft_plans(cfg, tp: int, dcp: int, draft_model: str | None, num_drafts: int | None, draft_rows: str | None) -> dict:
    """Part -> plan of what a draft model adds: a step of the model that leaves it taps, and its own."""
    from ..draft_plan import build_draft_plan
    from ..emit import no_kernels
    from ..plan import build_plan
    from ..runtime.drafting import Drafting, check_options

    given = check_options({"num_drafts": num_drafts, "draft_rows": draft_rows}, draft_model is not None)
    if draft_model is None:
        return {}
    draft = draft_config_of(draft_model, cfg)
    if why := no_kernels(draft):
        raise ConfigError(f"--draft-model {draft_model}: {why}", "it runs with --decode-backend reference alone")
    drafting = Drafting(SimpleNamespace(cfg=draft), **given)
    return {TAPS: build_plan(cfg, tp, drafting.taps, dcp), DRAFT: build_draft_plan(draft, tp, drafting.num_drafts, drafting.block_rows)}


def _buckets(rows: list[int] | None, most: int) -> list[int]:
    if rows and max(rows) > most:
        raise UsageError(f"--rows: found {max(rows)}, wanted at most {most} where ranks are processes", f"leave it out, or give --ranks {VIRTUAL}")
    return sorted({bucket_of(r) for r in rows or ROW_BUCKETS if r <= most})


def _cubins(plans: dict, archs, sms, buckets, kv_cache_dtypes, ride: bool) -> list[_Cubin]:
    """Every plan's for every kind of GPU, and an architecture's that know only the vocabulary. `ride`: as compile_bucket; a step in one launch has no other
    collectives than those that ride."""
    def keys(part, arch, sms=None, rows=None, kv=None):
        return {"arch": arch, "sms": sms, "rows": rows, "kv_cache_dtype": kv, "part": part}

    cubins, vocab_size = [], plans[STEP].cfg.vocab_size
    launches = [(LAUNCHED[part], plan, rows) for part, plan in plans.items() if part in LAUNCHED for rows in BUCKETS if rows in buckets] if ride and not _misfit(plans[STEP]) else []
    for arch in archs:
        cubins += [_Cubin(keys(part, arch, n, rows, kv), partial(compile_launch, plan, rows, kv, arch, sms=n))
                   for n in sms or GPU_SMS[arch] for kv in kv_cache_dtypes for part, plan, rows in launches]
        for part, plan in plans.items():
            is_draft = part == DRAFT   # whose own cache is BF16
            cubins += [_Cubin(keys(part, arch, n, rows, kv), partial(compile_bucket, plan, rows, kv, arch, sms=n, ride=ride))
                       for n in sms or GPU_SMS[arch] for kv in (["bf16"] if is_draft else kv_cache_dtypes)
                       for rows in (draft_buckets(plan, buckets) if is_draft else buckets)]
        cubins.append(_Cubin(keys("inputs and sampler", arch), partial(compile_step_io, vocab_size, arch)))
        if not ride:
            cubins.append(_Cubin(keys("moves between ranks", arch), partial(compile_moves, arch)))
        if DRAFT in plans and not no_sampler(vocab_size):
            cubins.append(_Cubin(keys("acceptance", arch), partial(compile_accept, vocab_size, arch)))
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


def _check_names(flag: str, found, known, refused=()) -> None:
    for name in found:
        if name in refused:
            raise DeviceError(f"{flag}: {name} isn't supported: {refused[name]}", f"the kernels run on {', '.join(known)}; elsewhere use --decode-backend reference")
        if name not in known:
            raise UsageError(f"{flag}: found {name!r}, wanted {', '.join(known)} with commas between them")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder):
            pass
    except OSError as e:
        raise UsageError(f"--output: {folder} cannot be written: {e.strerror}", "give a folder of your own; it may be made read-only afterwards") from e
