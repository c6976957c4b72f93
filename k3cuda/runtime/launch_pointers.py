"""What the phases of a single launch point to: packed weights, and structures with the places where the standard path has its rows, records,
states and caches. Addresses are numbers: no GPU is needed here. kernels_cu/launch_core.cuh says what a kind's pointer is."""
import ctypes
from dataclasses import dataclass
from math import prod

import numpy as np

from ..block_program import BlockProgram
from ..buffers import DTYPE_BYTES, KV_BYTES, buffer_shape
from ..config import L2NORM_EPS, MLA_NORM_EPS, PAGE_SIZE
from ..errors import PlanError
from ..launch_kinds import ExpertDown, ExpertUp, Kda, Kind, Product, Route
from ..launch_mixes import Mix
from ..launch_mla import MlaAttend, MlaCombine, MlaNorm
from ..launch_source import LAUNCH_MIX
from ..plan import Op, Plan
from ..tables import Tables

CACHE_SCALE = 1.0   # of FP8 cache rows: no checkpoint has another
ALIGN = 16          # bytes: where a structure may begin


def _struct(name: str, **fields: str) -> type[ctypes.Structure]:
    """Laid out as C++ lays out the same fields; "p" a pointer, "i" an int, "f" a float."""
    kinds = {"p": ctypes.c_void_p, "i": ctypes.c_int, "f": ctypes.c_float}
    return type(name, (ctypes.Structure,), {"_fields_": [(field, kinds[kind]) for field, kind in fields.items()]})


_ROWS = {"row_slot": "p", "row_position": "p", "page_table": "p", "slot_pages": "i", "rows": "i"}   # MlaRows
KdaMix = _struct("KdaMix", row_slot="p", rows="i", heads="i", qkv="p", f_a="p", beta="p", out_gate="p", state="p", conv_state="p", f_b="p", a_log="p", dt_bias="p",
                 q_conv="p", k_conv="p", v_conv="p", o_norm="p", k="p", v="p", decay="p", out="p", lower_bound="f", l2_eps="f", eps="f")
MlaAttending = _struct("MlaAttend", **_ROWS, query="p", map="p", first="i", score_scale="f", cache_scale="f", partial="p", top_sum="p", next="p", out="p")
MlaWrite = _struct("MlaWrite", **_ROWS, query="p", latent="p", query_norm="p", latent_norm="p", query_out="p", cache="p", cache_scale="f", eps="f")


