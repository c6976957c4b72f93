"""The DSpark golden in the kernels' own code, as far as its sizes have kernels."""
from dataclasses import replace

import numpy as np
import pytest
from drafts import GOLDEN, golden
from models import relative
from shim import host

pytest.importorskip("cupy", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")   # ctypes' view of Step lies beside it
pytestmark = pytest.mark.skipif(host.COMPILER is None, reason="needs g++")

from host_step import Kernels, Memory, held  # noqa: E402

from k3cuda.draft_plan import build_draft_plan  # noqa: E402
from k3cuda.draft_weights import BY_NAME as WEIGHT  # noqa: E402
from k3cuda.runtime.draft_checkpoint import DraftCheckpoint  # noqa: E402
from k3cuda.runtime.row_check import PADDING  # noqa: E402
from k3cuda.runtime.sampling import STREAM_DRAFT  # noqa: E402

STAGES = ("fuse", "context_mean", "lm_head", "markov", "confidence", "draft_pick")   # in order
ROUNDED = 2**-7   # relative: its inputs are F64, the kernels' BF16


def test_the_golden_around_its_layers(tmp_path):
    """Fused taps, and from hidden rows to drafts, likeliest ones and those of the golden's dice. Its attention has a cache of 40 values a token, which no
    kernel holds: sizes of attention alone are others here, and nothing of these stages depends on them."""
    source, (inputs, want) = DraftCheckpoint.open(GOLDEN), golden()
    plan = build_draft_plan(replace(source.cfg, kv_lora_rank=48, qk_rope_head_dim=16), 1, 7, 7)
    kernels = Kernels(32, 1, True, dict.fromkeys(STAGES, ()), tmp_path / "build", plan=plan, before=host.GIVEN_DICE)
    memory = Memory(plan, None, read=lambda name, layer: source.rank_slices(WEIGHT[name], layer, 1, 0))
    ops = {name: [op for op in (*plan.context, *plan.ops) if op.stage.name == name] for name in STAGES}
    drafts = [ops[name][i] for i in range(7) for name in STAGES[3:]]
    anchors = source.rank_slices(WEIGHT["markov_w1"], None, 1, 0)
    buffer = lambda name: held(memory, name)  # noqa: E731
    for r in range(2):
        given, wanted = ({n.removeprefix(f"round{r}."): x for n, x in table.items()} for table in (inputs, want))
        memory.poison()
        for name in ("row_slot", "row_position", "seq_seed"):
            buffer(name)[...] = PADDING.get(name, 0)
        count = len(given["taps"])
        buffer("row_slot")[:count] = 0
        buffer("taps")[:count] = given["taps"].reshape(count, 3, -1)
        for name in STAGES[:2]:
            kernels.run(ops[name][0], memory)
        assert relative(buffer("context")[:count].astype(np.float64), wanted["fused"]) < ROUNDED
        buffer("row_slot")[7:] = -1
        buffer("head_in")[:7] = wanted["hidden"]
        kernels.run(ops["lm_head"][0], memory)
        assert relative(buffer("logits_part")[:7], wanted["base_logits"]) < ROUNDED
        host.throw(kernels.library, STREAM_DRAFT, given["u_draft"])
        for kind, temperature in (("greedy", 0), ("sampled", inputs["temperature"][0])):
            buffer("seq_temperature")[0], buffer("markov_in")[0] = temperature, anchors[given["anchor"][0]]
            for op in drafts:
                kernels.run(op, memory)
            assert buffer("draft_ids")[:7, 0].tolist() == wanted[f"{kind}.tokens"].tolist()
            assert relative(buffer("draft_logits")[:7, 0], wanted[f"{kind}.logits"]) < ROUNDED
            if kind == "greedy":
                sure = buffer("draft_confidence")[:7, 0]
                assert relative(np.log(sure) - np.log1p(-sure), wanted["greedy.confidence_logits"]) < ROUNDED
