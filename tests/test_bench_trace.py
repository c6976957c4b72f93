"""`--trace` of `k3cuda bench step` without a GPU: what is refused before anything runs, and what is written of a step that ran."""
import json
from types import SimpleNamespace

import click
import numpy as np
import pytest
from command import k3

pytest.importorskip("cupy", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")

from k3cuda import launch_source as ls  # noqa: E402
from k3cuda.cli.bench_trace import StepTrace  # noqa: E402
from k3cuda.cli.model_argument import config_of  # noqa: E402
from k3cuda.emit import Probes  # noqa: E402
from k3cuda.errors import BenchmarkError  # noqa: E402
from k3cuda.launch_trace import LaunchTrace, phases_of  # noqa: E402
from k3cuda.plan import build_plan  # noqa: E402
from k3cuda.runtime.cuda_trace import Traced  # noqa: E402
from k3cuda.runtime.launch_program import launched  # noqa: E402
from k3cuda.runtime.machine import LATENCY_SPECIALIZED, STANDARD  # noqa: E402

REFUSED = {   # words of the command -> what it says, all of it before a GPU is looked for
    "--trace x.txt --rows 1": "found 'x.txt', wanted a name that ends in .json, a Chrome trace, or in .svg, a picture",
    "--trace x.svg --rows 1": "the standard path notes no bytes that a picture could show\n  add --decode-backend latency_specialized",
    "--trace x.json": "found 2 steps; wanted one",
    "--trace x.json --rows 1 --context 1,8": "found 2 steps; wanted one",
    "--trace x.json --rows 1 --hop-delay-us 2": "experts or delays among their flags",
    "--trace-layers 3": "--trace-layers is of what --trace writes",
    "--trace x.json --rows 1 --trace-layers 90-95": "found 95, wanted layers up to 92",
    "--trace x.json --rows 1 --trace-layers 9-3": "wanted layers like 45-48, or all",
    "--trace nowhere/x.json --rows 1": "Invalid value for --trace: nowhere/x.json: No such file or directory",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_traced_or_written_is_refused_first(words, tmp_path):
    assert REFUSED[words] in k3("bench", "step", *words.split(), code=2, cwd=tmp_path).stderr.decode() and not list(tmp_path.iterdir())


class Bench:
    """A StepBench that has run, or would have; `found`: what it notes."""

    rows, rank, tp, kv_cache_dtype, ceiling, declined = 1, 3, 16, "fp8_e4m3", 4.5e12, "too many rows"
    cfg, device = SimpleNamespace(num_hidden_layers=93), SimpleNamespace(name="a GPU")

    def __init__(self, found, single=True):
        self.found, self.single, self.asked = found, single, []

    def open(self, *shape):
        self.asked.append(shape)

    def place(self, *shape):
        self.asked.append(shape)

    def traced(self):
        return self.found


def made(layers) -> LaunchTrace:
    """Times that follow one another, of every part."""
    program = launched(build_plan(config_of("kimi-k3"), 16), 1, 132, "fp8_e4m3")
    phases = phases_of(program, layers)
    words = np.zeros((132, len(phases), len(ls.STAMPS)), np.uint64)
    for block, own in enumerate(program.words):
        for phase, at in enumerate(program.places(block)):
            if phase in phases and int(own[at]) >> 16:
                words[block, phase - phases.start] = 1_000 * phase + np.arange(len(ls.STAMPS))
    end = 1_000 * len(program.steps)
    clocks = np.full((132, 2, 2), [[0, 0], [end // 2, end]], np.uint64)   # two cycles a nanosecond
    return LaunchTrace(program, phases.start, words, clocks, np.ones((132, ls.ISSUE_BINS), np.uint32))


def test_the_files_of_a_step_in_one_launch(tmp_path):
    files = [tmp_path / name for name in ("step.json", "step.svg")]
    trace = StepTrace(tuple(map(str, files)), None, 93, LATENCY_SPECIALIZED, 1, False)
    assert trace.probes == [Probes(trace=True, traced_layers=range(46, 50))]
    bench = Bench(made(trace.layers))
    trace.write(bench, 1, 1, 8192)
    assert bench.asked == [(1, 8192, *trace.probes), (1, 1, 8192)]
    bars = [e for e in json.loads(files[0].read_text()) if e["ph"] == "X"]
    assert max(e["dur"] for e in bars if e["tid"] < 2) == pytest.approx(1e-3, abs=1e-3)
    assert {e["args"]["layer"] for e in bars} >= {46, 47, 48, 49} and {e["pid"] for e in bars} == set(range(132))
    assert "rank 3 of 16" in files[1].read_text() and "layers 46 to 49 of 93 in one launch on a GPU" in files[1].read_text()


def test_the_file_of_a_step_stage_by_stage(tmp_path):
    launches = [Traced(f"k{i}", layer, 10 * i, 10 * i + 1, 10 * i + 2, 10 * i + 5, 10 * i + 9) for i, layer in enumerate((None, 0, 1, 1, 2, None))]
    for layers, kernels in ((None, ["k2", "k3", "k4"]), ("all", [f"k{i}" for i in range(6)]), (range(0, 1), ["k1"])):
        path = tmp_path / "step.json"
        StepTrace((str(path),), layers, 3, STANDARD, 1, False).write(Bench(launches, single=False), 1, 1, 1)
        assert [e["name"] for e in json.loads(path.read_text())] == kernels


def test_a_step_that_is_no_launch_is_no_trace_of_one(tmp_path):
    with pytest.raises(BenchmarkError, match="does not run in one launch: too many rows"):
        StepTrace((str(tmp_path / "x.json"),), None, 93, LATENCY_SPECIALIZED, 1, False).write(Bench(None, single=False), 1, 1, 1)


def test_nothing_is_traced_where_nobody_asks():
    trace = StepTrace((), None, 93, STANDARD, 6, True)
    assert not trace and trace.probes == []
    with pytest.raises(click.BadParameter):
        StepTrace(("/proc/none/x.json",), None, 93, STANDARD, 1, False)
