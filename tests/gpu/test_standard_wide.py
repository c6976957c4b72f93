"""Steps of more than 64 rows: other kernels, the same bytes as small steps, for prompts and for decoding rows beside them."""
import numpy as np
import pytest

pytestmark = pytest.mark.gpu
pytest.importorskip("cupy", reason="CuPy holds the device's memory; install k3cuda[cu13] or k3cuda[cu12]")

from models import headdims  # noqa: E402
from standard import Cuda, compile_ahead, same  # noqa: E402

from k3cuda.config import MAX_ROWS, PAGE_SIZE  # noqa: E402
from k3cuda.runtime.backend import StepRows  # noqa: E402
from k3cuda.runtime.cuda_kernels import bucket_of  # noqa: E402
from k3cuda.runtime.made_config import made_config  # noqa: E402
from k3cuda.runtime.made_model import MadeCheckpoint  # noqa: E402

TOKENS, PAGES = 300, 5
IDS = np.random.default_rng(11).integers(3, 256, TOKENS)
WIDEST, WIDEST_PAGES = np.random.default_rng(12).integers(3, 256, MAX_ROWS + 76), 18   # a prompt that fills the widest step, and its pages
NARROW = [60] * 5
UNITS = ((1, "bf16", True), (1, "fp8_e4m3", True), (2, "bf16", True), (4, "bf16", False))   # (ranks, cache, whether collectives ride)
OPTIONS = [{"tp": tp, "kv_cache_dtype": kv, "ride": ride} for tp, kv, ride in UNITS]


@pytest.fixture(scope="module")
def many_leaves():
    """Sixteen leaves of w2 on one rank."""
    return MadeCheckpoint(made_config(head_dim=128, v_head_dim=128, qk_nope_head_dim=128, qk_rope_head_dim=64, kv_lora_rank=512), seed=3)


@pytest.fixture(scope="module", autouse=True)
def compiled(many_leaves):
    compile_ahead(*((headdims().cfg, tp, (64, 128, 256), kv, ride) for tp, kv, ride in UNITS),
                  *((headdims().cfg, tp, (512, MAX_ROWS), kv, ride) for tp, kv, ride in (UNITS[0], UNITS[3])), (headdims().cfg, 1, (16,), "bf16", True),
                  (many_leaves.cfg, 1, (64, 128), "bf16", True))


def rows_of(*parts, logits):
    """Each part is (slot, first position, ids); `logits`: how many of its last rows want them, a number or one a part."""
    ids, slots, positions, wanted = [], [], [], []
    for i, (slot, first, tokens) in enumerate(parts):
        ids += list(tokens)
        slots += [slot] * len(tokens)
        positions += range(first, first + len(tokens))
        n = min(logits if isinstance(logits, int) else logits[i], len(tokens))
        wanted += range(len(ids) - n, len(ids))
    return StepRows(*(np.array(x, np.int32) for x in (ids, slots, positions, wanted)))


def cache_of(be, pages, tokens):
    """The cached rows of a sequence, every layer: the ranks hold the same."""
    be.stream.synchronize()
    cache, dims = be.memories[0].buffer("mla_cache").get(), be.memories[0].dims
    return cache[:, pages].reshape(dims["num_mla_layers"], -1, dims["mla_cache_dim"])[:, :tokens]


def prompt(chunks, slot=0, pages=None, source=None, ids=IDS, length=PAGES, **options):
    """Logits of the last rows of every step, by position, and what the sequence leaves: states and cache."""
    be, out, done = Cuda(source or headdims(), max_model_len=length * PAGE_SIZE, **options), {}, 0
    pages = list(range(slot * length, (slot + 1) * length)) if pages is None else pages
    be.open_slot(slot, pages)
    for n in chunks:
        be.step(rows_of((slot, done, ids[done:done + n]), logits=64))
        done += n
        logits = be.logits()
        out |= {done - len(logits) + i: row for i, row in enumerate(logits)}
        be.commit(np.ones(n, bool))
    left = [*be.states(slot), cache_of(be, pages, done)]
    be.close()
    return out, left


_narrow = {}


def narrow(**options):
    key = tuple(options.items())
    if key not in _narrow:
        _narrow[key] = prompt(NARROW, **options)
    return _narrow[key]


def check(got, want):
    for position, row in got[0].items():
        same(row, want[0][position], f"logits of position {position}")
    for a, b, name in zip(got[1], want[1], ("KDA state", "conv window", "MLA cache")):
        same(a, b, name)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("chunks", [[256, 44], [128, 172], [1, 65, 234]], ids=str)
def test_wide_steps_give_the_bytes_of_narrow_ones(chunks, options):
    pages = [13, 2, 8, 19, 4]
    check(prompt(chunks, slot=2, pages=pages, **options), narrow(**options))


