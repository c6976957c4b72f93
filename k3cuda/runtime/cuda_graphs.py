"""Kernels of a backend's steps, and graphs of them: what CudaBackend launches, apart from what it is asked."""
from contextlib import suppress

from ..emit import Probes, launches_of
from ..emit_sizes import FEW_ROWS
from ..plan import Op, Plan
from .cuda_driver import Device, Launch
from .cuda_kernels import BucketKernels, compile_bucket
from .cuda_launch import StepLaunches
from .cuda_memory import RankMemory
from .cuda_step_io import Half, StepIO
from .cuda_trace import TraceMemory
from .loading import Loading


class StepGraphs:
    """The launches of a backend, which sets the rest of what they are made from.

    Args:
        plan: of the step. device: `cuda_driver.Device`. stream: that all of it runs on.
        kv_cache_dtype, ride, probes: as CudaBackend. loading: counts the seconds of compiling and capturing.
    """

    memories: list[RankMemory]   # of the ranks on this GPU
    _steps: list                 # their `struct Step`
    _io: StepIO
    trace: TraceMemory | None
    step_launches: StepLaunches | None = None   # steps in one launch

    def __init__(self, plan: Plan, device: Device, stream, kv_cache_dtype: str, ride: bool, probes: Probes, loading: Loading):
        self.plan, self.device, self.stream, self.kv_cache_dtype, self.ride, self.probes = plan, device, stream, kv_cache_dtype, ride, probes
        self._loading, self._raw_stream = loading, stream.__cuda_stream__()[1]
        self._graphs: dict[tuple, object] = {}
        self._kernels: dict[int, BucketKernels] = {}

    def close_kernels(self) -> None:
        """Graphs must be gone."""
        for kernels in self._kernels.values():
            kernels.close()
        self._kernels.clear()

    def kernels(self, bucket: int) -> BucketKernels:
        if bucket not in self._kernels:
            with self._loading.phase("compile"):
                compiled = compile_bucket(self.plan, bucket, self.kv_cache_dtype, self.device.arch, sms=self.device.sms, ride=self.ride, probes=self.probes)
            self._kernels[bucket] = BucketKernels(self.plan, bucket, compiled, self.ride)
        return self._kernels[bucket]

    @staticmethod
    def advances(bucket: int) -> bool:
        """Whether the middle of KDA of such a step can leave states and windows behind its rows, in the place of a commit that would read the states again."""
        return bucket > FEW_ROWS

    def launches(self, what: str, bucket: int, overlap: bool = True, follows: bool = False) -> list[tuple[Op, list[Launch]]]:
        """(operation, its launches) of a "step" or a "commit" in order, rank after rank for each kernel; each may begin under the one before it.

        The launch of a commit is for every layer. "advance": a step all of whose rows stand, with its commit, where it `advances`. `follows`: another
        launch stands before the first of them.
        """
        kernels, out, count = self.kernels(bucket), [], 0
        for op in self.plan.commit[:1] if what == "commit" else self.plan.ops:
            group = []
            for name, first_row in launches_of(op.stage, self.plan, bucket, self.ride):
                for memory, step in zip(self.memories, self._steps if name in kernels.shapes else ()):
                    args = memory.op_struct(op, first_row)
                    args.launch, args.advances = count, int(what == "advance")
                    group.append(kernels.launch(name, step, args, self._raw_stream, dependent=overlap and (follows or count > 0)))
                    count += 1
            if group:
                out.append((op, group))
        return out

    def _single(self, bucket: int) -> list[tuple[None, list[Launch]]]:
        """In the place of `launches` of a step: one, under which nothing begins, and which begins under nothing; behind it at most a copy of what it left."""
        return [(None, self.step_launches.launches(bucket))]

    def _whole(self, bucket: int, half: Half, single: bool = False) -> list[tuple[Op | None, list[Launch]]]:
        """Load, step, commit and draw; what stands around a step is no operation."""
        draw = [] if self._io.no_sampler else [self._io.sample_launch(half, min(bucket, self._io.head_rows), dependent=True)]
        parts = ("advance",) if not single and self.advances(bucket) else ("step", "commit")
        made = [self._single(bucket) if single and part == "step" else self.launches(part, bucket, follows=not single) for part in parts]
        return [(None, [self._io.load_launch(half)]), *(group for part in made for group in part), (None, draw)]

    def graph(self, what: str, bucket: int, half: Half | None = None, single: bool = False):
        """(graph, what is in it) of what `launches` gives, or of a whole "launch" whose inputs and answers lie in `half`; captured at its first use.

        `single`: the step is one launch, else stage by stage.
        """
        key = (what, bucket, half and half.index, single)
        if key not in self._graphs:
            if half is not None:
                launches = self._whole(bucket, half, single)
            else:
                launches = self._single(bucket) if single else self.launches(what, bucket)
            with self._loading.phase("capture"), self.stream:
                self.stream.begin_capture()
                try:
                    for _, group in launches:
                        for launch in group:
                            launch.launch()
                except BaseException:
                    with suppress(RuntimeError):   # CuPy's: else whoever waits for the stream next would be told of the capture, and not of this
                        self.stream.end_capture()
                    raise
                graph = self.stream.end_capture()
            self._graphs[key] = graph, launches
        return self._graphs[key]

    def replay(self, what: str, bucket: int, half: Half | None = None, single: bool = False) -> None:
        """Launches what `graph` gives, behind all that was launched before. Waits for nothing."""
        graph, launches = self.graph(what, bucket, half, single)
        if self.trace and what == "step" and not single:
            self.trace.names = [(launch.kernel, op.layer) for op, group in launches for launch in group]
        graph.launch(self.stream)
