"""Text while it arrives: half characters wait, stop strings are found wherever the pieces are cut."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from k3cuda.errors import RequestError
from k3cuda.runtime.text_stream import Answer, Delta, StopStrings, TextStream
from k3cuda.runtime.tokenizer import MINI_TOKENIZER_DIR, Tokenizer

MINI = json.loads((Path(__file__).parent / "data" / "chat" / "_tokenizer-mini.json").read_text())
TOKENIZER = Tokenizer.from_dir(MINI_TOKENIZER_DIR)

# Two letters and a few short strings over them: overlaps, prefixes and suffixes of each other come up all the time.
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)
TEXT = st.text("abc", max_size=30)


def brute_force(text, stops):
    """(text before the stop string, stop string): the match that ends first, the longest of those."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def longest_held(text, stops):
    """Longest suffix that is a proper prefix of a stop string."""
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


def cut(text, places):
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[low:high] for low, high in zip(edges, edges[1:], strict=False)]


@given(TEXT, STOPS, st.lists(st.integers(0, 40), max_size=8))
@example("aab", ["aaab", "ab"], [])
@example("abab", ["ababb", "bab"], [2])
@example("abcab", ["abcabd", "b"], [])
def test_stop_strings_equal_brute_force_for_every_cut(text, stops, places):
    finder, seen, shown = StopStrings(stops), "", ""
    for piece in cut(text, places):
        visible, hit = finder.feed(piece)
        seen, shown = seen + piece, shown + visible
        if hit is not None:
            break
        assert shown == seen[: len(seen) - longest_held(seen, stops)]
    else:
        shown += finder.flush()
    assert (shown, hit if text else None) == brute_force(text, stops)
    if hit is not None:
        assert finder.feed("more") == ("", hit)
        assert finder.flush() == ""


def test_of_two_at_one_start_the_shorter_ends_first():
    assert StopStrings(["<end>", "<en"]).feed("x<end>") == ("x", "<en")


def test_long_stop_strings_cost_no_more_than_their_text():
    # Quadratic search would need 10**11 steps here.
    finder = StopStrings(["a" * 300_000 + "b"])
    assert finder.feed("a" * 600_000) == ("a" * 300_000, None)


@pytest.mark.parametrize("stops", [[""], ["a", ""], [None], [b"a"], 5, {"a": 1}, ["a"] * 17])
def test_malformed_stop_strings(stops):
    with pytest.raises(RequestError) as caught:
        StopStrings(stops)
    assert caught.value.name == "stop_malformed"


@pytest.mark.parametrize("stops", [(), [], None])
def test_no_stop_strings(stops):
    assert StopStrings(stops).feed("text") == ("text", None)


def test_one_stop_string_is_not_taken_for_its_letters():
    assert StopStrings("ab").feed("ba") == ("b", None)


@pytest.mark.parametrize("case", MINI["stream"], ids=lambda case: case["why"][:30])
def test_golden_stream(case):
    stream = TextStream(TOKENIZER)
    assert [TOKENIZER.token_bytes(token_id).hex() for token_id in case["ids"]] == case["token_bytes_hex"]
    shown = [stream.feed(token_id).content for token_id in case["ids"]]
    # A character is shown with its last byte: what was shown is always the text of the whole characters so far.
    for count in range(1, len(shown) + 1):
        so_far = b"".join(bytes.fromhex(data) for data in case["token_bytes_hex"][:count])
        assert "".join(shown[:count]) in (so_far.decode("utf-8", "ignore"), case["text"])
    assert "".join(shown) + stream.finish().content == case["text"]
    assert stream.result() == Answer(None, case["text"])


# Bytes of every kind, so that characters are begun, broken off and mixed up; and ids that have no text.
IDS = st.lists(
    st.sampled_from([*range(0, 582, 7), 0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 323, 324, 325, 329, 331, 400, 900]), max_size=30
)


@given(IDS)
def test_streamed_text_is_the_decoded_text(ids):
    stream = TextStream(TOKENIZER)
    shown = "".join(stream.feed(token_id).content for token_id in ids)
    assert TOKENIZER.decode(ids).startswith(shown)
    assert shown + stream.finish().content == TOKENIZER.decode(ids)
    assert stream.finish() == Delta()


@given(st.text("abé中", max_size=20), st.lists(st.text("abé中", min_size=1, max_size=3), max_size=3))
def test_the_stop_is_reported_with_the_token_that_completes_it(text, stops):
    ids = TOKENIZER.encode(text)
    stream, shown, used = TextStream(TOKENIZER, stops), "", 0
    for used, token_id in enumerate(ids, 1):  # noqa: B007
        shown += stream.feed(token_id).content
        if stream.stop_reason is not None:
            break
    shown += stream.finish().content
    assert (shown, stream.stop_reason) == brute_force(text, stops)
    if stream.stop_reason is not None:
        assert brute_force(TOKENIZER.decode(ids[: used - 1]), stops)[1] is None
        assert stream.feed(97) == stream.finish() == Delta()
    assert stream.result().content == shown


def test_ids_behind_the_stop_are_left_alone():
    stream = TextStream(TOKENIZER, ["b"])
    ids = iter([97, 98, 99])
    assert stream.feed_ids(ids) == [Delta("a")]
    assert (stream.stop_reason, stream.result().content) == ("b", "a")


def test_a_stop_string_can_end_in_a_broken_character():
    stream = TextStream(TOKENIZER, ["a\ufffd"])
    assert stream.feed_ids([120, 97, 0xF0]) == [Delta("x")]
    assert (stream.finish(), stream.stop_reason, stream.result().content) == (Delta(), "a\ufffd", "x")
