"""When the training of the demo chooses its number of steps again, and what it says of them at its end: the loop itself, with steps that take no PyTorch."""
import importlib
import json
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from command import ROOT

sys.path.append(str(ROOT / "scripts"))
from make_demo_page import read_log  # noqa: E402

START_S, STEP_S, FIRST_S, LOOK_S = 3.0, 0.01, 0.5, 0.02   # until text comes, of a step, of the first one beside it, of a look at the held-out sets
LOADS = [np.ones(4)]


@pytest.fixture
def train(monkeypatch):
    """scripts/demo_training/train.py where there is no PyTorch, on a clock of its own."""
    for name in ("torch", "torch.nn", "torch.nn.functional", "demo_training.model", "demo_training.optimizer"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    monkeypatch.delitem(sys.modules, "demo_training.train", raising=False)
    made = importlib.import_module("demo_training.train")
    clock = SimpleNamespace(s=100.0)
    clock.monotonic = lambda: clock.s
    monkeypatch.setattr(made, "time", clock)

    def steps(folder, options, seed, wanted, workers):
        clock.s += START_S
        yield from wanted

    monkeypatch.setattr(made, "steps", steps)
    yield made
    sys.modules.pop("demo_training.train")


def trainer(train, folder, step: int, count: int):
    class Scripted(train.Trainer):
        def __init__(self):
            self.folder, self.options, self.seed, self.workers, self.device, self.watched = folder, {}, 0, 0, "cpu", 1
            self.step, self.schedule, self.is_fixed, self.measured, self.calls = step, train.Schedule(count, 1, 0, ((0.0, 128),)), False, {}, 0
            self.model, self.optimizer, self.log_file = MagicMock(), MagicMock(), (folder / "train.jsonl").open("a")

        def backward(self, batches):
            train.time.s += STEP_S + (0 if self.calls else FIRST_S)
            self.calls += 1
            return np.ones((2, 2)), LOADS, 0

        def scores(self, count):
            train.time.s += LOOK_S
            return {"addition": 0.5}

        def save(self):
            self.saved = self.step

    return Scripted()


def run(made, train, seconds: float) -> bool:
    return made.run(train.time.s + seconds)


def test_a_call_that_goes_on_keeps_the_schedule_it_was_given(train, tmp_path):
    """At any step from where the number is chosen again, and with less time than the rest takes."""
    for step in (1539, 1700, 2400):
        made = trainer(train, tmp_path, step, 2700)
        left = (2700 - step) * STEP_S
        assert not run(made, train, START_S + FIRST_S + left / 3 if step < 2400 else START_S), step
        assert made.schedule.count == 2700 and step < made.step < 2430 and made.saved == made.step, step
    made = trainer(train, tmp_path, 1700, 2700)
    assert run(made, train, 30) and (made.step, made.schedule.count) == (2700, 2700)


def test_what_a_step_takes_is_neither_the_start_nor_the_first_one(train, tmp_path):
    """A call that goes on just before the place where the number is chosen again measures steps alone."""
    made = trainer(train, tmp_path, 1537, 2700)
    assert run(made, train, START_S + FIRST_S + 20)   # 20 s are 2,000 steps, with looks at the held-out sets fewer
    assert made.step == made.schedule.count and 1539 + 1800 < made.step < 1539 + 2000


def test_a_first_call_fills_its_time(train, tmp_path):
    for count in (1000, 3000):   # too few, too many for 20 s
        made = trainer(train, tmp_path, 0, count)
        made.measured = {128: 20 / count}
        assert run(made, train, 20) and 1500 < made.step < 1650, count
        assert made.step >= train.ENOUGH * made.schedule.count


def test_the_rate_is_down_when_the_time_is_over(train, tmp_path):
    """Steps that become slower behind the last choice of their number: the first real run stopped at a tenth of the rate."""
    made = trainer(train, tmp_path, 1700, 2700)
    seconds = START_S + FIRST_S + 1000 * STEP_S * 0.7 + 19 * LOOK_S   # what seven in ten of the steps take
    assert not run(made, train, seconds)
    rates = [call.args[0] for call in made.optimizer.step.call_args_list]
    assert made.step < 2450 and rates[0] > 0.9 and rates[-1] < 0.01
    assert max(later - earlier for earlier, later in zip(rates, rates[1:])) <= 0


def test_the_log_ends_with_the_steps_that_were_trained(train, tmp_path):
    made = trainer(train, tmp_path, 0, 1000)
    made.log(started={"count": 1000, "commit": "abc"})
    made.is_fixed = True
    assert run(made, train, START_S + FIRST_S + 0.95 * 1000 * STEP_S + 19 * LOOK_S)   # stopped where it is as good as done
    assert 900 < made.step < 1000
    made.end(10, 0.0)
    found = read_log(tmp_path / "train.jsonl")
    assert found["started"] == {"count": made.step, "commit": "abc"} and found["held_out"] == {"addition": 0.5}
    assert json.loads((tmp_path / "train.jsonl").read_text().splitlines()[0])["started"]["count"] == 1000
