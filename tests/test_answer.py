"""Answers read back from token ids: goldens, every cut, every way the model may get the grammar wrong."""

import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from k3cuda.runtime.answer import AnswerParser, random_call_id
from k3cuda.runtime.chat import encode_chat, render
from k3cuda.runtime.text_stream import Answer, Delta
from k3cuda.runtime.tokenizer import MINI_TOKENIZER_DIR, MARKERS, Tokenizer

GOLDENS = [json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "data/chat").glob("8*.json"))]
TOKENIZER = Tokenizer.from_dir(MINI_TOKENIZER_DIR)
END = "<|close|>message<|sep|><|end_of_msg|>"


def ids_of(text):
    """Ids of text with markers; [x] and [/x] are short for tags."""
    return TOKENIZER.encode(text.replace("[/", "<|close|>").replace("[", "<|open|>").replace("]", "<|sep|>"), True)


def parser(thinking=True, **options):
    numbers = itertools.count(1)
    return AnswerParser(TOKENIZER, thinking, make_call_id=lambda: f"call_{next(numbers)}", **options)


def read(ids, **options):
    """The answer, after checking that what was streamed adds up to it."""
    stream = parser(**options)
    deltas = [*(stream.feed(token_id) for token_id in ids), stream.finish()]
    answer = stream.result()
    assert "".join(delta.content for delta in deltas) == (answer.content or "")
    assert "".join(delta.reasoning for delta in deltas) == (answer.reasoning or "")
    assert tuple(call for delta in deltas for call in delta.tool_calls) == answer.tool_calls
    assert stream.finish() == stream.feed(97) == Delta()
    return answer


def brief(answer):
    return answer.reasoning, answer.content, [(call.name, call.arguments) for call in answer.tool_calls]


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden["id"])
def test_golden(golden):
    given, expected = golden["input"], golden["expected"]
    answer = read(TOKENIZER.encode(given["generated"], allow_special=True), thinking=given["thinking"])
    calls = [(call["name"], call["arguments"]) for call in expected["tool_calls"]]
    assert brief(answer) == (expected["reasoning_content"], expected["content"], calls)


CALL = '[call tool="f" index="1"][argument key="a" type="string"]x[/argument][/call]'
FULL = f"r[/think][response]c[/response][tools]{CALL}[/tools]{END}"


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        pytest.param(FULL, "r", "c", 1, id="all of it"),
        pytest.param("r", "r", None, 0, id="cut in think"),
        pytest.param("r<|close|>", "r", None, 0, id="cut after a marker"),
        pytest.param("r<|close|>thi", "r", None, 0, id="cut inside a tag"),
        pytest.param("r<|close|>think<|sep|><|open|>resp", "r", None, 0, id="cut inside the next tag"),
        pytest.param("r[/think][response]c<|close|>response", "r", "c", 0, id="cut before sep"),
        pytest.param(f"r[/think][response]c{END}", "r", "c", 0, id="response not closed"),
        pytest.param("r[/think][response]c<|end_of_msg|>x", "r", "c", 0, id="nothing closed"),
        pytest.param(f"r[/think][tools]{CALL}[/tools]{END}", "r", None, 1, id="tools right after think"),
        pytest.param(f"r[tools]{CALL}[/tools]{END}", "r", None, 1, id="think not closed before tools"),
        pytest.param(f"r[response]c{END}", "r", "c", 0, id="think not closed before response"),
        pytest.param(f"[/think][response]c[tools]{CALL}{END}", None, "c", 1, id="tools not closed"),
        pytest.param(f"[/think][response]c[/response]{CALL}{END}", None, "c", 1, id="tools not opened"),
        pytest.param(f"[/think][tools]{CALL}{CALL}[/tools]", None, None, 2, id="two calls"),
        pytest.param('[/think][tools][call tool="f"][/tools]', None, None, 1, id="call closed by tools"),
        pytest.param(
            '[/think][tools][call tool="f"][call tool="g"]<|end_of_msg|>', None, None, 2, id="calls not closed"
        ),
        pytest.param(
            '[/think][tools][call tool="f"][argument key="a" type="string"]x', None, None, 0, id="cut in value"
        ),
        pytest.param('[/think][tools][call tool="f"]', None, None, 0, id="cut in call"),
        pytest.param(
            f'[/think][tools][call tool="f"][argument key="a"]x{END}', None, None, 0, id="argument not closed"
        ),
        pytest.param(
            '[/think][tools][call][/call][call index="1"][/call][/tools]', None, None, 0, id="calls without name"
        ),
        pytest.param("r[/response][think]s[/think]\n[response]c", "rs", "c", 0, id="tags without meaning are dropped"),
        pytest.param("r[/think]lost[response]c[/response]lost", "r", "c", 0, id="text between channels is dropped"),
        pytest.param("[/think][response]a[/response][response]b[/response]", None, "ab", 0, id="two responses"),
        pytest.param(
            "a[x]b[/think more]c]d<|open|><|close|>e", "axbthink morecde", None, 0, id="no tag: markers dropped"
        ),
        pytest.param("[call me maybe]", "call me maybe", None, 0, id="no attributes"),
        pytest.param('[message role="x"]', 'message role="x"', None, 0, id="attributes where none belong"),
        pytest.param(END + FULL, None, None, 0, id="nothing counts after the end"),
        pytest.param(
            "[/think][response]<|media_pad|>c<|reserved_token_400|>", None, "c", 0, id="special ids show nothing"
        ),
    ],
)
def test_grammar(text, reasoning, content, calls):
    answer = read(ids_of(text))
    assert (answer.reasoning, answer.content, len(answer.tool_calls)) == (reasoning, content, calls)


