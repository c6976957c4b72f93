"""Drafts that the host never reads, through the CUDA backend's own calls and the kernel that loads inputs: the model and its draft are the host's, as in
test_step_io.py and fake_draft.py."""
import numpy as np
import pytest

pytest.importorskip("cupy", reason="CuPy holds the device's memory; install k3cuda[cu13] or k3cuda[cu12]")

from engine_oracle import VOCAB, alone, drive, request  # noqa: E402
from fake_draft import Always, options, right  # noqa: E402
from test_step_io import CONTEXT, SLOTS, Hash, Launch, host, library, make, rows  # noqa: E402, F401

from k3cuda.errors import PlanError  # noqa: E402
from k3cuda.reference.accept import judge  # noqa: E402
from k3cuda.runtime import cuda_step_io  # noqa: E402
from k3cuda.runtime.backend import AS_DRAFTED, DraftAsk, Drafted, Judged  # noqa: E402
from k3cuda.runtime.engine import Engine  # noqa: E402

pytestmark = pytest.mark.skipif(host.COMPILER is None, reason="no C++ compiler")
SEQS = 8


class Draft:
    """Greedy drafts of `say(tokens, k)`, left where the kernels look for them."""

    def __init__(self, backend, k, say):
        self.backend, self.k, self.say, self.ids, self.read, self.committed = backend, k, say, np.zeros((k, SEQS), np.int32), [], 0

    def propose(self, asks):
        out = []
        for place, a in enumerate(asks):
            tokens = self.say([*self.backend.tokens[a.slot], a.anchor], self.k)
            self.ids[:, place] = tokens
            self.read.append(a.is_read)
            out.append(Drafted(tuple(tokens) if a.is_read else tuple(AS_DRAFTED - (i * SEQS + place) for i in range(self.k))))
        return out

    def commit(self, step, accepted):
        self.committed += int(accepted.sum())

    def accept(self, judges):
        """By the reference, with the tokens that stand where the judge says."""
        logits, out, flat = iter(self.backend.logits()), [], self.ids.reshape(-1)
        for j in judges:
            ids = tuple(int(flat[AS_DRAFTED - i]) if i <= AS_DRAFTED else i for i in j.draft_ids)
            out.append(Judged(*judge(np.stack([next(logits) for _ in j.draws]), j.draws, ids, None)))
        return out


class Speculating(Hash):
    def __init__(self, drafting, say):
        super().__init__()
        self.drafting, self.overlaps, self.draft = drafting, False, Draft(self, drafting.num_drafts, say)
        self._accept = self.draft
        self._io = cuda_step_io.StepIO(self.memories, "sm_90a", self.stream, self.draft.ids.ctypes.data)


@pytest.mark.parametrize("penalties", [{}, {"frequency_penalty": 0.4}], ids=["unread", "read"])
@pytest.mark.parametrize("say", [Always(), Always(0), Always(2)], ids=["right", "wrong", "right but the third"])
def test_requests_give_what_they_give_without_drafts(make, say, penalties):
    backend = Speculating(options(3, draft_sampling="greedy"), say)
    wanted = [request(f"r{i}", [(5 * i + 3 * j) % VOCAB for j in range(1 + 17 * i % 90)], seed=i, max_tokens=25 + i, ignore_eos=True,
                      **{"temperature": i % 2, "num_drafts": (3, 3, 1, 0)[i % 4]} | penalties) for i in range(7)]
    engine = Engine(backend)
    for r in wanted:
        engine.add(r)
    answers, last = drive(engine)
    for r in wanted:
        if not r.params.temperature:   # of drawn text only the law is the same
            assert answers[r.request_id][0] == alone(r.prompt_ids, r.params, context=CONTEXT)[0], r.request_id
        assert len(answers[r.request_id][0]) == r.params.max_tokens
    assert set(backend.draft.read) == {bool(penalties)} and {what for what, _ in backend.ran} == {"step", "commit"}
    assert backend.draft.committed >= sum(len(a[0]) - 1 for a in answers.values())
    found = last["r0"].stats.speculative
    if say.wrong != (0,) and not penalties:
        assert found.accepted > 0 and found.acceptance_length > 2


def test_tokens_of_an_earlier_proposal_are_refused(make):
    backend = Speculating(options(3), right)
    backend.open_slot(0, [0])
    asks = [DraftAsk(0, 5, 0, 1, 0.0, is_read=False)]
    first = backend.propose(asks)[0].token_ids
    assert first == tuple(AS_DRAFTED - i * SEQS for i in range(3))
    backend.step(rows((0, 0, [5, *first])))
    assert [t for t, _, _ in backend._inputs()[0]] == [5, *right([5], 3)]
    backend.commit(np.array([True, True, False, False]))
    backend.propose([DraftAsk(0, 5, 2, 1, 0.0)])
    with pytest.raises(PlanError, match="token id -2 stands for no draft of the last proposal"):
        backend.step(rows((0, 2, [5, first[0]])))
