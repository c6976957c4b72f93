"""A whole step in one launch under g++, over the memory of tests/host_step.py: what its phases' pointers point to, and the launch."""
import ctypes
import math

import numpy as np
from host_step import SLOTS, Memory
from launch_shim import NOT_THERE
from shim import host

from k3cuda import launch_operands as lo
from k3cuda import launch_source as ls
from k3cuda.config import L2NORM_EPS, MAX_ROWS, MLA_NORM_EPS
from k3cuda.launch_mixes import Mix


class StepLaunch:
    """`program` (launch_step.step_program) as a library, for any Memory of the plan."""

    def __init__(self, plan, program, folder, **shape):
        folder.mkdir()
        self.plan, self.program = plan, program
        self.library = host.build(ls.source(program, ring=40 * 1024, copy=4096, **shape), ["product_chain"], folder)

    def run(self, memory: Memory, launches: int = 1) -> np.ndarray:
        """The exchange behind the last of some launches over one memory."""
        p, cfg = self.program, self.plan.cfg
        held = [memory]
        places = np.array([self.entry(memory, p.kinds[kind], layer, held) for kind, layer in p.weights], np.uint64)
        exchange, counts, trouble = np.full((p.slots, p.slot_vectors * 4), NOT_THERE, np.uint32), np.zeros(ls.COUNT_BYTES // 4, np.uint32), np.zeros(8, np.uint32)
        names = dict(weights=places, programs=p.words, exchange=exchange, counts=counts, trouble=trouble, result=memory.buffer("logits"),
                     **{n: memory.buffer(n) for n in ("row_slot", "logit_rows")})
        args = ls.arguments(p, window=4096, limit_ns=100_000_000_000, situ=(cfg.activation_situ_beta, cfg.activation_situ_linear_beta),
                            routed_scale=cfg.routed_scaling_factor, norm_eps=cfg.rms_norm_eps, block_rows=MAX_ROWS, **{n: a.ctypes.data for n, a in names.items()})
        threads, shared, _, _ = host.constants(self.library, "product_chain_launch", 4)
        for launch in range(launches):
            pointers, three = (ctypes.c_void_p * 1)(ctypes.addressof(args)), ctypes.c_uint * 3
            self.library.k3_shim_product_chain(three(p.grid.sms, 1, 1), three(threads, 1, 1), ctypes.c_size_t(shared), p.grid.cluster, ctypes.c_uint(launch + 1), pointers)
        return exchange

    def entry(self, memory: Memory, k, layer: int, held: list) -> int:
        """What LaunchArgs.weights has for a phase of kind `k`; what it points to is kept in `held`."""
        found, cfg, plan = lo.operand(self.plan, k, layer), self.plan.cfg, self.plan
        op = next(op for op in plan.ops if (op.stage.name, op.layer) == (found.stage, found.layer))
        packed = [a.ctypes.data for a in memory.weights_of(op)]
        at = lambda name: memory.buffer(name)[op.kind_index if memory.tables.buffers[name].is_layered else ...].ctypes.data
        rows = {n: at(n) for n in ("row_slot", "row_position", "page_table")} | {"slot_pages": memory.dims["slot_pages"], "rows": self.program.rows}
        if found.struct is None:
            return 0 if found.packed is None else packed[found.packed]
        if found.struct is lo.LaunchTokens:
            made = lo.LaunchTokens(at("token_ids"), packed[0], at("hidden"))
        elif isinstance(k, Mix):
            made = lo.LaunchMix(*packed, at("hidden"), at("res_blocks")) if k.blocks else lo.LaunchMix(weight=packed[0])
        elif found.struct is lo.KdaMix:
            weights = dict(zip("f_b a_log dt_bias q_conv k_conv v_conv o_norm".split(), packed, strict=True))
            made = lo.KdaMix(row_slot=at("row_slot"), rows=self.program.rows, heads=k.heads, qkv=at("kda_qkv"), beta=at("kda_beta"), k=at("kda_k"), v=at("kda_v"), decay=at("kda_decay"),
                             state=at("kda_state"), conv_state=at("conv_state"), lower_bound=cfg.linear_attn_config.gate_lower_bound, l2_eps=L2NORM_EPS, eps=cfg.rms_norm_eps, **weights)
        else:
            made = lo.LaunchMla(
                lo.MlaAttend(**rows, map=memory.mla_map.ctypes.data, first=op.kind_index * memory.dims["pages"] * memory.dims["page_size"], cache_scale=1.0,
                             score_scale=(cfg.qk_nope_head_dim + cfg.qk_rope_head_dim) ** -0.5 * np.float32(math.log2(math.e)),
                             top_sum=memory.mla_work.ctypes.data, partial=memory.mla_work.ctypes.data + 8 * memory.step.mla_partials),
                lo.MlaWrite(**rows, query_norm=packed[0], latent_norm=packed[1], cache=at("mla_cache"), cache_scale=1.0, eps=MLA_NORM_EPS))
        held.append(made)
        return ctypes.addressof(made)


class Step:
    """Inputs of a step of a few sequences and what lies in their slots; `put` lays them into a Memory that is poison otherwise."""

    def __init__(self, cfg, rows: int, live: int, wanted, seed: int, context: int):
        """`live` of `rows` rows, of which `wanted` are to have logits; sequences are `context` tokens long and more."""
        g = np.random.default_rng(seed)
        self.seed, self.live, self.wanted = seed, live, wanted
        slots = np.sort(g.choice(SLOTS, live))
        first = {slot: context + int(g.integers(0, 40)) for slot in slots}
        self.inputs = {"token_ids": g.integers(0, cfg.vocab_size, rows), "row_slot": np.full(rows, -1), "row_position": np.zeros(rows, np.int64), "logit_rows": np.full(rows, -1)}
        self.inputs["row_slot"][:live] = slots
        self.inputs["row_position"][:live] = [first[slot] + (slots[:i] == slot).sum() for i, slot in enumerate(slots)]
        self.inputs["logit_rows"][:len(wanted)] = wanted

    def put(self, memory: Memory) -> None:
        g = np.random.default_rng(self.seed)
        memory.poison()
        for name, values in self.inputs.items():
            memory.buffer(name)[:len(values)] = values
        table = memory.buffer("page_table")
        table[...] = g.permutation(table.size).reshape(table.shape)
        memory.buffer("kda_state")[...] = g.standard_normal(memory.buffer("kda_state").shape) * 0.3
        for name in ("conv_state", "mla_cache"):   # BF16 of magnitude 1/8 to 4
            bits = g.integers(0, 1 << 16, memory.buffer(name).shape)
            memory.buffer(name)[...] = bits & 0x807F | (bits >> 7) % 5 + 124 << 7
