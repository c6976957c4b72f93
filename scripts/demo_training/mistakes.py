"""Mistakes that people made with this model, each as a change to the source of the reference, put in one at a time.

A mistake is (module of k3cuda.reference, what stands there, what stands there instead). Each piece of source must be found exactly once.
"""
import importlib
import inspect
from contextlib import contextmanager

from k3cuda import reference

_MIX = "x = mix(m, b.hidden, b.res_blocks[:op.num_blocks], w.self_attention_res_norm, w.self_attention_res_proj)\n"
_GATED = ("o = o * inverse_rms(o, m.cfg.rms_norm_eps) * w.kda_o_norm\n"
          "    b.mixer_out[:] = m.num.round(o.reshape(b.mixer_out.shape) * sigmoid(b.kda_out_gate))")
_SCALE = "m.cfg.qk_nope_head_dim + m.cfg.qk_rope_head_dim) ** -0.5"
_ADVANCE = "_advance(state, b.kda_k[r], b.kda_v[r], b.kda_decay[r], b.kda_beta[r])\n            o[r] = np.matmul(q[r][:, None, :], state)[:, 0]"

MISTAKES = {
    "MLA low-rank norms with eps 1e-5 instead of 1e-6": [("mla", "MLA_NORM_EPS, m.num)\n    latent, key", "1e-5, m.num)\n    latent, key"),
                                                         ("mla", "w.mla_kv_a_layernorm, MLA_NORM_EPS", "w.mla_kv_a_layernorm, 1e-5")],
    "nibbles swapped (high first)": [("mxfp4", "E2M1[np.arange(256) & 15], E2M1[np.arange(256) >> 4]", "E2M1[np.arange(256) >> 4], E2M1[np.arange(256) & 15]")],
    "w1/w3 swapped": [("moe", "linear(x, w.expert_w1[expert])), m.num.round(linear(x, w.expert_w3[expert]))",
                       "linear(x, w.expert_w3[expert])), m.num.round(linear(x, w.expert_w1[expert]))")],
    "E8M0 bias off by one": [("mxfp4", "E8M0_BIAS = 127", "E8M0_BIAS = 128")],
    "gate: clamp(-exp(A)softplus, -5) instead of -5*sigmoid": [
        ("kda", "return F32(m.cfg.linear_attn_config.gate_lower_bound) * sigmoid(per_channel * z)",
         "return np.maximum(-per_channel * np.logaddexp(0, z), F32(m.cfg.linear_attn_config.gate_lower_bound))")],
    "dt_bias added after the exp(A) multiply": [("kda", "w.kda_f_b_proj)) + w.kda_dt_bias", "w.kda_f_b_proj))"),
                                                ("kda", "sigmoid(per_channel * z)", "sigmoid(per_channel * z + w.kda_dt_bias)")],
    "delta uses undecayed state": [("kda", "    state *= np.exp(decay)[:, :, None]\n    delta = beta[:, None] * (v - np.matmul(k[:, None, :], state)[:, 0])\n",
                                    "    delta = beta[:, None] * (v - np.matmul(k[:, None, :], state)[:, 0])\n    state *= np.exp(decay)[:, :, None]\n")],
    "output read before the write": [("kda", _ADVANCE, "\n            ".join(reversed(_ADVANCE.split("\n            "))))],
    "decay on value axis": [("kda", "np.exp(decay)[:, :, None]", "np.exp(decay)[:, None, :]")],
    "no 1/sqrt(d) on q": [("kda", "_l2norm(q) * F32(q.shape[-1] ** -0.5)", "_l2norm(q)")],
    "q/k l2norm missing": [("kda", "return x / np.sqrt(np.vecdot(x, x)[..., None] + F32(L2NORM_EPS))", "return x")],
    "conv taps reversed": [("kda", "np.stack([w.kda_q_conv, w.kda_k_conv, w.kda_v_conv])", "np.stack([w.kda_q_conv, w.kda_k_conv, w.kda_v_conv])[..., ::-1]")],
    "no SiLU after conv": [("kda", "m.num.round(silu(y))", "m.num.round(y)")],
    "output gate before the norm": [("kda", _GATED, "o = o * sigmoid(b.kda_out_gate).reshape(o.shape)\n"
                                     "    b.mixer_out[:] = (o * inverse_rms(o, m.cfg.rms_norm_eps) * w.kda_o_norm).reshape(b.mixer_out.shape)")],
    "output gate SiLU instead of sigmoid": [("kda", "sigmoid(b.kda_out_gate)", "silu(b.kda_out_gate)")],
    "MLA scale uses nope dim only": [("mla", _SCALE, "m.cfg.qk_nope_head_dim) ** -0.5")],
    "MLA 64 extra dims dropped": [("mla", "(queries @ seen.T) * F32(",
                                   "(queries[:, :m.cfg.kv_lora_rank] @ seen[:, :m.cfg.kv_lora_rank].T) * F32(")],
    "MLA gate missing": [("mla", "gate = sigmoid(b.mla_out_gate)", "gate = np.ones_like(b.mla_out_gate)")],
    "MLA kv_a norm missing": [("mla", "    latent = rms_norm(latent, w.mla_kv_a_layernorm, MLA_NORM_EPS, m.num)\n", "")],
    "router: weights from biased scores": [("moe", "np.take_along_axis(scores, ids", "np.take_along_axis(scores + w.e_score_correction_bias, ids")],
    "router: no bias in selection": [("moe", "-(scores + w.e_score_correction_bias)", "-scores")],
    "router: no renormalisation": [("moe", "chosen / (chosen.sum(-1, keepdims=True) + F32(1e-20))", "chosen")],
    "shared experts missing": [("moe", "m.num.round(routed + m.num.round(tree_sum(b.shared_parts)))", "m.num.round(routed)")],
    "routed_expert_norm missing": [("moe", "rms_norm(total, w.routed_expert_norm, m.cfg.rms_norm_eps, m.num)", "total")],
    "SiTU: up branch not squashed": [("numerics", "(c * np.tanh(up / c))", "up")],
    "SiTU: beta 1": [("numerics", "F32(cfg.activation_situ_beta)", "F32(1)")],
    "AttnRes mixes normalised values": [("attn_res", "(weights * sources)", "(weights * sources * inverse_rms(sources, m.cfg.rms_norm_eps))")],
    "AttnRes norm weight dropped": [("attn_res", "norm * proj", "proj")],
    "output AttnRes missing": [("attn_res", "x = mix(m, hidden, b.res_blocks[:op.num_blocks, rows], w.output_attn_res_norm, w.output_attn_res_proj)", "x = hidden")],
    "ps not reset at a snapshot layer": [("attn_res", "        b.hidden[:] = 0\n", "")],
    "snapshot pushed before the pre-attention mix": [
        ("attn_res", _MIX, "at = op.num_blocks\n    if m.cfg.opens_res_block(op.layer):\n        b.res_blocks[at] = b.hidden\n        at += 1\n"
         "    x = mix(m, b.hidden, b.res_blocks[:at], w.self_attention_res_norm, w.self_attention_res_proj)\n")],
}

