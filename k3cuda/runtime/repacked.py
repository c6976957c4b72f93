"""A repacked model: its files as they are opened and checked, and how they are read as one stream."""
import os
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Iterator, NamedTuple

import numpy as np

from ..errors import CheckpointError, ConfigError
from ..packing import FOLDED, PACKED, Packed
from ..plan import Plan, build_plan
from ..weights import BY_NAME, Weight, check_tp, num_pieces, rank_shape, stored_shapes
from .checkpoint import Survey
from .cuda_weights import packed_array, packed_bytes
from .findings import Finding
from .load_plan import ALIGN, Block, Unit, into_blocks
from .rank_files import layers_of, rank_file, rank_header, stored_arrays
from .repack_manifest import MANIFEST, UNFINISHED, read_manifest, repack_command
from .safetensors_file import SafetensorsFile, numpy_dtype
from .shards import Shards
from .slices import bad_values, trouble_of
from .tensor_source import TensorSource
from .tokenizer import Tokenizer
from .unpack import unpacked


class RepackedSurvey(Survey):
    """Everything that the manifest, the headers and the small files of a repacked folder say, and all that is wrong with them.

    Args:
        tp: ranks that are asked for; None: those that it has.
    """

    def __init__(self, path, tp: int | None = None):
        self._asked = tp
        super().__init__(path)

    @property
    def tp(self) -> int | None:
        """Ranks that it was repacked for; None where the manifest does not say."""
        return self.manifest and self.manifest.tp

    def _read(self) -> None:
        self.shards = Shards(self.path)
        self.manifest, self.findings = read_manifest(self.path)
        self.cfg = self._read_config()
        self.generation_config = self._read_generation_config()
        if self.manifest is None:
            return
        out = str(self.path).removesuffix(UNFINISHED)
        command = repack_command(self.manifest.source, self.tp, out)
        self.again = f"remove it and run `{command}` again, which makes only what is missing"
        if not self.manifest.complete:
            self.findings.append(Finding(str(self.path), f"an unfinished repack of {len(self.manifest.files)} files", "a finished one",
                                         f"run `{command}` again, which goes on where it stopped"))
        elif self._asked not in (None, self.tp):
            self.findings.append(Finding(str(self.path / MANIFEST), f"a model repacked for tp {self.tp}", f"tp {self._asked}",
                                         f"use --tp {self.tp}, or {repack_command(self.manifest.source, self._asked, 'DIR')}"))
        elif self.cfg:
            self._read_files()

    def _read_files(self) -> None:
        try:
            check_tp(self.cfg, self.tp)
        except ConfigError as e:
            self.findings.append(Finding(str(self.path / MANIFEST), e.message, "the tp of its files", "use the manifest and config.json of one repack"))
            return
        self.hashes = {name: entry["sha256"] for name, entry in self.manifest.files.items()}
        missing, expected = [], stored_arrays(build_plan(self.cfg, self.tp))
        for layer, arrays in expected.items():
            header, size = rank_header(arrays, self.cfg, self.tp)
            for rank in range(self.tp):
                name = rank_file(rank, self.tp, layer)
                if os.path.lexists(self.path / name):
                    self._read_file(name, header, size)
                else:
                    missing.append(name)
        if missing:
            count = len(expected) * self.tp
            self.shards.unreadable.update(missing)
            self.findings.append(Finding(str(self.path / missing[0]), f"no such file: {len(missing)} of {count} files missing",
                                         f"all files of {MANIFEST}", self.again))

    def _read_file(self, name: str, header: bytes, size: int) -> None:
        file, findings = SafetensorsFile.scan(self.path / name)
        self.findings += [replace(f, way_out=self.again) for f in findings]
        if file is None:
            self.shards.unreadable.add(name)
            return
        self.shards.files[name] = file
        self.shards.text_bytes += sum(t.end - t.begin for t in file.tensors.values())
        recorded = self.manifest.files.get(name, {}).get("bytes")
        if not findings and (file.data_start != len(header) or size != recorded or _head(file) != header):
            self.findings.append(Finding(str(file.path), f"other arrays ({recorded} bytes by {MANIFEST})", f"the {size:,} bytes that config.json calls for",
                                         self.again))

    @property
    def num_tensors(self) -> int:
        return sum(len(file.tensors) for file in self.shards.files.values())

    def open(self) -> "RepackedModel":
        self.check()
        return RepackedModel(self)


def _head(file: SafetensorsFile) -> bytes:
    with file.path.open("rb") as f:
        return f.read(file.data_start)


class Piece(NamedTuple):
    """Bytes of one array, at byte `start` of its file."""

    start: int
    nbytes: int
    name: str
    rank: int
    offset: int   # of the array


class PackedLayer:
    """Arrays of one layer as they are stored: name -> uint8 [ranks, bytes]."""

    def __init__(self, stored: tuple[Packed, ...], cfg, tp: int, ranks: range):
        self._first = ranks.start
        self.arrays = {p.name: np.empty((len(ranks), packed_bytes(p, cfg, tp)), np.uint8) for p in stored}

    def put(self, piece: Piece, view: np.ndarray) -> None:
        self.arrays[piece.name][piece.rank - self._first, piece.offset:piece.offset + piece.nbytes] = view

    def flush(self) -> None:
        """Nothing is left to do: `put` copies."""


