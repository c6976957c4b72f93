"""The standard path as several processes with real NCCL, on as many GPUs as there are; all on one by the test switch where they are fewer than
ranks. Every rank draws the same tokens, and logits have the bytes of one rank. Not run yet."""
import json
import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
pytest.importorskip("cupy", reason="CuPy holds the device's memory; install k3cuda[cu13] or k3cuda[cu12]")

from command import ENVIRONMENT, ROOT  # noqa: E402

from k3cuda.runtime.machine import probe_driver  # noqa: E402
from k3cuda.runtime.made_config import made_config  # noqa: E402
from k3cuda.runtime.made_model import MadeCheckpoint  # noqa: E402
from k3cuda.runtime.write_checkpoint import write_checkpoint  # noqa: E402

TOKENS = {1: 200, 2: 200, 4: 200, 8: 8, 16: 8}   # on one GPU a collective of 8 or 16 ranks takes 0.2 to 0.6 s
SCRIPT = """
import json, sys
import numpy as np
from k3cuda import LLM, SamplingParams
folder, tp, count, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
ids = np.random.default_rng(1).integers(0, 300, count)
with LLM(folder, tp=tp, ranks="processes" if tp > 1 else "virtual", decode_backend="standard", max_model_len=256, max_batch=2) as llm:
    np.save(out, llm.logits(ids))
    params = [SamplingParams(max_tokens=count, seed=5, ignore_eos=True), SamplingParams(max_tokens=count // 2, temperature=0, ignore_eos=True)]
    tokens = [o.token_ids for o in llm.generate([[5, 80, 200], [7] * 70], params)]
    held = sum(a.nbytes for arrays in llm.backend._weights[0].values() for a in arrays)
    print(json.dumps({"ranks": llm.backend.ranks, "tokens": tokens, "bytes": held}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "model"
    sizes = {"head_dim": 128, "v_head_dim": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "kv_lora_rank": 512}
    write_checkpoint(MadeCheckpoint(made_config(**sizes), seed=3), path)
    return path


@pytest.fixture(scope="module")
def runs(folder):
    """tp, tokens -> (logits, what the script says), each once."""
    found = {}

    def run(tp, count):
        if (tp, count) not in found:
            out = folder.parent / f"{tp}-{count}.npy"
            share = {"K3CUDA_SHARE_GPU": "1"} if len(probe_driver().gpus) < tp else {}
            done = subprocess.run([sys.executable, "-c", SCRIPT, folder, str(tp), str(count), out], env=ENVIRONMENT | share, cwd=ROOT, capture_output=True, timeout=540)
            assert done.returncode == 0, done.stderr.decode()[-3000:]
            found[tp, count] = np.load(out), json.loads(done.stdout)
        return found[tp, count]

    return run


@pytest.mark.parametrize("tp", [2, 4, 8, 16])
def test_every_rank_has_the_tokens_and_the_bytes_of_one(tp, runs):
    (logits, said), (wanted, alone) = runs(tp, TOKENS[tp]), runs(1, TOKENS[tp])
    assert said["ranks"] == "nccl" and alone["ranks"] == "virtual"
    assert logits.tobytes() == wanted.tobytes() and np.isfinite(logits).all()
    assert said["tokens"] == alone["tokens"]   # the processes compare theirs among themselves


def test_sixteen_ranks_hold_half_of_what_eight_hold(runs):
    """But for what is whole on every rank, which in a small model is more than in the release."""
    eight, sixteen = (runs(tp, 8)[1]["bytes"] for tp in (8, 16))
    assert 0.5 <= sixteen / eight < 0.7