# The first is a matter of the smallest latents, the second is divided out by the norm of the routed sum. All others move the golden model's logits.
_NAMED = {"MLA low-rank norms with eps 1e-5 instead of 1e-6": "test_low_rank_norms_have_an_eps_of_their_own", "router: no renormalisation": "test_routing"}


def caught_by(name: str) -> str:
    """The test of tests/test_reference.py that sees a mistake whatever a model has learned."""
    return _NAMED.get(name, "test_logits_and_layers")


@contextmanager
def injected(name: str):
    """The reference with one mistake in it; as it was afterwards. Models that are opened inside run it."""
    modules = {short: importlib.import_module(f"{reference.__name__}.{short}") for short in sorted({m for m, _, _ in MISTAKES[name]})}
    sources = {short: inspect.getsource(module) for short, module in modules.items()}
    changed = dict(sources)
    for short, old, new in MISTAKES[name]:
        if changed[short].count(old) != 1:
            raise ValueError(f"{name}: found {changed[short].count(old)} times in {short}.py, wanted once: {old!r}")
        changed[short] = changed[short].replace(old, new)
    _execute(modules, changed)
    try:
        yield
    finally:
        _execute(modules, sources)


def _execute(modules: dict, sources: dict[str, str]) -> None:
    """Runs sources again in their modules, and gives what is new to every module that had taken the old by name."""
    everyone = [importlib.import_module(f"{reference.__name__}.{f.__module__.rpartition('.')[2]}") for f in reference.FUNCTIONS.values()]
    for short, module in modules.items():
        before = dict(vars(module))
        exec(compile(sources[short], module.__file__, "exec"), vars(module))
        for other in {id(m): m for m in [*everyone, importlib.import_module("k3cuda.runtime.numpy_backend")]}.values():
            for key, value in list(vars(other).items()):
                if callable(value) and other is not module and value is before.get(key) and vars(module)[key] is not value:
                    setattr(other, key, vars(module)[key])
        for key, function in reference.FUNCTIONS.items():
            if function is before.get(key):
                reference.FUNCTIONS[key] = vars(module)[key]
