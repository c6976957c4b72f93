"""Writes a model as files in kernel order, one a rank and layer. Can be killed at any point: the next run goes on.

All of it grows in a folder whose name ends in UNFINISHED, file by file, each whole or not at all; the manifest there lists those that are
finished. When the last one is, the manifest says so and the folder gets its name.
"""
import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ..errors import CheckpointError, OutOfMemory, UsageError
from ..packing import Packed
from ..plan import build_plan
from ..weights import rank_bytes
from .atomic_file import atomic_file, unwritable
from .block_reader import AUTO
from .checkpoint import CONFIG, GENERATION_CONFIG
from .cuda_weights import packed_array
from .findings import error_of
from .hash_check import Manifest as HashRecord
from .hash_check import check_hashes, expected_hashes
from .loading import Loading
from .machine import host
from .made_config import config_json
from .preflight import check
from .rank_files import rank_file, rank_header, repack_units, stored_arrays
from .repack_manifest import UNFINISHED, Manifest, is_repacked, read_manifest
from .tokenizer import CONFIG_FILE, RANKS_FILE
from .write_checkpoint import write_json

log = logging.getLogger("k3cuda")

LOT_BYTES = 256 << 20   # of experts that are read, put in order and written at once
CARRIED = (CONFIG, GENERATION_CONFIG, RANKS_FILE, CONFIG_FILE)
_HASHES = "source-hashes.json"
_TOP_FREE = 64 << 20    # of the disk: room for manifests and what else a file system writes


def repack(model, tp: int, out, *, load_mode: str = AUTO, verify: bool = True, show: bool | None = False) -> dict:
    """Repacks `model` for `tp` ranks into the folder `out`; goes on where an earlier run stopped.

    Args:
        model: the folder of a checkpoint, one .safetensors file, or a name of named_models.py.
        verify: hash the files of the checkpoint first, and compare where there is something to compare with.
        show: whether progress is shown; None: on a terminal.
    Returns:
        what was done, JSON-ready: docs/cli.md has its keys.
    Raises:
        CheckpointError, ConfigError: the model is damaged or cannot be cut so. OutOfMemory: the disk is too small, or full.
        UsageError: `out` is something else, or another process writes there.
    """
    report = check(model, tp=tp, is_reference=False)
    if report.survey and report.survey.tp:
        raise UsageError(f"{model}: found a model that is repacked already, wanted the checkpoint", f"repack {report.survey.manifest.source}")
    source = report.open()
    try:
        return Repacking(source, report.survey, str(model), tp, Path(os.path.abspath(out))).run(load_mode, verify, show)
    finally:
        source.close()


