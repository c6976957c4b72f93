"""A draft's kernels and those of acceptance on a GPU: the tests of the host shim, with the kernels on the device, and shapes that need clusters of blocks."""
import pytest

cp = pytest.importorskip("cupy", reason="CuPy holds the device's memory; install k3cuda[cu13] or k3cuda[cu12]")

import test_accept_shim as accept  # noqa: E402
import test_cuda_draft as beside  # noqa: E402
import test_draft_shim as draft  # noqa: E402
from drafts import made  # noqa: E402
from host_step import SLOTS  # noqa: E402

from k3cuda.emit import launches_of  # noqa: E402
from k3cuda.runtime.cuda_driver import Launch, Module, open_device  # noqa: E402
from k3cuda.runtime.cuda_kernels import BucketKernels, compile_accept, compile_bucket  # noqa: E402
from k3cuda.runtime.cuda_memory import RankMemory  # noqa: E402
from k3cuda.runtime.drafting import BLOCK, STANDARD, SYNTHETIC  # noqa: E402
from k3cuda.runtime.step_records import CLUSTER, sampler_warps  # noqa: E402

pytestmark = pytest.mark.gpu


class DeviceKernels:
    """As host_step.Kernels: takes memory of the host to the device, runs an operation there and brings everything back."""

    def __init__(self, twin):
        self.twin, device = twin, open_device(0)
        self.kernels = BucketKernels(twin.plan, twin.rows, compile_bucket(twin.plan, twin.rows, "bf16", device.arch, sms=device.sms))
        lent = {name: cp.zeros(array.nbytes, cp.uint8) for name, array in twin.memories[0].session.items() if name in twin.memories[0].tables.lent}
        pages = SLOTS * draft.PAGES
        self.ranks = [RankMemory(twin.plan, SLOTS, pages, draft.PAGES, "bf16", {n: cp.zeros_like(a) for n, a in lent.items()}) for _ in twin.memories]
        self.steps = [m.step_struct(r, self.ranks, False) for r, m in enumerate(self.ranks)]

    def _arrays(self):
        for host, device in zip(self.twin.memories, self.ranks):
            yield host.arena, device.arena
            yield from ((host.session[name], device.session[name]) for name in host.session)

    def run(self, op, memory):
        for host, device in self._arrays():
            device.set(host)
        rank = self.ranks[memory.rank]
        key = op.layer, op.stage.name
        if key not in rank.weights:
            rank.weights[key] = [cp.asarray(array) for array in memory.weights_of(op)]
        for name, first in launches_of(op.stage, self.twin.plan, self.twin.rows, True):
            self.kernels.launch(name, self.steps[memory.rank], rank.op_struct(op, first), 0, False).launch()
        cp.cuda.Device().synchronize()
        for host, device in self._arrays():
            host[:] = device.get()


class OnDevice:
    def _kernels(self, stages, folder):
        return DeviceKernels(self)


class Twin(OnDevice, draft.Twin):
    pass


class Chain(OnDevice, draft.Chain):
    pass


# What a rank of a public draft has 16 times of, so that products and draws run in clusters; and eight sequences, more than a tile of tokens.
LARGE = {"intermediate_size": 2048, "q_lora_rank": 256, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "markov_rank": 256}
CASES = draft.CASES | {
    "large": ("mla", LARGE, {"seqs": 8}), "large one": ("mla", LARGE | {"fc_norm": True}, {}),
    "large gqa": ("gqa", {"intermediate_size": 2048, "head_dim": 64, "num_attention_heads": 16, "num_key_value_heads": 4, "markov_rank": 256}, {"seqs": 4, "num_drafts": 5}),
}
LARGE_TARGET = {"hidden_size": 1024, "vocab_size": 20480}


@pytest.mark.parametrize("case", CASES)
def test_every_operation_of_a_draft(tmp_path, case):
    family, changes, options = CASES[case]
    source = made(family, changes, **(LARGE_TARGET if "large" in case else {}))
    draft.every_operation(Twin(source, tmp_path, **options), options.get("seqs", 1), len(case))


@pytest.mark.parametrize("case", ["mla", "gqa", "ranks", "large", "large gqa"])
def test_the_whole_way(tmp_path, case):
    family, changes, options = CASES[case]
    source = made(family, changes, **(LARGE_TARGET if "large" in case else {}))
    draft.whole_way(Chain(source, tmp_path, **options), options.get("seqs", 1))


@pytest.mark.parametrize("family, own", [("mla", True), ("gqa", False)])
def test_context_and_drafts_as_graphs(family, own):
    with cp.cuda.Stream(non_blocking=True) as stream:   # what the test writes goes in the draft's own order
        beside.context_and_drafts(family, own, stream, open_device(0), cp.asarray).close()


class Device:
    """As test_accept_shim.Host."""

    def __init__(self, vocab):
        self.vocab, self.module, self.held = vocab, Module(compile_accept(vocab, open_device(0).arch).cubin), {}

    def put(self, array):
        self.held[array.ctypes.data] = copy = cp.asarray(array.view("u1").reshape(-1))
        return copy.data.ptr

    def get(self, array):
        cp.cuda.Device().synchronize()
        array.view("u1").reshape(-1)[:] = self.held[array.ctypes.data].get()

    def launch(self, kernel, clusters, args, seed):
        cp.cuda.Device().synchronize()   # CuPy's stream has set what the kernels read
        Launch(self.module.function(kernel), clusters * CLUSTER, sampler_warps(self.vocab) * 32, [args], cluster=CLUSTER).launch()
        cp.cuda.Device().synchronize()


@pytest.fixture(scope="module")
def machines():
    return {name: Device(vocab) for name, vocab in accept.VOCAB.items()}


@pytest.mark.parametrize("rule, drawn", [(STANDARD, True), (STANDARD, False), (BLOCK, True), (BLOCK, False), (SYNTHETIC, True)])
def test_acceptance_against_the_reference(machines, rule, drawn):
    accept.test_against_the_reference(machines, rule, drawn)


def test_synthetic_acceptance(machines):
    accept.test_synthetic_length_six_with_seven_drafts_is_six_tokens_in_every_step(machines)


@pytest.mark.parametrize("rule, drawn", [(STANDARD, True), (BLOCK, True), (STANDARD, False), (BLOCK, False)])
def test_what_is_emitted_has_the_targets_law(machines, monkeypatch, rule, drawn):
    """10^5 tokens of each."""
    monkeypatch.setattr(accept, "DRAWN", 25_000)
    monkeypatch.setattr(accept, "ONE_POINT", 25_000)
    accept.test_what_is_emitted_has_the_targets_law(machines, rule, drawn)
