"""What a step must read at least, on one rank: the floor of every ratio that a benchmark gives. No device is needed to know it."""
from dataclasses import dataclass

from ..buffers import BY_NAME as BUFFER
from ..buffers import DTYPE_BYTES, KV_BYTES
from ..dataflow import op_bytes
from ..plan import Op, Plan
from ..weights import BY_NAME, padded_dims, rank_bytes

STATES = ("kda_mix", "kda_commit")   # stages that read the KDA states of every sequence


@dataclass(frozen=True)
class StepBytes:
    """Bytes of one step and its commit.

    Args:
        sequences: that the rows belong to; each has states of its own.
        cache_tokens: positions of the MLA cache that the rows attend to, of all sequences together.
        experts: layer -> distinct experts that the step chose there.
    """

    plan: Plan
    kv_cache_dtype: str
    sequences: int
    cache_tokens: int
    experts: dict[int, int]

    def floor(self) -> float:
        """What any step must read: weights and chosen experts once, the caches of its contexts, and every state once.

        Our commit reads the states again; that is a cost of ours and no part of the floor.
        """
        return sum(self.op(op) for op in self.plan.ops)

    def op(self, op: Op) -> float:
        """What one operation must read: weights, states and cache; what an earlier operation of the step wrote is not counted."""
        cfg, tp, name = self.plan.cfg, self.plan.tp, op.stage.name
        dims = cfg.dims()
        if name == "mla_attend":
            return self.cache_tokens * dims["mla_cache_dim"] * KV_BYTES[self.kv_cache_dtype]
        total = op_bytes(cfg, op, tp, rows=0)   # weights that no row chooses
        for weight in op.stage.weights:
            if BY_NAME[weight].per_expert:
                total += rank_bytes(BY_NAME[weight], dims, tp, experts=self.experts[op.layer])
        return total + (self.states() if name in STATES else 0)

    def states(self) -> int:
        """KDA states of one layer and every sequence."""
        dims, state = self.plan.cfg.dims(), BUFFER["kda_state"]
        each = padded_dims(dims, self.plan.tp)["kda_num_heads"] // self.plan.tp * dims["kda_head_dim"] ** 2 * DTYPE_BYTES[state.dtype]
        return each * self.sequences
