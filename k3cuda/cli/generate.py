"""`k3cuda generate`: one prompt, one answer."""
import sys

import click

from ..errors import UsageError
from . import options
from .answers import Json, Text, open_llm, report, work_for_rank_0
from .group import stop_code
from .output import Result, is_terminal
from .prompts import read_prompt


@click.command(cls=options.Command)
@options.model()
@options.prompt
@options.flags(options.flag("--raw", is_flag=True, aliases=["--no-chat-template", "--ignore-chat-template"],
                            help="Send the text as it is, not as a chat."))
@options.conversation
@options.documents
@options.thinking
@options.sampling
@options.flags(
    options.flag("--logprobs", type=int, metavar="N", help="With --json: log-probabilities of each token and of the N most likely ones."),
    options.flag("--stream/--no-stream", default=None, help="Print text as it comes.  [default: on a terminal]"),
    options.flag("--json", is_flag=True, aliases=["--output-json"], help="One JSON document when done."),
    options.flag("--jsonl", is_flag=True, help="A JSON object for the start, each step and the end."), options.OUTPUT)
@options.engine
def generate(model, prompt, file, raw, system, reasoning_effort, no_think, messages, tools, show_thinking, logprobs, stream, json,
             jsonl, output, no_progress, **flags):
    """Answer one prompt.

    The prompt comes from -p, -f, --messages or a pipe. It is rendered as a chat unless --raw is given.
    """
    from ..runtime.chat import render
    from ..runtime.sampling import SamplingParams

    _refuse_contradictions(raw, reasoning_effort, no_think, logprobs, stream, json, jsonl, show_thinking)
    effort = options.effort(reasoning_effort, no_think, model)
    engine = options.engine_arguments(flags)
    params = SamplingParams(**options.sampling_arguments(flags), logprobs=logprobs)
    work_for_rank_0(model, **engine)
    result = Result(output)
    source = read_prompt(prompt, file, raw=raw, system=system, messages=messages, tools=tools)
    if not raw:
        render(source.messages, source.tools)   # what cannot be rendered is told before a model is loaded
    with open_llm(model, not no_progress, **engine) as llm:
        if json or jsonl:
            view = Json(result, llm, model, jsonl)
        else:
            on_terminal = is_terminal(sys.stdout) and output is None
            thinking = on_terminal and is_terminal(sys.stderr) if show_thinking is None else show_thinking
            view = Text(result, thinking, on_terminal if stream is None else stream)
        if raw:
            answer = llm.stream(source.text, params)
        else:
            answer = llm.stream_chat(source.messages, params, tools=source.tools, reasoning_effort=effort)
        code, whole = _run(llm, answer, view)
        if whole is not None:
            view.end(whole)
            result.close()
            report(whole, counts=llm.backend.counts, is_seed_drawn=params.seed is None, is_json=json or jsonl)
    if whole is not None and whole.error:
        raise whole.error
    return code


def _run(llm, answer, view) -> tuple[int, object]:
    """(exit code, whole answer). An interrupt ends the request, and what was generated is still shown."""
    code, whole = 0, None
    while whole is None:
        try:
            chunk = next(answer)
            whole = chunk.output
            view.chunk(chunk)
        except KeyboardInterrupt as stop:
            code = stop_code(stop)
            llm.close()   # ends the request; its last chunk says so
        except StopIteration:   # the interrupt came just as the last chunk was handed over
            break
    return code, whole


def _refuse_contradictions(raw, reasoning_effort, no_think, logprobs, stream, json, jsonl, show_thinking) -> None:
    def refuse(first: str, second: str):
        raise UsageError(f"{first} and {second} exclude each other", "leave out one of them")

    if raw and (reasoning_effort or no_think):
        refuse("--raw", "--no-think" if no_think else "--reasoning-effort")
    if json and jsonl:
        refuse("--json", "--jsonl")
    if stream and json:
        raise UsageError("--json is one document when done and cannot be streamed", "use --jsonl, or leave out --stream")
    if stream is False and jsonl:
        refuse("--jsonl", "--no-stream")
    if show_thinking and (json or jsonl):
        raise UsageError("--show-thinking prints reasoning on stderr, which is in the JSON already", "leave it out")
    if logprobs is not None and not (json or jsonl):
        raise UsageError("--logprobs are shown in JSON only", "add --json or --jsonl")
