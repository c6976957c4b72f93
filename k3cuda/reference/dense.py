"""The dense MLP of the first layers: down SiTU-GLU(gate x, up x). Source: `SituAndMul` of the release."""
from .numerics import linear, situ, tree_sum


def glu(m, x, gate, up):
    """SiTU-GLU of two projections of x, in F32 with one rounding at the end."""
    return m.num.round(situ(m.num.round(linear(x, gate)), m.num.round(linear(x, up)), m.cfg))


def dense_up(m, w, b, op):
    """dense_act [n, inner] of this rank."""
    b.dense_act[:] = glu(m, b.ffn_in, w.dense_gate_proj, w.dense_up_proj)


def dense_down(m, w, b, op):
    """dense_partial [n, H] over this rank's inputs."""
    b.dense_partial[:] = linear(b.dense_act, w.dense_down_proj)


def dense_sum(m, w, b, op):
    """ffn_out [n, H]: sum over ranks."""
    b.ffn_out[:] = m.num.round(tree_sum(b.dense_parts))
