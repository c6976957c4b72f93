"""Decode context parallelism: ranks that hold the MLA cache together give what ranks give that each hold all of it, and each holds its part."""
import time

import numpy as np
import pytest
from command import COMMAND
from models import relative, step_rows
from rank_processes import STARTED, ends, free_port, start
from session_cases import cut_and_forked, forks_go_their_own_way

from k3cuda import LLM, SamplingParams
from k3cuda.config import PAGE_SIZE
from k3cuda.context_split import check_dcp, legal_dcps, own_length, page_tokens
from k3cuda.errors import UsageError
from k3cuda.plan import build_plan
from k3cuda.runtime.made_config import made_config
from k3cuda.runtime.made_draft import MadeDraft, made_draft_json
from k3cuda.runtime.made_model import MadeCheckpoint
from k3cuda.runtime.numpy_backend import NumpyBackend
from k3cuda.runtime.write_checkpoint import write_checkpoint

LIMIT = 1e-3   # asked of the kernels, which round products; ranks of the reference add what one adds, in another order
CUTS = [(2, 2), (4, 2), (4, 4), (16, 2), (16, 4), (16, 16)]
TEXT = np.random.default_rng(1).integers(0, 300, 300)   # five pages: with 16 ranks most hold none


@pytest.fixture(scope="module")
def source():
    return MadeCheckpoint(made_config(), seed=3)


def backend(source, tp, dcp, **options):
    return NumpyBackend(source, tp, dcp=dcp, **{"max_batch": 3, "max_model_len": 512} | options)


def pages_of(be, slot, backwards=False):
    each = be.num_pages // be.num_slots
    pages = range(slot * each, (slot + 1) * each)
    return pages[::-1] if backwards else pages


def feed(be, slot, sizes, text=TEXT):
    """Logits of a text in steps of `sizes`, each row on every rank."""
    out, done = [], 0
    for n in sizes:
        be.step(step_rows((slot, done, text[done:done + n])))
        out.append(be.logits().copy())
        for arena in be.arenas[1:]:
            np.testing.assert_array_equal(arena["logits"][:n], out[-1], err_msg="ranks disagree")
        be.commit(np.ones(n, bool))
        done += n
    return np.concatenate(out)


# ---- who holds what ----

@pytest.mark.parametrize("dcp", [1, 2, 3, 16])
def test_every_position_is_held_once(dcp):
    lengths = np.arange(0, 5 * PAGE_SIZE * dcp + 3)
    held = np.stack([own_length(lengths, place, dcp) for place in range(dcp)])
    np.testing.assert_array_equal(held.sum(0), lengths)
    for position in (0, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE * dcp, 3 * PAGE_SIZE * dcp + 70):
        before, after = held[:, position], held[:, position + 1]
        assert np.flatnonzero(after - before).tolist() == [position // PAGE_SIZE % dcp]
        # the next free row of that rank's own pages
        assert before[position // PAGE_SIZE % dcp] == position // PAGE_SIZE // dcp * PAGE_SIZE + position % PAGE_SIZE


def test_legal_sizes():
    assert [legal_dcps(tp) for tp in (1, 2, 4, 16)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 8, 16]]
    assert page_tokens(1) == PAGE_SIZE and page_tokens(4) == 4 * PAGE_SIZE
    for tp, dcp in ((4, 3), (4, 8), (1, 2), (2, 0)):
        with pytest.raises(UsageError, match=f"dcp: found {dcp}, wanted .*1.* with a tp of {tp}") as e:
            check_dcp(tp, dcp)
        assert e.value.code == 2
    with pytest.raises(UsageError, match="wanted 1, 2 or 4 with a tp of 4"):
        build_plan(made_config(), 4, dcp=3)


def test_a_rank_stores_its_own_positions_and_no_others(source):
    """And has room for no more: with 4 ranks a quarter."""
    be, whole = backend(source, 4, 4), backend(source, 4, 1)
    for b in (be, whole):
        b.open_slot(1, pages_of(b, 1, backwards=True))
        feed(b, 1, [64] * 4 + [44])
    for name in ("num_pages", "page_tokens"):
        assert (getattr(be, name) != getattr(whole, name)) and be.num_pages * be.page_tokens == whole.num_pages * whole.page_tokens
    rows = whole.arenas[0]["mla_cache"][:, list(pages_of(whole, 1, True))]   # [layers, pages in order of position, ..]
    for place, arena in enumerate(be.arenas):
        assert arena["mla_cache"].nbytes * 4 == whole.arenas[place]["mla_cache"].nbytes
        own = arena["mla_cache"][:, list(pages_of(be, 1, True))]
        held = own_length(len(TEXT), place, 4)
        got, wanted = own.reshape(len(own), -1, own.shape[-1]), rows[:, place::4].reshape(len(rows), -1, rows.shape[-1])
        assert not got[:, held:].any() and got[:, :held].any(-1).all()
        assert relative(got, wanted) < 1e-5
        others = np.ones(be.num_pages, bool)
        others[list(pages_of(be, 1))] = False
        assert not arena["mla_cache"][:, others].any()


# ---- what comes out ----

@pytest.mark.parametrize("tp, dcp", CUTS)
def test_logits_are_those_of_whole_caches(source, tp, dcp):
    found = []
    for d in (1, dcp):
        be = backend(source, tp, d)
        be.open_slot(0, pages_of(be, 0))
        found.append(feed(be, 0, [64] * 4 + [1] * 4))
    assert found[0].std() > 0.1, "a model that says nothing tests nothing"
    assert 0 < relative(found[1], found[0]) < 1e-5 < LIMIT


@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "fp8_e4m3"])
def test_rounded_caches(source, kv_cache_dtype):
    found = []
    for dcp in (1, 4):
        be = backend(source, 4, dcp, kv_cache_dtype=kv_cache_dtype)
        be.open_slot(0, pages_of(be, 0))
        found.append(feed(be, 0, [64, 64, 20]))
    assert relative(found[1], found[0]) < LIMIT


