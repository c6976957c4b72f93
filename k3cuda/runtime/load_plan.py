"""What is read of which file, in which order, for the ranks of one node: each byte once, in blocks of one buffer."""
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from typing import Iterator, NamedTuple

from ..config import K3Config
from ..weights import DTYPE_BYTES, Weight, checkpoint_keys, layer_weights, num_pieces, rank_bytes, rank_shape
from .safetensors_file import SafetensorsFile

BLOCK_BYTES = 32 << 20  # of one buffer: large enough for the full speed of a disk, small enough that sixteen are no burden
ALIGN = 4096            # of direct reads: offset, length and memory
GAP_BYTES = 256 << 10   # read along rather than make another request of: 25 us at 10 GB/s


@dataclass(frozen=True)
class Unit:
    """What becomes ready at once: `weights` of a layer (None: outside the layers), of the `experts` only where they have any."""

    layer: int | None
    weights: tuple[Weight, ...]
    experts: range


class Segment(NamedTuple):
    """Whole rows of one tensor, at byte `start` of its file."""

    start: int
    nbytes: int
    weight: Weight
    expert: int | None
    first_row: int
    rows: int


@dataclass
class Range:
    """Neighbouring bytes of a file, read by one request."""

    start: int
    stop: int
    segments: list[Segment]


@dataclass
class Block:
    """Ranges of one file that fill one buffer."""

    file: SafetensorsFile
    ranges: list[Range]

    @property
    def wanted_bytes(self) -> int:
        return sum(segment.nbytes for r in self.ranges for segment in r.segments)


def whole_layers(cfg: K3Config) -> Iterator[Unit]:
    """A unit a layer, in order; what lies outside the layers comes first."""
    for layer in (None, *range(cfg.num_hidden_layers)):
        yield Unit(layer, tuple(layer_weights(cfg, layer)), range(cfg.num_experts))


def parts_of_layers(cfg: K3Config, tp: int, ranks: range, most: int) -> Iterator[Unit]:
    """Units of about `most` bytes: the trunk of a layer, then its experts, as many at a time as fit."""
    for unit in whole_layers(cfg):
        trunk = tuple(w for w in unit.weights if not w.per_expert)
        experts = tuple(w for w in unit.weights if w.per_expert)
        yield Unit(unit.layer, trunk, range(0))
        if experts:
            one = sum(rank_bytes(w, cfg.dims(), tp, experts=1) for w in experts) * len(ranks)
            count = max(1, min(cfg.num_experts, most // one))
            for first in range(0, cfg.num_experts, count):
                yield Unit(unit.layer, experts, range(first, min(first + count, cfg.num_experts)))


def wanted_rows(weight: Weight, dims: dict[str, int], tp: int, ranks: range) -> range:
    """Rows of one tensor that some of `ranks` holds a part of; a weight cut by columns is wanted whole. None where no rank has a piece."""
    rows, pieces = dims[weight.shape[0]], num_pieces(weight, dims, tp)
    if weight.cut is None or weight.cut.axis:
        return range(rows if weight.cut is None or ranks.start < pieces else 0)
    return range(rows // pieces * min(ranks.start, pieces), rows // pieces * min(ranks.stop, pieces))


def row_bytes(weight: Weight, dims: dict[str, int], tp: int = 1) -> int:
    """Bytes of one row of one tensor, or of a rank's part of the row; what has one axis is a column of rows."""
    return prod(rank_shape(weight, dims, tp)[1:]) * DTYPE_BYTES[weight.dtype]


def wanted_bytes(cfg: K3Config, tp: int, ranks: range) -> int:
    """Bytes of the files that `ranks` of `tp` must read, each once."""
    dims = cfg.dims()
    return sum(len(wanted_rows(w, dims, tp, ranks)) * row_bytes(w, dims) * (len(unit.experts) if w.per_expert else 1)
               for unit in whole_layers(cfg) for w in unit.weights)


def blocks_of(unit: Unit, cfg: K3Config, owner: dict[str, SafetensorsFile], tp: int, ranks: range, capacity: int = BLOCK_BYTES) -> list[Block]:
    """The blocks of one unit, in the order of their files.

    Args:
        owner: tensor name -> file that has it.
        ranks: of `tp`, neighbours, which share what is read.
        capacity: bytes of a buffer, whole pages; at least two pages and one row.
    """
    dims, pieces, make = cfg.dims(), {}, tuple.__new__
    room = capacity - 2 * ALIGN   # the first and the last page of a range may hold little of it
    for weight in unit.weights:
        rows, size = wanted_rows(weight, dims, tp, ranks), row_bytes(weight, dims)
        step = max(1, room // size)
        keys = checkpoint_keys(weight, unit.layer, cfg)
        for expert in unit.experts if weight.per_expert else (None,):
            file = owner[key := keys[expert or 0]]
            start = file.data_start + file.tensors[key].begin
            of_file = pieces.setdefault(file, [])
            for row in range(rows.start, rows.stop, step):
                count = min(step, rows.stop - row)
                of_file.append(make(Segment, (start + row * size, count * size, weight, expert, row, count)))
    gap = GAP_BYTES if len(ranks) < tp else 0   # what lies in a gap is then another unit's, which reads it too
    return [block for file, segments in pieces.items() for block in into_blocks(file, segments, gap, capacity)]


def into_blocks(file: SafetensorsFile, segments: list, gap: int, capacity: int) -> Iterator[Block]:
    """Neighbours become one range, and ranges one block as long as its buffer has room. A segment begins with its `start` and `nbytes`."""
    segments.sort(key=itemgetter(0))
    ranges, used = [], 0          # of the block that is filled; pages of its closed ranges
    first = start = stop = 0      # of the open range: index of its first segment, bytes of the file
    for i, (begin, nbytes, *_) in enumerate(segments):
        end = begin + nbytes
        if i > first and begin - stop <= gap and used + _pages(start, end) <= capacity:
            stop = end
            continue
        if i > first:
            ranges.append(Range(start, stop, segments[first:i]))
            used += _pages(start, stop)
            if used + _pages(begin, end) > capacity:
                yield Block(file, ranges)
                ranges, used = [], 0
        first, start, stop = i, begin, end
    if segments:
        yield Block(file, [*ranges, Range(start, stop, segments[first:])])


def _pages(start: int, stop: int) -> int:
    """Bytes of all pages that hold some of start..stop."""
    return -(-stop // ALIGN) * ALIGN - start // ALIGN * ALIGN
