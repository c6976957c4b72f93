"""Contents of a checkpoint's files by their SHA-256, against what the download left beside them or an earlier run recorded. Resumable."""
import concurrent.futures
import hashlib
import json
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError, UsageError
from .atomic_file import atomic_file
from .block_reader import AUTO, DIRECT, choose_mode, open_file, read_error
from .checkpoint import CONFIG, GENERATION_CONFIG
from .cuda_jit import cache_dir
from .findings import AGAIN, Finding
from .loader import page_buffer
from .machine import host
from .progress import LoadProgress
from .repack_manifest import MANIFEST
from .shards import INDEX
from .tokenizer import CONFIG_FILE, RANKS_FILE

CHUNK = 8 << 20
SMALL_FILES = (CONFIG, GENERATION_CONFIG, INDEX, RANKS_FILE, CONFIG_FILE)
MOST_THREADS = 16
SUMS = "SHA256SUMS"   # as sha256sum writes it
_HEX = re.compile(r"[0-9a-f]{64}")
_VERSION = 1


@dataclass(frozen=True)
class Expected:
    sha256: str
    source: str


@dataclass(frozen=True)
class _File:
    path: Path


class Manifest:
    """What is known of a model's files: name -> {"bytes", "mtime_ns", "sha256"}, saved after each.

    A run that did not end is taken up again: files that it hashed and that have not changed since are not read. A run that ended is
    the record that the next one compares with.
    """

    def __init__(self, path: Path, model: Path):
        self.path, self._model, self._lock = path, str(model), threading.Lock()
        saved = self._read()
        ended = saved.get("complete", False)
        self.recorded: dict[str, dict] = saved.get("files", {}) if ended else saved.get("recorded", {})
        self.done: dict[str, dict] = {} if ended else saved.get("files", {})

    def _read(self) -> dict:
        try:
            saved = json.loads(self.path.read_bytes())
            if saved["version"] != _VERSION or saved["model"] != self._model:
                raise UsageError(f"{self.path}: found the record of {saved['model']!r}, version {saved['version']}, wanted one of {self._model!r}",
                                 "name another --hash-manifest")
            return saved
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise UsageError(f"{self.path}: found no record of hashes ({e})", "remove it, or name another --hash-manifest") from e

    def hashed(self, path: Path) -> str | None:
        """The hash that this run, begun earlier, found of a file that is still the same."""
        entry, info = self.done.get(path.name), path.stat()
        return entry["sha256"] if entry and (entry["bytes"], entry["mtime_ns"]) == (info.st_size, info.st_mtime_ns) else None

    def add(self, path: Path, info: os.stat_result, sha256: str) -> None:
        with self._lock:
            self.done[path.name] = {"bytes": info.st_size, "mtime_ns": info.st_mtime_ns, "sha256": sha256}
            self.save()

    def save(self, complete: bool = False) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        state = {"version": _VERSION, "model": self._model, "complete": complete, "files": self.done} | ({} if complete else {"recorded": self.recorded})
        with atomic_file(self.path) as f:
            f.write(json.dumps(state, indent=1).encode())


def add_hashes(report, manifest: str | None, show: bool | None) -> None:
    """Hashes every file of a checked model that a load reads, and adds to its `preflight.Report` what came of it.

    Args:
        manifest: file of the record; None: in the cache folder.
    Raises:
        UsageError: the model has no files, or its record cannot be kept.
    """
    if report.survey is None:
        raise UsageError(f"--hash: {report.path} is made in memory and has no files", "give the folder of a checkpoint")
    shards = report.survey.shards
    small = [name for name in SMALL_FILES if (shards.folder / name).is_file()]
    names = small + [name for name in shards.files if name not in small]
    record = Manifest(Path(manifest) if manifest else default_manifest(shards.folder, cache_dir()), shards.folder)
    own = {name: Expected(sha256, MANIFEST) for name, sha256 in report.survey.hashes.items() if sha256}
    findings, facts = check_hashes(shards.folder, names, record, expected_hashes(shards.folder, names) | own, show, report.survey.again)
    report.findings += findings
    report.facts |= facts
    if facts["recorded_files"]:
        report.notes.append(f"{facts['recorded_files']} of {len(names)} files have nothing to compare with (no {SUMS}, no notes of a hub client): "
                            f"the next --hash compares with what is recorded now in {record.path}")


def default_manifest(folder: Path, cache: Path | None) -> Path:
    """Where hashes of the model in `folder` are recorded; UsageError where there is no cache folder."""
    if cache is None:
        raise UsageError("--hash: there is no folder for its record", "set K3CUDA_CACHE_DIR, or name a --hash-manifest")
    return cache / "hashes" / f"{hashlib.sha256(os.path.realpath(folder).encode()).hexdigest()[:16]}.json"


