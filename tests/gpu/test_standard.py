"""The standard path as a whole: near the goldens, and a row's bytes against everything that must not change them."""
import numpy as np
import pytest

pytestmark = pytest.mark.gpu
pytest.importorskip("cupy", reason="CuPy holds the device's memory; install k3cuda[cu13] or k3cuda[cu12]")

from models import PAGES_A_SLOT, feed, golden, headdims, open_slot, relative, step_rows  # noqa: E402
from models import backend as reference  # noqa: E402
from stage_walk import write_rows  # noqa: E402
from standard import Cuda, alone, compile_ahead, run, same  # noqa: E402

from k3cuda.emit_sizes import DECODE_BUCKETS  # noqa: E402
from k3cuda.runtime.cuda_compare import launch_groups  # noqa: E402
from k3cuda.runtime.cuda_kernels import bucket_of  # noqa: E402
from k3cuda.runtime.made_config import made_config  # noqa: E402
from k3cuda.runtime.made_model import MadeCheckpoint  # noqa: E402

LIMIT = 1.5          # asked: of the error that the goldens' own BF16 activations make
MORE_TP = (1, 2, 4, 8, 16)


@pytest.fixture(scope="module")
def sixteen_heads():
    """A small model that divides over 16 ranks, with the head sizes that the attention kernels are made for."""
    return MadeCheckpoint(made_config(head_dim=128, v_head_dim=128, qk_nope_head_dim=128, qk_rope_head_dim=64, kv_lora_rank=512), seed=3)


@pytest.fixture(scope="module", autouse=True)
def compiled(sixteen_heads):
    cfg = headdims().cfg
    compile_ahead((cfg, 1, DECODE_BUCKETS, "bf16", True), (cfg, 1, (1, 8, 16), "fp8_e4m3", True),
                  *((cfg, tp, (1, 4, 16), "bf16", ride) for tp in (2, 4) for ride in (True, False)),
                  *((sixteen_heads.cfg, tp, (8,), "bf16", True) for tp in MORE_TP))


@pytest.fixture(scope="module")
def gold():
    return golden()


@pytest.fixture(scope="module")
def want():
    """Logits and states of the golden tokens, fed one at a time."""
    return alone()


@pytest.fixture
def be():
    made = Cuda(headdims())
    yield made
    made.close()


# ---- right ----

def test_logits_are_near_the_goldens(want, gold):
    assert relative(want[0], gold["logits"]) <= LIMIT * relative(gold["logits_bf16act"], gold["logits"])


def test_the_goldens_experts_are_chosen(be, gold):
    """As a set: BF16 activations may swap two of a token's experts whose biased scores are close, and their order adds nothing."""
    open_slot(be, 0)
    chosen = []
    for position, token in enumerate(gold["input_ids"]):
        write_rows(be, step_rows((0, position, [token])))
        for (op, *_), launches in launch_groups(be, "step", 1):
            for launch in launches:
                launch.launch()
            be.stream.synchronize()
            if op.stage.name == "route":
                chosen.append(be.memories[0].buffer("expert_ids")[0].get())
        be.commit(np.ones(1, bool))
    np.testing.assert_array_equal(np.sort(np.reshape(chosen, gold["expert_ids"].shape)), np.sort(gold["expert_ids"]))


@pytest.mark.parametrize("chunks", [None, [8, 8], [16]], ids=str)
def test_fp8_cache(gold, chunks):
    """As far from the reference with the same cache as BF16 activations are from the goldens, and not what a BF16 cache gives."""
    ref = reference(headdims(), kv_cache_dtype="fp8_e4m3")
    open_slot(ref, 0)
    want = feed(ref, 0, gold["input_ids"])
    got, _ = run(headdims(), gold["input_ids"], chunks, kv_cache_dtype="fp8_e4m3")
    assert relative(got, want) <= LIMIT * relative(gold["logits_bf16act"], gold["logits"])
    assert relative(want, gold["logits"]) > 1e-3, "the cache does not matter here: this test is blind"
    same(got, run(headdims(), gold["input_ids"], [16], slot=2, pages=[7, 0], kv_cache_dtype="fp8_e4m3")[0], "chunks, slot and pages")


# ---- the same bytes ----

@pytest.mark.parametrize("chunks", [[16], [1, 15], [3, 5, 8], [7, 9], [2] * 8], ids=str)
def test_chunks_give_the_same_bytes(gold, want, chunks):
    logits, states = run(headdims(), gold["input_ids"], chunks, slot=2, pages=[5, 1])
    same(logits, want[0], "logits")
    same(states, want[1], "states")


