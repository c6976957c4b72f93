"""The engine's part of the backend contract. A breach would silently corrupt another row's state, so every backend checks it."""
import numpy as np

from ..config import DECODE_ROWS
from ..errors import PlanError
from .backend import AS_DRAFTED, AS_SAMPLED, StepRows

# What stands in an input buffer behind the rows of a step.
PADDING = {"token_ids": 0, "row_slot": -1, "row_position": 0, "logit_rows": -1, "row_accepted": 0}


def sequences(row_slot: np.ndarray) -> list[tuple[int, slice]]:
    """(slot, its rows) for every sequence of a step; rows with slot -1 are padding."""
    out, start = [], 0
    for r in range(1, len(row_slot) + 1):
        if r == len(row_slot) or row_slot[r] != row_slot[start]:
            if row_slot[start] >= 0:
                out.append((int(row_slot[start]), slice(start, r)))
            start = r
    return out


class RowCheck:
    """Committed lengths of all slots, and the step that waits for its commit.

    Attributes:
        rows: of the last step.
    """

    def __init__(self, num_slots: int, max_model_len: int, max_rows: int):
        self.max_model_len, self.max_rows = max_model_len, max_rows
        self._lengths = np.zeros(num_slots, np.int64)
        self._sampled = np.full(num_slots, -1)   # position of the token last drawn for a slot since it was opened; -1: none
        self.rows: StepRows | None = None
        self._committed = True
        self._torn = set()   # slots of steps whose rows stand, until their commit
        self._drafted = frozenset()

    def drafted(self, ids) -> None:
        """Remembers which ids of AS_DRAFTED and below stand for tokens of the last proposal; those of an earlier one stand for nothing."""
        self._drafted = frozenset(i for i in ids if i <= AS_DRAFTED)

    def open(self, slot: int) -> None:
        self._lengths[slot], self._sampled[slot] = 0, -1
        self._torn.discard(slot)

    def copy(self, source: int, target: int) -> int:
        """`target` has as many tokens as `source` from now on: how many."""
        self._sound({source})
        self._lengths[target], self._sampled[target] = self._lengths[source], -1
        self._torn.discard(target)
        return int(self._lengths[source])

    def step(self, rows: StepRows) -> None:
        """Raises PlanError unless the rows continue their slots, each slot's rows being neighbours."""
        if not 1 <= len(rows) <= self.max_rows:
            raise PlanError(f"a step of {len(rows)} rows, wanted 1 to {self.max_rows}")
        if len(rows.logit_rows) > DECODE_ROWS:
            raise PlanError(f"a step with logits of {len(rows.logit_rows)} rows, wanted at most {DECODE_ROWS}")
        slots, place = rows.slots, np.arange(len(rows))
        if slots.min() < 0 or slots.max() >= len(self._lengths):
            raise PlanError(f"slots {slots.min()} to {slots.max()}, wanted 0 to {len(self._lengths) - 1}")
        opens = place == 0
        opens[1:] = slots[1:] != slots[:-1]
        first = np.maximum.accumulate(np.where(opens, place, 0))   # row that opens the sequence
        stepped = set(slots.tolist())
        if len(stepped) != opens.sum():
            raise PlanError("rows of one slot are not neighbours")
        want = self._lengths[slots] + place - first
        wrong = (rows.positions != want) | (want >= self.max_model_len)
        if wrong.any():
            r = wrong.argmax()
            raise PlanError(f"slot {slots[r]}: position {rows.positions[r]} does not continue its {self._lengths[slots[r]]} tokens of {self.max_model_len}")
        unknown = (rows.token_ids == AS_SAMPLED) & (rows.positions != self._sampled[slots])
        if unknown.any():
            r = unknown.argmax()
            raise PlanError(f"slot {slots[r]}: no token was drawn for position {rows.positions[r]}")
        if unknown := set(rows.token_ids[rows.token_ids <= AS_DRAFTED].tolist()) - self._drafted:
            raise PlanError(f"token id {max(unknown)} stands for no draft of the last proposal")
        self._sound(stepped)
        if rows.stand:
            self._torn |= stepped
        self.rows, self._committed = rows, False

    def draws(self, count: int) -> list[int]:
        """The slot of each row of logits of the last step, -1 where a later row has the same: tokens for all of them are being drawn.

        Raises PlanError if it has another number of rows than `count`.
        """
        self.logits(count)
        slots = self.rows.slots[self.rows.logit_rows].tolist()
        self._sampled[slots] = self.rows.positions[self.rows.logit_rows] + 1
        return [-1 if slot == after else slot for slot, after in zip(slots, [*slots[1:], -1])]

    def logits(self, count: int) -> None:
        """Raises PlanError if the last step has another number of rows of logits."""
        if self.rows is None or count != len(self.rows.logit_rows):
            raise PlanError(f"{count} draws for {0 if self.rows is None else len(self.rows.logit_rows)} rows of logits")

    def commit(self, accepted: np.ndarray) -> None:
        """Raises PlanError if there is no step to commit, or it is committed already."""
        if self.rows is None or self._committed:
            raise PlanError("commit without a step before it")
        if self.rows.stand and not accepted.all():
            raise PlanError("a commit of some rows of a step, wanted all: it said that they stand")
        self._torn -= set(self.rows.slots.tolist())
        np.add.at(self._lengths, self.rows.slots[accepted], 1)
        self._committed = True

    def _sound(self, slots: set[int]) -> None:
        if torn := slots & self._torn:
            raise PlanError(f"slot {min(torn)}: a step whose rows stand was not committed, wanted a slot opened again")
