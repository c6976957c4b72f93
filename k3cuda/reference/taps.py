"""What a draft model reads of the target: two tensors that public code calls the output of a layer (docs/dspark.md says which is whose)."""
from .attn_res import mix


def tap_prefix(m, w, b, op):
    """taps[:, tap] [n, H]: the prefix sum behind the layer, since the last snapshot."""
    b.taps[:, op.kind_index] = m.num.round(b.hidden + b.ffn_out)


def tap_mix(m, w, b, op):
    """taps[:, tap] [n, H]: the mixture that the next layer reads, before its norm."""
    _mixed(m, b, op, w.self_attention_res_norm, w.self_attention_res_proj)


def tap_output_mix(m, w, b, op):
    """taps[:, tap] [n, H]: the mixture behind the last layer, before the final norm."""
    _mixed(m, b, op, w.output_attn_res_norm, w.output_attn_res_proj)


def _mixed(m, b, op, norm, proj):
    b.taps[:, op.kind_index] = mix(m, m.num.round(b.hidden + b.ffn_out), b.res_blocks[:op.num_blocks], norm, proj)
