"""docs/performance.md is what its JSON files say, and hides no miss."""
import importlib.util
import json
import re

import pytest
from command import ROOT

from k3cuda.runtime.machine import LATENCY_SPECIALIZED, NOT_AUTO

spec = importlib.util.spec_from_file_location("make_performance", ROOT / "scripts/make_performance.py")
made = importlib.util.module_from_spec(spec)
spec.loader.exec_module(made)

RUN = {"commit": "abc", "versions": {"nvrtc": "13.0", "torch": "2.11"}, "gpu": "NVIDIA H200", "driver": "580", "clocks": "1980 MHz", "command": "k3cuda bench"}


def step(rows=1, context=8192, ratio=1.25, **more):
    return {"rows": rows, "sequences": rows if rows > 8 else 1, "context": context, "ms": ratio * 2, "rows_a_second": rows / ratio, "floor_ms": 2.0, "ratio_to_floor": ratio,
            "us_a_layer": 21.5, "distinct_experts": 16.0, "ceiling_tb_s": 4.5, "tp": 16, "rank": 3, "kv_cache_dtype": "fp8_e4m3", "forced_experts": 0,
            "hop_delay_us": 0.0, "delayed_hops": 0} | more


def stage(name, share, mb=1.0, fits=False):
    return {"stage": name, "operations": 24, "us": 10.0, "us_a_step": 240.0, "mb": mb, "gb_s": 4500 * share, "of_ceiling": share, "fits_cache": fits}


def group(rows, context, *stages, forced=0):
    return {"rows": rows, "sequences": 1, "context": context, "forced_experts": forced, "stages": list(stages)}


@pytest.fixture
def folder(tmp_path):
    def put(name, **found):
        (tmp_path / f"{name}.json").write_text(json.dumps(found | RUN))
    put("step", layers=93, skipped=[{"rows": 64, "sequences": 64, "context": 131072, "reason": "no room"}], steps=[step(), step(context=131072, ratio=1.5), step(64)],
        stages=[group(1, 8192, stage("mla_attend", 0.5), stage("route", 0.0, 0.0)), group(1, 131072, stage("mla_attend", 0.85))])
    return tmp_path, put


def test_the_page_is_up_to_date():
    assert (ROOT / "docs/performance.md").read_text(encoding="utf-8") == made.page(), "run scripts/make_performance.py"


def test_why_auto_leaves_the_step_in_one_launch_is_what_the_page_has():
    """The package has no benchmark's file, but `k3cuda info` gives two of its times."""
    data = {name: json.loads((ROOT / f"docs/benchmarks/{name}.json").read_text(encoding="utf-8")) for name in ("step", "one_launch")}
    for rows in (1, 8):
        (one,), (standard,) = (made.steps(data, name, rows=rows, sequences=1, context=rows) for name in ("one_launch", "step"))
        assert f"of {rows} row{'s' if rows > 1 else ' takes'} {one['ms']:.2f} {'ms ' if rows == 1 else ''}against {standard['ms']:.2f}" in NOT_AUTO[LATENCY_SPECIALIZED]


def test_a_table_is_there_only_if_its_file_is(folder):
    path, put = folder
    page = made.page(path)
    assert "| 1 | 1 | 8K | 2.500 |" in page and "| 1 | 1 | 128K | 3.000 |" in page and "64 rows of 64 at 128K not run: no room" in page
    assert "| `mla_attend` | 24 | 10.0 | 50 |" in page and "| `route` | 24 | 10.0 |  |" in page and "| all of a step |  | 480 |" in page
    assert "## Against torch" not in page and "Not measured yet: `one_launch`, `one_launch_hops`, `one_launch_decode`, `experts`, `hops`, `torch`, `prefill`, `idle`, `first_token`, `load`, `decode`, `decode_plain`, `collectives-2`, `rank_steps`, `rank_steps-1`, `rank_steps-2`." in page
    put("torch", layers=9, mb=79.0, comparison=[{"rows": 1, "torch_us": 44.6, "ours_us": 20.0, "ratio": 2.23, "torch_with_f_b_us": 47.0, "ours_with_kda_mix_us": 22.0,
                                                 "ratio_with_middle": 2.14, "floor_us": 17.3}])
    page = made.page(path)
    assert "| 1 | 44.6 | 20.0 | 2.23 |" in page and "torch 2.11" in page and "Not measured yet: `one_launch`, `one_launch_hops`, `one_launch_decode`, `experts`, `hops`, `prefill`, `idle`, `first_token`, `load`, `decode`, `decode_plain`, `collectives-2`, `rank_steps`, `rank_steps-1`, `rank_steps-2`." in page


