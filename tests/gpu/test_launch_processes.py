"""Ranks as processes that run each step in one launch of their own and write into each other's memory: the bytes and texts of one rank of the standard path.

On as many GPUs as there are ranks; where they are fewer the ranks take turns with one, by the test switch.
"""
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
pytest.importorskip("cupy", reason="CuPy holds the device's memory; install k3cuda[cu13] or k3cuda[cu12]")

from command import ENVIRONMENT, ROOT  # noqa: E402

from k3cuda.plan import build_plan  # noqa: E402
from k3cuda.runtime.cuda_driver import open_device  # noqa: E402
from k3cuda.runtime.cuda_kernels import compile_bucket  # noqa: E402
from k3cuda.runtime.launch_program import CLUSTER, compiled_launch, launched  # noqa: E402
from k3cuda.runtime.machine import LATENCY_SPECIALIZED, STANDARD, probe_driver  # noqa: E402
from k3cuda.runtime.made_config import made_config  # noqa: E402
from k3cuda.runtime.made_model import MadeCheckpoint  # noqa: E402
from k3cuda.runtime.write_checkpoint import write_checkpoint  # noqa: E402

TP, PROMPTS, TOKENS = 2, [[5, 80, 200, 17] * 2, [7] * 8], 12
BUCKETS = {1: True, 8: True, 16: False}   # of the steps below, and which of them are launches
# Steps of so many rows, of which so many stand; then texts. `lost`: rank 0, which this is, leaves out a unit.
SCRIPT = """
import json, sys, time
import numpy as np
from k3cuda import LLM, SamplingParams
from k3cuda.runtime.backend import StepRows
model, out, tp, backend, prompts, tokens, lost = json.loads(sys.argv[1])
if lost:
    from launch_standard import without_a_product
    from k3cuda.runtime import cuda_launch
    bound = cuda_launch.StepLaunches._bound

    def lacking_words(self, program, *more):
        return bound(self, without_a_product(program, 10) if self._others.rank == 0 else program, *more)

    cuda_launch.StepLaunches._bound = lacking_words   # behind what the ranks have compared
how = {"ranks": "processes", "collectives": "peer"} if tp > 1 else {"ranks": "virtual"}
ids = np.random.default_rng(1).integers(0, 300, 200).astype(np.int32)
with LLM(model, tp=tp, **how, decode_backend=backend, max_model_len=256, max_batch=1) as llm:
    be, found, at = llm.backend, [], 0
    be.open_slot(0, range(be.num_pages))
    for rows, stand in ((1, 1), (1, 1), (8, 3), (12, 12), (8, 8), (1, 0), (7, 5), (1, 1)):
        start = time.monotonic()
        be.step(StepRows(ids[at:at + rows], np.zeros(rows, np.int32), np.arange(at, at + rows, dtype=np.int32), np.arange(rows, dtype=np.int32)))
        found.append(np.array(be.logits()))
        be.commit(np.arange(rows) < stand)
        at += stand
        print(f"{rows} rows: {time.monotonic() - start:.3f} s", file=sys.stderr, flush=True)
    np.save(out, np.concatenate(found))
    params = [SamplingParams(max_tokens=tokens, seed=5, temperature=float(i == 0), ignore_eos=True) for i in range(len(prompts))]
    outputs = llm.generate(prompts, params)
    print(json.dumps({"ranks": be.ranks, "tokens": [o.token_ids for o in outputs], "steps": dict(be.counts.steps), "reasons": dict(be.counts.reasons)}))
"""


def run(model, out, tp, backend, lost=False):
    share = {"K3CUDA_SHARE_GPU": "1"} if len(probe_driver().gpus) < tp else {}
    words = json.dumps([str(model), str(out), tp, backend, PROMPTS, TOKENS, lost])
    env = ENVIRONMENT | share | {"NCCL_NVLS_ENABLE": "0", "PYTHONPATH": f"{ROOT}:{ROOT}/tests/gpu"}
    return subprocess.run([sys.executable, "-c", SCRIPT, words], env=env, cwd=ROOT, capture_output=True, text=True, timeout=70)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of which each of two ranks has one leaf of w2; all kernels are compiled side by side, else every rank would compile them for itself."""
    path = tmp_path_factory.mktemp("ranks") / "model"
    cfg = made_config(head_dim=128, v_head_dim=128, qk_nope_head_dim=128, qk_rope_head_dim=64, kv_lora_rank=512, q_lora_rank=256, hidden_size=256, num_experts=64,
                      routed_expert_hidden_size=512, moe_intermediate_size=32 * TP)
    write_checkpoint(MadeCheckpoint(cfg, seed=3), path)
    device, ranks, one = open_device(), build_plan(cfg, TP), build_plan(cfg, 1)
    jobs = [partial(compiled_launch, ranks, launched(ranks, rows, device.sms // CLUSTER * CLUSTER, "bf16", TP), device.arch) for rows, single in BUCKETS.items() if single]
    jobs += [partial(compile_bucket, plan, rows, "bf16", device.arch, sms=device.sms, ride=ride) for plan, ride in ((ranks, False), (one, True)) for rows in BUCKETS]
    with ThreadPoolExecutor(len(jobs)) as pool:
        for job in [pool.submit(job) for job in jobs]:
            job.result()
    return path


def test_every_rank_has_the_bytes_and_the_text_of_one(folder):
    """Also of rows that are rejected, of steps with more rows than a launch has between them, and of what the ranks draw, which they compare."""
    found = {}
    for tp, backend in ((TP, LATENCY_SPECIALIZED), (1, STANDARD)):
        out = folder.parent / f"{tp}.npy"
        done = run(folder, out, tp, backend)
        print(done.stderr[-1500:])
        assert done.returncode == 0, done.stderr[-3000:]
        found[tp] = np.load(out), json.loads(done.stdout)
    (logits, said), (wanted, alone) = found[TP], found[1]
    print(said)
    assert said["ranks"] == "peer" and said["steps"][LATENCY_SPECIALIZED] >= 7 + TOKENS and said["steps"].get(STANDARD, 0) >= 1
    assert logits.tobytes() == wanted.tobytes() and np.isfinite(logits).all() and said["tokens"] == alone["tokens"]


def test_a_part_that_a_rank_does_not_send_ends_the_job_with_a_name(folder):
    done = run(folder, folder.parent / "lost.npy", TP, LATENCY_SPECIALIZED, lost=True)
    print(done.stderr[-1500:])
    assert done.returncode != 0 and "a step in one launch ended itself: block" in done.stderr
