"""The sampler in NumPy: random numbers, penalties, filters, the draw, log-probabilities. docs/numerics.md states it in words.

One row in, one token out, a pure function of both arguments: no batch, slot, rank or order can change it. All arithmetic is F32,
one rounding an operation, no fused multiply-add.
"""
import numpy as np

from ..runtime.sampling import STREAM_DRAFT, Draw, Drawn, SamplingParams
from .numerics import F32

LARGEST = np.finfo(F32).max

# Philox4x32-10: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
_ROUNDS, _WORD = 10, 0xFFFFFFFF
_MULTIPLIERS, _KEY_STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)


def sample_row(logits: np.ndarray, draw: Draw) -> Drawn:
    """Draws one token.

    Args:
        logits: float32 [vocab_size], raw.
        draw: what to draw; parameters left open count as off.
    Returns:
        the token; `token_id` is None where any logit is NaN or infinite, -inf included: a model gives none, a mask is no logit.
    """
    row = np.ascontiguousarray(logits, F32)
    if not np.isfinite(row).all():
        return Drawn(None)
    params = draw.params if draw.params.is_resolved else draw.params.resolved({})
    scores = penalised(row, params, draw.prompt_ids, draw.output_ids)
    if params.greedy:
        token = int(scores.argmax())  # the first of equals
    else:
        token = pick(law(scores, params), uniform(draw.seed, draw.position, draw.stream))
    return drawn_of(token, row, params)


def drawn_of(token: int, row: np.ndarray, params: SamplingParams) -> Drawn:
    """The token with the log-probabilities that were asked for, of the raw row."""
    if params.logprobs is None:
        return Drawn(token)
    logprobs = log_softmax(row)
    return Drawn(token, float(logprobs[token]), most_likely(logprobs, params.logprobs))


def draft_token(logits: np.ndarray, temperature: float, seed: int, position: int, index: int) -> int:
    """One token of a draft: from softmax(logits / temperature), at 0 the largest, lowest id on ties; `index` is its place among the drafts
    of the step, which keeps the draws of two steps at one position independent."""
    if temperature == 0:
        return int(logits.argmax())
    with np.errstate(under="ignore"):
        return pick(np.exp(scaled(logits, temperature)), uniform(seed, position, STREAM_DRAFT, index))