@dataclass(frozen=True)
class Places:
    """Where one rank has what a launch reads and writes.

    Attributes:
        tables: of the machine's sizes. kv_cache_dtype: "bf16" or "fp8_e4m3".
        buffers: address of every buffer. weights: (layer, stage) -> addresses of its packed arrays.
        mla_work, mla_map: addresses of Step's. mla_partials: as there.
        score_scale: float32 that scores of latent attention are multiplied with, as the standard path's kernels work it out.
    """

    plan: Plan
    tables: Tables
    kv_cache_dtype: str
    buffers: dict[str, int]
    weights: dict[tuple[int | None, str], tuple[int, ...]]
    mla_work: int
    mla_map: int
    mla_partials: int
    score_scale: float

    def part(self, name: str, op: Op) -> int:
        """Address of a layered buffer's part that is an operation's."""
        b = self.tables.buffers[name]
        size = KV_BYTES[self.kv_cache_dtype] if b.dtype == "kv" else DTYPE_BYTES[b.dtype]
        return self.buffers[name] + op.kind_index * prod(buffer_shape(b, self.tables.dims)[1:]) * size

    def kda(self, op: Op) -> KdaMix:
        """Of a layer's kda_mix. What comes by the exchange and what goes there has no address."""
        cfg, parts = self.plan.cfg, {to: self.part(name, op) for to, name in (("qkv", "kda_qkv"), ("beta", "kda_beta"), ("k", "kda_k"), ("v", "kda_v"),
                                                                              ("decay", "kda_decay"), ("state", "kda_state"), ("conv_state", "conv_state"))}
        weights = dict(zip(("f_b", "a_log", "dt_bias", "q_conv", "k_conv", "v_conv", "o_norm"), self.weights[op.layer, "kda_mix"], strict=True))
        return KdaMix(row_slot=self.buffers["row_slot"], heads=cfg.dims()["kda_num_heads"] // self.plan.tp, lower_bound=cfg.linear_attn_config.gate_lower_bound,
                      l2_eps=L2NORM_EPS, eps=cfg.rms_norm_eps, **parts, **weights)

    def mla(self, op: Op, rows: int) -> bytes:
        """A LaunchMla of a layer's mla_norm, for steps of `rows` rows."""
        dims = self.tables.dims
        query_norm, latent_norm = self.weights[op.layer, "mla_norm"]
        of_rows = {n: self.buffers[n] for n in ("row_slot", "row_position", "page_table")} | {"slot_pages": dims["slot_pages"], "rows": rows}
        attend = MlaAttending(**of_rows, map=self.mla_map, first=op.kind_index * dims["pages"] * PAGE_SIZE, score_scale=self.score_scale, cache_scale=CACHE_SCALE,
                              partial=self.mla_work + self.mla_partials * 8, top_sum=self.mla_work)   # a maximum and a sum, F32, of every partial result
        write = MlaWrite(**of_rows, query_norm=query_norm, latent_norm=latent_norm, cache=self.part("mla_cache", op), cache_scale=CACHE_SCALE, eps=MLA_NORM_EPS)
        return bytes(attend) + bytes(write)

    def mix(self, k: Mix, layer: int | None) -> bytes:
        """A LaunchMix: a norm alone has no scores and keeps no prefix sum."""
        *score, weight = self.weights[layer, k.stage]
        hidden, blocks = (self.buffers["hidden"], self.buffers["res_blocks"]) if k.blocks else (0, 0)
        return np.array([(score[0] if score else 0, weight, hidden, blocks)], LAUNCH_MIX).tobytes()


def weights_of(k: Kind) -> tuple[str, int]:
    """(stage, which of its packed arrays) that a kind reads by itself. Raises PlanError for one that has none."""
    if isinstance(k, Product):
        return ("route", 1) if k.name == "shared_down" else (k.name, 0)
    for kind, stage in ((Route, "route"), (ExpertUp, "expert_up"), (ExpertDown, "moe_down")):
        if isinstance(k, kind):
            return stage, 0
    raise PlanError(f"no table says what {k.name} of a single launch reads")


class Pointers:
    """Of a program on `places`: the structures of its phases, once each, and what every phase points to.

    Attributes:
        structures: uint8, to be put into the device's memory.
    """

    def __init__(self, program: BlockProgram, places: Places):
        self._ops = {(op.stage.name, op.layer): op for op in places.plan.ops}
        self._at, self._phases, blob = {}, [], b""
        for kind, layer in program.weights:
            k = program.kinds[kind]
            key = self._structure(k, layer)
            if key is None:
                stage, which = weights_of(k)
                self._phases.append((None, places.weights[layer, stage][which]))
                continue
            if key not in self._at:
                self._at[key] = len(blob)
                made = self._made(k, layer, places, program.rows)
                blob += made + bytes(-len(made) % ALIGN)
            self._phases.append((self._at[key], 0))
        self.structures = np.frombuffer(blob, np.uint8)

    def table(self, base: int) -> np.ndarray:
        """uint64 [phases], with the structures at address `base`."""
        return np.array([weight if at is None else base + at for at, weight in self._phases], np.uint64)

    @staticmethod
    def _structure(k: Kind, layer: int | None) -> tuple | None:
        """Phases of the same one have the same structure; None: it points to weights."""
        if isinstance(k, Mix):
            return k.stage, layer
        if isinstance(k, (MlaNorm, MlaAttend, MlaCombine)):
            return "mla", layer
        return ("kda", layer) if isinstance(k, Kda) else None

    def _made(self, k: Kind, layer: int | None, places: Places, rows: int) -> bytes:
        if isinstance(k, Mix):
            return places.mix(k, layer)
        return bytes(places.kda(self._ops["kda_mix", layer])) if isinstance(k, Kda) else places.mla(self._ops["mla_norm", layer], rows)
