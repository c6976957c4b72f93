"""Steps in one launch with random delays in blocks and warps, of one rank and of several that share the launch: always the bytes of one rank of the
standard path.

K3CUDA_STRESS_STEPS: steps of each case, 2,000 by default; K3CUDA_STRESS_REPLAYS: verify steps of each case, 100 by default.
"""
import ctypes
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cp = pytest.importorskip("cupy", reason="CuPy holds the device's memory; install k3cuda[cu13] or k3cuda[cu12]")

from lost_result import said_of_loss  # noqa: E402
from models import PAGES_A_SLOT, open_slot, step_rows  # noqa: E402
from standard import Cuda, same  # noqa: E402

from k3cuda.config import PAGE_SIZE  # noqa: E402
from k3cuda.launch_source import LIMIT_NS  # noqa: E402
from k3cuda.plan import build_plan  # noqa: E402
from k3cuda.runtime import cuda_launch, launch_program  # noqa: E402
from k3cuda.runtime.cuda_driver import Launch, Module, open_device  # noqa: E402
from k3cuda.runtime.cuda_jit import compile_cuda  # noqa: E402
from k3cuda.runtime.cuda_kernels import bucket_of, compile_bucket  # noqa: E402
from k3cuda.runtime.launch_program import compiled_launch, launched  # noqa: E402
from k3cuda.runtime.machine import LATENCY_SPECIALIZED  # noqa: E402
from k3cuda.runtime.made_config import made_config  # noqa: E402
from k3cuda.runtime.made_model import MadeCheckpoint  # noqa: E402

STEPS, REPLAYS = int(os.environ.get("K3CUDA_STRESS_STEPS", 2000)), int(os.environ.get("K3CUDA_STRESS_REPLAYS", 100))
RANKS, ROWS = (1, 2, 4, 8, 16), (1, 4)
INPUTS, LAYERS = 50, 2   # steps of a graph, each with its own tokens; one layer has KDA and the dense MLP, one latent attention and experts
COUNT = """
extern "C" __global__ void take_tokens(const int* from, int* const* to, int rows) { if (threadIdx.x < rows) to[blockIdx.x][threadIdx.x] = from[threadIdx.x]; }
// Values of each rank that differ; behind it all of them are NaN.
extern "C" __global__ void count_wrong(unsigned* const* found, const unsigned* wanted, int n, unsigned long long* wrong) {
  unsigned* own = found[blockIdx.y];
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; own[i] = 0xffffffffu, i += gridDim.x * blockDim.x)
    if (own[i] != wanted[i]) atomicAdd(wrong, 1ull);
}
"""


def cluster(ranks: int) -> int:
    """Blocks that share tiles: of sixteen ranks each has eight blocks, fewer than w2 of sixteen leaves of experts has pairs of tiles."""
    return 2 if ranks < 16 else 1


def config(ranks: int):
    """Sizes that the attention kernels are made for, else the least that so many ranks can cut, with a leaf of w2 each: of experts sixteen leaves where clusters share them."""
    return made_config(head_dim=128, v_head_dim=128, qk_nope_head_dim=128, qk_rope_head_dim=64, kv_lora_rank=512, q_lora_rank=256, hidden_size=256, num_experts=64,
                       routed_expert_hidden_size=512 if cluster(ranks) > 1 else 128, moe_intermediate_size=32 * ranks, num_hidden_layers=LAYERS, full_attn_layers=[LAYERS], kda_layers=[*range(1, LAYERS)])


@contextmanager
def delays():
    """In here launches are compiled with delays."""
    with pytest.MonkeyPatch.context() as patch:
        plain = launch_program.launch_source
        patch.setattr(launch_program, "launch_source", lambda *args: "#define K3_STRESS\n" + plain(*args))
        yield


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """All kernels, side by side."""
    with delays():
        compile_all()
        yield


@contextmanager
def clusters_of(blocks: int):
    with pytest.MonkeyPatch.context() as patch:
        for module in (launch_program, cuda_launch):
            patch.setattr(module, "CLUSTER", blocks)
        yield


