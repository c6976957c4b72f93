"""What scripts/predict_launch.py has typed in is what the kernel has."""
import sys
from pathlib import Path

import pytest
from shim import host

from k3cuda import launch_source as ls
from k3cuda.config import RELEASED_FOLDER, K3Config
from k3cuda.plan import build_plan

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))
import predict_launch  # noqa: E402

LAYERS = 21   # of scripts/bench_launch.py: a longer program leaves less for the ring


@pytest.mark.skipif(host.COMPILER is None, reason="needs g++")
def test_the_ring_of_a_layer_is_its_kernels(tmp_path):
    """The constant product_chain_launch, of the same headers and sizes as on a device."""
    plan, found = build_plan(K3Config.from_json(RELEASED_FOLDER), 16), {}
    for cluster, rows in predict_launch.SLOTS:
        program = predict_launch.chain_program(plan, "layer", 16, rows, cluster, LAYERS)
        (folder := tmp_path / f"{cluster}-{rows}").mkdir()
        *_, found[cluster, rows] = host.constants(host.build(ls.constants(program, copy=predict_launch.COPY), [], folder), "product_chain_launch", 4)
    assert found == predict_launch.SLOTS
