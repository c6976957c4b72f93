"""Kimi Delta Attention: conv, bounded decay, the delta rule over a [key, value] state per head, gated norm, commit.

Shapes here: h heads of this rank, d = head size, c = h d channels. One step never advances the state: several rows of one
sequence run on a copy, and `kda_commit` replays the accepted ones in the same arithmetic.
Source: the released modeling code, and `fla/ops/kda/naive.py` for the recurrence.
"""
import numpy as np

from ..config import L2NORM_EPS
from .numerics import F32, inverse_rms, linear, sigmoid, silu


def kda_in(m, w, b, op):
    """Projections of attn_in [n, H]: q, k, v before the conv [n, 3, c], output gate [n, c], beta [n, h] in (0, 1), the low-rank decay."""
    x, r = b.attn_in, m.num.round
    b.kda_f_a_part[:] = r(linear(x, w.kda_f_a_proj))
    b.kda_beta[:] = sigmoid(r(linear(x, w.kda_b_proj)))
    for i, proj in enumerate((w.kda_q_proj, w.kda_k_proj, w.kda_v_proj)):
        b.kda_qkv[:, i] = r(linear(x, proj))
    b.kda_out_gate[:] = r(linear(x, w.kda_g_proj))


def kda_mix(m, w, b, op):
    """mixer_out [n, c] of every row, its sequence in order from the committed state; the records that commit will replay."""
    b.kda_decay[:] = _log_decay(m, w, b.kda_f_a).reshape(b.kda_decay.shape)
    q = np.zeros_like(b.kda_k)
    o = np.zeros_like(b.kda_k)
    for slot, rows in m.sequences(b.row_slot):
        q[rows], b.kda_k[rows], b.kda_v[rows] = _conv(m, w, b, slot, rows)
        state = b.kda_state[slot].copy()
        for r in range(rows.start, rows.stop):
            _advance(state, b.kda_k[r], b.kda_v[r], b.kda_decay[r], b.kda_beta[r])
            o[r] = np.matmul(q[r][:, None, :], state)[:, 0]
    # Norm over each head first, output gate second.
    o = o * inverse_rms(o, m.cfg.rms_norm_eps) * w.kda_o_norm
    b.mixer_out[:] = m.num.round(o.reshape(b.mixer_out.shape) * sigmoid(b.kda_out_gate))


def _log_decay(m, w, f_a):
    """lower_bound sigmoid(exp(A_log) (f + dt_bias)), [n, c]: bounded by a sigmoid, not by clamping a softplus."""
    z = m.num.round(linear(f_a, w.kda_f_b_proj)) + w.kda_dt_bias
    per_channel = np.repeat(np.exp(w.kda_a_log), len(w.kda_dt_bias) // len(w.kda_a_log))
    return F32(m.cfg.linear_attn_config.gate_lower_bound) * sigmoid(per_channel * z)


def _conv(m, w, b, slot, rows):
    """Causal depthwise conv over the stored window and the step's own rows, newest input on the last tap; then SiLU.

    Returns q, k, v [n, h, d]; q and k with L2 norm d^-1/2 and 1.
    """
    inputs = np.concatenate([b.conv_state[slot], b.kda_qkv[rows].swapaxes(0, 1)], axis=1)  # [3, history + n, c]
    taps, n = np.stack([w.kda_q_conv, w.kda_k_conv, w.kda_v_conv]), rows.stop - rows.start
    y = inputs[:, :n] * taps[:, None, :, 0]
    for j in range(1, taps.shape[2]):
        y = y + inputs[:, j:j + n] * taps[:, None, :, j]
    q, k, v = m.num.round(silu(y)).reshape(3, n, *b.kda_k.shape[1:])
    return _l2norm(q) * F32(q.shape[-1] ** -0.5), _l2norm(k), v


def _l2norm(x):
    return x / np.sqrt(np.vecdot(x, x)[..., None] + F32(L2NORM_EPS))


def _advance(state, k, v, decay, beta):
    """One token: the state [h, d, d] decays along its key axis, predicts v from k, and is corrected. In place."""
    state *= np.exp(decay)[:, :, None]
    delta = beta[:, None] * (v - np.matmul(k[:, None, :], state)[:, 0])
    state += k[:, :, None] * delta[:, None, :]


def kda_commit(m, w, b, op):
    """Replays the accepted rows over kda_state [slots, h, d, d], and moves conv_state [slots, 3, history, c] on over them."""
    for slot, rows in m.sequences(b.row_slot):
        accepted = [r for r in range(rows.start, rows.stop) if b.row_accepted[r]]
        for r in accepted:
            _advance(b.kda_state[slot], b.kda_k[r], b.kda_v[r], b.kda_decay[r], b.kda_beta[r])
        inputs = np.concatenate([b.conv_state[slot], b.kda_qkv[accepted].swapaxes(0, 1)], axis=1)
        b.conv_state[slot] = inputs[:, len(accepted):]
