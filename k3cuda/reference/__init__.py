"""The definition of right: every stage of stages.py as a NumPy function of the same name.

A stage is `stage(m, w, b, op)`: `m` the model and numerics (runtime/numpy_backend.py), `w` and `b` exactly the weights and
buffers it declares (reads are read-only), `op` the operation of the plan. It returns nothing.
"""
import importlib

from ..stages import STAGES

FUNCTIONS = {s.name: getattr(importlib.import_module(f"{__name__}.{s.header}"), s.name) for s in STAGES if s.header}
