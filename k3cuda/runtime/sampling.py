"""What a request may ask of the sampler, checked once, and what a backend is told about one draw. No arithmetic here.

The arithmetic is reference/sample.py; docs/numerics.md says what every backend must reproduce.
"""
import functools
import logging
import numbers
import operator
from dataclasses import dataclass, fields, replace
from typing import Sequence

from ..errors import ConfigError, UsageError

log = logging.getLogger("k3cuda")

# Streams of the counter-based generator: draws that must be independent at one position use different ones.
STREAM_ACCEPT, STREAM_SAMPLE, STREAM_DRAFT = 0, 1, 2

GREEDY_BELOW = 1e-5    # temperatures under it overflow the division that they ask for
MAX_STOPS = 16
MAX_LOGPROBS = 20
SEED_END = 1 << 64
DRAWN_SEED_BITS = 53   # a seed that we draw and report survives JSON readers that hold numbers as F64

# Where neither the request nor generation_config.json says anything.
DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends. Checked on creation.

    Args:
        temperature: 0 to 2. Exactly 0 is greedy: argmax, lowest id on ties. Between 0 and 1e-5 is greedy too, with a warning.
        top_p: (0, 1]; 0 is taken as greedy, with a warning. 1 is off.
        top_k: tokens kept, and all that tie with the last of them; 0 and -1 are off.
        min_p: 0 to 1, as a fraction of the largest probability; 0 is off.
        seed: 0 to 2^64 - 1. The same seed, prompt and parameters give the same tokens alone or in any batch. None: drawn at random
            and reported. Negative seeds are refused: other programs take -1 for "random".
        max_tokens: at least 1; None: the rest of the context.
        stop: at most 16 strings, none empty, that end the answer and are not shown; one string alone is taken as a list of one.
        stop_token_ids: ids that end the answer; their text is not shown.
        ignore_eos: go on after the model's own end token.
        presence_penalty, frequency_penalty: -2 to 2, taken from the logits of tokens already generated, once or per occurrence.
        repetition_penalty: (0, 2]; divides positive and multiplies negative logits of tokens in the prompt or the answer.
        logprobs: 0 to 20: report the log-probability of each token and of so many most likely ones. None: no report.
        stop_in_reasoning: look for stop strings in the reasoning too.
        num_drafts: tokens that a draft model proposes a step, at most what the model was opened with; 0: none. None: as it was opened.

    Raises:
        UsageError: a value of the wrong type or out of range; it names the field, what was found and what is wanted.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    stop_in_reasoning: bool = False
    num_drafts: int | None = None

    def __post_init__(self):
        for field in fields(self):
            checked = _CHECKS[field.name](field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, checked)

    @property
    def greedy(self) -> bool:
        """True where the largest logit wins and no random number is used."""
        return (self.temperature is not None and self.temperature < GREEDY_BELOW) or self.top_p == 0

    @property
    def is_resolved(self) -> bool:
        return None not in (self.temperature, self.top_p, self.top_k, self.min_p)

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    def resolved(self, generation_config: dict) -> "SamplingParams":
        """Fills what the request left open, and writes each meaning in one way (greedy: temperature 0, top_p 1; top_k off: 0).

        Args:
            generation_config: what the checkpoint's generation_config.json holds; {} where there is none. Only temperature, top_p,
                top_k and min_p are read.
        Returns:
            the same parameters with no None but in seed, max_tokens, logprobs and num_drafts.
        Raises:
            ConfigError: the generation config holds a value that no request could.
        """
        open_names = [name for name in DEFAULTS if getattr(self, name) is None]
        filled = replace(self, **{name: _default(name, generation_config) for name in open_names})
        if filled.greedy:
            if filled.temperature != 0:
                _warn_once("top_p 0 is taken as greedy" if filled.top_p == 0 else
                           f"temperature {filled.temperature:g} is below {GREEDY_BELOW:g} and taken as 0 (greedy)")
            filled = replace(filled, temperature=0.0, top_p=1.0)
        return replace(filled, top_k=max(filled.top_k, 0))


