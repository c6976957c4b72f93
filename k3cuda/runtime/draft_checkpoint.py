"""The files of a draft model: what their headers say against its config and against its target, and its tensors."""
import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..config import K3Config
from ..draft_config import DraftConfig, misfits
from ..draft_weights import BY_NAME, draft_key, exists_in_draft, expected_draft_tensors
from ..errors import ConfigError
from ..weights import Weight, stored_shapes
from .checkpoint import CONFIG, mismatches, read_rows
from .downloads import no_text
from .findings import Finding, error_of
from .shards import Shards, open_shards
from .tensor_source import TensorSource

_OTHER_FILES = "use config.json and weights of one draft"
_OLD_PREFIX = "logit_head."  # older training code kept both heads below one module


class DraftTensors(TensorSource):
    """What every kind of draft offers, stored or made. `cfg` is a DraftConfig; what a draft takes from its target it does not have."""

    cfg: DraftConfig
    _table = BY_NAME

    def _exists(self, weight: Weight, layer: int | None) -> bool:
        return exists_in_draft(weight, self.cfg, layer)


class DraftCheckpoint(DraftTensors):
    """An open draft. Headers were read and checked; weight bytes are read when asked for."""

    def __init__(self, path: Path, cfg: DraftConfig, shards: Shards):
        self.path, self.cfg, self.shards = path, cfg, shards

    @classmethod
    def open(cls, path, target: K3Config | None = None) -> "DraftCheckpoint":
        """Opens the folder of a draft, or one .safetensors file with config.json beside it.

        Raises:
            CheckpointError: files missing, damaged, not matching the config, or a config that does not fit `target`; it lists every problem.
        """
        return cls.of(DraftSurvey(path, target))

    @classmethod
    def of(cls, survey: "DraftSurvey") -> "DraftCheckpoint":
        """The draft that `survey` looked at, without a second look at its files."""
        if survey.findings:
            raise error_of(survey.findings, survey.path)
        return cls(survey.path, survey.cfg, survey.shards)

    def stored(self, weight: Weight, layer: int | None, expert: int | None) -> np.ndarray:
        return self.stored_rows(weight, layer, expert, None)

    def stored_rows(self, weight: Weight, layer: int | None, expert: int | None, rows: slice | None) -> np.ndarray:
        return read_rows(self.shards, _stored_name(self.shards, draft_key(weight, self.cfg, layer, expert)), weight, rows)

    def close(self) -> None:
        for file in self.shards.files.values():
            file.close()


class DraftSurvey:
    """Everything the headers and the config of a draft say, and all that is wrong with them.

    Attributes:
        cfg: with `own_embedding` and `own_head` as the files have them; None where config.json could not be used.
    """

    def __init__(self, path, target: K3Config | None = None):
        self.path = Path(path)
        self.shards = open_shards(self.path)
        self.findings: list[Finding] = list(self.shards.findings)
        self.cfg = self._read_config()
        if self.cfg is None:
            return
        names = self.shards.owner.keys() | self.shards.listed.keys()
        self.cfg = replace(self.cfg, own_embedding="embed_tokens.weight" in names, own_head="lm_head.weight" in names)
        config = str(self.shards.folder / CONFIG)
        for problem in misfits(self.cfg, target) if target else ():
            self.findings.append(Finding(config, problem, "a draft that was trained for this target", "use another draft"))
        if self.shards.files or self.shards.listed:
            self.findings += _match(self.cfg, self.shards)

    def _read_config(self) -> DraftConfig | None:
        path = self.shards.folder / CONFIG
        if not os.path.isdir(self.shards.folder):
            return None
        if kind := no_text(path):
            self.findings.append(Finding(str(path), kind[0], "the config of a DSpark draft", kind[1]))
            return None
        try:
            return DraftConfig.from_json(path)
        except ConfigError as e:
            self.findings.append(Finding(str(path), e.message.removeprefix(f"{path}: "), "the config of a DSpark draft", e.hint or _OTHER_FILES))
            return None


def _stored_name(shards: Shards, key: str) -> str:
    return key if key in shards.owner or _OLD_PREFIX + key not in shards.owner else _OLD_PREFIX + key


def _match(cfg: DraftConfig, shards: Shards) -> list[Finding]:
    """Tensors that the config wants against those that the headers have."""
    dims, wanted = cfg.dims(), set()
    missing, wrong_shape, wrong_dtype = [], [], []
    for key, (weight, _, _) in expected_draft_tensors(cfg).items():
        name = _stored_name(shards, key)
        wanted.add(name)
        file, shape = shards.owner.get(name), stored_shapes(weight, dims)[0]
        if file is None:
            if name not in shards.listed and name not in shards.unusable:
                missing.append(key)
            continue
        tensor = file.tensors[name]
        if tensor.shape != shape:
            wrong_shape.append((name, file, list(tensor.shape), list(shape)))
        if tensor.dtype != weight.dtype:
            wrong_dtype.append((name, file, tensor.dtype, weight.dtype))
    unknown = [key for names in (shards.owner, shards.listed) for key in names if key not in wanted]
    return mismatches(shards, missing, wrong_shape, wrong_dtype, list(dict.fromkeys(unknown)), "DSpark draft with this config")
