"""The demo model's tasks: answers worked out again in another way, sets that do not change, nothing of them drawn in training."""
import json
import re
from hashlib import sha256

import pytest
from command import k3_json

from k3cuda.cli.eval import _questions
from k3cuda.errors import UsageError
from k3cuda.runtime.demo_tasks import HELD_OUT, MONTHS, TASKS, UNITS, Dice, held_out_lines, held_out_set, is_held_out, task_of
from k3cuda.runtime.scorers import SCORERS

# The first 40 items of each set: another generator would make other sets under the same name.
DIGESTS = {
    "addition": "225b2fac6c4a", "subtraction": "188788a77452", "sorting": "bca20afc1c9e", "counting": "833d8af6f013", "copying": "6700c9f5e7df",
    "dates": "06c7aab2ee23", "units": "5638f86ae36a", "brackets": "f0a66520cf22", "needle": "ee59592f2f8c"}


def right(task: str, prompt: str) -> str:
    """The answer by a reader of the prompt that shares nothing with what made it."""
    words = prompt.split()
    if task in ("addition", "subtraction"):
        return str(int(words[0]) + int(words[2]) * (1 if words[1] == "+" else -1))
    if task == "sorting":
        return " ".join(sorted(words[1:]))   # all of two digits
    if task == "counting":
        return str(len(re.findall(rf" {words[1][:-1]}\b", prompt)) - 1)
    if task == "copying":
        return prompt.removeprefix("Copy: ")
    if task == "dates":
        day, month, _, days, *_ = words
        of_year = [f"{d} {name}" for name, length in MONTHS.items() for d in range(1, length + 1)]
        return of_year[(of_year.index(f"{day} {month}") + int(days)) % 365]
    if task == "units":
        return str(int(words[0]) * next(factor for large, small, factor in UNITS if (large, small) == (words[1], words[3])))
    if task == "brackets":
        text = "".join(words[1:])
        while (shorter := re.sub(r"\(\)|\[\]|\{\}", "", text)) != text:
            text = shorter
        return " ".join({"(": ")", "[": "]", "{": "}"}[c] for c in text[::-1])
    name = re.search(r"What is the code of (\w+)\?$", prompt)[1]
    [code] = re.findall(rf"The code of {name} is (\d+)\.", prompt)
    return code


@pytest.mark.parametrize("name", TASKS)
def test_held_out_sets(name):
    few = 40 if name == "needle" else 500
    problems = held_out_set(TASKS[name], few)
    assert len({p.prompt for p in problems}) == few and all(is_held_out(name, p.key) for p in problems)
    assert [p.answer for p in problems] == [right(name, p.prompt) for p in problems]
    assert sha256("\n".join(p.prompt for p in problems[:40]).encode()).hexdigest()[:12] == DIGESTS[name]


@pytest.mark.parametrize("name", [n for n in TASKS if n != "needle"])
def test_training_never_draws_what_is_held_out(name):
    task, dice = TASKS[name], Dice(7)
    drawn = [task.draw(dice, dice.choice(task.sizes)) for _ in range(300)]
    assert not any(is_held_out(name, p.key) for p in drawn) and [p.answer for p in drawn] == [right(name, p.prompt) for p in drawn]
    made = [task.make(dice, None) for _ in range(2000)]
    share = sum(is_held_out(name, p.key) for p in made) / len(made)
    assert abs(share - 1 / HELD_OUT) < 0.05   # six standard errors


def test_an_addition_is_held_out_in_both_orders():
    task, dice = TASKS["addition"], Dice(1)
    keys = {tuple(p.prompt.split()[::2]): p.key for p in (task.make(dice, None) for _ in range(4000))}
    assert all(keys[b, a] == key for (a, b), key in keys.items() if (b, a) in keys)


def test_dice():
    dice = Dice(0)
    assert {dice.between(2, 4) for _ in range(99)} == {2, 3, 4} and sorted(dice.sample(range(9), 9)) == list(range(9))
    assert Dice(1, 2).word() != Dice(2, 1).word()
    words = [{dice.word() for _ in range(500)} for dice in (Dice(s, i, j) for s in (0, 1) for i in (0, 1, 2) for j in (0, 1))]
    assert len(set.union(*words)) == 500 * len(words)   # no stream is another one further on
    state = Dice(0)
    state._state = 0
    assert state.word() == 0xE220A8397B1DCDAF   # the first number of the published SplitMix64 from seed 0


def test_lines_take_the_tasks_in_turn():
    items = [json.loads(line) for line in held_out_lines(11).splitlines()]
    assert [task_of(i["id"]) for i in items] == [*TASKS, *list(TASKS)[:2]] and items[9]["id"] == "addition-1"


def test_exact():
    score = SCORERS["exact"].score
    assert score(" 1  2\n", "1 2") == (1.0, "1 2") and score("1 2 3", "1 2") == (0.0, "1 2 3") and score("", "x") == (0.0, None)


def test_the_command_scores_each_task():
    found = k3_json("eval", "demo", "--limit", 10, "-n", 4, "--temperature", 0, "--max-model-len", 128, "--json", code=8)
    assert found["scorer"] == "exact" and found["items"] == 9 and found["failed"] == 1   # the needle is longer than this context
    assert {name: part["items"] for name, part in found["tasks"].items()} == {name: 2 if name == "addition" else name != "needle" for name in TASKS}
    assert sum(part["score"] * part["items"] for part in found["tasks"].values() if part["items"]) == found["score"] * 9


def test_scorers_that_are_missing_or_do_not_fit():
    with pytest.raises(UsageError, match="no --scorer for q.jsonl"):
        _questions("q.jsonl", None, None, False)
    with pytest.raises(UsageError, match="found integer for the tasks of demo"):
        _questions("demo", "integer", None, True)
