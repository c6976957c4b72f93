"""What the phases of a single launch find behind their entry of LaunchArgs.weights: packed weights, or one of these structures."""
import ctypes
from dataclasses import dataclass

from .errors import PlanError
from .launch_kinds import Kind
from .launch_mixes import Mix
from .plan import Plan


def _struct(name: str, **fields: str) -> type[ctypes.Structure]:
    """Laid out as C++ lays out the same fields; "p" a pointer, "i" an int, "f" a float."""
    kinds = {"p": ctypes.c_void_p, "i": ctypes.c_int, "f": ctypes.c_float}
    return type(name, (ctypes.Structure,), {"_fields_": [(f, kinds[k]) for f, k in fields.items()]})


_ROWS = {"row_slot": "p", "row_position": "p", "page_table": "p", "slot_pages": "i", "rows": "i"}
# As in kda_core.cuh, mla_core.cuh, mla_combine.cuh, launch_slices.cuh and launch_step.cuh. Pointers that are said to be null are not looked at.
KdaMix = _struct("KdaMix", row_slot="p", rows="i", heads="i", qkv="p", f_a="p", beta="p", out_gate="p", state="p", conv_state="p", f_b="p",
                 a_log="p", dt_bias="p", q_conv="p", k_conv="p", v_conv="p", o_norm="p", k="p", v="p", decay="p", out="p", lower_bound="f", l2_eps="f", eps="f",
                 advances="i")
MlaAttend = _struct("MlaAttend", **_ROWS, query="p", cache="p", score_scale="f", cache_scale="f", partial="p", top_sum="p", next="p", out="p")
MlaWrite = _struct("MlaWrite", **_ROWS, query="p", latent="p", query_norm="p", latent_norm="p", query_out="p", cache="p", cache_scale="f", eps="f")
LaunchMix = _struct("LaunchMix", score="p", weight="p", hidden="p", blocks="p", taps="p")
LaunchTokens = _struct("LaunchTokens", token_ids="p", table="p", hidden="p")


class LaunchMla(ctypes.Structure):
    _fields_ = [("attend", MlaAttend), ("write", MlaWrite)]


@dataclass(frozen=True)
class Operand:
    """`stage` and `layer` (None before and behind the layers): whose packed arrays (packing.PACKED[stage]) the phase works with, as the plan's operation of
    that stage and layer does. `struct`: the structure that its entry points to; None: to packed array number `packed` itself, or to nothing where that is None too."""

    stage: str
    layer: int | None
    struct: type[ctypes.Structure] | None = None
    packed: int | None = 0


_MLA = ("mla_norm", "mla_attend", "mla_combine")


def operand(plan: Plan, k: Kind, layer: int) -> Operand:
    """What (kind, layer) of a step's program (launch_step.step_program) works with.

    Layer `num_hidden_layers` of a mix is the output mix, of lm_head the head. Raises PlanError if the plan has no such operation.
    """
    stage = k.stage if isinstance(k, Mix) else {"shared_down": "route", **dict.fromkeys(_MLA, "mla_norm")}.get(k.name, k.name)
    at: int | None = layer
    if layer == plan.cfg.num_hidden_layers:
        stage, at = {"attn_mix": "output_mix"}.get(stage, stage), None
    elif k.name == "embed":
        at = None
    if not any(op.stage.name == stage and op.layer == at for op in plan.ops):
        raise PlanError(f"{k.name} of layer {layer} is stage {stage}, which the plan has not there")
    struct = LaunchMix if isinstance(k, Mix) else {"embed": LaunchTokens, "kda_mix": KdaMix, **dict.fromkeys(_MLA, LaunchMla)}.get(k.name)
    return Operand(stage, at, struct, {"shared_down": 1, "dense_sum": None}.get(k.name, 0))
