"""The BF16 products of a KDA + MoE layer at the shapes of one TP16 rank: our kernels against torch and cuBLAS, in the same run.

    python scripts/compare_torch.py [--rows 1,8,64] [--output FILE.json]

Both sides are CUDA graphs over the same number of layers, each with weights of its own (hundreds of MB, many times the L2 cache), and
both do the same products in the same order: kda_in (q, k, v, out gate, beta, f_a joined), o_proj, moe_in (router, latent-down, shared
gate and up joined), shared_down, latent_up. torch runs F.linear on joined weights and nothing else. Ours are the kernels of the step
as they are, with what their ends do beside the product: activations of the shared expert, and the stores to all 16 ranks' places; a kernel
that does something else beside a product (the JSON names the kernels) is counted whole. What stands between the products (norms, routing, experts) is left out on both sides.

A second pair of numbers adds f_b. On torch's side it is one more F.linear; ours has no kernel of its own for it, so the whole KDA middle
is counted: conv, gates, recurrence over the state, gated norm. Targets: 2 x at 1 and 8 rows, of the first pair.
"""
import json
import sys
from pathlib import Path

import click
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from k3cuda import packing  # noqa: E402
from k3cuda.cli.bench import Counts  # noqa: E402
from k3cuda.cli.model_argument import config_of  # noqa: E402
from k3cuda.config import DECODE_ROWS, RELEASED  # noqa: E402
from k3cuda.emit import kernels_of  # noqa: E402
from k3cuda.packing import PACKED  # noqa: E402
from k3cuda.runtime.cuda_bench import StepBench  # noqa: E402
from k3cuda.runtime.cuda_kernels import bucket_of  # noqa: E402
from k3cuda.runtime.surroundings import surroundings  # noqa: E402
from k3cuda.stages import BY_NAME as BY_STAGE  # noqa: E402
from k3cuda.weights import BY_NAME, rank_slice  # noqa: E402

TP, LAYERS = 16, 13
# Packed arrays, in the order of the products.
TRUNK = ("kda_in", "o_proj", "moe_in", "shared_down_proj", "latent_up")
WITH_MIDDLE = ("kda_in", "kda_f_b_proj", *TRUNK[1:])
PLACES = {p.name: (stage, p) for stage, group in PACKED.items() for p in group}   # of each array: the stage that reads it


def kernel_of(array: str, plan, rows: int) -> str:
    """The kernel that multiplies by an array: the one of its name, else the first of its stage."""
    stage, own = PLACES[array][0], array.removesuffix("_proj")
    names = kernels_of(BY_STAGE[stage], plan, rows)
    return own if own in names else names[0]


def shape(cfg, array: str) -> tuple[int, int]:
    """(outputs, inputs) of one packed array on one rank, its sources joined."""
    packed = PLACES[array][1]
    assert BY_NAME[packed.sources[0]].dtype == "BF16" and packed.how in (packing.TILES, packing.PAIRS, packing.PLAIN), packed
    shapes = [tuple(s.stop - s.start for s in rank_slice(BY_NAME[n], cfg.dims(), TP, 0)) for n in packed.sources]
    return sum(rows for rows, _ in shapes), shapes[0][1]


class Ours:
    def __init__(self, bench, layers):
        self.bench, self.layers = bench, layers

    def kernels(self, arrays) -> list[str]:
        return [kernel_of(array, self.bench.backend.plan, bucket_of(self.bench.rows)) for array in arrays]

    def seconds(self, arrays) -> float:
        """Of a graph of the kernels that multiply by these arrays, layer after layer."""
        be = self.bench.backend
        loaded, ops = be.kernels(bucket_of(self.bench.rows)), {(op.layer, op.stage.name): op for op in be.plan.ops}
        launches = [loaded.launch(name, be._steps[0], be.memories[0].op_struct(ops[layer, PLACES[array][0]]), be._raw_stream, dependent=True)
                    for layer in self.layers for array, name in zip(arrays, self.kernels(arrays))]
        return self.bench.timer.graph(launches)


class Torch:
    def __init__(self, cfg, timer, layers: int):
        self.timer, self.stream = timer, torch.cuda.ExternalStream(timer.raw)
        self.weights = [{name: torch.randn(shape(cfg, name), dtype=torch.bfloat16, device="cuda") for name in WITH_MIDDLE} for _ in range(layers)]

    def seconds(self, arrays, rows: int) -> float:
        x = {name: torch.randn(rows, w.shape[1], dtype=torch.bfloat16, device="cuda") for name, w in self.weights[0].items()}
        torch.cuda.synchronize()

        def run():
            return [F.linear(x[name], w[name]) for w in self.weights for name in arrays]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            run()   # cuBLAS makes its workspace outside the graph
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=self.stream):
                kept = run()
            seconds = self.timer.median(graph.replay)
        del kept
        return seconds


@click.command(help=__doc__.partition("\n")[0])
@click.option("--rows", type=Counts(DECODE_ROWS), default="1,8,64", show_default=True)
@click.option("--output", type=click.Path(dir_okay=False), help="write the JSON here as well")
def main(rows, output):
    cfg = config_of(RELEASED, LAYERS)
    layers = [i for i in range(LAYERS) if cfg.is_kda(i) and not cfg.is_dense(i)]
    bench = StepBench(cfg, TP, 0, "fp8_e4m3")
    bench.compile(rows)
    bench.open(max(rows), 1)
    ours, theirs = Ours(bench, layers), Torch(cfg, bench.timer, len(layers))
    nbytes = sum(2 * a * b for a, b in (shape(cfg, name) for name in TRUNK))
    found = []
    for n in rows:
        bench.place(n, 1, 1)
        bench.replay()   # inputs that a step made
        us = {"torch_us": theirs.seconds(TRUNK, n), "ours_us": ours.seconds(TRUNK), "torch_with_f_b_us": theirs.seconds(WITH_MIDDLE, n),
              "ours_with_kda_mix_us": ours.seconds(WITH_MIDDLE)}
        us = {name: round(s * 1e6 / len(layers), 2) for name, s in us.items()}
        found.append({"rows": n, **us, "ratio": round(us["torch_us"] / us["ours_us"], 2), "floor_us": round(nbytes / bench.ceiling * 1e6, 2),
                      "ratio_with_middle": round(us["torch_with_f_b_us"] / us["ours_with_kda_mix_us"], 2), "kernels": ours.kernels(WITH_MIDDLE)})
        print(found[-1], file=sys.stderr, flush=True)
    document = {"what": "BF16 products of one KDA + MoE layer, one TP16 rank, microseconds a layer", "layers": len(layers), "mb": round(nbytes / 1e6, 1),
                "ceiling_tb_s": round(bench.ceiling / 1e12, 3), "comparison": found} | surroundings(bench.device, "python scripts/compare_torch.py", ["torch"])
    text = json.dumps(document, indent=1)
    print(text)
    if output:
        Path(output).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
