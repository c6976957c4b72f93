"""Rendering conversations: the goldens, the rules they do not reach, and whatever a caller may send by mistake."""

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3cuda.errors import RequestError
from k3cuda.runtime.chat import Segment, encode_chat, render
from k3cuda.runtime.tokenizer import MINI_TOKENIZER_DIR, MARKERS, Tokenizer

GOLDENS = [json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "data/chat").glob("[0-9]*.json"))]
TOKENIZER = Tokenizer.from_dir(MINI_TOKENIZER_DIR)


def goldens(kind):
    return [
        pytest.param(golden["input"], golden["expected"], id=golden["id"])
        for golden in GOLDENS
        if golden["kind"] == kind
    ]


def text_of(messages, tools=None, **options):
    """Text of the conversation alone, markers shortened: [x] for an opening tag, [/x] for a closing one."""
    options = {"thinking_effort": None, "add_generation_prompt": False, **options}
    text = "".join(segment.text for segment in render(messages, tools, **options))
    text = text.replace("<|close|>message<|sep|><|end_of_msg|>", "[.]")
    return text.replace("<|open|>", "[").replace("<|close|>", "[/").replace("<|sep|>", "]")


def assistant(**fields):
    return [{"role": "assistant", "content": "", **fields}]


def call(name="f", arguments=None, **fields):
    return {"function": {"name": name, "arguments": arguments}, **fields}


@pytest.mark.parametrize(("given", "expected"), goldens("render"))
def test_golden(given, expected):
    before = copy.deepcopy(given)
    segments = render(given["messages"], given["tools"], **given["options"])
    assert segments == [Segment(text, special) for text, special in expected["segments"]]
    assert "".join(segment.text for segment in segments) == expected["text"]
    assert encode_chat(TOKENIZER, given["messages"], given["tools"], **given["options"]) == expected["mini_token_ids"]
    assert given == before


@pytest.mark.parametrize(("given", "expected"), goldens("render-error"))
def test_golden_error(given, expected):
    with pytest.raises(RequestError) as caught:
        render(given["messages"], given["tools"], **given["options"])
    assert caught.value.name == expected["error"]


def test_effort_is_max_unless_said_otherwise():
    assert "thinking_effort=max" in text_of([], thinking_effort="max")
    assert render([]) == render([], thinking_effort="max", thinking=True, add_generation_prompt=True)
    assert text_of([], thinking=True, thinking_effort=None) == ""


@pytest.mark.parametrize(
    ("fields", "think"),
    [
        ({"reasoning_content": "a"}, "a"),
        ({"reasoning": "b"}, "b"),
        ({"reasoning_content": "a", "reasoning": "b"}, "a"),
        ({"reasoning_content": None, "reasoning": "b"}, "b"),
        ({"reasoning_content": "", "reasoning": "b"}, "b"),
        ({"reasoning_content": " \n\t"}, ""),
        ({}, ""),
    ],
)
def test_think_channel(fields, think):
    assert text_of(assistant(**fields)) == f'[message role="assistant"][think]{think}[/think][response][/response][.]'
    assert text_of(assistant(**fields), thinking=False) == '[message role="assistant"][response][/response][.]'


@pytest.mark.parametrize(
    "content",
    [["a", "b"], [{"type": "text", "text": "a"}, {"type": "input_text", "text": ""}, {"type": "text", "text": "b"}]],
)
def test_parts_are_joined_with_nothing_but_encoded_apart(content):
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    segments = render([{"role": "user", "content": content}], thinking_effort=None, add_generation_prompt=False)
    assert [segment.text for segment in segments][-6:] == [
        "a",
        "b",
        "<|close|>",
        "message",
        "<|sep|>",
        "<|end_of_msg|>",
    ]


def test_no_content_is_empty_and_developer_is_system():
    assert text_of([{"role": "developer", "content": None}]) == '[message role="system"][.]'
    assert text_of([{"role": "user", "content": [], "name": ""}]) == '[message role="user"][.]'


