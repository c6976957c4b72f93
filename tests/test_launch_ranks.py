"""Several ranks that run a step in one launch, or in one each, under g++: on every one of them the bytes of the standard path's ranks and of one rank."""
import ctypes
import multiprocessing
import time

import numpy as np
import pytest
from shim import host

pytest.importorskip("cupy", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")   # as in test_launch_step.py

from host_step import Kernels, Memory  # noqa: E402
from launch_shim import NOT_THERE  # noqa: E402
from launch_standard import left_out, product_behind  # noqa: E402
from step_launch import Step, StepLaunch  # noqa: E402
from test_launch_step import CFG, check  # noqa: E402

from k3cuda.errors import PlanError  # noqa: E402
from k3cuda.launch_step import step_program  # noqa: E402
from k3cuda.phases import Grid  # noqa: E402
from k3cuda.plan import build_plan  # noqa: E402
from k3cuda.runtime.made_config import made_config  # noqa: E402
from k3cuda.runtime.made_model import MadeCheckpoint  # noqa: E402

shim = pytest.mark.skipif(host.COMPILER is None, reason="needs g++")


def config(ranks: int):
    """That of test_launch_step.py with sizes that so many ranks can cut, each with one leaf of w2."""
    mla, kda = ([3], [1, 2, 4]) if ranks < 8 else ([2], [1])
    return made_config(hidden_size=max(128, 16 * ranks), num_hidden_layers=len(mla + kda), num_attention_heads=max(4, ranks), head_dim=128, qk_nope_head_dim=128,
                       qk_rope_head_dim=64, v_head_dim=128, q_lora_rank=64, kv_lora_rank=128, intermediate_size=512, moe_intermediate_size=32 * ranks,
                       routed_expert_hidden_size=max(64, 8 * ranks), attn_res_block_size=2, num_experts=64, num_experts_per_token=4, full_attn_layers=mla, kda_layers=kda, vocab_size=256)


def put(step, plan, source):
    """A memory for each rank of the plan before the step: of states each has its heads'."""
    whole = Memory(build_plan(plan.cfg, 1), source, slot_pages=2)
    step.put(whole)
    ranks = [Memory(plan, source, r, slot_pages=2) for r in range(plan.tp)]
    for memory in ranks:
        memory.meet(ranks)
        step.put(memory)
        for name in memory.session:
            to, of = memory.buffer(name), whole.buffer(name)
            axis = next((i for i, n in enumerate(to.shape) if n != of.shape[i]), 0)
            at = memory.rank * to.shape[axis] if to.shape != of.shape else 0
            to[...] = np.take(of, range(at, at + to.shape[axis]), axis)
    return ranks


def standard(plan, source, step, folder):
    """Memories of all ranks behind a step of the standard path's kernels."""
    kernels, ranks = Kernels(len(step.inputs["row_slot"]), plan.tp, True, {op.stage.name: () for op in plan.ops}, folder, plan=plan), put(step, plan, source)
    for op in plan.ops:
        for memory in ranks:
            kernels.run(op, memory)
    return ranks


@shim
@pytest.mark.parametrize(("ranks", "rows", "here"), [(4, 4, True), (16, 1, True), (2, 2, False)])
def test_every_rank_has_the_bytes_of_the_standard_path(tmp_path, ranks, rows, here):
    """Blocks and warps are delayed at random, and of two launches of a rank the second begins when that rank's first has ended. Logits are one rank's."""
    cfg = config(ranks)
    plan, source, step = build_plan(cfg, ranks), MadeCheckpoint(cfg), Step(cfg, rows, rows, range(rows), rows, 40)
    program = step_program(plan, rows, Grid(sms=2 if ranks < 16 else 4), cache=2, rank_parts=ranks, ranks=ranks, page=128)
    want, one = standard(plan, source, step, tmp_path / "ranks"), standard(build_plan(cfg, 1), source, step, tmp_path / "one")[0]
    memories = put(step, plan, source)
    launch = StepLaunch(plan, program, tmp_path / "launch", ranks_here=here, defines="#define K3_STRESS\n")
    start = time.monotonic()
    for exchange in launch.run(*memories, launches=2):
        assert (exchange == NOT_THERE).all()
    whole_s = time.monotonic() - start
    for found, wanted in zip(memories, want):
        check(step, wanted, found)
        assert found.buffer("logits")[:rows].tobytes() == one.buffer("logits")[:rows].tobytes()
    if ranks < 16:
        check_lost_value(launch, put(step, plan, source), whole_s)


def lost_value(launch, memories, trouble, phase, limit_ns):
    launch.run(*memories, limit_ns=limit_ns, trouble=np.frombuffer(trouble, np.uint32), words={0: left_out(launch.program, 1, phase)})


def check_lost_value(launch, memories, whole_s):
    """Of one rank: the first wait that has taken its limit ends all ranks of the launch."""
    p, limit_s = launch.program, max(2.0, whole_s / 2)
    phase = product_behind(p, 10)
    for memory in memories:
        launch.places(memory)   # which makes weights: what is left of a fork's threads cannot
    trouble = multiprocessing.RawArray(ctypes.c_uint32, 8)
    child = multiprocessing.get_context("fork").Process(target=lost_value, args=(launch, memories, trouble, phase, int(limit_s * 1e9)))
    start = time.monotonic()
    child.start()
    child.join(100 + 3 * limit_s)
    seconds = time.monotonic() - start
    assert child.exitcode == 86 and limit_s < seconds < 3 * (limit_s + whole_s), (seconds, limit_s, whole_s)   # the shim's trap
    assert trouble[0] and phase <= trouble[3], list(trouble)   # of producers, who run ahead, later ones too
