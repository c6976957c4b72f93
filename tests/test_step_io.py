"""What stands around a step of the CUDA backend, without a GPU: its memory is the host's, its two kernels run in the shim, and between
them stands a model that is a hash of the tokens it was given. Only the order of a stream is not tested here: all is done at once."""
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cupy", reason="CuPy holds the device's memory; install k3cuda[cu13] or k3cuda[cu12]")

from dataclasses import replace  # noqa: E402

from engine_oracle import VOCAB, alone, drive, request, text_of  # noqa: E402
from fake_backend import fake_logits  # noqa: E402

from k3cuda.buffers import BUFFERS, BY_NAME, DTYPE_BYTES, buffer_shape, step_dims  # noqa: E402
from k3cuda.config import PAGE_SIZE  # noqa: E402
from k3cuda.emit import NO_PROBES, kernels_of  # noqa: E402
from k3cuda.errors import PlanError  # noqa: E402
from k3cuda.plan import build_plan  # noqa: E402
from k3cuda.runtime import cuda_backend, cuda_step_io, step_records  # noqa: E402
from k3cuda.runtime.backend import AS_SAMPLED, StepCounts, StepRows  # noqa: E402
from k3cuda.runtime.cuda_backend import CudaBackend  # noqa: E402
from k3cuda.runtime.engine import Engine  # noqa: E402
from k3cuda.runtime.made_config import made_config  # noqa: E402
from k3cuda.runtime.row_check import RowCheck  # noqa: E402
from k3cuda.runtime.sampling import Draw, SamplingParams  # noqa: E402

sys.path[:0] = [str(Path(__file__).resolve().parent / "shim")]
import host  # noqa: E402

pytestmark = pytest.mark.skipif(host.COMPILER is None, reason="no C++ compiler")
SLOTS, CONTEXT = 4, 190


class Array:
    """The little that StepIO asks of an array on a GPU."""

    def __init__(self, array):
        self.array = array
        self.data = SimpleNamespace(ptr=array.ctypes.data, copy_from_host_async=self._copy)

    def _copy(self, pointer, nbytes, stream):
        import ctypes
        ctypes.memmove(self.data.ptr, pointer, nbytes)

    def get(self, stream=None):
        return self.array.copy()


class Launch:
    library = None

    def __init__(self, function, grid, block, arguments, **options):
        self.function, self.grid, self.block, self.arguments = function, grid, block, arguments

    def launch(self):
        host.launch(self.library, self.function, self.grid, self.block, self.arguments, seed=5)


