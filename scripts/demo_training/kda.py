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


def kda_chunked(q, k, v, decay, beta, chunk: int = CHUNK):
    """The same. t must be whole chunks; `chunk` is whole sub-chunks of 16."""
    b, t, d = q.shape
    if t % chunk or chunk % SUB:
        raise ValueError(f"{t} tokens in chunks of {chunk}: wanted whole chunks, each of whole pieces of {SUB}")
    q, k, v, decay = (x.reshape(b, t // chunk, chunk, d) for x in (q, k, v, decay))
    beta = beta.reshape(b, t // chunk, chunk, 1)
    total = decay.cumsum(2)
    scores_qk, scores_kk = _scores(q, k, total)
    solved = UnitLowerInverse.apply(scores_kk * beta)
    grown, end = total.exp(), total[:, :, -1:]
    values, keys = solved @ (beta * v), solved @ (beta * k * grown)
    updates, states = Scan.apply(values, keys, k * (end - total).exp(), end.exp().transpose(2, 3))
    return ((q * grown) @ states + scores_qk @ updates).reshape(b, t, d)


def _scores(q, k, total):
    """[b, n, C, C] each: sum_d of q_i k_j e^(G_i - G_j) for j <= i, and of k_i k_j for j < i."""
    b, n, c, d = q.shape
    pieces = c // SUB
    rows = total.view(b, n, pieces, SUB, d)
    middle = rows[:, :, :, SUB // 2:SUB // 2 + 1]
    up = (rows - middle).exp()
    left = torch.cat([q.view_as(rows) * up, k.view_as(rows) * up], 3)                    # [b, n, pieces, 2 SUB, d]
    piece = torch.arange(c, device=q.device) // SUB
    seen = piece[None, :, None] <= torch.arange(pieces, device=q.device)[:, None, None]  # of a later piece the exponent has no bound
    right = k[:, :, None] * (middle - total[:, :, None]).masked_fill(~seen, -torch.inf).exp()
    qk, kk = (left @ right.transpose(3, 4)).split(SUB, 3)
    return qk.reshape(b, n, c, c).tril(), kk.reshape(b, n, c, c).tril(-1)


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
        updates, states = torch.empty_like(values), values.new_zeros(b, n, d, d)
        for i in range(n):
            updates[:, i] = torch.baddbmm(values[:, i], keys[:, i], states[:, i], alpha=-1)
            if i + 1 < n:
                states[:, i + 1] = torch.baddbmm(kept[:, i] * states[:, i], write[:, i].mT, updates[:, i])
        ctx.save_for_backward(keys, write, kept, updates, states)
        return updates, states

    @staticmethod
    def backward(ctx, grad_updates, grad_states):
        keys, write, kept, updates, states = ctx.saved_tensors
        total_updates, later = torch.empty_like(updates), torch.zeros_like(states)   # later[:, i]: of the state behind chunk i
        n = updates.shape[1]
        for i in reversed(range(n)):
            total_updates[:, i] = torch.baddbmm(grad_updates[:, i], write[:, i], later[:, i])
            if i:
                later[:, i - 1] = torch.baddbmm(grad_states[:, i] + kept[:, i] * later[:, i], keys[:, i].mT, total_updates[:, i], alpha=-1)
        return total_updates, -(total_updates @ states.mT), updates @ later.mT, (states * later).sum(3, keepdim=True)
