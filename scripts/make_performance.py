"""Makes docs/performance.md from the JSON files under docs/benchmarks/; a test holds the page to them.

    python scripts/make_performance.py

A table is there only if its file is. `causes.json` says of every missed target what bounds it; without that there is no page.
"""
import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Callable

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts")]
import performance_host as host  # noqa: E402
import performance_ranks as ranks  # noqa: E402

FOLDER, PAGE = ROOT / "docs/benchmarks", ROOT / "docs/performance.md"
# `scripts/gpu.sh NAME` makes each of them, on a GPU.
FILES = ("step", "one_launch", "one_launch_hops", "one_launch_decode", "experts", "hops", "torch", "prefill", "idle", "first_token", "load", "decode", "decode_plain")
RANK_FILES = ("collectives-2", "rank_steps", "rank_steps-1", "rank_steps-2")   # on two, by `scripts/gpu.sh ranks`, `rank_steps` and `scaling`
STAGE_ROWS, STAGE_CONTEXT = (1, 8, 64), 8192
LONG = 131072
CAUSES = "causes.json"


@dataclass(frozen=True)
class Target:
    """One promise: `measured(data)` gives the numbers it is judged by, the worst first, and how they are shown; None where none were taken."""

    name: str
    what: str
    wanted: str
    limit: float
    is_most: bool
    measured: Callable
    shown: str = "{:.2f}"

    def met(self, value: float) -> bool:
        return value <= self.limit if self.is_most else value >= self.limit


def steps(data, name: str = "step", **wanted) -> list[dict]:
    return [s for s in data.get(name, {}).get("steps", ()) if all(s[k] == v for k, v in wanted.items())]


def ratios(name: str = "step", **wanted):
    return lambda data: [s["ratio_to_floor"] for s in steps(data, name, **wanted)]


def attention(rows: int):
    return lambda data: [100 * stage["of_ceiling"] for group in data.get("step", {}).get("stages", ()) for stage in group["stages"]
                         if (group["rows"], group["context"], stage["stage"]) == (rows, LONG, "mla_attend")]


def against_torch(rows: int):
    return lambda data: [c["ratio"] for c in data.get("torch", {}).get("comparison", ()) if c["rows"] == rows]


def prompts(data):
    return [p["rows_a_second"] for p in data.get("prefill", {}).get("prompts", ()) if p["context"] == 8192]


def idle(data):
    """Of layers of a rank, which the target is about."""
    return [case["idle_us_median"] for case in data.get("idle", {}).get("cases", ()) if "of rank" in case["model"]]


def first_tokens(data):
    return [model["first_token_s_median"] for model in data.get("first_token", {}).get("models", ())]


def loss_by_hops(data):
    """Per cent that the 8-row step in one launch takes longer with the longest delay of every hop."""
    found = [(s["hop_delay_us"], s["ms"]) for s in steps(data, "one_launch_hops", rows=8)]
    return [100 * (max(found)[1] / min(found)[1] - 1)] if len(found) > 1 else []


def tokens(name: str):
    return lambda data: [s["tokens_per_second"] for s in data.get(name, {}).get("steps", ())]


def draft_share(data):
    return [100 * s["step"]["draft_share"] for s in data.get("decode", {}).get("steps", ()) if s["rows"] == 8]