class Memory:
    """Inputs and logits of a rank."""

    def __init__(self):
        self.dims = step_dims(made_config(vocab_size=VOCAB), tp=1, slots=SLOTS, pages=1, slot_pages=1)
        self.plan = SimpleNamespace(cfg=SimpleNamespace(vocab_size=VOCAB))
        self.offsets, at = {}, 0
        for name in (*cuda_step_io.INPUTS, "logits"):
            self.offsets[name] = at
            at += -(-int(np.prod(buffer_shape(BY_NAME[name], self.dims))) * DTYPE_BYTES[BY_NAME[name].dtype] // 256) * 256
        self.arena = Array(np.zeros(at, np.uint8))

    def buffer(self, name):
        b = BY_NAME[name]
        shape = buffer_shape(b, self.dims)
        start, dtype = self.offsets[name], {"i32": np.int32, "u8": np.uint8, "f32": np.float32}[b.dtype]
        return self.arena.array[start:start + int(np.prod(shape)) * DTYPE_BYTES[b.dtype]].view(dtype).reshape(shape)


class Hash(CudaBackend):
    """The backend around a model that takes nothing but what lies in the arenas of its two ranks."""

    def __init__(self):
        self.cfg, self.num_slots, self.num_pages, self.max_rows, self.max_model_len = SimpleNamespace(vocab_size=VOCAB), SLOTS, 3 * SLOTS, 64, CONTEXT
        self.memories, self.counts, self.ran, self.page_tokens = [Memory(), Memory()], StepCounts(), [], PAGE_SIZE
        stream = SimpleNamespace(__cuda_stream__=lambda: (0, 0), synchronize=lambda: None)
        self.stream, self._is_lent = stream, False
        self._io = cuda_step_io.StepIO(self.memories, "sm_90a", stream)
        self._check = RowCheck(SLOTS, CONTEXT, self.max_rows)
        self.tokens = {}

    def open_slot(self, slot, pages):
        self._check.open(slot)
        self.tokens[slot] = []

    def logits(self):
        return self.memories[0].buffer("logits")[:len(self._check.rows.logit_rows)].copy()

    def replay(self, what, bucket, half=None, single=False):
        assert not single
        self.ran.append((what, bucket))
        if half is not None:
            self._io.load_launch(half).launch()
        if what != "commit":
            self._step()
        if what != "step":
            self._commit()
        if half is not None and not self._io.no_sampler:
            self._io.sample_launch(half, bucket).launch()

    def _inputs(self):
        first, second = ({n: m.buffer(n).tolist() for n in cuda_step_io.INPUTS} for m in self.memories)
        assert first == second, "the ranks were told different things"
        return [(t, s, p) for t, s, p in zip(first["token_ids"], first["row_slot"], first["row_position"]) if s >= 0], first

    def _step(self):
        rows, inputs = self._inputs()
        self.records, seen = {}, {s: list(t) for s, t in self.tokens.items()}
        laws = []
        for token, slot, position in rows:
            assert position == len(seen[slot]) and 0 <= token < VOCAB
            seen[slot].append(token)
            self.records.setdefault(slot, []).append(token)
            laws.append(fake_logits(seen[slot], VOCAB))
        logits = self.memories[0].buffer("logits")
        logits[:] = np.nan
        for i, row in enumerate(r for r in inputs["logit_rows"] if r >= 0):
            logits[i] = laws[row]

    def _commit(self):
        rows, inputs = self._inputs()
        for (_, slot, _), accepted in zip(rows, inputs["row_accepted"]):
            if accepted:
                self.tokens[slot].append(self.records[slot].pop(0))


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    source = f'''#include "step_io.cuh"
using S = SampleShape<{VOCAB}, 1, 1>;
void k_sample(SampleArgs a) {{ __shared__ SampleSmem<S> m; sample_row<S>(a, m, blockIdx.x); }}
'''
    return host.build(source, ["k_load", "k_sample"], tmp_path_factory.mktemp("step_io"))


@pytest.fixture
def make(library, monkeypatch):
    Launch.library = library
    cupy = SimpleNamespace(zeros=lambda n, dtype: Array(np.zeros(n, dtype)), asarray=Array, cuda=SimpleNamespace(
        alloc_pinned_memory=lambda n: bytearray(n + 256), Stream=object))
    monkeypatch.setattr(cuda_step_io, "cupy", cupy)
    monkeypatch.setattr(cuda_step_io, "CLUSTER", 1)
    monkeypatch.setattr(cuda_step_io, "Launch", Launch)
    monkeypatch.setattr(cuda_step_io, "Module", lambda cubin: SimpleNamespace(function=lambda name: name))
    monkeypatch.setattr(cuda_step_io, "compile_step_io", lambda vocab, arch: SimpleNamespace(cubin=b""))
    monkeypatch.setattr(cuda_step_io, "check", lambda result: result)
    monkeypatch.setattr(cuda_step_io, "driver", lambda: SimpleNamespace(
        cuEventCreate=lambda flags: 0, cuEventSynchronize=lambda e: None, cuEventRecord=lambda e, s: None,
        CUevent_flags=SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)))
    return Hash


def requests(count=7):
    free = [dict(temperature=0), dict(temperature=1.5, top_p=0.9), dict(temperature=1.3, top_k=5, frequency_penalty=0.7, presence_penalty=-1),
            dict(temperature=0, repetition_penalty=1.4), dict(temperature=1.2, min_p=0.05, repetition_penalty=0.8, frequency_penalty=1.2)]
    return [request(f"r{i}", [(5 * i + 3 * j) % VOCAB for j in range(1 + 17 * i % 90)], seed=i, max_tokens=25 + i, ignore_eos=i % 3 > 0, **free[i % len(free)]) for i in range(count)]


def check_answers(backend, wanted):
    engine = Engine(backend)
    for r in wanted:
        engine.add(replace(r, text=text_of(r.params)))
    answers, _ = drive(engine)
    for r in wanted:
        assert answers[r.request_id] == alone(r.prompt_ids, r.params, context=CONTEXT), r.request_id
    assert {reason for _, _, reason, _ in answers.values()} == {"stop", "length"}, "these requests test too little"


