"""A small made checkpoint and ways to damage it."""
import errno
import json
import os

from k3cuda.runtime.made_config import made_config
from k3cuda.runtime.made_model import MadeCheckpoint
from k3cuda.runtime.shards import INDEX
from k3cuda.runtime.write_checkpoint import write_checkpoint

SMALL = made_config(num_experts=4, num_experts_per_token=2, moe_intermediate_size=64, intermediate_size=64, vocab_size=600)
NUM_SHARDS = 7  # four layers, the rest of the text model, two of pictures


def shard(n: int) -> str:
    return f"model-{n:05d}-of-{NUM_SHARDS:06d}.safetensors"


def small_checkpoint(path):
    return write_checkpoint(MadeCheckpoint(SMALL), path, vision=True)


def edit_json(path, change) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def edit_index(folder, change) -> None:
    """`change(weight_map)`, which may edit it."""
    edit_json(folder / INDEX, lambda top: change(top["weight_map"]))


def edit_header(path, change, data=None) -> None:
    """Rewrites a shard with `change(header)` done to its header, its data as they were unless given."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + (content[end:] if data is None else data))


def rename(header, old: str, new: str) -> None:
    header[new] = header.pop(old)


def key(layer: int, rest: str) -> str:
    return f"language_model.model.layers.{layer}.{rest}"


def fail_reads_after(monkeypatch, good: int) -> None:
    """The disk gives an input/output error on every `preadv` but the first `good`."""
    preadv, calls = os.preadv, []

    def failing(fd, buffers, offset):
        calls.append(fd)
        if len(calls) > good:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