def test_the_worst_of_all_contexts_is_judged_and_a_miss_needs_its_cause(folder):
    path, put = folder
    assert "| whole step, 1 row, any context | at most 2.0 x the floor | 1.50 | yes |" in made.page(path)
    put("step", layers=93, skipped=[], stages=[], steps=[step(ratio=1.2), step(context=131072, ratio=2.5)])
    with pytest.raises(SystemExit, match="1 row, any context: 2.50, wanted at most 2.0 x the floor: say what bounds it under 'step_1' in causes.json"):
        made.page(path)
    (path / "causes.json").write_text(json.dumps({"step_1": "hand-over"}))
    assert "| 2.50 | no: hand-over |" in made.page(path)


def test_a_step_in_one_launch_is_judged_by_its_tokens_and_by_slower_links(folder):
    path, put = folder
    put("one_launch_hops", steps=[step(8, ratio=4.0), step(8, ratio=4.8, hop_delay_us=2.5, delayed_hops=465), step(ratio=2.0), step(ratio=3.0, hop_delay_us=2.5)])
    put("one_launch_decode", setup={"num_drafts": 7, "acceptance": "synthetic", "acceptance_length": 6.0, "input_len": 1, "output_len": 1000}, steps=[
        {"batch": 1, "rows": 8, "tp": 16, "rank": 0, "ms": 5.5, "tokens_per_second": 1090.0, "step": None,
         "requests": {"spec_decode_acceptance_length": 6.0, "median_ttft_ms": 9.0, "median_tpot_ms": 0.9, "median_e2el_ms": 900.0}}])
    page = made.page(path)
    for line in ("| at most 25 % longer | 20.0 | yes |", "| at least 1,050 tokens a second | 1,090 | yes |", "## Slower links in one launch", "| 8 | 2.5 | 465 | 9.600 | 4.80 |",
                 "## Decoding with drafts in one launch", "| 1 | 8 | 1,090.0 | 6.00 | 5.500 | 9.00 | 0.900 | 0.900 |"):
        assert line in page, line


