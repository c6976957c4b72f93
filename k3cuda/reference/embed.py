"""Token ids to what the first layer adds to an empty prefix sum."""
from .numerics import tree_sum


def embed(m, w, b, op):
    """embed_partial [n, H]: the rows of token_ids [n] whose ids this rank holds, zero elsewhere."""
    first = m.rank * len(w.embed_tokens)
    ids = b.token_ids - first
    mine = (ids >= 0) & (ids < len(w.embed_tokens))
    b.embed_partial[:] = 0
    b.embed_partial[mine] = w.embed_tokens[ids[mine]]


def embed_sum(m, w, b, op):
    """ffn_out [n, H]: sum over ranks of embed_parts [ranks, n, H], one of which is not zero. hidden [n, H] starts at zero."""
    b.hidden[:] = 0
    b.ffn_out[:] = tree_sum(b.embed_parts)
