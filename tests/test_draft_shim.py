"""A draft's kernels under g++: every operation of its context and of a block against the reference function of its stage.

Both get the same inputs, those of the reference's own run rounded as the kernels' buffers hold them; everything else in the arena is
poisoned before, and must be what it was behind.
"""
import ml_dtypes
import numpy as np
import pytest
from drafts import ask, made, random_taps
from shim import host

pytest.importorskip("cupy", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")   # ctypes' view of Step lies beside it
pytestmark = pytest.mark.skipif(host.COMPILER is None, reason="needs g++")

from host_step import SLOTS, Kernels, Memory, held  # noqa: E402

from k3cuda.cache_layout import in_order  # noqa: E402
from k3cuda.config import PAGE_SIZE  # noqa: E402
from k3cuda.draft_plan import build_draft_plan  # noqa: E402
from k3cuda.draft_weights import BY_NAME as WEIGHT  # noqa: E402
from k3cuda.reference.numerics import Numerics  # noqa: E402
from k3cuda.reference.sample import draft_token  # noqa: E402
from k3cuda.runtime.backend import StepRows  # noqa: E402
from k3cuda.runtime.numpy_draft import NumpyDraft  # noqa: E402
from k3cuda.runtime.numpy_program import _rows_view as live  # noqa: E402
from k3cuda.runtime.row_check import PADDING  # noqa: E402
from k3cuda.stages import GATHER  # noqa: E402

PAGES = 2          # of a slot
CONTEXT = 58       # positions before those whose rows the kernels make: blocks lie on both sides of a page's end
# Relative errors as norms: sums in another order; one rounding to BF16; where also attention's weights, or the normed taps, are rounded inside.
LIMIT = {"f32": 3e-6, "bf16": 2**-8}
INSIDE = {"draft_mla_attend": 2**-7, "gqa_attend": 2**-7, "fuse_normed": 2**-8}


class Twin:
    """A draft on the reference and as kernels."""

    def __init__(self, source, folder, *, seqs=1, num_drafts=7, block_rows=7, tp=1):
        cfg, self.tp = source.cfg, tp
        self.plan = build_draft_plan(cfg, tp, num_drafts, block_rows)
        self.rows = next(n for n in (8, 16, 32, 64) if n >= seqs * block_rows)
        stages = {op.stage.name: () for op in self.plan.context + self.plan.ops}
        self.memories = [Memory(self.plan, None, r, PAGES, lambda name, layer, r=r: source.rank_slices(WEIGHT[name], layer, tp, r)) for r in range(tp)]
        self.taps = [np.zeros((64, len(cfg.target_layer_ids), cfg.target_hidden_size), np.float32) for _ in range(tp)]
        self.reference = NumpyDraft(source, self.taps, num_drafts=num_drafts, rows=block_rows, slots=SLOTS, pages=SLOTS * PAGES, slot_pages=PAGES, num=Numerics())
        self.kernels = self._kernels(stages, folder)
        for memory in self.memories:
            memory.meet(self.memories)
            for array in memory.session.values():
                array[:] = 0xFF
        for slot in range(SLOTS):
            pages = np.random.default_rng(slot).permutation(PAGES) + slot * PAGES
            self.reference.open_slot(slot, pages)
        self.checked = []

    def _kernels(self, stages, folder):
        return Kernels(self.rows, self.tp, True, stages, folder / "build", plan=self.plan)

    def buffer(self, rank, name):
        return held(self.memories[rank], name)

    def fill(self, slot, n):
        """Random context rows at the first `n` positions of a slot."""
        pages = self.reference.program.arenas[0]["page_table"][slot]
        for arena in self.reference.program.arenas:
            name, = (n for n in arena if n.endswith("_cache"))
            at, rng = np.arange(n), np.random.default_rng(slot)   # the same on every rank where it is not cut
            cache = arena[name]
            cache[:, pages[at // PAGE_SIZE], at % PAGE_SIZE] = rng.standard_normal((len(cache), n, *cache.shape[3:])).astype(ml_dtypes.bfloat16)

    def commit(self, slot, first, n, accepted, seed=0):
        """Context rows by both; every operation of the reference is checked."""
        taps = random_taps(self.plan.cfg, n, seed).astype(ml_dtypes.bfloat16).astype(np.float32)
        for each in self.taps:
            each[:] = np.nan
            each[:n] = taps
        rows = StepRows(*(np.array(x, np.int32) for x in (np.zeros(n), np.full(n, slot), first + np.arange(n), [])))
        self._checking(lambda: self.reference.commit(rows, np.arange(n) < accepted))

    def propose(self, asks):
        out = []
        self._checking(lambda: out.extend(self.reference.propose(asks)))
        return out

    def _checking(self, work):
        """Runs `work` with operations that go by `check` in the place of the reference's loop."""
        program, run = self.reference.program, self.reference.program.run

        def checked(ops, counts, observe=None):
            with np.errstate(all="ignore"):
                for op in ops:
                    if op.stage.moves:
                        program._exchange(op, [program.bind(op, r, counts).b for r in range(self.tp)])
                    else:
                        self._check(op, counts)

        program.run = checked
        try:
            work()
        finally:
            program.run = run

    def _check(self, op, counts):
        program, table, stage = self.reference.program, self.plan.buffers, op.stage
        for rank, memory in enumerate(self.memories):
            memory.poison()
            for name in dict.fromkeys((*stage.inputs, "row_slot")):
                self._put(rank, name, op, counts)
        before = [{name: self.buffer(r, name).copy() for name in memory.tables.buffers} for r, memory in enumerate(self.memories)]
        for rank, memory in enumerate(self.memories):
            call = program.bind(op, rank, counts)
            call.stage(call.m, call.w, call.b, op)
            self.kernels.run(op, memory)
        moved = {m.source: m for s in memory.tables.stages for m in s.moves} if self.tp > 1 else {}
        written = {n for n in stage.outputs if n not in moved} | {moved[n].target for n in stage.outputs if n in moved}
        same_memory = set(self.plan.aliases) | set(self.plan.aliases.values())
        for rank, memory in enumerate(self.memories):
            for name in stage.outputs:
                want = live(table[name], program.arenas[rank][name], op, counts)
                got = live(table[name], self.buffer(rank, name), op, counts)
                if name in moved:
                    want, got = self._moved(moved[name], op, counts, rank)
                self._compare(op, name, got, want, before[rank][name])
            for name in set(table) - written - same_memory:
                assert self.buffer(rank, name).tobytes() == before[rank][name].tobytes(), f"{op} wrote {name}"
        self.checked.append(stage.name)

    def _put(self, rank, name, op, counts):
        """The reference's contents of an input, as the kernels hold it; the reference goes on from these."""
        b, target = self.plan.buffers.get(name), self.buffer(rank, name)
        source = self.reference.program.arenas[rank][name]
        if name in PADDING or name in ("row_last", "seq_seed", "seq_temperature", "page_table"):
            target[...] = PADDING.get(name, 0)
            part = source[:len(target)] if name != "page_table" else source
            target[:len(part)] = part
            return
        if name.endswith("_cache"):   # a position that nobody wrote holds NaN
            part = source.astype(ml_dtypes.bfloat16)
            source[...] = part
            stored = np.where(np.any(part != 0, axis=tuple(range(3, part.ndim)), keepdims=True), part, np.array(np.nan, part.dtype))
            target[...] = in_order(stored) if name == "mla_cache" else stored
            return
        part = live(b, source, op, counts)
        rounded = part.astype(target.dtype)
        part[...] = rounded
        live(b, target, op, counts)[...] = rounded

    def _moved(self, move, op, counts, rank):
        b = self.plan.buffers[move.source]
        parts = [live(b, self.reference.program.arenas[r][move.source], op, counts) for r in range(self.tp)]
        axis = b.cut - b.is_layered if b.cut is not None else 0
        want = np.concatenate(parts, axis=axis) if move.how == GATHER else np.stack(parts)
        got = live(self.plan.buffers[move.target], self.buffer(rank, move.target), op, counts)
        return got, want

    def _compare(self, op, name, got, want, before):
        if name.endswith("_cache"):
            got = (in_order(got) if name == "mla_cache" else got).astype(np.float32)
            new = np.any(want != 0, axis=tuple(range(2, want.ndim)))   # of this layer: [page, position]
            old = np.isnan(got).any(axis=tuple(range(2, want.ndim)))
            assert (old == ~new).all(), f"{op}: other rows of {name} were written"
            got, want = got[new], want[new]
        if want.dtype == np.int32:
            np.testing.assert_array_equal(got, want, f"{op}: {name}")
            return
        got = got.astype(np.float32)
        limit = INSIDE.get(op.stage.name, LIMIT[self.plan.buffers[name].dtype])
        far = np.linalg.norm(got - want)
        assert far <= limit * np.linalg.norm(want), (str(op), name, far, np.linalg.norm(want))


# Sizes that need no cluster of blocks, which the shim has not.
GATED = {"mla_use_nope": True, "mla_use_output_gate": True, "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
         "rope_parameters": None}
CASES = {
    "mla": ("mla", {}, {}), "two sequences": ("mla", {}, {"seqs": 2, "num_drafts": 3}),
    "causal": ("mla", {"num_attention_heads": 6, "is_causal": True, "fc_norm": True, "confidence_head_with_markov": False}, {"num_drafts": 2, "block_rows": 5}),
    "gated": ("mla", GATED, {}), "ranks": ("mla", {}, {"tp": 2}),
    "gqa": ("gqa", {"fc_norm": False}, {}), "gqa ranks": ("gqa", {}, {"tp": 2, "seqs": 2, "num_drafts": 3, "block_rows": 3}),
    "gqa windows": ("gqa", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}, {"seqs": 2, "num_drafts": 3}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_operation_of_a_draft(tmp_path, case):
    family, changes, options = CASES[case]
    every_operation(Twin(made(family, changes), tmp_path, **options), options.get("seqs", 1), len(case))


def every_operation(twin, seqs, seed):
    for slot in range(seqs):
        twin.fill(slot, CONTEXT - slot)
        twin.commit(slot, CONTEXT - slot, 8, 8, slot)
        twin.commit(slot, CONTEXT - slot + 8, max(5, 3 + slot), 3 + slot, slot + 7)   # every context ends at CONTEXT + 11
    asks = [ask(slot, 5 + slot, CONTEXT + 11, seed=slot + (9 << 32), temperature=0.7 * (slot + seed) % 2) for slot in range(seqs)]
    found = twin.propose(asks)
    assert len(found) == seqs and set(twin.checked) == {op.stage.name for op in twin.plan.context + twin.plan.ops if not op.stage.moves}


class Chain(Twin):
    """The kernels alone, operation behind operation in one arena: nothing comes from the reference but what a host writes."""

    def _check(self, op, counts):
        """In the place of one operation of both: the reference's and the kernels', each in its own memory."""
        for rank, memory in enumerate(self.memories):
            call = self.reference.program.bind(op, rank, counts)
            call.stage(call.m, call.w, call.b, op)
            self.kernels.run(op, memory)

    def _checking(self, work):
        for rank, memory in enumerate(self.memories):
            memory.poison()
        program = self.reference.program
        write = program.write

        def both(**values):
            write(**values)
            for memory, arena in zip(self.memories, program.arenas):
                for name in values:
                    target = memory.buffer(name)
                    target[...] = PADDING.get(name, 0)
                    target[:len(arena[name])] = arena[name][:len(target)]

        program.write = both
        for rank, taps in enumerate(self.taps):
            self.buffer(rank, "taps")[...] = taps
            self.memories[rank].buffer("page_table")[...] = program.arenas[rank]["page_table"]
        try:
            super()._checking(work)
        finally:
            program.write = write


FAR = 0.03   # relative: BF16 between operations against F32, through two layers


@pytest.mark.parametrize("family, options", [("mla", {}), ("gqa", {"seqs": 2, "num_drafts": 3}), ("mla", {"tp": 2})], ids=["mla", "gqa", "ranks"])
def test_the_whole_way(tmp_path, family, options):
    """From taps to drafts, twice, with a context that grows and a block whose rows are overwritten by what was accepted of it."""
    whole_way(Chain(made(family, {}), tmp_path, **options), options.get("seqs", 1))


def whole_way(twin, seqs):
    k, tokens = twin.plan.num_drafts, 0
    for step in range(2):
        for slot in range(seqs):
            twin.commit(slot, step * 6, 8, 6, 10 * step + slot)
        found = twin.propose([ask(slot, 5 + slot, 6 * step + 6, seed=3, temperature=float(slot)) for slot in range(seqs)])
        for rank in range(len(twin.memories)):
            ids, logits, sure = (twin.buffer(rank, name)[:k, :seqs] for name in ("draft_ids", "draft_logits", "draft_confidence"))
            want = twin.reference.program.arenas[rank]["draft_logits"][:k, :seqs]
            for slot in range(seqs):
                # While the kernels' tokens are the reference's, their logits answer the same tokens before.
                same = next((i for i in range(k) if ids[i, slot] != found[slot].token_ids[i]), k)
                tokens += same
                part = slice(0, min(same + 1, k))
                assert np.linalg.norm(logits[part, slot] - want[part, slot]) < FAR * np.linalg.norm(want[part, slot])
                for i in range(k):   # and a token is the draw from the kernels' own logits
                    assert ids[i, slot] == draft_token(logits[i, slot], float(slot), 3, 6 * step + 7 + i, i)
            assert ((0 < sure) & (sure < 1)).all()
    assert tokens > k * seqs   # of both steps and all ranks
