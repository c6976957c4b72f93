"""The definition of right: every stage of stages.py as a NumPy function of the same name.

A stage is `stage(m, w, b, op)`: `m` the model and numerics (runtime/numpy_program.py), `w` and `b` exactly the weights and
buffers it declares (reads are read-only, all floats F32), `op` the operation of the plan. It returns nothing and raises nothing:
what does not fit was refused before. In shapes n is the rows of the step and H the hidden size. Formulas: docs/model.md.
A draft's stages (draft_stages.py) are the same with `m.cfg` its config. Formulas: docs/dspark.md.
"""
import importlib

from ..draft_stages import DRAFT_STAGES
from ..stages import STAGES

FUNCTIONS = {s.name: getattr(importlib.import_module(f"{__name__}.{s.header}"), s.name) for s in STAGES + DRAFT_STAGES if s.header}
