"""What scripts/compare_torch.py compares, without torch: each product has a kernel, and torch's shapes are those of the checkpoint."""
import importlib.util
import sys
from types import ModuleType

import pytest
from command import ROOT

pytest.importorskip("cupy", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")

from k3cuda.emit import build_files  # noqa: E402
from k3cuda.plan import build_plan  # noqa: E402


@pytest.fixture(scope="module")
def script():
    names = ("torch", "torch.nn", "torch.nn.functional")
    kept = {name: sys.modules.get(name) for name in names}
    sys.modules.update({name: ModuleType(name) for name in names})   # only what main() runs needs it
    try:
        spec = importlib.util.spec_from_file_location("compare_torch", ROOT / "scripts/compare_torch.py")
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        yield made
    finally:
        for name, module in kept.items():
            sys.modules.pop(name) if module is None else sys.modules.__setitem__(name, module)


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_every_product_has_a_kernel(script, rows):
    plan = build_plan(script.config_of(script.RELEASED, script.LAYERS), script.TP)
    text = build_files(plan, rows, "fp8_e4m3")["kernels.cu"]
    names = [script.kernel_of(array, plan, rows) for array in script.WITH_MIDDLE]
    assert len(set(names)) == len(names) and all(f" k_{name}(" in text for name in names)


def test_products_are_those_of_a_rank(script):
    """Outputs over 16 ranks: q, k, v, gate of 12288, beta of 96, f_a of 128; experts 896, latent 3584, shared gate and up of 6144."""
    cfg = script.config_of(script.RELEASED, script.LAYERS)
    assert {a: script.shape(cfg, a) for a in script.WITH_MIDDLE} == {
        "kda_in": ((4 * 12288 + 96 + 128) // 16, 7168), "kda_f_b_proj": (12288 // 16, 128), "o_proj": (7168, 12288 // 16),
        "moe_in": ((896 + 3584 + 2 * 6144) // 16, 7168), "shared_down_proj": (7168, 6144 // 16), "latent_up": (7168 // 16, 3584)}
