"""A DSpark draft in PyTorch: blocks of every family at many anchors of a row at once. Formulas and names: docs/dspark.md, k3cuda/draft_weights.py.

Shapes: b rows of text, t tokens, a anchors of a row, w rows of a block. An anchor at position p sees the context of the positions before it.
"""
import functools

import torch
import torch.nn.functional as F
from torch import nn

from k3cuda.draft_config import MLA, PREFIX, DraftConfig
from k3cuda.draft_weights import all_draft_weights, is_shared
from k3cuda.runtime.draft_checkpoint import DraftTensors
from k3cuda.weights import stored_shapes

from .export import as_stored
from .model import initial
from .plain import rms_norm

# The context's projections are the layers' own, which the table lists a second time.
_OF_LAYERS = {"context_kv_proj": "mla_kv_a_proj", "context_k_proj": "gqa_k_proj", "context_v_proj": "gqa_v_proj"}


class Draft(nn.Module):
    """Shares its target's embedding and head. `top` is its config.json."""

    def __init__(self, top: dict, target, seed: int):
        super().__init__()
        self.top, self.target, self.cfg = top, (target,), DraftConfig.from_json(top, target.cfg)   # in a tuple: no part of this module
        if any(self.cfg.causal) or any(self.cfg.windows) or self.cfg.fc_norm or self.cfg.first_row or self.cfg.use_output_gate or self.cfg.hidden_act != "silu":
            raise ValueError("a draft that sees its block both ways, all of the context, raw taps and no gate is what is trained here")
        dims, generator = self.cfg.dims(), torch.Generator().manual_seed(seed)
        for layer, w in all_draft_weights(self.cfg):
            if w.name in _OF_LAYERS or is_shared(w, self.cfg):
                continue
            shape = [dims[n] for n in w.shape]
            value = torch.zeros(shape) if w.name in ("markov_w2", "confidence_bias") else initial(w.name, shape, generator)
            self.register_parameter(self._name(layer, w.name), nn.Parameter(value))

    @staticmethod
    def _name(layer, name):
        return name if layer is None else f"{layer}_{name}"

    def weight(self, layer, name):
        return getattr(self, self._name(layer, name))

    def linear(self, x, layer, name):
        compute = self.target[0].compute
        return F.linear(x.to(compute), self.weight(layer, name).to(compute))

    def norm(self, x, layer, name):
        return rms_norm(x, self.weight(layer, name), self.cfg.rms_norm_eps)

    def forward(self, taps, ids, anchors):
        """taps: layer -> the target's two streams; ids int64 [b, t]; anchors int64 [b, a], places in the rows -> [b, a, w, hidden], normed for the head."""
        cfg, (b, a), w = self.cfg, anchors.shape, self.cfg.block_size
        stream = 0 if cfg.tap_stream == PREFIX else 1
        context = self.linear(torch.cat([taps[i][stream] for i in cfg.target_layer_ids], -1), None, "context_proj")
        context = self.norm(context, None, "context_norm")
        t = ids.shape[1]
        block = torch.full((b, a, w), cfg.mask_token_id, device=ids.device)
        block[:, :, 0] = ids.gather(1, anchors)
        x = F.embedding(block, self.target[0].weight(None, "embed_tokens").detach()).to(self.target[0].compute).view(b, a * w, -1)
        places = (anchors[:, :, None] + torch.arange(w, device=ids.device)).view(b, a * w)
        all_places = torch.cat([torch.arange(t, device=ids.device).expand(b, t), places], 1)
        own = torch.arange(a * w, device=ids.device) // w
        sees = torch.cat([torch.arange(t, device=ids.device) < anchors.repeat_interleave(w, 1)[..., None], (own[:, None] == own).expand(b, -1, -1)], -1)
        for i in range(cfg.num_hidden_layers):
            n = self.norm(x, i, "input_layernorm")
            attend = self._mla if cfg.family == MLA else self._gqa
            x = x + self.linear(attend(n, torch.cat([context, n], 1), places, all_places, sees[:, None], i), i, "o_proj")
            n = self.norm(x, i, "post_attention_layernorm")
            x = x + self.linear(F.silu(self.linear(n, i, "dense_gate_proj")) * self.linear(n, i, "dense_up_proj"), i, "dense_down_proj")
        return self.norm(x, None, "final_norm").view(b, a, w, -1)

    def _mla(self, n, every, places, all_places, sees, i):
        cfg, (b, rows, _) = self.cfg, n.shape
        heads, nope, rope, value = cfg.num_attention_heads, cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
        q = self.linear(self.norm(self.linear(n, i, "mla_q_a_proj"), i, "mla_q_a_layernorm"), i, "mla_q_b_proj").view(b, rows, heads, nope + rope)
        q = torch.cat([q[..., :nope], turned(q[..., nope:], places, cfg.rope)], -1).transpose(1, 2)
        latent, shared = self.linear(every, i, "mla_kv_a_proj").split([cfg.kv_lora_rank, rope], -1)
        both = self.linear(self.norm(latent, i, "mla_kv_a_layernorm"), i, "mla_kv_b_proj").view(b, -1, heads, nope + value).transpose(1, 2)
        shared = turned(shared[:, :, None], all_places, cfg.rope).transpose(1, 2).expand(-1, heads, -1, -1)
        o = F.scaled_dot_product_attention(q, torch.cat([both[..., :nope], shared], -1), both[..., nope:], sees, scale=cfg.score_scale)
        return o.transpose(1, 2).reshape(b, rows, -1)

    def _gqa(self, n, every, places, all_places, sees, i):
        cfg, (b, rows, _) = self.cfg, n.shape
        q = self.norm(self.linear(n, i, "gqa_q_proj").view(b, rows, -1, cfg.head_dim), i, "gqa_q_norm")
        k = self.norm(self.linear(every, i, "gqa_k_proj").view(b, every.shape[1], -1, cfg.head_dim), i, "gqa_k_norm")
        v = self.linear(every, i, "gqa_v_proj").view(k.shape)
        q, k, v = turned(q, places, cfg.rope).transpose(1, 2), turned(k, all_places, cfg.rope).transpose(1, 2), v.transpose(1, 2)
        share = cfg.num_attention_heads // cfg.num_key_value_heads
        o = F.scaled_dot_product_attention(q, k.repeat_interleave(share, 1), v.repeat_interleave(share, 1), sees, scale=cfg.score_scale)
        return o.transpose(1, 2).reshape(b, rows, -1)

    def logits(self, hidden, before):
        """hidden [.., hidden] of block rows and the tokens before what they propose [..] -> float32 [.., vocabulary]."""
        bias = F.linear(F.embedding(before, self.weight(None, "markov_w1")), self.weight(None, "markov_w2"))
        return self.target[0].logits(hidden) + bias

    def sure(self, hidden, before):
        """Logits of how likely a proposal is to stand, [..]."""
        x = torch.cat([hidden.float(), F.embedding(before, self.weight(None, "markov_w1"))], -1)
        return (F.linear(x, self.weight(None, "confidence_proj")) + self.weight(None, "confidence_bias"))[..., 0]


