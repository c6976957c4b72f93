"""`k3cuda eval`: scorers against answers as models write them, intervals against closed forms, resuming on the command."""
import json
import math
from dataclasses import replace

import pytest
from command import k3, k3_json
from scripted import fake  # noqa: F401

from k3cuda import SamplingParams
from k3cuda.cli.eval_results import ResultsFile
from k3cuda.errors import RequestError, UsageError
from k3cuda.runtime import evaluation
from k3cuda.runtime.evaluation import Z95, compare, read_items, seed_of, sign_test, summary, wilson
from k3cuda.runtime.scorers import SCORERS

INTEGERS = {   # text -> what is read
    "The answer is 42.": "42", "so $x = \\boxed{042}$, not 17": "42", "-5": "-5", "\u22125": "-5", "3-5": "5", "1,234 of them": "1234",
    "\\boxed{1{,}234}": "1234", "\\boxed{n = 7}": "7", "\\boxed{\\text{7}}": "7", "\\boxed{1} or \\boxed{2}": "2", "\\boxed{3} then \\boxed{4": "3",
    "\\boxed{\\frac{1}{2}}": None, "\\boxed{3 \\text{ or } 4}": None, "\\boxed{}": None, "7 in 3.5 s": "7", "3.5": None, "x2 and 5th": None, "v1.2.3": None,
    "": None, "**204**": "204"}
LETTERS = {
    "Answer: B": "B", "**Answer:** (C)": "C", "The correct answer is **D**.": "D", "answer is option A": "A", "I think \\boxed{B}": "B",
    "\\boxed{\\text{C}}": "C", "\\boxed{A or B}": None, "B": "B", "(D)": "D", "B) since it is larger": "B", "A bee is small": None,
    "First Answer: A. No, answer: C": "C", "I would say so": None, "": None, "Answer: Because": None, "The answer isn't known": None, "$\\boxed{A}$ Answer: B": "A"}


@pytest.mark.parametrize("text", INTEGERS)
def test_integers(text):
    found = INTEGERS[text]
    right = SCORERS["integer"].read({"answer": found or 1})
    assert SCORERS["integer"].score(text, right) == (float(found is not None), found)
    assert SCORERS["integer"].score(text, right + 1)[0] == 0


@pytest.mark.parametrize("text", LETTERS)
def test_letters(text):
    found = LETTERS[text]
    assert SCORERS["letter"].score(text, found or "A") == (float(found is not None), found)
    assert SCORERS["letter"].score(text, "J")[0] == 0


def test_a_needle_counts_behind_its_prefix_only():
    right = SCORERS["mrcr"].read({"answer": "xyzabcd", "random_string_to_prepend": "xyz"})
    assert SCORERS["mrcr"].score("xyzabcd", right) == (1.0, "xyzabcd")
    assert SCORERS["mrcr"].score("abcd", right) == (0.0, None) and SCORERS["mrcr"].score(" xyzabcd", right) == (0.0, None)
    assert SCORERS["mrcr"].score("xyzab", right)[0] == pytest.approx(2 * 2 / 6)   # twice the characters in common, of all


def test_ratio():
    assert SCORERS["ratio"].score("abcd", "bcde")[0] == pytest.approx(2 * 3 / 8)


@pytest.mark.parametrize("line, text", [
    ('{"id": 1, "prompt": "x", "answer": "4.5"}', "answer: found '4.5', wanted an integer"), ('{"id": 1, "prompt": "x"}', "answer: found None"),
    ('{"id": true, "prompt": "x", "answer": 1}', "id: found True"), ('{"prompt": "x", "answer": 1}', "id: found None"),
    ('{"id": 1, "answer": 1}', "wanted one of messages and prompt"), ("[1]", "found list"), ("{", "line 2"),
    ('{"id": "a", "prompt": "x", "answer": 1}', "of line 1 again")])
def test_records_that_are_refused(line, text):
    with pytest.raises(UsageError, match="q.jsonl, line 2") as e:
        read_items('{"id": "a", "prompt": "x", "answer": 1}\n' + line + "\n", "q.jsonl", SCORERS["integer"])
    assert text in str(e.value)


