"""Weights read back from the kernels' arrays, on arrays of the host in the place of the device's: bit for bit those of the checkpoint."""
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cupy", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")

from host_step import Memory  # noqa: E402
from models import headdims  # noqa: E402

from k3cuda.plan import build_plan  # noqa: E402
from k3cuda.reference.mxfp4 import dequantize  # noqa: E402
from k3cuda.runtime import cuda_unpack, repack  # noqa: E402
from k3cuda.weights import BY_NAME  # noqa: E402


class Array(np.ndarray):
    """The little that is asked of an array on a GPU."""

    def get(self):
        return np.asarray(self)


@pytest.mark.parametrize("tp", [1, 2])
def test_every_weight_of_a_step_comes_back(monkeypatch, tp):
    monkeypatch.setattr(cuda_unpack, "unpack_bf16", lambda *a: repack.unpack_bf16(*a).view(Array))
    monkeypatch.setattr(cuda_unpack, "unpack_mxfp4", lambda *a: [half.view(Array) for half in repack.unpack_mxfp4(*a)])
    source, plan, seen = headdims(), build_plan(headdims().cfg, tp), set()
    memory = Memory(plan, source, tp - 1)
    ops = [op for op in plan.ops if op.stage.weights]
    held = {(op.layer, op.stage.name): [a.view(Array) for a in memory.weights_of(op)] for op in ops}
    unpacked = cuda_unpack.Unpacked(SimpleNamespace(cfg=source.cfg, tp=tp, memories=[SimpleNamespace(weights=held)]))
    want = lambda name, layer: source.rank_slices(name, layer, tp, tp - 1)   # noqa: E731
    for op in ops:
        found = vars(unpacked.of(op))
        assert found.keys() | {f"{name}_scale" for name in found} >= set(op.stage.weights), op
        for name, got in found.items():
            seen.add(name)
            if isinstance(got, cuda_unpack.Experts):
                packed, scale = want(name, op.layer), want(f"{name}_scale", op.layer)
                assert all((got[i] == dequantize(packed[i], scale[i])).all() for i in range(len(packed))), name
            elif name.endswith(("res_norm", "res_proj")):   # folded: their product alone is there
                continue
            else:
                whole = want(name, op.layer).astype(np.float32)
                is_there = ~np.isnan(got)
                assert (got == whole)[is_there].all() and (is_there.all() or name == "mla_kv_b_proj" and 0.3 < is_there.mean() < 0.7), name   # of that one half
    assert seen == {name for name in BY_NAME if not name.endswith("_scale")}
