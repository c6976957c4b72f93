"""What a target's step leaves for a draft model, as kernels under g++ against the reference: both streams, and the mixture behind the last layer."""
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from models import headdims
from shim import host

pytest.importorskip("cupy", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")   # ctypes' view of Step lies beside it
pytestmark = pytest.mark.skipif(host.COMPILER is None, reason="needs g++")

from host_step import Kernels, Memory  # noqa: E402

from k3cuda.plan import Taps, build_plan  # noqa: E402
from k3cuda.reference import FUNCTIONS  # noqa: E402
from k3cuda.reference.numerics import Numerics  # noqa: E402
from k3cuda.runtime.numpy_program import Model, widened  # noqa: E402

ROWS = 8
LIVE = np.array([0, 0, 0, 2, -1, 1, -1, -1], np.int32)


@pytest.mark.parametrize("stream, stages", [("prefix", {"tap_prefix": ()}), ("attn_res", {"tap_mix": (), "tap_output_mix": ()})])
def test_taps(tmp_path, stream, stages):
    source = headdims()
    plan = build_plan(source.cfg, 1, Taps((0, 1, source.cfg.num_hidden_layers - 1), stream))
    kernels = Kernels(ROWS, 1, True, stages, tmp_path / "build", plan=plan)
    memory, rng = Memory(plan, source), np.random.default_rng(2)
    memory.poison()
    memory.buffer("row_slot")[:] = -1
    memory.buffer("row_slot")[:ROWS] = LIVE
    given = {name: rng.standard_normal((*memory.buffer(name).shape[:-2], ROWS, source.cfg.hidden_size)).astype(np.float32) for name in ("hidden", "ffn_out", "res_blocks")}
    for name, values in given.items():
        memory.buffer(name)[..., :ROWS, :] = values
    ops = [op for op in kernels.ops if op.stage.name in stages]
    assert [op.kind_index for op in ops] == [0, 1, 2] and len({op.num_blocks for op in ops}) > (stream == "attn_res")
    want = np.zeros((ROWS, 3, source.cfg.hidden_size), np.float32)
    for op in ops:
        kernels.run(op, memory)
        weights = {name: widened(source.rank_slices(name, op.layer, 1, 0)) for name in op.stage.weights}
        bound = SimpleNamespace(**{n: given[n] for n in op.stage.reads}, taps=want)
        FUNCTIONS[op.stage.name](Model(plan.cfg, Numerics(), 0, 1), SimpleNamespace(**weights), bound, op)
    got = memory.buffer("taps").view(ml_dtypes.bfloat16).astype(np.float32)
    live = LIVE >= 0
    assert np.abs(got[:ROWS][live] - want[live]).max() <= 2**-8 * np.abs(want).max() and np.isnan(got[ROWS:]).all()
