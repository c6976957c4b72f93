"""The released model cut short: what of it fits one GPU at few ranks."""
from dataclasses import replace

from k3cuda.config import RELEASED_FOLDER, K3Config


def first_layers(count: int) -> K3Config:
    """Its first `count` layers, full size."""
    cfg = K3Config.from_json(RELEASED_FOLDER)
    linear = replace(cfg.linear_attn_config, **{name: tuple(i for i in getattr(cfg.linear_attn_config, name) if i <= count)
                                                for name in ("full_attn_layers", "kda_layers")})
    return replace(cfg, num_hidden_layers=count, linear_attn_config=linear)
