"""The files of a checkpoint: which exist, what their headers say, and whether the index tells the truth."""
import os
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from pathlib import Path

from ..config import RELEASED
from ..weights import SKIPPED_PREFIXES
from . import strict_json
from .downloads import how_to_download, hub_leftovers, no_text, partial_download
from .findings import AGAIN, Finding, counted, shown
from .safetensors_file import SafetensorsFile

INDEX, SINGLE, SUFFIX = "model.safetensors.index.json", "model.safetensors", ".safetensors"
MAX_INDEX = 256_000_000  # bytes; the release's index has about 60 million
_ONE_RELEASE = "download index and shards of one release"
_WANTED = "a JSON object whose weight_map gives the file of each tensor"


@dataclass
class Shards:
    """Every text tensor of a checkpoint by name, with the file it lies in."""

    folder: Path
    index: Path | None = None
    files: dict[str, SafetensorsFile] = field(default_factory=dict)  # by file name, in the index's order
    twice: set[str] = field(default_factory=set)                     # tensor names that stand in more than one file
    listed: dict[str, str] = field(default_factory=dict)             # tensor name -> file name, by the index; not those that lie there
    unlisted: dict[str, list[str]] = field(default_factory=dict)     # file name -> names there that the index lists nowhere, or that an earlier file has
    unusable: set[str] = field(default_factory=set)                  # tensor names that stand somewhere, but wrongly
    unreadable: set[str] = field(default_factory=set)                # file names without a header that can be used
    num_tensors: int = 0  # names of the text model
    text_bytes: int = 0
    skipped_tensors: int = 0
    skipped_files: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @cached_property
    def owner(self) -> dict[str, SafetensorsFile]:
        """Tensor name -> file; the first that has it. Made when it is asked for: a whole release is found sound without a table of all its names."""
        owner = {}
        for file in self.files.values():
            for key in text_names(file):
                owner.setdefault(key, file)
        return owner

    def add(self, file, found: str, wanted: str, way_out: str) -> None:
        self.findings.append(Finding(str(file), found, wanted, way_out))


def text_names(file: SafetensorsFile) -> list[str]:
    """Names of a file's tensors that belong to the text model."""
    return [key for key in file.tensors if not key.startswith(SKIPPED_PREFIXES)]


def open_shards(path: Path) -> Shards:
    """Reads the index and every header of the folder, or the one file, at `path`. Never raises for what it finds there."""
    if path.suffix == SUFFIX and not os.path.isdir(path):
        shards = Shards(path.parent)
        _scan(shards, [path.name])
    elif not os.path.isdir(path):
        shards = Shards(path)
        shards.add(path, "no folder and no .safetensors file" if os.path.exists(path) else "no such folder", "the folder of a checkpoint",
                   "this name is a configuration without weights, for plan and bench only" if str(path) == RELEASED else
                   how_to_download(path) or "correct the path, or download the release there")
    elif os.path.lexists(path / INDEX):
        shards = Shards(path, index=path / INDEX)
        _read_index(shards)
    else:
        shards = Shards(path)
        _scan_without_index(shards)
    return shards


def _scan_without_index(shards: Shards) -> None:
    others = sorted(p.name for p in shards.folder.glob("*" + SUFFIX) if p.name != SINGLE)
    if os.path.lexists(shards.folder / SINGLE) or partial_download(shards.folder / SINGLE) or not others:
        _scan(shards, [SINGLE])
        return
    shards.add(shards.folder / INDEX, f"no such file, but {counted(others, 'shard')}", "the index that names the shards",
               "download it, or give one .safetensors file")


