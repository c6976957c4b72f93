"""A checkpoint in the released layout: a folder with an index and shards, a folder with one file, or one file."""
import json
import logging
from functools import cached_property
from pathlib import Path

import numpy as np

from ..config import K3Config
from ..errors import ConfigError
from ..weights import Weight, checkpoint_key, expected_tensors, stored_shapes
from .findings import Finding, counted, error_of, shown
from .shards import Shards, open_shards, skipped
from .tensor_source import TensorSource

log = logging.getLogger("k3cuda")

GENERATION_CONFIG = "generation_config.json"
_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_OTHER_FILES = "use config.json and weights of one release"


class Checkpoint(TensorSource):
    """An open checkpoint. Headers are read and checked at once; weight bytes are mapped, and read when they are used."""

    def __init__(self, path: Path, cfg: K3Config, shards: Shards, generation_config: dict):
        self.path, self.cfg, self.shards, self.generation_config = path, cfg, shards, generation_config

    @classmethod
    def open(cls, path) -> "Checkpoint":
        """Opens the folder of a checkpoint, or one .safetensors file with config.json beside it.

        Raises:
            CheckpointError: files missing, damaged, or not matching the config; it lists every problem.
        """
        survey = Survey(path)
        if survey.findings:
            raise error_of(survey.findings, survey.path)
        if survey.skipped:
            log.info("%s", survey.skipped)
        return cls(survey.path, survey.cfg, survey.shards, survey.generation_config)

    def stored(self, weight: Weight, layer: int | None, expert: int | None) -> np.ndarray:
        key = checkpoint_key(weight, layer, expert)
        return self.shards.owner[key].array(key)

    def tokenizer(self):
        """The tokenizer of the checkpoint's folder; CheckpointError if there is none or it is damaged."""
        from .tokenizer import Tokenizer

        return Tokenizer.from_dir(self.shards.folder)

    def close(self) -> None:
        for file in self.shards.files.values():
            file.close()


class Survey:
    """Everything the headers and small files of a checkpoint say, and all that is wrong with them."""

    def __init__(self, path):
        self.path = Path(path)
        self.shards = open_shards(self.path)
        self.findings: list[Finding] = list(self.shards.findings)
        self.cfg = self._read_config()
        self.generation_config = self._read_generation_config()
        if self.cfg and self.shards.files:
            self.findings += match(self.cfg, self.shards)

    @cached_property
    def skipped(self) -> str:
        """One line about what was not opened, or ""."""
        s = self.shards
        return s.skipped_tensors and f"skipped {s.skipped_tensors} vision tensors and {len(s.skipped_files)} shards that hold nothing else" or ""

    def _read_config(self) -> K3Config | None:
        path = self.shards.folder / "config.json"
        if not self.shards.folder.is_dir():
            return None
        try:
            return K3Config.from_json(path)
        except ConfigError as e:
            found = e.message.removeprefix(f"{path}: ")
            self.findings.append(Finding(str(path), found, "the config of a Kimi K3 release", e.hint or _OTHER_FILES))
            return None

    def _read_generation_config(self) -> dict:
        path = self.shards.folder / GENERATION_CONFIG
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            bad = _bad_value(values)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as e:
            values, bad = {}, f"no JSON ({shown(e)})"
        if bad:
            self.findings.append(Finding(str(path), bad, "a JSON object with numbers for sampling", "download the file again, or remove it"))
        return {} if bad else values


def _bad_value(values) -> str:
    if not isinstance(values, dict):
        return f"a JSON {type(values).__name__}"
    for key in _SAMPLING_KEYS:
        value = values.get(key, 0)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or abs(value) > 1e9):
            return f"{key} {shown(repr(value), 60)}"
    return ""


def match(cfg: K3Config, shards: Shards) -> list[Finding]:
    """Tensors that the config wants against those that the headers have: missing, of another shape or dtype, and unknown ones."""
    dims = cfg.dims()
    shapes: dict[str, list[tuple[int, ...]]] = {}
    missing, wrong_shape, wrong_dtype, wanted = [], [], [], set()
    listed_only = not shards.unreadable and not any(file.malformed for file in shards.files.values())
    for key, weight, _, _ in expected_tensors(cfg):
        wanted.add(key)
        file = shards.owner.get(key)
        if file is None:
            if key not in shards.listed and (listed_only or shards.index):
                missing.append(key)
            continue
        tensor = file.tensors[key]
        allowed = shapes.get(weight.name) or shapes.setdefault(weight.name, stored_shapes(weight, dims))
        if tensor.shape not in allowed:
            wrong_shape.append((key, file, list(tensor.shape), list(allowed[0])))
        if tensor.dtype != weight.dtype:
            wrong_dtype.append((key, file, tensor.dtype, weight.dtype))
    unknown = [key for key in shards.owner if key not in wanted and not skipped(key)]
    return _report(shards, missing, wrong_shape, wrong_dtype, unknown)


def _report(shards: Shards, missing, wrong_shape, wrong_dtype, unknown) -> list[Finding]:
    where = str(shards.index or next(iter(shards.files.values())).path)
    findings = []
    if missing:
        findings.append(Finding(where, f"no {counted(missing, 'tensor')}", "every tensor that config.json calls for", _OTHER_FILES))
    for kind, noun in ((wrong_shape, "shape"), (wrong_dtype, "dtype")):
        if kind:
            key, file, found, wanted = kind[0]
            more = f" ({len(kind)} tensors with a wrong {noun}, this is the first)" if len(kind) > 1 else ""
            findings.append(Finding(str(file.path), f"{key} with {noun} {found}{more}", f"{wanted}", _OTHER_FILES))
    if unknown:
        findings.append(Finding(str(shards.owner[unknown[0]].path), f"{counted(unknown, 'tensor')} of no known kind",
                                "only tensors of a Kimi K3 text model", _OTHER_FILES))
    return findings
