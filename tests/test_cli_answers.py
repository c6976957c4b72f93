"""What the command makes of answers that tiny-random does not give: tool calls, numbers that are none, rows that are not finite."""
import json
import logging

import numpy as np
import pytest
from command import k3

from k3cuda import LLM, SamplingParams
from k3cuda.cli.answers import Text, report
from k3cuda.cli.output import Result, to_json
from k3cuda.runtime.backend import StepCounts
from k3cuda.runtime.tiny_random import TinyRandom, open_tiny_random
from k3cuda.runtime.output import Chunk
from k3cuda.runtime.text_stream import ToolCall
from k3cuda.runtime.write_checkpoint import write_checkpoint

CALL = ToolCall("call_1", "look", {"at": "it"}, '{"at": "it"}')


@pytest.mark.parametrize("streamed", [True, False])
def test_tool_calls_are_lines_behind_the_text(streamed, tmp_path):
    result = Result(str(tmp_path / "out"))
    view = Text(result, thinking=False, streamed=streamed)
    for chunk in (Chunk(reasoning="hm"), Chunk(text="Let me"), Chunk(text=" see"), Chunk(tool_calls=(CALL,))):
        view.chunk(chunk)
    view.end()
    result.close()
    text, call = (tmp_path / "out").read_text().splitlines()
    assert text == "Let me see" and json.loads(call) == CALL.document
    assert json.loads(json.loads(call)["function"]["arguments"]) == {"at": "it"}


def test_steps_that_did_not_run_as_they_were_to_are_told(caplog):
    with LLM("tiny-random") as llm, caplog.at_level(logging.INFO, "k3cuda"):
        answer, = llm.generate("a", SamplingParams(max_tokens=1))
        caplog.clear()
        report(answer, counts=llm.backend.counts)
        report(answer, counts=StepCounts({"fast": 7, "standard": 2}, {"too many rows": 2}))
    plain, told = (record.getMessage() for record in caplog.records)
    assert "steps" not in plain and "; 7 fast steps, 2 standard steps (2: too many rows); end: length; " in told


def test_json_has_no_nan():
    assert json.loads(to_json({"a": [float("nan"), (float("-inf"), 1.5)], "b": "NaN"})) == {"a": [None, [None, 1.5]], "b": "NaN"}


class Broken(TinyRandom):
    """tiny-random with a head that gives no finite logit."""

    def stored(self, weight, *where):
        array = super().stored(weight, *where)
        return np.full_like(array, np.nan) if weight.name == "lm_head" else array


def test_logits_that_are_not_finite_end_in_a_named_error(tmp_path):
    write_checkpoint(Broken(open_tiny_random().cfg), tmp_path / "model")
    done = k3("generate", tmp_path / "model", "-p", "hi", "-n", 3, "--json", code=7)
    found = json.loads(done.stdout)
    assert (found["finish_reason"], found["token_ids"], found["timing"]["ttft_s"]) == ("error", [], None)
    assert b"not finite" in done.stderr
    assert k3("chat", tmp_path / "model", "-n", 3, stdin=b"hi\n", code=7).stdout == b""
