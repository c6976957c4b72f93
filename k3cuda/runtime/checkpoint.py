"""A checkpoint in the released layout: a folder with an index and shards, a folder with one file, or one file."""
import gc
import json
import logging
import math
import os
from functools import cached_property
from pathlib import Path

import numpy as np

from ..config import K3Config, token_ids
from ..errors import ConfigError
from ..weights import Weight, all_weights, checkpoint_key, checkpoint_keys, expected_tensors, model_bytes, num_tensors, stored_shapes
from .downloads import no_text
from .findings import AGAIN, Finding, counted, error_of, shown
from .load_plan import Block, Unit, blocks_of, wanted_bytes
from .sampling import SamplingParams
from .shards import Shards, open_shards
from .slices import HostSlices, bad_values, check_values, trouble_of
from .tensor_source import TensorSource

log = logging.getLogger("k3cuda")

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
MAX_TENSORS = 5_000_000  # ten times the release: a config that calls for more is wrong, and would keep us looking for hours
_OTHER_FILES = "use config.json and weights of one release"


class Checkpoint(TensorSource):
    """An open checkpoint. Headers are read and checked at once; weight bytes are read when asked for."""

    def __init__(self, path: Path, cfg: K3Config, shards: Shards, generation_config: dict):
        self.path, self.cfg, self.shards, self.generation_config = path, cfg, shards, generation_config

    @classmethod
    def open(cls, path) -> "Checkpoint":
        """Opens the folder of a checkpoint, or one .safetensors file with config.json beside it.

        Raises:
            CheckpointError: files missing, damaged, or not matching the config; it lists every problem.
        """
        return cls.of(Survey(path))

    @classmethod
    def of(cls, survey: "Survey") -> "Checkpoint":
        """The checkpoint that `survey` looked at, without a second look at its files."""
        survey.check()
        if survey.skipped:
            log.info("%s", survey.skipped)
        return cls(survey.path, survey.cfg, survey.shards, survey.generation_config)

    def stored(self, weight: Weight, layer: int | None, expert: int | None) -> np.ndarray:
        return self.stored_rows(weight, layer, expert, None)

    def stored_rows(self, weight: Weight, layer: int | None, expert: int | None, rows: slice | None) -> np.ndarray:
        return read_rows(self.shards, checkpoint_key(weight, layer, expert), weight, rows)

    # ---- as one stream: see Loader ----

    def load_bytes(self, tp: int, ranks: range) -> tuple[int, int]:
        """(bytes of tensors that must be read, bytes that stay) for `ranks` of `tp`."""
        return wanted_bytes(self.cfg, tp, ranks), model_bytes(self.cfg, tp) * len(ranks)

    def blocks(self, unit: Unit, tp: int, ranks: range, capacity: int) -> list[Block]:
        return blocks_of(unit, self.cfg, self.shards.owner, tp, ranks, capacity)

    def open_target(self, unit: Unit, tp: int, ranks: range) -> HostSlices:
        return HostSlices(unit, self.cfg.dims(), tp, ranks)

    def slices_of(self, unit: Unit, target: HostSlices, ranks: range) -> dict[str, np.ndarray]:
        """Weight name -> [ranks, (experts,) rows, columns ..]; CheckpointError for what no trained model holds."""
        check_values(self, unit, target.arrays)
        return target.arrays

    def tokenizer(self):
        """The tokenizer of the checkpoint's folder; CheckpointError if there is none or it is damaged."""
        from .tokenizer import Tokenizer

        return Tokenizer.from_dir(self.shards.folder)

    def close(self) -> None:
        for file in self.shards.files.values():
            file.close()


def read_rows(shards: Shards, key: str, weight: Weight, rows: slice | None) -> np.ndarray:
    """Some rows of a tensor, all for None; CheckpointError where they cannot be those of a trained model."""
    file = shards.owner[key]
    array = file.array(key, rows)
    if trouble := trouble_of(weight, array):
        raise bad_values(file, key, trouble)
    return array