def test_placeholder_of_the_vision_model_is_text():
    text = "see <|kimi_image_placeholder|>"
    assert Segment(text, False) in render([{"role": "user", "content": text}])


def test_tools_without_entries_are_none():
    assert text_of([{"role": "system", "content": "s", "tools": []}], []) == '[message role="system"]s[.]'


def test_keys_of_tools_are_sorted_at_every_level_and_lists_are_not():
    tools = [{"type": "x", "z": [{"b": 1, "a": [3, 1, {"d": 0, "c": 0}]}], "é": None}]
    assert '[{"type":"x","z":[{"a":[3,1,{"c":0,"d":0}],"b":1}],"é":null}]' in text_of([], tools)


@pytest.mark.parametrize(
    ("arguments", "elements"),
    [
        ('{"a": 1, "a": 2}', '[argument key="a" type="number"]2[/argument]'),
        ("{oops", '[json type="object"]{oops[/json]'),
        (
            ' {"b": [], "a": {}}',
            '[argument key="b" type="array"][[][/argument][argument key="a" type="object"]{}[/argument]',
        ),
        ({"x": True}, '[argument key="x" type="boolean"]true[/argument]'),
        (None, ""),
        ({}, ""),
    ],
)
def test_arguments(arguments, elements):
    text = text_of(assistant(tool_calls=[call("f", arguments)]))
    elements = elements.replace("[[]", "[]")  # a list, not a tag
    assert f'[tools][call tool="f" index="1"]{elements}[/call][/tools][.]' in text


def test_call_without_function_object():
    assert '[call tool="f" index="1"][argument key="a"' in text_of(
        assistant(tool_calls=[{"name": "f", "arguments": {"a": 1}}])
    )


def results(*messages, calls=(("a", "first"), ("b", "second"))):
    turn = assistant(tool_calls=[call(name, id=call_id) for call_id, name in calls])
    text = text_of(turn + [{"role": "tool", "content": "", **message} for message in messages])
    return [tuple(part.split('"')[0:3:2]) for part in text.split('[message role="tool" tool="')[1:]]


def test_results_take_order_and_name_of_their_calls():
    assert results({"tool_call_id": "b", "name": "own"}, {"tool_call_id": "a"}) == [("first", "1"), ("second", "2")]
    assert results({"id": "b"}, {"id": "a"}) == [("first", "1"), ("second", "2")]
    assert results({"tool_call_id": "b"}) == [("second", "1")]


def test_first_of_duplicate_call_ids_wins():
    calls = (("a", "first"), ("a", "second"), ("b", "third"))
    named = results({"tool_call_id": "b"}, {"tool_call_id": "a"}, {"tool_call_id": "a"}, calls=calls)
    assert named == [("first", "1"), ("first", "2"), ("third", "3")]


def test_one_unmatched_id_leaves_the_run_as_given():
    assert results({"tool_call_id": "b"}, {"tool_call_id": "x", "name": "own"}) == [("first", "1"), ("own", "2")]


def test_ids_may_be_numbers():
    assert results({"tool_call_id": "2"}, {"tool_call_id": 1}, calls=((1, "first"), (2, "second")))[0] == ("first", "1")


def test_index_counts_through_a_turn_and_not_through_a_run():
    tool = {"role": "tool", "content": "", "name": "t"}
    text = text_of([*assistant(), tool, {"role": "user", "content": "q"}, tool])
    assert 'tool="t" index="1"' in text
    assert 'tool="t" index="2"' in text


@pytest.mark.parametrize(
    ("response_format", "end"),
    [
        ({"type": "text"}, ""),
        ({"type": "json_schema", "json_schema": {"type": "object"}}, '```json\n{"type":"object"}\n```[.]'),
        ({"type": "json_schema", "json_schema": {"schema": {"b": 1, "a": 2}}}, '```json\n{"a":2,"b":1}\n```[.]'),
    ],
)
def test_response_format(response_format, end):
    text = text_of([], response_format=response_format, tool_choice="auto")
    assert text.endswith(end)
    assert bool(text) == bool(end)


def deep(levels=100_000):
    value = []
    for _ in range(levels):
        value = [value]
    return value