TARGETS = (
    Target("step_1", "whole step, 1 row, any context", "at most 2.0 x the floor", 2.0, True, ratios(rows=1)),
    Target("step_8", "whole step, 8 rows, any context", "at most 1.5 x the floor", 1.5, True, ratios(rows=8)),
    Target("step_64", "whole step, 64 sequences of 8K, FP8 cache", "at most 1.6 x the floor", 1.6, True, ratios(rows=64, sequences=64, context=8192)),
    Target("launch_1", "step in one launch, 1 row, context 1", "at most 1.35 x the floor", 1.35, True, ratios("one_launch", rows=1, context=1)),
    Target("launch_8", "step in one launch, 8 rows of one sequence", "at most 1.2 x the floor", 1.2, True, ratios("one_launch", rows=8, context=8)),
    Target("launch_8_long", "step in one launch, 8 rows, context 128K, FP8 cache", "at most 1.25 x the floor", 1.25, True, ratios("one_launch", rows=8, context=LONG)),
    Target("launch_tokens", "steps in one launch, 7 drafts, synthetic acceptance of 6, drafter and acceptance included", "at least 1,050 tokens a second", 1050, False,
           tokens("one_launch_decode"), "{:,.0f}"),
    Target("launch_hops", "8 rows in one launch, every hop between ranks 2.5 µs later", "at most 25 % longer", 25, True, loss_by_hops, "{:.1f}"),
    Target("torch_1", "BF16 products of a layer against torch, 1 row", "at least 2 x faster", 2.0, False, against_torch(1)),
    Target("torch_8", "BF16 products of a layer against torch, 8 rows", "at least 2 x faster", 2.0, False, against_torch(8)),
    Target("mla_1", "latent attention at 128K, FP8 cache, 1 row", "at least 80 % of the ceiling", 80, False, attention(1), "{:.0f}"),
    Target("mla_8", "latent attention at 128K, FP8 cache, 8 rows", "at least 65 % of the ceiling", 65, False, attention(8), "{:.0f}"),
    Target("prefill", "prefill, 8K prompt", "at least 8,000 tokens a second", 8000, False, prompts, "{:,.0f}"),
    Target("idle", "GPU idle between steps of a rank's layers, median", "at most 5 µs", 5, True, idle),
    Target("first_token", "first token of a small model from process start, kernels in the cache", "at most 1.5 s", 1.5, True, first_tokens),
    Target("draft_share", "context rows, 7 drafts and acceptance over the 8-row step", "at most 8 %", 8, True, draft_share, "{:.1f}"),
)

CHECKS = """## What every number has passed

A timed step that fails one of these ends the run with code 8 and no number (`runtime/cuda_bench_checks.py`).

| what could fool us | what closes it |
| --- | --- |
| routing collapses on random weights | distinct experts are counted on the device, layer by layer, and the floor uses the count; forced routings beside it |
| weights or caches sit in the L2 cache | all layers in turn, each with weights of its own; a result above the read ceiling fails. Stages whose bytes of all layers together are below 128 MiB are marked: no such claim is made of them |
| a low ceiling flatters | read ceiling of the same run; below 4.4 TB/s on an H200 the run is void |
| loop back hides peers | a rank writes all 16 places and reads all 16 parts, by plain stores and loads, which kernel boundaries order; every place is compared afterwards; steps are timed again with a delay behind every collective |
| the step computes nonsense | logits equal, byte for byte, those of the same rows run kernel by kernel, without overlap, in another bucket, from buffers full of NaN; of the widest step of up to 8 rows a layer of every kind, both ends and the commit are compared with the NumPy reference, operation by operation; in every further context, the layers that look at it |
| stale data looks fresh | a step of other tokens runs first and leaves its values in every exchange buffer |
| replays differ | states are put back before each replay; the last one's logits and experts equal the first's |
| a step that advances states itself leaves others | all states and conv windows equal those of step and commit, byte for byte |

The floor is the bytes that any step must read, over the ceiling: weights and chosen experts once, every KDA state once, the caches of all
contexts. A commit reads the states again; that is counted as a cost, not as floor. Collectives are looped back, so times leave out what crosses GPUs.
ms are medians of 20 replays, as CUDA graphs, of step and commit; of more than 8 rows, one a sequence, as a launch has it: all rows stand, and the step advances
states itself.
"""


def load(folder: Path) -> dict:
    return {name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in FILES + RANK_FILES if (folder / f"{name}.json").exists()}


