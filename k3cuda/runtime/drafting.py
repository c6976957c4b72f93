"""How a draft model is used: how many tokens, from how wide a block, and how they are accepted. Checked once; no arithmetic here."""
from dataclasses import dataclass, fields

from ..config import DECODE_ROWS
from ..errors import UsageError
from ..plan import Taps
from .draft_checkpoint import DraftTensors

STANDARD, BLOCK, SYNTHETIC = ACCEPTANCES = ("standard", "block", "synthetic")
PROBABILISTIC, GREEDY = DRAFT_SAMPLINGS = ("probabilistic", "greedy")
ROWS_DRAFTS, ROWS_BLOCK = DRAFT_ROWS = ("drafts", "block")


@dataclass(frozen=True)
class Drafting:
    """A draft model and its options.

    Args:
        source: the draft's tensors.
        num_drafts: tokens proposed a step, 1 to what the draft can; None: that many. One more row is verified.
        draft_rows: width of the block that the draft computes: "block", as it was trained, or "drafts", just what is needed. Where rows of a
            block see each other both ways this changes what is proposed.
        acceptance: "standard" rejection, "block" verification, which accepts no fewer on average, or "synthetic", which accepts by the dice
            whatever was proposed: for timing alone, its text means nothing. None: standard, or synthetic where a length is given.
        acceptance_length: with "synthetic" the mean number of tokens a step, 1 to num_drafts + 1.
        draft_sampling: "probabilistic": drafts are drawn at the request's temperature; "greedy": they are the likeliest tokens.
        confidence_threshold: verify only drafts before the first whose estimated chance is below it; None: all.
    Raises:
        UsageError: a value out of range, or two that exclude each other; both are named.
    """

    source: DraftTensors
    num_drafts: int | None = None
    draft_rows: str = ROWS_BLOCK
    acceptance: str | None = None
    acceptance_length: float | None = None
    draft_sampling: str = PROBABILISTIC
    confidence_threshold: float | None = None

    def __post_init__(self):
        cfg, k = self.source.cfg, self.num_drafts
        if k is None:
            object.__setattr__(self, "num_drafts", cfg.max_drafts)
        elif not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= cfg.max_drafts:
            raise UsageError(f"num_drafts: found {k!r:.60}, wanted 1 to {cfg.max_drafts}: the draft's block has {cfg.block_size} rows",
                             "ask for fewer, or use a draft with a wider block")
        if self.acceptance is None:
            object.__setattr__(self, "acceptance", STANDARD if self.acceptance_length is None else SYNTHETIC)
        for name, names in (("draft_rows", DRAFT_ROWS), ("acceptance", ACCEPTANCES), ("draft_sampling", DRAFT_SAMPLINGS)):
            if getattr(self, name) not in names:
                raise UsageError(f"{name}: found {getattr(self, name)!r:.60}, wanted {', '.join(names)}")
        length, sure = self.acceptance_length, self.confidence_threshold
        if (length is None) == (self.acceptance == SYNTHETIC):
            raise UsageError(f"acceptance_length: found {length} with acceptance {self.acceptance!r}", f"give both {SYNTHETIC!r} and a length, or neither")
        if length is not None and not (_is_number(length) and 1 <= length <= self.num_drafts + 1):
            raise UsageError(f"acceptance_length: found {length!r:.60}, wanted 1 to {self.num_drafts + 1}: the drafts of a step and one token more")
        if sure is not None and not (_is_number(sure) and 0 <= sure <= 1):
            raise UsageError(f"confidence_threshold: found {sure!r:.60}, wanted 0 to 1")
        if sure is not None and not cfg.confidence_head:
            raise UsageError(f"confidence_threshold: found {sure}, but the draft has no confidence head", "leave it out")

    def __str__(self):
        length = f" of length {self.acceptance_length:g}: the text means nothing" if self.acceptance == SYNTHETIC else ""
        return (f"{self.num_drafts} drafts a step, so {self.num_drafts + 1} rows to verify, from blocks of {self.block_rows} rows; {self.draft_sampling} "
                f"drafts, {self.acceptance} acceptance{length}")

    @property
    def taps(self) -> Taps:
        return Taps(self.source.cfg.target_layer_ids, self.source.cfg.tap_stream)

    @property
    def block_rows(self) -> int:
        """Rows of one sequence in a draft step."""
        return self.source.cfg.block_size if self.draft_rows == ROWS_BLOCK else self.num_drafts + self.source.cfg.first_row

    @property
    def max_batch(self) -> int:
        """Sequences that can draft and verify in one step."""
        return DECODE_ROWS // max(self.num_drafts + 1, self.block_rows)

    @property
    def spare_positions(self) -> int:
        """Positions behind a full context that a block's own rows may need in the draft's cache."""
        return self.block_rows - 1

    def check_batch(self, max_batch: int) -> None:
        """Raises UsageError where so many sequences would not fit one step with all their drafts."""
        if max_batch > self.max_batch:
            raise UsageError(f"max_batch: found {max_batch}, but with {self.num_drafts} drafts of a block of {self.block_rows} rows {DECODE_ROWS} rows hold "
                             f"{self.max_batch} sequences", f"use a max_batch of at most {self.max_batch}, or fewer drafts")


OPTIONS = tuple(f.name for f in fields(Drafting) if f.name != "source")


def check_options(options: dict, has_draft: bool) -> dict:
    """Those of `options` that are given. Raises UsageError for a name that is none of OPTIONS, or where there is no draft model to use it."""
    if unknown := set(options) - set(OPTIONS):
        raise UsageError(f"{sorted(unknown)[0]!r:.60} is no argument of a model", f"options of a draft model are {', '.join(OPTIONS)}")
    given = {name: value for name, value in options.items() if value is not None}
    if given and not has_draft:
        name, value = next(iter(given.items()))
        raise UsageError(f"{name}: found {value!r:.60}, but there is no draft model", "give one with it, or leave it out")
    return given


def synthetic_rates(acceptance_length: float, num_drafts: int) -> list[float]:
    """For each draft the share of steps in which it is accepted, so that a step gives `acceptance_length` tokens on average with the least
    variance: ones, then a fraction, then zeros."""
    return [min(max(acceptance_length - 1 - i, 0.0), 1.0) for i in range(num_drafts)]


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
