"""Everything that is wrong with a model, from headers alone, before anything is loaded or allocated."""
import os
from dataclasses import dataclass, field
from pathlib import Path

from ..config import K3Config
from ..draft_config import DraftConfig, misfits
from ..draft_weights import cut_weights, draft_bytes, num_parameters
from ..emit import no_kernels
from ..errors import CheckpointError, ConfigError, OutOfMemory
from ..weights import WEIGHTS, check_tp, checkpoint_bytes, legal_cuts, legal_tps, model_bytes, num_tensors, outnumbered
from .checkpoint import CONFIG, Survey
from .draft_checkpoint import DraftCheckpoint, DraftSurvey, DraftTensors
from .findings import Finding, error_of
from .gpu_room import gpu_findings, gpu_table
from .kernel_sizes import size_misfits
from .machine import host
from .named_models import TINY_RANDOM, TINY_RANDOM_DRAFTS, draft_named, model_named
from .repack_manifest import UNFINISHED, is_repacked
from .repacked import RepackedSurvey
from .tensor_source import TensorSource
from .tiny_random import open_tiny_random, open_tiny_random_draft
from .tokenizer import CONFIG_FILE, RANKS_FILE, Tokenizer


@dataclass
class Report:
    """What `check` found out.

    Attributes:
        path: the model as it was named.
        findings: everything that is wrong.
        facts: sizes in bytes, counts and legal values, JSON-ready; keys in docs/cli.md.
        notes: what is worth knowing but wrong with nothing.
    """

    path: str
    findings: list[Finding] = field(default_factory=list)
    facts: dict = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    cfg: K3Config | None = field(default=None, repr=False)
    survey: Survey | None = field(default=None, repr=False)  # None for tiny-random
    draft: DraftSurvey | None = field(default=None, repr=False)  # None without a draft model, and for a made one
    made_draft: DraftTensors | None = field(default=None, repr=False)
    draft_cfg: DraftConfig | None = field(default=None, repr=False)  # where it can be used

    @property
    def ok(self) -> bool:
        return not self.findings

    def raise_if_bad(self) -> None:
        """Raises OutOfMemory if memory is all that is short, CheckpointError with every finding if anything else is wrong."""
        if self.findings:
            raise error_of(self.findings, self.path)

    def open(self) -> TensorSource:
        """The model that was checked, opened without a second look at its files; raises as `raise_if_bad` does."""
        self.raise_if_bad()
        return self.survey.open() if self.survey else open_tiny_random()

    def open_draft(self) -> DraftTensors:
        """The draft model that was checked, opened likewise."""
        self.raise_if_bad()
        return DraftCheckpoint.of(self.draft) if self.draft else self.made_draft

    def to_dict(self) -> dict:
        return {"path": self.path, "ok": self.ok, "findings": [f.to_dict() for f in self.findings], "facts": self.facts,
                "notes": self.notes}


def check(path, tp: int | None = None, draft=None, is_reference: bool = True, num_drafts: int | None = None) -> Report:
    """Looks at a model without loading it.

    Args:
        path: the folder of a checkpoint or of a repacked model, one .safetensors file, or a name of named_models.py.
        tp: number of ranks it shall be cut into; None: not asked.
        draft: a draft model for it: a folder, one .safetensors file, or such a name; None: no draft.
        is_reference: whether the reference backend shall run it: that one needs the host's memory.
        num_drafts: tokens the draft shall propose a step; None: not asked.
    """
    report = Report(str(path))
    path = model_named(path)
    if path == TINY_RANDOM:
        cfg, folder = open_tiny_random().cfg, None
    else:
        cfg, folder = _check_files(report, path, tp)
    report.cfg = cfg
    drafts = report.draft_cfg = None if draft is None else _check_draft(report, draft, cfg, tp, num_drafts)
    if cfg:
        _add_sizes(report, cfg)
        _check_tp(report, cfg, tp, folder)
        tp = tp or (report.survey and report.survey.tp) or 1
        tables = [("", WEIGHTS, cfg), *([("the draft model: ", cut_weights(drafts), drafts)] if drafts else [])]
        report.notes += [what + text for what, table, of in tables if (text := outnumbered(table, of.dims(), tp))]
        _check_memory(report, cfg, tp, is_reference, drafts)
        if folder:
            _check_tokenizer(report, cfg, folder)
    return report


