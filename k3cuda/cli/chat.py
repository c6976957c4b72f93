"""`k3cuda chat`: a conversation, held in memory."""
import secrets
import sys
from dataclasses import replace

import click

from ..errors import K3Error, loses_model
from . import options
from .answers import Text, open_llm, report, work_for_rank_0
from .chat_commands import HINT, obey
from .group import first_interrupt_asks, stop_code
from .output import Result, is_terminal, say, show_error
from .turns import Turns

KEPT_ENDS = 2   # that of the last answer, and that of the one before: what /undo and /retry go on from


@click.command(cls=options.Command)
@options.model()
@options.conversation
@options.thinking
@options.sampling
@options.flags(
    options.flag("--prefix-cache", type=click.IntRange(min=0), default=KEPT_ENDS, metavar="N", aliases=["--prompt-cache-size"],
                 help=f"Ends of answers to keep, to go on from; each costs what a sequence does; 0: none.  [default: {KEPT_ENDS}]"),
    options.flag("--no-history", is_flag=True, help="Neither read nor keep the lines typed."))
@options.engine
def chat(model, system, reasoning_effort, no_think, show_thinking, no_history, no_progress, prefix_cache, **flags):
    """Talk to a model. Each line is a turn; from a pipe too. End with Ctrl-D.

    A line that ends in a backslash goes on in the next; triple quotes begin and end a turn of several. /help lists commands. The model
    reads only what is new in a turn. Ctrl-C stops an answer, which stays as far as it came; a second one leaves, as does one at the prompt.
    """
    from ..runtime.dialogue import Dialogue
    from ..runtime.sampling import DRAWN_SEED_BITS, SamplingParams

    effort = options.effort(reasoning_effort, no_think, model)
    engine = options.engine_arguments(flags) | {"prefix_cache": prefix_cache}
    params = SamplingParams(**options.sampling_arguments(flags))
    work_for_rank_0(model, **engine)
    if params.seed is None:   # one for the whole conversation, so that one number repeats it
        params = replace(params, seed=secrets.randbits(DRAWN_SEED_BITS))
        if not params.greedy:
            say(f"seed {params.seed} (drawn); repeat with --seed {params.seed}")
    interactive = is_terminal(sys.stdin) and is_terminal(sys.stderr)
    thinking = is_terminal(sys.stdout) and is_terminal(sys.stderr) if show_thinking is None else show_thinking
    turns = Turns(interactive)
    with open_llm(model, not no_progress, **engine) as llm, turns.history(not no_history):
        dialogue = Dialogue(llm.tokenizer, [] if system is None else [{"role": "system", "content": system}])
        talk = Talk(llm, dialogue, params, effort, Result(), thinking, interactive)
        if interactive:
            say(f"Ctrl-D ends, Ctrl-C stops an answer, {HINT}")
        while (turn := turns.next()) is not None:
            try:
                code = obey(talk, turn.text) if turn.is_command else talk.ask(turn.text) if turn.text.strip() else None
            except K3Error as e:
                if not interactive or loses_model(e):   # no other turn would be answered
                    raise
                show_error(e, e.code)
                continue
            if code is not None:
                return code
    return 0


class Talk:
    """A conversation as far as it went, and how it goes on.

    Attributes:
        dialogue: what was said. params, effort: of the answers to come.
    """

    def __init__(self, llm, dialogue, params, effort: str, result: Result, thinking: bool, interactive: bool):
        self.llm, self.dialogue, self.params, self.effort = llm, dialogue, params, effort
        self._result, self._thinking, self._interactive = result, thinking, interactive

    def ask(self, text: str) -> int | None:
        """A turn. An exit code where the conversation is to end. K3Error: it cannot be answered, and is taken back."""
        before = len(self.dialogue.messages)
        self.dialogue.add({"role": "user", "content": text})
        return self.answer(before)

    def answer(self, before: int) -> int | None:
        """The answer to all messages so far, kept as far as it came; where there is none, only the first `before` messages stay."""
        view = Text(self._result, self._thinking, is_terminal(sys.stdout))
        ids, text, reasoning, whole, stopped = [], [], [], None, None
        try:
            with first_interrupt_asks(self._interactive) as interrupt:
                answer = self.llm.stream_chat(self.dialogue, self.params, reasoning_effort=self.effort)
                try:
                    while whole is None and not interrupt.asked:   # between two steps, where the state is whole and can be kept
                        if answer.step():
                            chunk = next(answer)
                            ids += chunk.token_ids
                            text.append(chunk.text)
                            reasoning.append(chunk.reasoning)
                            whole = chunk.output
                            view.chunk(chunk)
                except StopIteration:   # an interrupt came just as the last chunk was handed over
                    pass
                except KeyboardInterrupt as e:
                    stopped = e
                finally:
                    answer.close()
            view.end()
            if whole and whole.error:
                raise whole.error
        except BaseException:
            self.dialogue.cut(before)
            raise
        if not ids:
            self.dialogue.cut(before)
        else:
            calls, stop_reason = ([c.document for c in whole.tool_calls], whole.stop_reason) if whole else ([], None)
            self.dialogue.answer(ids, "".join(text), "".join(reasoning), calls, stop_reason)
        if stopped is not None:
            return stop_code(stopped)
        if whole is None:
            say("stopped" if ids else "stopped before the first token; the turn is taken back")
        else:
            report(whole)
        return None
