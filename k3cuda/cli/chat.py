"""`k3cuda chat`: a conversation, held in memory."""
import secrets
import sys
from dataclasses import replace

import click

from ..errors import K3Error
from . import options
from .answers import Text, open_llm, report, work_for_rank_0
from .group import Terminated, arm_signals, stop_code
from .output import Result, is_terminal, log, say, show_error, write_stderr

INVITATION = "> "


@click.command(cls=options.Command)
@options.model()
@options.conversation
@options.thinking
@options.sampling
@options.engine
def chat(model, system, reasoning_effort, no_think, show_thinking, no_progress, **flags):
    """Talk to a model. Each line is a turn; from a pipe too. End with Ctrl-D.

    The whole conversation is sent back each time, with the reasoning in it, as the model was trained. Ctrl-C stops an answer, and at the
    prompt it leaves.
    """
    from ..runtime.sampling import DRAWN_SEED_BITS, SamplingParams

    effort = options.effort(reasoning_effort, no_think, model)
    engine = options.engine_arguments(flags)
    params = SamplingParams(**options.sampling_arguments(flags))
    work_for_rank_0(model, **engine)
    if params.seed is None:   # one for the whole conversation, so that one number repeats it
        params = replace(params, seed=secrets.randbits(DRAWN_SEED_BITS))
        if not params.greedy:
            say(f"seed {params.seed} (drawn); repeat with --seed {params.seed}")
    history = [] if system is None else [{"role": "system", "content": system}]
    result, interactive = Result(), is_terminal(sys.stdin) and is_terminal(sys.stderr)
    thinking = is_terminal(sys.stdout) and is_terminal(sys.stderr) if show_thinking is None else show_thinking
    with open_llm(model, not no_progress, **engine) as llm:
        if interactive:
            say("Ctrl-D ends, Ctrl-C stops an answer")
        while (line := _next_line(interactive)) is not None:
            if not line.strip():
                continue
            history.append({"role": "user", "content": line})
            try:
                code = _turn(llm, history, params, effort, Text(result, thinking, is_terminal(sys.stdout)), interactive)
            except K3Error as e:
                if not interactive:
                    raise
                show_error(e, e.code)   # a turn that failed, say one too long, is taken back; the conversation goes on
                history.pop()
                continue
            if code is not None:
                return code
    return 0


def _next_line(interactive: bool) -> str | None:
    """A line without its break, None at the end."""
    if interactive:
        write_stderr(INVITATION)
    line = sys.stdin.buffer.readline() if sys.stdin else b""
    if not line and interactive:
        write_stderr("\n")
    return line.decode("utf-8", "replace").rstrip("\r\n") if line else None


def _turn(llm, history: list, params, effort: str, view: Text, interactive: bool) -> int | None:
    """One answer, added to the history as far as it came. An exit code where the conversation is to end."""
    text, reasoning, whole, stopped = [], [], None, None
    answer = llm.stream_chat(history, params, reasoning_effort=effort)
    try:
        for chunk in answer:
            text.append(chunk.text)
            reasoning.append(chunk.reasoning)
            whole = chunk.output
            view.chunk(chunk)
    except KeyboardInterrupt as stop:
        stopped = stop
    finally:
        answer.close()
    view.end()
    history.append({"role": "assistant", "content": "".join(text), "reasoning_content": "".join(reasoning)})
    if stopped is not None:
        if isinstance(stopped, Terminated) or not interactive:
            return stop_code(stopped)
        arm_signals()
        log.info("stopped")
    elif whole.error:
        raise whole.error
    else:
        report(whole)
    return None