def test_every_other_table(folder):
    path, put = folder
    put("experts", steps=[step(8, forced_experts=120, ratio=1.4)], stages=[group(8, 8192, stage("expert_up", 0.9), stage("moe_down", 0.7), forced=120)])
    put("hops", steps=[step(hop_delay_us=2.5, delayed_hops=462)])
    put("prefill", prompts=[{"context": 8192, "steps": 32, "ms": 800.0, "rows_a_second": 10240.0, "ratio_to_floor": 1.3}])
    put("idle", cases=[
        {"model": "8 layers of rank 3 of 16", "rows": 1, "sampling": "temperature 0", "idle_us_median": 2.5, "idle_us_p99": 3.0, "step_us_median": 900.0, "wall_us_a_step": 903.0},
        {"model": "tiny", "rows": 64, "sampling": "temperature 0", "idle_us_median": 70.0, "idle_us_p99": 80.0, "step_us_median": 30.0, "wall_us_a_step": 100.0}])
    put("first_token", models=[{"model": "tiny", "decode_backend": "standard", "runs": 10, "first_token_s_median": 1.214, "first_token_s_max": 1.4, "load_s_median": 0.21}])
    requests = {"spec_decode_acceptance_length": 6.0, "median_ttft_ms": 9.0, "median_tpot_ms": 1.2, "median_e2el_ms": 1500.0}
    decoded = {"batch": 1, "rows": 8, "tp": 16, "rank": 0, "ms": 7.25, "tokens_per_second": 830.0, "requests": requests,
               "step": step(8, ratio=3.0) | {"context_us": 40.4, "draft_us": 240.0, "accept_us": 39.6, "draft_share": 0.0533}}
    setup = {"num_drafts": 7, "acceptance": "synthetic", "acceptance_length": 6.0, "input_len": 1, "output_len": 1000}
    put("decode", steps=[decoded], setup=setup)
    put("decode_plain", steps=[decoded | {"rows": 1, "requests": requests | {"spec_decode_acceptance_length": None}}], setup=setup | {"num_drafts": None})
    page = made.page(path)
    for line in ("| 1 | 8 | 830.0 | 6.00 | 7.250 | 9.00 | 1.200 | 1.500 |", "| 1 | 1 | 830.0 |  | 7.250 | 9.00 | 1.200 | 1.500 |", "7 drafts a step, synthetic acceptance of length 6.0",
                 "| 1 | 8 | 6.000 | 3.00 | 40 | 240 | 40 | 5.3 |", "| context rows, 7 drafts and acceptance over the 8-row step | at most 8 % | 5.3 | yes |", "| 8 | 120 | 2.800 | 1.40 | 10.0 (90) | 10.0 (70) |", "| 1 | 2.5 | 462 | 2.500 | 1.25 |", "| 8K | 32 | 800.0 | 10,240 | 1.30 |", "| tiny | 64 |",
                 "| prefill, 8K prompt | at least 8,000 tokens a second | 10,240 | yes |", "| GPU idle between steps of a rank's layers, median | at most 5 µs | 2.50 | yes |",
                 "kernels in the cache | at most 1.5 s | 1.21 | yes |", "| `tiny` | standard | 10 | 1.21 | 1.40 | 0.21 |",
                 "the GPU waits: 64 rows of tiny: 70 µs of 100 a step."):
        assert line in page, line


@pytest.mark.parametrize("name", made.FILES)
def test_every_file_has_a_command(name):
    script = (ROOT / "scripts/gpu.sh").read_text(encoding="utf-8")
    command, = re.findall(rf"^  {name}\) (.*) ;;$", script, re.M)
    assert f"/{name}.json" in command or f"bench_{name}.py" in command
    official, = re.findall(r"for part in ([\w ]+);", script)
    assert name in official.split()


@pytest.mark.parametrize("name", made.RANK_FILES)
def test_every_file_of_several_gpus_has_a_command(name):
    script = (ROOT / "scripts/gpu.sh").read_text(encoding="utf-8")
    assert f'--output "$out/{name.replace("-1", "-$n").replace("-2", "-$n")}.json"' in script


def test_causes_and_targets_name_each_other():
    causes = made.FOLDER / made.CAUSES
    assert not causes.exists() or set(json.loads(causes.read_text(encoding="utf-8"))) <= {t.name for t in made.TARGETS}


