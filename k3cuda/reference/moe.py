"""LatentMoE: a router on the full-width input, routed experts in the latent, a shared expert beside them.

Experts are visited once each for all rows that chose them, in rising id, so a row adds its experts in the same order alone
and in a batch. Shapes here: Z = latent width, k = experts of a row. Source: `KimiSparseMoeBlock` and `KimiMoEGate` of the release.
"""
import numpy as np

from .dense import glu
from .numerics import F32, linear, rms_norm, sigmoid, situ, tree_sum


def moe_in(m, w, b, op):
    """Of ffn_in [n, H]: router logits [n, experts] in F32, the latent [n, Z] of the routed experts, the shared expert up to its SiTU."""
    b.router_logits_part[:] = linear(b.ffn_in, w.router)  # F32: a flipped choice of expert is not a rounding error
    b.moe_latent_part[:] = m.num.round(linear(b.ffn_in, w.latent_down))
    b.shared_act[:] = glu(m, b.ffn_in, w.shared_gate_proj, w.shared_up_proj)


def route(m, w, b, op):
    """The k largest of score + bias, lower id first on ties, weights are the unbiased scores, normalised; and shared_partial [n, H] over
    this rank's inputs."""
    scores = sigmoid(b.router_logits)
    order = np.argsort(-(scores + w.e_score_correction_bias), axis=-1, kind="stable")
    ids = order[:, :m.cfg.num_experts_per_token]
    chosen = np.take_along_axis(scores, ids, axis=-1)
    b.expert_ids[:] = ids
    b.expert_weights[:] = chosen / (chosen.sum(-1, keepdims=True) + F32(1e-20)) * F32(m.cfg.routed_scaling_factor)
    b.shared_partial[:] = linear(b.shared_act, w.shared_down_proj)


def _chosen(b):
    """Yields (expert, rows that chose it, its place among each row's choices), experts rising; padding rows choose none."""
    users = {}
    for row, ids in enumerate(b.expert_ids[b.row_slot >= 0].tolist()):
        for place, expert in enumerate(ids):
            rows, places = users.setdefault(expert, ([], []))
            rows.append(row)
            places.append(place)
    for expert in sorted(users):
        yield expert, *users[expert]


def expert_up(m, w, b, op):
    """expert_act [n, k, inner]: SiTU of w1 and w3 of the latent, for every chosen expert in the order of expert_ids."""
    for expert, rows, places in _chosen(b):
        x = b.moe_latent[rows]
        gate, up = m.num.round(linear(x, w.expert_w1[expert])), m.num.round(linear(x, w.expert_w3[expert]))
        b.expert_act[rows, places] = m.num.round(situ(gate, up, m.cfg))


def moe_down(m, w, b, op):
    """routed_partial [n, Z]: weighted sum of the chosen experts' w2, over this rank's inputs."""
    b.routed_partial[:] = 0
    for expert, rows, places in _chosen(b):
        y = m.num.round(linear(b.expert_act[rows, places], w.expert_w2[expert]))
        b.routed_partial[rows] += b.expert_weights[rows, places][:, None] * y


def routed_norm(m, w, b, op):
    """routed_normed [n, Z]: RMSNorm of the complete sum, over all experts and ranks."""
    total = m.num.round(tree_sum(b.routed_parts))
    b.routed_normed[:] = rms_norm(total, w.routed_expert_norm, m.cfg.rms_norm_eps, m.num)


def latent_up(m, w, b, op):
    """moe_out_part [n, this rank's outputs]: up-projected routed sum plus the shared expert, which has no gate and no scale."""
    routed = m.num.round(linear(b.routed_normed, w.latent_up))
    b.moe_out_part[:] = m.num.round(routed + m.num.round(tree_sum(b.shared_parts)))