@pytest.mark.parametrize("options", (OPTIONS[0], OPTIONS[3]), ids=str)
def test_widest_steps_give_the_bytes_of_narrow_ones(options):
    """More than one entry of sixteen items for an expert, too: sixteen experts, four a row."""
    want = prompt([60] * 18 + [20], ids=WIDEST, length=WIDEST_PAGES, **options)
    for chunks in ([MAX_ROWS, 76], [512, 588], [1, 300, 799]):
        check(prompt(chunks, slot=1, ids=WIDEST, length=WIDEST_PAGES, **options), want)


def test_experts_with_many_leaves(many_leaves):
    ids = IDS[:150]
    check(prompt([128, 22], source=many_leaves, ids=ids), prompt([50, 50, 50], source=many_leaves, ids=ids))


def test_prompts_beside_decoding_rows_and_refused_drafts():
    """Several sequences in a wide step, in any order; refused rows leave nothing."""
    be, rng = Cuda(headdims(), max_model_len=PAGES * PAGE_SIZE), np.random.default_rng(3)
    want = narrow(**OPTIONS[0])
    pages = rng.permutation(4 * PAGES).reshape(4, PAGES)
    for slot in range(4):
        be.open_slot(slot, pages[slot])
    done, got = [0] * 4, [{} for _ in range(4)]
    for counts in ([(2, 9), (0, 100), (3, 1)], [(3, 70), (1, 3), (2, 1), (0, 150)], [(2, 190), (0, 50), (1, 9)], [(3, 129), (1, 124)], [(2, 100), (3, 100)], [(1, 164)]):
        parts = [(slot, done[slot], IDS[done[slot]:done[slot] + n]) for slot, n in counts]
        drafts = [IDS[:3] if slot == counts[-1][0] else IDS[:0] for slot, _ in counts]   # of the last sequence, wrong ones
        be.step(rows_of(*((slot, first, [*ids, *wrong]) for (slot, first, ids), wrong in zip(parts, drafts)), logits=16))
        logits, at, accepted = be.logits(), 0, []
        for (slot, first, ids), wrong in zip(parts, drafts):
            n = min(16, len(ids) + len(wrong))
            for i, row in enumerate(logits[at:at + n - len(wrong)]):
                got[slot][first + len(ids) + len(wrong) - n + i] = row
            at += n
            accepted += [True] * len(ids) + [False] * len(wrong)
            done[slot] += len(ids)
        be.commit(np.array(accepted))
    assert done == [TOKENS] * 4
    for slot in range(4):
        check((got[slot], [*be.states(slot), cache_of(be, pages[slot], TOKENS)]), want)
    be.close()


def test_a_row_that_is_not_finite_touches_no_other():
    """NaN in the cache and the states of one sequence of a wide step reaches its rows only."""
    be = Cuda(headdims(), max_model_len=PAGES * PAGE_SIZE)
    want = narrow(**OPTIONS[0])
    for slot in (0, 1):
        be.open_slot(slot, range(slot * PAGES, (slot + 1) * PAGES))
    be.step(rows_of((0, 0, IDS[:90]), (1, 0, IDS[:90]), logits=1))
    be.commit(np.ones(180, bool))
    be.stream.synchronize()
    be.memories[0].buffer("kda_state")[:, 0] = np.nan
    be.step(rows_of((0, 90, IDS[90:180]), (1, 90, IDS[90:180]), logits=30))
    logits = be.logits()
    assert not np.isfinite(logits[:30]).any()
    same(logits[30:], np.stack([want[0][p] for p in range(150, 180)]), "the other sequence")
    be.close()


def test_padding_and_stale_scratch_reach_nothing():
    be = Cuda(headdims(), max_model_len=PAGES * PAGE_SIZE)
    want = narrow(**OPTIONS[0])
    be.open_slot(1, range(PAGES, 2 * PAGES))
    for first, n in ((0, 129), (129, 70), (199, 101)):
        be.stream.synchronize()
        memory = be.memories[0]
        memory.arena[be._io.input_bytes:memory.offsets["expert_list"]] = 0xFF
        for name in ("kda_rows", "kda_values", "kda_o", "product_work"):
            memory.arena[memory.offsets[name]:memory.offsets[name] + 4096] = 0xFF
        assert bucket_of(n) > 64
        be.step(rows_of((1, first, IDS[first:first + n]), logits=64))
        for i, row in enumerate(be.logits()):
            position = first + n - len(be.logits()) + i
            same(row, want[0][position], f"position {position}")
        be.commit(np.ones(n, bool))
    same(be.states(1), want[1][:2], "states")
    be.close()
