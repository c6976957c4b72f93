"""The single launch under g++: its tables, the program of every block, hand-overs between blocks that run as threads, the standard path's bytes.

The shim runs logic, not the machine: time is scripts/bench_launch.py's matter.
"""
import ctypes
import multiprocessing
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from launch_shim import BLOCKS, NORM_EPS, NOT_THERE, PRODUCTS, RANKS, ROUTED_SCALE, SITU, TOP_K, WITH_EXPERTS, Case, HostDevice, small_layer  # first: it finds tests/gpu
from kda_case import Kda
from launch_standard import KDA_WEIGHTS, Standard, left_out, of_bf16
from models import relative
from shim import host

from k3cuda import block_program as bp
from k3cuda import launch_kinds as lk
from k3cuda import launch_rank as lr
from k3cuda import launch_source as ls
from k3cuda.config import RELEASED_FOLDER, K3Config
from k3cuda.errors import PlanError
from k3cuda.launch_layer import LAYER_SLOTS, layer_kinds, layer_steps
from k3cuda.launch_mixes import OUT, SUMS, Mix
from k3cuda.launch_mla import MlaAttend
from k3cuda.phases import Grid
from k3cuda.plan import build_plan
from k3cuda.reference import FUNCTIONS
from k3cuda.reference.numerics import Numerics

shim = pytest.mark.skipif(host.COMPILER is None, reason="needs g++")


class Walked:
    """A launch, and the standard path's kernels on what each of its phases read. `differ`: phase name -> (differing values, values)."""

    def __init__(self, case, folder):
        program = case.program
        hidden, blocks = case.hidden.copy(), case.blocks.copy()
        self.record = np.zeros((program.phases, program.record_vectors * 4), np.uint32)
        self.result, self.exchange = case.launch(record=self.record)
        self.standard = Standard(program, program.grid.sms, False, SITU, ROUTED_SCALE, NORM_EPS)
        folder.mkdir()
        library = host.build(self.standard.text, self.standard.kernels, folder)
        self.differ = {}
        for _, name, wrong, values in self.standard.walk(HostDevice(library), self.record, case.weights, case.input, hidden, blocks, case.mixes, case.choices, case.kdas, case.mlas):
            before = self.differ.get(name, (0, 0))
            self.differ[name] = before[0] + wrong, before[1] + values
        self.hidden, self.blocks = hidden, blocks


