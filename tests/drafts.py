"""Drafts that several tests share: the golden one, small made ones of both families, and one alone with its taps."""
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from k3cuda.config import PAGE_SIZE
from k3cuda.reference.numerics import Numerics
from k3cuda.runtime.backend import DraftAsk, Judge, StepRows
from k3cuda.runtime.draft_checkpoint import DraftCheckpoint
from k3cuda.runtime.drafting import BLOCK, STANDARD
from k3cuda.runtime.made_config import made_config
from k3cuda.runtime.made_draft import MadeDraft, made_draft_json
from k3cuda.runtime.numpy_draft import NumpyDraft
from k3cuda.runtime.sampling import STREAM_ACCEPT, STREAM_DRAFT, STREAM_SAMPLE, Draw, SamplingParams

GOLDEN = Path(__file__).parent / "data" / "dspark-mla-tiny"


def golden():
    """(inputs, expected) by name."""
    return load_file(GOLDEN / "inputs.safetensors"), load_file(GOLDEN / "expected.safetensors")


VERDICTS = ["greedy", "standard.probs", "standard.onehot", "block.probs", "block.onehot"]


def golden_step(r, row):
    """What the golden's round `r` asks and answers in one of its VERDICTS: (Judge, its acceptance, the logits that the drafts were drawn from or None, numbers
    of every stream of dice, [accepted, tokens ..])."""
    (given, want), (rule, _, kind) = golden(), row.partition(".")
    options = {"temperature": 0} if rule == "greedy" else {name: given[name][0].item() for name in ("temperature", "top_k", "top_p")} | {"min_p": 0}
    ids = tuple(want[f"round{r}.{'greedy' if rule == 'greedy' else 'sampled'}.tokens"].tolist())
    judge = Judge(0, ids, tuple(Draw(SamplingParams(**options).resolved({}), 1, i) for i in range(len(ids) + 1)))
    dice = {STREAM_ACCEPT: given[f"round{r}.u_accept"], STREAM_SAMPLE: given[f"round{r}.u_next"], STREAM_DRAFT: given[f"round{r}.u_draft"]}
    drawn_from = want[f"round{r}.sampled.logits"].astype(np.float32) if kind == "probs" else None
    return judge, BLOCK if rule == "block" else STANDARD, drawn_from, dice, [int(x) for x in want[f"round{r}.verify.{row}"] if x >= 0]


class Alone:
    """A draft without a target, one page table for `slots` slots of 128 positions, taps given by hand."""

    def __init__(self, source, *, tp=1, num_drafts=7, rows=7, slots=1, num=None):
        cfg, pages = source.cfg, 2
        self.taps = [np.full((64, len(cfg.target_layer_ids), cfg.target_hidden_size), np.nan, np.float32) for _ in range(tp)]
        self.draft = NumpyDraft(source, self.taps, num_drafts=num_drafts, rows=rows, slots=slots, pages=pages * slots, slot_pages=pages,
                                num=num or Numerics())
        for slot in range(slots):
            self.draft.open_slot(slot, range(slot * pages, (slot + 1) * pages))

    @property
    def arena(self):
        return self.draft.program.arenas[0]

    def commit(self, slot, first, taps, accepted=None, observe=None):
        """Context rows of `taps` [n, ..] at positions from `first` on; of the first `accepted` of them."""
        n = len(taps)
        for each in self.taps:
            each[:n] = np.asarray(taps, np.float32).reshape(n, *each.shape[1:])
        rows = StepRows(*(np.array(x, np.int32) for x in (np.zeros(n), np.full(n, slot), first + np.arange(n), [])))
        self.draft.commit(rows, np.arange(n) < (n if accepted is None else accepted), observe)

    def cache(self, slot, name="mla_cache"):
        """Cache rows of a slot in order of position, by layer."""
        pages = self.arena["page_table"][slot]
        rows = self.arena[name][:, pages]
        return rows.reshape(len(rows), len(pages) * PAGE_SIZE, *rows.shape[3:])


def ask(slot=0, anchor=1, position=0, seed=0, temperature=0.0):
    return DraftAsk(slot, anchor, position, seed, temperature)


def open_golden(**options):
    return Alone(DraftCheckpoint.open(GOLDEN), **options)


def made(family, changes, seed=1, **target):
    """A small random draft with its own embedding and head."""
    cfg = made_config(**{"vocab_size": 100, "num_hidden_layers": 5} | target)
    return MadeDraft(made_draft_json(cfg, family, **changes), cfg, seed, own_embedding=True, own_head=True)


def random_taps(cfg, n, seed=0):
    """float32 [n, taps, hidden size] about 1."""
    return np.random.default_rng(seed).normal(size=(n, len(cfg.target_layer_ids), cfg.target_hidden_size)).astype(np.float32)
