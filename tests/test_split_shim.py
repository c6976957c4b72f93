"""Latent attention over a cache that ranks hold together, kernels under g++: new rows, both exchanges, and the merge, against NumPy."""
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cupy", reason="CuPy holds the device's memory; install k3cuda[cu13] or k3cuda[cu12]")

from host_step import Kernels, Memory  # noqa: E402
from models import headdims  # noqa: E402
from shim import host  # noqa: E402

from k3cuda.cache_layout import in_order  # noqa: E402
from k3cuda.config import PAGE_SIZE, RELEASED_FOLDER, K3Config  # noqa: E402
from k3cuda.context_split import own_length  # noqa: E402
from k3cuda.emit import build_files, kernels_of  # noqa: E402
from k3cuda.plan import build_plan  # noqa: E402
from k3cuda.runtime.cuda_jit import compile_cuda  # noqa: E402

pytestmark = pytest.mark.skipif(host.COMPILER is None, reason="no C++ compiler")
STAGES = dict.fromkeys(("mla_norm", "mla_q_exchange", "mla_attend_own", "mla_own_exchange", "mla_merge"), ())
# Slot 0 over the third page, which is the first rank's again; slot 1 over the edge of the first: before it the other rank has nothing.
SLOT, POSITION = [0, 0, 0, -1, 1, 1, 2], [130, 131, 132, 0, 63, 64, 5]
ROWS = 8


@pytest.mark.parametrize("tp, dcp", [(2, 2), (4, 2)])
def test_ranks_attend_together(tp, dcp, tmp_path):
    cfg, rng = headdims().cfg, np.random.default_rng(tp)
    plan = build_plan(cfg, tp, dcp=dcp)
    kernels = Kernels(ROWS, tp, True, STAGES, tmp_path / "build", plan=plan)
    ranks = [Memory(plan, kernels.source, r, slot_pages=2) for r in range(tp)]
    dims, layer = ranks[0].dims, kernels.last("mla_norm").kind_index
    pages = rng.permutation(ranks[0].buffer("mla_cache").shape[1])[:6].reshape(3, 2)
    for r, memory in enumerate(ranks):
        memory.poison()
        memory.meet(ranks)
        for name, values in (("row_slot", SLOT), ("row_position", POSITION)):
            memory.buffer(name)[:] = -1 if name == "row_slot" else 0
            memory.buffer(name)[:len(values)] = values
        memory.buffer("page_table")[:3] = pages
    whole = rng.standard_normal((3, 4 * PAGE_SIZE, dims["mla_cache_dim"])).astype(ml_dtypes.bfloat16)   # of every position
    for slot in range(3):   # what was there before the step; the rest is NaN
        first = min(p for s, p in zip(SLOT, POSITION) if s == slot)
        for r, memory in enumerate(ranks):
            cache = np.full((len(pages[slot]), *memory.buffer("mla_cache").shape[2:]), np.nan, ml_dtypes.bfloat16)
            own = np.arange(first)[np.arange(first) // PAGE_SIZE % dcp == r % dcp]
            at = own // PAGE_SIZE // dcp
            cache[at, own % PAGE_SIZE] = whole[slot, own]
            memory.buffer("mla_cache")[layer, pages[slot]] = in_order(cache).view(np.uint16)
    query, latent = rng.standard_normal((ROWS, dims["q_lora_rank"])), rng.standard_normal((ROWS, dims["mla_cache_dim"]))
    absorbed = rng.standard_normal((ROWS, dims["num_attention_heads"], dims["mla_cache_dim"])).astype(ml_dtypes.bfloat16)
    each = dims["num_attention_heads"] // tp
    for r, memory in enumerate(ranks):
        memory.buffer("mla_q_a")[:ROWS], memory.buffer("mla_kv_a")[:ROWS] = query, latent
        memory.buffer("mla_q_absorbed")[:ROWS] = absorbed[:, r * each:(r + 1) * each].view(np.uint16)
    for name in STAGES:
        for memory in ranks:
            kernels.run(kernels.last(name), memory)

    for row, (slot, position) in enumerate(zip(SLOT, POSITION)):   # each new row is with one rank of a group, alike in every group
        for r, memory in enumerate(ranks if slot >= 0 else ()):
            cache = in_order(memory.buffer("mla_cache")[layer]).view(ml_dtypes.bfloat16)
            if position // PAGE_SIZE % dcp == r % dcp:
                stored = cache[pages[slot][position // PAGE_SIZE // dcp], position % PAGE_SIZE]
                if r < dcp:
                    whole[slot, position] = stored
                assert stored.tobytes() == whole[slot, position].tobytes() and np.isfinite(stored.astype(np.float32)).all()
            held = own_length(position + 1, r % dcp, dcp)
            assert np.isfinite(cache[pages[slot]].reshape(2 * PAGE_SIZE, -1)[:held].astype(np.float32)).all()
    scale = (cfg.qk_nope_head_dim + cfg.qk_rope_head_dim) ** -0.5
    for row, (slot, position) in enumerate(zip(SLOT, POSITION)):
        got = np.concatenate([m.buffer("mla_o_latent")[row].view(ml_dtypes.bfloat16) for m in ranks]).astype(np.float64)
        if slot < 0:
            assert np.isnan(got).all()   # nobody's: left as it was
            continue
        seen = whole[slot, :position + 1].astype(np.float64)
        scores = absorbed[row].astype(np.float64) @ seen.T * scale
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        want = weight / weight.sum(-1, keepdims=True) @ seen[:, :dims["kv_lora_rank"]]
        assert np.linalg.norm(got - want) < 4e-3 * np.linalg.norm(want), row


# With FP8 on sm_100a are those that one NVRTC or another has spilled in; of a group of one rank, attention of a wide step.
@pytest.mark.parametrize("arch, dcp, rows, kv", [("sm_90a", 16, 64, "bf16"), ("sm_100a", 16, 8, "fp8_e4m3"), ("sm_100a", 4, 8, "fp8_e4m3"), ("sm_103a", 4, 64, "bf16"),
                                                 ("sm_100a", 1, 256, "fp8_e4m3")])
def test_kernels_of_the_release_spill_nothing(arch, dcp, rows, kv):
    plan, stages = build_plan(K3Config.from_json(RELEASED_FOLDER), 16, dcp=dcp), STAGES if dcp > 1 else ("mla_attend",)
    files = build_files(plan, rows, kv, ride=False)
    names = [k for name in stages for op in plan.ops if op.stage.name == name for k in kernels_of(op.stage, plan, rows, False)]
    lines = files.pop("kernels.cu").split("\n")
    source = [line for line in lines if '"C"' not in line and "static_assert" not in line or any(f"k_{n}_launch[" in line or f" k_{n}(" in line for n in names)]
    resources = compile_cuda("\n".join(source), arch, headers=files, strict=True, name="kernels of latent attention").resources()
    assert set(resources) == {f"k_{n}" for n in names} and ("k_mla_merge" in resources) == (dcp > 1) and not any(r.spills or r.stack for r in resources.values())
