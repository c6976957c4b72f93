"""A draft beside a CUDA backend, without a GPU: its memory is the host's and its kernels run in the shim, so only the order of a stream is not tested."""
import ctypes
from collections import Counter
from dataclasses import replace
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
from k3cuda.runtime import cuda_accept, cuda_draft, cuda_memory, cuda_upload  # noqa: E402
from k3cuda.runtime.backend import AS_DRAFTED, Drafted, Judge, StepRows  # noqa: E402
from k3cuda.runtime.drafting import Drafting  # noqa: E402
from k3cuda.runtime.loading import Loading  # noqa: E402
from k3cuda.runtime.made_config import made_config  # noqa: E402
from k3cuda.runtime.made_draft import MadeDraft, made_draft_json  # noqa: E402
from k3cuda.runtime.made_model import MadeCheckpoint  # noqa: E402
from k3cuda.runtime.numpy_draft import NumpyDraft  # noqa: E402
from k3cuda.runtime.numpy_program import widened  # noqa: E402
from k3cuda.runtime.sampling import Draw, SamplingParams  # noqa: E402

SLOTS, PAGES, ROWS = 3, 2, 128   # rows of a step of the target
FAR = 0.03   # relative: BF16 between operations against F32


class Array(np.ndarray):
    """The little that is asked of an array on a GPU."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data, copy_from_host_async=lambda pointer, nbytes, stream: ctypes.memmove(self.ctypes.data, pointer, nbytes),
                               copy_to_host_async=lambda pointer, nbytes, stream: ctypes.memmove(pointer, self.ctypes.data, nbytes))

    def get(self, stream=None):
        return np.array(self)


class HostLaunch:
    library = None

    def __init__(self, function, grid, block, arguments, **options):
        self.run = lambda: host.launch(self.library, function, grid, block, arguments, seed=5)

    def launch(self):
        self.run()


class Stream:
    """Keeps what is launched while it captures."""

    def __init__(self):
        self.captured, self.replays = None, 0

    def __cuda_stream__(self):
        return 0, 0

    def synchronize(self):
        pass

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
                           cuda=SimpleNamespace(alloc_pinned_memory=lambda n: np.zeros(n, np.uint8), Event=lambda **_: event, get_current_stream=Stream))

    class Bucket:
        def __init__(self, plan, rows, compiled, ride):
            stages = {op.stage.name: () for op in plan.context + plan.ops}
            built[rows] = self.kernels = Kernels(rows, plan.tp, ride, stages, tmp_path / str(rows), plan=plan)

        def launch(self, name, step, args, raw, dependent):
            assert dependent or not stream.captured
            return SimpleNamespace(launch=lambda: stream.captured.append(lambda: self.kernels.run_kernel(name, step, args)))

        def close(self):
            built.clear()

    for module in (cuda_draft, cuda_memory, cuda_upload):
        monkeypatch.setattr(module, "cupy", fake)
    monkeypatch.setattr(cuda_draft, "compile_bucket", lambda *_, **__: None)
    monkeypatch.setattr(cuda_draft, "BucketKernels", Bucket)
    return stream, built


def rows_of(*parts):
    """Rows of (slot, first position, how many)."""
    slots = np.concatenate([np.full(n, slot) for slot, _, n in parts])
    positions = np.concatenate([first + np.arange(n) for _, first, n in parts])
    return StepRows(*(np.array(x, np.int32) for x in (np.zeros(len(slots)), slots, positions, [])))


@pytest.mark.parametrize("family, own, dcp", [("mla", True, 1), ("gqa", False, 1), ("mla", False, 2), ("gqa", True, 2)],
                         ids=["own embedding and head", "the target's", "mla beside a split cache", "gqa beside a split cache"])
def test_context_and_drafts(device, family, own, dcp):
    stream, built = device
    draft = context_and_drafts(family, own, stream, SimpleNamespace(arch="sm_90a", sms=5), lambda a: np.array(a).view(Array), dcp)
    assert stream.replays == 5 and len(draft._graphs) == 4   # of 70 rows two slices, the second of 6
    assert set(built) == {8, 16, 64}
    draft.close()
    assert not built


def test_pages_of_a_split_target():
    """Each stands for as many of the draft's own as ranks hold it together, copied and listed alike."""
    calls, draft = [], cuda_draft.CudaDraft.__new__(cuda_draft.CudaDraft)
    draft._dcp, draft.stream = 2, "a stream"
    draft.memories, draft._page_tables = [SimpleNamespace(copy_slot=lambda *args: calls.append(args))], SimpleNamespace(set=lambda *args: calls.append(args))
    draft.copy_slot(0, 1, [(3, 5)], (5, 7))
    assert calls == [(0, 1, [(6, 10), (7, 11)], "a stream"), (1, [10, 11, 14, 15], "a stream")]


