"""The reference decode backend: the step of a plan through the NumPy stages, on any number of virtual ranks in one process, or one of several."""
import os

import numpy as np

from ..buffers import BY_NAME, ROW_AXES, step_dims
from ..config import DECODE_ROWS, K3Config
from ..context_split import page_tokens
from ..draft_buffers import cache_bytes
from ..errors import ConfigError, OutOfMemory, UsageError
from ..plan import Plan, build_plan
from ..reference.accept import judge
from ..reference.mxfp4 import ExpertMatrix
from ..reference.numerics import CACHE_ROUNDING, Numerics
from ..reference.sample import sample_row
from .backend import Judged, StepCounts, StepRows, check_buffer, check_room
from .collectives import Collectives, VirtualRanks
from .drafting import PROBABILISTIC, Drafting
from .loading import Loading
from .machine import REFERENCE
from .numpy_draft import NumpyDraft
from .numpy_program import NumpyProgram, widened
from .row_check import RowCheck


class NumpyBackend:
    """runtime/backend.py on the CPU.

    Args:
        checkpoint: has `cfg` and `rank_slices(weight, layer, tp, rank)` (runtime/tensor_source.py).
        tp: ranks, each holding only its own slices. dcp: of them hold the MLA cache together, each its own pages.
        max_batch: slots, 1 to 64.
        max_model_len: tokens a slot can hold; None: what fits half of the free memory, at most the model's own limit.
        activation_dtype: "f32", or "bf16" to round where the release does.
        kv_cache_dtype: "auto" (as the activations), "f32", "bf16" or "fp8_e4m3"; the cache is rounded so, and held as F32.
        drafting: a draft model and how it is used; None: no speculation.
        loading: how the weights are read.
        collectives: which ranks run here, and what carries parts between them; None: all `tp` of them.
    Raises:
        ConfigError: the model or its draft cannot be cut over `tp` ranks. UsageError: `dcp` does not divide `tp`.
        OutOfMemory: the cache does not fit; the message names the longest that would.
    """

    name, gpu, overlaps = REFERENCE, None, False

    def __init__(self, checkpoint, tp: int = 1, *, max_batch: int = 8, max_model_len: int | None = None,
                 activation_dtype: str = "f32", kv_cache_dtype: str = "auto", drafting: Drafting | None = None, loading: Loading | None = None,
                 collectives: Collectives | None = None, dcp: int = 1):
        check_room(checkpoint.cfg, max_batch, max_model_len)
        if kv_cache_dtype not in ("auto", *CACHE_ROUNDING):
            raise ConfigError(f"kv_cache_dtype {kv_cache_dtype!r} is unknown", f"use auto, {', '.join(CACHE_ROUNDING)}")
        self.cfg, self.tp, self.num_slots, self.max_rows = checkpoint.cfg, tp, max_batch, DECODE_ROWS
        self.drafting, collectives = drafting, collectives or VirtualRanks(tp)
        self.ranks = collectives.name
        self.plan: Plan = build_plan(self.cfg, tp, drafting and drafting.taps, dcp)
        self.dcp, self.page_tokens = dcp, page_tokens(dcp)
        self.kv_cache_dtype = activation_dtype if kv_cache_dtype == "auto" else kv_cache_dtype
        self.max_model_len = fitting_length(self.cfg, max_batch, max_model_len, drafting, dcp)
        slot_pages = -(-(self.max_model_len + (drafting.spare_positions if drafting else 0)) // self.page_tokens)
        self.num_pages = slot_pages * max_batch
        places = {"slots": max_batch, "pages": self.num_pages, "slot_pages": slot_pages}
        self.dims = step_dims(self.cfg, tp=tp, dcp=dcp, rows=self.max_rows, num_taps=self.plan.num_taps, **places)
        self.max_logits = self.dims["head_rows"]
        held, num = _load_weights(checkpoint, tp, collectives.ranks, loading or Loading()), Numerics(activation_dtype, kv_cache_dtype)
        self.program = NumpyProgram(self.cfg, num, BY_NAME, self.dims, self.plan.aliases, held, collectives=collectives)
        self.draft = drafting and NumpyDraft(drafting.source, [a["taps"] for a in self.arenas], num_drafts=drafting.num_drafts, rows=drafting.block_rows,
                                             num=num, target_weights=[layers[None] for layers in held], collectives=collectives, dcp=dcp, **places)
        self._check = RowCheck(max_batch, self.max_model_len, self.max_rows)
        self.counts = StepCounts()

    def open_slot(self, slot: int, pages) -> None:
        for arena in self.arenas:
            arena["kda_state"][:, slot] = 0
            arena["conv_state"][:, slot] = 0
            arena["page_table"][slot] = -1
            arena["page_table"][slot, :len(pages)] = pages
        if self.draft:
            self.draft.open_slot(slot, pages)
        self._check.open(slot)

    def copy_slot(self, source: int, target: int, pages) -> None:
        used = -(-self._check.copy(source, target) // self.page_tokens)
        for arena in self.arenas:
            for name in ("kda_state", "conv_state"):
                arena[name][:, target] = arena[name][:, source]
            for old, new in zip(arena["page_table"][source, :used], pages):
                if old != new:
                    arena["mla_cache"][:, new] = arena["mla_cache"][:, old]
            arena["page_table"][target] = -1
            arena["page_table"][target, :len(pages)] = pages
        if self.draft:
            self.draft.copy_slot(source, target, pages, used)

    def step(self, rows: StepRows, observe=None) -> None:
        """See Backend.step. `observe(op, arenas)`, for tests and scripts, is called after every operation."""
        self._check.step(rows)
        self.program.write(token_ids=rows.token_ids, row_slot=rows.slots, row_position=rows.positions, logit_rows=rows.logit_rows)
        self.program.run(self.plan.ops, dict.fromkeys(ROW_AXES, len(rows)) | {"head_rows": len(rows.logit_rows)}, observe)
        self.counts.steps[self.name] += 1

    def logits(self) -> np.ndarray:
        return self.arenas[0]["logits"][:len(self._check.rows.logit_rows)]

    def new_logits(self, rows: int) -> np.ndarray:
        return np.empty((rows, self.cfg.vocab_size), np.float32)

    def copy_logits(self, out: np.ndarray) -> None:
        out[:] = self.logits()

    def buffer(self, name: str, rank: int = 0) -> np.ndarray:
        check_buffer(name, rank, self.tp)
        here = self.program.collectives.ranks
        if rank not in here:
            raise UsageError(f"buffer {name}: rank {rank} is another process", f"ask for rank {here[0]}")
        return self.arenas[rank - here[0]][name]

    def sample(self, draws):
        return [sample_row(row, draw) for row, draw in zip(self.logits(), draws, strict=True)]

    def commit(self, accepted: np.ndarray) -> None:
        self._check.commit(accepted)
        self.program.write(row_accepted=accepted)
        self.program.run(self.plan.commit, {"rows": len(accepted)})
        if self.draft:
            self.draft.commit(self._check.rows, accepted)

    def propose(self, asks):
        return self.draft.propose(asks)

    def accept(self, judges):
        out, rows, options = [], iter(self.logits()), self.drafting
        for j in judges:
            drawn_from = self.draft.logits(j.slot) if j.draft_ids and options.draft_sampling == PROBABILISTIC else None
            out.append(Judged(*judge(np.stack([next(rows) for _ in j.draws]), j.draws, j.draft_ids, drawn_from, options.acceptance, options.acceptance_length)))
        return out

    def close(self) -> None:
        self.program.close()
        if self.draft:
            self.draft.close()

    @property
    def arenas(self) -> list[dict[str, np.ndarray]]:
        """Of every rank of this process its buffers by name."""
        return self.program.arenas


def _load_weights(source, tp: int, ranks: range, loading: Loading) -> list[dict]:
    """For each of `ranks`: layer (None: outside the layers) -> name -> F32 array, or ExpertMatrix for an MXFP4 pair."""
    held = [{} for _ in ranks]
    for unit, arrays in loading.slices(source, tp, ranks):
        for rank, layers in enumerate(held):
            raw = {name: array[rank] for name, array in arrays.items()}
            layers[unit.layer] = {name: widened(x) for name, x in raw.items()}
            layers[unit.layer] |= {w.name: ExpertMatrix(raw[w.name], raw[w.name + "_scale"]) for w in unit.weights if w.mxfp4 == "packed"}
    return held


def fitting_length(cfg: K3Config, slots: int, asked: int | None, drafting: Drafting | None, dcp: int) -> int:
    """Tokens a slot can hold. The caches are F32 and may take half of the memory that is free now; `dcp` ranks hold the target's together."""
    dims = cfg.dims()
    token_bytes = dims["num_mla_layers"] * dims["mla_cache_dim"] * 4 * slots / dcp + (cache_bytes(drafting.source.cfg) * 4 // 2 * slots if drafting else 0)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fits = cfg.max_position_embeddings
    if token_bytes:
        fits = min(fits, int(free // 2 // token_bytes) // page_tokens(dcp) * page_tokens(dcp))  # pages are whole
    if asked is None:
        asked = fits
    if asked > fits or fits < 1:
        raise OutOfMemory(f"a cache of {slots} x {asked} tokens needs {asked * token_bytes / 1e9:.1f} GB of the {free / 1e9:.1f} GB free",
                          f"use a max_model_len of at most {fits}, or a smaller max_batch")
    return asked
