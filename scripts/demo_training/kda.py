"""Kimi Delta Attention over whole rows of text: the recurrence of k3cuda/reference/kda.py in chunks, and token by token to check it.

Formulas: the chunk form of fla's `chunk_kda` (the WY transform of the delta rule). With G the sums of log decays inside a chunk,

    A_ij = beta_i sum_d k_i k_j e^(G_i - G_j)  (j < i),  U = (I + A)^-1 beta (V - (K e^G) S),  O = (Q e^G) S + [sum_d q_i k_j e^(G_i - G_j)]_(j <= i) U
    S' = diag(e^G_end) S + (K e^(G_end - G))^T U

G may reach -5 a token, so e^-G alone is never formed: rows of 16 are scaled around the sum at their middle, which keeps exponents within 45.
Shapes: b rows times heads, n chunks, C tokens of a chunk, d a head. All in F32.
"""
import torch

CHUNK, SUB = 64, 16


def kda_recurrence(q, k, v, decay, beta):
    """The definition: q, k, v, decay [b, t, d], beta [b, t] -> [b, t, d]. Slow."""
    state = torch.zeros(q.shape[0], q.shape[2], v.shape[2], dtype=q.dtype, device=q.device)
    out = []
    for t in range(q.shape[1]):
        state = state * decay[:, t].exp()[..., None]
        delta = beta[:, t, None] * (v[:, t] - torch.einsum("bk,bkv->bv", k[:, t], state))
        state = state + k[:, t, :, None] * delta[:, None]
        out.append(torch.einsum("bk,bkv->bv", q[:, t], state))
    return torch.stack(out, 1)


def factors(q, k, v, total, beta):
    """What a chunk's products are made of: q, k, v, total [b, n, C, d], beta [b, n, C, 1] -> left [b, n, pieces, 2 SUB, d], right [b, n, pieces, C, d],
    whose products are the sums over d of q_i k_j e^(G_i - G_j), and of k_i k_j below them; beta v, beta K e^G, K e^(G_end - G), Q e^G [b, n, C, d];
    e^G_end [b, n, d, 1]."""
    b, n, c, d = q.shape
    pieces = c // SUB
    rows = total.view(b, n, pieces, SUB, d)
    middle = rows[:, :, :, SUB // 2:SUB // 2 + 1]
    up = (rows - middle).exp()
    left = torch.cat([q.view_as(rows) * up, k.view_as(rows) * up], 3)
    piece = torch.arange(c, device=q.device) // SUB
    seen = piece[None, :, None] <= torch.arange(pieces, device=q.device)[:, None, None]  # of a later piece the exponent has no bound
    right = k[:, :, None] * (middle - total[:, :, None]).masked_fill(~seen, -torch.inf).exp()
    grown, end = total.exp(), total[:, :, -1:]
    return left, right, beta * v, beta * k * grown, k * (end - total).exp(), q * grown, end.exp().transpose(2, 3)


def kda_chunked(q, k, v, total, beta, chunk: int = CHUNK, between=None):
    """The same, from sums of log decays inside each chunk, `total` [b, t, d]. t must be whole chunks; `chunk` is whole sub-chunks of 16.

    between: where `factors` and `unit_lower_inverse` are taken from, fused.py for one; the ones below without it.
    """
    b, t, d = q.shape
    if t % chunk or chunk % SUB:
        raise ValueError(f"{t} tokens in chunks of {chunk}: wanted whole chunks, each of whole pieces of {SUB}")
    q, k, v, total = (x.reshape(b, t // chunk, chunk, d) for x in (q, k, v, total))
    beta = beta.reshape(b, t // chunk, chunk, 1)
    left, right, values, keys, write, read, kept = (between.factors if between else factors)(q, k, v, total, beta)
    scores_qk, scores_kk = (x.reshape(b, t // chunk, chunk, chunk) for x in Product.apply(left, right).split(SUB, 3))
    solved = (between.unit_lower_inverse if between else unit_lower_inverse)(scores_kk.tril(-1) * beta)
    updates, states = Scan.apply(solved @ values, solved @ keys, write, kept)
    return (read @ states + scores_qk.tril() @ updates).reshape(b, t, d)


class Product(torch.autograd.Function):
    """a [.., m, d] and b [.., n, d] -> a b^T, with gradients that lie as a and b do."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b.mT

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad @ b, grad.mT @ a


def unit_lower_inverse(a):
    return UnitLowerInverse.apply(a)


class UnitLowerInverse(torch.autograd.Function):
    """(I + A)^-1 of strictly lower triangular A [.., C, C], C a power of two: blocks of twice the size from two inverses each.

    As exact as forward substitution, and all of it matrix products; a series of powers of A would lose everything to cancellation.
    """

    @staticmethod
    def forward(ctx, a):
        c, size = a.shape[-1], 1
        inverse = torch.eye(c, dtype=a.dtype, device=a.device).expand_as(a).contiguous()
        while size < c:
            lower, done = (x.view(*a.shape[:-2], c // (2 * size), 2 * size, c // (2 * size), 2 * size).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
                           for x in (a, inverse))   # the blocks on the diagonal, [.., blocks, 2 size, 2 size]
            done[..., size:, :size] = -(done[..., size:, size:] @ lower[..., size:, :size] @ done[..., :size, :size])
            size *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grad @ inverse.mT).tril(-1)


class Scan(torch.autograd.Function):
    """U_n = values_n - keys_n S_n, S_(n+1) = kept_n S_n + write_n^T U_n, S_0 = 0: the only part that goes chunk after chunk.

    values, keys, write [b, n, C, d], kept [b, n, d, 1] -> U [b, n, C, d] and S before each chunk [b, n, d, d].
    """

    @staticmethod
    def forward(ctx, values, keys, write, kept):
        b, n, c, d = values.shape
        updates, states = values.clone(), values.new_empty(b, n, d, d)
        states[:, 0] = 0
        for i in range(n):
            if i:   # in place: a product with an addend elsewhere would copy it first
                updates[:, i].baddbmm_(keys[:, i], states[:, i], alpha=-1)
            if i + 1 < n:
                torch.mul(kept[:, i], states[:, i], out=states[:, i + 1])
                states[:, i + 1].baddbmm_(write[:, i].mT, updates[:, i])
        ctx.save_for_backward(keys, write, kept, updates, states)
        return updates, states

    @staticmethod
    def backward(ctx, grad_updates, grad_states):
        keys, write, kept, updates, states = ctx.saved_tensors
        total_updates, later = grad_updates.clone(memory_format=torch.contiguous_format), torch.empty_like(states)   # later[:, i]: of the state behind chunk i
        n = updates.shape[1]
        later[:, n - 1] = 0
        for i in reversed(range(n)):
            if i + 1 < n:
                total_updates[:, i].baddbmm_(write[:, i], later[:, i])
            if i:
                torch.addcmul(grad_states[:, i], kept[:, i], later[:, i], out=later[:, i - 1])
                later[:, i - 1].baddbmm_(keys[:, i].mT, total_updates[:, i], alpha=-1)
        return total_updates, -(total_updates @ states.mT), updates @ later.mT, (states * later).sum(3, keepdim=True)
