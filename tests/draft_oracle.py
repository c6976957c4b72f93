"""The equations of a draft once more, in float64 and as far from the reference as they can be written: keys and values expanded for every
head, one long list of keys a row, no cache, no ranks, no blocks of rows."""
import math

import numpy as np


class Oracle:
    """Reads `source.stored` by checkpoint name; `target_embed` and `target_head` where the draft has none of its own."""

    def __init__(self, source, target_embed=None, target_head=None):
        from k3cuda.draft_weights import expected_draft_tensors

        self.cfg = source.cfg
        self.w = {name: source.stored(*where).astype(np.float64) for name, where in expected_draft_tensors(source.cfg).items()}
        self.embed = np.float64(self.w["embed_tokens.weight"] if target_embed is None else target_embed)
        self.head = np.float64(self.w["lm_head.weight"] if target_head is None else target_head)

    def name(self, mla, gqa):
        return self.w[mla if self.cfg.family == "mla" else gqa]

    def rms(self, x, weight):
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + self.cfg.rms_norm_eps) * weight

    def turn(self, x, position):
        """One vector [.., d] at one position, pair by pair, as complex numbers."""
        rope = self.cfg.rope
        if rope is None:
            return x
        d, theta = rope.dim, rope.theta
        out = np.array(x, np.float64)
        for j in range(d // 2):
            frequency = theta ** (-2 * j / d)
            if rope.factor > 1:
                edge = [d * math.log(rope.original / (2 * math.pi * turns)) / (2 * math.log(theta)) for turns in (rope.beta_fast, rope.beta_slow)]
                low, high = max(math.floor(edge[0]), 0), min(math.ceil(edge[1]), d - 1)
                share = min(max((j - low) / (high - low), 0), 1)
                frequency *= 1 - share + share / rope.factor
            pair = (2 * j, 2 * j + 1) if self.cfg.family == "mla" else (j, j + d // 2)
            z = (x[..., pair[0]] + 1j * x[..., pair[1]]) * np.exp(1j * position * frequency)
            out[..., pair[0]], out[..., pair[1]] = z.real, z.imag
        factor = 0.1 * math.log(rope.factor) + 1 if self.cfg.family == "gqa" else 1
        return out * factor

    def scale(self):
        cfg = self.cfg
        if cfg.family == "gqa":
            return cfg.head_dim ** -0.5
        m = 0.1 * math.log(cfg.rope.factor) + 1 if cfg.rope else 1
        return (cfg.qk_nope_head_dim + cfg.qk_rope_head_dim) ** -0.5 * m * m

    def fused(self, taps):
        """Context vectors of taps [n, T, H]."""
        if self.cfg.fc_norm:
            taps = np.stack([self.rms(taps[:, t], self.w[f"fc_norm.{t}.weight"]) for t in range(taps.shape[1])], 1)
        c = np.float64(taps.reshape(len(taps), -1)) @ self.name("context_proj.weight", "fc.weight").T
        return self.rms(c, self.name("context_norm.weight", "hidden_norm.weight"))

    def keys_and_values(self, layer, x, position):
        """Of one vector: key [heads, d] and value [heads, v]."""
        cfg, w = self.cfg, lambda name: self.w[f"layers.{layer}.self_attn.{name}.weight"]
        if cfg.family == "gqa":
            k = self.turn(self.rms((w("k_proj") @ x).reshape(cfg.num_key_value_heads, -1), w("k_norm")), position)
            v = (w("v_proj") @ x).reshape(cfg.num_key_value_heads, -1)
            repeat = cfg.num_attention_heads // cfg.num_key_value_heads
            return np.repeat(k, repeat, 0), np.repeat(v, repeat, 0)
        kv = w("kv_a_proj_with_mqa") @ x
        latent, shared = self.rms(kv[:cfg.kv_lora_rank], w("kv_a_layernorm")), self.turn(kv[cfg.kv_lora_rank:], position)
        both = (w("kv_b_proj") @ latent).reshape(cfg.num_attention_heads, -1)
        k, v = both[:, :cfg.qk_nope_head_dim], both[:, cfg.qk_nope_head_dim:]
        return np.concatenate([k, np.tile(shared, (len(k), 1))], 1), v

    def query(self, layer, x, position):
        cfg, w = self.cfg, lambda name: self.w[f"layers.{layer}.self_attn.{name}.weight"]
        if cfg.family == "gqa":
            return self.turn(self.rms((w("q_proj") @ x).reshape(cfg.num_attention_heads, -1), w("q_norm")), position)
        q = (w("q_b_proj") @ self.rms(w("q_a_proj") @ x, w("q_a_layernorm"))).reshape(cfg.num_attention_heads, -1)
        return np.concatenate([q[:, :cfg.qk_nope_head_dim], self.turn(q[:, cfg.qk_nope_head_dim:], position)], 1)

    def mlp(self, layer, x):
        gate, up = (self.w[f"layers.{layer}.mlp.{n}_proj.weight"] @ x for n in ("gate", "up"))
        sigmoid = 1 / (1 + np.exp(-gate))
        if self.cfg.hidden_act == "situ":
            b, c = self.cfg.activation_situ_beta, self.cfg.activation_situ_linear_beta
            inner = b * np.tanh(gate / b) * sigmoid * (c * np.tanh(up / c))
        else:
            inner = gate * sigmoid * up
        return self.w[f"layers.{layer}.mlp.down_proj.weight"] @ inner

    def hidden(self, taps, anchor, rows):
        """Normed hidden states [rows, H] of a block behind the context of `taps` [N, T, H]."""
        cfg, n = self.cfg, len(taps)
        context = self.fused(taps)
        x = [self.embed[i].copy() for i in [anchor] + [cfg.mask_token_id] * (rows - 1)]
        for layer in range(cfg.num_hidden_layers):
            w = lambda name: self.w[f"layers.{layer}.{name}.weight"]
            normed = [self.rms(v, w("input_layernorm")) for v in x]
            pool = [(p, *self.keys_and_values(layer, context[p], p)) for p in range(n)]
            pool += [(n + i, *self.keys_and_values(layer, v, n + i)) for i, v in enumerate(normed)]
            for i, v in enumerate(normed):
                window = cfg.windows[layer]
                sees = [e for e in pool if (e[0] < n and (window is None or e[0] >= n - window)) or (e[0] >= n and (not cfg.causal[layer] or e[0] <= n + i))]
                q = self.query(layer, v, n + i)
                scores = np.array([(q * k).sum(-1) for _, k, _ in sees]) * self.scale()
                p = np.exp(scores - scores.max(0))
                p /= p.sum(0)
                o = sum(share[:, None] * value for share, (_, _, value) in zip(p, sees)).reshape(-1)
                if cfg.use_output_gate:
                    o = o / (1 + np.exp(-w("self_attn.g_proj") @ v))
                x[i] = x[i] + w("self_attn.o_proj") @ o
            x = [v + self.mlp(layer, self.rms(v, w("post_attention_layernorm"))) for v in x]
        return np.array([self.rms(v, self.name("final_norm.weight", "norm.weight")) for v in x])

    def greedy(self, taps, anchor, rows, count):
        """(tokens, logits [count, V], confidences or None) without any randomness."""
        h, previous, tokens, logits, sure = self.hidden(taps, anchor, rows)[self.cfg.first_row:], anchor, [], [], []
        for i in range(count):
            embedding = self.w["markov_head.markov_w1.weight"][previous]
            logits.append(self.head @ h[i] + self.w["markov_head.markov_w2.weight"] @ embedding)
            if self.cfg.confidence_head:
                seen = np.concatenate([h[i], embedding]) if self.cfg.confidence_with_markov else h[i]
                sure.append(1 / (1 + np.exp(-(self.w["confidence_head.proj.weight"][0] @ seen + self.w["confidence_head.proj.bias"][0]))))
            previous = int(np.argmax(logits[-1]))
            tokens.append(previous)
        return tokens, np.array(logits), sure or None
