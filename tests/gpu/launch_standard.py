"""What the standard path's kernels make of each phase of a single launch, from the inputs that the launch itself recorded: for the shim and for
scripts/bench_launch.py. A device runs kernels by name on NumPy arrays and gives back what they wrote."""
from dataclasses import dataclass, replace

import core_kernels as ck
import launch_standard_mla as mla
import numpy as np

from k3cuda import launch_kinds as lk
from k3cuda import launch_source as ls
from k3cuda.block_program import HEAD_WORDS, BlockProgram
from k3cuda.emit_sizes import MAX_SHARED
from k3cuda.launch_mixes import OUT, SUMS, Mix
from k3cuda.launch_mla import HeadProduct, NormedProduct
from k3cuda.launch_step import Embed, PartsSum
from k3cuda.phases import MIX_SLICES

NOT_THERE = 0x80008000   # kNotThere of launch_exchange.cuh
ROUTE_THREADS, MIX_THREADS = 128, 448
KDA_WEIGHTS = ("f_b", "a_log", "dt_bias", "q_conv", "k_conv", "v_conv", "o_norm")
KDA_RECORDS = ("qkv", "k", "v", "decay", "beta")   # what a commit replays
LOWER_BOUND, L2_EPS = -5.0, 1e-6


@dataclass(frozen=True)
class Struct:
    """An argument whose arrays a device puts in place of their addresses."""

    kind: type
    values: dict


class KdaLayer:
    """Random weights, states and records of a rank's KDA layer, and the rows that a step has of its sequences; arrays are NumPy's."""

    def __init__(self, k, rows, seed):
        g, c, slots = np.random.default_rng(seed), k.heads * k.dim, rows + 2
        f32 = lambda *shape, scale=1.0, shift=0.0: (g.standard_normal(shape) * scale + shift).astype(np.float32)
        self.slots = np.sort(g.integers(0, max(rows // 2, 1), rows)).astype(np.int32)[::-1].copy()   # neighbours are of one sequence
        self.f_b, self.a_log, self.dt_bias, self.o_norm = stored(f32(c, k.dim, scale=0.1), "bf16"), f32(k.heads, scale=0.5), f32(c, scale=2, shift=-1), f32(k.dim, scale=0.3, shift=1)
        self.q_conv, self.k_conv, self.v_conv = (f32(c, k.width, scale=0.5) for _ in range(3))
        self.state, self.conv = f32(slots, k.heads, k.dim, k.dim, scale=0.3), stored(f32(slots, 3, k.width - 1, c), "bf16")
        self.records = {"qkv": np.zeros((rows, 3, c), np.uint16), "beta": np.zeros((rows, k.heads), np.float32), **{n: np.zeros((rows, c), np.float32) for n in ("k", "v", "decay")}}

    def fields(self, rows, heads, **more):
        """Of a KdaMix, but what comes from kda_in and what it writes."""
        return {"row_slot": self.slots, "rows": rows, "heads": heads, "state": self.state, "conv_state": self.conv, **{n: getattr(self, n) for n in KDA_WEIGHTS},
                "lower_bound": LOWER_BOUND, "l2_eps": L2_EPS} | more


def of_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def stored(values, dtype):
    """F32 as a field has it: BF16 bits with +0 for -0, or F32 words of which none says that nothing is there."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    if dtype == "f32":
        return np.where(bits == NOT_THERE, NOT_THERE + 1, bits).astype(np.uint32)
    bits = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    bits[bits == 0x8000] = 0
    return bits


def left_out(program: BlockProgram, block: int, phase: int) -> np.ndarray:
    """The words of a program of which a block leaves out its last unit of a phase."""
    words, at = program.words.copy(), program.places(block)[phase]
    units, end = int(words[block, at]) >> 16, (at // program.page + 1) * program.page
    assert units
    words[block, at] -= 1 << 16
    words[block, at + HEAD_WORDS + units - 1:end - 1] = words[block, at + HEAD_WORDS + units:end]
    return words


def product_behind(program: BlockProgram, behind: int) -> int:
    """The first product behind phase `behind` that block 1 has part in."""
    return next(i for i, at in enumerate(program.places(1)) if i > behind and program.words[1, at] >> 16 and isinstance(program.kinds[program.weights[i][0]], lk.Product))


def without_a_product(program: BlockProgram, behind: int) -> BlockProgram:
    """The program of which block 1 leaves out a unit of `product_behind`."""
    return replace(program, words=left_out(program, 1, product_behind(program, behind)))


def parts_sum(parts, count: int) -> np.ndarray:
    """F32 [rows, n] of the ranks' parts [rows, count n], neighbours first."""
    parts = list(parts.reshape(len(parts), count, -1).transpose(1, 0, 2))
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2])]
    return parts[0]


