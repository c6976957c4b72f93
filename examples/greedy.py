"""Greedy decoding by hand: take the logits of a session, choose, feed what was chosen.

    python examples/greedy.py [MODEL [BACKEND]]
"""
import sys

from k3cuda import LLM


def greedy(llm, prompt, num_tokens):
    with llm.prefill(prompt) as session:
        ids = [int(session.logits.argmax())]   # of a NumPy or a CuPy array; int() waits for the GPU
        while len(ids) < num_tokens:
            logits = session.step(ids[-1])
            ids.append(int(logits.argmax()))
    return ids


def main(model="demo", backend="auto"):
    with LLM(model, decode_backend=backend, max_batch=1, max_model_len=512) as llm:
        print(llm.tokenizer.decode(greedy(llm, "Why is the sky blue?", 32)))


if __name__ == "__main__":
    main(*sys.argv[1:])