def add_gpu_memory(report: Report, gpus) -> None:
    """Adds what each kind of GPU (machine.Gpu) has room for, beside the draft model if there is one, where there are any that run the kernels."""
    if report.cfg and (table := gpu_table(report.cfg, gpus, draft=report.draft_cfg)):
        report.facts["gpu_memory"] = table


def check_gpu(report: Report, gpu, tp: int) -> None:
    """Adds what is wrong where all of `tp` ranks shall run on this GPU."""
    if report.cfg and not report.findings:
        report.findings += [Finding(report.path, found, "sizes that the kernels are built for", "use the reference backend") for found in size_misfits(report.cfg, tp)]
        if report.draft_cfg and (why := no_kernels(report.draft_cfg)):
            report.findings.append(Finding(report.path, why, "a draft model that has kernels", "use the reference backend"))
        report.findings += gpu_findings(report.cfg, gpu, tp, report.draft_cfg)


def _check_files(report: Report, path, tp: int | None) -> tuple[K3Config | None, Path]:
    if not os.path.lexists(path) and is_repacked(unfinished := f"{os.fspath(path)}{UNFINISHED}"):
        path = unfinished   # whose own words say how it is finished
    survey = report.survey = RepackedSurvey(path, tp) if is_repacked(path) else Survey(path)
    shards = survey.shards
    report.findings += survey.findings
    report.notes += shards.notes
    if survey.skipped:
        report.notes.append(survey.skipped)
    report.facts |= {"shards": len(shards.files) + len(shards.unreadable), "tensors": survey.num_tensors,
                     "bytes": shards.text_bytes, "skipped_tensors": shards.skipped_tensors, "skipped_shards": len(shards.skipped_files)}
    if survey.tp:
        report.facts["repacked_tp"] = survey.tp
    if survey.cfg and not survey.cfg.eos_token_id:
        report.notes.append(f"{shards.folder / CONFIG} names no eos_token_id: an answer ends by length or by a stop of yours")
    return survey.cfg, shards.folder


def _add_sizes(report: Report, cfg: K3Config) -> None:
    report.facts |= {
        "num_hidden_layers": cfg.num_hidden_layers, "vocab_size": cfg.vocab_size, "max_position_embeddings": cfg.max_position_embeddings,
        "config_tensors": num_tensors(cfg), "config_bytes": checkpoint_bytes(cfg),
        "legal_tp": legal_tps(cfg), "bytes_per_rank": {str(tp): model_bytes(cfg, tp) for tp in legal_tps(cfg)},
    }


def _check_tp(report: Report, cfg: K3Config, tp: int | None, folder: Path | None) -> None:
    try:
        if tp is not None:
            check_tp(cfg, tp)
    except ConfigError as e:
        legal = ", ".join(map(str, legal_tps(cfg)))
        report.findings.append(Finding(str(folder / CONFIG) if folder else report.path, e.message, f"a tp of {legal}",
                                       "ask for one of these"))