CYCLE: dict = {}
CYCLE["self"] = CYCLE
USER = {"role": "user", "content": "q"}


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("messages_malformed", None),
        ("messages_malformed", "hello"),
        ("messages_malformed", {"role": "user", "content": "q"}),
        ("messages_malformed", ["hello"]),
        ("messages_malformed", [None]),
        ("unknown_role", [{}]),
        ("unknown_role", [{"content": "q"}]),
        ("unknown_role", [{"role": "User", "content": "q"}]),
        ("unknown_role", [{"role": "function", "content": "q"}]),
        ("unknown_role", [{"role": deep(), "content": "q"}]),
        ("content_malformed", [{"role": "user"}]),
        ("content_malformed", [{"role": "tool", "name": "t"}]),
        ("content_malformed", [{"role": "user", "content": 3}]),
        ("content_malformed", [{"role": "user", "content": {"type": "text", "text": "q"}}]),
        ("content_malformed", [{"role": "user", "content": ["q"]}]),
        ("content_malformed", [{"role": "user", "content": deep()}]),
        ("content_malformed", [{"role": "user", "content": [{"type": "text"}]}]),
        ("content_malformed", [{"role": "user", "content": [{"type": "text", "text": None}]}]),
        ("content_malformed", assistant(content=b"q")),
        ("image_unsupported", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("image_unsupported", [{"role": "tool", "name": "t", "content": [{"type": "image"}]}]),
        ("part_unsupported", [{"role": "user", "content": [{"type": "video_url"}]}]),
        ("part_unsupported", [{"role": "user", "content": [{"text": "q"}]}]),
        ("name_malformed", [{**USER, "name": 3}]),
        ("name_malformed", [{"role": "tool", "content": "", "name": ["x"]}]),
        ("reasoning_malformed", assistant(reasoning_content=["x"])),
        ("tool_calls_malformed", assistant(tool_calls={"name": "f"})),
        ("tool_calls_malformed", assistant(tool_calls=["f"])),
        ("tool_calls_malformed", assistant(tool_calls=[{}])),
        ("tool_calls_malformed", assistant(tool_calls=[{"function": None}])),
        ("tool_calls_malformed", assistant(tool_calls=[call("")])),
        ("tool_calls_malformed", assistant(tool_calls=[call(3)])),
        ("tool_call_id_malformed", assistant(tool_calls=[call(id=[1])])),
        ("tool_call_id_malformed", assistant(tool_calls=[call(id=True)])),
        ("tool_call_id_malformed", [{"role": "tool", "content": "", "tool_call_id": {}}]),
        ("number_too_long", [{"role": "tool", "content": "", "tool_call_id": 10**5000}]),
        ("arguments_not_object", assistant(tool_calls=[call(arguments="[1]")])),
        ("arguments_not_object", assistant(tool_calls=[call(arguments="null")])),
        ("arguments_not_object", assistant(tool_calls=[call(arguments=[1])])),
        ("arguments_not_object", assistant(tool_calls=[call(arguments={1: 2})])),
        ("not_json", assistant(tool_calls=[call(arguments={"a": {1, 2}})])),
        ("not_json", assistant(tool_calls=[call(arguments=CYCLE)])),
        ("nesting_too_deep", assistant(tool_calls=[call(arguments={"a": deep()})])),
        ("nesting_too_deep", assistant(tool_calls=[call(arguments='{"a":' * 100_000)])),
        ("number_too_long", assistant(tool_calls=[call(arguments={"a": 10**5000})])),
        ("number_too_long", assistant(tool_calls=[call(arguments='{"a": 1%s}' % ("0" * 5000))])),
        ("unresolvable_tool_name", [*assistant(tool_calls=[call()]), *[{"role": "tool", "content": ""}] * 2]),
        ("tools_malformed", [{"role": "system", "tools": "x"}]),
        ("nesting_too_deep", [{"role": "system", "tools": [{"x": deep()}]}]),
    ],
)
def test_malformed_messages(name, messages):
    check_error(name, messages)


