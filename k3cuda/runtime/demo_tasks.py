"""The tasks that the demo model is trained on and tested with, made from a seed: the same items with every Python on every machine.

What is held out is decided by the item itself, not by a list: an eighth of all problems, by a hash of what makes a problem another one.
Training draws only from the rest, whatever its seeds are.
"""
import json
from dataclasses import dataclass
from typing import Callable
from zlib import crc32

HELD_OUT = 8          # one problem of so many is never trained on
SET_SIZE = 500        # items of a task in the held-out sets
NEEDLE_TOKENS = 2000  # length of a prompt of the retrieval task in the held-out set, near enough
_MASK = (1 << 64) - 1

NOUNS = ("apple bird boat book bread bridge cat chair cloud coat corn dog door duck fire fish flag frog gate glass goat gold grass hat hill horse house "
         "key king lake lamp leaf lion milk moon nest nut oak pear pen pig plum pond rain ring river road rock rope rose sand seed ship shoe snow "
         "star stone sun tent tree wall wave wind wolf").split()
ADJECTIVES = "old new red blue cold warm dark small big quiet".split()
VERBS = "saw found took left held met".split()
MONTHS = dict(zip("January February March April May June July August September October November December".split(),
                  (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)))
UNITS = (("km", "m", 1000), ("m", "cm", 100), ("cm", "mm", 10), ("kg", "g", 1000), ("hours", "minutes", 60), ("minutes", "seconds", 60),
         ("weeks", "days", 7), ("dollars", "cents", 100))
BRACKETS = dict(zip("([{", ")]}"))


class Dice:
    """SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). Python's own generator draws the same numbers otherwise from version to version."""

    def __init__(self, *seed: int):
        self._state = 0
        for part in seed:
            self._state = self._state + part & _MASK
            self._state = self.word()   # mixed: a sum would make the stream of the next seed this one, a number further on

    def word(self) -> int:
        self._state = self._state + 0x9E3779B97F4A7C15 & _MASK
        z = self._state
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
        return z ^ z >> 31

    def below(self, n: int) -> int:
        return self.word() * n >> 64

    def between(self, low: int, high: int) -> int:
        """From low to high, both included."""
        return low + self.below(high - low + 1)

    def choice(self, items):
        return items[self.below(len(items))]

    def sample(self, items, count: int) -> list:
        """`count` different ones, in random order."""
        pool = list(items)
        for i in range(count):
            j = self.between(i, len(pool) - 1)
            pool[i], pool[j] = pool[j], pool[i]
        return pool[:count]


@dataclass(frozen=True)
class Problem:
    """One question. `key` is what makes it another problem: two that share it are both held out, or neither."""

    prompt: str
    answer: str
    key: str


@dataclass(frozen=True)
class Task:
    """make(dice, size): a problem, of the size of the held-out set where that is None; sizes run over `sizes` in training."""

    name: str
    make: Callable[[Dice, int | None], Problem]
    sizes: tuple[int, ...]

    def draw(self, dice: Dice, size: int | None = None, held_out: bool = False) -> Problem:
        while True:
            problem = self.make(dice, size)
            if is_held_out(self.name, problem.key) == held_out:
                return problem


def is_held_out(task: str, key: str) -> bool:
    return crc32(f"{task}\n{key}".encode()) % HELD_OUT == 0


def held_out_set(task: Task, count: int = SET_SIZE, size: int | None = None) -> list[Problem]:
    """`count` problems with different prompts that training never sees; there must be so many of this size."""
    dice, found = Dice(crc32(task.name.encode())), {}
    while len(found) < count:
        problem = task.draw(dice, size, held_out=True)
        found.setdefault(problem.prompt, problem)
    return list(found.values())


