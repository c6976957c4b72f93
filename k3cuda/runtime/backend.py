"""What the engine asks of whatever runs the decode step. Draft-and-verify uses the same three calls: step, sample, commit."""
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol, Sequence

import numpy as np

from ..config import MAX_ROWS, K3Config
from ..errors import ConfigError
from .sampling import Draw, Drawn


@dataclass(frozen=True)
class StepRows:
    """The rows of one step, at most `Backend.max_rows`.

    Rows of one slot are neighbours in rising position and start at the slot's committed length. A slot appears once.
    """

    token_ids: np.ndarray    # int32 [n]
    slots: np.ndarray        # int32 [n]
    positions: np.ndarray    # int32 [n], absolute
    logit_rows: np.ndarray   # int32 [m], rows whose logits are wanted, rising

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass
class StepCounts:
    """How many steps ran on which decode backend, and why a slower one was taken."""

    steps: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)


def check_room(cfg: K3Config, max_batch: int, max_model_len: int | None) -> None:
    """Raises ConfigError where no machine could hold so many slots, or sequences so long; a length of None is not looked at."""
    if not 1 <= max_batch <= MAX_ROWS:
        raise ConfigError(f"max_batch {max_batch} is outside 1 to {MAX_ROWS}")
    if max_model_len is not None and max_model_len > cfg.max_position_embeddings:
        raise ConfigError(f"max_model_len {max_model_len} is beyond the model's {cfg.max_position_embeddings}", "leave it out for what fits")


class Backend(Protocol):
    """One model, its weights and its states. Not thread-safe; one caller at a time."""

    cfg: K3Config
    name: str             # the decode backend: "reference", "standard", "latency_specialized"
    ranks: str            # how ranks are joined: "virtual", "nccl", "peer"
    gpu: str | None       # name of the GPU; None on the CPU
    tp: int
    max_rows: int
    num_slots: int
    num_pages: int        # pages of the MLA cache, PAGE_SIZE tokens each
    max_model_len: int    # tokens a slot can hold
    kv_cache_dtype: str
    counts: StepCounts

    def open_slot(self, slot: int, pages: Sequence[int]) -> None:
        """Gives `slot` an empty sequence (zero KDA state and conv window) whose positions live in `pages`, in order."""

    def step(self, rows: StepRows) -> None:
        """Runs the target on `rows`. MLA cache rows are written; KDA state and conv window are not advanced.

        A second step on a slot without `commit` between them starts again from the committed state.
        """

    def logits(self) -> np.ndarray:
        """float32 [m, vocab_size] of the last step, row i for `logit_rows[i]`; valid until the next step."""

    def sample(self, draws: Sequence[Draw]) -> list[Drawn]:
        """Draws one token for each row of `logits()`. A row that is not finite gives `Drawn.token_id` None."""

    def commit(self, accepted: np.ndarray) -> None:
        """Advances KDA state and conv window over the rows of the last step where `accepted` (bool [n]) is true.

        The accepted rows of a slot are a prefix of its rows. Call it at most once a step.
        """

    def close(self) -> None:
        """Frees everything; may be called twice."""
