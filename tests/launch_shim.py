"""Programs of a single launch under g++: small ones with random weights, a launch of one, and a device for the standard path's kernels beside it."""
import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace

import core_units as u
import numpy as np
from shim import host

sys.path.append(str(Path(__file__).parent / "gpu"))
from launch_standard import NOT_THERE, KdaLayer  # noqa: E402
from launch_standard_mla import IN_MEMORY, MlaLayer  # noqa: E402

from k3cuda import block_program as bp  # noqa: E402
from k3cuda import launch_kinds as lk  # noqa: E402
from k3cuda import launch_source as ls  # noqa: E402
from k3cuda.launch_kinds import Field  # noqa: E402
from k3cuda.launch_layer import LAYER_SLOTS, layer_steps  # noqa: E402
from k3cuda.launch_mixes import mix_rounds, normed_reads  # noqa: E402
from k3cuda.launch_mla import HeadProduct, MlaAttend, MlaCombine, MlaNorm, NormedProduct  # noqa: E402
from k3cuda.launch_operands import KdaMix, LaunchMix  # noqa: E402
from k3cuda.phases import Grid  # noqa: E402

SITU, ROUTED_SCALE, NORM_EPS = (1.5, 2.5), 1.25, 1e-5
EXPERTS, TOP_K, BLOCKS = 16, 4, 3
HIDDEN, LATENT, RANKS, CLOSED, BLOCK_ROWS = 512, 96, 4, 3, 9   # values of a row, ranks, closed blocks at most, rows that those have room for
HEADS, DIM = 2, 128
PRODUCTS = (lk.Product("wide", 7, 16, 2), lk.Product("one_leaf", 33, 1, 6), lk.Product("odd", 5, 2, 3))
UP, DOWN = lk.ExpertUp("up", 4, 4, 3), lk.ExpertDown("down", 6, 2, 1)
WITH_EXPERTS = (PRODUCTS[0], lk.ForcedChoice("choice", EXPERTS), UP, DOWN)


