"""Plots: places of points by hand, what each kind takes out of a result, and that every file is XML that says what it shows."""
import json
import re
from xml.etree import ElementTree

import pytest
from command import ROOT, k3, k3_json
from fake_server import OK, fake_server, text

from k3cuda.bench.plots import acceptance, latency, picture, roofline
from k3cuda.bench.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, Chart, Series
from k3cuda.errors import UsageError

PAGE = (ROOT / "docs/bench.md").read_text(encoding="utf-8")
STEP = json.loads((ROOT / "docs/benchmarks/step.json").read_text(encoding="utf-8"))
WIDE, HIGH = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM


def drawn(svg: str, kind: str) -> list[dict]:
    return [dict(e.attrib) for e in ElementTree.fromstring(svg).iter(f"{{http://www.w3.org/2000/svg}}{kind}")]


def texts(svg: str) -> list[str]:
    return [e.text for e in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def places(svg: str) -> list[tuple[float, float]]:
    """Of the markers, as parts of the area between the axes, counted from the origin; the legend's are outside."""
    found = [(float(c["cx"]), float(c["cy"])) for c in drawn(svg, "circle")]
    return [(pytest.approx((x - LEFT) / WIDE, abs=1e-3), pytest.approx((HEIGHT - BOTTOM - y) / HIGH, abs=1e-3)) for x, y in found if x <= WIDTH - RIGHT]


def test_points_stand_where_they_should():
    svg = Chart("a <b>", Axis("x"), Axis("y & z"), (Series(((0.0, 0.0), (4.0, 25.0), (8.0, 50.0)), "one"),)).svg()
    assert places(svg) == [(0, 0), (0.5, 0.5), (1, 1)] and {"a <b>", "y & z", "one", "0", "8", "50"} <= set(texts(svg))
    svg = Chart("", Axis("", log=True), Axis("", log=True), (Series(((1.0, 10.0), (10.0, 100.0), (100.0, 1000.0)), ""),)).svg()
    assert places(svg) == [(0, 0), (0.5, 0.5), (1, 1)] and texts(svg).count("1,000") == 1


def test_ticks_are_round_and_inside():
    for values in ((0.3, 7.7), (1e-4, 3e4), (5.0, 5.0), (0.0, 0.0), (123456.0, 7e8)):
        for log in (False, True):
            if log and not min(values):
                continue
            svg = Chart("", Axis("", log), Axis("", log), (Series(tuple((v, v) for v in values)),)).svg()
            assert all(0 <= x.expected <= 1 and 0 <= y.expected <= 1 for x, y in places(svg)), values
            assert 3 <= sum(bool(re.fullmatch(r"[\d.,e+-]+", t or "")) for t in texts(svg)) <= 40
            assert not re.search(r"nan|inf", svg)


def test_bars_and_names():
    svg = Chart("", Axis("", ticks=(1, 2), low=0.5, high=2.5), Axis("", low=0.0, high=1.0), tuple(Series(((1, 0.5), (2, 0.25)), f"s{i}", i, bar=(i, 2)) for i in (0, 1))).svg()
    bars = [(float(r["x"]), float(r["width"]), float(r["height"])) for r in drawn(svg, "rect")[1:]]
    assert [h / HIGH for _, _, h in bars] == pytest.approx([0.5, 0.25, 0.5, 0.25], abs=1e-3)
    assert bars[0][0] + bars[0][1] == pytest.approx(bars[2][0], abs=0.2)   # side by side
    crowded = Chart("", Axis(""), Axis(""), (Series(((0.0, 0.0), (5.0, 5.0), (5.0, 5.0)), names=("a", "b", "c")),)).svg()
    spots = [(e.get("x"), e.get("y")) for e in ElementTree.fromstring(crowded).iter("{http://www.w3.org/2000/svg}text") if e.text in ("a", "b", "c")]
    assert len(spots) == len(set(spots)) == 3


def serve_run(most, factor):
    return {"max_concurrency": most, "requests": {f"{which}_{name}_ms": factor * ms for name, ms in (("ttft", 20.0), ("tpot", 5.0), ("e2el", 400.0)) for which in ("median", "p90")}}


def test_latency_is_of_the_runs_with_a_limit_in_order():
    found = latency([("x", {"runs": [serve_run(4, 2.0), serve_run(1, 1.0), serve_run(None, 9.0)]})])
    assert [s.label for s in found.series] == ["TPOT p50", "TPOT p90", "TTFT p50", "TTFT p90", "E2EL p50", "E2EL p90"]
    assert found.series[0].points == ((1, 5.0), (4, 10.0)) and found.x.ticks == (1, 4) and found.series[1].dashed
    two = latency([("x", {"runs": [serve_run(1, 1.0)]}), ("y", {"runs": [serve_run(2, 1.0)]})])
    assert two.series[0].label == "x: TPOT p50" and two.series[-1].label == "y: E2EL p90" and two.x.ticks == (1, 2)
    assert latency([("x", {"runs": [serve_run(None, 1.0)]})]) is None


def test_acceptance_is_found_wherever_requests_are():
    numbers = {"spec_decode_per_position_acceptance_rates": [0.8, 0.5], "spec_decode_acceptance_length": 2.3}
    found = acceptance([("x", {"requests": numbers}), ("y", {"runs": [{"max_concurrency": 4, "requests": numbers}]}), ("z", {"steps": [{"batch": 8, "requests": numbers}]}),
                        ("w", {"backends": [{"name": "reference", "requests": numbers}]})])
    assert [s.label for s in found.series] == ["x: 2.30 a step", "y concurrency 4: 2.30 a step", "z batch 8: 2.30 a step", "w reference: 2.30 a step"]
    assert found.series[0].points == ((1, 0.8), (2, 0.5)) and acceptance([("x", {"requests": {}})]) is None


def test_the_roofline_is_of_what_was_measured():
    found = roofline([("step", STEP)])
    roof, steps, stages = found.series
    ceiling = max(s["ceiling_tb_s"] for s in STEP["steps"])
    assert {y for _, y in roof.points} == {ceiling} and len(steps.points) == len(STEP["steps"])
    for s, (mb, rate) in zip(STEP["steps"], steps.points):
        assert mb == s["floor_bytes"] / 1e6 and rate == pytest.approx(s["ceiling_tb_s"] / s["ratio_to_floor"], rel=2e-3)
    assert "mla_attend" in stages.names and all(rate < ceiling * 1.05 for _, rate in stages.points)


@pytest.mark.parametrize("document, kind, said", [({}, None, "no numbers for any plot"), (STEP, "latency", "no numbers for latency"), ({"runs": [3]}, None, "no result of a benchmark"),
                                                  ({"steps": [{"floor_bytes": 1, "ms": 1}]}, "roofline", "no result of a benchmark")])
def test_what_is_refused(document, kind, said):
    with pytest.raises(UsageError, match=said):
        picture([("x", document)], kind)


RATES = {"spec_decode_per_position_acceptance_rates": [0.8, 0.5], "spec_decode_acceptance_length": 2.3}


@pytest.mark.parametrize("number", ["-1", "-0.5", "NaN", "-NaN", "Infinity", "1e400", "-1e400", "1e308", "1" + 400 * "0", '"7"', "[1]", '{"a": 1}', "1.5e"])
def test_damaged_numbers_are_no_result(number, tmp_path, monkeypatch):
    """In every place of every kind, through the command."""
    from click.testing import CliRunner

    from k3cuda.cli.bench_plot import plot
    monkeypatch.chdir(tmp_path)
    step = {"rows": 1, "context": 1024, "ceiling_tb_s": 4.0, "floor_bytes": 10, "ms": 2.0}
    group = {"rows": 1, "context": 1024, "ceiling_tb_s": 4.0, "stages": [{"stage": "s", "mb": 2.0, "gb_s": 3.0}]}
    whole = ({"runs": [serve_run(1, 1.0), serve_run(2, 1.0)]}, {"requests": RATES}, {"steps": [step, step], "stages": [group]})
    places = (("runs", 0, "max_concurrency"), ("runs", 1, "requests", "p90_ttft_ms")), (("requests", "spec_decode_per_position_acceptance_rates", 0),
             ("requests", "spec_decode_acceptance_length")), (("steps", 0, "floor_bytes"), ("steps", 0, "ms"), ("stages", 0, "stages", 0, "mb"), ("stages", 0, "stages", 0, "gb_s"))
    for document, of_it in zip(whole, places):
        for place in of_it:
            damaged = part = json.loads(json.dumps(document))
            for key in place[:-1]:
                part = part[key]
            part[place[-1]] = "HERE"
            (tmp_path / "x.json").write_text(json.dumps(damaged).replace('"HERE"', number))
            found = CliRunner().invoke(plot, ["x.json"])
            assert isinstance(found.exception, UsageError) and re.search("no result of a benchmark|no JSON", str(found.exception)), (number, place, found.exception)


def test_the_commands_of_the_page(tmp_path):
    commands = re.findall(r"^k3cuda (bench plot .+)$", PAGE, re.M)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    (tmp_path / "server.json").write_text(json.dumps({"runs": [serve_run(1, 1.0), serve_run(2, 1.5)]}))
    for words in commands:
        out = k3(*words.split(), cwd=tmp_path).stdout
        svg = out.decode() if out else (tmp_path / words.split()[-1]).read_text()
        assert len(drawn(svg, "circle")) > 4
    assert len(commands) == 2 and k3("bench", "plot", "docs/bench.md", cwd=tmp_path, code=2).stderr.startswith(b"Error: docs/bench.md: no JSON")


def test_a_benchmark_plots_its_own_result(tmp_path):
    with fake_server([OK + text("a"), 0.01, text("b", finish_reason="stop") + b"data: [DONE]\n\n"]) as (url, _):
        k3_json("bench", "serve", "--base-url", url, "--model", "m", "--num-prompts", 2, "--max-concurrency", "1,2", "--plot", tmp_path / "p.svg")
    assert "TPOT p90" in texts((tmp_path / "p.svg").read_text())
    k3("bench", "throughput", "tiny-random", "--num-prompts", 1, "--output-len", 4, "--input-len", 2, "--draft-model", "tiny-random-draft", "--acceptance-length", 3, "--temperature", 0,
       "--plot", tmp_path / "a.svg")
    assert len(drawn((tmp_path / "a.svg").read_text(), "rect")) == 1 + 7
    assert b"no numbers for acceptance" in k3("bench", "throughput", "tiny-random", "--num-prompts", 1, "--output-len", 2, "--input-len", 2, "--plot", tmp_path / "b.svg", code=2).stderr
