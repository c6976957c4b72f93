"""A backend without a model for tests of the engine: logits follow from the exact tokens before them, and every rule of
runtime/backend.py is checked. A breach is a BaseException, so that the engine cannot take it for a failed step."""
from types import SimpleNamespace
from zlib import crc32

import numpy as np

from k3cuda.config import PAGE_SIZE
from k3cuda.reference.sample import sample_row
from k3cuda.runtime.backend import AS_SAMPLED, StepCounts

EMPTY = -1  # a cache position that nobody wrote


class Breach(BaseException):
    pass


def hold(condition, text):
    if not condition:
        raise Breach(text)


def fake_logits(tokens, vocab_size: int) -> np.ndarray:
    """float32 [vocab_size] in [-4, 4): a hash of all tokens, so that any slip in one of them changes everything after it."""
    seed = crc32(np.asarray(tokens, "<i4").tobytes())
    mixed = (np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(2654435761) ^ np.uint64(seed)) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-21) - np.float32(4)).astype(np.float32)


class FakePending:
    def __init__(self, backend, drawn):
        self.backend, self._drawn, self.number = backend, drawn, backend.launches
        backend.launches += 1

    def drawn(self):
        self.backend._call()
        hold(self.backend.launches - self.number <= 2, "tokens were read after two later launches")
        return self._drawn