def test_the_same_bytes_whatever_the_batch_the_pages_and_the_cuts(source):
    """Where a sequence lies, in which steps it comes, and who else is there: nothing of it is in a row's bytes."""
    alone, beside = backend(source, 4, 4), backend(source, 4, 4)
    alone.open_slot(0, pages_of(alone, 0))
    want = feed(alone, 0, [64] * 4 + [44])
    for slot in range(3):
        beside.open_slot(slot, pages_of(beside, slot, backwards=slot == 2))
    got, done = [], 0
    for n in [1, 7, 40, 20] + [29] * 8:
        other = np.arange(10) + done
        beside.step(step_rows((0, 10 * len(got), other), (2, done, TEXT[done:done + n]), (1, len(got), [7])))
        got.append(beside.logits()[10:10 + n].copy())
        beside.commit(np.ones(n + 11, bool))
        done += n
    np.testing.assert_array_equal(np.concatenate(got), want[:done])


def test_rejected_rows_leave_no_trace(source):
    """Rows over the edge of a page, half of them rejected: the next step writes over them, on whichever rank they are."""
    be, want = backend(source, 4, 2), backend(source, 4, 2)
    for b in (be, want):
        b.open_slot(0, pages_of(b, 0))
        feed(b, 0, [60])
    be.step(step_rows((0, 60, [*TEXT[60:63], 9, 9, 9, 9, 9])))
    be.commit(np.arange(8) < 3)
    rest = [step_rows((0, at, TEXT[at:at + 5])) for at in (63, 68)]
    want.step(step_rows((0, 60, TEXT[60:63])))
    want.commit(np.ones(3, bool))
    for rows in rest:
        for b in (be, want):
            b.step(rows)
        np.testing.assert_array_equal(be.logits(), want.logits())
        for b in (be, want):
            b.commit(np.ones(5, bool))


# ---- through the engine ----

PARAMS = [SamplingParams(max_tokens=24, seed=7, ignore_eos=True), SamplingParams(max_tokens=90, temperature=0, ignore_eos=True)]


@pytest.mark.parametrize("family, dcp", [("mla", 2), ("gqa", 4)])
def test_with_drafts_the_tokens_are_those_without(source, family, dcp):
    """Greedy text is the target's own. A draft's cache is whole on every rank, in pages that the target's stand for."""
    changes = {"aux_hidden_stream": "attn_res"} if family == "mla" else {"num_key_value_heads": 4}
    draft = MadeDraft(made_draft_json(source.cfg, family, num_hidden_layers=1, **changes), source.cfg)
    found = {}
    for name, options in {"whole": {"draft_model": draft, "num_drafts": 3}, "split": {"draft_model": draft, "num_drafts": 3, "dcp": dcp}, "plain": {"dcp": dcp}}.items():
        with LLM(source, tp=4, max_model_len=256, max_batch=2, **options) as llm:
            greedy = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (30, 80)]
            outputs = llm.generate([TEXT[:120].tolist(), [5, 9]], greedy)
            found[name] = [o.token_ids for o in outputs], [o.stats.speculative for o in outputs]
    assert found["split"][0] == found["whole"][0] == found["plain"][0]
    assert found["split"][1] == found["whole"][1] and sum(s.proposed for s in found["split"][1]) > 30