def test_thinking_off_begins_in_the_response():
    assert brief(read(ids_of(f"c[/response][tools]{CALL}[/tools]{END}"), thinking=False)) == (
        None,
        "c",
        [("f", {"a": "x"})],
    )
    assert brief(read(ids_of("[think]r[/think][response]c"), thinking=False)) == ("r", "c", [])


def test_markers_spelled_by_ordinary_ids_are_text():
    spelled = "".join(MARKERS) + "<|close|>think<|sep|>"
    ids = TOKENIZER.encode(spelled) + ids_of("[/think][response]") + TOKENIZER.encode(spelled)
    assert brief(read(ids)) == (spelled, spelled, [])


def test_markers_inside_an_argument():
    value = "[/think]<|open|>x<|sep|>[/call]y"  # only the nearest closing of the argument itself has a meaning here
    answer = read(ids_of(f'[/think][tools][call tool="f"][argument key="a" type="string"]{value}[/argument][/call]'))
    assert brief(answer) == (None, None, [("f", {"a": "xy"})])


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("string", "3", "3"),
        ("string", "", ""),
        ("number", "3", 3),
        ("number", "-0.0", -0.0),
        ("number", "three", "three"),
        ("number", "NaN", "NaN"),
        ("number", "1e999", "1e999"),
        ("number", "9" * 5000, "9" * 5000),
        ("boolean", "true", True),
        ("boolean", "True", "True"),
        ("null", "null", None),
        ("array", "{1: 2}", "{1: 2}"),
        ("object", "1e99999", "1e99999"),
        ("object", "", ""),
        ("unheard-of", '"x"', "x"),
    ],
)
def test_argument_values(kind, text, value):
    ids = ids_of(f'[/think][tools][call tool="f"][argument key="k" type="{kind}"]{text}[/argument][/call]')
    (call,) = read(ids).tool_calls
    assert call.arguments == {"k": value}
    assert type(call.arguments["k"]) is type(value)
    assert json.loads(call.arguments_json, parse_constant=pytest.fail) == {"k": value}


def argument(value):
    """Ids of a call whose argument is `value`, a list or object, as JSON text; brackets in it are no tags."""
    return [
        *ids_of('[/think][tools][call tool="f"][argument key="k" type="array"]'),
        *TOKENIZER.encode(value),
        *ids_of('[/argument][argument key="é" type="string"]é[/argument][/call]'),
    ]