def small_layer(merged=False):
    """A layer's kinds with sizes that three blocks without clusters can do: leaves and steps are the kinds' own, not of one model. `merged`: as layer_kinds'."""
    kind = lambda k, reads, *fields, **more: type(k)(**{n: getattr(k, n) for n in k.__dataclass_fields__} | more | {"reads": tuple(reads.split()), "fields": fields})
    rounds = lambda name, n, parts, blocks, reads, out, row: mix_rounds(name, n, parts, blocks, reads, *((None, 16) if merged else (Field(out, "bf16", n, row),)))
    attn_mix = rounds("attn_mix", HIDDEN, 1, CLOSED, "ffn_out", "attn_in", HIDDEN)
    closed, *ffn_mix = rounds("ffn_mix", HIDDEN, RANKS, CLOSED, "attn_parts", "ffn_in", HIDDEN)
    routed_norm = rounds("routed_norm", LATENT, RANKS, 0, "routed_parts", "routed_normed", 512)
    norm = lambda mix: mix[-1] if merged else None
    of = lambda mix: " ".join(normed_reads(mix[-1])) if merged else mix[-1].fields[0].name
    return (
        *attn_mix,
        kind(lk.Product("kda_in", 67, 16, 2, norm=norm(attn_mix)), of(attn_mix), Field("kda_f_a", "bf16", DIM // RANKS, DIM), Field("kda_beta", "f32", 4, 4),
             Field("kda_qkv", "bf16", 3 * HEADS * DIM, 3 * HEADS * DIM), Field("kda_out_gate", "f32", HEADS * DIM, HEADS * DIM), firsts=(0, 2, 3, 51)),
        closed,
        lk.Kda("kda_mix", HEADS, DIM, 4, reads=("kda_f_a", "kda_beta", "kda_qkv", "kda_out_gate"), fields=(Field("mixer_out", "bf16", HEADS * DIM, HEADS * DIM),)),
        kind(lk.Product("o_proj", HIDDEN // 16, 1, 16), "mixer_out", Field("attn_parts", "f32", HIDDEN, HIDDEN * RANKS)),
        *ffn_mix,
        kind(lk.Product("moe_in", 11, 16, 2, norm=norm(ffn_mix)), of(ffn_mix), Field("shared_gate_up", "f32", 64, 64), Field("router_logits", "f32", EXPERTS // RANKS, EXPERTS),
             Field("moe_latent", "bf16", 96, UP.inputs), firsts=(0, 4, 5)),
        lk.Route("route", EXPERTS, TOP_K, reads=("router_logits",)),
        kind(UP, "moe_latent", Field("expert_act", "bf16", UP.outputs, UP.outputs)),
        kind(DOWN, "expert_act", Field("routed_parts", "f32", LATENT, LATENT * RANKS)),
        kind(lk.Product("shared_down", HIDDEN // 16, 1, 2), "shared_gate_up", Field("shared_partial", "f32", HIDDEN, HIDDEN), situ=True, beside=True),
        *routed_norm,
        kind(lk.Product("latent_up", HIDDEN // 16 // RANKS, *((1, 6) if merged else (16, 2)), norm=norm(routed_norm)), f"{of(routed_norm)} shared_partial", Field("ffn_out", "f32", HIDDEN // RANKS, HIDDEN), adds=RANKS),
    )


def small_mla(rows, cache, blocks=BLOCKS):
    """Latent attention in the place of KDA in small_layer, over a cache of so many bytes a value."""
    query, latent, rope, nope = 512, 128, 64, 128
    own = lambda name, dtype, n: Field(name, dtype, n, n)
    attend = MlaAttend("mla_attend", HEADS, latent, rope, cache, rows, reads=("mla_q_absorbed", "mla_written"), fields=(own("mla_attended", "f32", 4 * blocks),))
    return (
        lk.Product("mla_in", 27, 16, 2, reads=("attn_in",), firsts=(0, 8, 11), fields=(Field("mla_q_a", "f32", query // RANKS, query),
                   Field("mla_kv_a", "f32", (latent + rope) // RANKS, latent + rope), own("mla_out_gate", "f32", HEADS * DIM))),
        NormedProduct("mla_q", HEADS * (nope + rope) // 16, 16, 2, reads=("mla_q_a",), fields=(own("mla_q", "bf16", HEADS * (nope + rope)),)),
        MlaNorm("mla_norm", latent, rope, cache, reads=("mla_kv_a",), fields=(own("mla_written", "f32", 4),)),
        HeadProduct("mla_absorb", HEADS * latent // 16, 4, 2, heads=HEADS, rope=rope, reads=("mla_q",), fields=(own("mla_q_absorbed", "bf16", HEADS * (latent + rope)),)),
        attend,
        MlaCombine("mla_combine", attend, reads=("mla_attended",), fields=(own("mla_o_latent", "bf16", HEADS * latent),)),
        HeadProduct("mla_out", HEADS * DIM // 16, 8, 1, heads=HEADS, gated=True, reads=("mla_o_latent", "mla_out_gate"), fields=(own("mixer_out", "bf16", HEADS * DIM),)),
    )


def small_steps(kinds, opening=(True, False, True), has=lambda k, layer: True):
    """Phases of as many layers as are named; those that open a block close the sum before it."""
    ops, closed = [], 0
    for layer, opens in enumerate(opening):
        ops.append(SimpleNamespace(stage=SimpleNamespace(name="attn_mix"), layer=layer, num_blocks=closed))
        closed += opens
        ops.append(SimpleNamespace(stage=SimpleNamespace(name="ffn_mix"), layer=layer, num_blocks=closed))
    plan = SimpleNamespace(ops=ops, cfg=SimpleNamespace(opens_res_block=lambda layer: opening[layer]))
    return layer_steps(plan, kinds, range(len(opening)), has)


class Case:
    """A program, its library, and everything that a launch of it reads."""

    def __init__(self, folder, kinds, rows, layers=3, seed=0, blocks=BLOCKS, cluster=1, stress=False, opening=(True, False, True), has=lambda k, layer: True, context=0, defines=()):
        """`stress`: delays at random in blocks and warps. `opening`, `has`, `context`: as of small_steps and MlaLayer."""
        self.rows, grid = rows, Grid(sms=blocks, cluster=cluster)
        is_layer = kinds[0].fields
        top_k = TOP_K if any(isinstance(k, lk.ExpertUp) for k in kinds) else 0
        self.program = p = bp.program(kinds, small_steps(kinds, opening, has), rows, grid, top_k, slots=LAYER_SLOTS) if is_layer else bp.chain(kinds, layers, rows, grid, top_k)
        self.library = host.build("#define K3_STRESS\n" * stress + "".join(f"#define {d}\n" for d in defines) + ls.source(p, ring=80 * 1024, copy=4096, probed=True), ["product_chain"], folder)
        self.rng, self.weights, self.mixes, self.choices, self.kdas, self.mlas, self.context = np.random.default_rng(seed), {}, {}, {}, {}, {}, context
        self.hidden = self.rng.standard_normal((BLOCK_ROWS, HIDDEN)).astype(np.float32)
        self.blocks = np.full((CLOSED, BLOCK_ROWS, HIDDEN), np.nan, np.float32)   # closed ones are made in the launch
        for kind, layer in dict.fromkeys(p.weights):
            self.weights[kind, layer] = self._weights(p.kinds[kind], layer)
        columns = p.input_vectors * 4
        self.input = self.rng.standard_normal((rows, columns)).astype(np.float32) if is_layer else linked(self.rng.standard_normal((rows, p.kinds[0].inputs)), columns * 2)

    def _weights(self, k, layer):
        rng = self.rng
        octets = lambda low, high, *shape: rng.integers(low, high, shape, dtype=np.uint8)
        mxfp4 = lambda code: np.stack([u.repack.pack_mxfp4(octets(0, 256, k.outputs, k.inputs // 2), octets(code, code + 4, k.outputs, k.inputs // 32), getattr(k, "leaves", 1))
                                       for _ in range(EXPERTS)])
        if isinstance(k, lk.Product):
            return u.repack.pack_bf16(u.to_bf16(rng.standard_normal((k.outputs, k.inputs)) / np.sqrt(k.inputs)), k.leaves)
        if isinstance(k, lk.ExpertUp):
            w1, w3 = mxfp4(120), mxfp4(120)
            return np.ascontiguousarray(np.stack([w1, w3], axis=2).reshape(EXPERTS, -1, *w1.shape[2:]))
        if isinstance(k, lk.ExpertDown):
            return mxfp4(123)
        if isinstance(k, lk.Route):
            return rng.standard_normal(k.experts).astype(np.float32) * np.float32(0.1)
        if isinstance(k, lk.ForcedChoice):   # one expert is every row's
            ids = np.stack([rng.permutation([0, *rng.permutation(np.arange(1, EXPERTS))[:TOP_K - 1]]) for _ in range(self.rows)])
            self.choices[layer] = ls.choice(ids, rng.random(ids.shape), self.program.tokens)
            return self.choices[layer].view(np.uint8)
        if isinstance(k, lk.Kda):
            made = self.kdas[layer] = KdaLayer(k, self.rows, (layer, self.rows))
            values = made.fields(self.rows, k.heads, eps=NORM_EPS, **made.records)
            return np.frombuffer(KdaMix(**{n: v.ctypes.data if isinstance(v, np.ndarray) else v for n, v in values.items()}), np.uint8)
        if isinstance(k, IN_MEMORY):
            if layer not in self.mlas:
                made = self.mlas[layer] = MlaLayer(self.program.kinds, self.rows, self.context, (layer, self.rows))
                made.here = made.arrays()
                made.after = made.here["cache"]
                made.launched = made.weights(made.here, lambda a: a.ctypes.data)
            return self.mlas[layer].launched
        if (k.stage, layer) not in self.mixes:
            self.mixes[k.stage, layer] = (rng.standard_normal(k.n) / np.sqrt(k.n)).astype(np.float32), u.to_bf16(1 + 0.3 * rng.standard_normal(k.n))
        score, weight = self.mixes[k.stage, layer]
        places = (self.hidden.ctypes.data, self.blocks.ctypes.data) if k.blocks else (0, 0)
        return np.frombuffer(LaunchMix(score.ctypes.data, weight.ctypes.data, *places), np.uint8)

    def launch(self, **more):
        return launched(self.library, self.program, self.weights, self.input, block_rows=BLOCK_ROWS, **more)


def linked(y, row):
    """Results [rows, outputs] F32 as the next phase's input: BF16, +0 for -0, repeated up to `row` values."""
    bits = u.to_bf16(y)
    bits[bits == 0x8000] = 0
    return np.ascontiguousarray(np.tile(bits, -(-row // bits.shape[1]))[:, :row])


def launched(library, program, weights, x, launches=1, record=None, limit_ns=100_000_000_000, trouble=None, words=None, block_rows=0):
    """Result of the last launch, words [rows, n], and the exchange behind it. Windows let a copy or two be in flight."""
    threads, shared, _, _ = host.constants(library, "product_chain_launch", 4)
    exchange = np.full((program.slots, program.slot_vectors * 4), NOT_THERE, np.uint32)
    counts, trouble = np.zeros(ls.COUNT_BYTES // 4, np.uint32), np.zeros(8, np.uint32) if trouble is None else trouble
    places = np.array([weights[w].ctypes.data if w in weights else 0 for w in program.weights], np.uint64)
    result = np.zeros((program.rows, program.output_vectors * 4), np.uint32)
    words = program.words if words is None else words
    names = dict(weights=places, programs=words, input=x, exchange=exchange, result=result, counts=counts, trouble=trouble, record=record)
    addresses = {n: a.ctypes.data for n, a in names.items() if a is not None}
    args = ls.arguments(program, window=4096, first_window=6144, limit_ns=limit_ns, situ=SITU, routed_scale=ROUTED_SCALE,
                        norm_eps=NORM_EPS, block_rows=block_rows, **addresses)
    for launch in range(launches):
        pointers, three = (ctypes.c_void_p * 1)(ctypes.addressof(args)), ctypes.c_uint * 3
        library.k3_shim_product_chain(three(program.grid.sms, 1, 1), three(threads, 1, 1), ctypes.c_size_t(shared), program.grid.cluster, ctypes.c_uint(launch + 1), pointers)
    return result, exchange


class HostDevice:
    """Runs kernels of tests/gpu/launch_standard.py."""

    def __init__(self, library):
        self.library = library

    def run(self, name, grid, threads, values, shared, cluster):
        assert cluster == 1
        if threads is None:
            blocks, threads, shared, _ = host.constants(self.library, f"{name}_launch", 4)
            grid = grid or blocks
        host.launch(self.library, name, grid, threads, [self._argument(v) for v in values], shared)

    def _argument(self, value):
        if isinstance(value, np.ndarray) or isinstance(value, ctypes._SimpleCData):
            return value
        if isinstance(value, (int, np.float32)):
            return ctypes.c_int(value) if isinstance(value, int) else ctypes.c_float(value)
        return value.kind(**{n: v.ctypes.data if isinstance(v, np.ndarray) else v for n, v in value.values.items()})