class Survey:
    """Everything the headers and small files of a checkpoint say, and all that is wrong with them.

    Attributes:
        tp: ranks that its files are for; None: any. hashes: SHA-256 by file name, where it brings its own. again: the way out of a damaged file.
    """

    tp: int | None = None
    again = AGAIN

    def __init__(self, path):
        self.path, self.hashes = Path(path), {}
        collecting = gc.isenabled()
        gc.disable()  # half a million small objects, none of them garbage: the collector would take a third of the time
        try:
            self._read()
        finally:
            if collecting:
                gc.enable()

    def _read(self) -> None:
        self.shards = open_shards(self.path)
        self.findings: list[Finding] = list(self.shards.findings)
        self.cfg = self._read_config()
        self.generation_config = self._read_generation_config()
        if self.cfg and (self.shards.files or self.shards.listed):
            self.findings += match(self.cfg, self.shards)

    def check(self) -> None:
        """Raises what is wrong, all of it at once."""
        if self.findings:
            raise error_of(self.findings, self.path)

    def open(self) -> Checkpoint:
        return Checkpoint.of(self)

    @property
    def num_tensors(self) -> int:
        return self.shards.num_tensors

    @cached_property
    def skipped(self) -> str:
        """One line about what was not opened, or ""."""
        s = self.shards
        return f"skipped {s.skipped_tensors} vision tensors; {len(s.skipped_files)} shards hold nothing else" if s.skipped_tensors else ""

    def _read_config(self) -> K3Config | None:
        path = self.shards.folder / CONFIG
        if not os.path.isdir(self.shards.folder):
            return None
        if kind := no_text(path):
            self.findings.append(Finding(str(path), kind[0], "the config of a Kimi K3 release", kind[1]))
            return None
        try:
            return K3Config.from_json(path)
        except ConfigError as e:
            found = e.message.removeprefix(f"{path}: ")
            self.findings.append(Finding(str(path), found, "the config of a Kimi K3 release", e.hint or _OTHER_FILES))
            return None

    def _read_generation_config(self) -> dict:
        path = self.shards.folder / GENERATION_CONFIG
        if not os.path.isdir(self.shards.folder):
            return {}
        if kind := no_text(path):
            self.findings.append(Finding(str(path), kind[0], "sampling defaults of the release", kind[1]))
            return {}
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(values, dict):
                raise ValueError(f"a {type(values).__name__}")
            SamplingParams().resolved(values)
            eos = values.get("eos_token_id")
            ids, end = token_ids(eos), self.cfg.vocab_size if self.cfg else math.inf
            if ids is None or max(ids, default=0) >= end:
                raise ConfigError(f"eos_token_id {shown(repr(eos), 60)}, which is no id of the model")
            return values
        except FileNotFoundError:
            return {}
        except ConfigError as e:
            found = e.message
        except OSError as e:
            found = f"an error on reading ({e.strerror or e})"
        except (ValueError, RecursionError) as e:
            found = f"no JSON object ({shown(e)})"
        self.findings.append(Finding(str(path), found, "sampling defaults of the release", "download the file again, or remove it"))
        return {}


def match(cfg: K3Config, shards: Shards) -> list[Finding]:
    """Tensors that the config wants against those that the headers have: missing, of another shape or dtype, and unknown ones."""
    dims, count = cfg.dims(), num_tensors(cfg)
    if count > MAX_TENSORS:
        return [Finding(str(shards.folder / CONFIG), f"{count:,} tensors called for", f"at most {MAX_TENSORS:,}", _OTHER_FILES)]
    missing, wrong_shape, wrong_dtype, found = [], [], [], 0
    for layer, weight in all_weights(cfg):
        allowed = stored_shapes(weight, dims)
        keys = checkpoint_keys(weight, layer, cfg)
        first = next((file for file in shards.files.values() if keys[0] in file.tensors), None)
        if first and not shards.twice and _kinds(first, keys) == {(weight.dtype, allowed[0])}:
            found += len(keys)
            continue
        files = list(map(shards.owner.get, keys))
        found += len(files) - files.count(None)
        for key, file in zip(keys, files):
            if file is None:
                if key not in shards.listed and key not in shards.unusable:
                    missing.append(key)
                continue
            dtype, shape, *_ = file.tensors[key]
            if shape not in allowed:
                wrong_shape.append((key, file, list(shape), list(allowed[0])))
            if dtype != weight.dtype:
                wrong_dtype.append((key, file, dtype, weight.dtype))
    unknown = {}
    if found < shards.num_tensors or shards.listed:
        wanted = {key for key, *_ in expected_tensors(cfg)}
        unknown = dict.fromkeys(key for names in (shards.owner, shards.listed) for key in names if key not in wanted)
    return mismatches(shards, missing, wrong_shape, wrong_dtype, list(unknown), "Kimi K3 text model")


def _kinds(file, keys: list[str]) -> set[tuple | None]:
    """Every (dtype, shape) among some tensors, None for those that are not in the file."""
    return {tensor and tensor[:2] for tensor in map(file.tensors.get, keys)}


def mismatches(shards: Shards, missing, wrong_shape, wrong_dtype, unknown, what: str) -> list[Finding]:
    """Findings about tensors: names that are `missing` or `unknown`, and (name, file, found, wanted) of a wrong shape or dtype."""
    where = str(shards.index or next(iter(shards.files.values())).path)
    findings = []
    if missing:
        findings.append(Finding(where, f"no {counted(missing, 'tensor')}", "every tensor that config.json calls for", _OTHER_FILES))
    for kind, noun in ((wrong_shape, "shape"), (wrong_dtype, "dtype")):
        if kind:
            key, file, found, wanted = kind[0]
            more = f" (the first of {len(kind)} tensors with a wrong {noun}{_spread(bad[1] for bad in kind)})" if len(kind) > 1 else ""
            findings.append(Finding(str(file.path), f"{key} with {noun} {found}{more}", f"{noun} {wanted}", _OTHER_FILES))
    if unknown:
        first = unknown[0]
        file = shards.owner[first].path if first in shards.owner else shards.index
        files = _spread(shards.owner[key] for key in unknown if key in shards.owner)
        findings.append(Finding(str(file), f"{counted(unknown, 'tensor')} of no known kind{files}", f"only tensors of a {what}",
                                _OTHER_FILES))
    return findings


def _spread(files) -> str:
    """", in 2 files: a, b", or "" for one file, which the finding names anyway."""
    names = list(dict.fromkeys(file.path.name for file in files))
    return f", in {counted(names, 'file', 8)}" if len(names) > 1 else ""
