"""What the engine asks of whatever runs the decode step. Draft-and-verify uses the same three calls: step, sample, commit.

A backend that works beside the host also takes all three at once (`launch`): the next step may then begin before anybody has looked at
this one's tokens.
"""
from collections import Counter
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Protocol, Sequence

import numpy as np

from ..buffers import BY_NAME, Buffer
from ..config import DECODE_ROWS, K3Config
from ..errors import ConfigError, UsageError
from .drafting import Drafting
from .sampling import Draw, Drawn

AS_SAMPLED = -1   # a token id: what the last draw for the row's slot gave, whether or not the host has read it
AS_DRAFTED = -2   # ids from here down: tokens of the last proposal that the host has not read, each in its place there


@dataclass(frozen=True)
class StepRows:
    """The rows of one step, at most `Backend.max_rows`.

    Rows of one slot are neighbours in rising position and start at the slot's committed length. A slot appears once.
    """

    token_ids: np.ndarray    # int32 [n]; AS_SAMPLED only where the backend overlaps, AS_DRAFTED and below where it has proposed them
    slots: np.ndarray        # int32 [n]
    positions: np.ndarray    # int32 [n], absolute
    logit_rows: np.ndarray   # int32 [m], rows whose logits are wanted, rising; at most DECODE_ROWS
    stand: bool = False      # `commit` will take every row, whatever the step brings: then states may advance in passing

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class DraftAsk:
    """A sequence that a draft model shall continue: behind `anchor`, its last token, which stands at `position` and is not yet run."""

    slot: int
    anchor: int
    position: int
    seed: int            # of the request
    temperature: float   # of the drafts' draw; 0: the likeliest
    is_read: bool = True   # whether the host needs the tokens themselves, or only `step` and `accept` do


@dataclass(frozen=True)
class Drafted:
    """Tokens that a draft model proposes, and for each how sure it is, in (0, 1); None where it has no confidence head, or nobody asks."""

    token_ids: tuple[int, ...]
    confidence: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Judge:
    """Drafts of one sequence to be accepted or not, over the rows of the last step: that of the token before them, then theirs."""

    slot: int
    draft_ids: tuple[int, ...]   # none: one plain draw
    draws: tuple[Draw, ...]      # one a row; penalties of a row count the drafts before it as output


@dataclass(frozen=True)
class Judged:
    """How many drafts stand, and the tokens of the step: these, then one more, whose `token_id` is None where its row was not finite."""

    num_accepted: int
    drawn: tuple[Drawn, ...]


@dataclass
class StepCounts:
    """How many steps ran on which decode backend. `reasons`: why steps not on the one that was asked for, and why rows were drawn or judged on the host."""

    steps: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)


def check_room(cfg: K3Config, max_batch: int, max_model_len: int | None) -> None:
    """Raises ConfigError where no machine could hold so many slots, or sequences so long; a length of None is not looked at."""
    if not 1 <= max_batch <= DECODE_ROWS:
        raise ConfigError(f"max_batch {max_batch} is outside 1 to {DECODE_ROWS}")
    if max_model_len is not None and max_model_len > cfg.max_position_embeddings:
        raise ConfigError(f"max_model_len {max_model_len} is beyond the model's {cfg.max_position_embeddings}", "leave it out for what fits")


def check_buffer(name: str, rank: int, ranks: int) -> Buffer:
    """The entry of the table. Raises UsageError where there is none, or `rank` is none of so many."""
    if name not in BY_NAME:
        near = get_close_matches(str(name), BY_NAME, n=4, cutoff=0.5)
        raise UsageError(f"buffer {name!r:.60} is unknown", f"near it are {', '.join(near)}" if near else "docs/dataflow.md lists all of them")
    if rank not in range(ranks):
        raise UsageError(f"buffer {name}: found rank {rank!r:.60}, wanted one below {ranks}", "ranks that are processes have their own buffers: open the model with ranks='virtual' for all of them here")
    return BY_NAME[name]


class Pending(Protocol):
    """Tokens that are being drawn."""

    def drawn(self) -> list[Drawn]:
        """Waits for them: one a draw. They are kept until the second `launch` or `sample` after the one that gave them."""


