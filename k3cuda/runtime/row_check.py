"""The engine's part of the backend contract. A breach would silently corrupt another row's state, so every backend checks it."""
import numpy as np

from ..config import DECODE_ROWS
from ..errors import PlanError
from .backend import StepRows

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
        self.rows: StepRows | None = None
        self._committed = True

    def open(self, slot: int) -> None:
        self._lengths[slot] = 0

    def copy(self, source: int, target: int) -> int:
        """`target` has as many tokens as `source` from now on: how many."""
        self._lengths[target] = self._lengths[source]
        return int(self._lengths[source])

    def step(self, rows: StepRows) -> None:
        """Raises PlanError unless the rows continue their slots, each slot's rows being neighbours."""
        if not 1 <= len(rows) <= self.max_rows:
            raise PlanError(f"a step of {len(rows)} rows, wanted 1 to {self.max_rows}")
        if len(rows.logit_rows) > DECODE_ROWS:
            raise PlanError(f"a step with logits of {len(rows.logit_rows)} rows, wanted at most {DECODE_ROWS}")
        found = sequences(rows.slots)
        if len({slot for slot, _ in found}) != len(found):
            raise PlanError("rows of one slot are not neighbours")
        for slot, span in found:
            want = self._lengths[slot] + np.arange(span.stop - span.start)
            if not np.array_equal(rows.positions[span], want) or want[-1] >= self.max_model_len:
                raise PlanError(f"slot {slot}: positions {rows.positions[span]} do not continue its {self._lengths[slot]} tokens")
        self.rows, self._committed = rows, False

    def commit(self, accepted: np.ndarray) -> None:
        """Raises PlanError if there is no step to commit, or it is committed already."""
        if self.rows is None or self._committed:
            raise PlanError("commit without a step before it")
        np.add.at(self._lengths, self.rows.slots[accepted], 1)
        self._committed = True
