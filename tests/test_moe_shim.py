"""The routed experts' stages as kernels of a small model under g++: the choice beside the shared expert's way down, w1 and w3, w2.

Each against its reference function, from inputs that the one before it made, with everything else in the arena poisoned.
"""
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from models import relative
from shim import host

pytest.importorskip("cupy", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")   # ctypes' view of Step lies beside it
pytestmark = pytest.mark.skipif(host.COMPILER is None, reason="needs g++")

from host_step import Kernels, Memory  # noqa: E402

from k3cuda.buffers import BY_NAME  # noqa: E402
from k3cuda.reference import FUNCTIONS  # noqa: E402
from k3cuda.reference.mxfp4 import ExpertMatrix  # noqa: E402
from k3cuda.reference.numerics import Numerics  # noqa: E402
from k3cuda.runtime.numpy_program import Model, widened  # noqa: E402

RANK = 1
F32_SUMS, BF16 = 2e-6, 2**-8   # relative errors as norms: of sums in another order, of one rounding


class Small:
    """The stages of one rank of a small model, looped back, for steps of up to `rows` rows."""

    def __init__(self, tp: int, rows: int, folder):
        self.kernels = Kernels(rows, tp, True, {"route": (), "expert_up": (), "moe_down": ()}, folder / "build")
        self.memory = Memory(self.kernels.plan, self.kernels.source, RANK)
        self.memory.step.rank, self.memory.step.loopback = RANK, 1
        self.memory.arena[:] = 0xFF

    def buffer(self, name: str) -> np.ndarray:
        array = self.memory.buffer(name)
        return array.view(ml_dtypes.bfloat16) if BY_NAME[name].dtype == "bf16" else array

    def run(self, stage: str) -> None:
        self.kernels.run(self.kernels.last(stage), self.memory)

    def want(self, stage: str, **inputs) -> SimpleNamespace:
        """What the reference makes of these inputs, F32."""
        op, plan = self.kernels.last(stage), self.kernels.plan
        raw = {name: self.kernels.source.rank_slices(name, op.layer, plan.tp, RANK) for name in op.stage.weights}
        weights = {name: ExpertMatrix(x, raw[name + "_scale"]) if name + "_scale" in raw else widened(x) for name, x in raw.items()}
        outputs = {name: np.full((len(inputs["row_slot"]), *self.buffer(name).shape[1:]), -7, np.int32 if BY_NAME[name].dtype == "i32" else np.float32)
                   for name in op.stage.writes}
        bound = SimpleNamespace(**inputs, **outputs)
        FUNCTIONS[stage](Model(plan.cfg, Numerics("f32", "bf16"), RANK, plan.tp), SimpleNamespace(**weights), bound, op)
        return bound


@pytest.mark.parametrize("tp, rows", [(2, 1), (2, 8), (4, 8), (4, 16)])
def test_experts_of_a_step(tmp_path, tp, rows):
    small, rng = Small(tp, rows, tmp_path), np.random.default_rng(rows)
    slots = np.where(np.arange(rows) < max(rows * 3 // 4, 1), 0, -1).astype(np.int32)   # the last rows pad
    live = slots >= 0
    small.buffer("row_slot")[:rows] = slots
    for name in ("router_logits", "shared_act", "moe_latent"):
        at = small.buffer(name)
        at[:rows] = rng.standard_normal((rows, at.shape[1]))
    inputs = {name: small.buffer(name)[:rows].astype(np.float32) for name in ("router_logits", "shared_act", "moe_latent")}

    small.run("route")
    want = small.want("route", row_slot=slots, **inputs)
    ids, weights = small.buffer("expert_ids")[:rows].copy(), small.buffer("expert_weights")[:rows].copy()
    assert (ids[live] == want.expert_ids[live]).all() and (ids[~live] == -1).all()   # -1: the poison
    assert relative(weights[live], want.expert_weights[live]) < F32_SUMS
    parts = small.buffer("shared_parts")   # a slice for every rank
    assert parts.shape[0] == tp and relative(np.concatenate(list(parts[:, :rows]), axis=-1), want.shared_partial) < F32_SUMS
    assert np.isnan(parts[:, rows:]).all()

    small.run("expert_up")
    chosen = dict(row_slot=slots, expert_ids=ids, expert_weights=weights)
    want = small.want("expert_up", **chosen, **inputs)
    act = small.buffer("expert_act").astype(np.float32)
    assert relative(act[:rows][live], want.expert_act[live]) < BF16
    assert np.isnan(act[:rows][~live]).all() and np.isnan(act[rows:]).all()

    small.run("moe_down")
    want = small.want("moe_down", **chosen, expert_act=act[:rows])
    parts = small.buffer("routed_parts")   # the whole sum for every rank
    assert parts.shape[0] == tp and all(relative(part[:rows], want.routed_partial) < F32_SUMS for part in parts)
    assert not parts[:, :rows][:, ~live].any()
