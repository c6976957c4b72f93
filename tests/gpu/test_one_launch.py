"""Steps in one launch through the backend: the standard path's bytes, step by step on one cache, in what they leave as well; and what ends a wait."""
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
pytest.importorskip("cupy", reason="CuPy holds the device's memory; install k3cuda[cu13] or k3cuda[cu12]")

from lost_result import said_of_loss  # noqa: E402
from models import open_slot, step_rows  # noqa: E402
from standard import Cuda, same  # noqa: E402
from trace_checks import check_bytes, check_parts  # noqa: E402

from k3cuda.cli.model_argument import config_of  # noqa: E402
from k3cuda.config import DECODE_ROWS  # noqa: E402
from k3cuda.emit import Probes  # noqa: E402
from k3cuda.launch_trace import phases_of  # noqa: E402
from k3cuda.plan import build_plan  # noqa: E402
from k3cuda.runtime.cuda_bench import StepBench  # noqa: E402
from k3cuda.runtime.cuda_bench_checks import RECORDS, same_step  # noqa: E402
from k3cuda.runtime.cuda_driver import open_device  # noqa: E402
from k3cuda.runtime.cuda_kernels import compile_bucket  # noqa: E402
from k3cuda.runtime.launch_program import BUCKETS, TOO_MANY_ROWS, compile_launch  # noqa: E402
from k3cuda.runtime.machine import LATENCY_SPECIALIZED, STANDARD  # noqa: E402
from k3cuda.runtime.made_config import made_config  # noqa: E402
from k3cuda.runtime.made_model import MadeCheckpoint  # noqa: E402
from k3cuda.runtime.sampling import Draw, SamplingParams  # noqa: E402

TP, RANK, RELEASE_LAYERS = 16, 3, 14   # of the release: a closed block, a second one that opens, layers of both sorts
# Head sizes that the attention kernels are made for, and elsewhere the least that whole vectors of 16 ranks and sixteen leaves of experts need.
SMALL = {"head_dim": 128, "v_head_dim": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "kv_lora_rank": 512, "q_lora_rank": 256, "hidden_size": 256,
         "num_experts": 64, "routed_expert_hidden_size": 512, "num_hidden_layers": 6}


@pytest.fixture(scope="module")
def small():
    return MadeCheckpoint(made_config(**SMALL), seed=3)


@pytest.fixture(scope="module", autouse=True)
def compiled(small):
    """All kernels, side by side."""
    device, jobs = open_device(), []
    for cfg, kv, tokens, buckets in ((small.cfg, "bf16", BUCKETS, (*BUCKETS, 16, DECODE_ROWS)), (config_of("kimi-k3", RELEASE_LAYERS), "fp8_e4m3", (1, 2, 8), (*BUCKETS, 16))):
        plan = build_plan(cfg, TP)
        jobs += [partial(compile_launch, plan, rows, kv, device.arch, sms=device.sms) for rows in tokens]
        jobs += [partial(compile_bucket, plan, rows, kv, device.arch, sms=device.sms) for rows in buckets]
    with ThreadPoolExecutor(len(jobs)) as pool:
        for job in [pool.submit(job) for job in jobs]:
            job.result()


@pytest.fixture
def pair(small):
    """The same rank twice: in one launch, and stage by stage."""
    made = [Cuda(small, TP, only_rank=RANK, specialized=specialized) for specialized in (True, False)]
    for be in made:
        open_slot(be, 0), open_slot(be, 2, [7, 5])
    yield made
    for be in made:
        be.close()


def left(be, rows):
    """What a step leaves to others: logits, records of the commit, the cache."""
    return [be.logits(), *(be.on_host(name)[:, :rows] for name in RECORDS), be.on_host("mla_cache")]


def test_every_number_of_rows_and_steps_of_both_kinds_in_turn(pair):
    """One sequence; some rows are rejected, so that states are advanced over the others from records."""
    rng, at = np.random.default_rng(1), 0
    for rows, accepted in ((1, 1), (2, 1), (8, 5), (12, 12), (3, 3), (1, 1), (64, 30), (7, 7), (4, 0), (5, 5), (6, 6), (8, 8), (1, 1)):
        ids = rng.integers(0, 40, rows)
        for be in pair:
            be.step(step_rows((0, at, ids)))
        same(left(pair[0], rows), left(pair[1], rows), f"{rows} rows at {at}")
        for be in pair:
            be.commit(np.arange(rows) < accepted)
        at += accepted
        same(pair[0].states(0), pair[1].states(0), f"states behind {rows} rows at {at}")
    counts = pair[0].counts
    assert counts.steps == {LATENCY_SPECIALIZED: 11, STANDARD: 2} and counts.reasons == {TOO_MANY_ROWS: 2}
    assert pair[1].counts.steps == {STANDARD: 13} and not pair[1].counts.reasons


