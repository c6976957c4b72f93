"""Times one true rank of a model on one GPU: whole steps and single stages, against the bytes they must read.

Collectives are looped back to the rank itself (it fills every rank's place), so the numbers that come out mean nothing and the
times leave out what crosses GPUs; results say so. Weights are random, never zero, and far larger than any cache.
"""
import ctypes
import statistics
from types import SimpleNamespace

import cupy
import numpy as np

from ..buffers import KV_BYTES
from ..config import PAGE_SIZE, K3Config
from ..dataflow import op_bytes
from ..emit import kernels_of
from ..errors import DeviceError
from ..plan import Op
from ..weights import BY_NAME, rank_bytes
from .cuda_backend import CudaBackend
from .cuda_driver import Launch, check, driver, open_device
from .cuda_kernels import bucket_of
from .cuda_synthetic import Filler, synthetic_weights

CEILING_BYTES = 2 << 30
LEAST_CEILING = {"NVIDIA H200": 4.4e12}  # bytes a second; below it something else uses the memory and every ratio is flattered


class StepBench:
    """One rank of `cfg` with weights made on the device.

    Args:
        slots, max_model_len: room of the caches.
        kv_cache_dtype: "bf16" or "fp8_e4m3".
        trace: as for CudaBackend.
    """

    def __init__(self, cfg: K3Config, tp: int, rank: int, *, slots: int, max_model_len: int, kv_cache_dtype: str, trace: bool = False):
        device = open_device(0)
        self.arch = device.arch
        self.filler = Filler(device.arch)
        self.ceiling = self._read_ceiling(device.name)
        source = SimpleNamespace(cfg=cfg)

        def weights(plan, source, tp, rank):
            return synthetic_weights(plan, source, tp, rank, arch=device.arch)

        self.backend = CudaBackend(source, tp, only_rank=rank if tp > 1 else None, max_batch=slots, max_model_len=max_model_len,
                                   kv_cache_dtype=kv_cache_dtype, weights=weights, trace=trace)
        self.cfg, self.tp, self.rank, self.stream = cfg, tp, rank, self.backend.stream
        self._raw = self.backend._raw_stream
        cache = self.backend.memories[0].session["mla_cache"]
        self.filler.run("fill_cache", cache, cache.nbytes // 4, ctypes.c_uint(7), ctypes.c_int(kv_cache_dtype == "fp8_e4m3"))
        per_slot = -(-max_model_len // PAGE_SIZE)
        for slot in range(slots):
            self.backend.open_slot(slot, range(slot * per_slot, (slot + 1) * per_slot))

    def place(self, sequences: int, rows_each: int, context: int) -> int:
        """Puts rows at the end of `context` tokens of every sequence; returns their number."""
        rng = np.random.default_rng(5)
        n = sequences * rows_each
        self.rows = n
        first = max(context - rows_each, 0)
        own = self.cfg.vocab_size // self.tp   # other ranks' tokens embed to zero here, and equal rows would all choose the same experts
        self.backend._write(token_ids=self.rank * own + rng.integers(0, own, n), row_slot=np.repeat(np.arange(sequences), rows_each),
                            row_position=np.tile(np.arange(first, first + rows_each), sequences), logit_rows=np.arange(n), row_accepted=np.ones(n))
        self.cache_tokens = sequences * (first + rows_each)
        self.sequences = sequences
        return n

    def replay(self, bucket: int) -> None:
        """One step, to its end."""
        self.backend._replay("step", bucket)
        self.stream.synchronize()

    def step(self, repeats: int = 20) -> dict:
        """Milliseconds of a step with its commit (median), beside the floor of the bytes it must move."""
        bucket = bucket_of(self.rows)
        experts = self.count_experts(bucket)
        logits = self._logits(bucket)
        if not np.isfinite(logits).all():
            raise DeviceError("the timed step gives logits that are not finite", "this is a bug: report the command")
        times = [self._time(lambda: (self.backend._replay("step", bucket), self.backend._replay("commit", bucket))) for _ in range(repeats)]
        again = self._logits(bucket)   # the state has moved on; what must not change is that they are finite
        floor = self.floor_bytes(experts) / self.ceiling
        ms = statistics.median(times) * 1e3
        if ms < floor * 1e3 * 0.99:
            raise DeviceError(f"a step of {ms:.3f} ms beats its floor of {floor * 1e3:.3f} ms", "something was not read: report the command")
        return {"decode_backend": self.backend.name, "rows": self.rows, "sequences": self.sequences, "tp": self.tp, "rank": self.rank,
                "context": self.cache_tokens // self.sequences, "kv_cache_dtype": self.backend.kv_cache_dtype, "ms": round(ms, 4),
                "ms_min": round(min(times) * 1e3, 4), "floor_ms": round(floor * 1e3, 4), "ratio_to_floor": round(ms / (floor * 1e3), 3),
                "us_a_layer": round(ms * 1e3 / self.cfg.num_hidden_layers, 2), "ceiling_tb_s": round(self.ceiling / 1e12, 3),
                "distinct_experts": round(float(np.mean(list(experts.values()))), 2) if experts else None, "ranks": self.backend.ranks,
                "finite": bool(np.isfinite(again).all())}

    def stages(self, repeats: int = 5) -> list[dict]:
        """Microseconds of every stage, summed over the layers: each operation is timed alone with the memory it finds, all layers in turn."""
        bucket = bucket_of(self.rows)
        experts = self.count_experts(bucket)
        rows: dict[str, dict] = {}
        groups: dict[str, list] = {}
        for op, group in self._by_op(bucket):
            groups.setdefault(op.stage.name, []).append((op, group))
        for name, members in groups.items():
            flat = [launch for _, group in members for launch in group]
            graph = self._capture(flat)
            seconds = statistics.median(self._time(lambda: graph.launch(self.stream)) for _ in range(repeats))
            nbytes = sum(self._op_floor(op, experts) for op, _ in members)
            rows[name] = {"stage": name, "operations": len(members), "us": round(seconds * 1e6 / len(members), 3), "us_a_step": round(seconds * 1e6, 1),
                          "mb": round(nbytes / len(members) / 1e6, 3), "gb_s": round(nbytes / seconds / 1e9, 1),
                          "of_ceiling": round(nbytes / seconds / self.ceiling, 3)}
        return list(rows.values())

    def count_experts(self, bucket: int) -> dict[int, int]:
        """Layer -> distinct experts that it reads, counted from what the router wrote."""
        counts = {}
        for op, group in self._by_op(bucket):
            for launch in group:
                launch.launch()
            if op.stage.name == "route":
                self.stream.synchronize()
                counts[op.layer] = len(np.unique(self.backend.memories[0].buffer("expert_ids")[:self.rows].get()))
        self.stream.synchronize()
        return counts

    def floor_bytes(self, experts: dict[int, int]) -> float:
        """Bytes a step with its commit must move: weights once, the chosen experts, states, the caches of its contexts."""
        total = sum(self._op_floor(op, experts) for op in self.backend.plan.ops)
        return total + 2 * len(self.backend.plan.commit) * self._state_bytes()   # the commit reads and writes what the step read

    def _state_bytes(self) -> int:
        """KDA states of one layer, F32, of every sequence of the step."""
        dims = self.cfg.dims()
        return dims["kda_num_heads"] // self.tp * dims["kda_head_dim"] ** 2 * 4 * self.sequences

    def _op_floor(self, op: Op, experts: dict[int, int]) -> float:
        dims = self.cfg.dims()
        if op.stage.name == "kda_mix":
            return op_bytes(self.cfg, op, self.tp, 1) + self._state_bytes()
        if op.stage.name == "mla_attend":
            return self.cache_tokens * dims["mla_cache_dim"] * KV_BYTES[self.backend.kv_cache_dtype]
        if op.stage.name not in ("expert_up", "moe_down"):
            return op_bytes(self.cfg, op, self.tp, 1)
        return sum(rank_bytes(BY_NAME[w], dims, self.tp, experts=experts[op.layer]) for w in op.stage.weights)

    def _by_op(self, bucket: int) -> list[tuple[Op, list]]:
        launches, out = iter(self.backend.launches("step", bucket)), []
        for op in self.backend.plan.ops:
            if not (op.stage.moves and self.backend.ride):
                out.append((op, [next(launches) for _ in kernels_of(op.stage)]))
        return out

    def _logits(self, bucket: int) -> np.ndarray:
        self.backend._replay("step", bucket)
        self.stream.synchronize()
        return self.backend.memories[0].buffer("logits")[:self.rows].get()

    def _capture(self, launches):
        with self.stream:
            self.stream.begin_capture()
            for launch in launches:
                launch.launch()
            return self.stream.end_capture()

    def _time(self, work) -> float:
        """Seconds between two events around `work` on the stream."""
        cu = driver()
        if not hasattr(self, "_events"):
            self._events = [check(cu.cuEventCreate(0)) for _ in range(2)]
        check(cu.cuEventRecord(self._events[0], self._raw))
        work()
        check(cu.cuEventRecord(self._events[1], self._raw))
        check(cu.cuEventSynchronize(self._events[1]))
        return check(cu.cuEventElapsedTime(*self._events)) * 1e-3

    def _read_ceiling(self, name: str) -> float:
        """Bytes a second of the best of several launch shapes that only read random data."""
        stream = cupy.cuda.Stream(non_blocking=True)
        self.stream, self._raw = stream, stream.__cuda_stream__()[1]
        pool, out = cupy.empty(CEILING_BYTES, cupy.uint8), cupy.zeros(4, cupy.uint32)
        self.filler.run("fill_mxfp4", pool, CEILING_BYTES // 4, ctypes.c_uint(1), ctypes.c_int(1), ctypes.c_int(0), ctypes.c_int(0))
        cupy.cuda.runtime.deviceSynchronize()
        best = 0.0
        for blocks in (264, 396, 528):
            arguments = [ctypes.c_void_p(pool.data.ptr), ctypes.c_uint64(CEILING_BYTES // 16), ctypes.c_void_p(out.data.ptr)]
            launch = Launch(self.filler.module.function("read_all"), blocks, 512, arguments, stream=self._raw)
            launch.launch()
            best = max(best, CEILING_BYTES / statistics.median(self._time(launch.launch) for _ in range(7)))
        if best < LEAST_CEILING.get(name, 0):
            raise DeviceError(f"the memory reads at {best / 1e12:.2f} TB/s, wanted {LEAST_CEILING[name] / 1e12:.1f} on a free {name}",
                              "run it again while nothing else uses the GPU")
        return best