@pytest.mark.parametrize("overlaps", [True, False])
def test_requests_give_what_the_definition_says(make, overlaps):
    backend = make()
    backend.overlaps = overlaps
    check_answers(backend, requests())
    assert {what for what, _ in backend.ran} == ({"launch"} if overlaps else {"step", "commit", "advance"})   # of many rows, and of few
    assert backend.counts.steps == {backend.name: sum(what != "commit" for what, _ in backend.ran)} and not backend.counts.reasons


def test_penalties_that_do_not_fit_are_drawn_on_the_host_and_counted(make, monkeypatch):
    monkeypatch.setattr(cuda_step_io, "MAX_PENALTIES", 12)
    backend = make()
    check_answers(backend, requests())
    (reason, count), = backend.counts.reasons.items()
    assert "penalties of more than 12 tokens" in reason and 10 < count < 150


def test_a_vocabulary_without_a_kernel_is_drawn_from_on_the_host_and_counted(make, monkeypatch):
    monkeypatch.setattr(cuda_step_io, "no_sampler", lambda vocab: "sampled on the host: why")
    backend = make()
    check_answers(backend, requests())
    assert backend.counts.reasons["sampled on the host: why"] >= sum(24 + i for i in range(7)) / 2


def rows(*parts, logits=None):
    """Parts are (slot, first position, tokens)."""
    ids = [(t, s, p + i) for s, p, tokens in parts for i, t in enumerate(tokens)]
    return StepRows(*(np.array(x, np.int32) for x in (*zip(*ids), range(len(ids)) if logits is None else logits)))


def draw(position, **given_):
    return Draw(SamplingParams(**{"temperature": 0} | given_).resolved({}), 3, position)


def test_only_accepted_rows_are_committed(make):
    backend = make()
    backend.open_slot(1, [0])
    backend.step(rows((1, 0, [3, 4, 5, 6])))
    assert [d.token_id for d in backend.sample([draw(i + 1) for i in range(4)])] == [int(fake_logits([3, 4, 5, 6][:i + 1], VOCAB).argmax()) for i in range(4)]
    backend.commit(np.array([True, True, False, False]))
    assert backend.tokens[1] == [3, 4]
    backend.step(rows((1, 2, [7, 8])))
    backend.commit(np.ones(2, bool))
    assert backend.tokens[1] == [3, 4, 7, 8]


def test_rows_that_stand_are_committed_in_passing(make):
    backend = make()
    for slot in (0, 1):
        backend.open_slot(slot, [slot])
    backend.step(replace(rows((1, 0, [3] * 9)), stand=True))
    with pytest.raises(PlanError, match="a commit of some rows"):
        backend.commit(np.arange(9) < 8)
    backend.commit(np.ones(9, bool))
    for stand in (True, False):
        backend.step(replace(rows((1, len(backend.tokens[1]), [5])), stand=stand))
        backend.commit(np.ones(1, bool))
    assert backend.tokens[1] == [3] * 9 + [5, 5] and [what for what, _ in backend.ran] == ["advance", "step", "commit", "step", "commit"]
    backend.step(replace(rows((1, 11, [6])), stand=True))   # and whoever asked for it never commits
    backend.step(rows((0, 0, [7])))
    for refused in (lambda: backend.step(rows((0, 0, [7]), (1, 11, [6]))), lambda: backend._check.copy(1, 0)):
        with pytest.raises(PlanError, match="slot 1: a step whose rows stand was not committed"):
            refused()
    backend.open_slot(1, [1])
    backend.step(rows((1, 0, [8])))


def test_tokens_are_kept_for_one_more_launch_and_no_longer(make):
    backend = make()
    backend.open_slot(0, [0])
    pending = [backend.launch(rows((0, 0, [3, 4]), logits=[1]), [draw(2)])]
    for position in (2, 3):
        pending.append(backend.launch(rows((0, position, [AS_SAMPLED])), [draw(position + 1)]))
    tokens = [3, 4]
    for _ in range(3):
        tokens.append(int(fake_logits(tokens, VOCAB).argmax()))
    assert [p.drawn()[0].token_id for p in pending[1:]] == tokens[3:] and backend.tokens[0] == tokens[:4]
    with pytest.raises(PlanError, match="gone"):
        pending[0].drawn()


