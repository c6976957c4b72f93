"""The manifest of a repacked model: which files it has, of which checkpoint, in which layout."""
import json
import os
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .. import __version__
from .atomic_file import atomic_file
from .downloads import no_text
from .findings import Finding, shown
from .rank_files import LAYOUT_VERSION
from .shards import inside

MANIFEST = "repack.json"
MAX_BYTES = 64_000_000   # of the manifest; that of the release for 16 ranks has 0.3 million
UNFINISHED = ".unfinished"   # behind the name of the folder until everything is in it


@dataclass
class Manifest:
    """`files` and `source_files` are name -> {"bytes", "sha256"}; of a source file also "mtime_ns", and null for a hash that is not known."""

    tp: int
    source: str                       # the folder or file that was repacked, or the name of a made model
    source_files: dict[str, dict]
    files: dict[str, dict] = field(default_factory=dict)   # those that are finished
    complete: bool = False
    layout_version: int = LAYOUT_VERSION
    k3cuda_version: str = __version__

    def save(self, folder: Path) -> None:
        with atomic_file(folder / MANIFEST) as f:
            f.write(json.dumps(asdict(self), indent=1).encode())


def repack_command(source: str, tp: int | str, out: str) -> str:
    return f"k3cuda repack {shlex.quote(source)} --tp {tp} --out {shlex.quote(out)}"


def is_repacked(path) -> bool:
    return os.path.lexists(Path(path) / MANIFEST)


def default_tp(model) -> int:
    """Ranks that a model is cut into where nobody says: what its files are for, else 1. `model` is a path or an open source of tensors."""
    if not isinstance(model, (str, os.PathLike)):
        return getattr(model, "tp", None) or 1
    manifest = read_manifest(Path(model))[0] if is_repacked(model) else None   # whoever opens it says what is wrong
    return manifest.tp if manifest else 1


def read_manifest(folder: Path) -> tuple[Manifest | None, list[Finding]]:
    """The manifest, and what is wrong with it; None where it says nothing that can be used."""
    path = folder / MANIFEST
    wanted, again = "the manifest of a repacked model", f"repack the checkpoint into another folder: {repack_command('MODEL', 'N', 'DIR')}"
    if kind := no_text(path):
        return None, [Finding(str(path), kind[0], wanted, again)]
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            return None, [Finding(str(path), f"{size:,} bytes", f"at most {MAX_BYTES:,}", again)]
        top = json.loads(path.read_bytes())
    except OSError as e:
        return None, [Finding(str(path), f"an error on reading ({e.strerror or e})", wanted, "check permissions and disk")]
    except (ValueError, RecursionError) as e:
        return None, [Finding(str(path), f"no JSON ({shown(e)})", wanted, again)]
    version = top.get("layout_version") if isinstance(top, dict) else None
    if type(version) is not int:
        return None, [Finding(str(path), "no layout_version", wanted, again)]
    if version != LAYOUT_VERSION:
        source, tp = top.get("source", "MODEL"), top.get("tp", "N")
        return None, [Finding(str(path), f"layout version {version}, of k3cuda {shown(top.get('k3cuda_version'), 40)}",
                              f"layout version {LAYOUT_VERSION}, of k3cuda {__version__}",
                              f"repack it with this version: {repack_command(shown(source), shown(tp, 20), 'DIR')}")]
    if not _is_sound(top):
        return None, [Finding(str(path), "fields that are missing or of a wrong kind", wanted, again)]
    return Manifest(**top), []


def _is_sound(top: dict) -> bool:
    kinds = {"tp": int, "source": str, "source_files": dict, "files": dict, "complete": bool, "layout_version": int, "k3cuda_version": str}
    return (top.keys() == kinds.keys() and all(type(top[name]) is kind for name, kind in kinds.items()) and 1 <= top["tp"] <= 1024
            and all(_is_entry(name, entry) for files in (top["files"], top["source_files"]) for name, entry in files.items()))


def _is_entry(name: str, entry) -> bool:
    return inside(name) and isinstance(entry, dict) and type(entry.get("bytes")) is int and isinstance(entry.get("sha256", 0), str | None)