def check_bytes(case, walked):
    kinds = case.program.kinds
    inner = {k.name for k in kinds if isinstance(k, (lk.ForcedChoice, MlaAttend)) or isinstance(k, Mix) and k.round != OUT}   # what follows from them is compared
    assert set(walked.differ) == {k.name for k in kinds} - inner
    assert not {name: found for name, found in walked.differ.items() if found[0]} and all(values for _, values in walked.differ.values())
    assert (walked.exchange == NOT_THERE).all()                 # as the next launch must find it
    assert case.hidden.tobytes() == walked.hidden.tobytes() and case.blocks.tobytes() == walked.blocks.tobytes()
    last = walked.standard.made(case.program.phases - 1)[0]
    result = walked.result.view(last.dtype)
    assert (result == np.tile(last, (1, -(-result.shape[1] // last.shape[1])))[:, :result.shape[1]]).all()
    final = of_bf16(result) if last.dtype == np.uint16 else result.view(np.float32)
    assert np.isfinite(final).all() and final.std() > 0.1


@shim
@pytest.mark.parametrize("kinds, rows", [(PRODUCTS, 1), (PRODUCTS, 3), (PRODUCTS, 8), (WITH_EXPERTS, 1), (WITH_EXPERTS, 8), (small_layer(), 1), (small_layer(), 8), (small_layer(merged=True), 1),
                                         (small_layer(merged=True), 3)],
                         ids=lambda v: str(v) if isinstance(v, int) else {3: "products", 4: "experts", 14: "merged"}.get(len(v), "layer"))
def test_the_bytes_of_the_standard_path(tmp_path, kinds, rows):
    case = Case(tmp_path, kinds, rows)
    walked = Walked(case, tmp_path / "standard")
    check_bytes(case, walked)
    if kinds is PRODUCTS:                                       # a second launch finds everything as the first did
        assert (case.launch(launches=2)[0] == walked.result).all()


@shim
def test_a_layers_own_phases_against_the_reference(tmp_path):
    """Mixes, the choice, the routed norm and the shared expert, from what the launch recorded of their inputs."""
    case = Case(tmp_path, small_layer(), 3, seed=4)
    hidden, blocks = case.hidden[:3].copy(), case.blocks[:, :3].copy()
    walked = Walked(case, tmp_path / "standard")
    check_bytes(case, walked)
    numbers = SimpleNamespace(num=Numerics("f32", "bf16"), cfg=SimpleNamespace(rms_norm_eps=NORM_EPS, num_experts_per_token=TOP_K, routed_scaling_factor=ROUTED_SCALE))
    seen = set()
    for phase, ((kind, layer), step) in enumerate(zip(case.program.weights, case.program.steps)):
        k, read, made = case.program.kinds[kind], lambda i: walked.standard.read(phase, i), walked.standard.made(phase)
        if k.name.endswith("_sums"):
            parts = read(0).reshape(3, k.rank_parts, k.n).transpose(1, 0, 2)
        elif isinstance(k, Mix) and k.round == OUT:
            score, weight = case.mixes[k.name, layer]
            ones = np.ones_like(score)
            b = SimpleNamespace(hidden=hidden, res_blocks=blocks, ffn_out=parts[0], attn_parts=parts, routed_parts=parts, attn_in=np.zeros((3, k.n), np.float32))
            b.ffn_in = b.routed_normed = b.attn_in
            w = SimpleNamespace(self_attention_res_norm=ones, self_attention_res_proj=score, mlp_res_norm=ones, mlp_res_proj=score,
                                input_layernorm=of_bf16(weight), post_attention_layernorm=of_bf16(weight), routed_expert_norm=of_bf16(weight))
            numbers.cfg.opens_res_block = lambda _, step=step: bool(step.extra >> 4)
            FUNCTIONS[k.name](numbers, w, b, SimpleNamespace(num_blocks=step.extra & 15, layer=layer))
            assert relative(of_bf16(made[0]), b.attn_in) < 3e-3, (k.name, layer)      # one rounding to BF16
        elif isinstance(k, lk.Route):
            logits = read(0)
            b = SimpleNamespace(router_logits=logits, shared_act=np.zeros((3, 1), np.float32), shared_partial=np.zeros((3, 1), np.float32),
                                expert_ids=np.zeros((3, TOP_K), np.int32), expert_weights=np.zeros((3, TOP_K), np.float32))
            FUNCTIONS["route"](numbers, SimpleNamespace(e_score_correction_bias=case.weights[kind, layer], shared_down_proj=np.zeros((1, 1), np.float32)), b, None)
            words = walked.record[phase][:3 * 2 * TOP_K].reshape(3, 2, TOP_K)
            assert (words[:, 0] == b.expert_ids).all() and relative(words[:, 1].copy().view(np.float32), b.expert_weights) < 1e-6
        elif isinstance(k, lk.Kda):
            at, bf16 = case.kdas[layer], lambda bits: bits.view(ml_dtypes.bfloat16)
            x = {"qkv": bf16(read(2)).reshape(3, 3, -1), "f_a": bf16(read(0)), "beta": at.records["beta"], "out_gate": read(3)}
            model = SimpleNamespace(heads=k.heads, w={n: getattr(at, n)[None] for n in KDA_WEIGHTS} | {"f_b": bf16(at.f_b)[None]})
            want = Kda.reference(model, at.slots, x, (at.state[None], bf16(at.conv)[None]))
            assert relative(at.records["beta"], 1 / (1 + np.exp(-read(1)[:, :k.heads]))) < 1e-6 and relative(of_bf16(made[0]), want["out"]) < 3e-3
            assert all(relative(at.records[n], want[n]) < 1e-5 for n in ("k", "v", "decay"))
        else:
            continue
        seen.add(k.name.removesuffix("_sums"))
    assert seen == {"attn_mix", "kda_mix", "ffn_mix", "route", "routed_norm"}
    assert relative(case.hidden[:3], hidden) < 1e-6 and relative(case.blocks[:2, :3], blocks[:2]) < 1e-6


@shim
def test_no_value_looks_as_if_it_were_not_there(tmp_path):
    """F32 as stored, but for the one value whose bits say so: its neighbour. BF16 without -0."""
    library = host.build("""#define K3_POLL 0
#define K3_PROBED 0
#define K3_STAMPED 0
#define K3_PRODUCER_LIMITS 1
#define K3_RANKS 1
#define K3_RANKS_HERE 1
#define K3_SCOPE "gpu"
#include "launch_exchange.cuh"
extern "C" __global__ void pack(const float* v, uint4* floats, uint4* halves) {
  const int lane = threadIdx.x;
  const uint4 four = pack_floats(v[lane], lane), eight = pack_vector(v[lane], lane);
  if (lane % 4 == 0) floats[lane / 4] = four;
  if (lane % 8 == 0) halves[lane / 8] = eight;
}
""", ["pack"], tmp_path)
    bits = np.random.default_rng(0).integers(0, 1 << 32, 32, np.uint32)
    bits[:6] = NOT_THERE, 0x80000000, 0x80000000, 0x80000000, 0, 0x7F800001
    floats, halves = np.zeros(32, np.uint32), np.zeros(32, np.uint16)
    host.launch(library, "pack", 1, 32, [bits.view(np.float32), floats, halves])
    assert floats[0] == NOT_THERE + 1 and (floats[1:] == bits[1:]).all()
    assert (halves[:5] == 0).all() and not (halves.view(np.uint32) == NOT_THERE).any()


@shim
@pytest.mark.parametrize(("rows", "cluster", "parts"), [(8, 2, 1), (8, 2, 2), (3, 4, 4)])
def test_the_bytes_of_experts_with_delays_at_random(tmp_path, rows, cluster, parts):
    """Groups of warps run ahead of one another, units are a block's own or shared by the cluster."""
    kinds = (lk.Product("wide", 7, 16, 2, cluster), WITH_EXPERTS[1], lk.ExpertUp("up", 3, 16, 1, parts), lk.ExpertDown("down", 2 * cluster - 1, 1, 2))
    case = Case(tmp_path, kinds, rows, layers=2, blocks=cluster, cluster=cluster, stress=True)
    check_bytes(case, Walked(case, tmp_path / "standard"))


def lose_a_unit(folder, trouble, phase):
    case = Case(folder, PRODUCTS, 1)
    case.launch(limit_ns=5_000_000_000, trouble=np.frombuffer(trouble, np.uint32), words=left_out(case.program, 1, phase))


@shim
def test_a_lost_result_ends_in_a_record_of_who_waited_for_what(tmp_path, phase=4):
    trouble = multiprocessing.RawArray(ctypes.c_uint32, 8)
    child = multiprocessing.get_context("fork").Process(target=lose_a_unit, args=(tmp_path, trouble, phase))
    child.start()
    child.join(60)
    assert child.exitcode == 86                           # the shim's trap
    what, block, warp, at, _ = trouble[:5]
    assert what in (3, 8) and block < BLOCKS and warp <= 17 and at in (phase, phase + 1)   # a vector of the phase, which the next one reads


def words_of(program):
    """For every block its phases: (kind, extra, input slots, output slot, cleared slots, needs, units)."""
    for block, words in enumerate(program.words):
        out = []
        for at in program.places(block):
            head, slots, ends = map(int, words[at:at + 3])
            units = head >> 16
            slots = [slots >> 4 * i & 15 for i in range(bp.MAX_INPUTS + 1 + bp.MAX_CLEARS)]
            out.append((head & 255, head >> 8 & 255, slots[:bp.MAX_INPUTS], slots[bp.MAX_INPUTS], slots[bp.MAX_INPUTS + 1:], ends & 0xFFFF,
                        [int(unit) for unit in words[at + 3:at + 3 + units]]))
        yield out


@pytest.mark.parametrize("cluster", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 8])
def test_programs_of_the_released_shapes(cluster, rows):
    cfg = K3Config.from_json(RELEASED_FOLDER)
    products = lr.dense_products(cfg, 16, cluster)
    program = bp.chain(products, 6, rows, Grid(sms=132, cluster=cluster))
    assert [(p.tiles, p.leaves, p.steps) for p in products] == [(194, 16, 28), (448, 1, 48), (66, 16, 28), (28, 16, 14)]
    done, used = {}, np.zeros((program.phases, bp.SLOTS), int)
    for phases in words_of(program):
        for phase, (kind, _, (slot_in, *none), slot_out, cleared, needs, tiles) in enumerate(phases):
            assert kind == phase % 4 and needs < phase + 1 and slot_in != slot_out and set(none) == {bp.NO_SLOT}
            assert cleared == [slot_in, bp.NO_SLOT]           # a chain: the next phase is the only reader
            for tile in tiles:
                done[phase, tile] = done.get((phase, tile), 0) + 1
            if slot_out != bp.NO_SLOT:
                used[phase, slot_out] = 1
    for phase in range(program.phases):
        p = products[phase % 4]
        assert all(done[phase, tile] == p.parts for tile in range(p.tiles)), p.name
    assert (used[:-1].sum(1) == 1).all() and not used[-1].any()
    for phase in range(bp.SLOTS, program.phases - 1):     # a slot is taken again two phases behind the one that clears it
        assert used[phase].argmax() == used[phase - bp.SLOTS].argmax()


@pytest.mark.parametrize(("rows", "merged"), [(1, False), (1, True), (8, False)])
def test_the_program_of_a_released_layer(rows, merged):
    """Slots hold what their readers want for as long as they want it, and what stays in a block is found there again."""
    cfg = K3Config.from_json(RELEASED_FOLDER)
    kinds = layer_kinds(cfg, 16, 2, rank_parts=16, forced=False, merged=merged)
    steps = layer_steps(build_plan(cfg, 16), kinds, range(11, 15))   # the thirteenth layer opens a block
    program = bp.program(kinds, steps, rows, Grid(sms=132, cluster=2), 16, slots=LAYER_SLOTS)
    assert all(program.most[i] == 1 for i, k in enumerate(kinds) if isinstance(k, (Mix, lk.Kda)))
    assert [s.extra for s in steps if s.name == "attn_mix_sums"] == [1, 1 | 1 << 4, 2, 2] and [s.extra for s in steps if s.name == "ffn_mix_sums"] == [1, 2, 2, 2]
    homes, has = {}, {}   # has: (kind, phase) -> units of every block
    for block, phases in enumerate(words_of(program)):
        owner, cleaned = {}, {}
        for phase, (kind, _, reads, out, clears, needs, units) in enumerate(phases):
            k = kinds[kind]
            for source, slot in zip(program.sources[phase], reads):
                assert source is None or owner[slot] == source            # nobody has written there since
                assert source is None or needs >= cleaned.get((slot, "used"), 0)
            for slot in clears:
                if slot != bp.NO_SLOT:
                    cleaned[slot], owner[slot] = phase + 1, None
            if out != bp.NO_SLOT:
                assert owner.get(out) is None and needs >= cleaned.get(out, 0)   # all that lay there is gone
                owner[out] = phase
            if isinstance(k, Mix):
                homes.setdefault((k.n, k.blocks), {}).setdefault(block, set()).add(tuple(units))
            assert not (isinstance(k, lk.Kda) and units and block < 8 * rows)   # elsewhere than mixes
            has.setdefault((k.name, phase), {})[block] = len(units)
        assert all(left is None for left in owner.values())                # everything is cleared in the end
    of = lambda name: next(units for (kind, _), units in has.items() if kind == name)
    if merged:   # before the experts, in all blocks
        assert set(of("shared_down").values()) == {3, 4} and [s.name for s in steps].index("shared_down") == [s.name for s in steps].index("route") + 1
    else:
        assert all(not (of("moe_down")[block] and of("shared_down")[block]) for block in range(132)) and max(of("shared_down").values()) == 23
    for product, reader in (("kda_in", "kda_mix"), ("o_proj", "ffn_mix_sums"), ("latent_up", "attn_mix_sums")):   # the fewest where its reader is at home
        busy = [of(product)[block] for block in range(132) if of(reader)[block]]
        assert max(busy) == min(of(product).values()) or (product, rows) == ("kda_in", 8)   # more blocks than have fewer tiles
    assert all(len(units) == 1 for of_blocks in homes.values() for units in of_blocks.values())
    for a, b in zip(steps, steps[1:]):
        if merged:                                                         # where its norm's weights are found, and whether something is mixed in
            assert (a.name == "attn_mix_sums") <= (b == bp.Step("kda_in", a.layer, 1 | 1 << 4))
        else:
            assert (a.name == "attn_mix_sums") <= (b.name == "attn_mix")   # what it finds in shared memory is of the phase before
    if merged:
        assert [s.extra for s in steps if s.name == "latent_up"] == [2, 2, 2, 1]   # the last layer has no closed round of a next one before it
    ahead = [steps.index(next(s for s in steps if s.name == "attn_mix_closed" and s.layer == layer)) for layer in (12, 13)]
    assert all(steps[at + 1].name == "latent_up" for at in ahead)


def test_what_the_kernel_cannot_do_is_refused():
    for products, rows, grid, message in (((lk.Product("few", 4, 8, 2, 2),), 1, Grid(cluster=2), "few has 8 leaves of 2 k-steps in 2 parts"),
                                          ((PRODUCTS[0], lk.ExpertUp("up", 4, 24, 3)), 1, Grid(), "up has 24 leaves in 1 parts"), (PRODUCTS, 9, Grid(), "9 rows"),
                                          (PRODUCTS, 1, Grid(sms=131, cluster=2), "clusters of 2")):
        with pytest.raises(PlanError, match=message):
            bp.chain(products, 2, rows, grid)
    kinds = small_layer()
    with pytest.raises(PlanError, match="2 are not enough"):
        bp.program(kinds, [bp.Step(k.name, 0) for k in kinds], 1, Grid(sms=BLOCKS), TOP_K, slots=2)
    with pytest.raises(PlanError, match="found 13 slots of the exchange, wanted at most 12"):
        bp.program(kinds, [bp.Step(k.name, 0) for k in kinds], 1, Grid(sms=BLOCKS), TOP_K, slots=13)
    with pytest.raises(PlanError, match="number 256, wanted 0 to 255"):
        bp.program(kinds, [bp.Step(k.name, 0, 256) for k in kinds], 1, Grid(sms=BLOCKS), TOP_K, slots=LAYER_SLOTS)
    with pytest.raises(PlanError, match="rows of 6 values"):
        lk.Field("odd", "f32", 6, 6)
    with pytest.raises(PlanError, match="long has 2 leaves of 17 k-steps in 1 parts; wanted an even number of steps or at most 16"):
        lk.Product("long", 4, 2, 17).kind(8192, 1)
    with pytest.raises(PlanError, match="slices of 20 values"):
        Mix("odd", SUMS, 20, RANKS, 0, stage="odd").kind(2048, 1)


def test_a_field_that_nobody_has_made_is_refused():
    """The launch has one input; only scores of closed blocks may be missing, where there are none."""
    kinds = small_layer()
    program = lambda kinds, steps: bp.program(kinds, steps, 1, Grid(sms=BLOCKS), TOP_K, slots=LAYER_SLOTS)
    steps = [bp.Step(k.name, 0, int(isinstance(k, Mix))) for k in kinds]
    at = {step.name: i for i, step in enumerate(steps)}
    swapped = list(steps)
    swapped[at["kda_mix"]], swapped[at["o_proj"]] = steps[at["o_proj"]], steps[at["kda_mix"]]
    without_scores = [step for step in steps if step.name != "attn_mix_closed"]
    assert program(kinds, steps).sources[at["attn_mix_sums"]] == (None, at["attn_mix_closed"])
    for wrong, message in ((swapped, "o_proj.* reads mixer_out, which no phase before it makes; the launch's input is ffn_out"),
                           (without_scores, "attn_mix_sums.* reads attn_mix_closed, which no phase before it makes")):
        with pytest.raises(PlanError, match=message):
            program(kinds, wrong)
    none_closed = [bp.Step(step.name, step.layer) if step.name == "attn_mix_sums" else step for step in without_scores]
    assert program(kinds, none_closed).sources[0] == (None, None)
    with pytest.raises(PlanError, match="kda_in reads attn_in, which no kind of phase makes"):
        program(tuple(k for k in kinds if k.name != "attn_mix"), steps)


@shim
def test_the_first_window_is_that_of_the_first_kind_with_weights(tmp_path):
    """Kind 0 of a layer has none; 0 bytes are another window than none said."""
    for name, kinds, first in (("layer", small_layer(), "kda_in"), ("chain", lk.linked(PRODUCTS), "wide")):
        program = bp.program(kinds, [bp.Step(k.name, 0) for k in kinds], 1, Grid(sms=BLOCKS), TOP_K, slots=LAYER_SLOTS)
        (folder := tmp_path / name).mkdir()
        text = ls.constants(program, ring=40 * 1024, copy=4096) + 'extern "C" int first[1] = {product_chain_shape::kFirstStreaming};\n'
        assert kinds[host.constants(host.build(text, [], folder), "first", 1)[0]].name == first
        for said, found in ((6144, 6144), (0, 0), (None, 4096)):
            assert ls.arguments(program, window=4096, first_window=said, counts=0).first_window == found


@shim
def test_what_a_kernel_is_built_with_must_be_said(tmp_path):
    """No default stands in a header for what launch_source defines."""
    text = ls.constants(bp.chain(PRODUCTS, 1, 1, Grid(sms=BLOCKS)), ring=24 * 1024, copy=2048)
    assert host.build(text, [], tmp_path)
    for name in ("K3_RECEIVE_BATCH", "K3_POLL", "K3_PROBED", "K3_STAMPED", "K3_PRODUCER_LIMITS"):
        with pytest.raises(AssertionError, match=name):
            host.build("".join(line for line in text.splitlines(True) if not line.startswith(f"#define {name}")), [], tmp_path)