def test_records():
    with pytest.raises(RequestError, match="line 1: messages"):
        read_items('{"id": 1, "messages": [{"role": "robot", "content": "x"}], "answer": 1}', "q", SCORERS["integer"])
    with pytest.raises(UsageError, match="found no items"):
        read_items("\n", "q", SCORERS["integer"])
    for scorer, record in (("letter", {"answer": "K"}), ("mrcr", {"answer": "x"}), ("ratio", {"answer": ""})):
        with pytest.raises(ValueError, match="wanted"):
            SCORERS[scorer].read(record)
    text = json.dumps({"id": 1, "prompt": "a\u2028b", "answer": " 007 ", "subject": "not ours"}, ensure_ascii=False)
    (plain,), (told,) = read_items(text, "q", SCORERS["integer"]), read_items(text, "q", SCORERS["integer"], "be brief")
    assert plain.right == 7 and plain.messages == [{"role": "user", "content": "a\u2028b"}]
    assert [m["role"] for m in told.messages] == ["system", "user"] and told.prompt_sha256 != plain.prompt_sha256


def test_wilson_is_its_closed_form():
    zz = Z95 * Z95
    assert wilson(1.0, 10) == pytest.approx((10 / (10 + zz), 1.0)) and wilson(0.0, 10) == pytest.approx((0.0, zz / (10 + zz)))
    half = Z95 / (2 * math.sqrt(4 + zz))
    assert wilson(0.5, 4) == pytest.approx((0.5 - half, 0.5 + half))
    assert wilson(28 / 30, 30) == pytest.approx((0.7868, 0.9815), abs=5e-5)   # the published run of 30 problems


def test_sign_test_is_the_binomial_tail():
    assert sign_test(5, 0) == 2 / 32 and sign_test(1, 4) == 2 * 6 / 32 and sign_test(2, 2) == 1.0 and sign_test(0, 0) is None


def answer(name, run, score, error=None, sha="s", **more):
    return {"id": name, "run": run, "prompt_sha256": sha, "score": score, "found": "1", "finish_reason": "stop", "completion_tokens": 10,
            "reasoning_tokens": 4, "speculative": None, "error": error} | more


def test_summary_counts_items_not_runs():
    found = summary([answer("a", 0, 1.0), answer("a", 1, 0.0, found=None, finish_reason="length"), answer("b", 0, 1.0), answer("c", 0, None, "too long"),
                     answer("b", 1, 1.0, speculative={"steps": 4, "acceptance_length": 2.5}), ])
    low, high = wilson(0.75, 2)
    assert found == {"items": 2, "answers": 4, "failed": 1, "cut": 1, "unread": 1, "score": 0.75, "low": low, "high": high,
                     "completion_tokens": 50, "reasoning_tokens": 20, "acceptance_length": 2.5}
    assert summary([])["score"] is None


def test_compare_pairs_answers_to_the_same_prompts():
    ours = [answer("a", 0, 1.0), answer("b", 0, 0.0), answer("c", 0, 1.0), answer("d", 0, None, "failed"), answer("e", 0, 1.0), answer("f", 0, 1.0)]
    theirs = [answer("a", 0, 0.0), answer("b", 0, 0.0), answer("c", 0, 0.0), answer("d", 0, 1.0), answer("e", 0, 0.0, sha="other"), answer("g", 0, 1.0)]
    assert compare(ours, theirs) == {
        "items": 3, "score": 2 / 3, "baseline": 0.0, "better": 2, "worse": 0, "sign_test_p": 0.5,
        "changed": [{"id": "a", "run": 0, "score": 1.0, "baseline": 0.0}, {"id": "c", "run": 0, "score": 1.0, "baseline": 0.0}]}
    assert compare(ours, [])["items"] == 0


def items(n, scorer="integer"):
    return read_items("\n".join(json.dumps({"id": i, "prompt": "x" * (i + 1), "answer": 42}) for i in range(n)), "q", SCORERS[scorer])


def run(llm, todo, width):
    return list(evaluation.run(llm, todo, SamplingParams(max_tokens=40), 3, "none", SCORERS["integer"], width))


def test_answers_are_scored_and_keep_their_seeds_in_any_width(fake):  # noqa: F811
    todo = [(item, n) for n in (0, 1) for item in items(5)]
    found = run(fake("it is 42<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"), todo, 8)
    assert {(a["id"], a["run"], a["seed"]) for a in found} == {(i.id, n, seed_of(3, i.id, n)) for i, n in todo} and len({a["seed"] for a in found}) == 10
    assert all((a["score"], a["found"], a["text"], a["finish_reason"]) == (1.0, "42", "it is 42", "stop") for a in found)


def test_failed_answers_have_no_score(fake):  # noqa: F811
    long = read_items(json.dumps({"id": "long", "prompt": "x" * 999, "answer": 1}), "q", SCORERS["integer"])
    llm = fake(bad=lambda tokens: len(tokens) > 45)
    found = {a["id"]: a for a in run(llm, [(item, 0) for item in [*long, *items(1)]], 2)}
    assert found["long"]["score"] is None and "the context holds 512" in found["long"]["error"]
    assert found["0"]["score"] is None and "finite" in found["0"]["error"]


