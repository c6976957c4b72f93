"""Sessions, buffers, streams and examples on the standard path: the cases of the reference, with arrays that stay on the GPU."""
import re

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cp = pytest.importorskip("cupy", reason="CuPy holds the device's memory; install k3cuda[cu13] or k3cuda[cu12]")

import ml_dtypes  # noqa: E402
from models import HEADDIMS  # noqa: E402
from prefix_cases import same_bytes_with_and_without  # noqa: E402
from session_cases import cut_and_forked, forks_go_their_own_way  # noqa: E402
from standard import compile_ahead, same  # noqa: E402
from test_examples import EXAMPLES, PAGE, example  # noqa: E402

from k3cuda import LLM, SamplingParams  # noqa: E402
from k3cuda.buffers import BUFFERS, buffer_shape  # noqa: E402
from k3cuda.config import PAGE_SIZE  # noqa: E402
from k3cuda.emit_sizes import DECODE_BUCKETS  # noqa: E402
from k3cuda.errors import UsageError  # noqa: E402
from k3cuda.runtime.checkpoint import Checkpoint  # noqa: E402
from k3cuda.runtime.tiny_random import open_tiny_random  # noqa: E402

ROOM = {"max_batch": 6, "max_model_len": 4 * PAGE_SIZE, "decode_backend": "standard"}


@pytest.fixture(scope="module", autouse=True)
def compiled():
    cfg = Checkpoint.open(HEADDIMS).cfg
    compile_ahead((open_tiny_random().cfg, 1, DECODE_BUCKETS, "bf16", True), (cfg, 1, DECODE_BUCKETS, "fp8_e4m3", True), (cfg, 2, DECODE_BUCKETS, "bf16", True))


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny-random", **ROOM) as opened:
        yield opened


@pytest.fixture(scope="module")
def others():
    """Two ranks, and an FP8 cache."""
    with LLM(HEADDIMS, tp=2, ranks="virtual", **ROOM) as ranks, LLM(HEADDIMS, kv_cache_dtype="fp8_e4m3", **ROOM) as fp8:
        yield ranks, fp8


@pytest.mark.parametrize("seed", range(3))
def test_the_bytes_of_logits_however_it_is_cut_and_forked(llm, seed):
    cut_and_forked(llm, seed)


def test_the_same_on_two_ranks_and_with_an_fp8_cache(others):
    for llm in others:
        cut_and_forked(llm, 9)


@pytest.mark.parametrize("at", [1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1])
def test_a_fork_and_its_parent_are_fresh_runs(llm, at):
    forks_go_their_own_way(llm, at)


def test_a_copied_slot_is_the_same_bytes(others):
    for llm in others:
        with llm.prefill(np.arange(PAGE_SIZE + 9) % 250 + 3) as parent, llm.prefill([9] * 90) as between, parent.fork() as child:
            for rank in range(llm.backend.tp):
                states = [llm.buffer(name, rank).view(np.uint8) for name in ("kda_state", "conv_state")]
                cache = llm.buffer("mla_cache", rank).view(np.uint8)
                for array in states:
                    same(array[:, child.slot].get(), array[:, parent.slot].get())
                    assert array[:, child.slot].any() and (array[:, between.slot] != array[:, parent.slot]).any()
                assert parent.pages[0] == child.pages[0] and parent.pages[1] != child.pages[1]
                same(cache[:, child.pages[1], :9].get(), cache[:, parent.pages[1], :9].get())
                assert cache[:, child.pages[1], :9].any()


def test_arrays_stay_on_the_gpu(llm):
    with llm.prefill(cp.array([3, 4, 5])) as session:
        out = session.step(session.logits.argmax())
        assert isinstance(out, cp.ndarray) and isinstance(session.logits, cp.ndarray) and out.shape == (llm.cfg.vocab_size,)
        kept, want = session.logits, out.get()
        rows = session.step(cp.array([6, 7]))
        assert isinstance(rows, cp.ndarray) and rows.shape == (2, llm.cfg.vocab_size)
        rows[:] = 0
        same(kept.get(), want)   # neither later steps nor what a caller does to a result
        assert session.logits.any()
        llm.generate([5], SamplingParams(temperature=0, max_tokens=3))
        same(kept.get(), want)


