"""From what the user calls a model to a backend that runs it. Everything that can be refused is refused before weights are read."""
import itertools
import logging
import os
from dataclasses import dataclass

from ..config import DECODE_ROWS, token_ids
from ..context_split import check_dcp
from ..draft_config import misfits
from ..errors import CheckpointError, ConfigError, K3Error, UsageError
from .auto_backend import auto_backend
from .backend import Backend
from .block_reader import AUTO as AUTO_MODE
from .block_reader import MODES
from .draft_checkpoint import DraftCheckpoint, DraftTensors
from .downloads import check_is_here
from .drafting import SYNTHETIC, Drafting, check_options
from .launch import Launch
from .loading import Loading
from .machine import AUTO, COLLECTIVES, DECODE_BACKENDS, LATENCY_SPECIALIZED, NCCL, ON_GPU, PEER, REFERENCE, STANDARD, probe_driver
from .rank_job import Job, open_job
from .rendezvous import TIMEOUT_S
from .repack_manifest import default_tp

log = logging.getLogger("k3cuda")

KV_CACHE_DTYPES = ("auto", "f32", "bf16", "fp8_e4m3")
ACTIVATION_DTYPES = ("f32", "bf16")
DEFAULT_BATCH = 8
_ALIASES = {"ref": REFERENCE, "fp8": "fp8_e4m3", "bfloat16": "bf16", "float32": "f32"}


@dataclass(frozen=True)
class Model:
    """An open model.

    Attributes:
        backend: with the weights loaded.
        tokenizer: None where the checkpoint has none; `no_tokenizer` says so.
        generation_config: sampling defaults of the checkpoint.
        eos_ids: end tokens of config.json and generation_config.json.
        prefix_cache: slots of the backend that are for the engine's stored prefixes.
        loading: what reading the weights took.
    """

    backend: Backend
    tokenizer: object
    generation_config: dict
    eos_ids: tuple[int, ...]
    no_tokenizer: CheckpointError | None = None
    prefix_cache: int = 0
    loading: Loading | None = None


