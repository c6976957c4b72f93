"""Rotary embedding of a draft: YaRN, or plain; pairs side by side (MLA) or half a head apart (GQA). No arithmetic on tensors here.

Sources: `modeling_rope_utils` of transformers for the frequencies and the factor on cos and sin, DeepSeek's `yarn_get_mscale` for the
factor on MLA's scores.
"""
import math
from dataclasses import dataclass

from .config import checked_value

_KNOWN = {"rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale",
          "mscale_all_dim", "attention_factor"}


@dataclass(frozen=True)
class Rope:
    """How `dim` values of a query or key turn with their position.

    Attributes:
        interleaved: pairs are (2j, 2j + 1); else (j, j + dim / 2).
        factor, original, beta_fast, beta_slow: of YaRN, which is on at every length; factor 1 is plain rotary embedding.
        magnitude: on cos and sin, of queries and keys alike.
        score_factor: on the scores.
    """

    dim: int
    theta: float
    interleaved: bool
    factor: float = 1.0
    original: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    magnitude: float = 1.0
    score_factor: float = 1.0

    def inverse_frequencies(self) -> tuple[float, ...]:
        """Radians a position, for each of dim / 2 pairs."""
        plain = [self.theta ** (-2 * j / self.dim) for j in range(self.dim // 2)]
        if self.factor == 1:
            return tuple(plain)
        low, high = self.ramp_edges()
        out = []
        for j, frequency in enumerate(plain):
            ramp = min(max((j - low) / (high - low), 0.0), 1.0)
            out.append(frequency * (1 - ramp) + frequency / self.factor * ramp)
        return tuple(out)

    def ramp_edges(self) -> tuple[float, float]:
        """Pairs between which YaRN goes from the plain frequency to the stretched one."""
        def edge(turns: float) -> float:
            return self.dim * math.log(self.original / (2 * math.pi * turns)) / (2 * math.log(self.theta))

        low, high = max(math.floor(edge(self.beta_fast)), 0), min(math.ceil(edge(self.beta_slow)), self.dim - 1)
        return low, high if high != low else high + 0.001


def read_rope(keys, dim: int | None, is_mla: bool) -> Rope | None:
    """The rotary embedding that `keys` (draft_keys.py) describe; None where something is wrong, which `keys.problems` then say."""
    problems, before = keys.problems, len(keys.problems)
    values, older = keys.take("rope_parameters", dict, {}), keys.take("rope_scaling", dict, {})
    theta = keys.take("rope_theta", float, None)
    if values and older and values != older:
        problems.append(f"rope_parameters: found {str(values)[:80]}, but rope_scaling: {str(older)[:80]}")
    values = values or older or {}
    if unknown := sorted(key for key in set(values) - _KNOWN if values[key] is not None):
        problems.append(f"rope_parameters.{unknown[0][:60]}: unknown key with value {str(values[unknown[0]])[:60]!r} could change the model")

    def number(name: str, default, kind=float):
        return checked_value(values[name], kind, f"rope_parameters.{name}", problems) if values.get(name) is not None else default

    inner = number("rope_theta", None)
    if inner is not None and theta is not None and inner != theta:
        problems.append(f"rope_theta: {theta} at the top, {inner} in rope_parameters")
    theta = theta if inner is None else inner
    if theta is None or theta <= 1:
        problems.append(f"rope_theta: found {theta}, wanted a number above 1")
    kinds = {values[name] for name in ("rope_type", "type") if values.get(name) is not None} or {"default"}
    if kinds not in ({"default"}, {"yarn"}):
        problems.append(f"rope_parameters.rope_type: found {', '.join(sorted(map(str, kinds)))[:60]!r}, wanted 'yarn' or 'default'")
    if dim is None or dim % 2:
        problems.append(f"rotary embedding of {dim} values, wanted an even number")
    if kinds != {"yarn"} or len(problems) > before:
        return None if len(problems) > before else Rope(dim, theta, is_mla)
    factor, original = number("factor", None), number("original_max_position_embeddings", None, int)
    if not factor or factor < 1 or not original:
        problems.append(f"rope_parameters: found factor {factor} and original_max_position_embeddings {original}, wanted both, the factor at least 1")
    fast, slow = number("beta_fast", 32.0), number("beta_slow", 1.0)
    mscale, all_dim, given = number("mscale", None), number("mscale_all_dim", None), number("attention_factor", None)
    if len(problems) > before:
        return None
    if is_mla:
        magnitude = given or _mscale(factor, 1.0 if mscale is None else mscale) / _mscale(factor, all_dim or 0.0)
    else:
        magnitude = given or (_mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor, 1.0))
    return Rope(dim, theta, is_mla, factor, original, fast, slow, magnitude, _mscale(factor, all_dim or 0.0) ** 2 if is_mla else 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0