@pytest.mark.parametrize(
    "value", ["[" * 100_000, "[" * 900 + "]" * 900, "[" * 5000 + "]" * 5000, '["\\ud800"]', "[1, Infinity]"]
)
def test_arguments_that_are_hard_to_send_on(value):
    (call,) = read(argument(value)).tool_calls
    assert call.arguments["é"] == "é"
    assert call.arguments_json.encode()  # no lone surrogate in it
    if len(value) < 100:
        assert json.loads(call.arguments_json, parse_constant=pytest.fail)["é"] == "é"


def test_json_of_arguments_is_not_ascii_escaped_and_keeps_the_order():
    assert read(argument('["中", 1e2]')).tool_calls[0].arguments_json == '{"k": ["中", 100.0], "é": "é"}'


@pytest.mark.parametrize(
    ("raw", "arguments", "text"),
    [('{"a": 1}', {"a": 1}, '{"a": 1}'), ("{oops", {}, "{oops"), ("3", {}, "3"), ("", {}, "")],
)
def test_json_element(raw, arguments, text):
    ids = (
        ids_of('[/think][tools][call tool="f"][json type="object"]') + TOKENIZER.encode(raw) + ids_of("[/json][/call]")
    )
    (call,) = read(ids).tool_calls
    assert (call.arguments, call.arguments_json) == (arguments, text)


def test_call_ids():
    assert [call.id for call in read(ids_of(f"[tools]{CALL}{CALL}")).tool_calls] == ["call_1", "call_2"]
    assert random_call_id() != random_call_id()
    assert random_call_id().startswith("call_")


def test_a_runaway_header_becomes_text_again():
    # Longer than any header, so that a marker by accident does not swallow the rest of the answer.
    text = 'call tool="' + "x" * 5000
    assert read(ids_of(f"a[{text}")).reasoning == "a" + text


def test_half_characters_wait_and_do_not_cross_channels():
    stream = parser()
    assert stream.feed_ids([324, 154]) == []
    assert stream.feed_ids([128]) == [Delta(reasoning="🚀")]
    assert stream.feed_ids([324, *ids_of("[/think][response]"), 154, 128]) == [
        Delta(reasoning="\ufffd"),
        Delta("\ufffd"),
        Delta("\ufffd"),
    ]


def test_reasoning_tokens_are_those_of_its_text():
    assert read(ids_of("abc<|media_pad|>[/think][response]de")).num_reasoning_tokens == 4
    assert read(ids_of("a<|open|>bc")).num_reasoning_tokens == 3
    assert read(ids_of("abc"), thinking=False).num_reasoning_tokens == 0


# Structured answers: whatever is rendered as an assistant's message is read back from its ids.
TEXT = st.text("ab é中<|>&\"'=[]{}\n\ud7ff🚀", max_size=12) | st.sampled_from(MARKERS)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
NAME = TEXT.filter(bool)
CALLS = st.lists(st.tuples(NAME, st.dictionaries(TEXT, VALUE, max_size=3)), max_size=3)


@settings(max_examples=200)
@given(TEXT, TEXT, CALLS)
@example("", "", [('&quot;"&', {'"&quot;': -0.0})])
def test_a_rendered_message_is_read_back(reasoning, content, calls):
    message = {"role": "assistant", "reasoning_content": reasoning, "content": content}
    message["tool_calls"] = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    opening = len(encode_chat(TOKENIZER, []))  # the effort line and the opening, which the model continues
    ids = encode_chat(TOKENIZER, [message], add_generation_prompt=False)[opening:]
    answer = read(ids)
    assert brief(answer) == (reasoning if reasoning.strip() else None, content or None, calls)
    for call in answer.tool_calls:
        assert json.loads(call.arguments_json) == call.arguments
        for value in call.arguments.values():
            assert value != 0 or not isinstance(value, float) or math.copysign(1, value)
    # Sent back as a client would, it is the same prompt again.
    echo = [{"function": {"name": call.name, "arguments": call.arguments_json}} for call in answer.tool_calls]
    assert render([{**message, "tool_calls": echo}]) == render([message])