def open_model(model, draft_model=None, *, tp=None, dcp=1, decode_backend=AUTO, max_model_len=None, max_batch=None, kv_cache_dtype="auto",
               activation_dtype="f32", prefix_cache=0, load_mode=AUTO_MODE, load_progress=None, ranks="auto", collectives=NCCL, rendezvous_timeout=TIMEOUT_S,
               place: Launch | None = None, **drafting) -> Model:
    """Arguments and errors of `k3cuda.LLM`; `drafting` are options of drafting.py by name, None where they are left open. An open Model is returned as it is.

    `place`: this process's in its job; None: as its launcher says. On another rank than 0 this ends with SystemExit when rank 0 ends.
    """
    if isinstance(model, Model):
        return model
    tp = default_tp(model) if tp is None else tp
    if decode_backend == AUTO:   # before ranks are asked for, which all have to have the same one
        decode_backend = auto_backend(model, draft_model, tp=tp, ranks=ranks, place=place, activation_dtype=activation_dtype, kv_cache_dtype=kv_cache_dtype)
    given = {"tp": tp, "dcp": dcp, "decode_backend": decode_backend, "max_model_len": max_model_len, "max_batch": max_batch, "kv_cache_dtype": kv_cache_dtype,
             "activation_dtype": activation_dtype, "prefix_cache": prefix_cache, "load_mode": load_mode, "collectives": collectives, **drafting}
    job = open_job(ranks, place, model, draft_model, given, rendezvous_timeout)
    checkpoint = draft = None
    try:
        try:
            chosen = choice("decode_backend", decode_backend, (AUTO, *DECODE_BACKENDS))
            if chosen in ON_GPU:
                _require_gpu(chosen, activation_dtype, job)
            kv_cache_dtype = choice("kv_cache_dtype", kv_cache_dtype, KV_CACHE_DTYPES)
            activation_dtype = choice("activation_dtype", activation_dtype, ACTIVATION_DTYPES)
            if choice("collectives", collectives, COLLECTIVES) == PEER and not (job and chosen in ON_GPU):
                why = f"decode_backend {chosen!r}" if job else "all ranks in one process"
                raise UsageError(f"collectives: found {PEER!r} with {why}, where nothing crosses GPUs",
                                 f"leave it out, or use decode_backend {STANDARD!r} with ranks 'processes'")
            for name, value, most in (("tp", tp, None), ("dcp", dcp, None), ("max_batch", max_batch, DECODE_ROWS), ("max_model_len", max_model_len, None)):
                _check_count(name, value, most)
            check_dcp(tp, dcp)
            most = DECODE_ROWS - (max_batch or DEFAULT_BATCH)
            if not isinstance(prefix_cache, int) or isinstance(prefix_cache, bool) or not 0 <= prefix_cache <= most:
                raise UsageError(f"prefix_cache: found {prefix_cache!r:.60}, wanted an integer from 0 to {most}, which with max_batch makes {DECODE_ROWS}")
            loading = Loading(choice("load_mode", load_mode, MODES), load_progress)
            drafting = check_options(drafting, draft_model is not None)
            checkpoint, draft = _open_checkpoints(model, draft_model, tp, chosen == REFERENCE)
            drafting = Drafting(draft, **drafting) if draft else None
            max_batch = max_batch or min(DEFAULT_BATCH, drafting.max_batch if drafting else DEFAULT_BATCH)
            if drafting:
                drafting.check_batch(max_batch)
            eos_ids = _eos_ids(checkpoint)
            tokenizer, no_tokenizer = _tokenizer(checkpoint)
        except K3Error as e:
            if job:
                job.refuse(e)
            raise
        options = {"tp": tp, "dcp": dcp, "max_batch": max_batch + prefix_cache, "max_model_len": max_model_len, "kv_cache_dtype": kv_cache_dtype, "loading": loading}
        if job:
            backend = _in_job(job, checkpoint, chosen, options, activation_dtype, drafting, collectives)
        else:
            backend = _reference(checkpoint, options, activation_dtype, drafting) if chosen == REFERENCE else _cuda(checkpoint, options | _specialized(chosen), drafting)
    finally:
        for opened, its in ((checkpoint, model), (draft, draft_model)):
            if opened is not None and opened is not its:
                opened.close()
    loading = options["loading"]
    if drafting:
        log.info("draft model %s: %s", draft.path or "in memory", draft.cfg.summary)
        log.log(logging.WARNING if drafting.acceptance == SYNTHETIC else logging.INFO, "%s", drafting)
    if backend.kv_cache_dtype == "fp8_e4m3":
        log.info("the checkpoint has no scale for an fp8_e4m3 cache: 1 is used")
    if summary := loading.summary():
        log.info("%s", summary)
    return Model(backend, tokenizer, dict(checkpoint.generation_config), eos_ids, no_tokenizer, prefix_cache, loading)


def _tokenizer(checkpoint):
    try:
        return checkpoint.tokenizer(), None
    except CheckpointError as e:
        return None, e


def _eos_ids(checkpoint) -> tuple[int, ...]:
    found = checkpoint.generation_config.get("eos_token_id")
    more = token_ids(found)
    if more is None:
        raise ConfigError(f"generation_config.json: eos_token_id: found {found!r:.60}, wanted token ids", "download the file again")
    return tuple(dict.fromkeys([*checkpoint.cfg.eos_token_id, *more]))


def choice(name: str, value, names: tuple[str, ...]) -> str:
    """`value`, or what it is an alias of, if it is one of `names`."""
    found = _ALIASES.get(value, value) if isinstance(value, str) else value
    if found not in names:
        raise UsageError(f"{name}: found {value!r:.60}, wanted {', '.join(names)}")
    return found


def _require_gpu(chosen: str, activation_dtype, job: Job | None) -> None:
    """Raises UsageError, or DeviceError, where the backend cannot run so, or not here."""
    if activation_dtype != "f32":
        raise UsageError(f"activation_dtype: found {activation_dtype!r:.60}, but {chosen!r} has its own precisions", "leave it out")
    from .cuda_driver import require_gpu

    if job and not probe_driver().problem:
        job.choose_gpu()   # first: a rank that opens another's GPU, too, leaves a context there
    require_gpu((job and job.device) or 0)


