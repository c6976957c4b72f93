"""The vocabulary reader, encoding and decoding, against goldens and against a slow BPE written another way."""

import base64
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from k3cuda.errors import CheckpointError, K3Error
from k3cuda.runtime import tokenizer as module
from k3cuda.runtime.tokenizer import CONFIG_FILE, MINI_TOKENIZER_DIR, MARKERS, RANKS_FILE, Tokenizer, split_long_runs

MINI = json.loads((Path(__file__).parent / "data" / "chat" / "_tokenizer-mini.json").read_text())
TOKENIZER = Tokenizer.from_dir(MINI_TOKENIZER_DIR)
RANKS = {base64.b64decode(token): int(rank) for token, rank in map(str.split, MINI["tiktoken_model"].splitlines())}

# Letters of every case and script the pattern tells apart, marks, digits, contractions, blanks of all kinds, and
# pieces of the vocabulary; the long s folds to "s", the hair space and the file separator are blank to one of Rust
# and Python only or to both.
ALPHABET = list("aAzé中好日あǅʰ\u0301١½ \t\n\r'’sStTrReE._-=\"<|>&;0129\u200a\u2028\x1c\x85\u017f👩🚀\u200d\x00")
ALPHABET += ["the", " the", "'s", "'LL", "message", "20261", "...", "  ", "\n\n", *MARKERS]
WORDS = st.lists(st.sampled_from(ALPHABET), max_size=30).map("".join)


def test_mini_files_are_the_golden_vocabulary(tmp_path):
    assert (MINI_TOKENIZER_DIR / RANKS_FILE).read_bytes() == MINI["tiktoken_model"].encode()
    Tokenizer(RANKS, MINI["special_tokens"], MINI["num_special"]).write_files(tmp_path)
    for name in (RANKS_FILE, CONFIG_FILE):
        assert (tmp_path / name).read_bytes() == (MINI_TOKENIZER_DIR / name).read_bytes(), name


def test_special_ids_are_the_named_ones_and_reserved_ones():
    assert TOKENIZER.vocab_size == MINI["num_base_tokens"] + MINI["num_special"] == len(RANKS) + len(TOKENIZER.special)
    assert MINI["special_tokens"].items() <= TOKENIZER.special.items()
    assert TOKENIZER.special["<|reserved_token_332|>"] == 332
    ids = (TOKENIZER.open_id, TOKENIZER.close_id, TOKENIZER.sep_id, TOKENIZER.end_of_msg_id)
    assert ids == tuple(MINI["special_tokens"][name] for name in MARKERS)


@pytest.mark.parametrize("case", MINI["plain"], ids=lambda case: repr(case["text"][:20]))
def test_plain_text(case):
    assert TOKENIZER.encode(case["text"]) == case["ids"]
    assert TOKENIZER.decode(case["ids"]) == case["text"]


@pytest.mark.parametrize("case", MINI["with_special"], ids=lambda case: case["text"])
def test_special_names_only_where_allowed(case):
    assert TOKENIZER.encode(case["text"], allow_special=True) == case["ids"]
    plain = TOKENIZER.encode(case["text"])
    assert max(plain) < TOKENIZER.num_base
    assert TOKENIZER.decode(plain) == case["text"]


@pytest.mark.parametrize("case", MINI["long_runs"]["cases"], ids=lambda case: str(case["parts"]))
def test_long_runs_are_cut(case):
    text = "".join(unit * count for unit, count in case["parts"])
    assert [len(piece) for piece in split_long_runs(text)] == case["piece_lengths"]


@given(st.text("ab \n\x1c\u2028中", max_size=60), st.integers(1, 30), st.integers(1, 9))
def test_splitting_counts_runs_like_a_loop_over_characters(text, window, run):
    pieces = []
    for low in range(0, len(text), window):
        length, piece, before = 0, "", None
        for char in text[low : low + window]:
            length = length + 1 if char.isspace() == before else 1
            before = char.isspace()
            if length > run:
                pieces.append(piece)
                piece, length = "", 1
            piece += char
        pieces.append(piece)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WINDOW_CHARS", window)
        patch.setattr(module, "MAX_RUN_CHARS", run)
        assert list(split_long_runs(text)) == pieces