def test_ranks_with_a_gpu_each(folder):
    path, put = folder
    steps = [{"how": how, "ranks": how, "rows": 1, "ms": ms, "floor_ms": 1.1} for how, ms in (("looped_back", 1.4), ("nccl", 1.9), ("peer", 1.5))]
    put("rank_steps", ranks=2, layers=8, hops=50, steps=steps, nccl_settings={"NCCL_NVLS_ENABLE": "0"})
    times = [{"collective": "gather", "rows": 1, "bytes": 14336, "by": by, "us": us, "us_p99": us + 1} for by, us in (("nccl", 12.5), ("peer", 4.25))]
    put("collectives-2", ranks=2, nccl="2.28.9", replays=10_000, no_peers="", empty={"us": 1.0}, collectives=times, nccl_settings={"NCCL_NVLS_ENABLE": "0"})
    page = made.page(path)
    assert "| gather | 1 | 14.3 | 12.50 (13.50) | 4.25 (5.25) |" in page and "10,000 replays" in page and page.count("(`NCCL_NVLS_ENABLE=0`)") == 2
    assert "| 1 | 1.100 | 1.400 | 1.900 (+10.0) | 1.500 (+2.0) |" in page
    assert "## The same layers on more GPUs" not in page
    for n, ways in ((1, {"looped_back": 2.5}), (2, {"looped_back": 1.1, "nccl": 2.0, "peer": 1.25})):
        put(f"rank_steps-{n}", ranks=n, layers=6, hops=9, steps=[{"how": how, "ranks": how, "rows": 1, "ms": ms, "floor_ms": 2.0 / n} for how, ms in ways.items()], nccl_settings={})
    page = made.page(path)
    assert "| 1 | 1 |  | 2.000 | 2.500 | 1.25 | 1.00 |" in page and "| 1 | 2 | inside a kernel | 1.000 | 1.250 | 1.25 | 2.00 |" in page and "| 1.100 | 1.10 |" not in page
    assert "in one launch" not in page.partition("## Steps of 2 real ranks")[2]
    put("collectives-2", ranks=2, nccl="2.28.9", replays=10_000, no_peers="rank 1 cannot map", empty={"us": 1.0}, collectives=times[:1], nccl_settings={})
    assert "No exchange: rank 1 cannot map." in made.page(path) and "| 12.50 (13.50) |  |" in made.page(path)


def test_ranks_whose_steps_are_one_launch(folder):
    """Beside the steps stage by stage where there are any; why not of so many rows; a rank's first time is that of its own way."""
    path, put = folder
    one, alone, why = "latency_specialized", "latency_specialized_looped_back", "its inputs are too large"
    ways = {1: {"looped_back": 1.4, "nccl": 1.9, "peer": 1.5, alone: 1.6, one: 1.8}, 8: {"looped_back": 2.4, "nccl": 2.9, "peer": 2.5}}
    steps = lambda ways, n: [{"how": how, "ranks": how, "rows": rows, "ms": ms, "floor_ms": 2.0 / n} for rows, of in ways.items() for how, ms in of.items()]
    declined = [{"how": how, "rows": 8, "reason": f"{rank}{why}"} for how, rank in ((one, "rank 0: "), (alone, ""))]
    put("rank_steps", ranks=2, layers=8, hops=50, steps=steps(ways, 2), declined=declined, nccl_settings={})
    for n, of in ((1, {1: {"looped_back": 2.5, alone: 3.6}, 8: {"looped_back": 4.0}}), (2, ways)):
        put(f"rank_steps-{n}", ranks=n, layers=6, hops=9, steps=steps(of, n), declined=declined, nccl_settings={})
    page = made.page(path)
    for line in ("| 1 | 1.000 | 1.400 | 1.900 (+10.0) | 1.500 (+2.0) | 1.600 | 1.800 (+4.0) |", "| 8 | 1.000 | 2.400 | 2.900 (+10.0) | 2.500 (+2.0) |  |  |",
                 "| 1 | 1 | in one launch | 2.000 | 3.600 | 1.80 | 1.00 |", "| 1 | 2 | in one launch | 1.000 | 1.800 | 1.80 | 2.00 |",
                 "| 1 | 2 | inside a kernel | 1.000 | 1.500 | 1.50 | 1.67 |"):
        assert line in page, line
    assert page.count(f"Not in one launch: 8 rows over 2 ranks ({why}).") == 2 and page.count(f"Not in one launch: 8 rows over 1 rank ({why}).") == 1