def _check_draft(report: Report, draft, target: K3Config | None, tp: int | None, num_drafts: int | None) -> DraftConfig | None:
    """Files and config of a draft model against its target; the config where it can be used."""
    draft = draft_named(draft)
    if draft in TINY_RANDOM_DRAFTS:
        report.made_draft = open_tiny_random_draft(draft)
        cfg, where = report.made_draft.cfg, draft
        report.findings += [Finding(where, p, f"{TINY_RANDOM} as its target", "use a draft of this target") for p in (misfits(cfg, target) if target else ())]
    else:
        report.draft = DraftSurvey(draft, target)
        report.findings += report.draft.findings
        cfg, where = report.draft.cfg, str(report.draft.shards.folder / CONFIG)
    if cfg is None:
        return None
    cuts = legal_cuts(cut_weights(cfg), cfg.dims())
    report.facts["draft"] = {"family": cfg.family, "num_hidden_layers": cfg.num_hidden_layers, "target_layer_ids": list(cfg.target_layer_ids),
                             "tap_stream": cfg.tap_stream, "block_size": cfg.block_size, "max_drafts": cfg.max_drafts, "mask_token_id": cfg.mask_token_id,
                             "parameters": num_parameters(cfg), "legal_tp": cuts, "bytes_per_rank": {str(n): draft_bytes(cfg, n) for n in cuts}}
    if tp is not None and tp not in cuts:
        report.findings.append(Finding(where, f"a draft model that cannot be cut over {tp} ranks", f"a tp of {', '.join(map(str, cuts))}", "ask for one of these"))
    if num_drafts is not None and num_drafts > cfg.max_drafts:
        report.findings.append(Finding(where, f"a block of {cfg.block_size} rows, so at most {cfg.max_drafts} drafts", f"{num_drafts} drafts a step", "ask for fewer"))
    if target and cfg.max_position_embeddings < target.max_position_embeddings:
        report.notes.append(f"the draft model's context ends at {cfg.max_position_embeddings:,}, the model's at {target.max_position_embeddings:,}: "
                            f"speculation stops near position {cfg.max_position_embeddings:,}")
    return cfg


def _check_memory(report: Report, cfg: K3Config, tp: int, is_reference: bool, draft: DraftConfig | None = None) -> None:
    """The reference backend holds every virtual rank in this process; experts are expanded as they are used, so this is the least."""
    ranks = tp if tp in legal_tps(cfg) else 1
    memory = host()
    needed = model_bytes(cfg, ranks, widened=True) * ranks + (draft_bytes(draft, ranks, widened=True) * ranks if draft else 0)
    known = [n for n in (memory["memory_free_bytes"], memory["memory_limit_bytes"]) if n]
    report.facts |= {"reference_memory_bytes": needed, "host_memory_free_bytes": min(known) if known else None}
    if is_reference and known and needed > min(known):
        report.findings.append(Finding("host memory", f"{min(known) / 1e9:.1f} GB free",
                                       f"{needed / 1e9:.1f} GB for the weights of the reference backend",
                                       "use a machine with more memory, or a smaller model", OutOfMemory.code))


def _check_tokenizer(report: Report, cfg: K3Config, folder: Path) -> None:
    there = [name for name in (RANKS_FILE, CONFIG_FILE) if os.path.lexists(folder / name)]
    if RANKS_FILE not in there:
        other = " (there is a tokenizer.json, which is not read)" if os.path.lexists(folder / "tokenizer.json") else ""
        report.notes.append(f"no {RANKS_FILE} in {folder}{other}: prompts can only be given as token ids")
        return
    try:
        tokenizer = Tokenizer.from_dir(folder)
    except CheckpointError as e:
        report.findings.append(_tokenizer_finding(e))
        return
    report.facts["tokenizer_ids"] = tokenizer.vocab_size
    if tokenizer.vocab_size > cfg.vocab_size:
        report.findings.append(Finding(str(folder / RANKS_FILE), f"{tokenizer.vocab_size:,} token ids",
                                       f"at most vocab_size {cfg.vocab_size:,} of {CONFIG}", "use tokenizer and config of one release"))
    elif tokenizer.vocab_size < cfg.vocab_size:
        report.notes.append(f"the model has {cfg.vocab_size - tokenizer.vocab_size:,} more ids than its tokenizer")


def _tokenizer_finding(error: CheckpointError) -> Finding:
    where, _, text = error.message.partition(": ")
    file, _, line = where.partition(", line ")
    found, _, wanted = text.removeprefix("found ").partition(", wanted ")
    return Finding(file, f"line {line}: {found}" if line else found, wanted or "the tokenizer files of a Kimi K3 release",
                   error.hint or "download them again")
