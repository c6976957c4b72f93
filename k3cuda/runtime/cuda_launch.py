"""Steps in one launch on a GPU (docs/megakernel.md): the memory of each, its kernel, and its launch, which takes the place of a standard step's.

What it reads and leaves lies where the standard path has it, so that steps of both may follow one another on one cache, and a commit does not know which ran.
"""
import ctypes
import logging
from contextlib import nullcontext
from dataclasses import dataclass

import cupy
import numpy as np

from .. import launch_source as ls
from ..block_program import BlockProgram
from ..config import MAX_ROWS
from ..emit import Probes
from ..errors import CompileError, PlanError, StepTimeout
from ..launch_kinds import VECTOR_BYTES
from ..plan import Plan
from .cuda_driver import Device, Launch, Module, check, driver, explanations
from .cuda_memory import RankMemory
from .cuda_launch_peers import LaunchPeers
from .cuda_trace import PhaseMemory
from .launch_pointers import Places, Pointers
from .launch_program import (BUCKETS, CLUSTER, KERNEL, LIMIT_NS, LOOPBACK, MEET_S, NOT_THERE, RANK, SCALE, TOO_MANY_ROWS, WAITS, WINDOW, WINDOWS, compiled_launch, delayed_hops, launched,
                             misfit, trouble_text)
from .loading import Loading

log = logging.getLogger("k3cuda")

_RECORD = 16   # words of a Watch record, and room between two


@dataclass
class _Built:
    """A launch for steps of up to so many rows, of all ranks here, what follows it, and what it needs on the device as long as it may run."""

    program: BlockProgram
    module: Module
    launches: list
    held: tuple
    trace: PhaseMemory | None


@dataclass
class _Copy:
    """Bytes that one launch left, to where the next ones look for them."""

    target: int
    source: int
    nbytes: int
    stream: int

    def launch(self) -> None:
        check(driver().cuMemcpyDtoDAsync(self.target, self.source, self.nbytes, self.stream))


class _Records:
    """Watch records of a rank's launches, in the host's memory, which outlives what a launch does to itself. `programs`: bucket -> whose they are.

    Apart from StepLaunches: what `explanations` keeps of a backend that nobody closed is none of the GPU's memory.
    """

    def __init__(self):
        words = len(BUCKETS) * _RECORD
        self._pinned = cupy.cuda.alloc_pinned_memory(words * 4)
        self.words = dict(zip(BUCKETS, np.frombuffer(self._pinned, np.uint32, words).reshape(-1, _RECORD)))
        for record in self.words.values():
            record[:] = 0
        self.programs: dict[int, BlockProgram] = {}

    def failure(self) -> StepTimeout | None:
        """Who of a launch waited too long, if anybody did."""
        for bucket, program in self.programs.items():
            if (record := self.words[bucket])[0]:
                way_out = "that rank's own output says why" if WAITS[record[0]] == RANK else "use decode_backend 'standard', or let nothing else use the GPU during a step"
                return StepTimeout(f"a step in one launch ended itself: {trouble_text(record, program)}",
                                   f"start the process again, since all that it had on the GPU is lost; {way_out}")
        return None


