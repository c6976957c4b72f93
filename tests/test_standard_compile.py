"""The standard path's kernels without a GPU: every one compiles for every architecture, spills nothing and reads wide.

One small model for each architecture, and one rank of 16 of the released one with few and with many rows: kernels are made by the sizes
they get.
"""
import ctypes
import functools
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")

from models import headdims  # noqa: E402
from test_jit import ARCHS, NVDISASM, opcodes  # noqa: E402

from k3cuda.config import MAX_ROWS, RELEASED_FOLDER, K3Config  # noqa: E402
from k3cuda.emit import build_files, kernels_of  # noqa: E402
from k3cuda.errors import CompileError  # noqa: E402
from k3cuda.packing import FOLDED, MAX_PACKED, PACKED, PLAIN  # noqa: E402
from k3cuda.plan import build_plan  # noqa: E402
from k3cuda.runtime.cuda_jit import KERNELS, compile_cuda  # noqa: E402
from k3cuda.runtime.cuda_kernels import compile_bucket, compile_step_io, no_sampler  # noqa: E402
from k3cuda.runtime.step_records import PENALTY, ROW, SampleArgs, StepLoad  # noqa: E402
from k3cuda.stages import STAGES  # noqa: E402
from k3cuda.tables import SESSION  # noqa: E402
from k3cuda.weights import BY_NAME  # noqa: E402


def released() -> K3Config:
    return K3Config.from_json(RELEASED_FOLDER)


# name -> (config, ranks, rows, dtype of the cache, architecture, whether collectives ride on stores). Each compiles for seconds.
UNITS = {**{arch: (headdims().cfg, 1, 8, "bf16", arch, True) for arch in ARCHS},
         "collectives": (headdims().cfg, 2, 1, "fp8_e4m3", ARCHS[0], False),
         "wide": (headdims().cfg, 2, 256, "bf16", ARCHS[0], True), "wide-released": (released(), 16, MAX_ROWS, "fp8_e4m3", ARCHS[0], True),
         "released": (released(), 16, 1, "bf16", ARCHS[0], True), "released-64": (released(), 16, 64, "fp8_e4m3", ARCHS[0], True),
         "released-4": (released(), 16, 4, "bf16", ARCHS[1], True)}
# Kernels that multiply matrices: those of stages with weights in fragment order, and attention over the cache.
PRODUCTS = [k for s in STAGES if any(p.how not in (PLAIN, FOLDED) for p in PACKED.get(s.name, ())) for k in kernels_of(s, build_plan(released()))] + ["mla_attend"]


@functools.cache
def compiled() -> dict:
    """Every unit, side by side; warnings of ptxas are errors."""
    def one(unit):
        cfg, tp, rows, kv, arch, ride = unit
        return compile_bucket(build_plan(cfg, tp), rows, kv, arch, ride=ride, strict=True)

    with ThreadPoolExecutor() as pool:
        return dict(zip(UNITS, pool.map(one, UNITS.values())))


@functools.cache
def kernels(unit: str) -> dict[str, set[str]]:
    if NVDISASM is None:
        pytest.skip("nvdisasm isn't installed: pip install 'k3cuda[test]'")
    return {name.removeprefix("k_"): ops for name, ops in opcodes(compiled()[unit].cubin).items()}


@pytest.mark.parametrize("unit", UNITS)
def test_every_kernel_compiles_and_spills_nothing(unit):
    cfg, tp, rows, _, _, ride = UNITS[unit]
    plan, resources = build_plan(cfg, tp), compiled()[unit].resources()
    assert set(resources) == {f"k_{k}" for op in plan.ops + plan.commit for k in kernels_of(op.stage, plan, rows, ride)}
    spilled = {name: r for name, r in resources.items() if r.spills or r.stack}
    assert not spilled


@pytest.mark.parametrize("unit", UNITS)
def test_products_run_side_by_side(unit):
    """ptxas takes wgmmas one by one, and only notes it, where it lacks registers."""
    assert "serialized" not in compiled()[unit].log


