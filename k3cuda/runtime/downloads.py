"""What a download leaves when it was cut short, or saved something else under the file's name."""
import os
import re
import stat
from pathlib import Path

from ..errors import CheckpointError

_PARTIAL = (".incomplete", ".part", ".aria2", ".crdownload")  # what downloaders leave beside a file that is not whole

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def how_to_download(name) -> str | None:
    """What to do about a model that is not on this machine and may be a name on the hub; None for a path that is here or no such name."""
    name = str(name)
    if not _HUB_ID.fullmatch(name) or os.path.exists(name):
        return None
    folder = name.rpartition("/")[2]
    return f"nothing is downloaded for you: if it is a name on the hub, run `hf download {name} --local-dir {folder}` and give {folder}"


def check_is_here(name) -> None:
    """Raises CheckpointError for what may be a name on the hub and is no path on this machine."""
    if hint := how_to_download(name):
        raise CheckpointError(f"{name}: found no folder of that name here, wanted a checkpoint on this machine", hint)


def partial_download(path: Path) -> str:
    """The file that an unfinished download of `path` left beside it, or "". Where `path` exists, aria2's list of what it lacks."""
    if path.suffix in _PARTIAL:
        return path.name
    beside = (".aria2",) if os.path.lexists(path) else _PARTIAL  # aria2 sets aside the whole size at once
    return next((path.name + suffix for suffix in beside if os.path.exists(f"{path}{suffix}")), "")


def hub_leftovers(folder: Path) -> str:
    """Words about unfinished downloads in the hub client's own folders for `folder`, or ""."""
    for cache in (folder / ".cache" / "huggingface" / "download", folder.parent.parent / "blobs"):
        if left := sorted(cache.glob("*.incomplete")):
            return f" ({len(left)} unfinished .incomplete file{'s' if len(left) > 1 else ''} in {cache})"
    return ""


def no_text(path: Path) -> tuple[str, str] | None:
    """As `other_kind`, of a file by its path; also of what is no file: reading a pipe or a device could wait or go on for ever."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return "no regular file", "put the file itself there"
        with path.open("rb") as file:
            return other_kind(file.read(512))
    except (OSError, ValueError):
        return None   # whoever reads the file says what is wrong


def other_kind(head: bytes) -> tuple[str, str] | None:
    """(what it is, way out) of a file whose first bytes show that something else was saved under its name."""
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer", "run `git lfs pull` in its folder, or download the file itself"
    if start.startswith((b"<!doctype", b"<html", b"<?xml", b"<head", b"<!--")):
        return "an HTML or XML page", "the download saved an error or login page: download the file again"
    if head.startswith((b"GGUF", b"PK\x03\x04", b"\x80\x02")):
        return "a GGUF or torch file", "use the release's safetensors files"
    return None
