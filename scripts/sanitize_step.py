"""Steps of a small model for compute-sanitizer: every kernel of the narrow and of the wide step, commit, load and sampler, in seconds.

    compute-sanitizer --tool memcheck python3 scripts/sanitize_step.py

Without the tool it compiles the kernels, with line numbers, and runs the same steps.
"""
import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from k3cuda.runtime import cuda_jit  # noqa: E402

# Reports then name lines, and warps arrive lane by lane (prims.cuh); else the instructions are the same.
cuda_jit.OPTIONS = (*cuda_jit.OPTIONS, "--generate-line-info", "-DK3_SANITIZE")
from k3cuda.config import PAGE_SIZE  # noqa: E402
from k3cuda.runtime.backend import StepRows  # noqa: E402
from k3cuda.runtime.cuda_backend import CudaBackend  # noqa: E402
from k3cuda.runtime.cuda_kernels import bucket_of, compile_buckets  # noqa: E402
from k3cuda.runtime.made_config import made_config  # noqa: E402
from k3cuda.runtime.made_model import MadeCheckpoint  # noqa: E402
from k3cuda.runtime.sampling import Draw, SamplingParams  # noqa: E402

# What the attention's and KDA's kernels are made for, and otherwise as little as a model can have.
MODEL = dict(num_attention_heads=4, head_dim=128, v_head_dim=128, qk_nope_head_dim=128, qk_rope_head_dim=64, kv_lora_rank=512)
# (ranks, cache, whether collectives ride, steps of (slot, its rows)): buckets of 1, 8, 64 and 128 rows
UNITS = ((1, "bf16", True, ([(0, 1)], [(0, 5), (1, 3)], [(0, 30), (1, 10), (2, 1)], [(2, 100), (0, 5)])),
         (2, "fp8_e4m3", False, ([(0, 1)], [(0, 5), (1, 3)])))
VARIANTS = (dict(temperature=0), dict(temperature=1, top_p=0.9, top_k=20), dict(temperature=1, min_p=0.05, frequency_penalty=0.5))


def run(backend: CudaBackend, steps, rng) -> None:
    """`steps` as an engine launches them, then one with refused rows."""
    cfg, done = backend.cfg, [0] * backend.num_slots
    for slot in range(backend.num_slots):
        backend.open_slot(slot, range(slot * 2, slot * 2 + 2))
    for parts in steps:
        rows, draws = rows_of(parts, done, rng, cfg.vocab_size), []
        for slot, n in parts:
            done[slot] += n
            params = SamplingParams(**VARIANTS[slot], seed=slot).resolved({})
            draws.append(Draw(params, slot, done[slot], prompt_ids=[5], output_ids=[6, 7]))
        drawn = backend.launch(rows, draws).drawn()
        print(f"{len(rows)} rows of {len(parts)} sequences: {[d.token_id for d in drawn]}", flush=True)
    backend.step(rows_of([(0, 2), (1, 3)], done, rng, cfg.vocab_size))
    assert np.isfinite(backend.logits()).all()
    backend.commit(np.array([True, False, True, True, False]))
    backend.copy_slot(0, 1, range(2, 4))


def rows_of(parts, done, rng, vocab) -> StepRows:
    counts = [n for _, n in parts]
    positions = np.concatenate([np.arange(done[slot], done[slot] + n) for slot, n in parts])
    return StepRows(*(np.asarray(x, np.int32) for x in (rng.integers(3, vocab, sum(counts)), np.repeat([slot for slot, _ in parts], counts), positions,
                                                        np.cumsum(counts) - 1)))


def main() -> None:
    source = MadeCheckpoint(made_config(**MODEL), seed=3)
    for tp, kv, ride, steps in UNITS:
        backend = CudaBackend(source, tp, max_batch=3, max_model_len=2 * PAGE_SIZE, kv_cache_dtype=kv, ride=ride)
        compile_buckets(backend.plan, {bucket_of(sum(n for _, n in parts)) for parts in steps}, kv, backend.device.arch, sms=backend.device.sms, ride=ride)
        run(backend, steps, np.random.default_rng(7))
        backend.close()


if __name__ == "__main__":
    main()
