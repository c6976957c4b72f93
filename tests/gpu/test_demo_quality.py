"""The trained demo model on a GPU: every backend, cache, cut and draft answers as well as the reference did; backends, drafts and ranks change no text.

`-k 'tp16-'` and the like choose configurations; each process that has others of a cache than the plain one runs that one too. K3CUDA_QUALITY_PROBLEMS: how many
of the held-out problems, the tasks in turn; all where it isn't set.
"""
import functools
import os
import sys

import pytest

pytestmark = pytest.mark.gpu
pytest.importorskip("cupy", reason="CuPy holds the device's memory; install k3cuda[cu13] or k3cuda[cu12]")

from command import ROOT  # noqa: E402

sys.path.append(str(ROOT / "scripts"))
from quality import CONFIGURATIONS, answers, stored, verdict  # noqa: E402

from k3cuda.runtime.named_models import DEMO, is_trained  # noqa: E402

pytestmark = [pytestmark, pytest.mark.skipif(not is_trained(), reason="no trained demo in this version; scripts/install_demo.py puts one there")]


PROBLEMS = os.environ.get("K3CUDA_QUALITY_PROBLEMS")


@functools.cache
def found(backend, kv, tp, draft):
    return answers(DEMO, int(PROBLEMS) if PROBLEMS else len(stored()), draft_model=draft, tp=tp, ranks="virtual", kv_cache_dtype=kv, decode_backend=backend)


@pytest.mark.parametrize("backend, kv, tp, draft", CONFIGURATIONS, ids=[f"{backend}-{kv}-tp{tp}-{draft or 'plain'}" for backend, kv, tp, draft in CONFIGURATIONS])
def test_answers_are_as_good_as_the_references(backend, kv, tp, draft):
    ours = found(backend, kv, tp, draft)
    assert (trouble := verdict(ours, stored())) is None, trouble
    texts, plain = ({a["id"]: a["text"] for a in x} for x in (ours, found("standard", kv, 1, None)))
    assert texts == plain, [(name, texts[name], text) for name, text in plain.items() if texts[name] != text][:3]
    if draft:
        assert any(a["speculative"] and a["speculative"]["accepted"] for a in ours)
