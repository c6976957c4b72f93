"""A checkpoint of any size in holes: every name, shape, offset and byte count of a release, and of its data only samples.

Files with holes take no disk for what was never written, so the layout of 1.56 TB fits in 200 MB. Samples carry position codes
(made_model.py): whoever reads one at the wrong place, or gives it to the wrong rank, reads something else.
"""
import math
from pathlib import Path

import numpy as np

from ..config import K3Config
from ..errors import UsageError
from ..weights import DTYPE_BYTES, LEGAL_TP, Weight, all_weights, checkpoint_key
from .checkpoint import CONFIG, GENERATION_CONFIG
from .made_config import config_json
from .made_model import position_values
from .write_checkpoint import file_header, shard_name, shard_shapes, write_index, write_json

VISION_BYTES = 894_717_952        # of the release
VISION_TENSORS = (3, 165)         # mm_projector in a shard of its own, vision_tower in the next
WHOLE_BYTES = 64 << 10            # of trunk tensors up to this size every byte is a sample
PARTS = LEGAL_TP[-1]              # a larger tensor has sampled rows in each of so many parts, so that every rank has some


def write_standin(cfg: K3Config, path, *, vision_bytes: int = VISION_BYTES) -> Path:
    """Writes the folder `path`, which must not exist or be empty; returns it.

    Args:
        cfg: sizes of everything; shards, names and order are the release's.
        vision_bytes: of the two shards of pictures, all holes.
    Raises:
        UsageError: the folder is not empty.
        OSError: the disk is full, or cannot hold files with holes as large as a shard.
    """
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"{path} exists and is not an empty folder", "name a folder that does not exist")
    path.mkdir(parents=True, exist_ok=True)
    layers = [*range(cfg.num_hidden_layers), None]
    parts = [shard_shapes(cfg, layer) for layer in layers] + _vision(vision_bytes)
    by_layer: dict[int | None, list] = {}
    for sample in samples(cfg):
        by_layer.setdefault(sample[1], []).append(sample)
    weight_map, total = {}, 0
    for n, (part, layer) in enumerate(zip(parts, [*layers, *(-1 for _ in VISION_TENSORS)]), 1):
        name = shard_name(n, len(parts))
        total += _write_shard(path / name, part, cfg, by_layer.get(layer, ()))
        weight_map |= dict.fromkeys(part, name)
    write_index(path, weight_map, total)
    write_json(path / CONFIG, config_json(cfg))
    write_json(path / GENERATION_CONFIG, {"temperature": 1.0, "top_p": 0.95})
    return path


def samples(cfg: K3Config):
    """Yields (weight, layer, expert, rows) of every written piece: rows of the tensor taken as [rows, columns]."""
    dims, n, chosen = cfg.dims(), cfg.num_experts, (None, *_thorough(cfg))
    for layer, w in all_weights(cfg):
        thorough = layer in chosen
        rows, columns = _matrix(w, dims)
        if not w.per_expert:
            if rows * columns * DTYPE_BYTES[w.dtype] <= WHOLE_BYTES:
                yield w, layer, None, range(rows)
            elif thorough or layer == 0:
                yield from ((w, layer, None, part) for part in _row_of_each_part(rows))
            continue
        for expert in {layer * 37 % n, *((0, n - 1) if thorough else ())}:
            if thorough and w.mxfp4 == "scale":
                yield w, layer, expert, range(rows)
            else:   # elsewhere one row of one part: a row takes a block of the disk
                parts = list(_row_of_each_part(rows))
                yield from ((w, layer, expert, part) for part in (parts if thorough else parts[layer % len(parts)::PARTS]))


def sample_values(cfg: K3Config, weight: Weight, layer: int | None, expert: int | None, rows: range) -> np.ndarray:
    """What a sample holds, in the stored dtype, [rows, columns]."""
    _, columns = _matrix(weight, cfg.dims())
    return position_values(weight, checkpoint_key(weight, layer, expert), rows, columns)


def _thorough(cfg: K3Config) -> tuple[int, ...]:
    """A KDA and an MLA layer with experts, and the last layer."""
    mla = [i for i in range(cfg.num_hidden_layers) if not cfg.is_kda(i)]
    return (1, *mla[:1], cfg.num_hidden_layers - 1)


def _row_of_each_part(rows: int):
    """One row in each of PARTS equal parts, at another place in each."""
    parts = min(PARTS, rows)
    size = rows // parts
    for i in range(parts):
        row = i * size + i * 7 % size
        yield range(row, row + 1)


def _matrix(weight: Weight, dims: dict[str, int]) -> tuple[int, int]:
    """Rows and columns of one tensor without padding; what has one axis is a column of rows."""
    return dims[weight.shape[0]], math.prod(dims[name] for name in weight.shape[1:])


def _vision(total: int) -> list[dict]:
    """Shapes of filler in the two shards of pictures, of `total` bytes together."""
    projector, tower = VISION_TENSORS
    sizes = [total // 2 // (projector + tower)] * (projector + tower)
    sizes[-1] += total // 2 - sum(sizes)
    names = [f"mm_projector.{i}.weight" for i in range(projector)] + [f"vision_tower.blocks.{i}.weight" for i in range(tower)]
    shapes = {name: ("BF16", (size,)) for name, size in zip(names, sizes)}
    return [{name: shapes[name] for name in group} for group in (names[:projector], names[projector:])]


def _write_shard(path: Path, shapes: dict, cfg: K3Config, written) -> int:
    """Header, a hole of the right size, and the samples in it; returns the bytes of its tensors."""
    _, header, begins, size = file_header(shapes)
    with path.open("wb") as f:
        f.write(header)
        f.truncate(len(header) + size)
        for weight, layer, expert, rows in written:
            values = sample_values(cfg, weight, layer, expert, rows)
            f.seek(len(header) + begins[checkpoint_key(weight, layer, expert)] + rows.start * values[0].nbytes)
            f.write(values.view(np.uint8).data)
    return size
