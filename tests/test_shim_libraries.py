"""Libraries that the host shim builds share nothing, though all of them have the same templates."""
import ctypes

import pytest
from shim import host

pytestmark = pytest.mark.skipif(host.COMPILER is None, reason="needs g++")
SOURCE = """template <class T> T* kept() { __shared__ T values[%d]; return values; }
extern "C" void* place() { return kept<float>(); }
"""


def test_shared_memory_of_a_template_is_each_librarys_own(tmp_path):
    places = set()
    for size in (4, 1 << 16):
        (folder := tmp_path / str(size)).mkdir()
        library = host.build(SOURCE % size, [], folder)
        library.place.restype = ctypes.c_void_p
        places.add(library.place())
    assert len(places) == 2
