"""A draft model on the CPU, beside the reference backend of its target."""
import numpy as np

from ..draft_buffers import draft_dims
from ..draft_plan import DraftPlan, build_draft_plan
from ..draft_weights import DRAFT_WEIGHTS, exists_in_draft, is_shared
from ..reference.numerics import Numerics
from .backend import DraftAsk, Drafted, StepRows
from .collectives import Collectives, VirtualRanks
from .draft_checkpoint import DraftTensors
from .numpy_program import NumpyProgram, widened


class NumpyDraft:
    """Turns committed rows into context and proposes tokens.

    Args:
        source: the draft's tensors.
        taps: for each rank the target's buffer `taps`, float32 [rows, taps, hidden size].
        num_drafts: tokens it proposes at a time.
        rows: of a block, at least `num_drafts`.
        slots, pages, slot_pages: of the target's cache, of which `dcp` ranks hold a page together; of the draft's every rank holds all of it.
        target_weights: for each rank the target's weights outside its layers, for what the draft shares; by name.
        collectives: which ranks these are, and what carries parts between them; None: all there are.
    """

    def __init__(self, source: DraftTensors, taps: list[np.ndarray], *, num_drafts: int, rows: int, slots: int, pages: int, slot_pages: int,
                 num: Numerics, target_weights: list[dict] | None = None, collectives: Collectives | None = None, dcp: int = 1):
        collectives = collectives or VirtualRanks(len(taps))
        self.cfg, self.num_drafts, self.rows, tp = source.cfg, num_drafts, rows, collectives.tp
        self.plan: DraftPlan = build_draft_plan(self.cfg, tp, num_drafts, rows)
        self.max_seqs, self._dcp = self.plan.max_seqs, dcp
        dims = draft_dims(self.cfg, tp=tp, num_drafts=num_drafts, seqs=self.max_seqs, slots=slots, pages=pages * dcp, slot_pages=slot_pages * dcp, rows=len(taps[0]))
        held = [_load_weights(source, tp, r, target_weights[i] if target_weights else {}) for i, r in enumerate(collectives.ranks)]
        self.program = NumpyProgram(self.cfg, num, self.plan.buffers, dims, self.plan.aliases, held, [{"taps": x} for x in taps], collectives)
        self._places: dict[int, int] = {}  # slot -> its place among the sequences of the last proposal

    def open_slot(self, slot: int, pages) -> None:
        for arena in self.program.arenas:
            arena["page_table"][slot] = -1
            arena["page_table"][slot, :len(pages) * self._dcp] = self._own_pages(pages)

    def copy_slot(self, source: int, target: int, pages, used: int) -> None:
        """Gives `target` the context rows of `source`, which lie in its first `used` pages; a page at the same place is both's."""
        name = f"{self.cfg.family}_cache"
        for arena in self.program.arenas:
            for old, new in zip(arena["page_table"][source, :used * self._dcp], self._own_pages(pages)):
                if old != new:
                    arena[name][:, new] = arena[name][:, old]
        self.open_slot(target, pages)

    def _own_pages(self, pages) -> np.ndarray:
        """Pages of this cache, each of PAGE_SIZE positions, that the target's stand for."""
        return (np.array(pages, np.int32)[:, None] * self._dcp + np.arange(self._dcp)).reshape(-1)

    def commit(self, rows: StepRows, accepted: np.ndarray, observe=None) -> None:
        """Context rows of the accepted rows of the target's last step; positions behind the draft's own limit get none."""
        inside = accepted & (rows.positions < self.cfg.max_position_embeddings)
        self.program.write(row_slot=rows.slots, row_position=rows.positions, row_accepted=inside)
        self.program.run(self.plan.context, {"rows": len(rows), "decode_rows": len(rows)}, observe)

    def propose(self, asks: list[DraftAsk], observe=None) -> list[Drafted]:
        """`num_drafts` tokens for each sequence, fewer where the draft's logits are not finite."""
        seqs, k, r = len(asks), self.num_drafts, self.rows
        ids, positions = np.full((seqs, r), self.cfg.mask_token_id, np.int32), np.arange(r, dtype=np.int32) + np.array([[a.position] for a in asks])
        ids[:, 0] = [a.anchor for a in asks]
        wanted = (np.arange(seqs)[:, None] * r + self.cfg.first_row + np.arange(k)).reshape(-1)
        seeds = np.array([(a.seed & 0xFFFFFFFF, a.seed >> 32) for a in asks], np.uint32).view(np.int32)
        self.program.write(token_ids=ids.reshape(-1), row_slot=np.repeat([a.slot for a in asks], r), row_position=positions.reshape(-1),
                           row_last=np.repeat(positions[:, -1], r), logit_rows=wanted, seq_seed=seeds, seq_temperature=np.array([a.temperature for a in asks], np.float32))
        self.program.run(self.plan.ops, {"rows": seqs * r, "decode_rows": seqs * r, "head_rows": seqs * k, "seqs": seqs}, observe)
        self._places = {a.slot: s for s, a in enumerate(asks)}
        arena = self.program.arenas[0]
        out = []
        for s in range(seqs):
            finite = np.isfinite(arena["draft_logits"][:, s]).all(-1)
            count = k if finite.all() else int(finite.argmin())
            confidence = arena["draft_confidence"][:count, s] if self.cfg.confidence_head else None
            out.append(Drafted(tuple(arena["draft_ids"][:count, s].tolist()), None if confidence is None else tuple(confidence.tolist())))
        return out

    def logits(self, slot: int) -> np.ndarray:
        """float32 [num_drafts, vocab_size] that the last proposal for `slot` was drawn from; valid until the next one."""
        return self.program.arenas[0]["draft_logits"][:, self._places[slot]]

    def close(self) -> None:
        self.program.close()


def _load_weights(source: DraftTensors, tp: int, rank: int, shared: dict) -> dict:
    held = {}
    for layer in (None, *range(source.cfg.num_hidden_layers)):
        table = [w for w in DRAFT_WEIGHTS if exists_in_draft(w, source.cfg, layer)]
        held[layer] = {w.name: shared[w.name] if is_shared(w, source.cfg) else widened(source.rank_slices(w, layer, tp, rank)) for w in table}
    return held
