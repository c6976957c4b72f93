"""Our own safetensors reader: every problem of a header at once, in words, and numpy arrays read by place."""
import os
import stat
from math import prod
from operator import eq
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import CheckpointError
from . import strict_json
from .downloads import hub_leftovers, other_kind, partial_download
from .findings import AGAIN, Finding, counted, error_of, shown

MAX_HEADER = 100_000_000  # the format's own limit
MAX_VALUES = 8_000_000    # JSON values in a header: bounds memory; the whole release in one file would have 5 million
# Small objects and lists in little text take the most memory for their length. A tensor's entry, one object and two lists, has 49 bytes.
OBJECT_BYTES, LIST_BYTES, MANY = 24, 8, 10_000
DTYPE_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64,
    "U64": 64,
}
_NUMPY = {"BOOL": "?", "U8": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2", "F16": "<f2", "I32": "<i4", "U32": "<u4", "F32": "<f4",
          "C64": "<c8", "F64": "<f8", "I64": "<i8", "U64": "<u8"}
_WANTED = "a safetensors file"


class Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    begin: int  # byte in the data part
    end: int


def numpy_dtype(dtype: str) -> np.dtype:
    """The numpy dtype of a safetensors one; KeyError where numpy has none."""
    if dtype == "BF16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(_NUMPY[dtype])


class SafetensorsFile:
    """The header of one file. `tensors` maps names to dtype, shape and place; nothing else is read before it is asked for."""

    def __init__(self, path: Path, tensors: dict[str, Tensor], data_start: int, metadata: dict[str, str], malformed=frozenset()):
        self.path, self.tensors, self.data_start, self.metadata = path, tensors, data_start, metadata
        self.malformed = malformed  # names whose entries are broken: there, but in no state to be read
        self._open = None

    @classmethod
    def open(cls, path) -> "SafetensorsFile":
        """Reads the header; CheckpointError lists everything that is wrong with the file."""
        file, findings = cls.scan(path)
        if findings:
            raise error_of(findings, path)
        return file

    @classmethod
    def scan(cls, path) -> tuple["SafetensorsFile | None", list[Finding]]:
        """The file, and all that is wrong with it. The file is None where no tensor could be told from its header."""
        path = Path(path)
        try:
            header, size = _read_header(path)
            entries, metadata, findings, all_ints = _parse(path, header)
        except _Bad as bad:
            return None, [bad.finding]
        tensors, more = _check_entries(path, entries, all_ints)
        malformed = entries.keys() - tensors.keys() if len(tensors) < len(entries) else frozenset()
        findings += more
        if not _back_to_back(tensors, size - 8 - len(header)):
            findings += _check_layout(path, tensors, size - 8 - len(header), whole=not malformed)
        return cls(path, tensors, 8 + len(header), metadata, malformed), findings

    def array(self, name: str, rows: slice | None = None) -> np.ndarray:
        """A tensor in its stored shape, or only some `rows` of its first axis; no other byte of the file is read.

        Raises:
            CheckpointError: the file ends before the tensor does, though its header was checked.
        """
        tensor = self.tensors[name]
        shape, begin, size = tensor.shape, tensor.begin, tensor.end - tensor.begin
        if rows is not None:
            row_bytes = size // max(shape[0], 1)
            shape = (rows.stop - rows.start, *shape[1:])
            begin, size = begin + rows.start * row_bytes, shape[0] * row_bytes
        return self._bytes(begin, size).view(numpy_dtype(tensor.dtype)).reshape(shape)

    def _bytes(self, begin: int, size: int) -> np.ndarray:
        # Reads, not a memory map: page faults of 4 KB are slow, and a file that shrinks would end the process.
        if self._open is None:
            self._open = self.path.open("rb", buffering=0)
        out = np.empty(size, np.uint8)
        done = 0
        while done < size:
            try:
                count = os.preadv(self._open.fileno(), [out[done:]], self.data_start + begin + done)
            except OSError as e:
                raise CheckpointError(f"{self.path}: an error on reading ({e.strerror or e})", "check the disk, or download the file again") from e
            if not count:
                raise CheckpointError(f"{self.path}: ended while it was read: it has become shorter since it was checked", AGAIN)
            done += count
        return out

    def close(self) -> None:
        """Closes the file; the next read opens it again."""
        if self._open is not None:
            self._open.close()
            self._open = None


