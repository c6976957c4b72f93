"""Kimi Delta Attention: conv, bounded decay, the delta rule over a [key, value] state per head, gated norm, commit.

Shapes here: h heads of this rank, d = head size, c = h d channels. One step never advances the state: several rows of one
sequence run on a copy, and `kda_commit` replays the accepted ones in the same arithmetic.
"""
import numpy as np

from ..config import L2NORM_EPS
from .numerics import F32, inverse_rms, linear, sigmoid, silu


def kda_in(m, w, b, op):
    x, r = b.attn_in, m.num.round
    b.kda_f_a_part[:] = r(linear(x, w.kda_f_a_proj))
    b.kda_beta[:] = sigmoid(r(linear(x, w.kda_b_proj)))
    for i, proj in enumerate((w.kda_q_proj, w.kda_k_proj, w.kda_v_proj)):
        b.kda_qkv[:, i] = r(linear(x, proj))
    b.kda_out_gate[:] = r(linear(x, w.kda_g_proj))


def kda_gate(m, w, b, op):
    """log decay = lower_bound sigmoid(exp(A_log) (f + dt_bias)): bounded by a sigmoid, not by clamping a softplus."""
    z = m.num.round(linear(b.kda_f_a, w.kda_f_b_proj)) + w.kda_dt_bias
    z = z.reshape(b.kda_decay.shape)
    b.kda_decay[:] = F32(m.cfg.linear_attn_config.gate_lower_bound) * sigmoid(np.exp(w.kda_a_log)[:, None] * z)


def kda_conv(m, w, b, op):
    """Causal depthwise conv over the stored window and the step's own rows, newest input on the last tap; then SiLU."""
    taps = (w.kda_q_conv, w.kda_k_conv, w.kda_v_conv)
    width = taps[0].shape[1]
    for slot, rows in m.sequences(b.row_slot):
        inputs = np.concatenate([b.conv_state[slot], b.kda_qkv[rows].swapaxes(0, 1)], axis=1)  # [3, history + n, c]
        n, out = rows.stop - rows.start, []
        for u, tap in zip(inputs, taps):
            y = u[:n] * tap[:, 0]
            for j in range(1, width):
                y = y + u[j:j + n] * tap[:, j]
            out.append(m.num.round(silu(y)).reshape(n, *b.kda_q.shape[1:]))
        q, k, v = out
        b.kda_q[rows] = _l2norm(q) * F32(q.shape[-1] ** -0.5)
        b.kda_k[rows] = _l2norm(k)
        b.kda_v[rows] = v


def _l2norm(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + F32(L2NORM_EPS))


def _advance(state, k, v, decay, beta):
    """One token: the state [h, d, d] decays along its key axis, predicts v from k, and is corrected. In place."""
    state *= np.exp(decay)[:, :, None]
    delta = beta[:, None] * (v - np.matmul(k[:, None, :], state)[:, 0])
    state += k[:, :, None] * delta[:, None, :]


def kda_recurrence(m, w, b, op):
    for slot, rows in m.sequences(b.row_slot):
        state = b.kda_state[slot].copy()
        for r in range(rows.start, rows.stop):
            _advance(state, b.kda_k[r], b.kda_v[r], b.kda_decay[r], b.kda_beta[r])
            b.kda_o[r] = np.matmul(b.kda_q[r][:, None, :], state)[:, 0]


def kda_out(m, w, b, op):
    """Norm over each head first, output gate second."""
    o = b.kda_o * inverse_rms(b.kda_o, m.cfg.rms_norm_eps) * w.kda_o_norm
    b.mixer_out[:] = m.num.round(o.reshape(b.mixer_out.shape) * sigmoid(b.kda_out_gate))


def kda_commit(m, w, b, op):
    for slot, rows in m.sequences(b.row_slot):
        accepted = [r for r in range(rows.start, rows.stop) if b.row_accepted[r]]
        for r in accepted:
            _advance(b.kda_state[slot], b.kda_k[r], b.kda_v[r], b.kda_decay[r], b.kda_beta[r])
        inputs = np.concatenate([b.conv_state[slot], b.kda_qkv[accepted].swapaxes(0, 1)], axis=1)
        b.conv_state[slot] = inputs[:, len(accepted):]
