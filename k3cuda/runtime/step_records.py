"""What the kernels around a step are told and what they answer: structures of kernels_cu/sample_types.cuh and step_io.cuh, without a GPU."""
import ctypes
from typing import Sequence

import numpy as np

from .sampling import MAX_LOGPROBS, Draw, Drawn

CLUSTER, NODE, MAX_WARPS = 8, 1024, 20   # blocks a row, ids of a warp (kSampleNode), warps of a block that find registers
MAX_VOCAB, VOCAB_STEP = CLUSTER * NODE * MAX_WARPS, 4   # ids are loaded four at a time

ROW = np.dtype([(n, t) for t, names in (
    ("i4", "active greedy"), ("f4", "temperature top_p min_p"), ("i4", "top_k"), ("u4", "seed_low seed_high position stream"),
    ("i4", "logprobs penalty_begin penalty_count"), ("f4", "repetition frequency presence"), ("i4", "slot after_sampled")) for n in names.split()])
PENALTY = np.dtype([("id", "i4"), ("count", "i4")])
NO_PENALTIES = np.zeros(0, PENALTY)


def sampler_warps(vocab_size: int) -> int:
    """Warps of a block of the sampler."""
    return -(-vocab_size // (CLUSTER * NODE))


def penalty_entries(draw: Draw) -> np.ndarray:
    """PENALTY [tokens that the penalties touch], by rising id: `count` times in the output, 0 where only the prompt has it."""
    p = draw.params
    if not p.has_penalties:
        return NO_PENALTIES
    output, counts = np.unique(np.asarray(draw.output_ids, np.int32), return_counts=True)
    ids = np.union1d(np.asarray(draw.prompt_ids, np.int32), output) if p.repetition_penalty != 1 else output
    entries = np.zeros(len(ids), PENALTY)
    entries["id"] = ids
    entries["count"][np.searchsorted(ids, output)] = counts
    return entries


def row_record(draw: Draw, penalty_begin: int, penalty_count: int, slot: int) -> tuple:
    """A ROW. `slot`: whose token it is, -1 where no later row will ask for it."""
    p = draw.params
    return (1, p.greedy, p.temperature, p.top_p, p.min_p, p.top_k, draw.seed & 0xFFFFFFFF, draw.seed >> 32, draw.position & 0xFFFFFFFF, draw.stream,
            -1 if p.logprobs is None else p.logprobs, penalty_begin, penalty_count, p.repetition_penalty, p.frequency_penalty, p.presence_penalty,
            slot, draw.after_sampled and p.has_penalties)


class Answers:
    """What the kernel writes for `rows` rows, in memory of the host.

    Attributes:
        arrays: name of a field of `SampleArgs` -> [rows], or [rows, MAX_LOGPROBS] of the most likely tokens.
        nbytes: of all of them together.
    """

    FIELDS = {"ended": (np.uint64, 1), "token": (np.int32, 1), "logprob": (np.float32, 1), "top_ids": (np.int32, MAX_LOGPROBS),
              "top_logprobs": (np.float32, MAX_LOGPROBS)}

    def __init__(self, rows: int, memory: np.ndarray):
        self.arrays, at = {}, 0
        for name, (dtype, width) in self.FIELDS.items():
            nbytes = rows * width * np.dtype(dtype).itemsize
            flat = memory[at:at + nbytes].view(dtype)
            self.arrays[name] = flat if width == 1 else flat.reshape(rows, width)
            at += nbytes

    @classmethod
    def nbytes(cls, rows: int) -> int:
        return rows * sum(width * np.dtype(dtype).itemsize for dtype, width in cls.FIELDS.values())

    def drawn(self, draws: Sequence[Draw], vocab_size: int) -> list[Drawn]:
        """Of the first rows, one a draw."""
        a = self.arrays
        tokens = a["token"][:len(draws)].tolist()
        return [_drawn(a, i, token, min(draw.params.logprobs, vocab_size) if draw.params.logprobs is not None else None)
                for i, (draw, token) in enumerate(zip(draws, tokens))]


def _drawn(a: dict, i: int, token: int, logprobs: int | None) -> Drawn:
    if token < 0:
        return Drawn(None)
    if logprobs is None:
        return Drawn(token)
    return Drawn(token, float(a["logprob"][i]), tuple(zip(a["top_ids"][i, :logprobs].tolist(), a["top_logprobs"][i, :logprobs].tolist())))


class StepLoad(ctypes.Structure):
    """`struct StepLoad` of step_io.cuh; a test compares it with the compiled one."""

    _fields_ = [("inputs", ctypes.c_void_p), ("arenas", ctypes.c_void_p), *((n, ctypes.c_int) for n in ("ranks", "first", "last", "token_ids", "row_slot", "rows")),
                *((n, ctypes.c_void_p) for n in ("slot_tokens", "draft_ids", "draws", "penalties", "draws_to", "penalties_to")), ("draw_words", ctypes.c_int),
                ("penalty_words", ctypes.c_void_p), ("began", ctypes.c_void_p)]


class SampleArgs(ctypes.Structure):
    """`struct SampleArgs` of sample_types.cuh."""

    _fields_ = [(n, ctypes.c_void_p) for n in ("logits", "rows", "penalties", "slot_tokens", *Answers.FIELDS)]
