"""What the kernels are built for is known before a load: the ends of what is accepted pass the compiler's own checks in every kind of bucket.

g++ reads the emitted kernels with the host shim and only checks them: every static_assert, every block against an SM, in a second each.
"""
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from shim import host

from k3cuda.config import RELEASED_FOLDER, K3Config
from k3cuda.emit import build_files
from k3cuda.errors import CheckpointError
from k3cuda.plan import build_plan
from k3cuda.runtime.cuda_jit import KERNELS
from k3cuda.runtime.kernel_sizes import size_misfits
from k3cuda.runtime.machine import Gpu
from k3cuda.runtime.made_config import made_config
from k3cuda.runtime.preflight import Report, check_gpu

RELEASED = K3Config.from_json(RELEASED_FOLDER)
HEADS = {"head_dim": 128, "v_head_dim": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "kv_lora_rank": 512}
BUCKETS = (1, 64, 256)   # of one token tile, of eight, wide
# Accepted: the least and the most of each size, sizes whose sums have one part, and every leaf of every product on one rank.
ENDS = {
    "least": {"hidden_size": 32, "intermediate_size": 16, "moe_intermediate_size": 32, "routed_expert_hidden_size": 32, "q_lora_rank": 16, "kv_lora_rank": 64,
              "qk_nope_head_dim": 16, "num_attention_heads": 1, "vocab_size": 7, "num_experts": 1, "num_experts_per_token": 1, "num_hidden_layers": 1,
              "full_attn_layers": [1], "kda_layers": []},
    "most": {"hidden_size": 16384, "intermediate_size": 65536, "moe_intermediate_size": 8192, "routed_expert_hidden_size": 8192, "q_lora_rank": 4096,
             "kv_lora_rank": 1024, "qk_nope_head_dim": 256, "num_attention_heads": 128, "vocab_size": 262144, "num_experts": 2048, "num_experts_per_token": 32,
             "num_shared_experts": 8, "num_hidden_layers": 8, "attn_res_block_size": 1},
    "one part": {"hidden_size": 1040, "intermediate_size": 48, "moe_intermediate_size": 480, "routed_expert_hidden_size": 480, "kv_lora_rank": 480, "qk_rope_head_dim": 32},
    "sixteen parts": {}, "many experts a token": {"num_experts": 64, "num_experts_per_token": 16, "routed_expert_hidden_size": 512},
}


def complaints(cfg, tp: int, rows: int, folder) -> list[str]:
    """What g++ finds wrong with the kernels of one bucket."""
    folder.mkdir()
    files = build_files(build_plan(cfg, tp), rows, "bf16")
    text = "inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }\n" + files.pop("kernels.cu")
    for name, content in {**files, "unit.cpp": text}.items():
        (folder / name).write_text(content)
    done = subprocess.run([host.COMPILER, "-fsyntax-only", "-std=c++17", "-w", "-DK3_HOST_SHIM", "-include", str(host.HERE / "k3_host_shim.h"),
                           f"-I{folder}", f"-I{KERNELS}", str(folder / "unit.cpp")], capture_output=True, text=True)
    return [line for line in done.stderr.splitlines() if "error" in line] if done.returncode else []


UNITS = {**{name: (made_config(**HEADS | sizes), 1) for name, sizes in ENDS.items()}, "release, whole": (RELEASED, 1), "release, a rank of 16": (RELEASED, 16)}


@pytest.mark.skipif(host.COMPILER is None, reason="needs g++")
def test_what_is_accepted_compiles(tmp_path):
    jobs = [(unit, rows) for unit in UNITS for rows in BUCKETS]
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda i: complaints(*UNITS[jobs[i][0]], jobs[i][1], tmp_path / str(i)), range(len(jobs))))
    assert not {job: lines for job, lines in zip(jobs, found) if lines}
    assert not any(size_misfits(cfg, tp) for cfg, tp in UNITS.values())


@pytest.mark.parametrize("change, name", [
    ({"head_dim": 64, "v_head_dim": 64}, "linear_attn_config.head_dim: found 64, wanted 128"), ({"short_conv_kernel_size": 3}, "short_conv_kernel_size"),
    ({"num_hidden_layers": 9, "attn_res_block_size": 1}, "found 9 blocks, wanted at most 8"), ({"num_experts": 64, "num_experts_per_token": 33}, "wanted at most 32"),
    ({"qk_rope_head_dim": 32}, "kv_lora_rank + qk_rope_head_dim: found 544, wanted a multiple of 64"), ({"hidden_size": 100}, "hidden_size: found 100, wanted a multiple of 16"),
    ({"hidden_size": 2032}, "hidden_size: found 2032"), ({"q_lora_rank": 24}, "q_lora_rank"), ({"qk_nope_head_dim": 24}, "qk_nope_head_dim"),
    ({"moe_intermediate_size": 2016}, "moe_intermediate_size: found 2016, whose sums fall into parts of 2016, wanted at most 512"),
    ({"routed_expert_hidden_size": 16384}, "routed_expert_hidden_size: found 16384")])
def test_other_sizes_are_named(change, name):
    bad = size_misfits(made_config(**HEADS | change))
    assert len(bad) >= 1 and name in "; ".join(bad)


def test_a_model_of_other_sizes_is_refused_before_its_load():
    report = Report("model", cfg=made_config())
    check_gpu(report, Gpu(0, "NVIDIA H200", "9.0", 150_000_000_000), 1)
    assert [f.found for f in report.findings][:1] == ["linear_attn_config.head_dim: found 16, wanted 128"]
    with pytest.raises(CheckpointError, match="sizes that the kernels are built for"):
        report.open()
