"""A draft's kernels without a GPU: those of public drafts on one rank of 16 compile, one architecture each, and spill nothing.

All public drafts, row buckets and architectures are minutes: `scripts/compile_drafts.py`.
"""
import functools
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("cuda.bindings", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")

from test_draft_config import PUBLIC, read  # noqa: E402
from test_jit import ARCHS  # noqa: E402

from k3cuda.draft_plan import build_draft_plan  # noqa: E402
from k3cuda.draft_stages import DRAFT_STAGES  # noqa: E402
from k3cuda.draft_weights import BY_NAME  # noqa: E402
from k3cuda.emit import build_files, kernels_of  # noqa: E402
from k3cuda.errors import ConfigError  # noqa: E402
from k3cuda.packing import DRAFT_PACKED, MAX_PACKED  # noqa: E402
from k3cuda.runtime.cuda_jit import KERNELS  # noqa: E402
from k3cuda.runtime.cuda_kernels import compile_accept, compile_bucket  # noqa: E402
from k3cuda.runtime.accept_records import MOST_DRAFTS  # noqa: E402
from k3cuda.runtime.drafting import ACCEPTANCES  # noqa: E402
from k3cuda.runtime.sampling import STREAM_ACCEPT, STREAM_DRAFT, STREAM_SAMPLE  # noqa: E402
from k3cuda.tables import GQA_CLASSES  # noqa: E402

UNITS = {"Inferact": "sm_90a", "NeMo": "sm_100a", "RedHat": "sm_103a"}


@functools.cache
def compiled():
    def one(name):
        return compile_bucket(build_draft_plan(read(PUBLIC[name]), 16), 8, "bf16", UNITS[name], strict=True)

    with ThreadPoolExecutor() as pool:
        return dict(zip(UNITS, pool.map(one, UNITS)))


@pytest.mark.parametrize("name", UNITS)
def test_every_kernel_compiles_and_spills_nothing(name):
    plan, resources = build_draft_plan(read(PUBLIC[name]), 16), compiled()[name].resources()
    assert set(resources) == {f"k_{k}" for op in plan.context + plan.ops for k in kernels_of(op.stage, plan, 8)}
    assert not {kernel for kernel, r in resources.items() if r.spills or r.stack}


def test_latent_attention_with_windows_is_refused():
    windows = {"layer_types": ["sliding_attention"] * 5, "sliding_window": 2048}
    with pytest.raises(ConfigError, match="sliding_attention in a draft with MLA attention"):
        build_files(build_draft_plan(read(PUBLIC["Inferact"], **windows), 16), 8, "bf16")


@pytest.mark.parametrize("stage", DRAFT_STAGES, ids=lambda s: s.name)
def test_packed_arrays_hold_exactly_a_stages_weights(stage):
    packed = DRAFT_PACKED.get(stage.name, ())
    assert sorted(name for p in packed for name in p.sources) == sorted(stage.weights) and len(packed) <= MAX_PACKED
    assert all(name in BY_NAME for p in packed for name in p.sources)


def test_packed_arrays_belong_to_stages():
    assert set(DRAFT_PACKED) <= {s.name for s in DRAFT_STAGES}


@pytest.mark.parametrize("arch", ARCHS)
def test_acceptance_compiles_and_spills_nothing(arch):
    resources = compile_accept(163840, arch, strict=True).resources()
    assert set(resources) == {"k_laws", "k_draft_laws", "k_judge"} and not any(r.spills or r.stack for r in resources.values())


def test_numbers_typed_in_both_languages_agree():
    assert f"kClasses = {GQA_CLASSES};" in (KERNELS / "stages" / "draft_gqa.cuh").read_text()
    text = (KERNELS / "accept_core.cuh").read_text()
    assert f"kMostDrafts = {MOST_DRAFTS};" in text and f"kStreamAccept = {STREAM_ACCEPT}, kStreamSample = {STREAM_SAMPLE};" in text
    assert f"enum AcceptRule {{ {', '.join('kAccept' + name.capitalize() for name in ACCEPTANCES)} }};" in text
    assert f"kStreamDraft = {STREAM_DRAFT};" in (KERNELS / "stages" / "draft_head.cuh").read_text()