class Repacking:
    """One run of `repack`."""

    def __init__(self, source, survey, model: str, tp: int, out: Path):
        self._source, self._survey, self._tp, self._out = source, survey, tp, out
        self._folder = out.with_name(out.name + UNFINISHED)
        self._layers = stored_arrays(build_plan(source.cfg, tp))
        files = survey.shards.files.values() if survey else ()
        stats = {file.path.name: file.path.stat() for file in files}
        self._manifest = Manifest(tp, os.path.realpath(model) if survey else model,
                                  {name: {"bytes": s.st_size, "mtime_ns": s.st_mtime_ns, "sha256": None} for name, s in stats.items()})

    def run(self, load_mode: str, verify: bool, show: bool | None) -> dict:
        loading = Loading(load_mode, show, "repacking")
        if self._is_there():
            return self._summary(loading)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise unwritable(self._folder, e) from e
        with self._alone():
            self._resume()
            todo = {layer: arrays for layer, arrays in self._layers.items() if not self._has(layer)}
            self._check_room(todo)
            if verify:
                self._hash_source(show)
            self._carry()
            self._write(todo, loading)
            self._finish()
        return self._summary(loading)

    # ---- what is there ----

    def _is_there(self) -> bool:
        """Whether nothing is left to do. A finished folder that lacks something becomes an unfinished one."""
        if not os.path.lexists(self._out) or self._out.is_dir() and not any(self._out.iterdir()):
            return False
        if not is_repacked(self._out):
            raise UsageError(f"{self._out} exists and is neither empty nor a repacked model", "name a folder that does not exist")
        found = self._match(self._out)
        if all(_is_whole(self._out, name, found.files) for name in found.files) and found.complete:
            self._manifest = found
            return True
        if self._folder.exists():
            raise UsageError(f"{self._out} lacks files, and {self._folder} is there too", "remove one of them")
        os.replace(self._out, self._folder)
        return False

    def _match(self, folder: Path) -> Manifest:
        """The manifest of an earlier run into `folder`. Raises UsageError where that one was of something else."""
        found, findings = read_manifest(folder)
        if found is None:
            raise UsageError(str(findings[0]))
        mine = self._manifest
        if found.tp != mine.tp or found.source != mine.source:
            raise UsageError(f"{folder}: found a repack of {found.source} for tp {found.tp}, wanted one of {mine.source} for tp {mine.tp}",
                             "remove it, or name another folder")
        if changed := [name for name, entry in found.source_files.items() if entry | {"sha256": None} != mine.source_files.get(name)]:
            raise UsageError(f"{folder}: begun from another {changed[0]}: size or time of {len(changed)} files of {mine.source} have changed since",
                             "remove it and repack again")
        return found

    @contextlib.contextmanager
    def _alone(self):
        """Nobody else writes into the folder meanwhile. The lock is the folder's own: it vanishes with the process."""
        fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as e:
            raise UsageError(f"{self._folder}: another process is repacking there", "wait for it, or name another folder") from e
        finally:
            os.close(fd)

    def _resume(self) -> None:
        for left in self._folder.glob(".*.part"):   # of a run that was killed
            left.unlink()
        if is_repacked(self._folder):
            found = self._match(self._folder)
            self._manifest.source_files = found.source_files   # the same files, perhaps hashed already
            self._manifest.files = {name: entry for name, entry in found.files.items() if _is_whole(self._folder, name, found.files)}
            log.info("%s: %d files are there already", self._folder, len(self._manifest.files))
        self._manifest.save(self._folder)

    def _has(self, layer: int | None) -> bool:
        return all(rank_file(rank, self._tp, layer) in self._manifest.files for rank in range(self._tp))

    def _check_room(self, todo: dict) -> None:
        needed = sum(rank_header(arrays, self._source.cfg, self._tp)[1] for arrays in todo.values()) * self._tp + _TOP_FREE
        free = shutil.disk_usage(self._folder).free
        if needed > free:
            raise OutOfMemory(f"{self._folder}: {needed / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB free", "free some space, or name another disk")

    # ---- what is made ----

    def _hash_source(self, show: bool | None) -> None:
        names = [name for name, entry in self._manifest.source_files.items() if entry["sha256"] is None]
        if not names:
            return
        folder, path = self._survey.shards.folder, self._folder / _HASHES
        record = HashRecord(path, folder)
        findings, _ = check_hashes(folder, names, record, expected_hashes(folder, names), show)
        if findings:
            raise error_of(findings, self._source.path)
        for name in names:
            self._manifest.source_files[name]["sha256"] = record.done[name]["sha256"]
        self._manifest.save(self._folder)
        path.unlink()

    def _carry(self) -> None:
        """Config and tokenizer come along, so that the folder is a model by itself."""
        if self._survey is None:
            write_json(self._folder / CONFIG, config_json(self._source.cfg))
            write_json(self._folder / GENERATION_CONFIG, self._source.generation_config)
            self._source.tokenizer().write_files(self._folder)
        for name in CARRIED:
            original = (self._survey.shards.folder if self._survey else self._folder) / name
            if original.is_file():
                content = original.read_bytes()
                with atomic_file(self._folder / name) as f:
                    f.write(content)
                self._manifest.files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    def _write(self, todo: dict, loading: Loading) -> None:
        cfg, ranks = self._source.cfg, range(self._tp)
        units = list(repack_units(todo, cfg, LOT_BYTES))
        slices = loading.slices(self._source, self._tp, ranks, [unit for _, unit in units], ahead=1, total=_bytes_of(units, cfg))
        with contextlib.closing(slices), ThreadPoolExecutor(host()["cores"] or 1, "k3cuda-repack") as pool:
            for layer, arrays in todo.items():
                self._write_layer(layer, arrays, slices, pool)
                self._manifest.save(self._folder)
            next(slices, None)   # there is no more: the loading ends

    def _write_layer(self, layer: int | None, arrays, slices, pool: ThreadPoolExecutor) -> None:
        """Every rank's file of one layer. They appear together, when all of them are whole."""
        cfg, tp = self._source.cfg, self._tp
        header, size = rank_header(arrays, cfg, tp)
        with contextlib.ExitStack() as stack:
            paths = [self._folder / rank_file(rank, tp, layer) for rank in range(tp)]
            files = [_HashedFile(path, stack.enter_context(atomic_file(path))) for path in paths]
            for file in files:
                file.write(header)
            for group, _ in repack_units({layer: arrays}, cfg, LOT_BYTES):
                _, raw = next(slices)

                def write(rank):
                    for p in group:
                        files[rank].write(self._packed(p, layer, lambda name: raw[name][rank]))

                for _ in pool.map(write, range(tp)):
                    pass
            assert all(file.size == size for file in files), (layer, size, [file.size for file in files])
        for rank, file in enumerate(files):
            self._manifest.files[rank_file(rank, tp, layer)] = {"bytes": size, "sha256": file.digest.hexdigest()}

    def _packed(self, p: Packed, layer: int | None, read) -> memoryview:
        try:
            array = packed_array(p, self._source.cfg, self._tp, read)
        except CheckpointError as e:   # a scale that kernel order cannot hold
            raise CheckpointError(f"{self._source.path}: layer {layer}, {p.name}: {e.message}", e.hint) from e
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data

    def _finish(self) -> None:
        self._manifest.complete = True
        self._manifest.save(self._folder)
        try:
            os.replace(self._folder, self._out)
        except OSError as e:
            raise unwritable(self._out, e) from e

    def _summary(self, loading: Loading) -> dict:
        files = self._manifest.files
        return {"folder": str(self._out), "source": self._manifest.source, "tp": self._tp, "layout_version": self._manifest.layout_version,
                "k3cuda_version": self._manifest.k3cuda_version, "files": len(files), "bytes": sum(entry["bytes"] for entry in files.values()),
                "source_files": len(self._manifest.source_files), "loading": loading.to_dict()}


class _HashedFile:
    """Counts and hashes what is written to `file`, which will be at `path`."""

    def __init__(self, path: Path, file):
        self._path, self._file, self.digest, self.size = path, file, hashlib.sha256(), 0

    def write(self, data) -> None:
        """Raises OutOfMemory where the disk is full."""
        try:
            self._file.write(data)
        except OSError as e:
            raise unwritable(self._path, e) from e
        self.digest.update(data)
        self.size += len(data)


def _bytes_of(units, cfg) -> int:
    """Bytes of the checkpoint's tensors that such units take, each once."""
    return sum(rank_bytes(w, cfg.dims(), experts=len(unit.experts)) for _, unit in units for w in unit.weights)


def _is_whole(folder: Path, name: str, files: dict[str, dict]) -> bool:
    """Whether a finished file is still there at its full size."""
    with contextlib.suppress(OSError):
        return name in files and (folder / name).stat().st_size == files[name]["bytes"]
    return False