MARKER_IDS = [TOKENIZER.special[name] for name in MARKERS]
WORDS = [ids_of(word) for word in "think response tools call argument json message [/think] [response] [tools]".split()]
WORDS += [
    ids_of(text)
    for text in ('[call tool="f"]', '[argument key="k"]', "[/argument]", "[/call]", ' key="', '"', " ", "a")
]
SOUP = st.lists(
    st.sampled_from([*([token_id] for token_id in [*MARKER_IDS[:3], 324, 154, 128, 400]), *WORDS, [328]]), max_size=25
)


@settings(max_examples=300)
@given(
    SOUP,
    st.booleans(),
    st.lists(st.integers(0, 60), max_size=6),
    st.lists(st.sampled_from(["a", "th", "aa"]), max_size=2),
)
def test_any_ids_cut_anywhere(soup, thinking, places, stops):
    ids = list(itertools.chain(*soup))
    whole = read(ids, thinking=thinking, stop=stops)
    assert not any(marker in repr(whole) for marker in MARKERS)
    stream, deltas = parser(thinking, stop=stops), []
    edges = [0, *sorted(place % (len(ids) + 1) for place in places), len(ids)]
    for low, high in zip(edges, edges[1:], strict=False):
        deltas += stream.feed_ids(ids[low:high])
        so_far = stream.result()
        assert (whole.content or "").startswith(so_far.content or "")  # nothing is taken back
        assert (whole.reasoning or "").startswith(so_far.reasoning or "")
        assert whole.tool_calls[: len(so_far.tool_calls)] == so_far.tool_calls
    deltas.append(stream.finish())
    assert stream.result() == whole
    assert "".join(delta.content for delta in deltas) == (whole.content or "")


@given(
    st.text("ab", max_size=12),
    st.text("abé", max_size=12),
    st.lists(st.text("abé", min_size=1, max_size=3), max_size=3),
)
def test_stop_strings_are_searched_in_content_only(reasoning, content, stops):
    ids = TOKENIZER.encode(reasoning) + ids_of("[/think][response]") + TOKENIZER.encode(content)
    ids += ids_of(f"[/response][tools]{CALL}[/tools]{END}")
    stream, used = parser(stop=stops), 0
    for used, token_id in enumerate(ids, 1):  # noqa: B007
        stream.feed(token_id)
        if stream.stop_reason is not None:
            break
    ends = [(content.find(stop) + len(stop), -len(stop)) for stop in stops if stop in content]
    end, length = min(ends, default=(len(content), 0))
    stopped = content[: end + length]
    assert stream.stop_reason == (content[end + length : end] if ends else None)
    assert brief(stream.result()) == (reasoning or None, stopped or None, [] if ends else [("f", {"a": "x"})])
    if ends:  # no earlier token completed it
        before = TOKENIZER.decode(ids[: used - 1])[len(reasoning) + len("thinkresponse") :]
        assert not any(stop in before for stop in stops)
        assert stream.feed(97) == stream.finish() == Delta()


def test_a_stop_string_begun_but_not_completed_is_shown():
    stream = parser(stop=["cat"])
    assert stream.feed_ids(ids_of("ca[/think][response]xca"))[-1] == Delta("x")
    assert stream.feed_ids(ids_of("[/response]")) == [Delta("ca")]
    assert stream.feed_ids(ids_of("[response]t")) == [Delta("t")]
    assert (stream.stop_reason, stream.result()) == (None, Answer("ca", "xcat", (), 2))


def test_a_stop_string_can_end_in_a_broken_character():
    stream = parser(thinking=False, stop=["a\ufffd"])
    assert stream.feed_ids([120, 97, 0xF0]) == [Delta("x")]
    assert stream.feed_ids(ids_of(f"[tools]{CALL}")) == []
    assert (stream.stop_reason, stream.result()) == ("a\ufffd", Answer(None, "x"))