def compile_all():
    device, jobs = open_device(), []
    for ranks in RANKS:
        plan, alone = build_plan(config(ranks), ranks), build_plan(config(ranks), 1)
        for rows in ROWS:
            with clusters_of(cluster(ranks)):
                program = launched(plan, rows, device.sms // (ranks * cluster(ranks)) * cluster(ranks), "bf16", ranks)
            jobs += [partial(compiled_launch, plan, program, device.arch, ranks_here=ranks > 1)]
            jobs += [partial(compile_bucket, p, rows, "bf16", device.arch, sms=device.sms) for p in (plan, alone)[:min(ranks, 2)]]
    with ThreadPoolExecutor(len(jobs)) as pool:
        for job in [pool.submit(job) for job in jobs]:
            job.result()


@pytest.fixture(params=RANKS)
def pair(request):
    """So many ranks in one launch, and one rank stage by stage."""
    source = MadeCheckpoint(config(request.param), seed=3)
    made = [Cuda(source, request.param, specialized=True, max_batch=1), Cuda(source, 1, max_batch=1)]
    for be in made:
        open_slot(be, 0)
    with clusters_of(cluster(request.param)):
        yield made
    for be in made:
        be.close()


@pytest.mark.parametrize("rows", ROWS)
def test_many_steps(pair, rows):
    """Of other tokens each. They read the same states, since nothing is committed; logits of all ranks are compared on the device and then made NaN."""
    be, standard = pair
    rng, vocab = np.random.default_rng(rows), be.cfg.vocab_size
    tokens, wanted = rng.integers(0, vocab, (INPUTS, rows)).astype(np.int32), []
    for ids in tokens:
        standard.step(step_rows((0, 0, ids)))
        wanted.append(standard.logits())
    be.step(step_rows((0, 0, tokens[0])))
    same(be.logits(), wanted[0])
    given, want, wrong = cp.asarray(tokens), cp.asarray(np.stack(wanted)), cp.zeros(1, cp.uint64)
    places = {name: cp.asarray([m.buffer(name).data.ptr for m in be.memories], dtype=cp.uint64) for name in ("token_ids", "logits")}
    module, ranks = Module(compile_cuda(COUNT, be.device.arch).cubin), len(be.memories)
    at = lambda a: ctypes.c_void_p(a.data.ptr)
    launch = lambda name, grid, threads, *values: Launch(module.function(name), grid, threads, values, stream=be._raw_stream)
    launches = []
    for i in range(INPUTS):
        launches += [launch("take_tokens", ranks, 32, at(given[i]), at(places["token_ids"]), ctypes.c_int(rows)), *be.step_launches.launches(rows),
                     launch("count_wrong", (8, ranks), 256, at(places["logits"]), at(want[i]), ctypes.c_int(rows * vocab), at(wrong))]
    cp.cuda.get_current_stream().synchronize()
    with be.stream:
        be.stream.begin_capture()
        for one in launches:
            one.launch()
        graph = be.stream.end_capture()
    start = time.monotonic()
    for _ in range(-(-STEPS // INPUTS)):
        graph.launch(be.stream)
    be.stream.synchronize()
    print(f"\n{ranks} ranks, {rows} rows: {-(-STEPS // INPUTS) * INPUTS} steps, {(time.monotonic() - start) / STEPS * 1e6:.0f} us each, {int(wrong.get()[0])} wrong values")
    assert int(wrong.get()[0]) == 0
    module.close()


def test_random_acceptance(pair):
    """Verify steps, of which a random part stands, behind one another on one cache."""
    rng, at = np.random.default_rng(len(pair[0].memories)), 0
    for replay in range(REPLAYS):
        rows = int(rng.choice([1, 3, 4]))
        if at + rows > PAGES_A_SLOT * PAGE_SIZE:
            at = 0
            for be in pair:
                open_slot(be, 0)
        accepted, ids = int(rng.integers(0, rows + 1)), rng.integers(0, pair[0].cfg.vocab_size, rows)
        for be in pair:
            be.step(step_rows((0, at, ids)))
        same(pair[0].logits(), pair[1].logits(), f"replay {replay}")
        for memory in pair[0].memories[1:]:
            same(memory.buffer("logits")[:rows].get(stream=pair[0].stream), pair[1].logits(), f"replay {replay}")
        for be in pair:
            be.commit(np.arange(rows) < accepted)
        at += accepted
        if replay % 20 == 0:
            same(pair[0].states(0), pair[1].states(0), f"states behind replay {replay}")
    assert set(pair[0].counts.steps) == {LATENCY_SPECIALIZED} and bucket_of(3) in ROWS


def test_a_part_that_a_rank_does_not_send_ends_in_a_name():
    """Within two seconds: the limit of a wait, what a graph's first launch takes, and what the driver takes from a trap to its error."""
    said = said_of_loss(__name__, "with delays(): lose(Cuda(MadeCheckpoint(config(4), seed=3), 4, specialized=True, max_batch=1), behind=10)", timeout=100)
    assert f"waited {LIMIT_NS / 1e9:g} s for" in said and float(re.search(r"ended after (.*) s", said)[1]) < 2