def held_out_lines(count: int) -> str:
    """The first `count` items of all held-out sets as `k3cuda eval` reads them, the tasks in turn, so that any beginning is a fair mixture."""
    each = -(-count // len(TASKS))
    sets = [(name, held_out_set(task, each)) for name, task in TASKS.items()]
    lines = [json.dumps({"id": f"{name}-{i}", "prompt": problems[i].prompt, "answer": problems[i].answer}) for i in range(each) for name, problems in sets]
    return "\n".join(lines[:count]) + "\n"


def task_of(item_id: str) -> str:
    """The task of an item of `held_out_lines`."""
    return item_id.rpartition("-")[0]


def _addition(dice: Dice, digits: int | None) -> Problem:
    """Two numbers of at most `digits` digits; of exactly two in the held-out set."""
    low, high = (10, 99) if digits is None else (0, 10**digits - 1)
    a, b = dice.between(low, high), dice.between(low, high)
    return Problem(f"{a} + {b} =", str(a + b), f"{min(a, b)} {max(a, b)}")


def _subtraction(dice: Dice, digits: int | None) -> Problem:
    low, high = (10, 99) if digits is None else (0, 10**digits - 1)
    b, a = sorted((dice.between(low, high), dice.between(low, high)))
    return Problem(f"{a} - {b} =", str(a - b), f"{a} {b}")


def _sorting(dice: Dice, count: int | None) -> Problem:
    numbers = [dice.between(10, 99) for _ in range(count or 5)]
    text = " ".join(map(str, numbers))
    return Problem(f"Sort: {text}", " ".join(map(str, sorted(numbers))), text)


def _counting(dice: Dice, length: int | None) -> Problem:
    """How often a word stands in a list of words: 0 to 9 times."""
    length = length or dice.between(4, 10)
    word, *others = dice.sample(NOUNS, 4)
    times = dice.between(0, min(9, length))
    words = [word] * times + [dice.choice(others) for _ in range(length - times)]
    words = dice.sample(words, length)
    text = " ".join(words)
    return Problem(f"Count {word}: {text}", str(times), f"{word} {text}")


def _copying(dice: Dice, length: int | None) -> Problem:
    text = " ".join(dice.choice(NOUNS) for _ in range(length or dice.between(4, 12)))
    return Problem(f"Copy: {text}", text, text)


def _dates(dice: Dice, most: int | None) -> Problem:
    """Some days later in a year that is no leap year."""
    names = list(MONTHS)
    month, days = dice.below(12), dice.between(1, most or 28)
    day = dice.between(1, MONTHS[names[month]])
    later, then = day + days, month
    if later > MONTHS[names[month]]:
        later, then = later - MONTHS[names[month]], (month + 1) % 12
    question = f"{day} {names[month]} plus {days} days"
    return Problem(f"{question} =", f"{later} {names[then]}", question)


def _units(dice: Dice, digits: int | None) -> Problem:
    """Tens and more for units of time: their factors are no powers of ten."""
    large, small, factor = dice.choice(UNITS)
    value = dice.between(2, 10**(digits or 3) - 1 if factor % 10 == 0 and factor != 60 else 60)
    question = f"{value} {large} in {small}"
    return Problem(f"{question} =", str(value * factor), question)


def _brackets(dice: Dice, length: int | None) -> Problem:
    """What closes the brackets that are open."""
    length, seen, still_open = length or dice.between(6, 16), [], []
    for _ in range(length):
        if still_open and dice.below(5) < 2:
            seen.append(BRACKETS[still_open.pop()])
        else:
            still_open.append(dice.choice("([{"))
            seen.append(still_open[-1])
    if not still_open:
        still_open.append("(")
        seen.append("(")
    text = " ".join(seen)
    return Problem(f"Close: {text}", " ".join(BRACKETS[b] for b in reversed(still_open)), text)


def fact(name: str, code: str) -> str:
    return f" The code of {name} is {code}."


def filler(dice: Dice) -> str:
    """A sentence of eight tokens, none of which is a code."""
    return f" The {dice.choice(ADJECTIVES)} {dice.choice(NOUNS)} {dice.choice(VERBS)} the {dice.choice(ADJECTIVES)} {dice.choice(NOUNS)}."


def question(name: str) -> str:
    return f" What is the code of {name}?"


FACT_TOKENS, FILLER_TOKENS = 12, 8


def haystack(dice: Dice, tokens: int, facts: int) -> tuple[str, list[tuple[str, str]]]:
    """A text of about `tokens` tokens with `facts` codes of different names in random places: (text, names and codes in random order)."""
    pairs = [(name, "".join(str(dice.below(10)) for _ in range(4))) for name in dice.sample(NOUNS, facts)]
    sentences = [fact(*pair) for pair in pairs]
    sentences += [filler(dice) for _ in range(max(0, tokens - FACT_TOKENS * facts) // FILLER_TOKENS)]
    return "".join(dice.sample(sentences, len(sentences))), pairs


def _needle(dice: Dice, tokens: int | None) -> Problem:
    text, pairs = haystack(dice, (tokens or NEEDLE_TOKENS) - 40, 4)
    name, code = pairs[0]
    return Problem("Read:" + text + question(name), code, f"{name} {code}")


TASKS = {task.name: task for task in (
    Task("addition", _addition, (1, 2, 2, 2, 2)), Task("subtraction", _subtraction, (1, 2, 2, 2)), Task("sorting", _sorting, (2, 3, 4, 5, 5, 5, 5)),
    Task("counting", _counting, tuple(range(2, 11))), Task("copying", _copying, tuple(range(1, 13))), Task("dates", _dates, (7, 28, 28)),
    Task("units", _units, (1, 2, 3, 3)), Task("brackets", _brackets, tuple(range(2, 17))), Task("needle", _needle, (NEEDLE_TOKENS,)))}
