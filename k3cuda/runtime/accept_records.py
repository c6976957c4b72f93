"""What the kernels that accept drafts are told and what they answer: structures of kernels_cu/accept_core.cuh, without a GPU."""
import ctypes
from dataclasses import replace

import numpy as np

from .backend import Judge, Judged
from .drafting import ACCEPTANCES, SYNTHETIC, synthetic_rates
from .step_records import Answers, SampleArgs

MOST_DRAFTS = 8
JUDGE = np.dtype([*((n, "i4") for n in ("active", "first_row", "num_drafts", "rule", "one_point")), ("ids", "i4", MOST_DRAFTS), ("chance", "f4", MOST_DRAFTS)])


class AcceptArgs(ctypes.Structure):
    """`struct AcceptArgs`; a test compares it with the compiled one."""

    _fields_ = [("sample", SampleArgs), *((n, ctypes.c_void_p) for n in ("draft_logits", "draft_ids", "draft_row", "judges", "target_weight", "target_log_mass", "draft_weight",
                                                                         "draft_log_mass", "best", "raw_top", "log_sum", "accepted"))]


def judge_records(judges: list[Judge], acceptance: str, acceptance_length: float | None, num_drafts: int, is_drawn: bool) -> np.ndarray:
    """JUDGE [sequences], whose rows stand one behind the other in that order.

    Args:
        acceptance, acceptance_length, num_drafts: of runtime/drafting.py. is_drawn: drafts were drawn at the requests' temperatures.
    """
    out, first = np.zeros(len(judges), JUDGE), 0
    chances = np.zeros(MOST_DRAFTS, np.float32)
    if acceptance == SYNTHETIC:
        rates = synthetic_rates(acceptance_length, num_drafts)
        # Not above 1, and never tested where it is 0/0: then a draft before it has fallen.
        chances[:num_drafts] = [rate / before if before else 0.0 for before, rate in zip([1.0, *rates], rates)]
    for record, judge in zip(out, judges):
        k = len(judge.draft_ids)
        record["active"], record["first_row"], record["num_drafts"] = 1, first, k
        record["rule"], record["one_point"] = ACCEPTANCES.index(acceptance), not is_drawn
        record["ids"][:k], record["chance"] = judge.draft_ids, chances
        first += k + 1
    return out


def judged(judges: list[Judge], accepted: np.ndarray, answers: Answers, vocab_size: int) -> list[Judged]:
    """The kernels' answers. `accepted` int32 [sequences]; `answers` of the rows."""
    draws = [draw for judge in judges for draw in judge.draws]
    drawn, out, first = answers.drawn(draws, vocab_size), [], 0
    for judge, count in zip(judges, accepted.tolist()):
        stood = [replace(d, from_draft=True) for d in drawn[first:first + count]]
        out.append(Judged(count, (*stood, drawn[first + count])))
        first += len(judge.draws)
    return out
