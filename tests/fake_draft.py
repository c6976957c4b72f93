"""A draft model for the fake backend: what it proposes is decided by the test, and every rule of drafting is checked."""
import numpy as np
from drafts import made
from engine_oracle import VOCAB
from fake_backend import FakeBackend, fake_logits, hold

from k3cuda.config import PAGE_SIZE
from k3cuda.reference.accept import judge
from k3cuda.reference.sample import draft_token
from k3cuda.runtime.backend import Drafted, Judged
from k3cuda.runtime.drafting import GREEDY, Drafting


def options(num_drafts=None, draft=None, **given):
    """Drafting over a made draft, whose tensors nobody reads here."""
    return Drafting(made("mla", {"vocab_size": VOCAB, "mask_token_id": VOCAB - 1} | (draft or {}), vocab_size=VOCAB), num_drafts, **given)


def right(tokens, k):
    """The k tokens that a greedy request without penalties goes on with."""
    tokens, out = list(tokens), []
    for _ in range(k):
        out.append(int(fake_logits(tokens, VOCAB).argmax()))
        tokens.append(out[-1])
    return out


class Always:
    """Greedy drafts that are right but at the given places, where they are off by one."""

    def __init__(self, *wrong):
        self.wrong = wrong

    def __call__(self, tokens, k):
        return [(t + (i in self.wrong)) % VOCAB for i, t in enumerate(right(tokens, k))]


class DraftingFake(FakeBackend):
    """`say(tokens, k)` gives the drafts behind these tokens; without it they are drawn from a law that is near the target's. `sure` are
    their confidences."""

    def __init__(self, drafting, say=None, sure=None, **backend):
        spare = drafting.spare_positions
        length = backend.get("max_model_len", 512)
        backend.setdefault("num_pages", backend.get("num_slots", 4) * -(-(length + spare) // PAGE_SIZE))
        super().__init__(VOCAB, **backend)
        self.drafting, self.say, self.sure, self.laws, self.asked = drafting, say, sure, {}, []

    def propose(self, asks):
        self._call()
        self.asked.append(len(asks))
        hold(len({a.slot for a in asks}) == len(asks) <= self.drafting.max_batch, "a slot asked twice, or too many at a time")
        return [self._draft(a) for a in asks]

    def _draft(self, a):
        state, k = self.slots[a.slot], self.drafting.num_drafts
        hold(a.position == len(state.tokens), "the anchor does not stand behind the committed tokens")
        hold(a.position + self.drafting.block_rows <= len(state.pages) * PAGE_SIZE, "the block does not fit the pages")
        tokens, ids, laws = state.tokens + [a.anchor], [], []
        for i in range(k):
            laws.append(0.7 * fake_logits(tokens + ids, VOCAB) + 0.5 * fake_logits(tokens + ids + [99], VOCAB))
            ids.append(draft_token(laws[-1], a.temperature, a.seed, a.position + 1 + i, i))
        self.laws[a.slot] = np.array(laws, np.float32)
        return Drafted(tuple(self.say(tokens, k) if self.say else ids), self.sure)

    def accept(self, judges):
        self._call()
        out, rows, d = [], iter(self._logits), self.drafting
        hold(sum(len(j.draws) for j in judges) == len(self._logits), "draws and logit rows differ in number")
        for j in judges:
            hold(len(j.draws) == len(j.draft_ids) + 1, "draws and drafts differ in number")
            mine = np.stack([next(rows) for _ in j.draws])
            hold([x.position for x in j.draws] == list(range(j.draws[0].position, j.draws[0].position + len(j.draws))), "positions do not follow")
            laws = self.laws.get(j.slot) if j.draft_ids and d.draft_sampling != GREEDY and not self.say else None
            out.append(Judged(*judge(mine, j.draws, j.draft_ids, laws, d.acceptance, d.acceptance_length)))
        return out