def context_and_drafts(family, own, stream, device, array, dcp=1):
    """Against the reference: a prompt that is more than a slice of context rows, then rows of which some are rejected, then drafts of two sequences, twice.

    `array` takes one of the host to the device. `dcp`: ranks that hold a page of the target's cache.
    """
    target = MadeCheckpoint(made_config(vocab_size=100, num_hidden_layers=5))
    source = MadeDraft(made_draft_json(target.cfg, family), target.cfg, 1, own_embedding=own, own_head=own)
    drafting, taps = Drafting(source, num_drafts=3, confidence_threshold=0.0 if own else None), np.zeros((ROWS, len(source.cfg.target_layer_ids), source.cfg.target_hidden_size), np.float32)
    shared = {name: widened(target.rank_slices(name, None, 1, 0)) for name in ("embed_tokens", "lm_head")}
    reference = NumpyDraft(source, [taps], num_drafts=3, rows=drafting.block_rows, slots=SLOTS, pages=SLOTS * PAGES, slot_pages=PAGES, num=Numerics(), target_weights=[shared],
                           dcp=dcp)
    buffers = {"page_table": array(np.zeros((SLOTS, PAGES), np.int32)), "taps": array(np.zeros(taps.shape, np.uint16))}
    plan = build_plan(target.cfg)
    packed = Memory(plan, target)
    shared_ops = [op for op in plan.ops if op.stage.name in ("embed", "lm_head")]
    weights = {(None, op.stage.name): [array(a) for a in packed.weights_of(op)] for op in shared_ops}
    memory = SimpleNamespace(buffer=buffers.get, dims={"slots": SLOTS, "pages": SLOTS * PAGES, "slot_pages": PAGES})
    draft = cuda_draft.CudaDraft(drafting, [0], 1, cuda_upload.upload_draft, [weights], device, stream, Loading(), dcp=dcp)
    draft.bind([memory])
    for slot in range(SLOTS):
        pages = [slot * PAGES + 1, slot * PAGES]
        reference.open_slot(slot, pages)
        buffers["page_table"][slot] = array(np.array(pages, np.int32))
        draft.open_slot(slot, pages)

    def commit(rows, accepted, seed):
        values = random_taps(source.cfg, len(rows), seed).astype(ml_dtypes.bfloat16)
        taps[:len(rows)] = values
        buffers["taps"][:len(rows)] = array(values.view(np.uint16))
        for each in (reference, draft):
            each.commit(rows, accepted)

    commit(rows_of((2, 0, 66), (0, 0, 4)), np.ones(70, bool), 1)
    commit(rows_of((0, 4, 4), (2, 66, 4)), np.arange(8) % 4 < 2, 2)
    asks = [ask(2, 7, 68, seed=5 + (3 << 32), temperature=0.8), ask(0, 9, 6, seed=6)]
    for is_read in (True, False):
        want, found = reference.propose(asks), draft.propose([replace(a, is_read=is_read) for a in asks])
        if not is_read:   # each stands for its place among the tokens
            ids = draft.ids().reshape(-1)
            found = [Drafted(tuple(ids[AS_DRAFTED - i] for i in f.token_ids), w.confidence if own else None) for f, w in zip(found, want)]
        for s, a in enumerate(asks):
            logits = draft.memories[0].buffer("draft_logits").get(stream=stream)[:, draft.places[a.slot]]
            assert np.linalg.norm(logits[0] - reference.logits(a.slot)[0]) < FAR * np.linalg.norm(logits[0])
            tokens = tuple(draft_token(row, a.temperature, a.seed, a.position + 1 + i, i) for i, row in enumerate(logits))
            assert found[s].token_ids == tokens and (found[s].confidence is None) == (not own)   # without a threshold nobody asks
            if own:
                assert len(found[s].confidence) == 3 and abs(found[s].confidence[0] - want[s].confidence[0]) < FAR
    return draft


