"""Looks into the last step: which experts the last layer took for each token, and how much every KDA layer forgot.

    python examples/read_buffers.py [MODEL [BACKEND]]
"""
import sys

import numpy as np

from k3cuda import LLM


def on_host(array):
    return array.get() if hasattr(array, "get") else array   # of CuPy; waits for what was asked for


def experts_of_last_layer(llm, num_rows):
    """ids int32 and weights float32, each [num_rows, experts of a token]: one row for each token of the last step."""
    return on_host(llm.buffer("expert_ids")[:num_rows]), on_host(llm.buffer("expert_weights")[:num_rows])


def kept_after_a_token(llm, num_rows):
    """float32 [KDA layers]: what a state keeps of itself, the mean over heads, channels and rows. These buffers have a part for each layer."""
    decay = llm.buffer("kda_decay")[:, :num_rows]   # [layers, rows, heads, channels], a logarithm; still where the model runs
    return on_host(np.exp(decay).mean(axis=(1, 2, 3)))


def main(model="demo", backend="auto"):
    with LLM(model, decode_backend=backend, max_batch=1, max_model_len=512) as llm, llm.prefill("The sky is ") as session:
        word = llm.tokenizer.encode("blue")
        session.step(word)   # one step: its tokens are rows 0, 1, .. of every buffer with an axis of rows
        for token, ids, weights in zip(word, *experts_of_last_layer(llm, len(word))):
            print(f"{llm.tokenizer.decode([token])!r}: " + ", ".join(f"expert {i} x {w:.2f}" for i, w in zip(ids, weights)))
        print("kept, by KDA layer:", " ".join(f"{kept:.3f}" for kept in kept_after_a_token(llm, len(word))))
        state = llm.buffer("kda_state")[:, session.slot]
        print("size of its states:", " ".join(f"{size:.2f}" for size in on_host(np.sqrt((state ** 2).sum(axis=(1, 2, 3))))))


if __name__ == "__main__":
    main(*sys.argv[1:])
