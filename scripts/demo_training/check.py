"""What was written, in the reference: the same logits as here, the same text with drafts as without, and how many drafts stand."""
import numpy as np
import torch
from safetensors.numpy import load_file

from k3cuda import LLM, SamplingParams
from k3cuda.config import DECODE_ROWS
from k3cuda.reference.mxfp4 import dequantize
from k3cuda.runtime.checkpoint import Checkpoint
from k3cuda.runtime.demo_tasks import TASKS, held_out_set
from k3cuda.weights import BY_NAME

from .model import K3

TOLERANCE = 1e-5   # relative L2 of F32 logits, of the project's own checks


def from_checkpoint(folder) -> K3:
    """The model that a folder holds, in PyTorch, in F32. Quantising weights that are quantised changes none."""
    source = Checkpoint.open(folder)
    found = K3(source.cfg, room=source.cfg.num_experts / source.cfg.num_experts_per_token)
    with torch.no_grad():
        for layer, name in found.names:
            if BY_NAME[name].mxfp4:
                value = dequantize(source.rank_slices(name, layer, 1, 0), source.rank_slices(f"{name}_scale", layer, 1, 0))
            else:
                value = source.read(name, layer).astype(np.float32)
            found.weight(layer, name).copy_(torch.from_numpy(value))
    source.close()
    return found


def golden_agrees(folder) -> float:
    """Relative L2 between the logits of the golden model in `folder` here, in F32, and those of the release's own code in float64."""
    golden = load_file(folder / "golden.safetensors")
    ours, theirs = _logits(folder, golden["input_ids"].tolist()), golden["logits"].astype(np.float64)
    return _close(ours, theirs, folder)


def logits_agree(folder, ids: list[int]) -> float:
    """Relative L2 between the logits of the checkpoint in PyTorch and in the reference, both in F32, over a row of text.

    Raises AssertionError where it is above TOLERANCE.
    """
    return _close(_logits(folder, ids), _reference_logits(folder, ids), folder)


def _logits(folder, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        found = from_checkpoint(folder)
        return found.logits(found(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool)))[0].numpy().astype(np.float64)


def _close(ours: np.ndarray, theirs: np.ndarray, what) -> float:
    worst = float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
    assert worst < TOLERANCE, f"{what}: logits differ by {worst:.2e} relative, wanted {TOLERANCE:.0e}"
    return worst


def _reference_logits(folder, ids: list[int]) -> np.ndarray:
    with LLM(str(folder), max_batch=1, max_model_len=len(ids) + 1) as llm, llm.prefill(ids[:1]) as session:
        rows = [session.logits.copy()[None]]
        for at in range(1, len(ids), DECODE_ROWS):
            rows.append(session.step(ids[at:at + DECODE_ROWS]))
    return np.concatenate(rows).astype(np.float64)


def drafts_agree(folder, draft_folder, count: int) -> dict:
    """Greedy answers to a few held-out problems of the short tasks, with and without the draft: equal ids, or AssertionError."""
    asked = [[{"role": "user", "content": p.prompt}] for name, task in TASKS.items() if name != "needle" for p in held_out_set(task, count)]
    params = SamplingParams(temperature=0, max_tokens=40)

    def answers(**options):
        with LLM(str(folder), max_model_len=160, **options) as llm:
            return llm.chat(asked, params, reasoning_effort="none")

    plain, drafted = answers(), answers(draft_model=str(draft_folder))
    assert [o.token_ids for o in plain] == [o.token_ids for o in drafted], f"{draft_folder}: greedy answers differ with the draft"
    stats = [o.stats.speculative for o in drafted if o.stats.speculative and o.stats.speculative.steps]
    steps = sum(s.steps for s in stats)
    return {"answers": len(plain), "acceptance_length": round(sum(s.acceptance_length * s.steps for s in stats) / steps, 3) if steps else None}
