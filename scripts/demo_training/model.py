"""Kimi K3's text model in PyTorch over whole rows of text, named and laid out as k3cuda/weights.py has it. Formulas: docs/model.md.

Parameters are F32; products run in `compute`, BF16 on a GPU. What the reference keeps in F32 is F32 here too.
"""
import math

import torch
import torch.nn.functional as F
from torch import nn

from k3cuda.config import MLA_NORM_EPS, K3Config
from k3cuda.weights import all_weights

from . import plain
from .experts import Places
from .kda import SUB, kda_chunked
from .quantize import Rounded

ROOM = 2.0   # rows an expert has room for, of the mean


class K3(nn.Module):
    """weight(layer, name): one parameter in its logical shape; experts of a layer lie in one array, the expert first.

    Args:
        between: what is between the products, plain.py or, on a GPU, fused.py.

    Attributes:
        loads, left_out: of the last forward pass, choices of each expert [MoE layers, experts] and choices without a place.
        taps: with `tap_layers` set, layer -> (prefix sum behind it, mixture that the next one reads), each [b, t, hidden].
    """

    def __init__(self, cfg: K3Config, seed: int = 0, compute=torch.float32, room: float = ROOM, between=plain):
        super().__init__()
        self.cfg, self.compute, self.room, self.tap_layers, self.taps = cfg, compute, room, (), {}
        dims, generator = cfg.dims(), torch.Generator().manual_seed(seed)
        self.between, self.names = between, {}
        for layer, w in all_weights(cfg):
            if w.mxfp4 == "scale":
                continue
            shape = [cfg.num_experts] * w.per_expert + [dims[n] for n in w.shape]
            if w.mxfp4:
                shape[-1] *= 2
            name = w.name if layer is None else f"{layer}_{w.name}"
            self.names[layer, w.name] = name
            value = initial(w.name, shape, generator)
            if w.name == "e_score_correction_bias":
                self.register_buffer(name, value)
            else:
                # The first layer has nothing to mix: these two are in the files, but nothing reads them.
                self.register_parameter(name, nn.Parameter(value, requires_grad=not (layer == 0 and w.name.startswith("self_attention_res"))))
        for i in range(cfg.num_hidden_layers):
            if cfg.is_kda(i):   # the decay at first is of the bias alone, however steep a head's gate is
                self.weight(i, "kda_dt_bias").data.view(len(self.weight(i, "kda_a_log")), -1).div_(self.weight(i, "kda_a_log").data.exp()[:, None])
        self.moe_layers = [i for i in range(cfg.num_hidden_layers) if not cfg.is_dense(i)]

    def weight(self, layer, name):
        return getattr(self, self.names[layer, name])

    def linear(self, x, layer, name):
        return F.linear(x.to(self.compute), self.weight(layer, name).to(self.compute))

    def forward(self, ids, real):
        """ids int64 [b, t], real bool [b, t] (padding stands behind a row's text) -> what the head multiplies, [b, t, hidden]."""
        cfg, self.loads, self.left_out, self.taps = self.cfg, [], 0, {}
        hidden, blocks = F.embedding(ids, self.weight(None, "embed_tokens")).to(self.compute), []
        for i in range(cfg.num_hidden_layers):
            x = self._mix(hidden, blocks, i, "self_attention_res")
            if i - 1 in self.tap_layers:
                self.taps[i - 1] = hidden, x
            if cfg.opens_res_block(i):
                blocks = [*blocks, hidden]
                hidden = 0
            x = self.between.rms_norm(x, self.weight(i, "input_layernorm"), cfg.rms_norm_eps)
            hidden = hidden + (self._kda(x, i) if cfg.is_kda(i) else self._mla(x, i))
            x = self.between.rms_norm(self._mix(hidden, blocks, i, "mlp_res"), self.weight(i, "post_attention_layernorm"), cfg.rms_norm_eps)
            hidden = hidden + (self._glu(x, i, "dense") if cfg.is_dense(i) else self._moe(x, i, real))
        x = self._mix(hidden, blocks, None, "output_attn_res")
        if cfg.num_hidden_layers - 1 in self.tap_layers:
            self.taps[cfg.num_hidden_layers - 1] = hidden, x
        return self.between.rms_norm(x, self.weight(None, "final_norm"), cfg.rms_norm_eps)

    def logits(self, x):
        return self.linear(x, None, "lm_head").float()

    def _mix(self, hidden, blocks, layer, which):
        if not blocks:
            return hidden
        vector = self.weight(layer, f"{which}_norm") * self.weight(layer, f"{which}_proj")
        return self.between.mix([*blocks, hidden], vector, self.cfg.rms_norm_eps)

    def _kda(self, x, i):
        cfg, lin, (b, t, _), between = self.cfg, self.cfg.linear_attn_config, x.shape, self.between
        if pad := -t % SUB:   # behind all text: nothing reads it
            x = F.pad(x, (0, 0, 0, pad))
        chunk = next(c for c in (64, 32, SUB) if (t + pad) % c == 0)
        q, k, v = (between.conv_heads(self.linear(x, i, f"kda_{which}_proj"), self.weight(i, f"kda_{which}_conv"), lin.num_heads, scale)
                   for which, scale in (("q", lin.head_dim**-0.5), ("k", 1.0), ("v", None)))
        f = self.linear(self.linear(x, i, "kda_f_a_proj"), i, "kda_f_b_proj")
        total = between.decay_sums(f, self.weight(i, "kda_dt_bias"), self.weight(i, "kda_a_log").exp(), chunk, lin.gate_lower_bound)
        beta = torch.sigmoid(self.linear(x, i, "kda_b_proj").float()).transpose(1, 2).flatten(0, 1)
        o = kda_chunked(q, k, v, total, beta, chunk, between)
        o = between.gated_norm(o, self.weight(i, "kda_o_norm"), self.linear(x, i, "kda_g_proj"), lin.num_heads, cfg.rms_norm_eps)[:, :t]
        return self.linear(o, i, "o_proj")

    def _mla(self, x, i):
        cfg, (b, t, _) = self.cfg, x.shape
        nope, rope, value, heads = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim, cfg.num_attention_heads
        latent = self.between.rms_norm(self.linear(x, i, "mla_q_a_proj"), self.weight(i, "mla_q_a_layernorm"), MLA_NORM_EPS)
        q = self.linear(latent, i, "mla_q_b_proj").view(b, t, heads, nope + rope).transpose(1, 2)
        latent, shared = self.linear(x, i, "mla_kv_a_proj").split([cfg.kv_lora_rank, rope], -1)
        latent = self.between.rms_norm(latent, self.weight(i, "mla_kv_a_layernorm"), MLA_NORM_EPS)
        k, v = self.linear(latent, i, "mla_kv_b_proj").view(b, t, heads, nope + value).transpose(1, 2).split([nope, value], -1)
        k = torch.cat([k, shared[:, None].expand(b, heads, t, rope)], -1)
        o = F.scaled_dot_product_attention(q, k, F.pad(v, (0, nope + rope - value)), is_causal=True)[..., :value]
        o = o.transpose(1, 2).reshape(b, t, -1) * torch.sigmoid(self.linear(x, i, "mla_g_proj").float())
        return self.linear(o, i, "o_proj")

    def _glu(self, x, i, which):
        return self.linear(self._situ(self.linear(x, i, f"{which}_gate_proj"), self.linear(x, i, f"{which}_up_proj")), i, f"{which}_down_proj")

    def _situ(self, gate, up):
        return self.between.situ(gate, up, self.cfg.activation_situ_beta, self.cfg.activation_situ_linear_beta)

    def _moe(self, x, i, real):
        cfg, k, n = self.cfg, self.cfg.num_experts_per_token, x.shape[0] * x.shape[1]
        rows = x.reshape(n, -1)
        scores = torch.sigmoid(F.linear(rows.float(), self.weight(i, "router")))
        ids = (scores.detach() + self.weight(i, "e_score_correction_bias")).topk(k).indices
        chosen = scores.gather(1, ids)
        chosen = chosen / (chosen.sum(1, keepdim=True) + 1e-20) * cfg.routed_scaling_factor
        room = min(n, math.ceil(n * k / cfg.num_experts * self.room / 16) * 16)
        places = Places(ids, real.reshape(-1), cfg.num_experts, room)
        self.loads.append(places.load)
        self.left_out = self.left_out + places.left_out
        z = self.between.spread(self.linear(rows, i, "latent_down"), places).view(cfg.num_experts, room, -1)
        w1, w2, w3 = (Rounded.apply(self.weight(i, f"expert_{w}")).to(self.compute).mT for w in ("w1", "w2", "w3"))
        y = self._situ(z @ w1, z @ w3) @ w2
        y = self.between.collect(y.flatten(0, 1), places, chosen)
        routed = self.linear(self.between.rms_norm(y, self.weight(i, "routed_expert_norm"), cfg.rms_norm_eps), i, "latent_up")
        return (routed + self._glu(rows, i, "shared")).view_as(x)


def initial(name: str, shape, generator) -> torch.Tensor:
    """Norms at 1, mixes over depth even, decays of one token spread from 0.01 to 0.999, all else by its inputs."""
    if "norm" in name:
        return torch.ones(shape)
    if name == "e_score_correction_bias" or name.endswith("res_proj"):
        return torch.zeros(shape)
    if name == "kda_a_log":
        return torch.linspace(-0.7, 0.7, shape[0] + 1)[1:]   # heads differ from the start: else nobody would learn what it is for
    unit = torch.rand(shape, generator=generator) * 2 - 1
    if name == "kda_dt_bias":
        return unit * 4.5 - 4.5
    if name.endswith("conv"):
        return unit / 2
    if name == "embed_tokens":
        return unit * 3**0.5
    bound = (3 / shape[-1]) ** 0.5
    return unit * (bound / 4 if name in ("lm_head", "router") else bound / 2 if name.endswith(("o_proj", "down_proj", "latent_up")) else bound)
