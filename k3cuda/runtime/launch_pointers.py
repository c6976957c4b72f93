"""What the phases of a step in one launch point to: packed weights, and structures with the places where the standard path has its rows, records,
states and caches. launch_step.py says what belongs where. Addresses are numbers: no GPU is needed here."""
import ctypes
from dataclasses import dataclass
from math import prod

import numpy as np

from ..block_program import BlockProgram
from ..buffers import DTYPE_BYTES, KV_BYTES, buffer_shape
from ..config import L2NORM_EPS, MLA_NORM_EPS
from ..launch_operands import KdaMix, LaunchMix, LaunchMla, LaunchTokens, MlaAttend, MlaWrite, Operand, operand
from ..plan import Op, Plan
from ..tables import Tables

CACHE_SCALE = 1.0   # of FP8 cache rows: no checkpoint has another
ALIGN = 16          # bytes: where a structure may begin
_TOP_SUM = 8        # bytes of a partial result's maximum and sum, F32, which stand before the results themselves


@dataclass(frozen=True)
class Places:
    """Where one rank has what a launch reads and writes.

    Attributes:
        tables: of the machine's sizes. kv_cache_dtype: "bf16" or "fp8_e4m3".
        buffers: address of every buffer. weights: (layer, stage) -> addresses of its packed arrays.
        mla_work: address of Step's. mla_partials: as there.
        score_scale: float32 that scores of latent attention are multiplied with, as the standard path's kernels work it out.
    """

    plan: Plan
    tables: Tables
    kv_cache_dtype: str
    buffers: dict[str, int]
    weights: dict[tuple[int | None, str], tuple[int, ...]]
    mla_work: int
    mla_partials: int
    score_scale: float

    def part(self, name: str, op: Op) -> int:
        """Address of a layered buffer's part that is an operation's."""
        b = self.tables.buffers[name]
        size = KV_BYTES[self.kv_cache_dtype] if b.dtype == "kv" else DTYPE_BYTES[b.dtype]
        return self.buffers[name] + op.kind_index * prod(buffer_shape(b, self.tables.dims)[1:]) * size

    def tap(self, mix: Op) -> int | None:
        """Address of what a draft model reads where a mix begins (of the first row); None: nothing."""
        found = next((op for op in self.plan.ops if op.stage.where == "tap" and op.layer == mix.layer), None)
        if found is None or mix.stage.name == "ffn_mix":
            return None
        return self.buffers["taps"] + found.kind_index * self.plan.cfg.hidden_size * DTYPE_BYTES[self.tables.buffers["taps"].dtype]

    def parts(self, op: Op, **names: str) -> dict[str, int]:
        return {to: self.part(name, op) for to, name in names.items()}


def _tokens(at: Places, op: Op, weights: tuple[int, ...], rows: int) -> LaunchTokens:
    return LaunchTokens(token_ids=at.buffers["token_ids"], table=weights[0], hidden=at.buffers["hidden"])


def _mix(at: Places, op: Op, weights: tuple[int, ...], rows: int) -> LaunchMix:
    if len(weights) == 1:   # a norm alone
        return LaunchMix(weight=weights[0])
    return LaunchMix(score=weights[0], weight=weights[1], hidden=at.buffers["hidden"], blocks=at.buffers["res_blocks"], taps=at.tap(op))


def _kda(at: Places, op: Op, weights: tuple[int, ...], rows: int) -> KdaMix:
    cfg = at.plan.cfg
    return KdaMix(row_slot=at.buffers["row_slot"], rows=rows, heads=cfg.dims()["kda_num_heads"] // at.plan.tp, lower_bound=cfg.linear_attn_config.gate_lower_bound,
                  l2_eps=L2NORM_EPS, eps=cfg.rms_norm_eps, **dict(zip(("f_b", "a_log", "dt_bias", "q_conv", "k_conv", "v_conv", "o_norm"), weights, strict=True)),
                  **at.parts(op, qkv="kda_qkv", beta="kda_beta", k="kda_k", v="kda_v", decay="kda_decay", state="kda_state", conv_state="conv_state"))


def _mla(at: Places, op: Op, weights: tuple[int, ...], rows: int) -> LaunchMla:
    dims, (query_norm, latent_norm) = at.tables.dims, weights
    of_rows = {n: at.buffers[n] for n in ("row_slot", "row_position", "page_table")} | {"slot_pages": dims["slot_pages"], "rows": rows, "cache_scale": CACHE_SCALE}
    attend = MlaAttend(**of_rows, cache=at.part("mla_cache", op), score_scale=at.score_scale, partial=at.mla_work + at.mla_partials * _TOP_SUM, top_sum=at.mla_work)
    return LaunchMla(attend, MlaWrite(**of_rows, query_norm=query_norm, latent_norm=latent_norm, cache=at.part("mla_cache", op), eps=MLA_NORM_EPS))


_MAKERS = {LaunchTokens: _tokens, LaunchMix: _mix, KdaMix: _kda, LaunchMla: _mla}


class Pointers:
    """Of a program on `places`: the structures of its phases, each once, and what every phase points to.

    Attributes:
        structures: uint8, to be put into the device's memory.
    """

    def __init__(self, program: BlockProgram, places: Places):
        ops, made, self._phases, blob = {(op.stage.name, op.layer): op for op in places.plan.ops}, {}, [], b""
        for kind, layer in program.weights:
            use: Operand = operand(places.plan, program.kinds[kind], layer)
            key, weights = (use.layer, use.stage), places.weights.get((use.layer, use.stage), ())
            if use.struct is None:
                self._phases.append((None, 0 if use.packed is None else weights[use.packed]))
                continue
            if key not in made:
                made[key] = len(blob)
                found: ctypes.Structure = _MAKERS[use.struct](places, ops[use.stage, use.layer], weights, program.rows)
                blob += bytes(found) + bytes(-ctypes.sizeof(found) % ALIGN)
            self._phases.append((made[key], 0))
        self.structures = np.frombuffer(blob, np.uint8)

    def table(self, base: int) -> np.ndarray:
        """uint64 [phases], with the structures at address `base`."""
        return np.array([weight if at is None else base + at for at, weight in self._phases], np.uint64)
