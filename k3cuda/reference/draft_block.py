"""What both families of drafts share: norms around the two halves of a layer, the plain gated MLP, and the end of the block."""
from .numerics import linear, rms_norm, silu, tree_sum


def draft_attn_in(m, w, b, op):
    """hidden += ffn_out, both [n, H]; attn_in [n, H] = RMSNorm of it."""
    b.hidden[:] = m.num.round(b.hidden + b.ffn_out)
    b.attn_in[:] = rms_norm(b.hidden, w.input_layernorm, m.cfg.rms_norm_eps, m.num)


def draft_ffn_in(m, w, b, op):
    """hidden [n, H] += sum over ranks of attn_parts [ranks, n, H]; ffn_in [n, H] = RMSNorm of it."""
    b.hidden[:] = m.num.round(b.hidden + m.num.round(tree_sum(b.attn_parts)))
    b.ffn_in[:] = rms_norm(b.hidden, w.post_attention_layernorm, m.cfg.rms_norm_eps, m.num)


def silu_up(m, w, b, op):
    """dense_act [n, inner] of this rank: SiLU of the gate times up."""
    r = m.num.round
    b.dense_act[:] = r(silu(r(linear(b.ffn_in, w.dense_gate_proj))) * r(linear(b.ffn_in, w.dense_up_proj)))


def draft_out(m, w, b, op):
    """head_in [rows wanted, H] = RMSNorm behind the last layer; markov_in [seqs, r] = W1's rows of the anchors, the first rows of their sequences."""
    wanted = b.logit_rows
    b.head_in[:] = rms_norm(m.num.round(b.hidden[wanted] + b.ffn_out[wanted]), w.final_norm, m.cfg.rms_norm_eps, m.num)
    b.markov_in[:] = w.markov_w1[[b.token_ids[rows.start] for _, rows in m.sequences(b.row_slot)]]