@functools.cache
def frequencies(rope, device) -> torch.Tensor:
    return torch.tensor(rope.inverse_frequencies(), dtype=torch.float64, device=device)


def turned(x, places, rope):
    """x [b, n, heads, dim] turned to places [b, n]; as k3cuda/reference/rope.py."""
    if rope is None:
        return x
    angles = places.double()[:, :, None, None] * frequencies(rope, x.device)
    cos, sin, y = (rope.magnitude * angles.cos()).float(), (rope.magnitude * angles.sin()).float(), x.float()
    first, second = (y[..., 0::2], y[..., 1::2]) if rope.interleaved else y.chunk(2, -1)
    pair = first * cos - second * sin, first * sin + second * cos
    return (torch.stack(pair, -1).flatten(-2) if rope.interleaved else torch.cat(pair, -1)).to(x.dtype)


class TrainedDraft(DraftTensors):
    """A trained draft as tensors in the form that they are stored in."""

    def __init__(self, draft: Draft):
        self.draft, self.top, self.cfg = draft, draft.top, draft.cfg

    def stored(self, weight, layer, expert):
        value = self.draft.weight(expert, _OF_LAYERS[weight.name]) if weight.name in _OF_LAYERS else self.draft.weight(layer, weight.name)
        return as_stored(value, weight.dtype, stored_shapes(weight, self._dims)[0])
