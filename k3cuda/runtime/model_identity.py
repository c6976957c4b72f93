"""What ranks compare to know that they open the same checkpoint: a hash of what describes it, not of its 1.5 TB."""
import hashlib
import os
from pathlib import Path

from .named_models import TINY_RANDOM, TINY_RANDOM_DRAFTS, resolved
from .shards import INDEX, SUFFIX

CONFIG = "config.json"
_HEADER = 1 << 20   # bytes at the beginning of a single file, which are its header or most of it


def identity(model) -> str | None:
    """SHA-256 over config.json and the index, or where there is no index over the beginning and the size of each weight file.

    None for None. A file that cannot be read is left out: opening the model says what is wrong with it.
    """
    model = resolved(model)
    if model is None or model in (TINY_RANDOM, *TINY_RANDOM_DRAFTS):
        return model
    path, digest = Path(model), hashlib.sha256()
    folder = path.parent if path.suffix == SUFFIX else path
    index = folder / INDEX
    weights = [index] if folder is path and index.exists() else [path] if path.suffix == SUFFIX else sorted(folder.glob(f"*{SUFFIX}"))
    for file in (folder / CONFIG, *weights):
        try:
            with open(file, "rb") as f:
                digest.update(f"{file.name} {os.fstat(f.fileno()).st_size}\n".encode())
                digest.update(f.read() if file in (folder / CONFIG, index) else f.read(_HEADER))
        except OSError:
            continue
    return digest.hexdigest()[:16]