def check_error(name, messages, **options):
    with pytest.raises(RequestError) as caught:
        render(messages, **options)
    assert caught.value.name == name, caught.value
    assert caught.value.code == 2
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tools_malformed", {"tools": {"type": "function"}}),
        ("tools_malformed", {"tools": ["f"]}),
        ("tools_malformed", {"tools": [{"type": "function", "function": {}}]}),
        ("tools_malformed", {"tools": [{"type": "function", "function": "f"}]}),
        ("nesting_too_deep", {"tools": [{"x": deep()}]}),
        ("not_json", {"tools": [{"x": object()}]}),
        ("not_json", {"tools": [{"x": 1, 2: 3}]}),
        ("unknown_effort", {"thinking_effort": "medium"}),
        ("unknown_effort", {"thinking_effort": ["max"]}),
        ("unknown_effort", {"thinking_effort": deep()}),
        ("unknown_tool_choice", {"tool_choice": "always"}),
        ("unknown_tool_choice", {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
        ("unknown_response_format", {"response_format": "json_object"}),
        ("unknown_response_format", {"response_format": {}}),
        ("unknown_response_format", {"response_format": {"type": "xml"}}),
        ("response_schema_malformed", {"response_format": {"type": "json_schema"}}),
        ("response_schema_malformed", {"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}}),
        ("nesting_too_deep", {"response_format": {"type": "json_schema", "json_schema": {"x": deep()}}}),
    ],
)
def test_malformed_options(name, options):
    check_error(name, [USER], **options)


def test_huge_input_is_rendered():
    # Far above any context, so that length is refused by who knows the context and not by accident here.
    text = "x" * 3_000_000
    messages = [{"role": "user", "content": text}, *[USER] * 20_000]
    assert sum(segment.text == text for segment in render(messages)) == 1


FORGED = st.lists(
    st.sampled_from([*MARKERS, "message", ' role="', '"', "&quot;", "think", "é", "\ud800"]), max_size=8
).map("".join)


@given(st.data())
def test_text_of_a_caller_never_becomes_a_marker(data):
    text = lambda: data.draw(FORGED)  # noqa: E731
    messages = [
        {"role": "system", "content": text(), "name": text()},
        {"role": "user", "content": [{"type": "text", "text": text()}, {"type": "text", "text": text()}]},
        *assistant(content=text(), reasoning=text(), tool_calls=[call("f" + text(), {text(): text(), "l": [text()]})]),
        {"role": "tool", "content": text(), "tool": text() + "t"},
        *assistant(tool_calls=[call("f", "{" + text())]),
    ]
    tools = [{"function": {"name": "f", "description": text()}}]
    segments = render(messages, tools)
    ids = encode_chat(TOKENIZER, messages, tools)
    special = [TOKENIZER.special[segment.text] for segment in segments if segment.special]
    assert [token_id for token_id in ids if token_id >= TOKENIZER.num_base] == special
    # And the structure is that of harmless text: seven messages, each ended once, and one left open.
    assert special.count(TOKENIZER.end_of_msg_id) == 7
    assert all(segment.text in MARKERS for segment in segments if segment.special)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats()
    | st.sampled_from(["", "x", "text", "user", "tool", "{}"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                "role content name tools tool_calls function arguments id tool_call_id reasoning type text".split()
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "x"])},
    optional={"content": JSON, "name": JSON, "tools": JSON, "reasoning": JSON, "tool_call_id": JSON}
    | {
        "tool_calls": JSON
        | st.lists(st.fixed_dictionaries({"name": st.just("f")}, optional={"id": JSON, "arguments": JSON}))
    },
)


@settings(max_examples=300)
@given(st.lists(MESSAGE, max_size=4) | JSON, JSON, JSON | st.sampled_from(["none", "required"]), JSON)
def test_anything_is_rendered_or_refused(messages, tools, tool_choice, response_format):
    try:
        segments = render(messages, tools, tool_choice=tool_choice, response_format=response_format)
    except RequestError as error:
        assert error.name.replace("_", "").isalpha()
    else:
        assert all(isinstance(text, str) and text for text, _ in segments)
