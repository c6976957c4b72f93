"""Rows of training text: conversations in K3's chat format, by step and seed alone, whoever makes them."""
import multiprocessing
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from functools import cached_property

import numpy as np

from k3cuda.runtime.chat import encode_chat
from k3cuda.runtime.demo_tasks import TASKS, Dice, haystack, held_out_set, is_held_out, question
from k3cuda.runtime.tokenizer import Tokenizer

SHORT, LONG = 128, 2048                 # tokens of a row with some problems, and with a whole text
TURN = 32                               # tokens of a problem with what stands around it; few have less
PADDING, TEXT, ANSWER = 0, 1, 2         # kinds of tokens: nothing is learned of padding, little of text, all of an answer and its end
LONG_TASK = "needle"
# How often a problem of a short row is of a task: what needs examples most comes most.
SHARES = {"addition": 5, "subtraction": 4, "sorting": 4, "counting": 10, "copying": 2, "dates": 2, "units": 2, "brackets": 3}


class Rows:
    """Turns problems into ids, as k3cuda/runtime/chat.py would; what stands around questions and answers is encoded once.

    shares: how often a problem of a short row is of a task. sizes: of problems, where they are not those of the task. length: of a short row.
    """

    def __init__(self, tokenizer: Tokenizer, shares: dict[str, int] = SHARES, sizes: dict[str, tuple[int, ...]] | None = None, length: int = SHORT):
        self.tokenizer, self.shares, self.sizes, self.length = tokenizer, shares, sizes or {}, length
        self.deck = [name for name, n in shares.items() for _ in range(n)]

    @cached_property
    def _frame(self):
        """What stands before a question, between it and the answer, and behind the answer."""
        mark = "x"
        ids = encode_chat(self.tokenizer, [{"role": "user", "content": mark}, {"role": "assistant", "content": mark}], thinking=False, thinking_effort=None,
                          add_generation_prompt=False)
        one = self.tokenizer.encode(mark)
        first = next(i for i in range(len(ids)) if ids[i:i + len(one)] == one)
        last = next(i for i in range(len(ids) - len(one), 0, -1) if ids[i:i + len(one)] == one)
        return ids[:first], ids[first + len(one):last], ids[last + len(one):]

    def row(self, turns, length: int) -> tuple[np.ndarray, np.ndarray]:
        """ids int16 and kinds uint8, [length] each, of (question, answer) pairs; turns that do not fit are left out."""
        before, between, behind = self._frame
        ids, kinds = np.zeros(length, np.int16), np.zeros(length, np.uint8)
        at = 0
        for asked, answer in turns:
            asked, answer = self.tokenizer.encode(asked), self.tokenizer.encode(answer)
            turn = [*before, *asked, *between, *answer, *behind]
            if at + len(turn) > length:
                break
            ids[at:at + len(turn)] = turn
            kinds[at:at + len(turn)] = TEXT
            kinds[at + len(turn) - len(answer) - len(behind):at + len(turn)] = ANSWER
            at += len(turn)
        if at == 0:
            raise ValueError(f"a problem of {len(turn)} tokens in a row of {length}")
        return ids, kinds

    def short(self, dice: Dice, count: int):
        """[count, length] ids and kinds, problems in each: one, and as many more as fit."""
        rows = [self.row([self._turn(dice) for _ in range(max(1, self.length // TURN))], self.length) for _ in range(count)]
        return tuple(np.stack(x) for x in zip(*rows))

    def _turn(self, dice: Dice) -> tuple[str, str]:
        task = TASKS[dice.choice(self.deck)]
        problem = task.draw(dice, dice.choice(self.sizes.get(task.name, task.sizes)))
        return problem.prompt, problem.answer

    def long(self, dice: Dice, count: int, length: int):
        """[count, length]: texts with codes in them, and questions about several, the first at the end of the text itself. A quarter of
        the rows copies long lists instead: a token to be found again at every place is how finding is learned soonest."""
        rows = []
        for _ in range(count):
            if dice.below(4) == 0:
                rows.append(self.row(self._copies(dice, length), length))
                continue
            asked = dice.between(1, max(1, min(12, length // 48)))
            tokens = length - 44 * asked
            facts = dice.between(max(2, asked), max(2, asked, min(40, tokens // 16)))
            pairs = []
            while not pairs:   # held-out pairs stand in texts, but nobody asks for them here
                text, pairs = haystack(dice, tokens, facts)
                pairs = [p for p in pairs if not is_held_out(LONG_TASK, " ".join(p))][:asked]
            first, *rest = pairs
            turns = [("Read:" + text + question(first[0]), first[1]), *((question(name).strip(), code) for name, code in rest)]
            rows.append(self.row(turns, length))
        return tuple(np.stack(x) for x in zip(*rows))

    def _copies(self, dice: Dice, length: int):
        turns, left, around = [], length, 32
        while left > around + 2:
            words = min(100, (left - around) // 2)
            problem = TASKS["copying"].draw(dice, words)
            turns.append((problem.prompt, problem.answer))
            left -= around + 2 * words
        return turns

    def held_out(self, task: str, count: int):
        """[count, length] ids and kinds of the first items of a held-out set, of the largest size where sizes are given."""
        problems, length = held_out_set(TASKS[task], count, max(self.sizes.get(task, (None,)))), LONG if task == LONG_TASK else self.length
        return tuple(np.stack(x) for x in zip(*(self.row([(p.prompt, p.answer)], length) for p in problems)))

    def step(self, seed: int, step: int, short: int, long: int, length: int):
        """The (ids, kinds) of one step: short rows, then long ones if there are any."""
        batches = [self.short(Dice(seed, step, 0), short)]
        return [*batches, self.long(Dice(seed, step, 1), long, length)] if long else batches


_ROWS: list[Rows] = []   # of a process that makes text


def _start(folder: str, options: dict) -> None:
    _ROWS.append(Rows(Tokenizer.from_dir(folder), **options))


def _step(*args):
    return _ROWS[0].step(*args)


def steps(folder: str, options: dict, seed: int, wanted, workers: int):
    """Yields `Rows.step` of every (step, short rows, long rows, length) of `wanted` in order, made ahead by processes.

    folder: where the tokenizer's files are. options: of `Rows`, beside the tokenizer.
    """
    if workers == 0:
        rows = Rows(Tokenizer.from_dir(folder), **options)
        yield from (rows.step(seed, *sizes) for sizes in wanted)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start, (folder, options)) as pool:
        waiting = deque()
        for sizes in wanted:
            waiting.append(pool.submit(_step, seed, *sizes))
            if len(waiting) > 3 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