def test_every_buffer_by_its_name(llm, others):
    for opened in (llm, *others):
        memory, moved = opened.backend.memories[0], {m.source: m.target for op in opened.backend.plan.ops for m in op.stage.moves}
        for rank in range(opened.backend.tp):
            for entry in BUFFERS:
                if entry.name in moved:
                    with pytest.raises(UsageError, match=f"read {moved[entry.name]}$"):
                        opened.buffer(entry.name, rank)
                    continue
                array = opened.buffer(entry.name, rank)
                assert array.shape == buffer_shape(entry, memory.dims), entry.name
                want = ml_dtypes.bfloat16 if entry.dtype == "bf16" or (entry.dtype == "kv" and array.itemsize == 2) else array.dtype
                assert array.dtype == want and array.data.ptr == opened.backend.memories[rank].buffer(entry.name).data.ptr, entry.name
    with pytest.raises(UsageError, match="found rank 2, wanted one below 2"):
        others[0].buffer("attn_in", 2)


def test_buffers_hold_the_last_step(llm, others):
    for opened in (llm, others[0]):
        with opened.prefill([3, 4]) as session:
            logits = session.step([5, 6, 7])
            same(opened.buffer("logits")[:3].get(), logits.get())
            assert opened.buffer("token_ids")[:4].tolist() == [5, 6, 7, 0]
            attn_in = opened.buffer("attn_in")[:3].astype(np.float32).get()   # normed: a mean square near that of the norm's weight
            assert np.isfinite(attn_in).all() and 0.1 < np.square(attn_in).mean() < 10
            weights = opened.buffer("expert_weights")[:3].sum(axis=1).get()
            np.testing.assert_allclose(weights, opened.cfg.routed_scaling_factor, rtol=1e-5)


def test_a_callers_work_on_buffers_comes_before_the_next_step(llm):
    """A long write on the current stream, not waited for: the step sees it, and what was read before is what was there."""
    with llm.prefill([3, 4, 5]) as session, session.fork() as again:
        states = llm.buffer("kda_state")
        stream = cp.cuda.Stream(non_blocking=True)
        llm.backend.stream.synchronize()
        cp.cuda.Device().synchronize()
        with stream:
            busy = cp.ones(1 << 26, cp.float32)
            for _ in range(50):
                busy *= 1.0001          # some milliseconds
            states[:, again.slot] = 0   # behind it
            changed = again.step(6)
            state = states[:, session.slot].copy()
            plain = session.step(6)
            moved = states[:, session.slot].copy()
            stream.synchronize()
        with llm.prefill([3, 4, 5]) as fresh:
            same(llm.buffer("kda_state")[:, fresh.slot].get(), state.get())
            same(fresh.step(6).get(), plain.get())
            same(llm.buffer("kda_state")[:, fresh.slot].get(), moved.get())
        assert (changed != plain).any() and (moved != state).any()


def test_examples(llm, capsys):
    prompt = "Why is the sky blue?"
    output, = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    assert tuple(example("greedy").greedy(llm, prompt, 9)) == output.token_ids
    beams = example("beam_search").beam_search(llm, "sky", 6, width=5)
    ids = llm.tokenizer.encode("sky")
    for total, new in beams:
        rows = llm.logits(ids + new).astype(np.float64)[len(ids) - 1:-1]
        logprobs = rows - rows.max(1, keepdims=True)
        logprobs -= np.log(np.exp(logprobs).sum(1, keepdims=True))
        assert abs(total - logprobs[np.arange(6), new].sum()) < 1e-4
    for path in EXAMPLES:
        example(path.stem).main("tiny-random", "standard")
        assert len(capsys.readouterr().out) > 20


def test_python_of_the_page_runs():
    space = {"print": lambda *values: None}
    for block in re.findall(r"```python(?: gpu)?\n(.*?)```", PAGE, re.S):
        exec(block.replace('LLM("demo"', 'LLM("demo", decode_backend="standard"'), space)
    assert isinstance(space["cached"], cp.ndarray) and space["cached"].any() and int(space["top"]) >= 0
    same(space["total"].get(), space["logits"].sum().get())
    space["llm"].close()


def test_prompts_that_share_a_beginning_give_the_same_bytes():
    same_bytes_with_and_without(HEADDIMS, decode_backend="standard", kv_cache_dtype="fp8_e4m3")
