"""Beam search by forks: every beam is a session, and the past that beams share is read once and never copied whole.

    python examples/beam_search.py [MODEL [BACKEND]]
"""
import sys

import numpy as np

from k3cuda import LLM


def best_tokens(logits, count):
    """The `count` most likely tokens and their log-probabilities. NumPy's functions run on the GPU for a CuPy array."""
    z = logits - logits.max()
    logprobs = z - np.log(np.exp(z).sum())
    order = np.argsort(-logprobs)[:count]
    return list(zip(order.tolist(), logprobs[order].tolist()))


def beam_search(llm, prompt, num_tokens, width):
    """The beams at the end: (log-probability, ids), the best one first."""
    beams = [(0.0, [], llm.prefill(prompt))]
    for _ in range(num_tokens):
        grown = [(total + logprob, ids + [token], session)
                 for total, ids, session in beams for token, logprob in best_tokens(session.logits, width)]
        grown.sort(key=lambda beam: -beam[0])
        chosen = grown[:width]
        parents = [session for _, _, session in chosen]
        for _, _, session in beams:
            if session not in parents:
                session.close()   # first, so that there is room for forks
        beams = []
        for i, (total, ids, session) in enumerate(chosen):
            if session in parents[i + 1:]:
                session = session.fork()   # another beam goes on from the same past
            beams.append((total, ids, session))
        for _, ids, session in beams:
            session.step(ids[-1])
    for _, _, session in beams:
        session.close()
    return [(total, ids) for total, ids, _ in beams]


def main(model="demo", backend="auto"):
    with LLM(model, decode_backend=backend, max_batch=4, max_model_len=512) as llm:
        for total, ids in beam_search(llm, "Why is the sky blue?", 8, width=4):
            print(f"{total:8.3f}  {llm.tokenizer.decode(ids)!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
