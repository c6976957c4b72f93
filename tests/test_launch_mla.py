"""Latent attention inside the single launch under g++: the standard path's bytes, from the layer's input to its result."""
import numpy as np
import pytest
from launch_shim import Case, small_mla_layer
from shim import host
from test_block_program import Walked, check_bytes

shim = pytest.mark.skipif(host.COMPILER is None, reason="needs g++")


@shim
@pytest.mark.parametrize(("rows", "cache", "context", "defines"), [(1, 1, 300, ()), (3, 2, 250, ()), (8, 1, 0, ()), (8, 2, 270, ("K3_SHIM_WGMMA",))])
def test_the_bytes_of_the_standard_path(tmp_path, rows, cache, context, defines):
    """Of two layers; the contexts end in their first chunk, where the standard path does not combine, in the second, or in either."""
    case = Case(tmp_path, small_mla_layer(rows, cache), rows, opening=(True, False), context=context, defines=defines)
    walked = Walked(case, tmp_path / "standard")
    check_bytes(case, walked)