class StepLaunches:
    """Launches of steps, one for each of BUCKETS, made when they are first asked for. Ranks that share the GPU share a launch, as groups of its blocks.

    Args:
        plan, memories, device, kv_cache_dtype, ranks, probes: of the backend. stream: raw handle. loading: counts the seconds of compiling.
        others: of ranks that have a launch each, what joins them; it outlives this.
    """

    def __init__(self, plan: Plan, memories: list[RankMemory], device: Device, stream: int, kv_cache_dtype: str, ranks: str, probes: Probes, loading: Loading,
                 others: LaunchPeers | None = None):
        self.plan, self.memories, self.device, self.stream, self.kv_cache_dtype, self._loading = plan, memories, device, stream, kv_cache_dtype, loading
        self._ranks, self._are_here, self._others = 1 if ranks == LOOPBACK else plan.tp, len(memories) > 1, others
        self._probes, self._misfit = probes, misfit(plan, ranks, probes)
        if self._misfit:
            log.warning("no step runs in one launch: %s", self._misfit)
        self._made: dict[int, _Built | str] = {}   # bucket -> a launch, or why there is none
        self._exchanges: list[cupy.ndarray] = []
        self._records = _Records()
        self.failure = self._records.failure
        explanations.append(self.failure)

    def declines(self, bucket: int) -> str | None:
        """Why a step of up to so many rows does not run in one launch, or None."""
        if self._misfit or bucket not in BUCKETS:
            return self._misfit or TOO_MANY_ROWS
        if bucket not in self._made:
            try:
                self._made[bucket] = self._build(bucket)
                self._records.programs[bucket] = self._made[bucket].program
            except (PlanError, CompileError) as e:
                log.warning("steps of %d rows do not run in one launch: %s", bucket, e.message)
                self._made[bucket] = e.message
        made = self._made[bucket]
        return made if isinstance(made, str) else None

    def launches(self, bucket: int) -> list:
        """For steps of up to so many rows, which `declines` has nothing against: the launch, and what belongs right behind it."""
        return self._made[bucket].launches

    def trace(self, bucket: int) -> PhaseMemory:
        """Of such a step, of a build that notes times: what it notes of the first rank here."""
        return self._made[bucket].trace

    def hops(self, bucket: int) -> int:
        """Of such a step: how many of its phases a probe of hops lets wait."""
        return delayed_hops(self.plan, self._made[bucket].program) if self._probes.hop_cycles else 0

    def close(self) -> None:
        """Graphs with its launches must be gone."""
        if self.failure in explanations:
            explanations.remove(self.failure)
        for made in self._made.values():
            if isinstance(made, _Built):
                made.module.close()
        self._made, self._exchanges = {}, []

    def _build(self, bucket: int) -> _Built:
        compiled = None
        try:
            with self._others.agreed() if self._others else nullcontext({}) as said:
                compiled = self._compiled(bucket)
                said["program"] = compiled[0]
            return self._bound(*compiled)
        except (PlanError, MemoryError):   # MemoryError: CuPy's of a full GPU too
            if compiled:
                compiled[1].close()
            raise

    def _compiled(self, bucket: int) -> tuple:
        """Arguments of _bound."""
        groups = len(self.memories)
        of_rank = lambda blocks: blocks // (groups * CLUSTER) * CLUSTER
        sms = of_rank(self.device.sms)
        while True:
            program = launched(self.plan, bucket, sms, self.kv_cache_dtype, self._ranks)
            with self._loading.phase("compile"):
                module = Module(compiled_launch(self.plan, program, self.device.arch, ranks_here=self._are_here, probes=self._probes).cubin)
            threads, shared_bytes, cluster, _ = module.constants(f"{KERNEL}_launch", 4)
            function = module.function(KERNEL, shared_bytes)
            fit = self._resident(Launch(function, groups * sms, threads, [], shared=shared_bytes, cluster=cluster), threads, shared_bytes, cluster)
            if fit >= groups * sms:
                break
            module.close()   # some multiprocessors have no neighbour: fewer blocks, all of them resident
            sms = of_rank(fit)
        return program, module, function, threads, shared_bytes, cluster

    def _resident(self, launch: Launch, threads: int, shared_bytes: int, cluster: int) -> int:
        """Blocks of such a launch that the device holds at once. Of clusters of one block the driver counts none."""
        if cluster == 1:
            return check(driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(launch.function, threads, shared_bytes)) * self.device.sms
        return check(driver().cuOccupancyMaxActiveClusters(launch.function, launch.config)) * cluster

    def _bound(self, program: BlockProgram, module: Module, function, threads: int, shared_bytes: int, cluster: int) -> _Built:
        scale, words = self._scale(module), cupy.asarray(program.words)
        ranks = [self._rank(memory, scale, program) for memory in self.memories]
        first, peers, held = self._peers(program, [places.buffers["logits"] for places, *_ in ranks])
        on_device = cupy.asarray(np.frombuffer(peers, np.uint8))
        trace = PhaseMemory(program, self._probes.traced_layers) if self._probes.trace else None
        args = (ls.LaunchArgs * len(ranks))()
        for i, (places, _, table) in enumerate(ranks):
            args[i] = self._arguments(program, first + i, peers[first + i], peers=on_device.data.ptr if self._ranks > 1 else 0, weights=table.data.ptr,
                                      programs=words.data.ptr, row_slot=places.buffers["row_slot"], logit_rows=places.buffers["logit_rows"])
            args[i].failed = args[0].failed   # the first of all that fail writes the record
        args[0].stamps = trace.address if trace else 0
        given = cupy.asarray(np.frombuffer(args, np.uint8))
        argument = ctypes.c_void_p(given.data.ptr) if self._are_here else args[0]
        launches = [Launch(function, len(ranks) * program.grid.sms, threads, [argument], shared=shared_bytes, stream=self.stream, cluster=cluster, cooperative=True)]
        if self._others:
            rows = min(program.rows, self.memories[0].dims["head_rows"])
            launches.append(_Copy(ranks[0][0].buffers["logits"], peers[first].result, self._others.logit_bytes(rows), self.stream))
        cupy.cuda.get_current_stream().synchronize()   # which has written all of it; the backend's does not wait for that one
        return _Built(program, module, launches, (ranks, words, held, on_device, given), trace)

    def _peers(self, program: BlockProgram, logits: list[int]) -> tuple[int, ctypes.Array, tuple]:
        """The first rank here, what each of all gives to the others, and what holds it. `logits`: addresses, of those here."""
        if self._others:
            return self._others.rank, self._others.peers(program), ()
        exchanges, counts = self._exchange(program), cupy.zeros((len(logits), ls.COUNT_BYTES), cupy.uint8)
        given = (ls.LaunchPeer(exchange.data.ptr, result, count.data.ptr) for exchange, result, count in zip(exchanges, logits, counts))
        return 0, (ls.LaunchPeer * len(logits))(*given), (exchanges, counts)

    def _arguments(self, program: BlockProgram, rank: int, own: ls.LaunchPeer, **addresses: int) -> ls.LaunchArgs:
        cfg = self.plan.cfg
        return ls.arguments(program, window=WINDOWS.get(program.rows, WINDOW), limit_ns=LIMIT_NS, meet_ns=int(MEET_S * 1e9), rank=rank,
                            situ=(cfg.activation_situ_beta, cfg.activation_situ_linear_beta), routed_scale=cfg.routed_scaling_factor, norm_eps=cfg.rms_norm_eps, block_rows=MAX_ROWS, exchange=own.exchange, result=own.result,
                            counts=own.counts, trouble=self._records.words[program.rows].ctypes.data, **addresses)

    def _rank(self, m: RankMemory, scale: float, program: BlockProgram) -> tuple[Places, cupy.ndarray, cupy.ndarray]:
        """Of one rank where its memory has everything, the structures that phases point to, and the table of what they do."""
        places = Places(self.plan, m.tables, self.kv_cache_dtype, {name: m.buffer(name).data.ptr for name in m.tables.buffers},
                        {key: tuple(array.data.ptr for array in arrays) for key, arrays in m.weights.items()},
                        0 if m.mla_work is None else m.mla_work.data.ptr, m.mla_partials, scale)
        pointers = Pointers(program, places)
        structures = cupy.asarray(pointers.structures)
        return places, structures, cupy.asarray(pointers.table(structures.data.ptr))

    def _scale(self, module: Module) -> float:
        scale = cupy.zeros(1, np.float32)
        cupy.cuda.get_current_stream().synchronize()
        Launch(module.function(SCALE), 1, 1, [ctypes.c_void_p(scale.data.ptr)], stream=self.stream).launch()
        check(driver().cuStreamSynchronize(self.stream))
        return float(scale[0])

    def _exchange(self, p: BlockProgram) -> cupy.ndarray:
        """[ranks here, words]: memory of the exchange, one for all launches that it is large enough for: each leaves it as the next must find it."""
        need = p.slots * p.slot_vectors * VECTOR_BYTES // 4
        if not self._exchanges or self._exchanges[-1].shape[1] < need:
            self._exchanges.append(cupy.full((len(self.memories), need // p.rows * BUCKETS[-1]), NOT_THERE, cupy.uint32))
        return self._exchanges[-1]