@pytest.mark.parametrize("options", [{}, {"draft_model": "tiny-random-draft", "num_drafts": 3}], ids=["plain", "drafts"])
def test_processes_give_the_bytes_of_virtual_ranks(options):
    found = []
    for ranks in ("processes", "virtual"):
        with LLM("tiny-random", tp=4, dcp=2, ranks=ranks, max_model_len=256, max_batch=2, **options) as llm:
            assert llm.backend.ranks == ranks and llm.backend.dcp == 2
            found.append((llm.logits(TEXT[:80] % 250).tobytes(), [o.token_ids for o in llm.generate([[5, 80, 200], [7] * 70], PARAMS)]))
    assert found[0] == found[1]


def test_sixteen_processes(tmp_path, source):
    write_checkpoint(source, tmp_path / "model")
    found = []
    for ranks, dcp in (("processes", 16), ("virtual", 16), ("virtual", 1)):
        with LLM(tmp_path / "model", tp=16, dcp=dcp, ranks=ranks, max_model_len=128, max_batch=2) as llm, llm.prefill(TEXT[:66]) as session:
            found.append((session.logits.copy(), llm.buffer("mla_cache").shape))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert relative(found[0][0], found[2][0]) < 1e-5 and found[0][1] == found[1][1]
    assert found[2][1][1] == 2 * found[0][1][1]   # of pages: 128 tokens have two, and a rank that holds one of them holds no other


def test_forks_share_pages_and_copy_what_is_begun(source):
    with LLM(source, tp=2, dcp=2, max_batch=4, max_model_len=256) as llm:
        cut_and_forked(llm, 1)
        for at in (1, PAGE_SIZE, 2 * PAGE_SIZE - 1, 2 * PAGE_SIZE, 2 * PAGE_SIZE + 1):
            forks_go_their_own_way(llm, at)


def test_stored_prefixes_end_where_a_page_of_all_ranks_ends(source):
    prompt = TEXT[:150].tolist()
    with LLM(source, tp=2, dcp=2, max_batch=1, max_model_len=256, prefix_cache=2) as llm:
        first, second = (llm.generate(prompt, SamplingParams(max_tokens=3, seed=1, logprobs=2, ignore_eos=True))[0] for _ in range(2))
    assert (first.stats.cached_tokens, second.stats.cached_tokens) == (0, 128) and first.logprobs == second.logprobs


# ---- what is refused ----

@pytest.mark.parametrize("options, text", [({"tp": 4, "dcp": 3}, "dcp: found 3, wanted 1, 2 or 4 with a tp of 4"), ({"dcp": 2}, "wanted 1 with a tp of 1"),
                                           ({"tp": 2, "dcp": 0}, "dcp: found 0"), ({"tp": 2, "dcp": True}, "dcp: found True"), ({"tp": 2, "dcp": 2.0}, "dcp: found 2.0")])
def test_illegal_sizes(options, text):
    begin = time.monotonic()
    with pytest.raises(UsageError, match=text):
        LLM("tiny-random", **options)
    assert time.monotonic() - begin < 1


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_every_rank_refuses_at_once(launcher):
    """With the legal values. Nobody waits for the others until the time-out, a minute."""
    begin, port = time.monotonic(), free_port()
    words = [*COMMAND, "generate", "tiny-random", "--tp", "4", "--dcp", "3", "-p", "hi"]
    results = ends(*(start(words, STARTED[launcher](r, 4), K3CUDA_JOB_TOKEN="t", MASTER_PORT=port) for r in range(4)))
    assert [code for code, _, _ in results] == [2] * 4, results
    assert "dcp: found 3, wanted 1, 2 or 4 with a tp of 4" in results[0][2] and time.monotonic() - begin < 40


def test_ranks_that_differ_in_it():
    port, words = free_port(), [*COMMAND, "generate", "tiny-random", "--tp", "2", "-p", "hi", "--dcp"]
    results = ends(*(start([*words, r + 1], STARTED["torchrun"](r, 2), K3CUDA_JOB_TOKEN="t", MASTER_PORT=port) for r in range(2)))
    assert [code for code, _, _ in results] == [3, 3] and "ranks differ in dcp: rank 0 has 1, rank 1 has 2" in results[0][2]
