"""A whole step in one launch under g++, over the memory of tests/host_step.py, by the pointers that a backend gives it."""
import ctypes
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from host_step import SLOTS, Memory
from launch_shim import NOT_THERE
from shim import host

from k3cuda import launch_source as ls
from k3cuda.config import MAX_ROWS
from k3cuda.runtime.launch_pointers import Places, Pointers
from k3cuda.runtime.launch_program import LOG2_E


class StepLaunch:
    """`program` (launch_step.step_program) as a library, for any Memory of the plan, or of all ranks of it. ranks_here: as of launch_source.constants.
    defines: what stands before its source."""

    def __init__(self, plan, program, folder, *, ranks_here: bool = False, defines: str = "", **shape):
        folder.mkdir()
        self.plan, self.program, self.ranks_here = plan, program, ranks_here
        self.library = host.build(defines + ls.source(program, ring=80 * 1024, copy=4096, ranks_here=ranks_here, **shape), ["product_chain"], folder)

    def run(self, *memories: Memory, launches: int = 1, limit_ns: int = 100_000_000_000, words=None, trouble=None, stamps=None) -> list[np.ndarray]:
        """The exchange of each rank behind the last of some launches. words: of a rank's program, where they are not the program's. trouble: one record for all.
        stamps: the first phase whose times are kept, and the arrays of LaunchStamps."""
        p, cfg = self.program, self.plan.cfg
        trouble = np.zeros(8, np.uint32) if trouble is None else trouble
        self.held, exchanges, peers, args = [trouble], [], (ls.LaunchPeer * p.ranks)(), (ls.LaunchArgs * len(memories))()
        for rank, memory in enumerate(memories):
            pointers = Pointers(p, self.places(memory))
            structures = pointers.structures.copy()
            exchange, counts = np.full((p.slots, p.slot_vectors * 4), NOT_THERE, np.uint32), np.zeros(ls.COUNT_BYTES // 4, np.uint32)
            names = dict(weights=pointers.table(structures.ctypes.data), programs=(words or {}).get(rank, p.words), exchange=exchange, counts=counts, trouble=trouble,
                         result=memory.buffer("logits"), **{n: memory.buffer(n) for n in ("row_slot", "logit_rows")})
            addresses = {n: a.ctypes.data for n, a in names.items()}
            if stamps:
                header = ls.LaunchStamps(*(a.ctypes.data for a in stamps[1:]), stamps[0], stamps[1].shape[1])
                self.held.append(header)
                addresses["stamps"] = ctypes.addressof(header)
            peers[rank] = ls.LaunchPeer(*(addresses[n] for n in ("exchange", "result", "counts")))
            args[rank] = ls.arguments(p, window=4096, limit_ns=limit_ns, meet_ns=limit_ns, rank=rank, situ=(cfg.activation_situ_beta, cfg.activation_situ_linear_beta),
                                      routed_scale=cfg.routed_scaling_factor, norm_eps=cfg.rms_norm_eps, block_rows=MAX_ROWS, peers=ctypes.addressof(peers), **addresses)
            self.held += [names, structures]
            exchanges.append(exchange)
        if self.ranks_here:
            self._launch(ctypes.c_void_p(ctypes.addressof(args)), launches, p.ranks)
        elif p.ranks == 1:
            self._launch(args[0], launches)
        else:
            with ThreadPoolExecutor(p.ranks) as pool:   # launches of their own, of which one may be ahead
                for done in [pool.submit(self._launch, own, launches) for own in args]:
                    done.result()
        return exchanges

    def _launch(self, argument, times: int, ranks: int = 1) -> None:
        threads, shared, _, _ = host.constants(self.library, "product_chain_launch", 4)
        pointers, three = (ctypes.c_void_p * 1)(ctypes.addressof(argument)), ctypes.c_uint * 3
        for launch in range(times):
            self.library.k3_shim_product_chain(three(ranks * self.program.grid.sms, 1, 1), three(threads, 1, 1), ctypes.c_size_t(shared), self.program.grid.cluster,
                                               ctypes.c_uint(launch + 1), pointers)

    def places(self, memory: Memory) -> Places:
        """What a RankMemory's would be of this one."""
        dims = self.plan.cfg.dims()
        return Places(self.plan, memory.tables, "bf16", {n: memory.buffer(n).ctypes.data for n in memory.tables.buffers},
                      {(op.layer, op.stage.name): tuple(a.ctypes.data for a in memory.weights_of(op)) for op in self.plan.ops}, memory.mla_work.ctypes.data,
                      memory.step.mla_partials, np.float32(dims["mla_qk_head_dim"] ** -0.5) * np.float32(LOG2_E))


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
