"""Drafts one after the other: a logit bias of low rank from the token before, a draw, an estimate of whether it will be accepted.

Rows of `logits_part` and `head_in` are k of every sequence, sequence after sequence. Shapes here: s sequences, V tokens, r the bias's rank.
"""
import numpy as np

from .numerics import linear, sigmoid
from .sample import draft_token


def _rows_of(draft, rows, seqs):
    """Of the k rows of every sequence the one of `draft`, [s, ..]."""
    return rows[draft::len(rows) // seqs]


def markov(m, w, b, op):
    """draft_logits_part [s, this rank's tokens]: the head's logits plus W2 times the token before's row of W1."""
    b.draft_logits_part[:] = _rows_of(op.kind_index, b.logits_part, len(b.markov_in)) + linear(b.markov_in, w.markov_w2)


def confidence(m, w, b, op):
    """draft_confidence [s] from the row's hidden state and the Markov embedding of the token before."""
    x = np.concatenate([_rows_of(op.kind_index, b.head_in, len(b.markov_in)), b.markov_in], axis=1)
    b.draft_confidence[:] = sigmoid(linear(x, w.confidence_proj)[:, 0] + w.confidence_bias)


def confidence_plain(m, w, b, op):
    """draft_confidence [s] from the row's hidden state alone."""
    x = _rows_of(op.kind_index, b.head_in, len(b.draft_confidence))
    b.draft_confidence[:] = sigmoid(linear(x, w.confidence_proj)[:, 0] + w.confidence_bias)


def draft_pick(m, w, b, op):
    """draft_ids [s] and their rows of W1, markov_in [s, r]: drawn from softmax(draft_logits / temperature), or its largest. No top-k or top-p here."""
    for s, (_, rows) in enumerate(m.sequences(b.row_slot)):
        low, high = b.seq_seed[s].view(np.uint32).tolist()
        position = int(b.row_position[rows.start]) + 1 + op.kind_index
        b.draft_ids[s] = draft_token(b.draft_logits[s], float(b.seq_temperature[s]), low | high << 32, position, op.kind_index)
    b.markov_in[:] = w.markov_w1[b.draft_ids]
