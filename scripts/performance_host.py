"""Tables of docs/performance.md about what the host does: between steps, at a process's start, and when it loads."""


def gaps(found: dict, table, source) -> str:
    rows = [[c["model"], c["rows"], c["sampling"], c["idle_us_median"], c["idle_us_p99"], c["step_us_median"]] for c in found["cases"]]
    slow = [f"{c['rows']} rows of {c['model']}: {c['idle_us_median']:.0f} µs of {c['wall_us_a_step']:.0f} a step"
            for c in found["cases"] if "of rank" not in c["model"] and c["idle_us_median"] > 5]
    behind = f"\n\nWhere a step is shorter than what the host does for it the GPU waits: {'; '.join(slow)}." if slow else ""
    return ("## Between steps\n\n" + table(["model", "rows", "sampling", "idle, µs, median", "99th percentile", "step, µs"], rows) + behind + source("idle", found))


def starts(found: dict, table, source) -> str:
    rows = [[f"`{m['model']}`", m["decode_backend"], m["runs"], f"{m['first_token_s_median']:.2f}", f"{m['first_token_s_max']:.2f}", f"{m['load_s_median']:.2f}"] for m in found["models"]]
    return ("## From process start to the first token\n\n`k3cuda generate` in a new process, kernels in the cache.\n\n"
            + table(["model", "decode backend", "runs", "first token, s, median", "longest", "of it loading, s"], rows) + source("first_token", found))


def loading(found: dict, table, source) -> str:
    disk, phases = found["storage"], found["loading"]
    rows = [["weights of the rank", f"{found['weights_bytes'] / 1e9:.1f} GB"], ["read for them", f"{phases['read_bytes'] / 1e9:.1f} GB, {phases['mode']}"],
            ["load", f"{found['load_s']:.1f} s"], ["read", f"{found['read_gb_s']:.1f} GB/s"], ["kept", f"{found['weights_gb_s']:.2f} GB/s"],
            ["check before it", f"{found['check_s']:.1f} s"], ["host memory, at most", f"{found['host_bytes'] / 1e9:.2f} GB (allowed {found['host_bytes_allowed'] / 1e9:.2f})"],
            ["sampled tensors, of them wrong", f"{found['samples']}, {found['samples_wrong']}"],
            ["this machine's disk, on a file that was written", f"{disk['read_gb_s']:.2f} GB/s read, {disk['write_gb_s']:.2f} written ({disk['mode']})"]]
    return (f"## Loading a rank\n\nRank {found['rank']} of {found['tp']} alone, {found['layers']} layers, from a stand-in of the release ({found['label']}).\n\n"
            f"{table(['what', 'measured'], rows)}" + source("load", found))
