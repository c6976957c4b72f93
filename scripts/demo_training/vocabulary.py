"""The demo model's tokenizer: rank BPE over the words of its tasks and of the chat format, in the release's file layout.

Digits stay single, so that a number is its digits; brackets and other marks join with the blank before them and with nothing else.
"""
import re
from collections import Counter

from k3cuda.runtime.chat import render
from k3cuda.runtime.demo_tasks import ADJECTIVES, MONTHS, NOUNS, TASKS, VERBS, Dice, fact, question
from k3cuda.runtime.tokenizer import NUM_SPECIAL, Tokenizer

# The release's named special tokens, as far behind the first special id as there; the rest is reserved.
SPECIAL = {"[BOS]": 0, "[EOS]": 1, "<|end_of_msg|>": 2, "<|open|>": 3, "<|close|>": 4, "<|sep|>": 5, "[start_header_id]": 6, "[end_header_id]": 7, "[EOT]": 9,
           "<|media_begin|>": 18, "<|media_content|>": 19, "<|media_end|>": 20, "<|media_pad|>": 21, "[UNK]": 254, "[PAD]": 255}
MASK_OFFSET = 253          # a reserved id: what drafts read in place of a token that is not there yet
BASE_SIZE = 656            # bytes and merges; with the special ids a vocabulary that 16 ranks can share
# The letters and marks of `tokenizer.PATTERN` for ASCII text: the ranks only have to be good, the cut itself is tiktoken's.
_PIECES = re.compile(r"[^\r\nA-Za-z0-9]?[A-Z]*[a-z]+|[^\r\nA-Za-z0-9]?[A-Z]+[a-z]*|[0-9]{1,3}| ?[^\sA-Za-z0-9]+[\r\n]*|\s+(?!\S)|\s+")


def train_tokenizer(seed: int = 0) -> Tokenizer:
    """Of `BASE_SIZE` tokens and the special ones; the same for the same seed."""
    counts = Counter()
    for text in _texts(seed):
        counts.update(p for p in _PIECES.findall(text) if not any(c.isdigit() for c in p))
    merges = _merge({piece.encode(): count for piece, count in counts.items()}, BASE_SIZE - 256)
    tokens = [bytes([b]) for b in range(256)] + merges
    first = len(tokens)
    return Tokenizer({token: rank for rank, token in enumerate(tokens)}, {name: first + place for name, place in SPECIAL.items()}, NUM_SPECIAL)


def _texts(seed: int):
    """Every word that a prompt may hold, and problems of each task with the marks of the chat around them."""
    dice = Dice(seed)
    yield from (f" {word}" for word in (*NOUNS, *ADJECTIVES, *VERBS, *MONTHS) for _ in range(200))
    yield from (word for word in NOUNS for _ in range(200))   # the first of a copy
    yield from (word for word in (*ADJECTIVES, *VERBS))
    for name, task in TASKS.items():
        for _ in range(1 if name == "needle" else 1500):
            problem = task.draw(dice)
            yield from (s.text for s in render([{"role": "user", "content": problem.prompt}, {"role": "assistant", "content": problem.answer}],
                                               thinking=False, thinking_effort=None) if not s.special)
    yield from (fact("sun", "1") + question("sun") for _ in range(200))


def _merge(pieces: dict[bytes, int], count: int) -> list[bytes]:
    """The `count` most useful joins of neighbours, one after the other; the lower bytes first where two are as frequent."""
    split, found = {p: [p[i:i + 1] for i in range(len(p))] for p in pieces}, []
    while len(found) < count:
        pairs = Counter()
        for piece, parts in split.items():
            for pair in zip(parts, parts[1:]):
                pairs[pair] += pieces[piece]
        best = max(pairs.values())
        left, right = min(pair for pair, n in pairs.items() if n == best)
        found.append(left + right)
        for piece, parts in split.items():
            i, joined = 0, []
            while i < len(parts):
                take = parts[i:i + 2] == [left, right]
                joined.append(left + right if take else parts[i])
                i += 2 if take else 1
            split[piece] = joined
    return found
