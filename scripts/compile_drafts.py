#!/usr/bin/env python3
"""Compiles the kernels of every public draft for one rank of 16, each architecture and row bucket, and prints what spills. Needs no GPU; minutes.

    python scripts/compile_drafts.py [--draft Inferact] [--rows 8,64] [--arch sm_90a]
"""
import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from test_draft_config import PUBLIC, read  # noqa: E402

from k3cuda.draft_plan import build_draft_plan  # noqa: E402
from k3cuda.emit_sizes import GPU_SMS  # noqa: E402
from k3cuda.runtime.cuda_kernels import compile_bucket  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--draft", choices=PUBLIC, action="append")
    parser.add_argument("--rows", default="8,16,32,64")
    parser.add_argument("--arch", default=",".join(GPU_SMS))
    args, bad = parser.parse_args(), 0
    for name in args.draft or PUBLIC:
        plan = build_draft_plan(read(PUBLIC[name]), 16)
        for arch in args.arch.split(","):
            for rows in map(int, args.rows.split(",")):
                start = time.perf_counter()
                resources = compile_bucket(plan, rows, "bf16", arch, sms=GPU_SMS[arch][0]).resources()
                spills = {kernel: f"{r.spills} bytes spilled, stack of {r.stack}" for kernel, r in resources.items() if r.spills or r.stack}
                bad += len(spills)
                print(f"{name:10} {arch:8} {rows:3} rows: {len(resources)} kernels, {time.perf_counter() - start:.0f} s {spills or ''}", flush=True)
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