def test_attention_of_a_row_leaves_registers_for_its_combination():
    """20 warps of one and 8 of the other on an SM."""
    attend, combine = (compiled()["released"].resources()[f"k_mla_{k}"].registers for k in ("attend", "combine"))
    assert (20 * -(-attend // 8) + 8 * -(-combine // 8)) * 8 * 32 <= 65536, (attend, combine)


@pytest.mark.parametrize("unit", UNITS)
def test_no_kernel_uses_local_memory(unit):
    local = {name: ops & {"LDL", "STL"} for name, ops in ((n, {o.split(".")[0] for o in x}) for n, x in kernels(unit).items())}
    assert not {name for name, ops in local.items() if ops}


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("kernel", PRODUCTS)
def test_products_use_the_machine(unit, kernel):
    """Tensor products, and weights that arrive 16 bytes a lane or in bulk."""
    of_wide = {"moe_down": "expert_items", "route": "shared_down"}   # other kernels run the stage there
    ops = kernels(unit)[of_wide.get(kernel, kernel) if unit.startswith("wide") else kernel]
    assert any(o.startswith(("HMMA.16816.F32", "HGMMA")) for o in ops), ops
    cfg, tp, rows, _, arch, _ = UNITS[unit]
    many = min(rows, 8) * cfg.num_attention_heads // tp > 16   # queries of a group
    assert kernel != "mla_attend" or any(o.startswith("HGMMA") for o in ops) == (arch == "sm_90a" and many), ops
    assert any(o.startswith(("UBLKCP", "UTMALDG")) or o.startswith(("LDG", "LDGSTS")) and "128" in o for o in ops), ops


def test_structures_are_laid_out_as_compiled():
    """ctypes' view of `Step` and `OpArgs` against the compiler's."""
    pytest.importorskip("cupy", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")
    from k3cuda.runtime.cuda_memory import OpStruct, step_type
    headers = build_files(build_plan(headdims().cfg, 2), 1, "bf16")
    headers.pop("kernels.cu")

    def unit(offset=0):   # NVRTC 12 has no offsetof; this is what its front end makes of one
        lines = ['#include "buffers.cuh"']
        for name, struct in (("Step", step_type(SESSION)), ("OpArgs", OpStruct)):
            lines.append(f'static_assert(sizeof({name}) == {ctypes.sizeof(struct)}, "size of {name}");')
            lines += [f'static_assert(__INTADDR__(&(({name}*)0)->{field}) == {getattr(struct, field).offset + offset}, "{name}.{field}");'
                      for field, _ in struct._fields_]
        return "\n".join(lines)

    compile_cuda(unit(), ARCHS[0], headers=headers)
    with pytest.raises(CompileError, match=r"Step\.arena|OpArgs\.w"):
        compile_cuda(unit(offset=4), ARCHS[0], headers=headers)


def test_structures_around_a_step_are_laid_out_as_compiled():
    def unit(offset=0):
        lines = ['#include "step_io.cuh"']
        for struct in (StepLoad, SampleArgs):
            lines.append(f'static_assert(sizeof({struct.__name__}) == {ctypes.sizeof(struct)}, "size of {struct.__name__}");')
            lines += [f'static_assert(__INTADDR__(&(({struct.__name__}*)0)->{field}) == {getattr(struct, field).offset + offset}, "{field}");'
                      for field, _ in struct._fields_]
        for dtype, name in ((ROW, "SampleRow"), (PENALTY, "SamplePenalty")):
            lines.append(f'static_assert(sizeof({name}) == {dtype.itemsize}, "size of {name}");')
            lines += [f'static_assert(__INTADDR__(&(({name}*)0)->{field}) == {dtype.fields[field][1] + offset}, "{name}.{field}");' for field in dtype.names]
        return "\n".join(lines)

    compile_cuda(unit(), ARCHS[0])
    with pytest.raises(CompileError, match="inputs|logits"):
        compile_cuda(unit(offset=4), ARCHS[0])


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("vocab", [640, 163840])
def test_the_sampler_compiles_and_spills_nothing(arch, vocab):
    resources = compile_step_io(vocab, arch, strict=True).resources()
    assert set(resources) == {"k_load", "k_sample"} and not any(r.spills or r.stack for r in resources.values())


@pytest.mark.parametrize("vocab", [641, 163844])
def test_a_vocabulary_without_a_sampler_is_told(vocab):
    assert f"vocabulary of {vocab}" in no_sampler(vocab) and set(compile_step_io(vocab, ARCHS[0]).resources()) == {"k_load"}


def test_every_field_of_the_structures_is_known_to_python():
    pytest.importorskip("cupy", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")
    from k3cuda.runtime.cuda_memory import OpStruct, step_type
    text = build_files(build_plan(headdims().cfg, 1), 1, "bf16")["buffers.cuh"]
    for name, struct in (("Step", step_type(SESSION)), ("OpArgs", OpStruct)):
        body = re.sub(r"//.*", "", re.search(rf"struct {name} \{{(.*?)\}};", text, re.S).group(1))
        fields = [re.search(r"(\w+)(\[\w+\])?$", part.strip()).group(1) for line in body.split(";") if line.strip() for part in line.split(",")]
        assert fields == [field for field, _ in struct._fields_], name


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.cuh")), ids=lambda p: str(p.relative_to(KERNELS)))
def test_no_size_of_the_released_model_is_typed(path):
    """Sizes above 512 that are no power of two: what is smaller, or is one, is also a number of threads, bytes or registers."""
    sizes = {n for n in released().dims().values() if n > 512 and n & n - 1}
    text = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
    assert not sizes & {int(n) for n in re.findall(r"(?<![\w.])\d+(?![\w.])", text)}


@pytest.mark.parametrize("stage", STAGES, ids=lambda s: s.name)
def test_packed_arrays_hold_exactly_a_stages_weights(stage):
    """Each once; an MXFP4 source stands for its scales too."""
    sources = [name for p in PACKED.get(stage.name, ()) for name in p.sources]
    scales = [f"{name}_scale" for name in sources if BY_NAME[name].mxfp4]
    assert sorted(sources + scales) == sorted(stage.weights)
    assert len(PACKED.get(stage.name, ())) <= MAX_PACKED


def test_packed_arrays_belong_to_stages():
    assert set(PACKED) <= {s.name for s in STAGES}


def test_numbers_typed_in_both_languages_agree():
    from k3cuda.runtime.backend import AS_SAMPLED
    from k3cuda.runtime.repack import X_EXPONENT
    from k3cuda.runtime.sampling import MAX_LOGPROBS
    from k3cuda.runtime.step_records import NODE

    factor = f"{np.float32(2.0**X_EXPONENT).view(np.uint32) >> 16:x}"   # BF16: the upper half of the F32
    types = (KERNELS / "sample_types.cuh").read_text()
    assert f"kSampleNode = {NODE}, kSampleTop = {MAX_LOGPROBS};" in types and f"kAsSampled = {AS_SAMPLED};" in (KERNELS / "step_io.cuh").read_text()
    assert f"kTokenFactor = 0x{factor}{factor}u" in (KERNELS / "mxfp4.cuh").read_text()
