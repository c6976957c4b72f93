"""Tables of docs/performance.md about ranks that have a GPU each."""
from typing import Callable

ONE_LAUNCH, ONE_LOOPED_BACK = "latency_specialized", "latency_specialized_looped_back"   # of bench_ranks.py


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
    has_launches = "declined" in found   # files of before there were any do not say so
    rows = []
    for n, ms in by.items():
        lost = lambda how, alone, ms=ms: f"{ms[how]:.3f} ({1e3 * (ms[how] - ms[alone]) / found['hops']:+.1f})" if how in ms else ""
        one = [f"{ms[ONE_LOOPED_BACK]:.3f}" if ONE_LOOPED_BACK in ms else "", lost(ONE_LAUNCH, ONE_LOOPED_BACK)] * has_launches
        rows.append([n, f"{floors[n]:.3f}", f"{ms['looped_back']:.3f}", lost("nccl", "looped_back"), lost("peer", "looped_back"), *one])
    head = ["rows", "floor, ms", "looped back, ms", "by NCCL, ms (µs more a collective)", "inside a kernel, ms (µs more a collective)",
            *["in one launch looped back, ms", "in one launch, ms (µs more a collective)"] * has_launches]
    launches = " Steps in one launch write into each other's memory; their\nlogits have the same bytes too, looped back those of the step looped back." * has_launches
    return (f"## Steps of {found['ranks']} real ranks\n\nThe first {found['layers']} layers of the release cut over {found['ranks']} GPUs, {found['hops']} "
            f"collectives a step; step and commit of rank 0 ({settings(found)}).\nLogits by NCCL and by the exchange have the same bytes on every rank. Looped back, "
            f"a rank is alone and every collective a kernel that writes to itself;\nwith NCCL kernels do not begin under one another."
            f"{launches}{refused(found)}\n\n{table(head, rows)}" + source("rank_steps", found))


def refused(found: dict) -> str:
    """Of which numbers of rows there is no time in one launch, and why."""
    why = {}
    for d in found.get("declined", ()):
        if d["how"] == ONE_LOOPED_BACK:   # of which real ranks say the same
            why.setdefault(d["reason"], []).append(d["rows"])
    ranks = f"{found['ranks']} rank{'s' * (found['ranks'] > 1)}"
    return "".join(f"\nNot in one launch: {', '.join(map(str, rows))} rows over {ranks} ({reason})." for reason, rows in why.items())


def scaling(files: list[dict], table: Callable, source: Callable) -> str:
    """Of steps of one size by number of ranks, one rank first."""
    names = {"nccl": "NCCL", "peer": "inside a kernel", ONE_LAUNCH: "in one launch"}
    only = {"looped_back": "", ONE_LOOPED_BACK: names[ONE_LAUNCH]}   # of one rank, which has nobody else
    alone, rows = {(s["rows"], s["how"] == ONE_LOOPED_BACK): s["ms"] for s in files[0]["steps"]}, []
    for found in files:
        for s in found["steps"]:
            how = (only if found["ranks"] == 1 else names).get(s["how"])
            if how is not None:
                first, ms, floor = alone.get((s["rows"], how == names[ONE_LAUNCH])), s["ms"], s["floor_ms"]
                rows.append([s["rows"], found["ranks"], how, f"{floor:.3f}", f"{ms:.3f}", f"{ms / floor:.2f}", f"{first / ms:.2f}" if first else ""])
    head = ["rows", "ranks", "collectives by", "floor, ms", "step, ms", "ratio", "times as fast as one rank"]
    return (f"## The same layers on more GPUs\n\nThe first {files[0]['layers']} layers of the release, on one GPU and cut over several; made and timed as above."
            f"{''.join(map(refused, files))}\n\n{table(head, sorted(rows, key=lambda row: row[0]))}" + "".join(source(f"rank_steps-{found['ranks']}", found) for found in files))
