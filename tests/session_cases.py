"""What sessions must do on any backend: random cuts and forks of a text against `LLM.logits` of the same text, by bytes."""
import numpy as np

from k3cuda.config import PAGE_SIZE


def on_host(array) -> np.ndarray:
    return array.get() if hasattr(array, "get") else array


def same(got, want, what):
    got = on_host(got)
    assert got.shape == want.shape and got.dtype == want.dtype == np.float32, what
    assert got.tobytes() == want.tobytes(), what


def cut_and_forked(llm, seed):
    """A text in random pieces by `prefill`, `step` and `feed`, in the session itself, in its forks and in forks of those."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, llm.cfg.vocab_size, PAGE_SIZE + 40)
    want = llm.logits(text)
    assert np.isfinite(want).all() and len(np.unique(want.argmax(1))) > 3, "a model that says nothing tests nothing"
    session = llm.prefill(text[:rng.integers(1, 60)])
    while len(session) < len(text):
        same(session.logits, want[len(session) - 1], f"logits behind {len(session)} tokens")
        child = session.fork()
        same(child.logits, want[len(session) - 1], f"a fork behind {len(session)} tokens")
        if rng.integers(2):   # go on with the child, and the parent is gone
            session, child = child, session
        child.step(int(rng.integers(llm.cfg.vocab_size)))   # elsewhere
        child.close()
        at, count = len(session), int(min(rng.choice([1, 1, 2, 7, 30, 66]), len(text) - len(session)))
        if rng.integers(4) == 0:
            session.feed(text[at:at + count].tolist())
        elif count == 1:
            same(session.step(text[at]), want[at], f"token {at}")
        else:
            same(session.step(text[at:at + count]), want[at:at + count], f"{count} tokens from {at}")
    same(session.logits, want[-1], "the last token")
    session.close()


def forks_go_their_own_way(llm, at):
    """A parent, its fork and a fork of the fork say different texts in turn; each is what a fresh run says."""
    rng = np.random.default_rng(at)
    shared, ends = rng.integers(0, llm.cfg.vocab_size, at), rng.integers(0, llm.cfg.vocab_size, (3, 6))
    parent = llm.prefill(shared)
    child = parent.fork()
    sessions = [parent, child, child.fork()]
    said = [[], [], []]
    for tokens in ends.T:
        for session, token, rows in zip(sessions, tokens, said):
            rows.append(on_host(session.step(token)))
    for session, end, rows in zip(sessions, ends, said):
        same(np.stack(rows), llm.logits([*shared, *end])[at:], f"a fork behind {at} tokens")
        session.close()
