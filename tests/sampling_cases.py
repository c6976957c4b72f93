"""Rows and parameters that the sampler's property tests draw from."""
import numpy as np
from hypothesis import settings, strategies as st

from k3cuda.reference.numerics import F32
from k3cuda.runtime.sampling import SamplingParams

settings.register_profile("k3cuda", deadline=None)  # a busy machine is no failure
settings.load_profile("k3cuda")

# F32 has 24 bits and a tree over at most 64 values adds six roundings: decisions closer than this are not judged by an F64 oracle.
MARGIN = 1e-5

# Multiples of 1/4 make ties likely; the others reach what F32 can hold.
coarse = st.integers(-40, 40).map(lambda i: i / 4)
wild = st.one_of(coarse, st.floats(-(2.0**100), 2.0**100, width=32), st.sampled_from([3.4e38, -3.4e38, -1e30, 1e-45, 0.0, -0.0]))


def rows(values, most=40):
    return st.lists(values, min_size=1, max_size=most).map(lambda x: np.array(x, F32))


def params(**given_):
    return SamplingParams(**given_).resolved({})


filters = st.fixed_dictionaries({}, optional={
    "temperature": st.sampled_from([0.25, 0.7, 1.0, 1.3, 2.0]), "top_k": st.integers(-1, 45), "min_p": st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    "top_p": st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]), "repetition_penalty": st.sampled_from([0.5, 1.2]),
    "presence_penalty": st.sampled_from([-2, 0.5]), "frequency_penalty": st.sampled_from([-0.3, 2])})
