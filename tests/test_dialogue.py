"""A conversation whose state is kept: each turn runs what is new and nothing else, and answers as without."""
import pytest
from fake_backend import FakeBackend
from scripted import CLOSED, THOUGHT, TOKENIZER, fake  # noqa: F401, the fixture

from k3cuda import LLM, SamplingParams
from k3cuda.runtime.chat import close_answer, encode_chat, encode_segments
from k3cuda.runtime.dialogue import Dialogue
from k3cuda.runtime.sampling import SamplingParams as Params

EOM = TOKENIZER.end_of_msg_id


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, allow_special=True)


def turn(llm, dialogue, text: str, effort="none", most=None, **params):
    """One turn, broken off behind `most` tokens: (prompt tokens, how many of them were run, ids of the answer)."""
    dialogue.add({"role": "user", "content": text})
    ids, content, reasoning, whole = [], "", "", None
    rows = sum(getattr(llm.backend, "row_counts", ()))
    with llm.stream_chat(dialogue, SamplingParams(**{"seed": 3, "max_tokens": 20} | params), reasoning_effort=effort) as answer:
        for chunk in answer:
            ids += chunk.token_ids
            content, reasoning, whole = content + chunk.text, reasoning + chunk.reasoning, chunk.output
            if len(ids) == most:
                break
    prompt = len(dialogue._prompt)
    dialogue.answer(ids, content, reasoning)
    if whole is None:
        return prompt, None, ids
    run = prompt - whole.stats.cached_tokens
    if isinstance(llm.backend, FakeBackend):   # what is said to be run is what ran
        assert sum(llm.backend.row_counts) - rows == run + len(ids) - 1
    return prompt, run, ids


def new_tokens(text: str, channel="response") -> int:
    """What a turn behind an answer cut in `channel` has to run: the last token drawn, the end of that message, the question, the opening."""
    return 1 + len(encode_segments(TOKENIZER, close_answer(channel))) + len(asked(text, channel == "think"))


def asked(text: str, thinking=False) -> list[int]:
    return encode_chat(TOKENIZER, [{"role": "user", "content": text}], thinking=thinking, thinking_effort=None)


@pytest.mark.parametrize("effort, channel", [("none", "response"), ("low", "think")])
def test_a_turn_runs_nothing_of_the_conversation_before_it(fake, effort, channel):  # noqa: F811
    llm = fake("x" * 100, num_slots=3, prefix_cache=2, eos_ids=(), max_model_len=2048)
    dialogue, runs = Dialogue(TOKENIZER, [{"role": "system", "content": "s" * 200}]), []
    for text in ("one", "two and more", "three " * 30, "4"):
        runs.append(turn(llm, dialogue, text, effort)[:2])
        want = runs[-1][0] if len(runs) == 1 else new_tokens(text, channel)
        assert runs[-1][1] == want, (text, runs)
    assert runs[-1][0] > 400 > 60 > runs[-1][1]


def test_an_answer_that_ended_by_itself_leaves_only_the_question(fake):  # noqa: F811
    llm = fake(THOUGHT + "well" + CLOSED, num_slots=3, prefix_cache=2)
    dialogue = Dialogue(TOKENIZER)
    turn(llm, dialogue, "one", "max", max_tokens=50)
    assert dialogue.messages[-1] == {"role": "assistant", "content": "well", "reasoning_content": "why not"}
    prompt, run, _ = turn(llm, dialogue, "two", "max", max_tokens=50)
    assert run == 1 + len(asked("two", thinking=True))
    # Text that the tokenizer would cut as the model did is one prompt, whichever way it was made.
    assert prompt == len(encode_chat(TOKENIZER, dialogue.messages[:3], thinking=True, thinking_effort="max"))


def test_ids_stay_as_drawn_though_the_tokenizer_would_cut_the_text_otherwise(fake):  # noqa: F811
    drawn = [TOKENIZER.encode(c)[0] for c in "hello"]
    assert len(TOKENIZER.encode("hello")) < len(drawn)
    llm = fake(num_slots=3, prefix_cache=2)
    llm.backend.script = [*drawn, *ids_of(CLOSED)]
    dialogue = Dialogue(TOKENIZER)
    turn(llm, dialogue, "one")
    assert dialogue.messages[-1]["content"] == "hello"
    dialogue.add({"role": "user", "content": "two"})
    prompt = dialogue.prompt_ids(tools=None, thinking=False, thinking_effort=None)
    head = asked("one")
    assert prompt == head + drawn + ids_of(CLOSED) + asked("two")


