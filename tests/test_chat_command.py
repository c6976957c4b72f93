"""`k3cuda chat` over pipes and terminals: turns, commands, interrupts, history, and what of a conversation is run again."""
import io
import json
import os
import re
import signal
import sys

import pytest
from command import ANSWERING, k3, on_terminal

from k3cuda.cli import main
from k3cuda.cli.chat_commands import COMMANDS
from k3cuda.cli.group import arm_signals, disarm_signals
from k3cuda.errors import StepTimeout
from k3cuda.llm import Stream

chat_module = sys.modules["k3cuda.cli.chat"]   # the package has the command by that name

TALK = ["chat", "tiny-random", "-s", 3, "-n", 5, "--ignore-eos"]


@pytest.fixture
def talk(monkeypatch, capfd):
    """Runs a conversation from what stands for a pipe, in this process: (answers, lines on stderr)."""
    def run(script: str, *flags, code=0):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(script.encode())))
        try:
            found = main([*map(str, TALK), *flags], standalone_mode=False)
        finally:
            disarm_signals()
        out, err = capfd.readouterr()
        assert found == code, err
        return out, err.splitlines()

    return run


@pytest.fixture
def saved(talk, tmp_path):
    """Runs a conversation: its messages."""
    def run(script: str, *flags):
        talk(f"{script}\n/save {tmp_path / 'saved'}\n", *flags)
        return json.loads((tmp_path / "saved").read_text())

    return run


def said(messages, role="user"):
    return [m["content"] for m in messages if m["role"] == role]


# ---- a pipe is a script ----

@pytest.mark.parametrize("script, turns", [
    ("one\ntwo", ["one", "two"]),
    ("\n \none\n", ["one"]),
    ("one\\\ntwo\\\nthree\nfour", ["one\ntwo\nthree", "four"]),
    ("one\\\n", ["one\n"]),
    ('"""\none\n\n  /two\n"""\nthree', ["one\n\n  /two", "three"]),
    ('"""one"""\n"""two\nthree"""', ["one", "two\nthree"]),
    (" /reset\n", [" /reset"]),
    ("one\r\ntwo\r\n", ["one", "two"]),
    ("\u00fc\U0001f600\n", ["\u00fc\U0001f600"]),
], ids=repr)
def test_turns_of_a_pipe(script, turns, saved):
    messages = saved(script, "-n", "1")
    assert said(messages) == turns and len(said(messages, "assistant")) == len(turns)


def test_answers_are_all_of_stdout(talk):
    out, err = talk("one\n/tokens\n/help\n/bye\nnever said\n")
    assert len(out.splitlines()) >= 1 and not any(name in out for name in COMMANDS)
    assert all(any(line.startswith(name) for line in err) for name in COMMANDS)


def test_a_quoted_turn_that_does_not_end(talk):
    out, err = talk('"""one\ntwo', code=2)
    assert out == "" and 'begun with """ does not end' in err[0]


# ---- what is run of a turn ----

def summaries(lines):
    """(tokens of the prompt, how many of them were kept from before) of each answer."""
    found = [re.match(r"prompt (\d+) tokens(?: \((\d+) kept from before\))?", line) for line in lines]
    return [(int(m[1]), int(m[2] or 0)) for m in found if m]


def test_each_turn_runs_only_what_is_new(talk):
    script = "one " * 40 + "\ntwo\nthree\n"
    out, err = talk(script, "-v")
    first, second, third = summaries(err)
    assert first[1] == 0 and first[0] > 60
    # Kept is all of the turn before but its last token, which nothing was drawn behind.
    assert second[1] == first[0] + 5 - 1 and third[1] == second[0] + 5 - 1
    assert second[0] - second[1] < 50 and third[0] - third[1] < 50
    without, err = talk(script, "-v", "--prefix-cache", "0")
    assert out == without and [kept for _, kept in summaries(err)] == [0, 0, 0]


def test_another_answer_and_another_question_go_on_from_the_turn_before(talk):
    _, err = talk("one\ntwo\n/retry\n/undo\nzwei\n", "-v")
    one, two, again, zwei = summaries(err)
    assert again == two and again[1] == zwei[1] == one[0] + 5 - 1 and "seed 4" in err and "taken back: two" in err


# ---- commands ----

def test_retry_takes_another_seed(saved):
    first, second = (saved(script) for script in ("one\n/retry", "one"))
    assert said(first) == said(second) and said(first, "assistant") != said(second, "assistant")
    assert saved("/set seed 4\none") == first
    greedy = saved("one", "-t", "0")
    assert saved("one\n/retry", "-t", "0") == greedy


def test_undo_and_reset_forget(saved):
    assert saved("one\ntwo\n/undo\nthree") == saved("one\nthree")
    kept = saved("one\n/reset\ntwo", "-S", "be brief")
    assert kept == saved("two", "-S", "be brief") and said(kept, "system") == ["be brief"]


