"""`--trace` of `k3cuda bench step`: the course of one more step, as a Chrome trace or as a picture."""
import json

import click

from ..errors import BenchmarkError, UsageError
from ..runtime.machine import LATENCY_SPECIALIZED
from .output import Result, say

CHROME, PICTURE = ".json", ".svg"
PERIOD = 4   # three layers of KDA and one of latent attention


class Layers(click.ParamType):
    """Neighbouring layers, FIRST-LAST or one; or all."""

    name = "layers"

    def convert(self, value, param, ctx):
        if not isinstance(value, str) or value == "all":
            return value
        first, dash, last = value.partition("-")
        try:
            found = range(int(first), int(last if dash else first) + 1)
        except ValueError:
            found = range(0)
        if not found or found[0] < 0:
            self.fail(f"found {value!r:.60}, wanted layers like 45-48, or all", param, ctx)
        return found


class StepTrace:
    """Files of one step's course. Without `paths` it does nothing.

    Args:
        layers: a range, "all", or None: PERIOD of them in the middle. steps: how many combinations of rows, context, experts and delay are timed. probes: of these.
    Raises UsageError for what cannot be traced or drawn, and click's for a file that cannot be written.
    """

    def __init__(self, paths: tuple[str, ...], layers, num_layers: int, decode_backend: str, steps: int, probed: bool):
        if layers is not None and not paths:
            raise UsageError("--trace-layers is of what --trace writes", "add --trace FILE")
        if paths and (steps > 1 or probed):
            raise UsageError(f"--trace: found {steps} steps{', experts or delays among their flags' * probed}; wanted one as a model has it",
                             "give one number of --rows and one --context, and neither --experts nor --hop-delay-us")
        if bad := [p for p in paths if not p.endswith((CHROME, PICTURE))]:
            raise UsageError(f"--trace: found {bad[0]!r:.200}, wanted a name that ends in {CHROME}, a Chrome trace, or in {PICTURE}, a picture")
        if decode_backend != LATENCY_SPECIALIZED and (bad := [p for p in paths if p.endswith(PICTURE)]):
            raise UsageError(f"--trace: found {bad[0]!r:.200}, and the {decode_backend} path notes no bytes that a picture could show",
                             f"add --decode-backend {LATENCY_SPECIALIZED}, or give a name that ends in {CHROME}")
        middle = num_layers // 2
        self.layers = range(num_layers) if layers == "all" else layers or range(middle, min(middle + PERIOD, num_layers))
        if self.layers[-1] >= num_layers:
            raise UsageError(f"--trace-layers: found {self.layers[-1]}, wanted layers up to {num_layers - 1}", "they are counted from 0")
        self._wants_all, self._specialized = layers == "all", decode_backend == LATENCY_SPECIALIZED
        self._files = {path: Result(path, "--trace") for path in paths}

    def __bool__(self) -> bool:
        return bool(self._files)

    @property
    def probes(self) -> list:
        """What the traced step is built with."""
        from ..emit import Probes

        return [Probes(trace=True, traced_layers=None if self._wants_all else self.layers)] if self else []

    def write(self, bench, sequences: int, rows_each: int, context: int) -> None:
        """Runs the step of a StepBench once more, in a build that notes times. Raises BenchmarkError where it does not run in one launch as was asked."""
        if not self:
            return
        bench.open(sequences, context, *self.probes)
        bench.place(sequences, rows_each, context)
        if self._specialized and not bench.single:
            raise BenchmarkError(f"--trace: this step does not run in one launch: {bench.declined}",
                                 f"leave out --decode-backend for the kernels of its stages, as {CHROME}")
        found = bench.traced()
        title = (f"{bench.rows} rows at context {context}, rank {bench.rank} of {bench.tp}, {bench.kv_cache_dtype} cache, "
                 f"layers {self.layers[0]} to {self.layers[-1]} of {bench.cfg.num_hidden_layers} in one launch on {bench.device.name}, with stamps")
        for path, file in self._files.items():
            file.write(json.dumps(self._chrome(found)) if path.endswith(CHROME) else found.picture(title, bench.ceiling))
            file.close()
            say(f"{path}: {'a Chrome trace' if path.endswith(CHROME) else 'a picture'} of layers {self.layers[0]} to {self.layers[-1]}")

    def _chrome(self, found) -> list[dict]:
        if self._specialized:
            return found.chrome()
        from ..runtime.cuda_trace import chrome

        return chrome([t for t in found if self._wants_all or t.layer in self.layers])