def test_an_answer_broken_off_is_kept_and_gone_on_from(fake):  # noqa: F811
    llm = fake("x" * 100, num_slots=3, prefix_cache=2)
    dialogue = Dialogue(TOKENIZER)
    turn(llm, dialogue, "one", most=7)
    assert dialogue.messages[-1]["content"] == "x" * 7
    assert turn(llm, dialogue, "two")[1] == new_tokens("two")


@pytest.mark.parametrize("num_cut", [1, 2])
def test_a_turn_taken_back_goes_on_from_the_one_before(fake, num_cut):  # noqa: F811
    """A second answer to the last question, and another question in its place."""
    llm = fake("x" * 100, num_slots=3, prefix_cache=2)
    dialogue = Dialogue(TOKENIZER)
    turn(llm, dialogue, "one")
    turn(llm, dialogue, "two")
    dialogue.cut(len(dialogue.messages) - num_cut)
    if num_cut == 1:
        dialogue.cut(dialogue.last("user"))
    assert turn(llm, dialogue, "zwei")[1] == new_tokens("zwei") and len(dialogue.messages) == 4


@pytest.mark.parametrize("script, why", [("<|open|>resp", "inside a tag"), ("<|close|>response<|sep|>", "between channels"), ("a<|end_of_msg|>b", "behind its end")])
def test_what_cannot_be_gone_on_from_is_rendered(fake, script, why):  # noqa: F811
    llm = fake(script, num_slots=3, prefix_cache=2, eos_ids=())
    dialogue = Dialogue(TOKENIZER)
    turn(llm, dialogue, "one", max_tokens=len(ids_of(script)), ignore_eos=True)
    dialogue.add({"role": "user", "content": "two"})
    options = {"tools": None, "thinking": False, "thinking_effort": None}
    assert dialogue.prompt_ids(**options) == encode_chat(TOKENIZER, dialogue.messages, **options), why


def test_what_a_stop_string_hid_is_not_read(fake):  # noqa: F811
    llm = fake("abSTOP", num_slots=3, prefix_cache=2)
    dialogue = Dialogue(TOKENIZER)
    dialogue.add({"role": "user", "content": "one"})
    *_, last = llm.stream_chat(dialogue, SamplingParams(stop="STOP", max_tokens=20), reasoning_effort="none")
    dialogue.answer(last.output.token_ids, last.output.text, "", stop_reason=last.output.stop_reason)
    dialogue.add({"role": "user", "content": "two"})
    options = {"tools": None, "thinking": False, "thinking_effort": None}
    assert last.output.stop_reason == "STOP" and dialogue.messages[1]["content"] == "ab"
    assert dialogue.prompt_ids(**options) == encode_chat(TOKENIZER, dialogue.messages, **options)


def test_another_effort_reads_everything_again(fake):  # noqa: F811
    llm = fake("x" * 100, num_slots=3, prefix_cache=2)
    dialogue = Dialogue(TOKENIZER)
    turn(llm, dialogue, "one", "none")
    prompt, run, _ = turn(llm, dialogue, "two", "low")
    assert run == prompt == len(encode_chat(TOKENIZER, dialogue.messages[:3], thinking=True, thinking_effort="low"))


def test_a_step_ahead_goes_on_from_a_page(fake):  # noqa: F811
    """Where the next step is on its way when an answer ends, the state at its end is not there any more: the last page boundary is."""
    llm = fake("x" * 200, num_slots=3, prefix_cache=2, overlaps=True)
    dialogue = Dialogue(TOKENIZER, [{"role": "system", "content": "s" * 300}])
    turn(llm, dialogue, "one", max_tokens=150)
    dialogue.add({"role": "user", "content": "two"})
    with llm.stream_chat(dialogue, Params(max_tokens=2, temperature=0), reasoning_effort="none") as answer:
        *_, last = answer
    assert last.stats.prompt_tokens - last.stats.cached_tokens <= new_tokens("two") + 64 and last.stats.cached_tokens > 300


@pytest.mark.parametrize("draft", [None, "tiny-random-draft"])
def test_the_demo_says_the_same_with_and_without(draft):
    found = []
    for prefix_cache in (0, 2):
        with LLM("tiny-random", draft, max_batch=1, max_model_len=512, prefix_cache=prefix_cache) as llm:
            dialogue = Dialogue(llm.tokenizer)
            found.append([turn(llm, dialogue, text, max_tokens=12, ignore_eos=True) for text in ("one", "two", "three")])
    assert [ids for *_, ids in found[0]] == [ids for *_, ids in found[1]]
    for (prompt, run, _), (prompt_kept, run_kept, _) in zip(*found):
        assert run == prompt == prompt_kept
    runs = [run for _, run, _ in found[1]]
    assert runs[0] == found[0][0][0] and max(runs[1:]) < 40, runs
