"""What of a GPU's memory a rank takes, for every number of ranks, and the longest context that fits beside it. No GPU is needed to know it."""
from dataclasses import replace
from typing import Sequence

from ..buffers import KV_BYTES
from ..config import K3Config
from ..context_split import legal_dcps
from ..draft_config import DraftConfig
from ..draft_plan import build_draft_plan
from ..draft_weights import cut_weights
from ..errors import OutOfMemory
from ..plan import Taps, build_plan
from ..weights import check_tp, legal_cuts, legal_tps
from .cuda_weights import draft_plan_bytes, plan_bytes
from .findings import Finding
from .machine import Gpu, gpu_problem
from .step_room import KERNEL_BYTES, MEMORY_UTILIZATION, longest_fit


def gpu_rows(cfg: K3Config, gpu: Gpu, sequences: int = 1, draft: DraftConfig | None = None) -> list[dict]:
    """For each legal number of ranks, one on a GPU like this, and each number of them that may hold the cache together: JSON-ready; docs/cli.md
    has the keys. Sizes in bytes, lengths in tokens.

    `draft`: of a draft model beside it, from whole blocks.
    """
    rows = []
    for tp in legal_tps(cfg):
        if draft and tp not in legal_cuts(cut_weights(draft), draft.dims()):
            continue
        plan, drafts = _plans(cfg, tp, draft)
        weights = plan_bytes(plan) + (draft_plan_bytes(drafts) if draft else 0)
        room = int(gpu.memory_bytes * MEMORY_UTILIZATION) - weights - KERNEL_BYTES
        for dcp in legal_dcps(tp):
            # Which operations a split cache adds takes no room: what passes between them is in the sizes.
            cut = replace(plan, dcp=dcp)
            rows.append({"gpu": gpu.name, "memory_bytes": gpu.memory_bytes, "tp": tp, "dcp": dcp, "weights_bytes": weights, "kernels_bytes": KERNEL_BYTES,
                         "room_bytes": room, "sequences": sequences,
                         "max_model_len": {kv: longest_fit(cut, room, sequences, kv, drafts) if room > 0 else 0 for kv in KV_BYTES}})
    return rows


def gpu_table(cfg: K3Config, gpus: Sequence[Gpu], sequences: int = 1, draft: DraftConfig | None = None) -> list[dict]:
    """`gpu_rows` of every kind of GPU that can run the kernels; [] where there is none."""
    kinds = {(gpu.name, gpu.memory_bytes): gpu for gpu in gpus if gpu_problem(gpu) is None}
    return [row for gpu in kinds.values() for row in gpu_rows(cfg, gpu, sequences, draft)]


def gpu_findings(cfg: K3Config, gpu: Gpu, tp: int, draft: DraftConfig | None = None) -> list[Finding]:
    """What is wrong where all of `tp` ranks shall run on one GPU, with a draft model if there is one: their weights must fit."""
    check_tp(cfg, tp)
    plan, drafts = _plans(cfg, tp, draft)
    need = (plan_bytes(plan) + (draft_plan_bytes(drafts) if draft else 0)) * tp + KERNEL_BYTES
    usable = int(gpu.memory_bytes * MEMORY_UTILIZATION)
    if need <= usable:
        return []
    fits = [row["tp"] for row in gpu_rows(cfg, gpu, draft=draft) if row["max_model_len"]["bf16"]]
    way_out = f"on GPUs like this the model needs {fits[0]} ranks, each on one of its own" if fits else "no number of ranks fits GPUs like this: use one with more memory"
    return [Finding(gpu.name, f"{gpu.memory_bytes / 1e9:.1f} GB of memory, of which {usable / 1e9:.1f} GB may be used",
                    f"{need / 1e9:.1f} GB for the weights of {tp} rank{'s' * (tp > 1)}{', the draft model' if draft else ''} and the kernels", way_out, OutOfMemory.code)]


def _plans(cfg: K3Config, tp: int, draft: DraftConfig | None):
    """The step's and the draft's, None without one."""
    if draft is None:
        return build_plan(cfg, tp), None
    return build_plan(cfg, tp, Taps(draft.target_layer_ids, draft.tap_stream)), build_draft_plan(draft, tp)
