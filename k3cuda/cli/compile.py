"""`k3cuda compile`: kernels for GPUs that need not be here."""
import tempfile
import time
from functools import partial
from pathlib import Path

import click

from ..buffers import KV_BYTES
from ..config import DECODE_ROWS
from ..emit_sizes import GPU_SMS, ROW_BUCKETS
from ..errors import CompileError, DeviceError, UsageError
from ..runtime.cuda_jit import ARCHS, REFUSED, nvrtc_version
from ..runtime.machine import PROCESSES, VIRTUAL
from . import options
from .bench import Counts
from .model_argument import config_of
from .output import Result, say

MOST_SMS = 1024


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
    from ..runtime.cuda_kernels import side_by_side
    from .compile_cubins import LAUNCHED, STEP, buckets_of, cubins_of, draft_plans

    _check_names("--arch", arch, ARCHS, REFUSED)
    _check_names("--kv-cache-dtype", kv_cache_dtype, list(KV_BYTES))
    cfg, are_virtual = config_of(model), tp == 1 or ranks == VIRTUAL
    buckets = buckets_of(rows, max(ROW_BUCKETS) if are_virtual else DECODE_ROWS)
    plans = {STEP: build_plan(cfg, tp, dcp=dcp)} | draft_plans(cfg, tp, dcp, draft_model, num_speculative_tokens, draft_rows)
    _make_folder(output)
    nvrtc = nvrtc_version()
    cubins = cubins_of(plans, arch, sms, buckets, kv_cache_dtype, ride=are_virtual)
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