class Backend(Protocol):
    """One model, its weights and its states. Not thread-safe; one caller at a time."""

    cfg: K3Config
    name: str             # the decode backend: "reference", "standard", "latency_specialized"
    ranks: str            # how ranks are joined: "virtual", "nccl", "peer"
    gpu: str | None       # name of the GPU; None on the CPU
    tp: int
    max_rows: int
    max_logits: int       # rows of a step that may want logits
    num_slots: int
    dcp: int              # ranks that hold the MLA cache together (context_split.py)
    num_pages: int        # pages of the MLA cache
    page_tokens: int      # tokens of a sequence in one page
    max_model_len: int    # tokens a slot can hold
    kv_cache_dtype: str
    overlaps: bool        # whether it has `launch` and knows AS_SAMPLED
    drafting: Drafting | None  # its draft model and how it is used; None where there is none, and no `propose` and `accept`
    counts: StepCounts

    def open_slot(self, slot: int, pages: Sequence[int]) -> None:
        """Gives `slot` an empty sequence (zero KDA state and conv window) whose positions live in `pages`, in order."""

    def copy_slot(self, source: int, target: int, pages: Sequence[int]) -> None:
        """Gives `target` the tokens that `source` has committed, without running them; `pages` are its own, in order.

        A page that `source` has at the same place is both's and not copied. It must be full: what is committed is never written again.
        """

    def step(self, rows: StepRows) -> None:
        """Runs the target on `rows`. MLA cache rows are written; KDA state and conv window are not advanced.

        A second step on a slot without `commit` between them starts again from the committed state. Where `rows.stand` says that all will
        be committed there is none: until its commit the slot holds nothing that could be used or copied, and if none comes it must be opened again.
        """

    def logits(self) -> np.ndarray:
        """float32 [m, vocab_size] of the last step, row i for `logit_rows[i]`; valid until the next step."""

    def new_logits(self, rows: int):
        """float32 [rows, vocab_size], undefined: an array of the caller's own where the model runs, NumPy's or CuPy's."""

    def copy_logits(self, out) -> None:
        """Copies what `logits` would give to `out`, rows of an array of `new_logits`. It is there in the order of CuPy's current stream."""

    def buffer(self, name: str, rank: int = 0):
        """One rank's buffer of buffers.py, whole: an array that shares its memory, valid until `close`.

        NumPy in the reference, where every floating-point buffer is F32. CuPy on a GPU, where BF16 is `ml_dtypes.bfloat16`, an FP8
        cache is its bytes as uint8, and rows of mla_cache lie as cache_layout.py says. There the current stream waits for the steps so
        far, and from the first call on every step waits for what the stream that is current then has been given.

        Raises:
            UsageError: no such buffer, no such rank, or a buffer that no step of this backend writes.
        """

    def sample(self, draws: Sequence[Draw]) -> list[Drawn]:
        """Draws one token for each row of `logits()`. A row that is not finite gives `Drawn.token_id` None."""

    def propose(self, asks: Sequence[DraftAsk]) -> list[Drafted]:
        """Tokens of the draft model for sequences whose committed length is the anchor's position. Nothing of it is part of any state.

        Where none of them is read a backend on a GPU waits for nothing and gives ids of AS_DRAFTED and below.
        """

    def accept(self, judges: Sequence[Judge]) -> list[Judged]:
        """Judges drafts of the last `propose` by the rows of `logits()`: those of each entry of `judges`, in order."""

    def commit(self, accepted: np.ndarray) -> None:
        """Advances KDA state and conv window, and the draft model's context, over the rows of the last step where `accepted` (bool [n]) is true.

        The accepted rows of a slot are a prefix of its rows, all of them in a step whose rows stand. Call it at most once a step.
        """

    def launch(self, rows: StepRows, draws: Sequence[Draw]) -> Pending:
        """`step`, `sample` and a `commit` of every row, without waiting for any of them. At most one row of a slot wants logits.

        A slot whose row was not finite holds no sequence any more: open it again.
        """

    def close(self) -> None:
        """Frees everything; may be called twice."""