@pytest.mark.parametrize("options", [{}, {"acceptance": "block"}, {"draft_sampling": "greedy"}, {"acceptance_length": 2.5}], ids=str)
def test_acceptance(monkeypatch, tmp_path_factory, options):
    """Verdicts of three sequences, one without drafts, as the reference gives them; and the host's where penalties are too many for the kernels."""
    vocab, k, rng = 100, 3, np.random.default_rng(4)
    if HostLaunch.library is None:
        HostLaunch.library = host.build(f'#include "accept_core.cuh"\nK3_ACCEPT({vocab}, 1, 1)\n', ["k_laws", "k_draft_laws", "k_judge"], tmp_path_factory.mktemp("accept"))
    fake = SimpleNamespace(zeros=lambda n, dtype: np.zeros(n, dtype).view(Array), uint8=np.uint8, cuda=SimpleNamespace(alloc_pinned_memory=lambda n: np.zeros(n, np.uint8), get_current_stream=Stream))
    for name, value in {"cupy": fake, "Launch": HostLaunch, "Module": lambda cubin: SimpleNamespace(function=lambda name: name, close=lambda: None), "CLUSTER": 1,
                        "sampler_warps": lambda vocab: 1, "compile_accept": lambda *_: SimpleNamespace(cubin=None)}.items():
        monkeypatch.setattr(cuda_accept, name, value)
    logits, drafted = (rng.standard_normal(shape).astype(np.float32) for shape in ((64, vocab), (k, 8, vocab)))
    target = SimpleNamespace(dims={"head_rows": 64}, arena=logits.view(Array), offsets={"logits": 0}, buffer=lambda name: logits.view(Array))
    memory = SimpleNamespace(dims={"seqs": 8}, arena=drafted.view(Array), offsets={"draft_logits": 0}, buffer=lambda name: drafted.view(Array))
    proposed = np.zeros((k, 8), np.int32)
    memory.offsets["draft_ids"] = proposed.ctypes.data - drafted.ctypes.data
    draft = SimpleNamespace(cfg=SimpleNamespace(vocab_size=vocab), memories=[memory], places={7: 2, 9: 0}, ids=lambda: proposed)
    cfg = made_config(vocab_size=vocab, num_hidden_layers=5)
    drafting = Drafting(MadeDraft(made_draft_json(cfg), cfg), num_drafts=k, **options)
    stream = SimpleNamespace(__cuda_stream__=lambda: (0, 0), synchronize=lambda: None)
    accept = cuda_accept.CudaAccept(draft, drafting, target, SimpleNamespace(arch="sm_90a"), stream, Counter())
    stood = 0
    for seed in range(40):
        logits[:], drafted[:] = 3 * rng.standard_normal(logits.shape), rng.standard_normal(drafted.shape)
        for place, first in ((2, 0), (0, 5)):   # rows that these judge: some drafts stand
            drafted[:, place] += logits[first:first + k]
        judges = []
        for slot, n, params in ((7, 3, SamplingParams(temperature=0.9, logprobs=2)), (4, 0, SamplingParams(temperature=1.1, top_k=5)), (9, 2, SamplingParams(frequency_penalty=0.5))):
            drawn = [draft_token(drafted[i, draft.places[slot]], 0.9 if drafting.draft_sampling == "probabilistic" else 0.0, seed, 5 + i, i) for i in range(n)]
            judges.append(Judge(slot, tuple(drawn), tuple(Draw(params.resolved({}), seed, 5 + i, output_ids=[1, 2, *drawn[:i]]) for i in range(n + 1))))
        found, want = accept.accept(judges), accept._on_host(judges)
        assert [j.num_accepted for j in found] == [j.num_accepted for j in want]
        assert [[d.token_id for d in j.drawn] for j in found] == [[d.token_id for d in j.drawn] for j in want]
        stood += sum(j.num_accepted for j in found)
        unread = []
        for j in judges:
            at = np.arange(len(j.draft_ids)) * 8 + draft.places.get(j.slot, 0)
            proposed.reshape(-1)[at] = j.draft_ids
            unread.append(replace(j, draft_ids=tuple(AS_DRAFTED - at)))
        assert accept.accept(unread) == found and accept._on_host(unread) == want
    assert stood > 5 and not accept.reasons
    monkeypatch.setattr(cuda_accept, "MAX_PENALTIES", 2)
    assert [j.drawn for j in accept.accept(judges)] == [j.drawn for j in want] and sum(accept.reasons.values()) == 3
    accept.close()
