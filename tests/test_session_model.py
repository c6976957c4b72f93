"""Sessions on the reference backend: the bytes of `LLM.logits` however a text is cut and forked, and buffers as arrays."""
import numpy as np
import pytest
from session_cases import cut_and_forked, forks_go_their_own_way

from k3cuda import LLM, SamplingParams
from k3cuda.buffers import BUFFERS, buffer_shape
from k3cuda.config import PAGE_SIZE
from k3cuda.errors import UsageError
from k3cuda.runtime.made_config import made_config
from k3cuda.runtime.made_model import MadeCheckpoint


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny-random", max_batch=4, max_model_len=2 * PAGE_SIZE) as opened:
        yield opened


@pytest.fixture(scope="module")
def small():
    with LLM(MadeCheckpoint(made_config(), seed=3), max_batch=4, max_model_len=3 * PAGE_SIZE) as opened:
        yield opened


@pytest.fixture(scope="module")
def two_ranks():
    """The same model in two parts, its cache in FP8."""
    with LLM(MadeCheckpoint(made_config(), seed=3), tp=2, max_batch=4, max_model_len=3 * PAGE_SIZE, kv_cache_dtype="fp8_e4m3") as opened:
        yield opened


@pytest.mark.parametrize("seed", range(3))
def test_the_bytes_of_logits_however_it_is_cut_and_forked(small, seed):
    cut_and_forked(small, seed)


def test_the_same_on_two_ranks(two_ranks):
    cut_and_forked(two_ranks, 9)


@pytest.mark.parametrize("at", [1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1])
def test_a_fork_and_its_parent_are_fresh_runs(small, at):
    forks_go_their_own_way(small, at)


def test_greedy_by_hand_is_what_generate_does(llm):
    output, = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    with llm.prefill("Hello") as session:
        tokens = [int(session.logits.argmax())]
        while len(tokens) < 8:
            tokens.append(int(session.step(tokens[-1]).argmax()))
    assert tuple(tokens) == output.token_ids


# Buffers

@pytest.mark.parametrize("which", ["llm", "two_ranks"])
def test_every_buffer_by_its_name(which, request):
    llm = request.getfixturevalue(which)
    for rank in range(llm.backend.tp):
        for entry in BUFFERS:
            array = llm.buffer(entry.name, rank)
            same = np.shares_memory(array, llm.buffer(entry.name, rank)) or not array.size
            assert array.shape == buffer_shape(entry, llm.backend.dims) and same, entry.name


def test_buffers_are_those_of_the_last_step(llm):
    seen, step = {}, llm.backend.step

    def observe(op, arenas):
        for name in op.stage.outputs:
            seen[name] = arenas[0][name].copy()

    with llm.prefill([3, 4]) as session:
        llm.backend.step = lambda rows: step(rows, observe)
        try:
            logits = session.step([5, 6, 7])
        finally:
            llm.backend.step = step
        for name in ("attn_in", "expert_ids", "router_logits_part", "kda_decay"):
            assert llm.buffer(name)[:3].tobytes() == seen[name][:3].tobytes()
        assert llm.buffer("logits")[:3].tobytes() == logits.tobytes()
        assert llm.buffer("token_ids")[:4].tolist() == [5, 6, 7, 0]


def test_states_of_a_session_can_be_read_and_written(llm):
    with llm.prefill([3, 4, 5]) as session, session.fork() as child, llm.prefill([3, 4, 5]) as again:
        states, cache = llm.buffer("kda_state"), llm.buffer("mla_cache")
        for other in (child, again):
            assert states[:, session.slot].tobytes() == states[:, other.slot].tobytes()
            assert cache[:, session.pages[0], :3].tobytes() == cache[:, other.pages[0], :3].tobytes()
        states[:, child.slot] = 0
        assert child.step(6).tobytes() != session.step(6).tobytes() == again.step(6).tobytes()


@pytest.mark.parametrize("name, rank, text", [
    ("atn_in", 0, "near it are attn_in"), ("expert", 0, "expert_ids"), ("", 0, "docs/dataflow.md"), (5, 0, "docs/dataflow.md"), (None, 0, "unknown"),
    ("logits", 1, "wanted one below 1"), ("logits", -1, "found rank -1"), ("logits", "0", "found rank '0'")])
def test_buffers_that_do_not_exist(llm, name, rank, text):
    with pytest.raises(UsageError, match=text):
        llm.buffer(name, rank)


def test_no_buffer_of_a_closed_llm():
    opened = LLM("tiny-random", max_batch=1, max_model_len=64)
    opened.close()
    with pytest.raises(UsageError, match="closed"):
        opened.buffer("logits")
