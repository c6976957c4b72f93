"""JSON with what Python's reader does not tell: names that stand twice in an object, and whether a number may be no integer."""
import json


def loads(data: bytes) -> tuple[object, list[str], bool]:
    """(value, names given more than once in one object, whether all its numbers are ints; True and False are left to the caller).

    Raises:
        ValueError, RecursionError: no JSON, or NaN and Infinity in it.
    """
    odd = []

    def number(text):
        odd.append(text)
        return float(text)

    text, repeated = data.decode("utf-8"), []
    value = json.loads(text, parse_float=number, parse_constant=_no_constant)
    # Every pair has a colon, and a repeated name loses its pair: equal counts prove that none is lost, without a call for each object.
    if data.count(b":") != _pairs(value):
        value = None   # never both at once
        value = json.loads(text, object_pairs_hook=_hook(repeated))
    return value, repeated, not odd


def _pairs(value) -> int:
    """Names in an object and in the objects directly inside it."""
    return len(value) + sum(len(v) for v in value.values() if type(v) is dict) if type(value) is dict else -1


def _hook(repeated: list):
    def hook(pairs: list) -> dict:
        result = dict(pairs)
        if len(result) < len(pairs):
            seen = set()
            repeated.extend(name for name, _ in pairs if name in seen or seen.add(name))
        return result

    return hook


def _no_constant(name: str):
    raise ValueError(f"the value {name}")
