"""Copies what `k3cuda plan --project` needs of docs/benchmarks/step.json into the package; a test holds the copy to it.

    python scripts/make_measured.py
"""
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE, TARGET = ROOT / "docs/benchmarks/step.json", ROOT / "k3cuda/data/projection/measured.json"
KEYS = ("rows", "sequences", "tp", "context", "kv_cache_dtype", "ms", "floor_ms", "floor_bytes", "ceiling_tb_s", "distinct_experts", "ranks")


def measured() -> str:
    found = json.loads(SOURCE.read_text(encoding="utf-8"))
    # Steps of the router's own choice, without delays that were added to try them.
    steps = [{key: step[key] for key in KEYS} for step in found["steps"] if not step["forced_experts"] and not step["hop_delay_us"]]
    return json.dumps({"gpu": found["gpu"], "commit": found["commit"], "steps": steps}, indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(measured(), encoding="utf-8")