@pytest.mark.parametrize("unit", [" ", "^", "a", "中", "\n", "\u0301", "'s", " \n", "A1"])
def test_a_million_characters(unit):
    # A million blanks in one call are what tiktoken itself refuses; the others stress one branch of the pattern each.
    text = unit * (1_000_000 // len(unit))
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


# The oracle: the pattern without set intersections, and BPE as its definition says: a word that is a token is that
# token, else the adjacent pair of lowest rank is merged, the leftmost first. `\s` of the Rust engine is the Unicode
# property, not Python's idea of a blank.
UPPER = r"(?:(?!\p{Han})[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])"
LOWER = r"(?:(?!\p{Han})[\p{Ll}\p{Lm}\p{Lo}\p{M}])"
LEAD, TAIL = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPACE = r"\p{White_Space}"
ORACLE = regex.compile(
    rf"\p{{Han}}+|{LEAD}{UPPER}*{LOWER}+{TAIL}|{LEAD}{UPPER}+{LOWER}*{TAIL}|\p{{N}}{{1,3}}"
    rf"| ?[^{SPACE}\p{{L}}\p{{N}}]+[\r\n]*|{SPACE}*[\r\n]+|{SPACE}+(?!\P{{White_Space}})|{SPACE}+"
)


def slow_encode(text):
    ids = []
    for word in ORACLE.findall(text):
        whole = word.encode()
        parts = [whole] if whole in RANKS else [bytes([byte]) for byte in whole]
        while True:
            pairs = [(RANKS.get(a + b, len(RANKS)), i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False))]
            rank, i = min(pairs, default=(len(RANKS), 0))
            if rank == len(RANKS):
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [RANKS[part] for part in parts]
    return ids


# Characters Python's Unicode tables know as assigned: newer ones are letters to one of the two engines only.
ASSIGNED = st.text(st.characters(exclude_categories=("Cn", "Cs", "Co")), max_size=30)


@settings(max_examples=400)
@given(WORDS | ASSIGNED)
@example("don\u2019t DON'T we'lL it'\u017f")
@example("a  b   \n\n  c \r\n")
def test_ids_equal_the_slow_oracle(text):
    assert TOKENIZER.encode(text) == slow_encode(text)


@given(st.text(max_size=40) | WORDS)
def test_text_survives_the_round_trip_and_never_becomes_special(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert all(token_id < TOKENIZER.num_base for token_id in ids)


@pytest.mark.parametrize(
    ("text", "same_as"),
    [("\ud800", "\ufffd"), ("a\udc00b", "a\ufffdb"), ("\ud83d\ude80", "🚀"), ("\ufeff\ud800", "\ufeff\ufffd")],
)
def test_surrogates(text, same_as):
    assert TOKENIZER.encode(text) == TOKENIZER.encode(same_as)
    assert TOKENIZER.encode(text, allow_special=True) == TOKENIZER.encode(same_as)


@pytest.mark.parametrize("token_id", [-1, -(10**30), 326, 331, 581, 582, 10**30, np.int32(330), np.uint64(2**64 - 1)])
def test_ids_without_text_decode_to_nothing(token_id):
    assert TOKENIZER.token_bytes(token_id) == b""
    assert TOKENIZER.decode([97, token_id, np.int64(98)]) == "ab"


def test_the_encoder_is_loaded_when_it_is_first_needed():
    code = "import sys, k3cuda.runtime.tokenizer as t; t.Tokenizer.from_dir(t.MINI_TOKENIZER_DIR).decode([97])"
    code += "; assert not {'tiktoken', 'regex'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)


def test_where_tiktoken_fails_the_error_is_ours(monkeypatch):
    """A panic of Rust is no Exception: a server's thread would end by it. Here a byte has no token, which the constructor refuses."""
    monkeypatch.setattr(module, "_check_ranks", lambda ranks, source: None)
    lacking = Tokenizer({token: rank for rank, token in enumerate(t for t in RANKS if b"z" not in t)}, {name: 400 + i for i, name in enumerate(MARKERS)})
    assert lacking.encode("the")
    for _ in range(2):
        with pytest.raises(K3Error, match="tiktoken ended at a text of 1 characters: .*; start the process again"):
            lacking.encode("z")


def test_a_changed_file_at_the_same_path_is_read_again(tmp_path):
    TOKENIZER.write_files(tmp_path)
    assert Tokenizer.from_dir(tmp_path).encode("zqzq") == list(b"zqzq")
    with (tmp_path / RANKS_FILE).open("ab") as file:
        file.write(base64.b64encode(b"zq") + b" 326\n")
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config(MARKERS, first=327)))
    assert Tokenizer.from_dir(tmp_path).encode("zqzq") == [326, 326]


def config(names, first=326):
    return {"added_tokens_decoder": {str(first + i): {"content": name} for i, name in enumerate(names)}}


LINES = MINI["tiktoken_model"].splitlines()


