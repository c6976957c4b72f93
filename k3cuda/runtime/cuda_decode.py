"""Requests on one true rank of the released model with a draft of a public shape: what decoding costs with all that stands around a step.

Weights are made on the device and collectives are looped back, so the text means nothing and times leave out what crosses GPUs.
"""
from functools import partial

import numpy as np

from ..config import DECODE_ROWS, MAX_ROWS, K3Config, load_json
from ..draft_config import RELEASED_DRAFT
from ..draft_plan import build_draft_plan
from ..emit_sizes import DECODE_BUCKETS
from ..errors import CheckpointError
from .backend import DraftAsk, Judge, StepRows
from .cuda_bench import StepBench
from .cuda_kernels import bucket_of, compile_bucket, side_by_side
from .drafting import Drafting
from .made_draft import MadeDraft
from .open_model import Model
from .sampling import Draw, SamplingParams
from .step_records import NO_PENALTIES

_SAMPLED = SamplingParams(temperature=1.0).resolved({})


def released_draft(cfg: K3Config, **options) -> Drafting:
    """A draft of the public shape for `cfg`, the released model, and how it is used."""
    return Drafting(MadeDraft(load_json(RELEASED_DRAFT), cfg), **options)


class DecodeBench(StepBench):
    """A backend of one rank for requests, and the times of the parts of a verify step.

    Args:
        batch: requests at a time, at most. tokens: of a request. input_len: of its prompt. specialized: as StepBench.
    """

    def __init__(self, cfg: K3Config, tp: int, rank: int, kv_cache_dtype: str, drafting: Drafting | None, batch: int, tokens: int, input_len: int = 1,
                 specialized: bool = False):
        super().__init__(cfg, tp, rank, kv_cache_dtype, drafting, specialized)
        self.rows_a_sequence = drafting.num_drafts + 1 if drafting else 1
        widest = bucket_of(batch * self.rows_a_sequence)
        self._buckets = sorted({b for b in DECODE_BUCKETS if b <= widest} | {bucket_of(min(batch * input_len, MAX_ROWS))})
        jobs = [partial(compile_bucket, build_draft_plan(drafting.source.cfg, tp, drafting.num_drafts, drafting.block_rows), b, "bf16", self.device.arch,
                        sms=self.device.sms) for b in DECODE_BUCKETS if b <= bucket_of(batch * max(self.rows_a_sequence, drafting.block_rows))] if drafting else []
        self.compile([batch * self.rows_a_sequence], more=self._buckets)
        side_by_side(jobs)
        self.open(batch, max(tokens, self.rows_a_sequence))

    @property
    def model(self) -> Model:
        """As `LLM` takes it: for token ids."""
        return Model(self.backend, None, {}, (), CheckpointError("a rank of a model without its checkpoint has no tokenizer", "use token ids"))

    def prepare(self) -> None:
        """Captures every graph, so that no request waits for one."""
        be = self.backend
        for bucket in self._buckets:
            single = self.specialized and not be.step_launches.declines(bucket)
            if self.drafting:
                be.graph("step", bucket, single=single)
                be.graph("commit", bucket)
                for first in range(0, bucket, DECODE_ROWS):
                    be.draft.graph(be.draft.plan.context, min(bucket, DECODE_ROWS), first)
            else:
                for half in be._io._halves:
                    be.graph("launch", bucket, half, single)
        for sequences in range(1, be.num_slots + 1 if self.drafting else 1):
            be.draft.graph(be.draft.block, sequences * be.draft.plan.block_rows)

    def parts(self, sequences: int, context: int) -> dict:
        """The step that verifies the drafts of so many sequences at the end of `context` tokens each, as `bench step` gives it, and beside it
        microseconds of what a draft model adds: context rows of the step before, blocks and drafts, acceptance. `draft_share`: these together
        over the step and its commit."""
        context = max(context, self.rows_a_sequence)
        self.place(sequences, self.rows_a_sequence, context)
        found = self.step()
        if not self.drafting:
            return found
        be, k, first = self.backend, self.drafting.num_drafts, context - self.rows_a_sequence
        slots = np.repeat(np.arange(sequences, dtype=np.int32), k + 1)
        rows = StepRows(np.zeros(len(slots), np.int32), slots, np.tile(np.arange(first, context, dtype=np.int32), sequences), np.zeros(0, np.int32))
        asks = [DraftAsk(slot, 7, first, slot, 1.0, is_read=False) for slot in range(sequences)]
        drafted = be.draft.propose(asks)
        judges = [Judge(slot, d.token_ids, tuple(Draw(_SAMPLED, slot, first + 1 + i) for i in range(k + 1))) for slot, d in enumerate(drafted)]
        none = [NO_PENALTIES] * len(slots)
        us = {name: 1e6 * self.timer.median(work, repeats=20) for name, work in (
            ("context_us", lambda: be.draft.commit(rows, np.ones(len(rows), bool))), ("draft_us", lambda: be.draft.propose(asks)),
            ("accept_us", lambda: be._accept.launch(judges, none)))}
        added = sum(us.values())
        self.restore()
        return found | {name: round(value, 1) for name, value in us.items()} | {"draft_share": round(added / found["ms"] / 1e3, 4),
                                                                               "draft_stages": self._draft_stages(len(rows), sequences)}

    def _draft_stages(self, rows: int, sequences: int) -> dict[str, float]:
        """Microseconds of every stage of context rows and of a proposal: its operations of all layers and drafts in turn, behind one another."""
        draft, found = self.backend.draft, {}
        for ops, count in ((draft.plan.context, rows), (draft.block, sequences * draft.plan.block_rows)):
            for name in dict.fromkeys(op.stage.name for op in ops):
                if launches := draft.launches(tuple(op for op in ops if op.stage.name == name), bucket_of(count), 0):
                    found[name] = round(1e6 * self.timer.graph(launches), 1)
        return found