class RepackedModel(TensorSource):
    """Weights of a repacked model. Its own ranks are read as a plain stream; any other part is put together from all of them."""

    def __init__(self, survey: RepackedSurvey):
        self.path, self.cfg, self.shards, self.tp = survey.path, survey.cfg, survey.shards, survey.tp
        self.generation_config, self._source = survey.generation_config, survey.manifest.source

    @classmethod
    def open(cls, path) -> "RepackedModel":
        """Raises CheckpointError, which lists everything that is wrong."""
        return RepackedSurvey(Path(path)).open()

    @cached_property
    def stored_arrays(self) -> dict[int | None, tuple[Packed, ...]]:
        return stored_arrays(build_plan(self.cfg, self.tp))

    def file(self, rank: int, layer: int | None) -> SafetensorsFile:
        return self.shards.files[rank_file(rank, self.tp, layer)]

    # ---- one stream: see Loader ----

    def load_bytes(self, tp: int, ranks: range) -> tuple[int, int]:
        """(bytes that are read, bytes that are kept) of `ranks`: the same, padding to whole tiles included. Raises CheckpointError: another tp."""
        if tp != self.tp:
            raise CheckpointError(f"{self.path}: found a model repacked for tp {self.tp}, wanted tp {tp}",
                                  f"use tp {self.tp}, or {repack_command(self._source, tp, 'DIR')}")
        nbytes = sum(packed_bytes(p, self.cfg, tp) for arrays in self.stored_arrays.values() for p in arrays) * len(ranks)
        return nbytes, nbytes

    def blocks(self, unit: Unit, tp: int, ranks: range, capacity: int) -> list[Block]:
        room, blocks = capacity - 2 * ALIGN, []
        for rank in ranks:
            file, pieces = self.file(rank, unit.layer), []
            for name, tensor in file.tensors.items():
                size = tensor.end - tensor.begin
                pieces += [Piece(file.data_start + tensor.begin + at, min(room, size - at), name, rank, at) for at in range(0, size, room)]
            blocks += into_blocks(file, pieces, 0, capacity)
        return blocks

    def open_target(self, unit: Unit, tp: int, ranks: range) -> PackedLayer:
        return PackedLayer(self.stored_arrays[unit.layer], self.cfg, tp, ranks)

    def checked(self, unit: Unit, target: PackedLayer, ranks: range) -> list[dict[str, np.ndarray]]:
        """For each rank its arrays as stored, uint8 by name. Raises CheckpointError for what no trained model holds."""
        held = [{name: array[i] for name, array in target.arrays.items()} for i in range(len(ranks))]
        for p in self.stored_arrays[unit.layer]:
            weight = BY_NAME[p.sources[0]]
            if len(p.sources) == 1 and not weight.count:
                for rank, arrays in zip(ranks, held):
                    values = arrays[p.name].view(np.float32) if weight.dtype == "F32" else arrays[p.name]
                    if trouble := trouble_of(weight, values):
                        raise bad_values(self.file(rank, unit.layer), p.name, trouble)
        return held

    def slices_of(self, unit: Unit, target: PackedLayer, ranks: range) -> dict[str, np.ndarray]:
        """Weight name -> [ranks, (experts,) rows, columns ..], as `HostSlices` has them."""
        held = [unpacked(arrays, self.stored_arrays[unit.layer], self.cfg, self.tp) for arrays in self.checked(unit, target, ranks)]
        return {name: np.stack([arrays[name] for arrays in held]) for name in held[0]}

    # ---- TensorSource ----

    def rank_slices(self, weight: Weight | str, layer: int | None, tp: int, rank: int) -> np.ndarray:
        weight = BY_NAME[weight] if isinstance(weight, str) else weight
        if tp != self.tp:
            return super().rank_slices(weight, layer, tp, rank)
        if not self._has(weight, layer, 0 if weight.count else None):
            raise KeyError(f"no {weight.name} at layer {layer}")
        parts = tuple(p for p in self.stored_arrays[layer] if weight.name.removesuffix("_scale") in p.sources)
        arrays = {p.name: self.file(rank, layer).array(p.name).reshape(-1).view(np.uint8) for p in parts}
        return unpacked(arrays, parts, self.cfg, tp)[weight.name]

    def stored(self, weight: Weight, layer: int | None, expert: int | None) -> np.ndarray:
        parts = [self.rank_slices(weight, layer, self.tp, rank) for rank in range(num_pieces(weight, self._dims, self.tp))]
        parts = [part if expert is None else part[expert] for part in parts]
        whole = np.concatenate(parts, axis=weight.cut.axis) if weight.cut else parts[0]
        shape = stored_shapes(weight, self._dims)[0]
        out = np.zeros(shape, whole.dtype)   # some are stored with padding
        out.reshape(-1)[:whole.size] = whole.reshape(-1)
        return out

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_dir(self.path)

    def close(self) -> None:
        for file in self.shards.files.values():
            file.close()


def packed_ops(plan: Plan, model: RepackedModel, rank: int, loading) -> Iterator[tuple[tuple[int | None, str], list[np.ndarray]]]:
    """((layer, stage), its packed arrays, uint8, in the order of `OpArgs.w`) of one rank, as a CUDA backend uploads them.

    Args:
        plan: of the step, for the model's own tp. loading: a runtime/loading.py, which counts.
    """
    ranks, units = range(rank, rank + 1), [Unit(layer, (), range(0)) for layer in layers_of(model.cfg)]
    for unit, target in loading.run(model, plan.tp, ranks, units):
        held, = model.checked(unit, target, ranks)

        def read(name):   # the factors of a folded product
            weight = BY_NAME[name]
            return held[name].view(numpy_dtype(weight.dtype)).reshape(rank_shape(weight, model.cfg.dims(), plan.tp))

        for op in plan.ops:
            if op.layer == unit.layer and (packed := PACKED.get(op.stage.name)):
                yield (op.layer, op.stage.name), [
                    packed_array(p, model.cfg, plan.tp, read).view(np.uint8) if p.how == FOLDED else held[p.name] for p in packed]