def philox4x32(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Ten rounds over four words of 32 bits under a key of two."""
    c, k = list(counter), list(key)
    for _ in range(_ROUNDS):
        first, second = c[0] * _MULTIPLIERS[0], c[2] * _MULTIPLIERS[1]
        c = [second >> 32 ^ c[1] ^ k[0], second & _WORD, first >> 32 ^ c[3] ^ k[1], first & _WORD]
        k = [(word + step) & _WORD for word, step in zip(k, _KEY_STEPS)]
    return tuple(c)


def uniform(seed: int, position: int, stream: int, index: int = 0) -> np.float32:
    """The `index`-th number of a stream at a position: 24 bits, in [0, 1), exact in F32."""
    word = philox4x32((position & _WORD, stream, index, 0), (seed & _WORD, seed >> 32 & _WORD))[0]
    return F32((word >> 8) * 2.0 ** -24)


def tree_levels(x: np.ndarray) -> list[np.ndarray]:
    """F32 sums over the binary tree by index, leaves first, [1] last: neighbours are added, an odd end gets a zero.

    The bytes are those of a tree over the next power of two, because adding zero changes nothing.
    """
    levels = []
    while True:
        if len(x) > 1 and len(x) % 2:
            x = np.append(x, F32(0))
        levels.append(x)
        if len(x) == 1:
            return levels
        x = x[0::2] + x[1::2]


def tree_sum(x: np.ndarray) -> np.float32:
    """The root of `tree_levels`. For values >= 0 it never falls when a value is added or grows: bisection may rely on it."""
    return tree_levels(x)[-1][0]


def penalised(row: np.ndarray, params: SamplingParams, prompt_ids, output_ids) -> np.ndarray:
    """Logits after repetition, then frequency, then presence penalty, as vLLM does; the row itself where none is set.

    A result that overflows is held at the largest finite F32.
    """
    if not params.has_penalties:
        return row
    row = row.copy()
    output = np.asarray(output_ids, np.int64)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        if params.repetition_penalty != 1:
            seen, factor = np.union1d(np.asarray(prompt_ids, np.int64), output), F32(params.repetition_penalty)
            row[seen] = np.where(row[seen] > 0, row[seen] / factor, row[seen] * factor)
        seen, counts = np.unique(output, return_counts=True)
        row[seen] -= F32(params.frequency_penalty) * counts.astype(F32)
        row[seen] -= F32(params.presence_penalty)
    return np.clip(row, -LARGEST, LARGEST)


def law(scores: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution a token is drawn from, not normalised.

    Args:
        scores: float32 [vocab_size], finite, penalties applied.
        params: resolved, temperature above 0.
    Returns:
        float32 [vocab_size]: exp((score - largest) / temperature), so 1 for the likeliest, and 0 for what a filter took away.
    """
    with np.errstate(over="ignore", under="ignore"):  # a distance that overflows is -inf, and its weight 0
        z = scaled(scores, params.temperature)
        w = np.exp(z)
        if params.min_p > 0:
            w = np.where(w >= F32(params.min_p), w, F32(0))
        if 0 < params.top_k < len(z):
            # What min-p took is below everything it left, so the k-th of all is the k-th of the rest, or removes nothing.
            place = len(z) - params.top_k
            w = np.where(z >= np.partition(z, place)[place], w, F32(0))
        if F32(params.top_p) < 1:
            w = _top_p(w, F32(params.top_p))
    return w


def scaled(scores: np.ndarray, temperature: float) -> np.ndarray:
    """(score - largest) / temperature: the log of a weight."""
    with np.errstate(over="ignore"):
        return (scores - scores.max()) / F32(temperature)


def _top_p(w: np.ndarray, top_p: np.float32) -> np.ndarray:
    """Keeps {w >= tau}, tau the largest value whose mass still reaches top_p of the whole; equals stay or go together."""
    wanted = top_p * tree_sum(w)
    values = np.unique(w[w > 0])
    low, high = 0, len(values) - 1  # values[low] reaches it: at 0 nothing is taken away
    while low < high:
        middle = (low + high + 1) // 2
        if tree_sum(np.where(w >= values[middle], w, F32(0))) >= wanted:
            low = middle
        else:
            high = middle - 1
    return np.where(w >= values[low], w, F32(0))


def pick(weights: np.ndarray, u: np.float32) -> int:
    """Inverse CDF in id order, by descending the tree of sums.

    At a node with sums L and R below it and target t (u times the total at the root): left if t < L or R is 0, else right with
    t - L. A node without mass is never entered, so the token has a weight above 0 whatever the roundings did to t.

    Args:
        weights: float32 [vocab_size], >= 0, at least one above 0.
        u: in [0, 1).
    """
    levels = tree_levels(weights)
    target, node = u * levels[-1][0], 0
    for level in reversed(levels[:-1]):
        node *= 2
        left, right = level[node], level[node + 1]
        if target >= left and right > 0:
            target, node = target - left, node + 1
    return node


def log_softmax(row: np.ndarray) -> np.ndarray:
    """float32 [vocab_size], natural log; never below the lowest finite F32."""
    with np.errstate(over="ignore", under="ignore"):
        z = row - row.max()
        return np.maximum(z - np.log(tree_sum(np.exp(z))), -LARGEST)


def most_likely(logprobs: np.ndarray, count: int) -> tuple[tuple[int, float], ...]:
    """The first `count` (id, logprob) by falling logprob, then rising id."""
    count = min(count, len(logprobs))
    if count == 0:
        return ()
    place = len(logprobs) - count
    ids = np.flatnonzero(logprobs >= np.partition(logprobs, place)[place])
    ids = ids[np.lexsort((ids, -logprobs[ids]))][:count]
    return tuple((int(i), float(logprobs[i])) for i in ids)