class FakeBackend:
    """`bad(tokens)` says whether the logits behind these tokens are NaN. `fail[n]` is raised at the n-th call (from 0) of any of
    open_slot, copy_slot, step, sample, commit and a pending's drawn, and `calls` counts them; a launch is three."""

    name, ranks, gpu, tp, kv_cache_dtype, drafting = "fake", "virtual", None, 1, "f32", None

    def __init__(self, vocab_size=24, num_slots=4, num_pages=None, max_rows=64, max_model_len=512, bad=None, fail=None, overlaps=False, max_logits=None,
                 page_tokens=PAGE_SIZE):
        self.cfg = SimpleNamespace(vocab_size=vocab_size)
        self.num_slots, self.max_rows, self.max_model_len = num_slots, max_rows, max_model_len
        self.max_logits = max_logits or max_rows
        self.dcp, self.page_tokens = page_tokens // PAGE_SIZE, page_tokens
        self.num_pages = num_slots * -(-max_model_len // self.page_tokens) if num_pages is None else num_pages
        self.bad, self.fail, self.calls, self.closed = bad or (lambda tokens: False), fail or {}, 0, False
        self.cache = np.full((self.num_pages, self.page_tokens), EMPTY)
        self.slots: dict[int, SimpleNamespace] = {}
        self.overlaps, self.launches, self.sampled = overlaps, 0, {}   # slot -> (position, token) last drawn
        self.rows, self.counts, self.row_counts = None, StepCounts(), []

    def open_slot(self, slot, pages):
        self._call()
        hold(0 <= slot < self.num_slots, "slot out of range")
        hold(len(set(pages)) == len(pages) and all(0 <= p < self.num_pages for p in pages), "pages out of range or given twice")
        # Slots are never closed explicitly: whoever held one of these pages has ended, and may not step again.
        self.slots = {s: x for s, x in self.slots.items() if s != slot and not set(x.pages) & set(pages)}
        self.slots[slot] = SimpleNamespace(pages=list(pages), tokens=[])
        self.sampled.pop(slot, None)
        self.cache[list(pages)] = EMPTY

    def copy_slot(self, source, target, pages):
        self._call()
        hold(source in self.slots and source != target, "copied from a slot that is not open")
        old, fresh = self.slots[source], set(pages) - set(self.slots[source].pages)
        hold(len(set(pages)) == len(pages) and all(0 <= p < self.num_pages for p in pages), "pages out of range or given twice")
        for i, page in enumerate(pages):
            if page not in fresh:
                hold(page == old.pages[i] and (i + 1) * self.page_tokens <= len(old.tokens), "a page is shared that will be written again")
            elif i * self.page_tokens < len(old.tokens):
                self.cache[page] = self.cache[old.pages[i]]
        self.slots = {s: x for s, x in self.slots.items() if s != target and not set(x.pages) & fresh}
        self.slots[target] = SimpleNamespace(pages=list(pages), tokens=list(old.tokens))
        self.sampled.pop(target, None)
        self.sampled.pop(target, None)

    def step(self, rows):
        self._call()
        n = len(rows)
        hold(1 <= n <= self.max_rows, f"{n} rows")
        for name in ("token_ids", "slots", "positions", "logit_rows"):
            hold(getattr(rows, name).dtype == np.int32, f"{name} is no int32")
        hold(len(rows.slots) == len(rows.positions) == n, "arrays of different length")
        hold(np.all(np.diff(rows.logit_rows) > 0) and all(0 <= r < n for r in rows.logit_rows), "logit_rows not rising")
        hold(1 + np.count_nonzero(np.diff(rows.slots)) == len(set(rows.slots.tolist())), "rows of a slot are not neighbours")
        hold(len(rows.logit_rows) <= self.max_logits, f"logits of {len(rows.logit_rows)} rows")
        self.rows, self.pending = rows, {}
        for r in range(n):
            self._take(*(int(x[r]) for x in (rows.slots, rows.token_ids, rows.positions)))
        for slot, pending in self.pending.items():
            state = self.slots[slot]
            cached = self.cache[state.pages].reshape(-1)[:len(state.tokens) + len(pending)].tolist()
            hold(cached == state.tokens + pending, "cache rows were overwritten by another sequence")
        out = [self._law(int(rows.slots[r]), int(rows.positions[r])) for r in rows.logit_rows]
        self._logits = np.array(out, np.float32).reshape(len(out), self.cfg.vocab_size)
        self.row_counts.append(n)
        self.counts.steps[self.name] = self.counts.steps.get(self.name, 0) + 1

    def _take(self, slot, token, position):
        hold(slot in self.slots, f"slot {slot} is not open")
        if self.overlaps and token == AS_SAMPLED:
            at, token = self.sampled.get(slot, (None, None))
            hold(at == position, f"no token was drawn for position {position}")
        hold(0 <= token < self.cfg.vocab_size, "token outside the vocabulary")
        state, pending = self.slots[slot], self.pending.setdefault(slot, [])
        hold(position == len(state.tokens) + len(pending), f"position {position} does not continue slot {slot}")
        hold(position < min(self.max_model_len, len(state.pages) * self.page_tokens), "position beyond the pages")
        pending.append(token)
        self.cache[state.pages[position // self.page_tokens], position % self.page_tokens] = token

    def _law(self, slot, position):
        tokens = (self.slots[slot].tokens + self.pending[slot])[:position + 1]
        return np.full(self.cfg.vocab_size, np.nan) if self.bad(tokens) else fake_logits(tokens, self.cfg.vocab_size)

    def logits(self):
        return self._logits

    def new_logits(self, rows):
        return np.full((rows, self.cfg.vocab_size), np.nan, np.float32)

    def copy_logits(self, out):
        out[:] = self._logits

    def sample(self, draws):
        self._call()
        hold(len(draws) == len(self._logits), "draws and logit rows differ in number")
        return [sample_row(row, draw) for row, draw in zip(self._logits, draws)]

    def commit(self, accepted):
        self._call()
        hold(self.rows is not None, "commit without a step")
        hold(accepted.dtype == bool and accepted.shape == (len(self.rows),), "accepted is no bool [n]")
        hold(accepted.all() or not self.rows.stand, "rows that stand were not accepted")
        for slot, pending in self.pending.items():
            mine = accepted[self.rows.slots == slot]
            hold(not np.any(np.diff(mine.astype(int)) > 0), "accepted rows are no prefix")
            self.slots[slot].tokens += pending[:int(mine.sum())]
        self.rows = None

    def launch(self, rows, draws):
        hold(self.overlaps, "this backend does not overlap")
        slots = rows.slots[rows.logit_rows].tolist()
        hold(len(set(slots)) == len(slots), "two draws for a slot")
        self.step(rows)
        drawn = self.sample([d.following(self.sampled[s][1]) if d.after_sampled else d for s, d in zip(slots, draws, strict=True)])
        for slot, draw, new in zip(slots, draws, drawn):
            self.sampled[slot] = draw.position, new.token_id or 0   # behind a row that is not finite any token does
        self.commit(np.ones(len(rows), bool))
        return FakePending(self, drawn)

    def close(self):
        self.closed = True

    def _call(self):
        hold(not self.closed, "used after close")
        number, self.calls = self.calls, self.calls + 1
        if number in self.fail:
            raise self.fail.pop(number)
