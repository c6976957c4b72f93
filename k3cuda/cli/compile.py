"""`k3cuda compile`: kernels for GPUs that need not be here."""
import os
import time
from pathlib import Path

import click

from ..buffers import KV_BYTES
from ..errors import DeviceError, UsageError
from ..runtime.cuda_jit import ARCHS, REFUSED, nvrtc_version
from ..runtime.cuda_kernels import GPU_SMS, ROW_BUCKETS, bucket_of, compile_bucket, compile_step_io, side_by_side
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


@click.command(cls=options.Command)
@options.model(default="kimi-k3")
@options.flags(
    options.flag("--output", required=True, metavar="DIR", type=click.Path(file_okay=False, path_type=Path),
                 help="Folder to fill; it is made where it is missing. Set K3CUDA_CUBIN_DIR to it where the kernels are to run."),
    options.flag("--arch", type=Names(), default=",".join(ARCHS), show_default=True, metavar="LIST", help="Architectures."),
    options.flag("--tp", type=click.IntRange(min=1), default=16, show_default=True, metavar="N", aliases=options.TP_ALIASES, help="Ranks the model is cut into."),
    options.flag("--rows", type=Counts(max(ROW_BUCKETS)), default=",".join(map(str, ROW_BUCKETS)), show_default=True, help="Rows of the steps that will run."),
    options.flag("--kv-cache-dtype", type=Names(), default="bf16", show_default=True, metavar="LIST", help=f"Formats of the MLA cache: {', '.join(KV_BYTES)}."),
    options.flag("--sms", type=Counts(MOST_SMS), metavar="LIST",
                 help="Multiprocessors of the GPUs.  [default: of those that are known: "
                      + "; ".join(f"{arch} {', '.join(map(str, sms))}" for arch, sms in GPU_SMS.items()) + "]"),
    options.flag("--allow-spills", is_flag=True, help="Keep kernels that spill registers, and name them; else they are an error."),
    options.flag("--json", is_flag=True, help="One JSON document."))
def compile(model, output, arch, tp, rows, kv_cache_dtype, sms, allow_spills, json):   # noqa: A001 - the command's name
    """Compile every kernel of a decode step into a folder, without a GPU. A spilled register is an error unless it is allowed.

    MODEL gives only the sizes. Kernels are found again by the same version of k3cuda and of NVRTC alone.
    """
    from ..plan import build_plan

    _check_names("--arch", arch, ARCHS, REFUSED)
    _check_names("--kv-cache-dtype", kv_cache_dtype, list(KV_BYTES))
    plan = build_plan(config_of(model), tp)
    _make_folder(output)
    nvrtc = nvrtc_version()
    units = [{"arch": a, "sms": n, "rows": bucket, "kv_cache_dtype": kv}
             for a in arch for n in sms or GPU_SMS[a] for kv in kv_cache_dtype for bucket in sorted({bucket_of(r) for r in rows})]
    # Inputs and sampler, which are the same for all of an architecture.
    units += [{"arch": a, "sms": None, "rows": None, "kv_cache_dtype": None} for a in arch]
    start, done = time.perf_counter(), []

    def one(unit):
        if unit["rows"] is None:
            what, compiled = "inputs and sampler", compile_step_io(plan.cfg.vocab_size, unit["arch"], strict=not allow_spills, into=output)
        else:
            what = f"{unit['sms']} multiprocessors, {unit['rows']} rows, {unit['kv_cache_dtype']}"
            compiled = compile_bucket(plan, unit["rows"], unit["kv_cache_dtype"], unit["arch"], sms=unit["sms"], strict=not allow_spills, into=output)
        spills = {kernel: used.spills for kernel, used in compiled.resources().items() if used.spills}
        done.append(unit | {"bytes": len(compiled.cubin), "folder": compiled.folder.name, "was_there": compiled.from_cache, "spills": spills})
        say(f"{len(done)} of {len(units)}: {unit['arch']}, {what}" + (" was there" if compiled.from_cache else "")
            + "".join(f", {kernel} spills {count} bytes" for kernel, count in spills.items()))

    side_by_side([lambda unit=unit: one(unit) for unit in units])
    summary = {"folder": str(output), "model": model, "tp": tp, "nvrtc": nvrtc, "files": len(done), "bytes": sum(d["bytes"] for d in done),
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
    except OSError as e:
        raise UsageError(f"--output: {folder} cannot be made: {e.strerror}") from e
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--output: {folder} cannot be written", "give a folder of your own; it may be made read-only afterwards")
