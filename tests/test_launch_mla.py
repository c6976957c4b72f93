"""Latent attention inside the single launch under g++: the standard path's bytes, from a layer's input to its result; its programs."""
from types import SimpleNamespace

import pytest
from launch_shim import BLOCKS, TOP_K, Case, small_layer, small_mla, small_steps  # first: it finds tests/gpu
from shim import host
from test_block_program import Walked, check_bytes, words_of

from k3cuda import block_program as bp
from k3cuda import launch_kinds as lk
from k3cuda.config import RELEASED_FOLDER, K3Config
from k3cuda.errors import PlanError
from k3cuda.launch_layer import LAYER_SLOTS, MERGED_ROWS, layer_kinds, layer_steps
from k3cuda.launch_mla import HeadProduct, MlaAttend, MlaCombine, NormedProduct, both_kinds, in_place_of_kda, mla_kinds, of_its_sort
from k3cuda.phases import Grid
from k3cuda.plan import build_plan

shim = pytest.mark.skipif(host.COMPILER is None, reason="needs g++")


@shim
@pytest.mark.parametrize(("rows", "cache", "context", "defines"), [(1, 1, 300, ()), (3, 2, 250, ()), (8, 1, 0, ()), (8, 2, 270, ("K3_SHIM_WGMMA",))])
def test_the_bytes_of_the_standard_path(tmp_path, rows, cache, context, defines):
    """Contexts end in their first chunk, where the standard path does not combine, in the second, or in either. At one row mla_in norms for itself."""
    case = Case(tmp_path, in_place_of_kda(small_layer(merged=rows == 1), small_mla(rows, cache)), rows, opening=(True, False), context=context, defines=defines)
    hidden, blocks = case.hidden.copy(), case.blocks.copy()
    walked = Walked(case, tmp_path / "standard")
    check_bytes(case, walked)
    if rows == 1:                                               # the same launch once more, over a cache that has the row already
        case.hidden[...], case.blocks[...] = hidden, blocks
        assert (case.launch()[0] == walked.result).all()


@shim
@pytest.mark.parametrize("defines", [(), ("K3_SHIM_WGMMA",)])
def test_the_bytes_of_blocks_in_a_cluster(tmp_path, defines):
    """Whose shared addresses say which block they are of; descriptors have no room for that."""
    case = Case(tmp_path, in_place_of_kda(small_layer(), small_mla(2, 1, 4)), 2, opening=(True,), blocks=4, cluster=2, context=260, defines=defines)
    check_bytes(case, Walked(case, tmp_path / "standard"))


@shim
def test_the_bytes_of_layers_of_both_sorts(tmp_path):
    mla = small_mla(2, 1)
    has = of_its_sort(SimpleNamespace(is_kda=lambda layer: layer != 1), mla)
    case = Case(tmp_path, both_kinds(small_layer(), mla), 2, has=has, context=40)
    assert set(case.mlas) == {1} and set(case.kdas) == {0, 2}
    check_bytes(case, Walked(case, tmp_path / "standard"))


@shim
def test_rows_of_padding_are_nobodys(tmp_path):
    """They are attended by nobody and stored nowhere, and still who waits for their results gets some."""
    case = Case(tmp_path, in_place_of_kda(small_layer(), small_mla(3, 1)), 3, opening=(True,), context=60)
    made = case.mlas[0]
    made.here["row_slot"][2] = -1
    before = made.after.copy()
    result, exchange = case.launch()
    stored = {(int(made.tables["page_table"][slot, at // 64]), int(at % 64)) for slot, at in zip(made.here["row_slot"][:2], made.here["row_position"])}
    changed = {(int(page), int(at)) for page, at in zip(*(made.after != before).any(2).nonzero())}
    assert changed == stored and (exchange == 0x80008000).all() and result.any(1).all()


@pytest.mark.parametrize("rows", [1, 8])
def test_the_program_of_released_layers(rows):
    """Of both sorts: what a phase finds in shared memory or at its neighbour's is of the phase that it counts on."""
    cfg, plan = K3Config.from_json(RELEASED_FOLDER), build_plan(K3Config.from_json(RELEASED_FOLDER), 16)
    mla = mla_kinds(cfg, 16, 2, rows=rows, cache=1, blocks=132)
    kinds = both_kinds(layer_kinds(cfg, 16, 2, rank_parts=16, forced=False, merged=rows <= MERGED_ROWS), mla)
    steps = layer_steps(plan, kinds, range(36, 44), of_its_sort(cfg, mla))
    program = bp.program(kinds, steps, rows, Grid(sms=132, cluster=2), 16, slots=LAYER_SLOTS)
    names = [step.name for step in steps]
    assert names.count("mla_attend") == 2 and names.count("kda_mix") == 6
    for a, b in zip(names, names[1:]):
        assert (a == "mla_q") <= (b == "mla_norm")              # whose LaunchMla has its norm
        assert (a == "mla_attend") == (b == "mla_combine")      # which finds its tables
    for step in steps:
        assert step.name not in ("mla_in", "kda_in") or (step.name == "kda_in") == cfg.is_kda(step.layer)
        if step.name in ("mla_in", "kda_in"):
            assert (step.extra > 0) == (rows <= MERGED_ROWS)
    at = {k.name: i for i, k in enumerate(kinds)}
    shapes = {k.name: (k.tiles, k.leaves, k.steps, k.parts) for k in kinds if isinstance(k, (NormedProduct, HeadProduct)) or k.name == "mla_in"}
    assert shapes == {"mla_in": (57, 16, 28, 2), "mla_q": (72, 16, 6, 2), "mla_absorb": (192, 8, 1, 1), "mla_out": (48, 16, 2, 1)}
    units = {}
    for block, phases in enumerate(words_of(program)):
        for phase, (kind, _, _, _, _, _, tiles) in enumerate(phases):
            units.setdefault((kind, phase), []).extend(tiles)
    for (kind, _), tiles in units.items():
        if kind == at["mla_attend"]:
            assert sorted(tiles) == list(range(132))
        if kind == at["mla_combine"] and tiles:
            assert sorted(tiles) == list(range(rows * 6 * (16 if rows == 1 else 8)))


def test_a_field_of_two_makers_lies_in_one_place():
    kinds = both_kinds(small_layer(), small_mla(1, 1))
    shifted = tuple(HeadProduct(**{n: getattr(k, n) for n in k.__dataclass_fields__} | {"fields": (lk.Field("before", "bf16", 8, 8), *k.fields), "firsts": (0, 1)})
                    if k.name == "mla_out" else k for k in kinds)
    steps = small_steps(kinds, (True, False), lambda k, layer: k.name not in ("kda_in", "kda_mix"))
    assert bp.program(kinds, steps, 1, Grid(sms=BLOCKS), TOP_K, slots=LAYER_SLOTS)
    with pytest.raises(PlanError, match="make mixer_out in different places of a row"):
        bp.program(shifted, steps, 1, Grid(sms=BLOCKS), TOP_K, slots=LAYER_SLOTS)


def test_latent_values_come_in_whole_slabs():
    attend = MlaAttend("mla_attend", 2, 96, 64, 1, 8)
    with pytest.raises(PlanError, match="96 latent values; wanted a multiple of 64"):
        MlaCombine("mla_combine", attend).kind(2048, 1)