def _reference(checkpoint, options: dict, activation_dtype: str, drafting: Drafting | None) -> Backend:
    from .numpy_backend import NumpyBackend

    return NumpyBackend(checkpoint, activation_dtype=activation_dtype, drafting=drafting, **options)


def _in_job(job: Job, checkpoint, chosen: str, options: dict, activation_dtype: str, drafting: Drafting | None, collectives: str) -> Backend:
    job.meet()
    options["loading"] = job.share(options["loading"])
    if chosen in ON_GPU:
        from .cuda_driver import open_device
        from .cuda_rank import CudaRank

        def on_gpu(*_):
            open_device(job.device)
            return CudaRank(checkpoint, job.communicator(), job.device, job.building, collectives, drafting=drafting,
                            **{name: value for name, value in (options | _specialized(chosen)).items() if name != "tp"})

        return job.load(on_gpu)
    from .numpy_backend import NumpyBackend, fitting_length

    return job.load(lambda collectives, length: NumpyBackend(checkpoint, activation_dtype=activation_dtype, drafting=drafting, collectives=collectives,
                                                             **options | {"max_model_len": length}),
                    lambda: fitting_length(checkpoint.cfg, options["max_batch"], options["max_model_len"], drafting, options["dcp"]))


def _specialized(chosen: str) -> dict:
    """What it adds to the options of a backend on a GPU."""
    return {"specialized": True} if chosen == LATENCY_SPECIALIZED else {}


def _cuda(checkpoint, options: dict, drafting: Drafting | None) -> Backend:
    from .cuda_backend import CudaBackend

    return CudaBackend(checkpoint, drafting=drafting, **options)


def _check_count(name: str, value, most: int | None) -> None:
    if value is None and name in ("max_model_len", "max_batch"):
        return
    wanted = "an integer of at least 1" if most is None else f"an integer from 1 to {most}"
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or (most is not None and value > most):
        raise UsageError(f"{name}: found {value!r:.60}, wanted {wanted}")


def _open_checkpoints(model, draft_model, tp: int, is_reference: bool):
    """The model and its draft model or None, both checked before either is opened."""
    from .named_models import NAMED
    from .preflight import check, check_gpu
    from .tensor_source import TensorSource

    _check_place("model", model, TensorSource, NAMED)
    if draft_model is not None:
        _check_place("draft_model", draft_model, DraftTensors, itertools.chain(*NAMED.values()))
    is_open = isinstance(draft_model, DraftTensors)
    if isinstance(model, TensorSource):
        found = draft_model if is_open or draft_model is None else _open_draft(draft_model, model.cfg)
        return model, _fitting(found, model)
    report = check(model, tp=tp, draft=None if is_open else draft_model, is_reference=is_reference)
    if not is_reference:
        check_gpu(report, probe_driver().gpus[0], tp)
    checkpoint = report.open()
    return checkpoint, _fitting(draft_model, checkpoint) if is_open else None if draft_model is None else report.open_draft()


def _open_draft(draft_model, target) -> DraftTensors:
    """A draft for a model that is open already: for one that is not, preflight.py tells what is wrong with both at once."""
    from .named_models import TINY_RANDOM_DRAFTS, draft_named
    from .tiny_random import open_tiny_random_draft

    draft = draft_named(draft_model)
    return open_tiny_random_draft(draft) if draft in TINY_RANDOM_DRAFTS else DraftCheckpoint.open(draft, target)


def _fitting(draft: DraftTensors | None, checkpoint) -> DraftTensors | None:
    if draft is not None and (bad := misfits(draft.cfg, checkpoint.cfg)):
        raise ConfigError("; ".join(bad), "use a draft of this target")
    return draft


def _check_place(name: str, value, kind: type, named) -> None:
    """Raises where `value` cannot be what a user calls a model on this machine; `named`: what else than a path it may be."""
    from .named_models import listed

    if isinstance(value, kind):
        return
    if not isinstance(value, (str, os.PathLike)):
        raise UsageError(f"{name}: found {type(value).__name__}, wanted the folder of a checkpoint, a .safetensors file, or {listed(named)}")
    check_is_here(value)