def test_a_token_nobody_drew_is_refused(make):
    backend = make()
    for slot in (0, 1):
        backend.open_slot(slot, [slot])
    backend.launch(rows((0, 0, [3]), (1, 0, [4]), logits=[0]), [draw(1)])
    with pytest.raises(PlanError, match="slot 1: no token was drawn for position 1"):
        backend.step(rows((0, 1, [AS_SAMPLED]), (1, 1, [AS_SAMPLED])))
    backend.launch(rows((0, 1, [AS_SAMPLED]), logits=[]), [])
    with pytest.raises(PlanError, match="slot 0: no token was drawn for position 2"):
        backend.step(rows((0, 2, [AS_SAMPLED])))
    backend.open_slot(0, [0])
    with pytest.raises(PlanError, match="slot 0: no token was drawn for position 0"):
        backend.step(rows((0, 0, [AS_SAMPLED])))


def test_a_launch_draws_one_token_a_slot(make):
    backend = make()
    backend.open_slot(0, [0])
    with pytest.raises(PlanError, match="two tokens for one slot"):
        backend.launch(rows((0, 0, [3, 4])), [draw(1), draw(2)])
    with pytest.raises(PlanError, match="1 draws for 2 rows of logits"):
        backend.launch(rows((0, 0, [3, 4])), [draw(1)])


def test_inputs_stand_where_an_arena_begins():
    """What StepIO takes for granted about the table: inputs come first and are neighbours."""
    names = [b.name for b in BUFFERS if b.name != "page_table"]
    assert tuple(names[:len(cuda_step_io.INPUTS)]) == cuda_step_io.INPUTS and cuda_step_io.INPUTS[0] == "token_ids"
    assert step_records.ROW.itemsize * 64 % 16 == 0 and cuda_backend.inputs_of(rows((0, 0, [1]))).keys() == set(cuda_step_io.INPUTS)


def test_what_a_launch_is_made_of(make, monkeypatch):
    """Load, every operation of a step that advances, the draw: in this order, each allowed to begin under the one before it but the first."""
    backend = make()
    cfg = made_config(vocab_size=VOCAB)
    backend.plan, backend.ride, backend.probes, backend.trace, backend._raw_stream, backend._steps = build_plan(cfg, 2), True, NO_PROBES, None, 0, ["a", "b"]

    class Kernels:
        shapes = {name: () for op in backend.plan.ops + backend.plan.commit for name in kernels_of(op.stage, backend.plan)}

        def launch(self, kernel, step, args, stream, dependent):
            return SimpleNamespace(kernel=kernel, step=step, dependent=dependent, args=args)
    monkeypatch.setattr(backend, "kernels", lambda bucket: Kernels(), raising=False)
    for memory in backend.memories:
        memory.op_struct = lambda op, first_row=0: SimpleNamespace(op=op)
    made = []
    monkeypatch.setattr(backend._io, "load_launch", lambda half: made.append(half) or "load")
    monkeypatch.setattr(backend._io, "sample_launch", lambda half, rows, dependent: ("sample", half, rows, dependent))
    half = backend._io._halves[1]
    groups = backend._whole(16, half)
    assert groups[0] == (None, ["load"]) and groups[-1] == (None, [("sample", half, 16, True)]) and made == [half]
    step = groups[1:-1]
    assert [op for op, _ in step if op.stage.name != "attn_exchange"] == [op for op in backend.plan.ops if not op.stage.moves]
    assert all(launch.dependent and launch.args.advances for _, group in step for launch in group)
    assert [launch.args.launch for _, group in step for launch in group] == list(range(sum(len(g) for _, g in step)))
    alone = backend.launches("step", 4)
    assert [launch.dependent for _, group in alone for launch in group][:2] == [False, True] and not any(launch.args.advances for _, group in alone for launch in group)
    (op, commit), = backend.launches("commit", 4)
    assert op.stage.name == "kda_commit" and [launch.step for launch in commit] == ["a", "b"]
    few = backend._whole(8, half)   # of few rows the commit
    assert [op for op, _ in few[1:-1]] == [*(op for op, _ in step), op] and all(launch.dependent and not launch.args.advances for _, group in few[1:-1] for launch in group)
    monkeypatch.setattr(backend, "_single", lambda bucket: [(None, ["single"])])
    assert [op and op.stage.name for op, _ in backend._whole(4, half, single=True)] == [None, None, "kda_commit", None]
    backend._io.no_sampler = "why"
    assert backend._whole(4, half)[-1] == (None, [])