@dataclass(frozen=True)
class Draw:
    """One token to draw. A pure function of these fields and the row of logits: no batch, slot, rank or order is in it.

    Attributes:
        params: resolved.
        seed: the request's, 0 to 2^64 - 1.
        position: absolute position of the token to be drawn, 0-based.
        stream: STREAM_ACCEPT, STREAM_SAMPLE or STREAM_DRAFT.
        prompt_ids, output_ids: tokens before `position`, read by the penalties only; a row behind drafts counts them as output.
        after_sampled: one more token of output stands before `position`: what the slot's last draw gave, and nobody has read yet.
    """

    params: SamplingParams
    seed: int
    position: int
    stream: int = STREAM_SAMPLE
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    after_sampled: bool = False

    def following(self, token: int) -> "Draw":
        """The same draw once that token is known."""
        return replace(self, output_ids=[*self.output_ids, token], after_sampled=False)


@dataclass(frozen=True)
class Drawn:
    """One token drawn.

    Attributes:
        token_id: None where the row of logits was not finite.
        logprob: natural log of the token's probability under the raw logits, before penalties and temperature; None unless asked for.
        top_logprobs: (id, logprob) of the most likely tokens, by falling logprob, then rising id; None unless asked for.
        from_draft: whether a draft model proposed it.
    """

    token_id: int | None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None
    from_draft: bool = False


@functools.cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


def _default(name: str, generation_config: dict):
    value = generation_config.get(name)
    if value is None:
        return DEFAULTS[name]
    try:
        return _CHECKS[name](name, value)
    except UsageError as e:
        raise ConfigError(f"generation_config.json: {e}", "correct the file or give the parameter in the request") from e


def _refuse(name: str, found, wanted: str):
    raise UsageError(f"{name}: found {found!r:.60}, wanted {wanted}")


def _integer(name: str, value, wanted: str) -> int:
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return operator.index(value)
    _refuse(name, value, wanted)


def _is_number(value) -> bool:
    # NumPy's floats register as Real. NaN and infinity fail the comparison with the range.
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _float(low: float, high: float, *, low_open: bool = False, optional: bool = False):
    wanted = f"a number {'above' if low_open else 'from'} {low:g} {'up ' if low_open else ''}to {high:g}"

    def check(name: str, value):
        if optional and value is None:
            return None
        if not _is_number(value) or not low <= value <= high or (low_open and value == low):
            _refuse(name, value, wanted)
        return float(value)
    return check


def _int(low: int, high: int | None, wanted: str):
    def check(name: str, value):
        if value is None:
            return None
        number = _integer(name, value, wanted)
        if number < low or (high is not None and number > high):
            _refuse(name, value, wanted)
        return number
    return check


def _bool(name: str, value) -> bool:
    if not isinstance(value, bool):
        _refuse(name, value, "True or False")
    return value


def _stops(name: str, value) -> tuple[str, ...]:
    value = () if value is None else (value,) if isinstance(value, str) else value
    wanted = f"at most {MAX_STOPS} strings, none of them empty"
    if not isinstance(value, (list, tuple)) or not all(isinstance(s, str) and s for s in value) or len(value) > MAX_STOPS:
        _refuse(name, value, wanted)
    return tuple(value)


def _ids(name: str, value) -> tuple[int, ...]:
    wanted = "a list of token ids"
    if isinstance(value, (str, bytes, dict)) or not hasattr(value, "__iter__"):
        if value is not None:
            _refuse(name, value, wanted)
        return ()
    ids = tuple(dict.fromkeys(_integer(name, i, wanted) for i in value))   # each once: every token drawn is looked for in them
    if any(i < 0 for i in ids):
        _refuse(name, value, wanted)
    return ids


_CHECKS = {
    "temperature": _float(0, 2, optional=True), "top_p": _float(0, 1, optional=True), "min_p": _float(0, 1, optional=True),
    "top_k": _int(-1, None, "an integer from -1 up (0 and -1: off)"),
    "seed": _int(0, SEED_END - 1, "an integer from 0 to 2^64 - 1, or none for a random one"),
    "max_tokens": _int(1, None, "an integer of at least 1"),
    "num_drafts": _int(0, None, "an integer from 0 up, or none"),
    "logprobs": _int(0, MAX_LOGPROBS, f"an integer from 0 to {MAX_LOGPROBS}"),
    "presence_penalty": _float(-2, 2), "frequency_penalty": _float(-2, 2), "repetition_penalty": _float(0, 2, low_open=True),
    "stop": _stops, "stop_token_ids": _ids, "ignore_eos": _bool, "stop_in_reasoning": _bool,
}
