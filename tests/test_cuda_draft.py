"""A draft beside a CUDA backend, without a GPU: its memory is the host's and its kernels run in the shim, so only the order of a stream is not tested."""
import ctypes
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from drafts import ask, random_taps
from shim import host

pytest.importorskip("cupy", reason="CuPy holds the device's memory; install k3cuda[cu13] or k3cuda[cu12]")
pytestmark = pytest.mark.skipif(host.COMPILER is None, reason="needs g++")

from host_step import Kernels, Memory  # noqa: E402

from k3cuda.plan import build_plan  # noqa: E402
from k3cuda.reference.numerics import Numerics  # noqa: E402
from k3cuda.reference.sample import draft_token  # noqa: E402
from k3cuda.runtime import cuda_draft, cuda_memory  # noqa: E402
from k3cuda.runtime.backend import StepRows  # noqa: E402
from k3cuda.runtime.drafting import Drafting  # noqa: E402
from k3cuda.runtime.made_config import made_config  # noqa: E402
from k3cuda.runtime.made_draft import MadeDraft, made_draft_json  # noqa: E402
from k3cuda.runtime.made_model import MadeCheckpoint  # noqa: E402
from k3cuda.runtime.numpy_draft import NumpyDraft  # noqa: E402
from k3cuda.runtime.numpy_program import widened  # noqa: E402

SLOTS, PAGES, ROWS = 3, 2, 128   # rows of a step of the target
FAR = 0.03   # relative: BF16 between operations against F32


class Array(np.ndarray):
    """The little that is asked of an array on a GPU."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data, copy_from_host_async=lambda pointer, nbytes, stream: ctypes.memmove(self.ctypes.data, pointer, nbytes))

    def get(self, stream=None):
        return np.array(self)


class Stream:
    """Keeps what is launched while it captures."""

    def __init__(self):
        self.captured, self.replays = None, 0

    def __cuda_stream__(self):
        return 0, 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def begin_capture(self):
        self.captured = []

    def end_capture(self):
        graph, self.captured = self.captured, None

        def launch(stream):
            self.replays += 1
            for run in graph:
                run()
        return SimpleNamespace(launch=launch)


@pytest.fixture
def device(monkeypatch, tmp_path):
    """The stream; kernels that are built, by rows."""
    stream, built = Stream(), {}
    event = SimpleNamespace(synchronize=lambda: None, record=lambda stream: None)
    fake = SimpleNamespace(zeros=lambda n, dtype: np.zeros(n, dtype).view(Array), uint8=np.uint8, asarray=lambda a: np.array(a).view(Array), ndarray=Array,
                           cuda=SimpleNamespace(alloc_pinned_memory=lambda n: np.zeros(n, np.uint8), Event=lambda **_: event))

    class Bucket:
        def __init__(self, plan, rows, compiled):
            stages = {op.stage.name: () for op in plan.context + plan.ops}
            built[rows] = self.kernels = Kernels(rows, plan.tp, True, stages, tmp_path / str(rows), plan=plan)

        def launch(self, name, step, args, raw, dependent):
            assert dependent or not stream.captured
            return SimpleNamespace(launch=lambda: stream.captured.append(lambda: self.kernels.run_kernel(name, step, args)))

        def close(self):
            built.clear()

    for module in (cuda_draft, cuda_memory):
        monkeypatch.setattr(module, "cupy", fake)
    # As mla_shim.cuh reads it; a row is of BF16.
    monkeypatch.setattr(cuda_memory, "_tensor_map", lambda cache, row, block: np.array([cache.ctypes.data, row, block, *[0] * 13], np.uint64).view(Array))
    monkeypatch.setattr(cuda_draft, "compile_bucket", lambda *_, **__: None)
    monkeypatch.setattr(cuda_draft, "BucketKernels", Bucket)
    return stream, built


def rows_of(*parts):
    """Rows of (slot, first position, how many)."""
    slots = np.concatenate([np.full(n, slot) for slot, _, n in parts])
    positions = np.concatenate([first + np.arange(n) for _, first, n in parts])
    return StepRows(*(np.array(x, np.int32) for x in (np.zeros(len(slots)), slots, positions, [])))


@pytest.mark.parametrize("family, own", [("mla", True), ("gqa", False)], ids=["own embedding and head", "the target's"])
def test_context_and_drafts(device, family, own):
    """Against the reference: a prompt that is more than a slice of context rows, then rows of which some are rejected, then drafts of two sequences, twice."""
    stream, built = device
    target = MadeCheckpoint(made_config(vocab_size=100, num_hidden_layers=5))
    source = MadeDraft(made_draft_json(target.cfg, family), target.cfg, 1, own_embedding=own, own_head=own)
    drafting, taps = Drafting(source, num_drafts=3), np.zeros((ROWS, len(source.cfg.target_layer_ids), source.cfg.target_hidden_size), np.float32)
    shared = {name: widened(target.rank_slices(name, None, 1, 0)) for name in ("embed_tokens", "lm_head")}
    reference = NumpyDraft(source, [taps], num_drafts=3, rows=drafting.block_rows, slots=SLOTS, pages=SLOTS * PAGES, slot_pages=PAGES, num=Numerics(), target_weights=[shared])
    buffers = {"page_table": np.zeros((SLOTS, PAGES), np.int32).view(Array), "taps": np.zeros(taps.shape, np.uint16).view(Array)}
    plan = build_plan(target.cfg)
    packed = Memory(plan, target)
    shared_ops = [op for op in plan.ops if op.stage.name in ("embed", "lm_head")]
    weights = {(None, op.stage.name): [a.view(Array) for a in packed.weights_of(op)] for op in shared_ops}
    memory = SimpleNamespace(buffer=buffers.get, dims={"slots": SLOTS, "pages": SLOTS * PAGES, "slot_pages": PAGES}, weights=weights)
    draft = cuda_draft.CudaDraft(drafting, [memory], [0], 1, SimpleNamespace(arch="sm_90a", sms=5), stream)
    for slot in range(SLOTS):
        pages = [slot * PAGES + 1, slot * PAGES]
        reference.open_slot(slot, pages)
        buffers["page_table"][slot] = pages

    def commit(rows, accepted, seed):
        values = random_taps(source.cfg, len(rows), seed).astype(ml_dtypes.bfloat16)
        taps[:len(rows)] = values
        buffers["taps"][:len(rows)] = values.view(np.uint16)
        for each in (reference, draft):
            each.commit(rows, accepted)

    commit(rows_of((2, 0, 66), (0, 0, 4)), np.ones(70, bool), 1)
    commit(rows_of((0, 4, 4), (2, 66, 4)), np.arange(8) % 4 < 2, 2)
    assert stream.replays == 3 and set(built) == {8, 64}   # of 70 rows two slices, the second of 6
    asks = [ask(2, 7, 68, seed=5 + (3 << 32), temperature=0.8), ask(0, 9, 6, seed=6)]
    for _ in range(2):
        want, found = reference.propose(asks), draft.propose(asks)
        for s, a in enumerate(asks):
            logits = draft.memories[0].buffer("draft_logits")[:, draft.places[a.slot]]
            assert np.linalg.norm(logits[0] - reference.logits(a.slot)[0]) < FAR * np.linalg.norm(logits[0])
            tokens = tuple(draft_token(row, a.temperature, a.seed, a.position + 1 + i, i) for i, row in enumerate(logits))
            assert found[s].token_ids == tokens and len(found[s].confidence) == 3
            assert abs(found[s].confidence[0] - want[s].confidence[0]) < FAR
    assert stream.replays == 5 and len(draft._graphs) == 4
    draft.close()
    assert not built
