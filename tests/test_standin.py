"""The release's whole layout in holes: what `check` costs at real size, and that samples are found where they belong."""
import json
import subprocess
import sys

import numpy as np
import pytest
from command import ENVIRONMENT, ROOT

from k3cuda.config import RELEASED_FOLDER, K3Config
from k3cuda.errors import UsageError
from k3cuda.runtime.checkpoint import Checkpoint
from k3cuda.runtime.made_config import made_config
from k3cuda.runtime.made_model import MadeCheckpoint
from k3cuda.runtime.standin import PARTS, samples, sample_values, write_standin
from k3cuda.weights import BY_NAME, checkpoint_bytes, model_bytes

CFG = K3Config.from_json(RELEASED_FOLDER)
DISK_BYTES, MEMORY_BYTES = 200e6, 500e6
# A check with the most memory of its process (ru_maxrss would count what it was forked from), and what a load plan keeps and reads.
CHECK = """
import json, re, sys
from pathlib import Path
from k3cuda.runtime import load_plan, preflight
preflight.host = lambda: {"memory_free_bytes": 2 * 10**12, "memory_limit_bytes": None}
report = preflight.check(sys.argv[1], tp=16)
found = report.to_dict() | {"peak": 1024 * int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])}
blocks = [b for unit in load_plan.whole_layers(report.survey.cfg) for b in load_plan.blocks_of(unit, report.survey.cfg, report.survey.shards.owner, 16, range(5, 6))]
segments = [s for b in blocks for r in b.ranges for s in r.segments]
found["kept"] = sum(s.nbytes // 16 if s.weight.cut and s.weight.cut.axis else s.nbytes for s in segments)
found["read"] = sum(r.stop - r.start for b in blocks for r in b.ranges)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    try:
        return write_standin(CFG, tmp_path_factory.mktemp("standin") / "release")
    except OSError as e:
        pytest.skip(f"this disk cannot hold files with holes: {e}")


def test_it_takes_little_of_the_disk(release):
    sizes = [path.stat() for path in release.iterdir()]
    assert sum(s.st_size for s in sizes) > 1_560_860_324_864 and sum(s.st_blocks for s in sizes) * 512 < DISK_BYTES


def test_check_and_load_plan_of_a_release(release):
    done = subprocess.run([sys.executable, "-c", CHECK, str(release)], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    facts = found["facts"]
    assert found["ok"] and found["peak"] < MEMORY_BYTES, found
    assert found["kept"] == model_bytes(CFG, 16) == facts["bytes_per_rank"]["16"]
    assert 5.8 < found["read"] / found["kept"] < 6.2   # docs/loading.md: w2 is cut by columns
    assert facts["bytes"] == 1_559_965_606_912 and facts["tensors"] == 497_052 and facts["shards"] == 94
    assert facts["skipped_tensors"] == 168 and facts["skipped_shards"] == 2
    assert f"{facts['bytes_per_rank']['16'] / 1e9:.3f}" == "97.506"
    assert "168 vision tensors" in found["notes"][0]
    assert json.loads((release / "model.safetensors.index.json").read_text())["metadata"] == {"total_size": 1_560_860_324_864}


def test_samples_of_a_release_are_where_they_belong(release):
    checkpoint = Checkpoint.open(release)
    for weight, layer, expert, rows in list(samples(CFG))[::23]:
        part = slice(rows.start, rows.stop)
        got = checkpoint.stored_rows(weight, layer, expert, part) if len(weight.shape) > 1 else checkpoint.read(weight, layer, expert)[part]
        assert got.tobytes() == sample_values(CFG, weight, layer, expert, rows).tobytes(), (weight.name, layer, expert)
    part = checkpoint.rank_slices("expert_w2_scale", CFG.num_hidden_layers - 1, 16, 15)
    assert part.shape == (896, 3584, 6) and part[0].any() and part[-1].any() and not part[1].any()


def test_samples_have_a_row_of_every_rank():
    dims, seen = CFG.dims(), {}
    for weight, _, _, rows in samples(CFG):
        size = max(dims[weight.shape[0]] // PARTS, 1)
        seen.setdefault(weight, set()).update(range(rows.start // size, -(-rows.stop // size)))
    assert {w.name for w in seen} == BY_NAME.keys() and all(parts >= set(range(PARTS)) for parts in seen.values())


def test_a_small_standin_is_a_made_checkpoint_with_holes(tmp_path):
    cfg = made_config()
    folder = write_standin(cfg, tmp_path / "m", vision_bytes=10_000)
    checkpoint, made = Checkpoint.open(folder), MadeCheckpoint(cfg, fill="positions")
    assert checkpoint.cfg == cfg and checkpoint.shards.text_bytes == checkpoint_bytes(cfg)
    for weight, layer, expert, rows in samples(cfg):
        got = np.asarray(checkpoint.read(weight, layer, expert)[rows.start:rows.stop])
        assert got.tobytes() == made.read(weight, layer, expert)[rows.start:rows.stop].tobytes()
    assert {w.name for w, *_ in samples(cfg)} == BY_NAME.keys()
    with pytest.raises(UsageError, match="not an empty folder"):
        write_standin(cfg, folder)
