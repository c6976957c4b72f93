"""The single launch under g++: its tables, the program of every block, hand-overs between blocks that run as threads, the row core's sums.

The shim runs logic, not the machine: time is scripts/bench_launch.py's matter.
"""
import ctypes
import multiprocessing

import core_units as u
import numpy as np
import pytest
from shim import host

from k3cuda import block_program as bp
from k3cuda import launch_source as ls
from k3cuda.config import RELEASED_FOLDER, K3Config
from k3cuda.errors import PlanError
from k3cuda.phases import Grid

PRODUCTS = (bp.Product("wide", 7, 16, 2), bp.Product("one leaf", 33, 1, 6), bp.Product("two", 5, 2, 4))
EXPERTS, TOP_K, SITU = 12, 4, (1.5, 2.5)
BLOCKS, LAYERS = 3, 3


def rows_of(vectors, rows):
    return vectors.reshape(rows, -1)


def linked(y, row):
    """Results [rows, outputs] F32 as the next phase's input: BF16, +0 for -0, repeated up to `row` values."""
    bits = u.to_bf16(y)
    bits[bits == 0x8000] = 0
    return np.ascontiguousarray(np.tile(bits, -(-row // bits.shape[1]))[:, :row])


def row_core(folder, products):
    """The standard path's kernels of the same products."""
    text = '#define K3_BENCH_SMS 4\n#include "bench_core.cuh"\n'
    for i, p in enumerate(products):
        text += f"typedef RowShape<{p.leaves}, {p.steps}, 1, 1, {min(p.leaves, 4)}, 1, 1, 4096> shape_{i};\nK3_BENCH_ROWS(product_{i}, {p.tiles}, shape_{i})\n"
    folder.mkdir()
    return host.build(text, [f"product_{i}" for i in range(len(products))], folder)


def launched(library, program, weights, x, choices=None, launches=1, record=None, limit_ns=100_000_000_000, trouble=None, words=None):
    """Result of the last launch, BF16 bits [rows, row], and the exchange behind it. Windows let a copy or two be in flight."""
    threads, shared, _, _ = host.constants(library, "product_chain_launch", 4)
    exchange = np.full((bp.SLOTS, program.slot_vectors * 4), 0x80008000, np.uint32)
    counts, trouble = np.zeros(ls.COUNT_BYTES // 4, np.uint32), np.zeros(8, np.uint32) if trouble is None else trouble
    places = np.array([weights[w].ctypes.data for w in program.weights], np.uint64)
    result = np.zeros((program.rows, program.links[-1].row * bp.VECTOR), np.uint16)
    words = program.words if words is None else words
    names = dict(weights=places, programs=words, input=x, exchange=exchange, result=result, counts=counts, trouble=trouble, record=record, choices=choices)
    addresses = {n: a.ctypes.data for n, a in names.items() if a is not None}
    args = ls.arguments(program, window=4096, waiting_window=2048, first_window=6144, prefetch=2, limit_ns=limit_ns, situ=SITU, **addresses)
    for launch in range(launches):
        pointers, three = (ctypes.c_void_p * 1)(ctypes.addressof(args)), ctypes.c_uint * 3
        library.k3_shim_product_chain(three(program.grid.sms, 1, 1), three(threads, 1, 1), ctypes.c_size_t(shared), program.grid.cluster, ctypes.c_uint(launch + 1), pointers)
    return result, exchange


def case(folder, rows, layers=LAYERS, seed=0):
    program = bp.chain(PRODUCTS, layers, rows, Grid(sms=BLOCKS))
    library = host.build(ls.source(program, ring=24 * 1024, copy=2048), ["product_chain"], folder)
    rng = np.random.default_rng(seed)
    weights = {(k, layer): u.repack.pack_bf16(u.to_bf16(rng.standard_normal((p.outputs, p.inputs)) / np.sqrt(p.inputs)), p.leaves)
               for k, p in enumerate(PRODUCTS) for layer in range(layers)}
    x = linked(rng.standard_normal((rows, PRODUCTS[0].inputs)), program.links[0].in_row * bp.VECTOR)
    return program, library, weights, x


@pytest.mark.skipif(host.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_the_bytes_of_the_row_core(tmp_path, rows):
    program, library, weights, x = case(tmp_path, rows)
    core, count = row_core(tmp_path / "core", PRODUCTS), ctypes.c_int
    record = np.zeros((program.phases, program.record_vectors, bp.VECTOR), np.uint16)
    result, exchange = launched(library, program, weights, x, launches=2, record=record)
    assert (exchange == 0x80008000).all()                 # as the next launch must find it
    for phase, (kind, layer) in enumerate(program.weights):
        p, y = PRODUCTS[kind], np.zeros((rows, PRODUCTS[kind].outputs), np.float32)
        grid, threads, shared, _ = host.constants(core, f"product_{kind}_launch", 4)
        host.launch(core, f"product_{kind}", grid, threads, [weights[kind, layer], count(p.tiles), x, count(x.shape[1]), count(rows), y, count(p.outputs)], shared)
        x = linked(y, program.links[kind].row * bp.VECTOR)
        made = record[phase].reshape(-1)[:rows * p.outputs]
        assert made.tobytes() == linked(y, p.outputs).tobytes(), (phase, p.name)
    assert result.tobytes() == x.tobytes() and np.isfinite(u.of_bf16(x)).all() and u.of_bf16(x).std() > 0.1


def choice_of(rows, tokens, rng):
    """A choice at random, with one expert that is every row's."""
    ids = np.stack([rng.permutation([0, *rng.permutation(np.arange(1, EXPERTS))[:TOP_K - 1]]) for _ in range(rows)])
    return ls.choice(ids, rng.random(ids.shape), tokens)


@pytest.mark.skipif(host.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize(("rows", "cluster", "up"), [
    (1, 1, bp.ExpertUp("up", 4, 4, 3)), (3, 1, bp.ExpertUp("up", 4, 4, 3)), (8, 2, bp.ExpertUp("up", 3, 16, 1)),   # units of single blocks
    (8, 2, bp.ExpertUp("up", 3, 16, 1, 2)), (3, 4, bp.ExpertUp("up", 4, 16, 1, 4)),                                # shared by a cluster
])
def test_the_bytes_of_the_expert_cores(tmp_path, rows, cluster, up):
    """With delays at random in blocks and warps."""
    blocks = BLOCKS if cluster == 1 else cluster
    kinds = product, up, down = bp.Product("wide", 7, 16, 2, cluster), up, bp.ExpertDown("down", 2 * blocks - 1, 2)
    program = bp.chain(kinds, 2, rows, Grid(sms=blocks, cluster=cluster), TOP_K)
    library = host.build("#define K3_STRESS\n" + ls.source(program, ring=24 * 1024, copy=2048), ["product_chain"], tmp_path)
    rng, items, count = np.random.default_rng(1), program.tokens * TOP_K, ctypes.c_int
    folder = tmp_path / "core"
    folder.mkdir()
    core = host.build(f'''#define K3_BENCH_SMS 4
#include "bench_core.cuh"
#include "situ.cuh"
typedef RowShape<16, 2, 1, 1, 4, 1, 1, 4096> shape_0;
K3_BENCH_ROWS(product_0, {product.tiles}, shape_0)
typedef ExpertUpShape<{up.leaves}, {up.groups}, ExpertList<{items}>, 8, 4, 8192> up;
typedef ExpertDownShape<1, 2, ExpertList<{items}>, {program.tokens}, {TOP_K}, 4, 2, 8192> down;
K3_BENCH_EXPERTS(experts, 1, 1, up, down)
extern "C" __global__ void activate(const float* y, int half, bf16* act) {{
  const float* from = y + blockIdx.x * 2 * half;
  act[blockIdx.x * half + threadIdx.x] = float_to_bf16(situ(from[threadIdx.x], from[half + threadIdx.x], {SITU[0]}f, {SITU[1]}f));
}}
''', ["product_0", "experts_up", "experts_down", "activate"], folder)
    octets = lambda low, high, *shape: rng.integers(low, high, shape, dtype=np.uint8)
    mxfp4 = lambda k, leaves, code: np.stack([u.repack.pack_mxfp4(octets(0, 256, k.outputs, k.inputs // 2), octets(code, code + 4, k.outputs, k.inputs // 32), leaves)
                                              for _ in range(EXPERTS)])
    weights, choices = {}, [choice_of(rows, program.tokens, rng) for _ in range(2)]
    for layer in range(2):
        w1, w3 = mxfp4(up, up.leaves, 120), mxfp4(up, up.leaves, 120)
        weights[0, layer] = u.repack.pack_bf16(u.to_bf16(rng.standard_normal((product.outputs, product.inputs)) / np.sqrt(product.inputs)), 16)
        weights[1, layer] = np.ascontiguousarray(np.stack([w1, w3], axis=2).reshape(EXPERTS, -1, *w1.shape[2:]))
        weights[2, layer] = mxfp4(down, 1, 123)
    x = linked(rng.standard_normal((rows, product.inputs)), program.links[0].in_row * bp.VECTOR)
    record = np.zeros((program.phases, program.record_vectors, bp.VECTOR), np.uint16)
    result, exchange = launched(library, program, weights, x, np.concatenate(choices).view(np.uint8), record=record, launches=1 + (cluster == 1))
    assert (exchange == 0x80008000).all()
    for phase, (kind, layer) in enumerate(program.weights):
        w, k, cut = weights[kind, layer], kinds[kind], ls.choice_list(choices[layer])
        y = np.zeros((rows, k.outputs), np.float32)
        if k is product:
            grid, threads, shared, _ = host.constants(core, "product_0_launch", 4)
            host.launch(core, "product_0", grid, threads, [w, count(k.tiles), x, count(x.shape[1]), count(rows), y, count(k.outputs)], shared)
        elif k is up:
            both, act = np.zeros((rows * TOP_K, 2, k.outputs), np.float32), np.zeros((rows * TOP_K, k.outputs), np.uint16)
            _, threads, shared, _ = host.constants(core, "experts_up_launch", 4)
            host.launch(core, "experts_up", 2, threads, [w, count(k.pairs), x, count(x.shape[1]), count(TOP_K), cut, both], shared)
            host.launch(core, "activate", rows * TOP_K, k.outputs, [both, count(k.outputs), act])
            y = u.of_bf16(act).astype(np.float32)
        else:
            _, threads, shared, _ = host.constants(core, "experts_down_launch", 4)
            host.launch(core, "experts_down", -(-k.tiles // 2), threads, [w, count(k.tiles), x, count(x.shape[1]), choices[layer]["weight"][0].copy(), count(rows), cut, y], shared)
        want = linked(y, k.outputs)
        assert record[phase].reshape(-1)[:want.size].tobytes() == want.tobytes() and np.isfinite(y).all() and y.std() > 0.05, (phase, k.name)
        x = linked(y, program.links[kind].row * bp.VECTOR)
    assert result.tobytes() == x.tobytes()


def lose_a_unit(folder, trouble):
    program, library, weights, x = case(folder, 1)
    shared = np.frombuffer(trouble, np.uint32)
    words = program.words.copy()
    at = 0
    for phase in range(program.phases):                   # block 1 leaves out its last unit of phase 4
        units = words[1, at] >> 16
        if phase == 4:
            words[1, at] -= 1 << 16
            words[1, at + 1 + units:-1] = words[1, at + 2 + units:]
            break
        at += 2 + units
    launched(library, program, weights, x, limit_ns=5_000_000_000, trouble=shared, words=words)


@pytest.mark.skipif(host.COMPILER is None, reason="needs g++")
def test_a_lost_result_ends_in_a_record_of_who_waited_for_what(tmp_path):
    trouble = multiprocessing.RawArray(ctypes.c_uint32, 8)
    child = multiprocessing.get_context("fork").Process(target=lose_a_unit, args=(tmp_path, trouble))
    child.start()
    child.join(60)
    assert child.exitcode == 86                           # the shim's trap
    what, block, warp, phase, _ = trouble[:5]
    assert what in (3, 8) and block < BLOCKS and warp <= 17 and phase in (4, 5)   # a vector of phase 4, which phase 5 reads


@pytest.mark.parametrize("cluster", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 8])
def test_programs_of_the_released_shapes(cluster, rows):
    cfg = K3Config.from_json(RELEASED_FOLDER)
    products = bp.dense_products(cfg, 16, cluster)
    program = bp.chain(products, 6, rows, Grid(sms=132, cluster=cluster))
    assert [(p.tiles, p.leaves, p.steps) for p in products] == [(194, 16, 28), (448, 1, 48), (66, 16, 28), (28, 16, 14)]
    done, used = {}, np.zeros((program.phases, bp.SLOTS), int)
    for block, words in enumerate(program.words):
        at = 0
        for phase in range(program.phases):
            head, needs, units = int(words[at]), int(words[at + 1]), int(words[at]) >> 16
            kind, slot_in, slot_out, clear = (head >> s & 15 for s in (0, 4, 8, 12))
            assert kind == phase % 4 and needs < phase + 1 and slot_in != slot_out
            assert clear == slot_in                       # a chain: the next phase is the only reader
            for tile in words[at + 2:at + 2 + units]:
                done[phase, int(tile)] = done.get((phase, int(tile)), 0) + 1
            at += 2 + units
            if slot_out != bp.NO_SLOT:
                used[phase, slot_out] = 1
    for phase in range(program.phases):
        p = products[phase % 4]
        assert all(done[phase, tile] == p.parts for tile in range(p.tiles)), p.name
    assert (used[:-1].sum(1) == 1).all() and not used[-1].any()
    for phase in range(bp.SLOTS, program.phases - 1):     # a slot is taken again two phases behind the one that clears it
        assert used[phase].argmax() == used[phase - bp.SLOTS].argmax()


def test_what_the_kernel_cannot_do_is_refused():
    for products, rows, grid, message in (((bp.Product("odd", 4, 16, 3),), 1, Grid(), "odd has 16 leaves of 3 k-steps"),
                                          ((PRODUCTS[0], bp.ExpertUp("up", 4, 24, 3)), 1, Grid(), "up has 24 leaves in 1 parts"), (PRODUCTS, 9, Grid(), "9 rows"),
                                          (PRODUCTS, 1, Grid(sms=131, cluster=2), "clusters of 2")):
        with pytest.raises(PlanError, match=message):
            bp.chain(products, 2, rows, grid)
