"""Acceptance of drafts on a GPU: one copy of what is asked there, and three kernels, which lay the verdicts down in the host's memory."""
from collections import Counter

import cupy
import numpy as np

from ..errors import PlanError
from ..reference.accept import judge
from .accept_records import JUDGE, AcceptArgs, judge_records, judged
from .backend import AS_DRAFTED, Judge, Judged
from .cuda_draft import CudaDraft
from .cuda_driver import Launch, Module, explained
from .cuda_kernels import compile_accept, no_sampler
from .cuda_memory import RankMemory
from .cuda_step_io import MAX_PENALTIES
from .drafting import PROBABILISTIC
from .step_records import CLUSTER, PENALTY, ROW, Answers, SampleArgs, penalty_entries, row_record, sampler_warps

_ALIGN = 16


class _Block:
    """Named arrays in one piece of pinned memory, which the device reaches, and with `twin` the same piece on the device. `address`: for kernels."""

    def __init__(self, twin: bool, **arrays: tuple[np.dtype, int]):
        starts, at = {}, 0
        for name, (dtype, count) in arrays.items():
            starts[name] = at
            at += -(-np.dtype(dtype).itemsize * count // _ALIGN) * _ALIGN
        self.device = cupy.zeros(at, cupy.uint8) if twin else None
        self._pinned = cupy.cuda.alloc_pinned_memory(at)
        self.whole = np.frombuffer(self._pinned, np.uint8, at)
        self.whole[:] = 0
        self.host = {name: self.whole[starts[name]:][:np.dtype(dtype).itemsize * count].view(dtype) for name, (dtype, count) in arrays.items()}
        self.address = {name: (self.device.data.ptr if twin else self.whole.ctypes.data) + start for name, start in starts.items()}


class CudaAccept:
    """Judges the drafts of a `CudaDraft` by the logits of its target's last step.

    Args:
        target: memory of the target's first rank. device: `cuda_driver.Device`. stream: of the backend.
        reasons: counts sequences that were judged on the host, by why.
    """

    def __init__(self, draft: CudaDraft, drafting, target: RankMemory, device, stream, reasons: Counter[str]):
        self._draft, self._options, self._target, self._stream, self.reasons = draft, drafting, target, stream, reasons
        self.vocab_size, rows = draft.cfg.vocab_size, target.dims["head_rows"]
        self._none = no_sampler(self.vocab_size)
        if self._none:
            return
        self._asked = _Block(True, rows=(ROW, rows), judges=(JUDGE, rows), draft_row=(np.int32, rows), penalties=(PENALTY, MAX_PENALTIES))
        self._told = _Block(False, accepted=(np.int32, rows), answers=(np.uint8, Answers.nbytes(rows)))
        self._answers = Answers(rows, self._told.host["answers"])
        self._work = {f"{which}_{name}": cupy.zeros(rows * count, np.float32) for which in ("target", "draft") for name, count in (("weight", self.vocab_size), ("log_mass", 1))}
        self._work |= {"best": cupy.zeros(rows, np.int32), "raw_top": cupy.zeros(rows, np.float32), "log_sum": cupy.zeros(rows, np.float32)}
        self._slot_tokens = cupy.zeros(1, np.int32)   # of draws of single tokens: none asks for it here
        first = self._told.host["answers"].ctypes.data
        answers = {name: self._told.address["answers"] + a.ctypes.data - first for name, a in self._answers.arrays.items()}
        sample = SampleArgs(logits=target.arena.data.ptr + target.offsets["logits"], rows=self._asked.address["rows"], penalties=self._asked.address["penalties"],
                            slot_tokens=self._slot_tokens.data.ptr, **answers)
        memory = draft.memories[0]
        self._args = AcceptArgs(sample=sample, draft_logits=memory.arena.data.ptr + memory.offsets["draft_logits"],
                                draft_ids=memory.arena.data.ptr + memory.offsets["draft_ids"], draft_row=self._asked.address["draft_row"],
                                judges=self._asked.address["judges"], accepted=self._told.address["accepted"], **{n: a.data.ptr for n, a in self._work.items()})
        self._module = Module(compile_accept(self.vocab_size, device.arch).cubin)
        cupy.cuda.get_current_stream().synchronize()   # which has cleared all of it

    @explained()
    def accept(self, judges: list[Judge]) -> list[Judged]:
        """Verdicts in order. The rows of `judges` are those of the target's logits, one behind the other. Waits for them."""
        entries = [penalty_entries(d) for j in judges for d in j.draws]
        why = self._none or (f"judged on the host: penalties of more than {MAX_PENALTIES} tokens in a step" if sum(map(len, entries)) > MAX_PENALTIES else None)
        if why:
            self.reasons[why] += len(judges)
            return self._on_host(judges)
        self.launch(judges, entries)
        self._stream.synchronize()
        return judged(judges, self._told.host["accepted"][:len(judges)], self._answers, self.vocab_size)

    def launch(self, judges: list[Judge], entries: list[np.ndarray]) -> None:
        """All of it on the stream. `entries`: penalties of every row."""
        count, nbytes = self._fill(judges, entries)
        self._asked.device.data.copy_from_host_async(self._asked.whole.ctypes.data, nbytes, self._stream)
        kernels = [("k_laws", count)] + [("k_draft_laws", count)] * self._is_drawn + [("k_judge", len(judges))]
        for i, (name, clusters) in enumerate(kernels):
            Launch(self._module.function(name), clusters * CLUSTER, sampler_warps(self.vocab_size) * 32, [self._args], stream=self._stream.__cuda_stream__()[1],
                   cluster=CLUSTER, dependent=i > 0).launch()

    @property
    def _is_drawn(self) -> bool:
        return self._options.draft_sampling == PROBABILISTIC

    def _fill(self, judges: list[Judge], entries: list[np.ndarray]) -> tuple[int, int]:
        """Everything that is asked, to the pinned memory: (rows, bytes in use)."""
        draws = [d for j in judges for d in j.draws]
        host, used = self._asked.host, 0
        if len(draws) > len(host["rows"]):
            raise PlanError(f"{len(draws)} rows to judge, wanted at most {len(host['rows'])}")
        for i, (draw, own) in enumerate(zip(draws, entries)):
            host["rows"][i] = row_record(draw, used, len(own), -1)
            host["penalties"][used:used + len(own)] = own
            used += len(own)
        o = self._options
        host["judges"][:len(judges)] = records = judge_records(judges, o.acceptance, o.acceptance_length, o.num_drafts, self._is_drawn)
        host["draft_row"][:] = -1
        seqs = self._draft.memories[0].dims["seqs"]
        for j, record in zip(judges, records):
            if j.draft_ids:
                at = record["first_row"]
                host["draft_row"][at:at + len(j.draft_ids)] = np.arange(len(j.draft_ids)) * seqs + self._draft.places[j.slot]
        return len(draws), self._asked.address["penalties"] - self._asked.device.data.ptr + used * PENALTY.itemsize   # which come last

    def _on_host(self, judges: list[Judge]) -> list[Judged]:
        logits = iter(self._target.buffer("logits").get(stream=self._stream))
        drafted = self._draft.memories[0].buffer("draft_logits").get(stream=self._stream) if self._is_drawn else None
        ids = self._draft.ids() if any(i <= AS_DRAFTED for j in judges for i in j.draft_ids) else None
        out, o = [], self._options
        for j in judges:
            rows = np.stack([next(logits) for _ in j.draws])
            place = self._draft.places[j.slot] if j.draft_ids else None
            drafts = tuple(int(i) for i in ids[:len(j.draft_ids), place]) if ids is not None and j.draft_ids else j.draft_ids
            if -1 in drafts:   # it has no token, nor have those behind it
                drafts = drafts[:drafts.index(-1)]
            own = drafted[:, place] if drafted is not None and drafts else None
            out.append(Judged(*judge(rows[:len(drafts) + 1], j.draws[:len(drafts) + 1], drafts, own, o.acceptance, o.acceptance_length)))
        return out

    def close(self) -> None:
        if not self._none:
            self._module.close()