def test_three_runs_are_identical(gold, want):
    for _ in range(2):
        again = run(headdims(), gold["input_ids"])
        same([again[0], *again[1]], [want[0], *want[1]])


@pytest.mark.parametrize("before", [0, 1, 3, 7, 15, 31, 46])
def test_position_in_the_step_and_bucket(be, gold, want, before):
    """The golden tokens in one step, behind rows of another sequence: every bucket from 16 rows, every kind of neighbour."""
    open_slot(be, 1)
    open_slot(be, 3)
    filler = np.arange(before) * 7 % 256
    parts = [(1, 0, filler)] * (before > 0) + [(3, 0, gold["input_ids"])]
    be.step(step_rows(*parts))
    same(be.logits()[before:], want[0])


def test_every_row_of_a_full_step(gold, want):
    """64 sequences, the golden tokens in each, one row a sequence: 64 times the same bytes, in scattered slots and pages."""
    made, rng = Cuda(headdims(), max_batch=64), np.random.default_rng(2)
    slots, pages = rng.permutation(64), rng.permutation(made.num_pages).reshape(64, -1)
    for slot in slots:
        made.open_slot(slot, pages[slot])
    for position, token in enumerate(gold["input_ids"]):
        made.step(step_rows(*((slot, position, [token]) for slot in slots)))
        for row, logits in enumerate(made.logits()):
            same(logits, want[0][position], f"token {position}, row {row}")
        made.commit(np.ones(64, bool))
    for slot in slots:
        same(made.states(slot), want[1], f"states of slot {slot}")
    made.close()


@pytest.mark.parametrize("seed", [7, 8])
def test_a_sequence_gives_the_same_bytes_alone_and_in_any_batch(seed):
    """Random sequences in random slots and pages, cut into random runs of rows, in random order, in steps of every bucket."""
    rng, lengths = np.random.default_rng(seed), [1, 9, 45, 100]   # one token; two tiles of tokens; most of a step; more than a page and a step
    texts = [rng.integers(3, 256, n) for n in lengths]
    plain = [run(headdims(), ids) for ids in texts]
    made = Cuda(headdims())
    slots, pages = rng.permutation(4), rng.permutation(4 * PAGES_A_SLOT).reshape(4, PAGES_A_SLOT)
    for slot, own in zip(slots, pages):
        open_slot(made, slot, own)
    done, got, buckets, sizes = [0] * 4, [[] for _ in texts], set(), [*DECODE_BUCKETS, 13, 3, 27, *DECODE_BUCKETS]
    while any(d < n for d, n in zip(done, lengths)):
        room, parts = sizes.pop(0) if sizes else 64, []
        for i in rng.permutation(4):
            n = int(min(room, lengths[i] - done[i], rng.integers(1, 40)))
            if n:
                parts.append((i, n))
                room -= n
        total = sum(n for _, n in parts)
        buckets.add(bucket_of(total))
        made.step(step_rows(*((int(slots[i]), done[i], texts[i][done[i]:done[i] + n]) for i, n in parts)))
        rows = np.split(made.logits(), np.cumsum([n for _, n in parts])[:-1])
        made.commit(np.ones(total, bool))
        for (i, n), logits in zip(parts, rows):
            got[i].append(logits)
            done[i] += n
    assert len(buckets) >= 5, f"only buckets {buckets} were used"
    for i, (logits, states) in enumerate(plain):
        same(np.concatenate(got[i]), logits, f"sequence of {lengths[i]} tokens")
        same(made.states(slots[i]), states, f"states after {lengths[i]} tokens")
    made.close()


@pytest.mark.parametrize("ride", [True, False], ids=["riding", "kernels"])
@pytest.mark.parametrize("tp, chunks", [(2, [4] * 4), (2, [16]), (4, [4] * 4), (4, [1, 15])], ids=str)
def test_ranks(gold, want, tp, chunks, ride):
    """Whether collectives are kernels or ride on the stores of those before them."""
    logits, states = run(headdims(), gold["input_ids"], chunks, tp=tp, ride=ride)
    same([logits, *states], [want[0], *want[1]])


def test_sixteen_ranks(sixteen_heads):
    ids, want = np.random.default_rng(4).integers(0, 300, 21), None
    for tp in MORE_TP:
        logits, states = run(sixteen_heads, ids, [8, 8, 5], tp=tp)
        want = (logits, states) if tp == 1 else want
        assert np.isfinite(logits).all() and logits.std() > 0.1, "a model that says nothing tests nothing"
        same([logits, *states], [want[0], *want[1]], f"{tp} ranks")