def _read_index(shards: Shards) -> None:
    if kind := no_text(shards.index):
        shards.add(shards.index, kind[0], _WANTED, kind[1])
        return
    try:
        size = shards.index.stat().st_size
        if size > MAX_INDEX:
            shards.add(shards.index, f"{size:,} bytes", f"at most {MAX_INDEX:,}", AGAIN)
            return
        top, repeated, _ = strict_json.loads(shards.index.read_bytes())   # without a name: a release's text is not kept beside its values
    except OSError as e:
        shards.add(shards.index, f"an error on reading ({e.strerror or e})", "a readable file", "check permissions and disk")
        return
    except (ValueError, RecursionError) as e:
        shards.add(shards.index, f"no JSON ({shown(e)})" if size else "0 bytes", _WANTED, AGAIN)
        return
    if repeated:
        shards.add(shards.index, f"{counted(repeated, 'name')}, given more than once", "each tensor once", AGAIN)
    weight_map = top.get("weight_map") if isinstance(top, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        found = "no weight_map" if weight_map is None else f"weight_map {shown(weight_map, 40)}"
        shards.add(shards.index, found, _WANTED, AGAIN)
        return
    _read_map(shards, weight_map)
    _check_total(shards, top.get("metadata"))


def _file_name(name) -> str | None:
    return name if isinstance(name, str) else None


def inside(name) -> bool:
    """True for a plain file name: a shard must lie in the checkpoint's own folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def _read_map(shards: Shards, weight_map: dict) -> None:
    names = set(map(_file_name, weight_map.values()))
    outside = {name for name in names if not inside(name)}
    if outside:
        bad = [key for key, name in weight_map.items() if not isinstance(name, str) or name in outside]
        shards.add(shards.index, f"{shown(bad[0])} in the file {shown(repr(weight_map[bad[0]]), 60)}"
                   + (f", and {len(bad) - 1} more like it" if len(bad) > 1 else ""), "a file name without a folder", AGAIN)
        shards.unusable.update(bad)
        weight_map = {key: name for key, name in weight_map.items() if isinstance(name, str) and name not in outside}
    skipped = [key for key in weight_map if key.startswith(SKIPPED_PREFIXES)]
    skipped_files = set(map(weight_map.pop, skipped))
    shards.listed = weight_map
    text_files = list(dict.fromkeys(weight_map.values()))
    shards.skipped_files = sorted(skipped_files.difference(text_files))
    shards.skipped_tensors = len(skipped)
    missing = [name for name in shards.skipped_files if not os.path.exists(shards.folder / name)]
    if missing:
        shards.notes.append(f"{counted(missing, 'skipped shard')} not there: not needed")
    _scan(shards, text_files)
    _compare(shards)


def _scan(shards: Shards, names: list[str]) -> None:
    missing = [name for name in names if not os.path.lexists(shards.folder / name) and not partial_download(shards.folder / name)]
    if shards.index is None:
        missing = []  # the reader's own words do
    elif missing:
        file, found = shards.folder, f"no {', '.join(map(shown, missing[:5]))}"
        if len(missing) == 1:
            file, found = shards.folder / missing[0], "no such file"
        found += f": {len(missing)} of {len(names)} shards missing{hub_leftovers(shards.folder)}"
        shards.add(file, found, f"all shards of {shards.index.name}", "download them, or correct the path")
    shards.unreadable.update(missing)
    regular = [_scan_one(shards, name) for name in names if name not in shards.unreadable]
    if not all(regular):
        _find_twice(shards)


def _scan_one(shards: Shards, name: str) -> bool:
    """Whether all that lies in the file is listed there: where that holds for every file, no tensor lies in two."""
    file, findings = SafetensorsFile.scan(shards.folder / name)
    shards.findings += findings
    if file is None:
        shards.unreadable.add(name)
        return True
    shards.files[name] = file
    shards.unusable |= file.malformed
    text = text_names(file)
    shards.num_tensors += len(text)
    shards.text_bytes += sum([end - begin for _, _, begin, end in map(file.tensors.__getitem__, text)])
    if shards.index is None:
        shards.skipped_tensors += len(file.tensors) - len(text)
        return True
    return _strike_off(shards, name, text)


def _strike_off(shards: Shards, here: str, keys: list[str]) -> bool:
    """Takes tensors that lie where the index says off `listed`: two copies of half a million names are 70 MB. Whether all do."""
    names = list(map(shards.listed.pop, keys, repeat(None)))
    if names.count(here) == len(names):
        return True
    for key, name in zip(keys, names):
        if name is None:
            shards.unlisted.setdefault(here, []).append(key)
        elif name != here:
            shards.listed[key] = name
    return False


def _find_twice(shards: Shards) -> None:
    for file in shards.files.values():
        again = {}
        for key in sorted(text_names(file)):
            if (first := shards.owner[key]) is not file:
                again.setdefault(first.path.name, []).append(key)
        for first, keys in again.items():
            shards.twice.update(keys)
            shards.num_tensors -= len(keys)
            shards.add(file.path, f"{counted(keys, 'tensor')} that {first} has too", "each tensor once", _ONE_RELEASE)


def _compare(shards: Shards) -> None:
    """What the index says against what the headers say."""
    lost, moved = {}, []
    for key, name in shards.listed.items():
        file = shards.files.get(name)
        if file is None or key in file.malformed:
            continue
        if key in shards.owner:
            moved.append(key)
        else:
            lost.setdefault(name, []).append(key)
    for name, keys in lost.items():
        shards.add(shards.folder / name, f"no {counted(keys, 'tensor')}, which {shards.index.name} says lie here", "every listed tensor",
                   AGAIN)
    if moved:
        key = moved[0]
        shards.add(shards.index, f"{counted(moved, 'tensor')} listed in {shards.listed[key]}",
                   f"{shards.owner[key].path.name}, where it lies", AGAIN)
    for name, keys in shards.unlisted.items():
        if keys := [key for key in keys if shards.owner[key] is shards.files[name]]:
            shards.add(shards.folder / name, f"{counted(keys, 'tensor')} that {shards.index.name} does not list", "only listed tensors", _ONE_RELEASE)


def _check_total(shards: Shards, metadata) -> None:
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is None or shards.unreadable or shards.findings:
        return
    text, exact = shards.text_bytes, not shards.skipped_tensors
    if type(total) is bool or not isinstance(total, (int, float)) or (total != text if exact else total < text):
        shards.add(shards.index, f"metadata.total_size {shown(total, 30)}", f"{'' if exact else 'at least '}{text:,}, the bytes of the "
                   "tensors" + ("" if exact else " of the text model"), _ONE_RELEASE)
