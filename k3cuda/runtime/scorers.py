"""Scores of answers, from 0 to 1. docs/eval.md says what each reads out of an answer.

A scorer gets only the answer: reasoning is a channel of its own and never reaches it.
"""
import re
from difflib import SequenceMatcher
from typing import Callable, NamedTuple

# A number with an optional fraction, alone: no part of a word, an exponent or a version. Commas only between groups of three digits.
_NUMBER = re.compile(r"(?<![\w.])[-+\u2212]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(\.[0-9]+)?(?![0-9A-Za-z_])")
_BOX = "\\boxed{"
_LETTERS = "A-J"   # four choices or ten
_LETTER = re.compile(rf"(?<![A-Za-z\\])[{_LETTERS}](?![A-Za-z])")
_MARKUP = r"[\s*_:=$(\"'`]*"
_SAID = re.compile(rf"(?i:answer|option|choice){_MARKUP}(?i:is\b)?{_MARKUP}(?i:option\b|choice\b)?{_MARKUP}([{_LETTERS}])(?![A-Za-z0-9'])")
_FIRST = re.compile(rf"[\s*_(]*([{_LETTERS}])(?:[).:*_]|\s*$)")
PREFIX = "random_string_to_prepend"   # as the records of the published MRCR set call it


class Scorer(NamedTuple):
    """read(record): the right answer; ValueError says what was wanted. score(text, right): (score, what was read out of the text or None)."""

    read: Callable[[dict], object]
    score: Callable[[str, object], tuple[float, str | None]]


def _integer(record: dict) -> int:
    answer = record.get("answer")
    if isinstance(answer, str) and re.fullmatch(r"\s*[-+]?[0-9]+\s*", answer):
        answer = int(answer)
    if not isinstance(answer, int) or isinstance(answer, bool):
        raise ValueError(f"answer: found {answer!r:.60}, wanted an integer")
    return answer


def _score_integer(text: str, right: int) -> tuple[float, str | None]:
    box = _last_box(text)
    numbers = list(_NUMBER.finditer((text if box is None else box).replace("{,}", ",")))
    if box is not None and len(numbers) != 1:   # a fraction or a list is no integer, and its last part isn't the answer
        return 0.0, None
    whole = [m.group() for m in numbers if m.group(1) is None]
    if not whole:
        return 0.0, None
    found = int(whole[-1].replace(",", "").replace("\u2212", "-"))
    return float(found == right), str(found)


def _letter(record: dict) -> str:
    answer = record.get("answer")
    if not isinstance(answer, str) or not re.fullmatch(rf"\(?[{_LETTERS}]\)?", answer.strip()):
        raise ValueError(f"answer: found {answer!r:.60}, wanted one of the letters {_LETTERS}")
    return answer.strip().strip("()")


def _score_letter(text: str, right: str) -> tuple[float, str | None]:
    box, found = _last_box(text), None
    if box is not None:
        letters = _LETTER.findall(box)
        found = letters[0] if len(letters) == 1 else None
    elif said := _SAID.findall(text):
        found = said[-1]
    elif first := _FIRST.match(text):
        found = first.group(1)
    return float(found == right), found


def _text(record: dict) -> str:
    answer = record.get("answer")
    if not isinstance(answer, str) or not answer:
        raise ValueError(f"answer: found {answer!r:.60}, wanted text")
    return answer


def _needle(record: dict) -> tuple[str, str]:
    prefix = record.get(PREFIX)
    if not isinstance(prefix, str) or not prefix:
        raise ValueError(f"{PREFIX}: found {prefix!r:.60}, wanted the text that answers must begin with")
    return prefix, _text(record).removeprefix(prefix)


def _score_needle(text: str, right: tuple[str, str]) -> tuple[float, str | None]:
    prefix, needle = right
    if not text.startswith(prefix):
        return 0.0, None
    return _ratio(text.removeprefix(prefix), needle), text


def _ratio(a: str, b: str) -> float:
    return SequenceMatcher(None, a, b).ratio()   # with its default heuristic, as published scores are


def _last_box(text: str) -> str | None:
    r"""What stands in the last \boxed{...} that is closed, None where there is none."""
    end = len(text)
    while (start := text.rfind(_BOX, 0, end)) >= 0:
        depth = 1
        for i in range(start + len(_BOX), len(text)):
            depth += (text[i] == "{") - (text[i] == "}")
            if depth == 0:
                return text[start + len(_BOX):i]
        end = start
    return None


def _score_exact(text: str, right: str) -> tuple[float, str | None]:
    found = " ".join(text.split())
    return float(found == " ".join(right.split())), found or None


SCORERS = {"exact": Scorer(_text, _score_exact), "integer": Scorer(_integer, _score_integer), "letter": Scorer(_letter, _score_letter),
           "mrcr": Scorer(_needle, _score_needle), "ratio": Scorer(_text, lambda text, right: (_ratio(text, right), text))}