def expected_hashes(folder: Path, names) -> dict[str, Expected]:
    """What the download says of each file: sums in the folder, the hub client's notes, or a link into its store."""
    found, sums = {}, _sums(folder)
    for name in names:
        notes = folder / ".cache" / "huggingface" / "download" / f"{name}.metadata"
        etag = _line(notes, 1)   # commit, etag, time
        link = os.path.basename(os.readlink(folder / name)) if (folder / name).is_symlink() else ""
        if name in sums:
            found[name] = Expected(sums[name], SUMS)
        elif _HEX.fullmatch(etag):
            found[name] = Expected(etag, str(notes))
        elif _HEX.fullmatch(link):
            found[name] = Expected(link, "the name of the file that it links to")
    return found


def _sums(folder: Path) -> dict[str, str]:
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return {}
    pairs = [(line[:64].lower(), line[64:].lstrip(" *").removeprefix("./")) for line in lines]
    return {name: sha256 for sha256, name in pairs if _HEX.fullmatch(sha256)}


def _line(path: Path, number: int) -> str:
    try:
        return path.read_text(encoding="utf-8").splitlines()[number].strip()
    except (OSError, ValueError, IndexError):
        return ""


def check_hashes(folder: Path, names: list[str], manifest: Manifest, expected: dict[str, Expected], show: bool | None = False,
                 again: str = AGAIN) -> tuple[list[Finding], dict]:
    """Hashes files of a folder, several at a time, and compares.

    Args:
        names: files, in the order in which they are begun.
        manifest: takes what was found, file by file.
        show: whether progress is shown; None: on a terminal.
        again: the way out of a file that is not what it was.
    Returns:
        (what is wrong, facts): files hashed now, taken over from a run that did not end, verified, and with nothing to compare with.
    """
    paths = [folder / name for name in names]
    resumed = {p: sha256 for p in paths if (sha256 := manifest.hashed(p))}
    todo = [p for p in paths if p not in resumed]
    total = sum(p.stat().st_size for p in todo)
    direct = choose_mode(AUTO, map(_File, todo), total)[0] == DIRECT
    progress = LoadProgress(total, show, "hashing")
    stop = threading.Event()
    findings, hashes = [], dict(resumed)
    pool = concurrent.futures.ThreadPoolExecutor(max(1, min(MOST_THREADS, host()["cores"] or 1, len(todo))))
    try:
        jobs = {p: pool.submit(_hash, p, direct, manifest, progress, stop) for p in todo}
        for p, job in jobs.items():
            try:
                hashes[p] = job.result()
            except CheckpointError as e:
                findings.append(Finding(str(p), e.message.removeprefix(f"{p}: "), "a file that can be read to its end", e.hint))
    finally:   # an interrupt: whatever is finished is recorded, the rest is left alone
        stop.set()
        pool.shutdown(cancel_futures=True)
        progress.close()
    facts = {"hashed_files": len(todo) - len(findings), "resumed_files": len(resumed), "verified_files": 0, "recorded_files": 0}
    for p, sha256 in hashes.items():
        wanted = expected.get(p.name) or _recorded(manifest, p.name)
        if wanted is None:
            facts["recorded_files"] += 1
        elif wanted.sha256 == sha256:
            facts["verified_files"] += 1
        else:
            findings.append(Finding(str(p), f"SHA-256 {sha256}", f"{wanted.sha256}, by {wanted.source}", again))
    if not findings:   # a record of damage is nothing to compare with
        manifest.save(complete=True)
    return findings, facts | {"hash_manifest": str(manifest.path)}


def _recorded(manifest: Manifest, name: str) -> Expected | None:
    entry = manifest.recorded.get(name)
    return entry and Expected(entry["sha256"], f"the record {manifest.path} of an earlier run; remove it where the file was replaced on purpose")


def _hash(path: Path, direct: bool, manifest: Manifest, progress: LoadProgress, stop: threading.Event) -> str:
    digest, buffer, at = hashlib.sha256(), page_buffer(CHUNK), 0
    fd = open_file(path, os.O_DIRECT if direct else 0)
    try:
        info = os.fstat(fd)
        while at < info.st_size and not stop.is_set():
            try:
                count = os.preadv(fd, [buffer], at)
            except OSError as e:
                raise read_error(path, at, e) from e
            if not count:
                raise CheckpointError(f"{path}: ended at byte {at:,} of {info.st_size:,} while it was read", AGAIN)
            digest.update(buffer[:count])
            at += count
            progress.add(count)
    finally:
        os.close(fd)
    if at >= info.st_size:
        manifest.add(path, info, digest.hexdigest())
    return digest.hexdigest()