def test_system_message(saved, talk):
    assert saved("/system be brief\none") == saved("one", "-S", "be brief")
    assert said(saved("one\n/system be brief")[:1], "system") == ["be brief"]
    assert saved("/system none\none", "-S", "x") == saved("one")
    assert "system message: be brief" in talk("/system\n", "-S", "be brief")[1] and "no system message" in talk("/system\n")[1]


def test_set(saved, talk):
    assert saved("/set temperature 0\n/set max-tokens 3\none") == saved("one", "-t", "0", "-n", "3")
    assert saved("/set temperature 0\n/set temperature none\none") == saved("one")
    _, err = talk("/set top_p 0.5\n/set stop END\n/set\n")
    assert "top_p 0.5" in err and 'stop ["END"]' in err and "seed 3" in err


def test_think(saved, talk):
    messages = saved("/think low\none\n/think off\ntwo")
    first, second = (m for m in messages if m["role"] == "assistant")
    assert first["reasoning_content"] and not first["content"] and second["content"] and not second["reasoning_content"]
    assert "reasoning effort max" in talk("/think on\n")[1] and "reasoning effort none" in talk("/think\n")[1]


def test_save_and_load(saved, talk, tmp_path):
    path = tmp_path / "talk"
    talk(f"one\ntwo\n/save {path}\n", "-S", "be brief")
    assert "5 messages from" in talk(f"/load {path}\n")[1][0]
    loaded = saved(f"/load {path}\nthree")
    assert loaded[:5] == json.loads(path.read_text()) and said(loaded) == ["one", "two", "three"]
    path.write_text(json.dumps({"messages": loaded}))   # as generate takes it too
    assert saved(f"/load {path}") == loaded
    k3("generate", "tiny-random", "--messages", path, "-n", 1, "-s", 1)


@pytest.mark.parametrize("line, words", [
    ("/bogus", "/bogus is no command"), ("/save", "/save: no file"), ("/load", "/load: no file"), ("/undo", "there is no turn yet"),
    ("/retry", "there is no turn yet"), ("/set temperature 3", "temperature: found 3"), ("/set warmth 3", "found 'warmth', wanted one of temperature"),
    ("/set top_k", "/set top_k: no value"), ("/think much", "/think: found 'much', wanted on, off, none"), ("/load {tmp}/none", "cannot be read"),
    ("/save {tmp}/no/such/folder", "cannot be written"), ("/load {tmp}", "cannot be read"), ("/set logprobs 3", "found 'logprobs'")])
def test_command_that_cannot_be_obeyed(line, words, talk, tmp_path):
    line = line.format(tmp=tmp_path)
    assert words in "\n".join(talk(line + "\none\n", code=2)[1])


def test_on_a_terminal_a_wrong_command_is_no_end():
    out, code = on_terminal(*TALK, typed=[(b"> ", b"/bogus\r"), (b"> ", b"/exit\r")])
    assert code == 0 and "/bogus is no command" in out


def test_on_a_terminal_a_lost_model_is_the_end():
    """No other turn would be answered."""
    script = ("from k3cuda.errors import StepTimeout; from k3cuda.runtime import numpy_backend as n; from k3cuda.__main__ import main\n"
              "def lost(*_): raise StepTimeout('block 17 waited', 'start the process again')\n"
              "n.NumpyBackend.step = lost\nmain()")
    out, code = on_terminal(*TALK, typed=[(b"> ", b"hello\r")], python=("-c", script))
    assert code == StepTimeout.code and "Error: block 17 waited" in out


# ---- a terminal ----

def test_conversation_on_a_terminal():
    # The first answer is interrupted, the second turn too long and taken back, the third answered; then the end of input.
    typed = [(b"> ", b"hello\r"), (ANSWERING, b"\x03"), (b"> ", b"x" * 700 + b"\r"), (b"> ", b"bye\r"), (b"> ", b"\x04")]
    out, code = on_terminal("chat", "tiny-random", "-s", 1, "--ignore-eos", "-c", 600, "--reasoning-effort", "low", typed=typed)
    assert code == 0 and "stopped" in out and "Error: the prompt has" in out and out.count("> ") >= 4 and "end: length" in out


def test_an_interrupted_answer_stays_and_is_gone_on_from(tmp_path):
    path = tmp_path / "talk"
    typed = [(b"> ", b"hello\r"), (ANSWERING, b"\x03"), (b"> ", b"/set max_tokens 4\r"), (b"> ", b"again\r"), (b"> ", f"/save {path}\r".encode()),
             (b"> ", b"/exit\r")]
    out, code = on_terminal("chat", "tiny-random", "-s", 1, "--ignore-eos", "--reasoning-effort", "low", typed=typed)
    assert code == 0 and "stopped" in out
    messages = json.loads(path.read_text())
    assert said(messages) == ["hello", "again"] and messages[1]["reasoning_content"]
    [(prompt, kept)] = summaries(out.splitlines())
    assert 0 < prompt - kept < 70 < kept


