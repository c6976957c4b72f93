"""`k3cuda check`: everything that is wrong with a model, from headers alone; with --hash from all bytes."""
import click

from ..errors import CheckpointError, UsageError
from . import options
from .answers import shows_progress
from .output import Result


@click.command(cls=options.Command)
@options.model()
@options.flags(
    options.flag("--tp", type=click.IntRange(min=1), metavar="N", aliases=options.TP_ALIASES, help="Check that the model can be cut over so many ranks."),
    options.flag("--hash", is_flag=True, help="Read every file whole and compare its SHA-256; an interrupted run is taken up again."),
    options.flag("--hash-manifest", metavar="FILE", help="Record of the hashes.  [default: in the cache folder]"),
    options.flag("--no-progress", is_flag=True, aliases=["--disable-tqdm"], help="No progress of --hash."),
    options.flag("--json", is_flag=True, help="One JSON document."), options.OUTPUT, *options.DRAFT)
def check(model, tp, hash, hash_manifest, no_progress, json, output, draft_model, num_speculative_tokens):
    """Look for everything that is wrong with a model before it is loaded.

    Exit code 0: nothing; 3: files missing, damaged or not matching; 4: not enough memory and nothing else.
    """
    from ..runtime import preflight
    from ..runtime.auto_backend import auto_backend
    from ..runtime.hash_check import add_hashes
    from ..runtime.machine import REFERENCE, VIRTUAL, probe_driver

    if hash_manifest and not hash:
        raise UsageError("--hash-manifest without --hash records nothing", "add --hash")
    result = Result(output)
    if num_speculative_tokens is not None and draft_model is None:
        raise UsageError(f"--num-speculative-tokens: found {num_speculative_tokens}, but there is no draft model", "give one with it, or leave it out")
    is_reference = auto_backend(model, draft_model, tp=tp or 1, ranks=VIRTUAL) == REFERENCE   # else the host's memory need not hold the weights
    report = preflight.check(model, tp=tp, draft=draft_model, is_reference=is_reference, num_drafts=num_speculative_tokens)
    preflight.add_gpu_memory(report, probe_driver().gpus)
    if hash:
        add_hashes(report, hash_manifest, not no_progress and shows_progress())
    if json:
        result.document(report.to_dict(), indent=2)
    else:
        result.write("\n".join(_lines(report)) + "\n")
    result.close()
    codes = {finding.code for finding in report.findings}
    return CheckpointError.code if CheckpointError.code in codes else max(codes, default=0)


def _lines(report):
    for finding in report.findings:
        yield f"wrong    {finding.file}"
        yield f"  found  {finding.found}"
        yield f"  wanted {finding.wanted}"
        yield f"  do     {finding.way_out}"
    for note in report.notes:
        yield f"note     {note}"
    for key, value in report.facts.items():
        if key == "gpu_memory":
            yield from _gpu_lines(value)
        else:
            yield f"{key:<24} {_shown(key, value)}"
    count = len(report.findings)
    yield f"{report.path}: " + (f"{count} problem{'s' * (count > 1)}" if count else "nothing is wrong")


def _gpu_lines(rows):
    yield f"{'GPU':<28}{'tp':>4}{'dcp':>4}{'memory':>10}{'weights':>10}{'kernels':>10}{'left':>10}   longest context of one sequence"
    for row in rows:
        sizes = "".join(f"{row[name] / 1e9:>7.1f} GB" for name in ("memory_bytes", "weights_bytes", "kernels_bytes", "room_bytes"))
        fits = ", ".join(f"{kv} {n:,}" for kv, n in row["max_model_len"].items()) if any(row["max_model_len"].values()) else "does not fit"
        yield f"{row['gpu']:<28}{row['tp']:>4}{row['dcp']:>4}{sizes}   {fits}"


def _shown(key: str, value) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}: {_shown(key, v)}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    if isinstance(value, int) and "bytes" in key:
        return f"{value:,} ({value / 1e9:.2f} GB)"
    return "unknown" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
