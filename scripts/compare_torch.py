"""The BF16 products of a KDA + MoE layer at the shapes of one TP16 rank: our kernels against torch and cuBLAS, in the same run.

    python scripts/compare_torch.py [--rows 1,8,64] [--output FILE.json]

Both sides are CUDA graphs over the same number of layers, each with weights of its own (hundreds of MB, many times the L2 cache), and
both do the same products in the same order: kda_in (q, k, v, out gate, beta, f_a joined), o_proj, moe_in (router, latent-down, shared
gate and up joined), shared_down, latent_up. torch runs F.linear on joined weights and nothing else. Ours are the kernels of the step
as they are, with what their ends do beside the product: activations of the shared expert, and the stores to all 16 ranks' places.
What stands between the products (norms, routing, experts) is left out on both sides.

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
from k3cuda.cli.options import config_of  # noqa: E402
from k3cuda.config import DECODE_ROWS, RELEASED  # noqa: E402
from k3cuda.packing import PACKED  # noqa: E402
from k3cuda.runtime.cuda_bench import StepBench  # noqa: E402
from k3cuda.runtime.cuda_kernels import bucket_of  # noqa: E402
from k3cuda.runtime.surroundings import surroundings  # noqa: E402
from k3cuda.weights import BY_NAME, rank_slice  # noqa: E402

TP, LAYERS = 16, 13
#         kernel -> (stage, how many of its packed arrays come before the one it multiplies by)
TRUNK = {"kda_in": ("kda_in", 0), "o_proj": ("o_proj", 0), "moe_in": ("moe_in", 0), "shared_down": ("moe_down", 0), "latent_up": ("latent_up", 0)}
MIDDLE = {"kda_mix": ("kda_mix", 0)}


def shape(cfg, stage: str, at: int) -> tuple[int, int]:
    """(outputs, inputs) of one packed array on one rank, its sources joined."""
    packed = PACKED[stage][at]
    assert BY_NAME[packed.sources[0]].dtype == "BF16" and packed.how in (packing.TILES, packing.PAIRS, packing.PLAIN), packed
    shapes = [tuple(s.stop - s.start for s in rank_slice(BY_NAME[n], cfg.dims(), TP, 0)) for n in packed.sources]
    return sum(rows for rows, _ in shapes), shapes[0][1]


class Ours:
    def __init__(self, bench, layers):
        self.bench, self.layers = bench, layers

    def seconds(self, kernels: dict) -> float:
        """Of a graph of these kernels, layer after layer."""
        be = self.bench.backend
        loaded, ops = be.kernels(bucket_of(self.bench.rows)), {(op.layer, op.stage.name): op for op in be.plan.ops}
        launches = [loaded.launch(name, be._steps[0], be.memories[0].op_struct(ops[layer, stage]), be._raw_stream, dependent=True)
                    for layer in self.layers for name, (stage, _) in kernels.items()]
        return self.bench.timer.graph(launches)


class Torch:
    def __init__(self, cfg, timer, layers: int):
        self.timer, self.stream = timer, torch.cuda.ExternalStream(timer.raw)
        kernels = TRUNK | MIDDLE
        self.weights = [{name: torch.randn(shape(cfg, *where), dtype=torch.bfloat16, device="cuda") for name, where in kernels.items()} for _ in range(layers)]

    def seconds(self, kernels: dict, rows: int) -> float:
        x = {name: torch.randn(rows, w.shape[1], dtype=torch.bfloat16, device="cuda") for name, w in self.weights[0].items()}
        torch.cuda.synchronize()

        def run():
            return [F.linear(x[name], w[name]) for w in self.weights for name in kernels]
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
    with_middle = {k: (TRUNK | MIDDLE)[k] for k in ("kda_in", "kda_mix", *list(TRUNK)[1:])}
    nbytes = sum(2 * a * b for a, b in (shape(cfg, *where) for where in TRUNK.values()))
    found = []
    for n in rows:
        bench.place(n, 1, 1)
        bench.replay()   # inputs that a step made
        us = {"torch_us": theirs.seconds(TRUNK, n), "ours_us": ours.seconds(TRUNK), "torch_with_f_b_us": theirs.seconds(with_middle, n),
              "ours_with_kda_mix_us": ours.seconds(with_middle)}
        us = {name: round(s * 1e6 / len(layers), 2) for name, s in us.items()}
        found.append({"rows": n, **us, "ratio": round(us["torch_us"] / us["ours_us"], 2), "floor_us": round(nbytes / bench.ceiling * 1e6, 2),
                      "ratio_with_middle": round(us["torch_with_f_b_us"] / us["ours_with_kda_mix_us"], 2)})
        print(found[-1], file=sys.stderr, flush=True)
    document = {"what": "BF16 products of one KDA + MoE layer, one TP16 rank, microseconds a layer", "layers": len(layers), "mb": round(nbytes / 1e6, 1),
                "ceiling_tb_s": round(bench.ceiling / 1e12, 3), "comparison": found} | surroundings(bench.device, "python scripts/compare_torch.py", ["torch"])
    text = json.dumps(document, indent=1)
    print(text)
    if output:
        Path(output).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
