"""Tables of docs/performance.md about ranks that have a GPU each."""
from typing import Callable


def collectives(found: dict, table: Callable, source: Callable) -> str:
    """`table`, `source`: make_performance.py's."""
    by = {}
    for c in found["collectives"]:
        by.setdefault((c["collective"], c["rows"], c["bytes"]), {})[c["by"]] = f"{c['us']:.2f} ({c['us_p99']:.2f})"
    rows = [[name, rows, f"{nbytes / 1e3:.1f}", times["nccl"], times.get("peer", "")] for (name, rows, nbytes), times in by.items()]
    why = f" No exchange: {found['no_peers']}." if found["no_peers"] else ""
    head = ["collective", "rows", "kB to each rank", "NCCL, µs (99th percentile)", "inside a kernel, µs (99th percentile)"]
    return (f"## Collectives over {found['ranks']} GPUs\n\nOne collective in a CUDA graph between two notes of the device's clock, {found['replays']:,} "
            f"replays behind one another, NCCL {found['nccl']} with the kernels that\npack and spread around it ({settings(found)}). A graph of the notes alone "
            f"takes {found['empty']['us']:.2f} µs, which every number has in it.{why}\n\n{table(head, rows)}" + source(f"collectives-{found['ranks']}", found))


def settings(found: dict) -> str:
    """What NCCL was told: above all whether it may use NVLink's multicast."""
    return ", ".join(f"`{name}={value}`" for name, value in sorted(found["nccl_settings"].items())) or "NCCL's own settings"


def rank_steps(found: dict, table: Callable, source: Callable) -> str:
    """The same of steps."""
    by, floors = {}, {}
    for s in found["steps"]:
        by.setdefault(s["rows"], {})[s["how"]] = s["ms"]
        if s["how"] == "peer":   # looped back a rank may choose other experts
            floors[s["rows"]] = s["floor_ms"]
    lost = lambda ms, alone: f"{ms:.3f} ({1e3 * (ms - alone) / found['hops']:+.1f})"
    rows = []
    for n, ms in by.items():
        alone = ms["looped_back"]
        rows.append([n, f"{floors[n]:.3f}", f"{alone:.3f}", lost(ms["nccl"], alone), lost(ms["peer"], alone)])
    head = ["rows", "floor, ms", "looped back, ms", "by NCCL, ms (µs more a collective)", "inside a kernel, ms (µs more a collective)"]
    return (f"## Steps of {found['ranks']} real ranks\n\nThe first {found['layers']} layers of the release cut over {found['ranks']} GPUs, {found['hops']} "
            f"collectives a step; step and commit of rank 0 ({settings(found)}).\nLogits by NCCL and by the exchange have the same bytes on every rank. Looped back, "
            f"a rank is alone and every collective a kernel that writes to itself;\nwith NCCL kernels do not begin under one another.\n\n{table(head, rows)}"
            + source("rank_steps", found))


def scaling(files: list[dict], table: Callable, source: Callable) -> str:
    """Of steps of one size by number of ranks, one rank first."""
    alone, rows = {s["rows"]: s["ms"] for s in files[0]["steps"]}, []
    for found in files:
        for s in found["steps"]:
            if s["how"] in ("nccl", "peer") or found["ranks"] == 1:
                how = {"nccl": "NCCL", "peer": "inside a kernel"}.get(s["how"], "")
                rows.append([s["rows"], found["ranks"], how, f"{s['floor_ms']:.3f}", f"{s['ms']:.3f}", f"{s['ms'] / s['floor_ms']:.2f}", f"{alone[s['rows']] / s['ms']:.2f}"])
    head = ["rows", "ranks", "collectives by", "floor, ms", "step, ms", "ratio", "times as fast as one rank"]
    return (f"## The same layers on more GPUs\n\nThe first {files[0]['layers']} layers of the release, on one GPU and cut over several; made and timed as above.\n\n"
            f"{table(head, sorted(rows, key=lambda row: row[0]))}" + "".join(source(f"rank_steps-{found['ranks']}", found) for found in files))
