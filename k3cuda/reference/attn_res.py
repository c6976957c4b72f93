"""AttnRes: a softmax over depth that mixes closed snapshots with the open prefix sum.

A mix first adds to the prefix sum what the half layer before it left, and ends with the norm of the half layer it feeds.
Source: `_apply_attn_res` of the released modeling code.
"""
import numpy as np

from .numerics import inverse_rms, rms_norm, tree_sum


def mix(m, hidden, blocks, norm, proj):
    """Scores use the normed sources, the mixture the raw ones. hidden [n, H], blocks [j, n, H] in order of creation -> [n, H]."""
    if len(blocks) == 0:
        return hidden
    sources = np.concatenate([blocks, hidden[None]])
    scores = np.vecdot(sources, norm * proj)[..., None] * inverse_rms(sources, m.cfg.rms_norm_eps)
    weights = np.exp(scores - scores.max(0))
    weights /= weights.sum(0)
    return m.num.round((weights * sources).sum(0))


def attn_mix(m, w, b, op):
    """hidden += ffn_out, both [n, H]; attn_in [n, H] = RMSNorm of the mix; a snapshot layer then moves hidden to a block."""
    r = m.num.round
    b.hidden[:] = r(b.hidden + b.ffn_out)
    x = mix(m, b.hidden, b.res_blocks[:op.num_blocks], w.self_attention_res_norm, w.self_attention_res_proj)
    b.attn_in[:] = rms_norm(x, w.input_layernorm, m.cfg.rms_norm_eps, m.num)
    if m.cfg.opens_res_block(op.layer):
        b.res_blocks[op.num_blocks] = b.hidden
        b.hidden[:] = 0


def ffn_mix(m, w, b, op):
    """hidden [n, H] += sum over ranks of attn_parts [ranks, n, H]; ffn_in [n, H] = RMSNorm of the mix."""
    r = m.num.round
    b.hidden[:] = r(b.hidden + r(tree_sum(b.attn_parts)))
    x = mix(m, b.hidden, b.res_blocks[:op.num_blocks], w.mlp_res_norm, w.mlp_res_proj)
    b.ffn_in[:] = rms_norm(x, w.post_attention_layernorm, m.cfg.rms_norm_eps, m.num)


def output_mix(m, w, b, op):
    """head_in [rows wanted, H] = RMSNorm of the mix after the last layer; hidden is not changed."""
    rows = b.logit_rows[b.logit_rows >= 0]
    hidden = m.num.round(b.hidden[rows] + b.ffn_out[rows])
    x = mix(m, hidden, b.res_blocks[:op.num_blocks, rows], w.output_attn_res_norm, w.output_attn_res_proj)
    b.head_in[:] = 0
    b.head_in[:len(rows)] = rms_norm(x, w.final_norm, m.cfg.rms_norm_eps, m.num)
