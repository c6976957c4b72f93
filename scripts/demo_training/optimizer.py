"""Muon for matrices inside the model, AdamW for what else there is, and the router's bias.

Muon (Jordan et al. 2024): momentum, made orthogonal by five Newton-Schulz steps. Matrices of one shape go together, experts too.
"""
import torch

_NS = (3.4445, -4.7750, 2.0315)
_ADAM_NAMES = ("embed_tokens", "lm_head", "router", "markov_w1", "markov_w2", "kda_b_proj", "confidence_proj")


def orthogonal(m: torch.Tensor) -> torch.Tensor:
    """[n, rows, columns]: near the closest matrices with all singular values 1."""
    x = m.bfloat16() if m.is_cuda else m
    wide = x.shape[1] <= x.shape[2]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = _NS[0] * x + (_NS[1] * a + _NS[2] * a @ a) @ x
    return (x if wide else x.mT).to(m.dtype)


class Optimizer:
    """step(rate): one update with learning rates times `rate`, from the gradients that are there, which it clears.

    Args:
        named: (name, parameter) pairs; a name's last word decides.
    """

    def __init__(self, named, muon_rate: float = 0.02, adam_rate: float = 3e-3, momentum: float = 0.95, decay: float = 0.02):
        self.momentum, self.decay, self.rates, self.count = momentum, decay, (muon_rate, adam_rate), 0
        named = [(n, p) for n, p in named if p.requires_grad]
        adam = [(n, p) for n, p in named if p.dim() < 2 or n.endswith(_ADAM_NAMES + ("conv",))]
        self.adam = [p for _, p in adam]
        groups = {}
        for n, p in named:
            if not any(p is a for a in self.adam):
                groups.setdefault(tuple(p.shape[-2:]), []).append(p)
        self.groups = list(groups.values())
        self.state = {"momentum": [[torch.zeros_like(p) for p in group] for group in self.groups],
                      "first": [torch.zeros_like(p) for p in self.adam], "second": [torch.zeros_like(p) for p in self.adam]}

    def state_dict(self):
        return self.state | {"count": self.count}

    def load_state_dict(self, found):
        self.count = found["count"]
        self.state = {name: found[name] for name in self.state}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        self.count += 1
        muon, adam = (r * rate for r in self.rates)
        for group, momenta in zip(self.groups, self.state["momentum"]):
            grads = [p.grad for p in group]
            torch._foreach_lerp_(momenta, grads, 1 - self.momentum)
            looked = torch._foreach_lerp(grads, momenta, self.momentum)
            flat = [x.reshape(-1, *x.shape[-2:]) for x in looked]
            done = orthogonal(torch.cat(flat)).split([len(x) for x in flat])
            scale = max(1, group[0].shape[-2] / group[0].shape[-1]) ** 0.5
            torch._foreach_mul_(group, 1 - muon * self.decay)
            torch._foreach_add_(group, [d.view_as(p) for d, p in zip(done, group)], alpha=-muon * scale)
        grads, first, second = [p.grad for p in self.adam], self.state["first"], self.state["second"]
        b1, b2 = 0.9, 0.98
        torch._foreach_lerp_(first, grads, 1 - b1)
        torch._foreach_mul_(second, b2)
        torch._foreach_addcmul_(second, grads, grads, 1 - b2)
        size = adam * (1 - b2**self.count) ** 0.5 / (1 - b1**self.count)
        below = torch._foreach_sqrt(second)
        torch._foreach_add_(below, 1e-10)
        torch._foreach_addcdiv_(self.adam, first, below, -size)
        for p in [*self.adam, *(p for group in self.groups for p in group)]:
            p.grad = None


@torch.no_grad()
def balance(model, loads: list[torch.Tensor], rate: float) -> None:
    """Moves every expert's selection bias up where it was chosen less often than the mean, else down, as the release's router was trained."""
    for layer, load in zip(model.moe_layers, loads):
        model.weight(layer, "e_score_correction_bias").add_(torch.sign(load.mean() - load), alpha=rate)