def without(token):
    lines = [line for line in LINES if line.split()[0] != base64.b64encode(token).decode()]
    return [f"{line.split()[0]} {rank}" for rank, line in enumerate(lines)]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        pytest.param(LINES[:300] + LINES[301:], ["325 tokens", "none of rank 300"], id="gap"),
        pytest.param([*LINES, "enp6 400"], ["none of rank 326"], id="gap before the last"),
        pytest.param([*LINES, "enp6 7"], ["line 327", "rank 7", "line 8"], id="duplicate rank"),
        pytest.param([*LINES, "dGg= 326"], ["line 327", "already has rank 256"], id="duplicate token"),
        pytest.param(without(b"\x80"), ["1 of the 256", "0x80"], id="missing byte"),
        pytest.param([*LINES, "en*6 326"], ["line 327", "en*6 326"], id="bad base64"),
        pytest.param([*LINES, "enp 326"], ["line 327"], id="base64 without padding"),
        pytest.param([*LINES, " 326"], ["line 327"], id="no token"),
        pytest.param([*LINES, "enp6"], ["line 327"], id="no rank"),
        pytest.param([*LINES, "enp6 326 1"], ["line 327"], id="three fields"),
        pytest.param([*LINES, "enp6 -1"], ["line 327"], id="negative rank"),
        pytest.param([*LINES, "enp6 3_2_6"], ["line 327"], id="underscores"),
        pytest.param([*LINES, "enp6 " + "9" * 5000], ["line 327"], id="5,000 digits, which int() refuses"),
        pytest.param([*LINES, "enp6 \u0663"], ["line 327"], id="digits of another script"),
        pytest.param([*LINES, "A" * 2_000_001 + " 326"], ["line 327", "..."], id="huge line"),
        pytest.param([], ["256 of the 256"], id="empty file"),
        pytest.param(["version https://git-lfs.github.com/spec/v1", "oid sha256:0", "size 2"], ["LFS"], id="pointer"),
        pytest.param(["<!DOCTYPE html>", "<html>"], ["an HTML or XML page"], id="web page"),
    ],
)
def test_damaged_vocabulary(tmp_path, lines, words):
    TOKENIZER.write_files(tmp_path)
    (tmp_path / RANKS_FILE).write_text("".join(f"{line}\n" for line in lines))
    check_message(tmp_path, [RANKS_FILE, *words])


def check_message(folder, words):
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_dir(folder)
    message = str(caught.value)
    assert caught.value.code == 3
    assert caught.value.hint
    assert len(message) < 400 + len(str(folder))  # a damaged file must not be poured out over the terminal
    for word in words:
        assert word in message, message


@pytest.mark.parametrize("text", ["\r\n".join([*LINES, ""]), "\n".join(LINES), "\n\n" + "\n".join(reversed(LINES))])
def test_line_ends_and_order_do_not_matter(tmp_path, text):
    TOKENIZER.write_files(tmp_path)
    (tmp_path / RANKS_FILE).write_bytes(text.encode())
    read = Tokenizer.from_dir(tmp_path)
    assert [read.token_bytes(i) for i in range(read.vocab_size)] == [TOKENIZER.token_bytes(i) for i in range(582)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["no JSON"]),
        ("\xff", ["no JSON"]),
        ("[" * 100_000, ["no JSON"]),
        ("[]", ["added_tokens_decoder"]),
        ("{}", ["added_tokens_decoder"]),
        ('{"added_tokens_decoder": {"326": "x"}}', ["'326'"]),
        ('{"added_tokens_decoder": {"326": {"content": ""}}}', ["'326'"]),
        ('{"added_tokens_decoder": {"x": {"content": "x"}}}', ["'x'"]),
        ('{"added_tokens_decoder": {"-1": {"content": "x"}}}', ["'-1'"]),
        (json.dumps(config(["a\ud800", *MARKERS])), ["'326'", r"'a\ud800'", "Unicode"]),
        (json.dumps(config([*MARKERS, "x" * 1001])), ["'330'", "1001 characters", "up to 1000"]),
        (json.dumps(config(MARKERS[:3])), ["<|end_of_msg|>"]),
        (json.dumps(config(["x", "x", *MARKERS])), ["326", "327", "'x'"]),
        (json.dumps(config([*MARKERS, "<|reserved_token_340|>"])), ["330", "340"]),
        (json.dumps(config(MARKERS, first=325)), ["has id 325", "326..581"]),
        (json.dumps(config(MARKERS, first=579)), ["has id 582", "326..581"]),
    ],
)
def test_damaged_config(tmp_path, text, words):
    TOKENIZER.write_files(tmp_path)
    (tmp_path / CONFIG_FILE).write_bytes(text.encode("latin-1"))
    check_message(tmp_path, words)


@pytest.mark.parametrize("name", [RANKS_FILE, CONFIG_FILE])
def test_missing_file(tmp_path, name):
    TOKENIZER.write_files(tmp_path)
    (tmp_path / name).unlink()
    check_message(tmp_path, [name, "No such file"])


def test_constructor_checks_what_it_is_given():
    with pytest.raises(CheckpointError, match="without gaps"):
        Tokenizer({bytes([byte]): byte + 1 for byte in range(256)}, {})
    with pytest.raises(CheckpointError, match="both named|is named"):
        Tokenizer(RANKS, {**MINI["special_tokens"], "x": 328})
    small = Tokenizer(RANKS, {name: 326 + i for i, name in enumerate(MARKERS)}, num_special=4)
    assert small.vocab_size == 330
    assert list(small.special) == list(MARKERS)
