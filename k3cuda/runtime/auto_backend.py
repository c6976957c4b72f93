"""Which decode backend `auto` is: the fastest one that runs this model on this machine, as it was asked for."""
import logging
import os
from pathlib import Path
from typing import Iterator

from ..config import K3Config
from ..draft_config import DraftConfig
from ..emit import no_kernels
from ..errors import K3Error, UsageError
from ..weights import legal_tps
from .checkpoint import CONFIG
from .downloads import no_text
from .draft_checkpoint import DraftTensors
from .kernel_sizes import size_misfits
from .launch import Launch, launched
from .machine import AUTO, DECODE_BACKENDS, NOT_AUTO, PROCESSES, REFERENCE, STANDARD, VIRTUAL, Driver, cuda_problems, package_versions, probe_driver
from .named_models import TINY_RANDOM, TINY_RANDOM_DRAFTS, draft_named, model_named
from .rank_job import SHARE_GPU
from .tensor_source import TensorSource
from .tiny_random import open_tiny_random, open_tiny_random_draft

log = logging.getLogger("k3cuda")

VARIABLE = "K3CUDA_DECODE_BACKEND"   # names the one that `auto` is to be
ONLY_REFERENCE = {"activation_dtype": ("bf16", "bfloat16"), "kv_cache_dtype": ("f32", "float32")}   # what no other backend takes


def auto_backend(model, draft_model=None, *, tp: int = 1, ranks: str = "auto", place: Launch | None = None, **asked) -> str:
    """A name of `machine.DECODE_BACKENDS`; K3CUDA_DECODE_BACKEND settles it. The log says why it is none of the faster ones where there is a GPU.

    Arguments are those of `open_model`, as yet unchecked: what is wrong with them whoever uses them says. `asked`: those of ONLY_REFERENCE.
    Raises UsageError: K3CUDA_DECODE_BACKEND names none, or a launcher's variables contradict each other.
    """
    told = os.environ.get(VARIABLE) or AUTO
    if told not in (AUTO, *DECODE_BACKENDS):
        raise UsageError(f"{VARIABLE}: found {told!r:.60}, wanted {', '.join(DECODE_BACKENDS)}", "leave it out")
    if told != AUTO:
        return told
    driver = probe_driver()
    if not driver.gpus:   # nothing else could run
        return REFERENCE
    if problems := cuda_problems(driver, package_versions()):
        log.warning("decode_backend %s is %s, not %s: %s", AUTO, REFERENCE, STANDARD, "; ".join(problems))
        return REFERENCE
    if why := next(_unfit(model, draft_model, tp, ranks, place, asked, driver), None):
        log.info("decode_backend %s is %s, not %s: %s", AUTO, REFERENCE, STANDARD, why)
        return REFERENCE
    for other, why in NOT_AUTO.items():
        log.info("decode_backend %s is %s, not %s: %s", AUTO, STANDARD, other, why)
    return STANDARD


def _unfit(model, draft_model, tp, ranks, place: Launch | None, asked: dict, driver: Driver) -> Iterator[str]:
    """What the GPUs here, or the kernels, are not for."""
    yield from (f"{name} {value!r}" for name, value in asked.items() if value in ONLY_REFERENCE[name])
    place = None if ranks == VIRTUAL else place or launched()
    here = (place.local_size or 1) if place else tp if ranks == PROCESSES else 1
    if here > len(driver.gpus) and not os.environ.get(SHARE_GPU):
        yield f"{here} ranks as processes here, {len(driver.gpus)} GPU{'s' * (len(driver.gpus) > 1)}"
    if (cfg := _config(model)) and tp in legal_tps(cfg):
        yield from size_misfits(cfg, tp)
    if (draft := _draft_config(draft_model)) and (why := no_kernels(draft)):
        yield why


def _config(model) -> K3Config | None:
    """Of a model as users name it; None where nothing usable is there, as who opens it says."""
    if isinstance(model, TensorSource):
        return model.cfg
    try:
        found = model_named(model)
        return open_tiny_random().cfg if found == TINY_RANDOM else _read(K3Config, found)
    except (K3Error, OSError, TypeError, ValueError):
        return None


def _draft_config(draft) -> DraftConfig | None:
    """The same of a draft model."""
    if draft is None or isinstance(draft, DraftTensors):
        return draft and draft.cfg
    try:
        found = draft_named(draft)
        return open_tiny_random_draft(found).cfg if found in TINY_RANDOM_DRAFTS else _read(DraftConfig, found)
    except (K3Error, OSError, TypeError, ValueError):
        return None


def _read(kind: type, place):
    path = Path(place)
    path = (path if path.is_dir() else path.parent) / CONFIG
    return None if no_text(path) else kind.from_json(path)
