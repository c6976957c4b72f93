"""`k3cuda tokenize`: text to ids and back."""
import re
from pathlib import Path

import click

from ..errors import UsageError
from . import options
from .output import Result
from .prompts import read_prompt, read_text


@click.command(cls=options.Command)
@options.model()
@options.prompt
@options.flags(options.flag("--chat", is_flag=True, help="Render the text as a conversation first."),
               options.flag("--decode", is_flag=True, help="The text is ids; print what they stand for."))
@options.conversation
@options.documents
@options.flags(options.flag("--json", is_flag=True, help="One JSON document."), options.OUTPUT)
def tokenize(model, prompt, file, chat, decode, system, reasoning_effort, no_think, messages, tools, json, output):
    """Show the token ids of a text, or the text of ids."""
    chat_only = [f for f, v in (("--system", system), ("--reasoning-effort", reasoning_effort), ("--no-think", no_think or None),
                                ("--messages", messages), ("--tools", tools)) if v is not None]
    if chat_only and not chat:
        raise UsageError(f"{', '.join(chat_only)} without --chat", "add --chat")
    if chat and decode:
        raise UsageError("--chat and --decode exclude each other", "leave out one of them")
    result = Result(output)
    tokenizer = open_tokenizer(model)
    if chat:
        source = read_prompt(prompt, file, system=system, messages=messages, tools=tools)
        text, ids = _rendered(tokenizer, source, options.effort(reasoning_effort, no_think, model))
    else:
        text = read_text(prompt, file, whole=True)
        ids = _ids(text, tokenizer.vocab_size) if decode else tokenizer.encode(text)
        text = tokenizer.decode(ids) if decode else text
    if json:
        names = {number: name for name, number in tokenizer.special.items()}
        tokens = [names.get(i) or tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids]
        result.document({"model": model, "count": len(ids), "token_ids": ids, "tokens": tokens, "text": text})
    elif decode:
        result.write(text)
        result.end_line()
    else:
        result.write(" ".join(map(str, ids)) + "\n")
    result.close()


def open_tokenizer(model: str):
    """The tokenizer of a checkpoint, without a look at its weights."""
    from ..runtime.downloads import check_is_here
    from ..runtime.named_models import TINY_RANDOM, model_named
    from ..runtime.tokenizer import MINI_TOKENIZER_DIR, Tokenizer

    check_is_here(model)
    model = model_named(model)
    path = MINI_TOKENIZER_DIR if model == TINY_RANDOM else Path(model)
    return Tokenizer.from_dir(path.parent if path.is_file() else path)


def _rendered(tokenizer, source, effort: str) -> tuple[str, list[int]]:
    from ..runtime.chat import encode_chat, render

    thinking = {"thinking": False} if effort == "none" else {"thinking_effort": effort}
    segments = render(source.messages, source.tools, **thinking)
    return "".join(s.text for s in segments), encode_chat(tokenizer, source.messages, source.tools, **thinking)


def _ids(text: str, vocab_size: int) -> list[int]:
    words = re.findall(r"[^\s,\[\]]+", text)
    for word in words:
        if not (word.isascii() and word.isdigit() and len(word) < 10 and int(word) < vocab_size):
            raise UsageError(f"{word[:40]!r} is no token id, wanted 0 to {vocab_size - 1}", "separate ids by blanks or commas")
    return [int(word) for word in words]
