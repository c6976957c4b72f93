"""Trains drafts of a finished target side by side, on its features and its laws along right answers."""
import time

import numpy as np
import torch
import torch.nn.functional as F

from .captured import Captured
from .draft import Draft
from .optimizer import Optimizer
from .rows import ANSWER, PADDING, steps

ANCHORS = 6          # of a row
FADE = 4.0           # a proposal so many places further on counts 1/e: it stands only if all before it do
SURE_WEIGHT = 0.1


def anchors_of(kinds: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """int64 [b, count] random places of answer tokens that another one follows; the same one may come twice."""
    good = (kinds[:, :-1] == ANSWER) & (kinds[:, 1:] == ANSWER)
    return np.stack([rng.choice(np.flatnonzero(row), count) for row in good])


def block_loss(draft: Draft, taps, target_law, ids, kinds, anchors):
    """Cross entropy with the target's law, faded along the block, and the confidence head's with 1 - |P - Q| / 2."""
    w, t = draft.cfg.block_size, ids.shape[1]
    places = anchors[..., None] + torch.arange(w, device=ids.device)                     # of the token before each proposal
    real = (places + 1 < t) & (kinds.gather(1, (places + 1).clamp(max=t - 1).flatten(1)).view_as(places) == ANSWER)
    real = real.long().cumprod(-1).float()                                               # an answer ends where its message does
    places = places.clamp(max=t - 2)
    before = ids.gather(1, places.flatten(1)).view_as(places)
    law = target_law(places)                                                             # [b, a, w, vocabulary]
    hidden = draft(taps, ids, anchors)
    own = draft.logits(hidden, before).log_softmax(-1)
    weight = real * torch.exp(-torch.arange(w, device=ids.device) / FADE)
    stands = 1 - (law - own.detach().exp()).abs().sum(-1) / 2
    sure = F.binary_cross_entropy_with_logits(draft.sure(hidden.detach(), before), stands, reduction="none")
    return ((-(law * own).sum(-1) + SURE_WEIGHT * sure) * weight).sum() / weight.sum()


def features(target, ids, kinds):
    """The target's taps, and a function from places [b, a, w] to its laws there; nothing of it is trained."""
    with torch.no_grad():
        hidden = target(ids, kinds != PADDING)

    @torch.no_grad()
    def law(places):
        rows = hidden.gather(1, places.flatten(1)[..., None].expand(-1, -1, hidden.shape[-1]))
        return target.logits(rows).softmax(-1).view(*places.shape, -1)

    return target.taps, law


def train_drafts(trainer, drafts: dict[str, Draft], count: int, until: float) -> None:
    """Up to `count` steps, fewer where the time `until` comes first; the learning rate falls with what of either is used up."""
    target, schedule = trainer.model, trainer.schedule
    target.tap_layers = sorted({i for d in drafts.values() for i in d.cfg.target_layer_ids})
    optimizers = {name: Optimizer(d.named_parameters()) for name, d in drafts.items()}
    rng = np.random.default_rng(trainer.seed)

    def gradients(batches):
        losses = dict.fromkeys(drafts, 0.0)
        for ids, kinds, anchors in batches:
            ids = ids.long()
            taps, law = features(target, ids, kinds)
            for name, draft in drafts.items():
                loss = block_loss(draft, taps, law, ids, kinds, anchors) / len(batches)
                loss.backward()
                losses[name] = losses[name] + loss.detach()
        return losses

    captured = Captured(gradients, [p for d in drafts.values() for p in d.parameters()]) if trainer.is_captured else None
    # Rows of half the size, as long as they become, and other seeds than the target's.
    long = (schedule.long_tokens // 2) // schedule.lengths[-1][1]
    wanted = ((s, schedule.short // 2, long, schedule.lengths[-1][1]) for s in range(count))
    began = time.monotonic()
    for step, batches in enumerate(steps(str(trainer.folder), trainer.options, trainer.seed + 1, wanted, trainer.workers)):
        now = time.monotonic()
        used = max(step / count, (now - began) / (until - began) if now < until else 1)
        if used >= 1:
            break
        batches = [(ids, kinds, anchors_of(kinds, ANCHORS, rng)) for ids, kinds in batches]
        losses = captured(batches) if captured else gradients(trainer.tensors(batches))
        for optimizer in optimizers.values():
            optimizer.step(min(1, (step + 1) / 20, 2 * (1 - used)))
        if (step + 1) % max(1, count // 20) == 0:
            trainer.log(draft_step=step + 1, of=count, s=round(time.monotonic() - began, 1), losses={n: round(float(x), 4) for n, x in losses.items()})


@torch.no_grad()
def acceptance(target, draft: Draft, ids, kinds) -> float:
    """Tokens a verify step that greedy drafts give along right answers, the first token of an answer not counted: it comes from the prompt."""
    w, taps_of = draft.cfg.block_size, features(target, ids, kinds)[0]
    longest = int((kinds == ANSWER).sum(1).max())
    first = (kinds == ANSWER).float().argmax(1)
    anchors = (first[:, None] + torch.arange(longest, device=ids.device)).clamp(max=ids.shape[1] - 1)
    hidden, before = draft(taps_of, ids, anchors), ids.gather(1, anchors)
    same, padded = [], F.pad(torch.where(kinds == ANSWER, ids, -1), (0, w + 1), value=-1)
    for i in range(w):
        before = draft.logits(hidden[:, :, i], before).argmax(-1)
        same.append(before == padded.gather(1, anchors + 1 + i))
    stands = torch.stack(same, -1).long().cumprod(-1).sum(-1).tolist()
    tokens = steps_taken = 0
    for row, length in zip(stands, (kinds == ANSWER).sum(1).tolist()):
        at = 0
        while at + 1 < length:
            took = min(row[at] + 1, length - 1 - at)
            at, tokens, steps_taken = at + took, tokens + took, steps_taken + 1
    return tokens / steps_taken