def test_a_stopped_run_leaves_no_request_behind(fake):  # noqa: F811
    llm = fake("it is 42")
    answers = evaluation.run(llm, [(item, 0) for item in items(3)], SamplingParams(max_tokens=40), 3, "none", SCORERS["integer"], 2)
    next(answers)
    answers.close()
    assert not llm._has_work


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps({"id": f"q{i}", "prompt": f"What is {i} + 1?", "answer": i + 1}) + "\n" for i in range(3)))
    return path


TIMES = dict.fromkeys(("ttft_s", "decode_s"))


def lines(path):
    head, *answers = [json.loads(line) for line in path.read_text().splitlines()]
    return head, sorted((a | TIMES for a in answers), key=lambda a: (a["run"], a["id"]))


def test_a_stopped_evaluation_goes_on(questions, tmp_path):
    results, command = tmp_path / "r.jsonl", ["eval", "tiny-random", questions, "--scorer", "int", "-n", 6, "--json"]
    whole = k3_json(*command, "--results", results, "--runs", 2)
    want = lines(results)
    assert len(want[1]) == whole["answers"] == 6 and whole["score"] == sum(a["score"] for a in want[1]) / 6
    cut = results.read_bytes().splitlines(keepends=True)
    results.write_bytes(b"".join(cut[:3]) + cut[3][:40])   # stopped while it wrote its third answer
    done = k3(*command, "--results", results, "--runs", 2, "--baseline", results)
    assert b"2 of 6 answers are in" in done.stderr and lines(results) == want
    found = json.loads(done.stdout)
    assert found["comparison"]["items"] == len({json.loads(line)["id"] for line in cut[1:3]})   # what was there when the command read it
    assert not found["comparison"]["changed"] and not found["comparison"]["differs"]
    assert found | {"comparison": None} == whole


def test_results_of_another_setup_or_prompt_are_refused(tmp_path):
    path, (item, *_) = tmp_path / "r.jsonl", items(1)
    setup = {"model": "tiny-random", "sampling": {"temperature": 1.0}}
    file = ResultsFile(str(path))
    file.begin(setup, [item])
    kept = answer(item.id, 0, 1.0, sha=item.prompt_sha256, text="42")
    file.add(kept)
    file.add(answer("other", 0, None, "failed", text=None))
    file.close()
    before = path.read_bytes()
    again = ResultsFile(str(path))
    assert again.answers == {(item.id, 0): kept}   # what failed is tried again
    with pytest.raises(UsageError, match="made with sampling {'temperature': 1.0}, now it is {'temperature': 0.5}"):
        again.begin(setup | {"sampling": {"temperature": 0.5}}, [item])
    with pytest.raises(UsageError, match="made with gpu None, now it is 'H200'"):
        again.begin(setup | {"gpu": "H200"}, [item])
    with pytest.raises(UsageError, match="is one to another prompt"):
        again.begin(setup, [replace(item, prompt_sha256="another")])
    again.close()
    assert path.read_bytes() == before


def test_scores_are_those_of_the_texts():
    item, = items(1)
    stale = answer(item.id, 0, 0.0, text="\\boxed{42}")
    assert evaluation.rescored(stale, item, SCORERS["integer"]) == stale | {"score": 1.0, "found": "42"}


@pytest.mark.parametrize("text", ['{"a": 1}\n', '{"setup": 1}\n', '{"setup": {}}\n{"id": "a", "run": 0}\n', "\n"])
def test_other_files_are_not_taken_for_results(text, tmp_path):
    path = tmp_path / "other"
    path.write_text(text)
    with pytest.raises(UsageError, match="found no line of an evaluation"):
        ResultsFile(str(path))
    assert path.read_text() == text


def test_failed_answers_end_with_code_8(questions):
    with questions.open("a") as file:
        file.write(json.dumps({"id": "long", "prompt": "x" * 99, "answer": 1}) + "\n")
    done = k3("eval", questions, "--scorer", "integer", "-n", 2, "-c", 60, code=8, env={"K3CUDA_MODEL": "tiny-random"})
    assert b"3 of 4; " in done.stdout and b"1 of 4 answers failed, the first one to 'long'" in done.stderr


def test_more_words_than_model_and_file():
    assert b"wanted [MODEL] FILE" in k3("eval", "a", "b", "c", "--scorer", "ratio", code=2).stderr