def page(folder: Path = FOLDER) -> str:
    """The whole page. Raises SystemExit where a target is missed and causes.json does not say why."""
    data = load(folder)
    causes = json.loads((folder / CAUSES).read_text(encoding="utf-8")) if (folder / CAUSES).exists() else {}
    parts = ["# Performance\n\nMade by `scripts/make_performance.py` from `docs/benchmarks/*.json`; do not edit. One rank of 16 of the full model (93 layers) with random "
             "weights on one GPU,\nunless a table says otherwise. `scripts/gpu.sh NAME` makes a file; under a table stands the command that made this one."]
    parts += [targets(data, causes), CHECKS.rstrip()]
    parts += [made for name, make in (("step", whole_steps), ("step", stages), ("step", latent_attention), ("experts", experts), ("hops", hops),
                                      ("torch", torch), ("prefill", prefill),
                                      *((name, partial(make, table=table, source=source)) for name, make in (("idle", host.gaps), ("first_token", host.starts), ("load", host.loading))),
                                      *((name, partial(decoding, name=name)) for name in ("decode", "decode_plain")),
                                      ("decode", drafts), ("collectives-2", partial(ranks.collectives, table=table, source=source)),
                                      ("rank_steps", partial(ranks.rank_steps, table=table, source=source))) if name in data and (made := make(data[name]))]
    parts += [ranks.scaling([data[name] for name in RANK_FILES[2:]], table, source)] if all(name in data for name in RANK_FILES[2:]) else []
    parts += [one_launch(data)] if "one_launch" in data else []
    parts += [make(data[name], name) for name, make in (("one_launch_hops", hops), ("one_launch_decode", decoding)) if name in data]
    missing = [f"`{name}`" for name in FILES + RANK_FILES if name not in data]
    parts += [f"Not measured yet: {', '.join(missing)}."] if missing else []
    return "\n\n".join(parts) + "\n"


def table(head: list[str], rows: list[list]) -> str:
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in [head, ["---"] * len(head), *rows])


def source(name: str, found: dict) -> str:
    versions = found["versions"]
    return (f"\n\n`{name}.json`: commit {found['commit']}, {found['gpu']}, driver {found['driver']}, NVRTC {versions['nvrtc']}, clocks (SM, memory, "
            f"highest SM) {found['clocks']}; `{found['command']}`" + (f". {found['note']}" if "note" in found else ""))


def targets(data: dict, causes: dict) -> str:
    rows = []
    for t in TARGETS:
        values = sorted(t.measured(data), reverse=t.is_most)
        if not values:
            continue
        met = t.met(values[0])
        if not met and t.name not in causes:
            raise SystemExit(f"{t.what}: {t.shown.format(values[0])}, wanted {t.wanted}: say what bounds it under {t.name!r} in {CAUSES}")
        rows.append([t.what, t.wanted, t.shown.format(values[0]), "yes" if met else f"no: {causes[t.name]}"])
    body = table(["what", "wanted", "measured, the worst", "met"], rows) if rows else "Nothing has been measured yet."
    return f"## Targets\n\n{body}"


