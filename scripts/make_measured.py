"""Copies what `k3cuda plan --project` needs of docs/benchmarks into the package; a test holds the copy to it.

    python scripts/make_measured.py
"""
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER, TARGET = ROOT / "docs/benchmarks", ROOT / "k3cuda/data/projection/measured.json"
KEYS = ("rows", "sequences", "tp", "context", "kv_cache_dtype", "ms", "floor_ms", "floor_bytes", "ceiling_tb_s", "distinct_experts", "ranks")


def measured(folder: Path = FOLDER) -> str:
    found, moved = _read(folder / "step.json"), _read(folder / "collectives-2.json")
    # Steps of the router's own choice, without delays that were added to try them.
    steps = [{key: step[key] for key in KEYS} for step in found["steps"] if not step["forced_experts"] and not step["hop_delay_us"]]
    # Of two ranks each receives from one. What a graph of the notes alone takes is none of the exchange's.
    times = [{"bytes": c["bytes"], "us": round(c["us"] - moved["empty"]["us"], 3)} for c in moved["collectives"] if c["by"] == "peer"]
    document = {"gpu": found["gpu"], "commit": found["commit"], "steps": steps,
                "exchanges": {"gpu": moved["gpu"], "commit": moved["commit"], "ranks": moved["ranks"], "times": times},
                "rank_steps": _rank_steps(folder)}
    return json.dumps(document, indent=1) + "\n"


def _rank_steps(folder: Path) -> list[dict]:
    """Steps of real ranks over the exchange, which projections are held to: those there are, as scripts/bench_ranks.py takes them."""
    out = []
    for path in sorted(folder.glob("rank_steps*.json")):
        if path.stem.endswith("-trace"):
            continue
        found = _read(path)
        for s in found["steps"]:
            if s["how"] == "peer":
                out.append({"rows": s["rows"], "sequences": s["rows"], "tp": found["ranks"], "layers": found["layers"], "context": 1, "kv_cache_dtype": "bf16", "ms": s["ms"],
                            "floor_ms": s["floor_ms"], "ceiling_tb_s": found["ceiling_tb_s"], "distinct_experts": s["experts"], "ranks": s["ranks"]})
    return out


def _read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    TARGET.write_text(measured(), encoding="utf-8")
