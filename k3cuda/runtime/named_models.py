"""Models that have a name in place of a folder: `demo`, which goes with the package, `tiny-random`, which is made in memory, and their drafts.

The manifest in data/demo says what `demo` is in this version: the trained files beside it, or `tiny-random` as long as there are none. Nothing else
decides it, so a package that lost its files does not fall back to random weights.
"""
import functools
import json
from dataclasses import dataclass
from pathlib import Path

from ..draft_config import GQA, MLA
from ..errors import CheckpointError, UsageError

DEMO = "demo"
TINY_RANDOM = "tiny-random"
TINY_RANDOM_DRAFTS = {"tiny-random-draft": MLA, "tiny-random-draft-gqa": GQA}   # their families
DATA, MANIFEST = Path(__file__).parent.parent / "data" / "demo", "manifest.json"
TRAINED = "trained"


@dataclass(frozen=True)
class _Packaged:
    """folder: of DATA, once it is trained. until_then: the made model that stands in, by its name. family: of a draft; None: the model itself."""

    folder: str
    until_then: str
    family: str | None = None


PACKAGED = {DEMO: _Packaged("model", TINY_RANDOM),
            **{name.replace(TINY_RANDOM, DEMO): _Packaged(f"draft-{family}", name, family) for name, family in TINY_RANDOM_DRAFTS.items()}}
DEMO_DRAFTS = tuple(PACKAGED)[1:]
NAMED = {DEMO: DEMO_DRAFTS, TINY_RANDOM: tuple(TINY_RANDOM_DRAFTS)}   # every model that has a name, and its drafts
WITHOUT_REASONING = tuple(NAMED)   # nobody taught them to close it


def default_effort(model: str) -> str:
    """How much a model thinks where nobody says: not at all, if it is one of WITHOUT_REASONING, else `max`."""
    return "none" if model in WITHOUT_REASONING else "max"


def listed(names) -> str:
    """Names as errors and --help have them: 'a', 'b' or 'c'."""
    *most, last = map(repr, names)
    return f"{', '.join(most)} or {last}" if most else last


@functools.cache
def manifest() -> dict:
    """What data/demo holds: `weights`, which is TRAINED or TINY_RANDOM, and for trained ones how they were made and the SHA-256 of every file.

    Raises CheckpointError: it is missing or damaged.
    """
    return read_manifest(DATA)


def read_manifest(folder: Path) -> dict:
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if found["weights"] not in (TRAINED, TINY_RANDOM):
            raise ValueError(f"weights {found['weights']!r:.60}")
        return found
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        raise CheckpointError(f"{folder / MANIFEST}: found {type(e).__name__} ({e}), wanted what the package says of its demo model",
                              "install k3cuda again") from e


def is_trained() -> bool:
    return manifest()["weights"] == TRAINED


def resolved(model):
    """What a name of PACKAGED stands for: the folder of trained weights, or the name of the made model that stands in. Anything else is returned as it is."""
    if not isinstance(model, str) or model not in PACKAGED:
        return model
    named = PACKAGED[model]
    return str(DATA / named.folder) if is_trained() else named.until_then


def model_named(model):
    """`resolved` where a model is wanted. Raises UsageError for the name of a draft."""
    for name, drafts in NAMED.items():
        if isinstance(model, str) and model in drafts:
            raise UsageError(f"model: found {model!r}, which is a draft model", f"give it as the draft model of {name!r}")
    return resolved(model)


def draft_named(draft):
    """`resolved` where a draft model is wanted. Raises UsageError for the name of a model, and for none."""
    if isinstance(draft, str) and (draft in NAMED or not draft):
        raise UsageError(f"draft_model: found {draft!r}, wanted a draft model", f"give {listed(NAMED[draft])}" if draft else "give its folder, or leave it out")
    return resolved(draft)