class Standard:
    """Kernels of the standard path for the kinds of a program."""

    def __init__(self, program: BlockProgram, sms: int, clusters: bool, situ, routed_scale: float, norm_eps: float):
        self.program, self.sms, self.clusters, self.scalars = program, sms, clusters, (situ, routed_scale, norm_eps)
        self.norms = {k.stage: (k.n, k.leaves, k.rank_parts, k.blocks, min(k.leaves, MIX_SLICES) if clusters else 1, MIX_THREADS) for k in program.kinds if isinstance(k, Mix)}
        text, self.kernels = f'#define K3_BENCH_SMS {sms}\n#include "bench_core.cuh"\n#include "kda_mix.cuh"\n#include "norm_row.cuh"\n#include "route_core.cuh"\n#include "situ.cuh"\n', []
        for k in program.kinds:
            text += self._source(k)
        of_mla, names = mla.source(program.kinds, 6 if clusters and program.tokens > 1 else 2, MAX_SHARED if clusters else 110 * 1024)
        self.kernels += ["activate", "sigmoids", *names]
        self.mla = mla.StandardMla(self)
        self.text = text + of_mla + """extern "C" __global__ void activate(const float* gate, const float* up, float b, float c, bf16* act) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  act[i] = float_to_bf16(situ(gate[i], up[i], b, c));
}
extern "C" __global__ void sigmoids(const float* x, float* y) { y[threadIdx.x] = sigmoid(x[threadIdx.x]); }
"""

    def _source(self, k) -> str:
        tokens, top_k = self.program.tokens, self.program.top_k
        if isinstance(k, lk.Product):
            tiles = k.head_tiles if isinstance(k, HeadProduct) else k.tiles
            shape = f"RowAuto<{tiles}, {k.leaves}, {k.steps}, 1>" if self.clusters else f"RowShape<{k.leaves}, {k.steps}, 1, 1, {min(k.leaves, 4)}, 1, 1, 4096>"
            self.kernels.append(k.name)
            return f"typedef {shape} {k.name}_shape;\nK3_BENCH_ROWS({k.name}, {tiles}, {k.name}_shape)\n"
        if isinstance(k, lk.ExpertUp):
            down = next(k for k in self.program.kinds if isinstance(k, lk.ExpertDown))
            self.kernels += ["experts_up", "experts_down"]
            up_warps, down_warps = (min(k.leaves, 8), 16) if self.clusters else (k.leaves, 4)
            return (f"typedef ExpertList<{tokens * top_k}> items;\ntypedef ExpertUpShape<{k.leaves}, {k.groups}, items, {max(tokens, 2)}, {up_warps}, 62 * 1024> up_shape;\n"
                    f"typedef ExpertDownShape<{down.leaves}, {down.groups}, items, {tokens}, {top_k}, {down_warps}> down_shape;\nK3_BENCH_EXPERTS(experts, 1, 1, up_shape, down_shape)\n")
        kernel = self._kda_kernel()[0] if isinstance(k, lk.Kda) else None
        if isinstance(k, Mix) and k.round == SUMS:
            kernel = ck.norm_row(*self.norms[k.stage])
        if isinstance(k, lk.Route):
            kernel = ck.route(k.experts, k.top_k, ROUTE_THREADS)
        if kernel is None or kernel.name in self.kernels:
            return ""
        self.kernels.append(kernel.name)
        return kernel.source

    def _kda_kernel(self):
        """The stage's, and in how many blocks a head is."""
        return (ck.kda_mix(2, 2, 256), 2) if self.clusters else (ck.kda_mix(1, 4, 512), 1)

    def walk(self, device, record, weights, first, hidden, blocks, mixes, choices, kdas, mlas=None, embedded=None):
        """Every phase from what the launch recorded. Yields (phase, name, differing values, values) of those that have a kernel here.

        Args:
            record: uint32 [phases, record_vectors * 4]. weights: (kind, layer) -> what the device runs kernels on.
            first: the launch's input, as words [rows, n]. hidden, blocks: before the launch, F32; afterwards as they must be.
            mixes: (name of a mix, layer) -> (score F32 [n], norm weight BF16 bits [n]). choices: layer -> LaunchChoice, where they are forced.
            kdas: layer -> KdaLayer, with the records of the launch. mlas: layer -> MlaLayer, whose `after` is the cache behind it.
            embedded: Embed -> BF16 bits [rows, n] of the embedding.
        """
        p, self.joined = self.program, {}
        self.device, self.record, self.first, self.choices = device, record, first, dict(choices)
        self.hidden, self.blocks, self.mixes, self.kdas = hidden, blocks, mixes, kdas
        self.mlas, self.embedded = mlas or {}, embedded
        for phase, (kind, layer) in enumerate(p.weights):
            k = p.kinds[kind]
            want = self._phase(phase, k, layer, weights.get((kind, layer)))
            if want is None:
                continue
            got = self.made(phase) if k.fields else [self._words(phase, 0, p.rows, 2 * p.top_k)]
            if isinstance(k, lk.Kda):
                got += [self.kdas[layer].records[name] for name in KDA_RECORDS]
            if isinstance(k, mla.MlaNorm):
                got += [self.mlas[layer].after]
            yield phase, k.name, sum(int((g != w).sum()) for g, w in zip(got, want, strict=True)), sum(w.size for w in want)

    def made(self, phase: int) -> list[np.ndarray]:
        """What a phase recorded of its fields: words or BF16 bits [rows, width]."""
        p, kind = self.program, self.program.weights[phase][0]
        out = []
        for f, (_, width, _, _, own) in zip(p.kinds[kind].fields, p.links[kind].fields):
            words = self._words(phase, own * 4, p.rows_out(kind), width * 4)
            out.append(words if f.dtype == "f32" else np.ascontiguousarray(words).view(np.uint16))
        return out

    def _words(self, phase, first, rows, count):
        stride = self.program.links[self.program.weights[phase][0]].record_row * 4
        return np.ascontiguousarray(self.record[phase][:rows * stride].reshape(rows, stride)[:, first:first + count])

    def read(self, phase: int, i: int) -> np.ndarray:
        """Field `i` that a phase reads: F32 values or BF16 bits [rows, row]."""
        name, source = self.program.kinds[self.program.weights[phase][0]].reads[i], self.program.sources[phase][i]
        if source is None:
            return self.first
        maker = self.program.kinds[self.program.weights[source][0]]
        at = [f.name for f in maker.fields].index(name)
        found, field = self.made(source)[at], maker.fields[at]
        found = np.ascontiguousarray(np.tile(found, (1, -(-field.row // field.width)))[:, :field.row])
        return found.view(np.float32) if field.dtype == "f32" else found

    def _phase(self, phase, k, layer, weights):
        rows, (situ, scale, eps) = self.program.rows, self.scalars
        if isinstance(k, lk.ForcedChoice):
            return None
        if isinstance(k, Embed):
            self.hidden[:rows] = 0
            return [stored(of_bf16(self.embedded(k)) * np.float32(k.rank_parts), "f32")]
        if isinstance(k, PartsSum):
            return [stored(parts_sum(self.read(phase, 0), k.rank_parts), "f32")]
        if isinstance(k, (*mla.IN_MEMORY, NormedProduct, HeadProduct)):
            return self.mla.phase(phase, k, layer, weights, Struct)
        if isinstance(k, lk.Product) and k.norm:
            x = self._normed(k.norm, layer, eps)
        else:
            x = self.read(phase, 0) if k.reads else None
        if isinstance(k, lk.Route):
            ids, chosen = np.zeros((rows, k.top_k), np.int32), np.zeros((rows, k.top_k), np.float32)
            self.run(ck.route(k.experts, k.top_k, ROUTE_THREADS).name, rows, ROUTE_THREADS, [x, weights, np.zeros(rows, np.int32), np.float32(scale), ids, chosen])
            self.choices[layer] = ls.choice(ids, chosen, self.program.tokens)
            return [np.concatenate([ids.view(np.uint32), chosen.view(np.uint32)], 1)]
        if isinstance(k, Mix):
            return self._mix(phase, k, layer, x, eps)
        if isinstance(k, lk.Kda):
            return self._kda(phase, k, self.kdas[layer], eps)
        if isinstance(k, lk.Product):
            if k.situ:
                turns = x.reshape(rows, -1, 2, 16)
                x = self._activate(turns[:, :, 0], turns[:, :, 1], situ)
            return self.product(k, weights, x, phase)
        made = self.choices[layer]
        list_bytes = np.ascontiguousarray(made.view(np.uint8)[:made.dtype.fields["weight"][1]])   # its ExpertList alone
        if isinstance(k, lk.ExpertUp):
            y = np.zeros((rows * self.program.top_k, 2, k.outputs), np.float32)
            self.run("experts_up", self.sms, None, [weights, k.pairs, x, x.shape[1], self.program.top_k, list_bytes, y])
            return [stored(of_bf16(self._activate(y[:, 0], y[:, 1], situ)), "bf16")]
        y = np.zeros((rows, k.outputs), np.float32)
        self.run("experts_down", -(-k.tiles // 2), None, [weights, k.tiles, x, x.shape[1], self.choices[layer]["weight"][0].copy(), rows, list_bytes, y])
        return [stored(y, k.fields[0].dtype)]

    def product(self, k, weights, x, phase):
        y = self.multiplied(k, weights, x, k.outputs)
        if k.adds:   # as the stage's epilogue does: neighbours first
            y = y + parts_sum(self.read(phase, len(k.reads) - 1), k.adds)
        ends = [*(16 * first for first in k.firsts[1:]), k.outputs]
        return [stored(y[:, 16 * first:end][:, :f.width], f.dtype) for f, first, end in zip(k.fields, k.firsts, ends)]

    def multiplied(self, k, weights, x, outputs):
        """F32 [rows, outputs] of a matrix of so many rows."""
        y = np.zeros((len(x), outputs), np.float32)
        self.run(k.name, None, None, [weights, outputs // 16, x, x.shape[1], len(x), y, outputs])
        return y

    def _mix(self, phase, k, layer, x, eps):
        if k.round == SUMS:
            self.joined[k.stage] = x, self.program.steps[phase].extra
        return [self._normed(k, layer, eps)] if k.round == OUT else None

    def _normed(self, k, layer, eps):
        """BF16 bits [rows, n] of the mix whose sums were the last ones; what joined becomes its prefix sum, or a closed block."""
        rows, mixes, (joined, extra) = self.program.rows, k.blocks > 0, self.joined[k.stage]
        closed, opens = extra & 15, extra >> 4
        score, weight = self.mixes[k.stage, layer]
        parts = np.ascontiguousarray(joined.reshape(rows, k.rank_parts, k.n).transpose(1, 0, 2))
        out, snapshot, hidden = np.zeros((rows, k.n), np.uint16), np.zeros((rows, k.n), np.float32), self.hidden[:rows].copy()
        at = np.ascontiguousarray(self.blocks[:, :rows])
        row = {"row_slot": None, "row_map": None, "rows": rows, "part_rows": rows, "parts": parts, "hidden": hidden if mixes else None, "hidden_out": hidden if mixes else None,
               "snapshot": snapshot if opens else None, "blocks": at, "num_blocks": closed, "score": score, "weight": weight, "out": out, "eps": eps}
        shape = self.norms[k.stage]
        self.run(ck.norm_row(*shape).name, rows * shape[4], MIX_THREADS, [Struct(ck.NormRow, row)], shared=ck.norm_shared(*shape), cluster=shape[4])
        if mixes:
            self.hidden[:rows] = hidden
        if opens:
            self.blocks[closed, :rows] = snapshot
        return stored(of_bf16(out), "bf16")

    def _kda(self, phase, k, layer, eps):
        rows, c = self.program.rows, k.heads * k.dim
        f_a, logits, qkv, gate = (self.read(phase, i) for i in range(4))
        logits = np.ascontiguousarray(logits[:, :k.heads])
        beta, records = np.zeros_like(logits), {n: np.zeros((rows, c), np.float32) for n in ("k", "v", "decay")}
        self.run("sigmoids", 1, logits.size, [logits, beta])
        out, (kernel, split) = np.zeros((rows, c), np.uint16), self._kda_kernel()
        values = layer.fields(rows, k.heads, qkv=qkv, f_a=f_a, beta=beta, out_gate=gate, out=out, eps=eps, **records)
        self.run(kernel.name, (k.heads * split, rows), kernel.threads, [Struct(ck.KdaMix, values)], shared=ck.kda_mix_shared(split), cluster=split)
        return [stored(of_bf16(out), "bf16"), qkv.reshape(rows, 3, c), *(records[n] for n in KDA_RECORDS[1:4]), beta]

    def _activate(self, gate, up, situ):
        gate, up = (np.ascontiguousarray(v.reshape(len(v), -1)) for v in (gate, up))
        act = np.zeros(gate.shape, np.uint16)
        self.run("activate", gate.shape[0], gate.shape[1], [gate, up, np.float32(situ[0]), np.float32(situ[1]), act])
        return act

    def run(self, name, grid, threads, values, shared=0, cluster=1):
        """Grid and threads that are None are those that the kernel says."""
        self.device.run(name, grid, threads, values, shared, cluster)
