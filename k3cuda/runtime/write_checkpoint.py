"""Writes a model in the released layout: one layer a shard, an index, the configs, the tokenizer. Any size; one tensor in memory."""
import json
import shutil
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np

from ..config import K3Config
from ..errors import OutOfMemory, UsageError
from ..weights import DTYPE_BYTES, checkpoint_bytes, checkpoint_keys, layer_weights, stored_shapes
from .checkpoint import CONFIG, GENERATION_CONFIG
from .made_config import config_json
from .shards import INDEX, SINGLE
from .tensor_source import TensorSource

# The order in which the format's own writer puts dtypes; within one it sorts names, so that expert 10 follows expert 1.
_DTYPE_ORDER = ("F32", "BF16", "U8")
_METADATA = {"format": "pt"}

# Stand-ins for the picture half, in shards of their own as in the release: name -> shape, all BF16.
PROJECTOR = {"mm_projector.proj.0.weight": (32, 48), "mm_projector.proj.2.weight": (16, 32), "mm_projector.pre_norm.weight": (48,)}
TOWER = {"vision_tower.patch_embed.proj.weight": (8, 3, 4, 4)} | {f"vision_tower.encoder.blocks.{i}.wqkv.weight": (24, 8) for i in range(5)}


def write_checkpoint(source: TensorSource, path, *, vision: bool = False, single_file: bool = False) -> Path:
    """Writes every text tensor of `source` into the folder `path`, which is made.

    Args:
        source: a `MadeCheckpoint`, or anything else that has `cfg` and `stored`.
        path: a folder that is empty or does not exist.
        vision: add small shards of picture tensors, which readers skip.
        single_file: one model.safetensors without an index.
    Returns:
        the folder.
    Raises:
        UsageError: the folder is not empty.
        OutOfMemory: the disk has not enough room.
    """
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"{path} exists and is not an empty folder", "name a folder that does not exist")
    path.mkdir(parents=True, exist_ok=True)
    needed, free = checkpoint_bytes(source.cfg), shutil.disk_usage(path).free
    if needed > free:
        raise OutOfMemory(f"{path}: {needed / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB free", "choose another disk, or a smaller model")
    parts = [_layer(source, layer) for layer in (*range(source.cfg.num_hidden_layers), None)]
    if single_file:
        write_file(path / SINGLE, {key: entry for part in parts for key, entry in part.items()})
    else:
        _write_shards(path, parts + [_picture(PROJECTOR), _picture(TOWER)] * vision)
    write_json(path / CONFIG, config_json(source.cfg))
    write_json(path / GENERATION_CONFIG, source.generation_config)
    tokenizer = source.tokenizer()
    if tokenizer.vocab_size <= source.cfg.vocab_size:
        tokenizer.write_files(path)
    return path


def _layer(source: TensorSource, layer: int | None) -> dict:
    """Tensor name -> (dtype, shape, a function that makes it) of one layer."""
    entries = shard_shapes(source.cfg, layer)
    for w in layer_weights(source.cfg, layer):
        for expert, key in enumerate(checkpoint_keys(w, layer, source.cfg)):
            make = lambda w=w, expert=expert if w.per_expert else None: source.stored(w, layer, expert)
            entries[key] += (make,)
    return entries


def shard_shapes(cfg: K3Config, layer: int | None) -> dict:
    """Tensor name -> (dtype, shape) of one layer, or of what lies outside the layers."""
    dims, entries = cfg.dims(), {}
    for w in layer_weights(cfg, layer):
        entries |= dict.fromkeys(checkpoint_keys(w, layer, cfg), (w.dtype, stored_shapes(w, dims)[0]))
    return entries


def shard_name(n: int, count: int) -> str:
    return f"model-{n:05d}-of-{count:06d}.safetensors"  # five digits and six, as in the release


def _picture(shapes: dict) -> dict:
    return {name: ("BF16", shape, lambda shape=shape: np.ones(shape, ml_dtypes.bfloat16)) for name, shape in shapes.items()}


def _write_shards(path: Path, parts: list[dict]) -> None:
    weight_map, total = {}, 0
    for i, part in enumerate(parts, 1):
        name = shard_name(i, len(parts))
        total += write_file(path / name, part)
        weight_map |= dict.fromkeys(part, name)
    write_index(path, weight_map, total)


def write_index(path: Path, weight_map: dict[str, str], total: int) -> None:
    """The index of a folder: tensor name -> file, and the bytes of all tensors. One line: the writer of indented JSON takes seconds."""
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (path / INDEX).write_text(json.dumps(index), encoding="utf-8")


def write_file(path: Path, entries: dict) -> int:
    """Writes one safetensors file, a tensor at a time; returns the bytes of its tensors."""
    order, header, _, size = file_header({name: entry[:2] for name, entry in entries.items()})
    with path.open("wb") as f:
        f.write(header)
        for name in order:
            f.write(np.ascontiguousarray(entries[name][2]()).view(np.uint8).data)
    return size


def file_header(entries: dict) -> tuple[list[str], bytes, dict[str, int], int]:
    """From name -> (dtype, shape): names in the order of the file, what stands before the first tensor, where each begins behind it,
    and bytes of all tensors."""
    order = sorted(entries, key=lambda name: (_DTYPE_ORDER.index(entries[name][0]), name))
    return order, *header_bytes({name: entries[name] for name in order})


def header_bytes(entries: dict) -> tuple[bytes, dict[str, int], int]:
    """The same but for the order, which is that of `entries`."""
    header, begins, at = {"__metadata__": _METADATA}, {}, 0
    for name, (dtype, shape) in entries.items():
        begins[name], end = at, at + prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, begins, at


def write_json(path: Path, values: dict) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