def test_sequences_side_by_side(pair):
    rng, at = np.random.default_rng(2), [0, 0]
    for a, b in ((1, 1), (3, 1), (4, 4), (1, 7), (2, 1)):
        parts = (0, at[0], rng.integers(0, 40, a)), (2, at[1], rng.integers(0, 40, b))
        for be in pair:
            be.step(step_rows(*parts))
        same(left(pair[0], a + b), left(pair[1], a + b), f"{a} and {b} rows")
        for be in pair:
            be.commit(np.ones(a + b, bool))
        at = [at[0] + a, at[1] + b]
    assert set(pair[0].counts.steps) == {LATENCY_SPECIALIZED}


def test_steps_that_overlap(pair):
    """Step, commit and draw in one graph, the next one behind it before anybody has read its tokens."""
    drawn = []
    for be in pair:
        pending = []
        for at in range(0, 40, 2):
            rows = step_rows((0, at, [5, 6]))
            rows = type(rows)(rows.token_ids, rows.slots, rows.positions, rows.logit_rows[-1:])
            pending.append(be.launch(rows, [Draw(SamplingParams(temperature=1.0).resolved({}), 1, at + 2)]))
            drawn += [pending[-2].drawn()[0].token_id] if len(pending) > 1 else []
        drawn.append(pending[-1].drawn()[0].token_id)
    assert drawn[:20] == drawn[20:] and len(set(drawn)) > 3
    same(pair[0].states(0), pair[1].states(0))
    assert pair[0].counts.steps == {LATENCY_SPECIALIZED: 20}


@pytest.mark.parametrize(("rows", "context"), [(1, 1), (2, 300), (8, 8), (8, 2000)])
def test_first_layers_of_the_release(release, rows, context):
    """StepBench's own checks, against the standard path's kernels."""
    release.open(1, 2048)
    release.place(1, rows, context)
    found = release.step()
    assert found["decode_backend"] == LATENCY_SPECIALIZED and found["declined"] is None
    assert set(found["checks"]["same_bytes_left"]) == {*RECORDS, "mla_cache"}


def test_a_step_that_notes_times_has_the_bytes_of_one_that_does_not(release):
    """And a whole trace of the layers that it was asked for, of both sorts."""
    for rows in (1, 8):
        release.open(1, 64)
        release.place(1, rows, 60)
        want = release.replay()
        release.open(1, 64, Probes(trace=True, traced_layers=range(2, 6)))
        release.place(1, rows, 60)
        trace = release.traced()
        same_step(release.outputs(), want, "with stamps")
        check_parts(trace, phases_of(trace.program, range(2, 6)))
        check_bytes(trace, release.cfg, cache_bytes=1)


def test_a_slower_link_is_felt_at_every_hop(release):
    """A block that came late waits too, but others may then find what they wait for, so that less than all of it is felt."""
    delay_us, found = 10.0, []
    for us in (0, delay_us):
        release.open(1, 64, Probes(hop_cycles=round(us * release.cycles_a_us)))
        release.place(1, 1, 1)
        found.append(release.step())
    plain, slow = found
    assert {step["decode_backend"] for step in found} == {LATENCY_SPECIALIZED} and plain["delayed_hops"] == 0 and slow["delayed_hops"] > 4 * RELEASE_LAYERS
    assert 0.5 < (slow["ms"] - plain["ms"]) * 1e3 / (slow["delayed_hops"] * delay_us) < 1.6, found


def test_wide_steps_of_a_benchmark_say_why_they_ran_stage_by_stage(release):
    release.open(DECODE_ROWS, 64)
    release.place(16, 1, 8)
    found = release.step()
    assert found["decode_backend"] == STANDARD and found["declined"] == TOO_MANY_ROWS


@pytest.fixture(scope="module")
def release():
    made = StepBench(config_of("kimi-k3", RELEASE_LAYERS), TP, RANK, "fp8_e4m3", specialized=True)
    yield made
    made.close()


def test_a_result_that_never_comes_ends_in_a_name():
    """A block leaves out a unit. The backend can be closed behind it."""
    said = said_of_loss(__name__, "lose(Cuda(MadeCheckpoint(made_config(**SMALL), seed=3), TP, only_rank=RANK, specialized=True), behind=30, limit_ns=300_000_000)", timeout=60)
    assert "waited 0.3 s for" in said and said.endswith("closed\n")