class _Bad(Exception):
    def __init__(self, path: Path, found: str, wanted: str, way_out: str = AGAIN):
        super().__init__(found)
        self.finding = Finding(str(path), found, wanted, way_out)


def _read_header(path: Path) -> tuple[bytes, int]:
    """The header's JSON and the size of the file. Opens only regular files, reads no more than a header may have."""
    try:
        if partial := partial_download(path):
            raise _Bad(path, f"an unfinished download ({partial})", "the whole file", "let the download finish or start it again")
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise _Bad(path, "no regular file", _WANTED, "give the folder of a checkpoint or one .safetensors file")
        if info.st_size == 0:
            raise _Bad(path, "0 bytes", _WANTED)
        with path.open("rb") as f:
            length = _header_length(path, f.read(512), info.st_size)
            f.seek(8)
            return f.read(length), info.st_size
    except FileNotFoundError:
        if path.is_symlink():
            raise _Bad(path, f"a link to {os.readlink(path)}, which does not exist", _WANTED) from None
        raise _Bad(path, f"no such file{hub_leftovers(path.parent)}", _WANTED, "download it, or correct the path") from None
    except (OSError, ValueError) as e:  # ValueError: a NUL in the path
        why = getattr(e, "strerror", None) or e
        raise _Bad(path, f"an error on reading ({why})", "a readable file", "check permissions and disk") from None


def _header_length(path: Path, head: bytes, size: int) -> int:
    if kind := other_kind(head):
        raise _Bad(path, kind[0], _WANTED, kind[1])
    if len(head) < 8:
        raise _Bad(path, f"{size} bytes", "at least the 8 bytes of a header length")
    length = int.from_bytes(head[:8], "little")
    if length < 2:
        empty = ", perhaps space set aside for a download that never began" if not any(head) else ""
        raise _Bad(path, f"header length {length}{empty}", "a JSON header")
    if length > MAX_HEADER:
        raise _Bad(path, f"header length {length:,}", f"at most {MAX_HEADER:,}",
                   "this is no safetensors file, or it is damaged: " + AGAIN)
    if length > size - 8:
        raise _Bad(path, f"{size:,} bytes, less than its own header of {length:,}: truncated by at least {length + 8 - size:,} bytes",
                   "the whole file")
    return length


def _parse(path: Path, header: bytes) -> tuple[dict, dict, list[Finding], bool]:
    """Tensor entries as JSON gave them, the metadata, what is wrong with the object as a whole, and whether all its numbers are ints."""
    if not header.startswith(b"{"):
        raise _Bad(path, f"a header that begins with {shown(header[:1])}", "a JSON object")
    values = header.count(b",") + header.count(b"{") + header.count(b"[") if len(header) > MAX_VALUES else 0
    if values > MAX_VALUES:
        raise _Bad(path, f"{values:,} values in the header", f"at most {MAX_VALUES:,}")
    objects, lists = header.count(b"{"), header.count(b"[")
    if objects + lists > MANY and objects * OBJECT_BYTES + lists * LIST_BYTES > len(header):
        raise _Bad(path, f"{objects:,} objects and {lists:,} lists in a header of {len(header):,} bytes", "entries of tensors, which are longer")
    try:
        top, repeated, all_ints = strict_json.loads(header)
    except (ValueError, RecursionError) as e:
        raise _Bad(path, f"a header that is no JSON ({shown(e)})", "a JSON object") from None
    findings = []
    if repeated:
        findings.append(Finding(str(path), "in its header " + counted(repeated, "repeated name"), "each tensor once", AGAIN))
    metadata = top.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not (isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())):
        findings.append(Finding(str(path), "__metadata__ that does not map names to strings", "strings", AGAIN))
        metadata = {}
    return top, metadata, findings, all_ints and b"true" not in header and b"false" not in header