@pytest.mark.parametrize("interrupts, code", [(1, 0), (2, 130)])
def test_second_interrupt_of_an_answer_leaves(talk, monkeypatch, interrupts, code):
    """They come in the middle of a step, in this thread: another one would tell it later."""
    before, step, steps = signal.signal(signal.SIGINT, signal.default_int_handler), Stream.step, []

    def interrupted(stream):
        steps.append(stream)
        for _ in range(interrupts if len(steps) == 3 else 0):
            signal.raise_signal(signal.SIGINT)
        return step(stream)

    monkeypatch.setattr(Stream, "step", interrupted)
    monkeypatch.setattr(chat_module, "is_terminal", lambda stream: True)
    arm_signals()
    try:
        _, err = talk("one\n", "-n", "60", code=code)
    finally:
        signal.signal(signal.SIGINT, before)
    assert 3 <= len(steps) < 6 and ("> stopped" in err) == (code == 0)


def test_interrupt_at_the_prompt_leaves():
    out, code = on_terminal("chat", "tiny-random", typed=[(b"> ", b"\x03")])
    assert code == 130 and "Traceback" not in out


def test_interrupt_drops_what_was_typed(tmp_path):
    path = tmp_path / "talk"
    typed = [(b"> ", b"never said"), (b"never said", b"\x03"), (b"> ", b'"""never\r'), (b". ", b"\x03"), (b"> ", b"said\r"), (b"> ", f"/save {path}\r".encode()), (b"> ", b"\x04")]
    out, code = on_terminal(*TALK, typed=typed)
    assert code == 0 and said(json.loads(path.read_text())) == ["said"]


def test_several_lines_on_a_terminal(tmp_path):
    path = tmp_path / "talk"
    typed = [(b"> ", b"a\\\r"), (b". ", b"b\r"), (b"> ", b'"""c\r'), (b". ", b"/d\r"), (b". ", b'"""\r'), (b"> ", f"/save {path}\r".encode()), (b"> ", b"\x04")]
    out, code = on_terminal(*TALK, "-q", typed=typed)
    assert code == 0 and said(json.loads(path.read_text())) == ["a\nb", "c\n/d"]


def has_bracketed_paste() -> bool:
    readline = pytest.importorskip("readline", reason="this Python has no readline")
    return "libedit" not in (readline.__doc__ or "") and readline._READLINE_LIBRARY_VERSION >= "8"


def test_a_pasted_text_is_one_turn(tmp_path):
    if not has_bracketed_paste():
        pytest.skip("this readline knows no bracketed paste")
    path = tmp_path / "talk"
    typed = [(b"> ", b"\x1b[200~one\n/two\n\nthree\x1b[201~"), (b"three", b"\r"), (b"> ", f"/save {path}\r".encode()), (b"> ", b"\x04")]
    out, code = on_terminal(*TALK, typed=typed)
    assert code == 0 and said(json.loads(path.read_text())) == ["one\n/two\n\nthree"]


def test_reasoning_is_dimmed():
    typed = [(b"> ", b"one\r"), (b"> ", b"\x04")]
    out, code = on_terminal(*TALK, "--reasoning-effort", "low", typed=typed)
    assert code == 0 and "\x1b[2m" in out
    out, code = on_terminal(*TALK, "--reasoning-effort", "low", "--hide-thinking", typed=typed)
    assert code == 0 and "\x1b[2m" not in out


def test_history(tmp_path):
    pytest.importorskip("readline", reason="this Python has no readline")
    path = tmp_path / "state" / "k3cuda" / "chat_history"
    home = {"XDG_STATE_HOME": str(tmp_path / "state")}
    typed = [(b"> ", b"a line of mine\r"), (b"> ", b"\x04")]
    on_terminal(*TALK, "--no-history", typed=typed, env=home)
    assert not path.exists()
    on_terminal(*TALK, typed=typed, env=home)
    assert "a line of mine" in path.read_text() and path.stat().st_mode & 0o777 == 0o600
    out, _ = on_terminal(*TALK, typed=[(b"> ", b"\x1b[A"), (b"a line of mine", b"\r"), (b"> ", b"\x04")], env=home)
    assert "a line of mine" in out and "end: length" in out


@pytest.mark.parametrize("home", [{"XDG_STATE_HOME": os.devnull}, {"XDG_STATE_HOME": "", "HOME": "/nonexistent"}], ids=["no folder", "no home"])
def test_history_that_cannot_be_kept_is_none(home):
    out, code = on_terminal(*TALK, typed=[(b"> ", b"hi\r"), (b"> ", b"\x04")], env=home)
    assert code == 0 and "Error" not in out and "Traceback" not in out
