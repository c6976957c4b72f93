"""`k3cuda info`: what this machine has and what would run here."""
import click

from ..config import RELEASED
from . import options
from .output import Result


@click.command(cls=options.Command)
@options.flags(options.flag("--json", is_flag=True, help="One JSON document."), options.OUTPUT)
def info(json, output):
    """Show machine, driver, packages, and which decode backends run here."""
    from ..runtime import machine

    result = Result(output)
    report = machine.report()
    if json:
        result.document(report, indent=2)
    else:
        result.write("\n".join(_lines(report)) + "\n")
    result.close()


def _lines(report: dict):
    host, driver = report["host"] or {}, report["driver"]
    yield f"k3cuda {report['version']}, Python {report['python']}"
    yield ""
    yield f"machine   {host.get('system')} {host.get('release')} {host.get('machine')}"
    yield f"cpu       {host.get('cores')} cores, {host.get('cpu') or 'of unknown make'}"
    limit = f", limited to {_gib(host['memory_limit_bytes'])}" if host.get("memory_limit_bytes") else ""
    yield f"memory    {_gib(host.get('memory_bytes'))}, {_gib(host.get('memory_free_bytes'))} free{limit}"
    versions = ", ".join(f"{name} {v}" for name, v in (("version", driver["version"]), ("CUDA", driver["cuda"])) if v)
    yield f"driver    {', '.join(filter(None, (versions, driver['problem'])))}"
    for gpu in driver["gpus"]:
        yield f"gpu {gpu['index']:<5} {gpu['name']}, compute capability {gpu['compute_capability']}, {_gib(gpu['memory_bytes'])}"
    yield f"nvrtc     {report['nvrtc'] or 'not found'}"
    yield f"demo      {_demo(report['demo'])}"
    yield ""
    yield "packages"
    yield from (f"  {name:<26} {p['version']}" for name, p in report["packages"].items() if p["version"])
    yield "not installed"
    yield from (f"  {name:<26} {p['extra']}, for {p['purpose']}" for name, p in report["packages"].items() if not p["version"])
    yield ""
    yield "decode backends"
    for backend in report["decode_backends"]:
        yield f"  {backend['name']:<20} {'runs here' if backend['runs'] else 'does not run here'}"
        yield from (f"    - {reason}" for reason in backend["reasons"])
        if backend["not_auto"]:
            yield f"    not what auto chooses: {backend['not_auto']}"
    if report["release_memory"]:
        yield ""
        yield f"{RELEASED} on such GPUs: ranks, of which so many hold the cache together, and the longest context of each of {report['release_memory'][0]['sequences']} sequences"
        for row in report["release_memory"]:
            fits = ", ".join(f"{kv} {n:,}" for kv, n in row["max_model_len"].items()) if any(row["max_model_len"].values()) else "does not fit"
            yield f"  {row['gpu']:<26} tp {row['tp']:<3} dcp {row['dcp']:<3} {fits}"
    if report["variables"]:
        yield ""
        yield "variables"
        yield from (f"  {name}={value}" for name, value in report["variables"].items())
    if report["failed"]:
        yield ""
        yield "could not be found out"
        yield from (f"  {line}" for line in report["failed"])


def _demo(found: dict | None) -> str:
    if found is None:
        return "unknown"
    return f"trained by commit {found['commit']}, {found['bytes'] / 1e6:.1f} MB" if "commit" in found else f"{found['weights']}: no trained weights in this version"


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.1f} GiB"