def kilo(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


def whole_steps(found: dict) -> str:
    rows = [[s["rows"], s["sequences"], kilo(s["context"]), f"{s['ms']:.3f}", f"{s['rows_a_second']:,.0f}", f"{s['floor_ms']:.3f}", f"{s['ratio_to_floor']:.2f}",
             f"{s['us_a_layer']:.1f}", s["distinct_experts"]] for s in found["steps"]]
    first = found["steps"][0]
    skipped = "".join(f"\n- {s['rows']} rows of {s['sequences']} at {kilo(s['context'])} not run: {s['reason']}" for s in found["skipped"])
    head = ["rows", "sequences", "context", "ms", "rows a second", "floor, ms", "x floor", "µs a layer", "experts a layer"]
    return (f"## Whole steps\n\n{first['kv_cache_dtype']} cache, rank {first['rank']} of {first['tp']}, {found['layers']} layers, read ceiling "
            f"{first['ceiling_tb_s']:.2f} TB/s.\n\n{table(head, rows)}" + ("\n" + skipped if skipped else "") + source("step", found))


def one_launch(data: dict) -> str:
    rows = []
    for s in data["one_launch"]["steps"]:
        standard = steps(data, rows=s["rows"], sequences=s["sequences"], context=s["context"])
        rows.append([s["rows"], kilo(s["context"]), f"{s['ms']:.3f}", f"{s['ratio_to_floor']:.2f}", f"{s['us_a_layer']:.1f}", f"{standard[0]['ms']:.3f}" if standard else ""])
    return (f"## Steps in one launch\n\n`--decode-backend latency_specialized`, which `auto` does not choose. Logits, KDA records and new cache rows have the bytes of the standard "
            f"path's kernels.\nThe last column is of `step.json`.\n\n{table(['rows', 'context', 'ms', 'x floor', 'µs a layer', 'standard path, ms'], rows)}"
            + source("one_launch", data["one_launch"]))


def stages(found: dict) -> str:
    groups = {g["rows"]: {s["stage"]: s for s in g["stages"]} for g in found["stages"] if g["context"] == STAGE_CONTEXT and g["rows"] in STAGE_ROWS}
    if not groups:
        return ""
    rows = []
    for name in dict.fromkeys(name for group in groups.values() for name in group):   # collectives that are kernels are so from some number of rows on
        of_rows = [group.get(name) for group in groups.values()]
        cells = [(f"{s['us']:.1f}", f"{100 * s['of_ceiling']:.0f}{'*' if s['fits_cache'] else ''}" if s["mb"] else "") if s else ("", "") for s in of_rows]
        rows.append([f"`{name}`", next(s["operations"] for s in of_rows if s), *(c for pair in cells for c in pair)])
    rows.append(["all of a step", "", *(c for group in groups.values() for c in (f"{sum(s['us_a_step'] for s in group.values()):.0f}", ""))])
    head = ["stage", "in a step", *(c for n in groups for c in (f"{n} row{'s' * (n > 1)}: µs", "% of ceiling"))]
    return (f"## Stages\n\nContext {kilo(STAGE_CONTEXT)}. Each stage alone: its operations of all layers in turn, behind one another. In a step neighbours overlap, so the "
            f"sum is not the step.\n`*`: the bytes of all its layers may lie in a cache.\n\n{table(head, rows)}")


def latent_attention(found: dict) -> str:
    rows = [[g["rows"], g["sequences"], kilo(g["context"]), f"{s['us']:.1f}", f"{s['mb']:.1f}", f"{s['gb_s']:.0f}", f"{100 * s['of_ceiling']:.0f}"]
            for g in found["stages"] for s in g["stages"] if s["stage"] == "mla_attend" and g["context"] >= STAGE_CONTEXT]
    head = ["rows", "sequences", "context", "µs a layer", "MB of cache", "GB/s", "% of ceiling"]
    return f"## Latent attention\n\nPartial results and their combination together.\n\n{table(head, rows)}" if rows else ""


def experts(found: dict) -> str:
    by_run = {(g["rows"], g["forced_experts"]): {s["stage"]: s for s in g["stages"]} for g in found["stages"]}
    rows = []
    for s in found["steps"]:
        stage = by_run.get((s["rows"], s["forced_experts"]), {})
        cells = [f"{stage[n]['us']:.1f} ({100 * stage[n]['of_ceiling']:.0f})" if n in stage else "" for n in ("expert_up", "moe_down")]
        rows.append([s["rows"], s["forced_experts"], f"{s['ms']:.3f}", f"{s['ratio_to_floor']:.2f}", *cells])
    head = ["rows", "experts a layer", "ms a step", "x floor", "w1, w3: µs (% of ceiling)", "w2 and shared-down: µs (% of ceiling)"]
    return f"## Forced routings\n\nThe rows choose exactly so many distinct experts in every layer.\n\n{table(head, rows)}" + source("experts", found)


def hops(found: dict, name: str = "hops") -> str:
    rows = [[s["rows"], s["hop_delay_us"], s["delayed_hops"], f"{s['ms']:.3f}", f"{s['ratio_to_floor']:.2f}"] for s in found["steps"]]
    part, title = ("stage", "Slower links") if name == "hops" else ("phase", "Slower links in one launch")
    head = ["rows", "delay a hop, µs", f"delayed {part}s", "ms a step", "x floor"]
    return (f"## {title}\n\nEverything that a {part} behind a collective waits for comes so much later; what it reads before stays early.\n\n{table(head, rows)}"
            + source(name, found))


def torch(found: dict) -> str:
    rows = [[c["rows"], c["torch_us"], c["ours_us"], c["ratio"], c["torch_with_f_b_us"], c["ours_with_kda_mix_us"], c["ratio_with_middle"], c["floor_us"]]
            for c in found["comparison"]]
    head = ["rows", "torch, µs", "ours, µs", "faster", "torch with f_b, µs", "ours with the whole KDA middle, µs", "faster", "floor, µs"]
    return (f"## Against torch and cuBLAS\n\nBF16 products of one KDA + MoE layer ({found['mb']} MB), torch {found['versions']['torch']}, both in CUDA graphs over "
            f"{found['layers']} layers' weights in the same run; `scripts/compare_torch.py` says\nwhat stands on either side.\n\n{table(head, rows)}" + source("torch", found))


def prefill(found: dict) -> str:
    rows = [[kilo(p["context"]), p["steps"], f"{p['ms']:.1f}", f"{p['rows_a_second']:,.0f}", f"{p['ratio_to_floor']:.2f}"] for p in found["prompts"]]
    return "## Prefill\n\n" + table(["prompt", "steps", "ms", "tokens a second", "x floor"], rows) + source("prefill", found)


def decoding(found: dict, name: str) -> str:
    rows = []
    for s in found["steps"]:
        r = s["requests"]
        length = r["spec_decode_acceptance_length"]
        rows.append([s["batch"], s["rows"], f"{s['tokens_per_second']:,.1f}", f"{length:.2f}" if length else "", f"{s['ms']:.3f}", f"{r['median_ttft_ms']:.2f}",
                     f"{r['median_tpot_ms']:.3f}", f"{r['median_e2el_ms'] / 1e3:.3f}"])
    setup, first = found["setup"], found["steps"][0]
    drafts, single = setup["num_drafts"], " in one launch" if name == "one_launch_decode" else ""
    what = f"{drafts} drafts a step, {setup['acceptance']} acceptance of length {setup['acceptance_length']}" if drafts else "No draft"
    head = ["requests", "rows a step", "tokens a second", "tokens a verify step", "ms a step", "TTFT, ms", "TPOT, ms", "request, s"]
    return (f"## Decoding {'with' if drafts else 'without'} drafts{single}\n\n{what}, prompts of {setup['input_len']}, answers of {setup['output_len']} tokens; rank {first['rank']} of "
            f"{first['tp']}. Tokens a second are of all requests together, from when the last has its\nfirst token; the others are medians.\n\n{table(head, rows)}" + source(name, found))


def drafts(found: dict) -> str:
    parts = [(s["batch"], s["step"]) for s in found["steps"] if "draft_share" in (s["step"] or {})]
    rows = [[batch, p["rows"], f"{p['ms']:.3f}", f"{p['ratio_to_floor']:.2f}", f"{p['context_us']:.0f}", f"{p['draft_us']:.0f}", f"{p['accept_us']:.0f}",
             f"{100 * p['draft_share']:.1f}"] for batch, p in parts]
    head = ["requests", "rows", "step and commit, ms", "x floor", "context rows, µs", "blocks and drafts, µs", "acceptance, µs", "these over the step, %"]
    return f"## What drafts add to a step\n\n{table(head, rows)}" if rows else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
