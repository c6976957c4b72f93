"""Which drafts stand, and the token behind them. docs/dspark.md, section 4, has the rules and why they leave the target's law as it is.

One sequence in, one answer out, a pure function of its arguments as sample.py's. Work is in logs of probabilities: P of the target at each
row, Q that a draft was drawn from. Everything keeps the dtype it is given; the sampler gives F32.
"""
from dataclasses import replace

import numpy as np

from ..runtime.drafting import BLOCK, STANDARD, SYNTHETIC, synthetic_rates
from ..runtime.sampling import STREAM_ACCEPT, STREAM_SAMPLE, Draw, Drawn, SamplingParams
from .sample import drawn_of, law, penalised, pick, scaled, tree_sum, uniform


def judge(logits: np.ndarray, draws: tuple[Draw, ...], ids: tuple[int, ...], draft_logits: np.ndarray | None, acceptance: str = STANDARD,
          acceptance_length: float | None = None) -> tuple[int, tuple[Drawn, ...]]:
    """How many drafts stand, and the tokens of the step: these, then one more.

    Args:
        logits: float32 [k + 1, vocab_size], raw, of the rows [token before, drafts].
        draws: of the k + 1 positions behind those rows, in order; penalties of a row see the drafts before it.
        ids: the k drafts; none is a plain draw.
        draft_logits: float32 [k, vocab_size] that they were drawn from at the request's temperature; None: they were not drawn, but are the
            draft's likeliest tokens.
        acceptance, acceptance_length: of runtime/drafting.py.
    Returns:
        (accepted drafts, drawn); the last `token_id` is None where the row it had to come from is not finite. Rows behind it are not asked.
    """
    finite = np.isfinite(logits).all(-1)
    k = len(ids) if finite.all() else int(finite.argmin())   # drafts behind a row that is not finite cannot be judged
    rows = logits if finite.all() else logits[:k]
    params = draws[0].params
    scores = [penalised(row, params, d.prompt_ids, d.output_ids) for row, d in zip(rows, draws)]
    u = [uniform(d.seed, d.position, STREAM_ACCEPT, i) for i, d in enumerate(draws[:k])]
    if params.greedy:
        count = accept_synthetic(u, acceptance_length, len(ids)) if acceptance == SYNTHETIC else accept_greedy(scores, ids[:k])
        token = int(scores[count].argmax()) if count < len(scores) else None
    else:
        log_p = [log_law(s, params) for s in scores[:k]]
        log_q = None if draft_logits is None else [log_softmax_at(z, params.temperature) for z in draft_logits[:k]]
        if acceptance == SYNTHETIC:
            count, log_w = accept_synthetic(u, acceptance_length, len(ids)), 0.0
        else:
            count, log_w = {STANDARD: accept_standard, BLOCK: accept_block}[acceptance](log_p, log_q, ids[:k], u)
        token = None
        if count < len(scores):
            weights = law(scores[k], params) if count == k else residual(log_p[count], log_q and log_q[count], ids[count], log_w)
            token = pick(weights, uniform(draws[count].seed, draws[count].position, STREAM_SAMPLE))
    drawn = [replace(drawn_of(int(i), row, params), from_draft=True) for i, row in zip(ids[:count], rows)]
    return count, (*drawn, Drawn(None) if token is None else drawn_of(token, rows[count], params))


def log_law(scores: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Log of the target's probabilities after temperature, min-p, top-k and top-p; -inf for what these take away."""
    weights = law(scores, params)
    with np.errstate(divide="ignore"):
        return np.where(weights > 0, scaled(scores, params.temperature), -np.inf) - np.log(tree_sum(weights))


def log_softmax_at(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Log of the probabilities that a draft was drawn from."""
    z = scaled(logits, temperature)
    with np.errstate(under="ignore"):
        return z - np.log(tree_sum(np.exp(z)))


def accept_greedy(scores, ids) -> int:
    """Drafts that are the target's own choices, up to the first that is not."""
    for i, token in enumerate(ids):
        if int(scores[i].argmax()) != token:
            return i
    return len(ids)


def accept_standard(log_p, log_q, ids, u) -> tuple[int, float]:
    """(accepted, log weight of P in the residual): draft i stands if P > u Q and all before it did."""
    for i, token in enumerate(ids):
        with np.errstate(divide="ignore"):
            if not log_p[i][token] > np.log(u[i]) + _log_q(log_q, i, token):
                return i, 0.0
    return len(ids), 0.0


def accept_block(log_p, log_q, ids, u) -> tuple[int, float]:
    """The same for block verification: the last draft whose own test succeeds takes all before it along.

    The test is u < h, not u <= h: u is 0 once in 2^24 draws, and h is 0 where the target gives the draft no probability at all.
    """
    h, log_w = block_chances(log_p, log_q, ids)
    count = max((i + 1 for i in range(len(ids)) if u[i] < h[i]), default=0)
    return count, log_w[count]


def block_chances(log_p, log_q, ids) -> tuple[list, list]:
    """(h_1 to h_k, log w_0 to log w_k) of block verification (arXiv 2403.10444)."""
    log_w, h = [log_p[0].dtype.type(0) if len(log_p) else 0.0], []
    for i, token in enumerate(ids):
        log_w.append(min(log_w[0], log_w[i] + log_p[i][token] - _log_q(log_q, i, token)))
    with np.errstate(under="ignore", over="ignore"):
        for i in range(1, len(ids)):
            w = np.exp(log_w[i])
            if log_q is None:
                s = w * (1 - np.exp(log_p[i][ids[i]]))
            else:
                s = tree_sum(np.maximum(np.exp(log_w[i] + log_p[i]) - np.exp(log_q[i]), 0))
            below = s + (1 - w)
            h.append(s / below if below > 0 else type(w)(1))
        if ids:
            h.append(np.exp(log_w[-1]))
    return h, log_w


def residual(log_p: np.ndarray, log_q: np.ndarray | None, token: int, log_w=0.0) -> np.ndarray:
    """Weights of the law behind a rejected draft: (w P - Q) where positive, P without the draft if Q is one point; P itself if nothing is left."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore", under="ignore"):
        if log_q is None:
            left = log_p.copy()
            left[token] = -np.inf
        else:
            weighted = log_p + log_w
            left = np.where(weighted > log_q, weighted + np.log1p(-np.exp(log_q - weighted)), -np.inf)
        largest = left.max()
        return np.exp(left - largest) if np.isfinite(largest) else np.exp(log_p - log_p.max())


def accept_synthetic(u, acceptance_length: float, num_drafts: int) -> int:
    """Drafts up to the first that the dice reject, whatever was proposed."""
    before = 1.0
    for i, rate in enumerate(synthetic_rates(acceptance_length, num_drafts)[:len(u)]):
        if before == 0 or not u[i] < rate / before:
            return i
        before = rate
    return len(u)


def _log_q(log_q, i: int, token: int):
    return 0 if log_q is None else log_q[i][token]