def _check_entries(path: Path, entries: dict, all_ints: bool) -> tuple[dict[str, Tensor], list[Finding]]:
    """The well-formed tensors, and one finding for each kind of malformed entry.

    The release has half a million entries of thirty kinds: a kind that was found sound once is only compared. 1.0 and True equal 1,
    so this is for headers without them.
    """
    tensors, bad, kinds, make = {}, {}, {}, tuple.__new__
    for name, entry in entries.items():
        try:
            begin, end = entry["data_offsets"]
            dtype, shape, size = kinds[entry["dtype"], tuple(entry["shape"])]
            sound = all_ints and end - begin == size and 0 <= begin and end < 2**63 and name.isascii()
        except (TypeError, KeyError, ValueError):
            sound = False
        if not sound:
            if problem := _entry_problem(name, entry):
                bad.setdefault(problem[1], []).append((name, problem[0]))
                continue
            begin, end = entry["data_offsets"]
            dtype, shape, _ = kinds[entry["dtype"], tuple(entry["shape"])] = entry["dtype"], tuple(entry["shape"]), end - begin
        tensors[name] = make(Tensor, (dtype, shape, begin, end))
    return tensors, [Finding(str(path), _first(names), wanted, AGAIN) for wanted, names in bad.items()]


def _first(named: list[tuple[str, str]]) -> str:
    name, problem = named[0]
    return f"{shown(name)} with {problem}" + (f", and {len(named) - 1} more like it" if len(named) > 1 else "")


def _whole(x, limit: int = 2**63) -> bool:
    return type(x) is int and 0 <= x < limit


def _entry_problem(name: str, entry) -> tuple[str, str] | None:
    """(found, wanted) of what is wrong with one tensor's entry on its own."""
    if name.encode("utf-8", "replace").decode() != name:
        return "a name that is no text", "Unicode text"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        return f"the entry {shown(entry, 60)}", "an object with dtype, shape and data_offsets"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        return f"dtype {shown(dtype, 40)}", "a dtype of the safetensors format"
    if not (isinstance(shape, list) and len(shape) <= 64 and all(map(_whole, shape))):
        return f"shape {shown(shape, 60)}", "a list of non-negative sizes"
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(map(_whole, offsets)) and offsets[0] <= offsets[1]):
        return f"data_offsets {shown(offsets, 60)}", "data_offsets of [begin, end] with 0 <= begin <= end"
    bits, found = prod(shape) * DTYPE_BITS[dtype], (offsets[1] - offsets[0]) * 8
    if bits != found:
        return f"{found // 8:,} bytes for {dtype} {shape}", f"as many bytes as shape x dtype says ({shown(str(-(-bits // 8)), 30)})"
    return None


def _check_layout(path: Path, tensors: dict[str, Tensor], data_size: int, whole: bool) -> list[Finding]:
    """Overlaps, gaps (where the `whole` header could be read), and a file that ends too early or too late."""
    overlaps, gaps, at, before = [], [], 0, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if tensor.begin < at or whole and tensor.begin > at:
            kind, what = (overlaps, "overlaps") if tensor.begin < at else (gaps, "leaves a gap after")
            kind.append(f"{shown(name)} {what} {shown(before)} by {abs(tensor.begin - at):,} bytes")
        if tensor.end >= at:
            at, before = tensor.end, name
    findings = []
    for kind, noun in ((overlaps, "overlap"), (gaps, "gap")):
        if kind:
            more = f", and {len(kind) - 1} more {noun}s" if len(kind) > 1 else ""
            findings.append(Finding(str(path), kind[0] + more, "tensors back to back", AGAIN))
    if data_size < at:
        findings.append(Finding(str(path), f"{data_size:,} bytes of data: truncated by {at - data_size:,} bytes", f"{at:,} bytes", AGAIN))
    elif data_size > at and whole:
        findings.append(Finding(str(path), f"{data_size:,} bytes of data: {data_size - at:,} bytes too long", f"{at:,} bytes", AGAIN))
    return findings


def _back_to_back(tensors: dict[str, Tensor], data_size: int) -> bool:
    """Whether tensors fill the data exactly, none of them empty: where sorted begins and ends meet, one tensor covers each byte."""
    begins, ends = [t[2] for t in tensors.values()], [t[3] for t in tensors.values()]
    return not any(map(eq, begins, ends)) and [*sorted(begins), data_size] == [0, *sorted(ends)]
