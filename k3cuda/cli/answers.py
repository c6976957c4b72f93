"""An answer on its way to the user: text as it comes, or JSON documents. docs/cli.md has their fields."""
import logging
import secrets
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict

from .. import __version__
from ..runtime import rank_watch
from .output import Result, is_terminal, log, say, write_stderr


@contextmanager
def loading(model: str, show_progress: bool):
    """A terminal shows that the model is being loaded, from before the first byte."""
    rank_watch.ends_process = True   # without its ranks a command has nothing left to do
    shown = show_progress and is_terminal(sys.stderr)
    if shown:
        write_stderr(f"loading {model} ...")
    try:
        yield
    finally:
        if shown:
            write_stderr("\r\033[K")


def shows_progress() -> bool:
    """Whether bytes and time left may be shown: not where errors only are wanted."""
    return log.isEnabledFor(logging.WARNING)


def work_for_rank_0(model: str, **arguments) -> None:
    """Where a launcher started this process as another rank: opens the model, works for rank 0, and ends with SystemExit. Else returns at once.

    To be called before anything is read or written: input and output are rank 0's.
    """
    from ..runtime.launch import launched

    place = None if arguments["ranks"] == "virtual" else launched()
    if place is not None and place.rank:
        from ..runtime.open_model import open_model

        log.addFilter(lambda record: setattr(record, "msg", f"[r{place.rank}] {record.msg}") or True)
        open_model(model, place=place, **arguments)


def open_llm(model: str, show_progress: bool, **arguments):
    """The loaded model."""
    with loading(model, show_progress):
        from ..llm import LLM

        return LLM(model, load_progress=show_progress and shows_progress(), **arguments)


class Text:
    """The answer as text: content to the result; reasoning, if wanted, to stderr. `streamed`: as it comes, else at the end."""

    def __init__(self, result: Result, thinking: bool, streamed: bool):
        self._result, self._thinking, self._streamed = result, thinking, streamed
        self._waiting, self._open = [], False

    def chunk(self, chunk) -> None:
        if self._streamed:
            self._show(chunk)
        else:
            self._waiting.append(chunk)

    def end(self, output=None) -> None:
        for chunk in self._waiting:
            self._show(chunk)
        self._waiting = []
        self._close_thinking()
        self._result.end_line()

    def _show(self, chunk) -> None:
        if chunk.reasoning and self._thinking:
            write_stderr(chunk.reasoning, dim=True)
            self._open = True
        if chunk.text or chunk.tool_calls:
            self._close_thinking()
        self._result.write(chunk.text)
        for call in chunk.tool_calls:
            self._result.end_line()
            self._result.document(call.document)

    def _close_thinking(self) -> None:
        if self._open:
            write_stderr("\n\n")
            self._open = False


class Json:
    """One document at the end, or with `lines` an object for the start, each step and the end."""

    def __init__(self, result: Result, llm, model: str, lines: bool):
        self._result, self._llm, self._lines = result, llm, lines
        self._head = {"id": f"gen-{secrets.token_hex(12)}", "model": model, "created": int(time.time())}
        if lines:
            result.document({"event": "start"} | self._head)

    def chunk(self, chunk) -> None:
        if self._lines and (chunk.token_ids or chunk.text or chunk.reasoning or chunk.tool_calls):
            self._result.document({"event": "delta", "text": chunk.text, "reasoning": chunk.reasoning,
                                   "tool_calls": [c.document for c in chunk.tool_calls], "token_ids": chunk.token_ids})

    def end(self, output) -> None:
        whole = self._head | document(output, self._llm)
        self._result.document({"event": "end"} | whole if self._lines else whole, None if self._lines else 2)


def document(output, llm) -> dict:
    """Everything about one answer, JSON-ready. What there isn't is null."""
    stats, backend = output.stats, llm.backend
    found = {
        "prompt_tokens": stats.prompt_tokens, "cached_tokens": stats.cached_tokens, "completion_tokens": stats.completion_tokens, "reasoning_tokens": stats.reasoning_tokens,
        "text": output.text, "reasoning": output.reasoning, "tool_calls": [c.document for c in output.tool_calls],
        "token_ids": output.token_ids, "finish_reason": output.finish_reason, "stop_reason": output.stop_reason,
        "sampling": asdict(output.sampling),
        "timing": {"load_s": llm.load_s, "ttft_s": stats.ttft_s, "decode_s": stats.decode_s, "tpot_ms": stats.tpot_ms,
                   "tok_per_s": stats.tok_per_s},
        "loading": llm.loading.to_dict(),
        "speculative": stats.speculative and asdict(stats.speculative),
        "engine": {"version": __version__, "gpu": backend.gpu, "tp": backend.tp, "dcp": backend.dcp, "kv_cache_dtype": backend.kv_cache_dtype,
                   "decode_backend": backend.name, "steps": dict(backend.counts.steps), "reasons": dict(backend.counts.reasons)},
    }
    if output.logprobs is not None:
        found["logprobs"] = [
            {"token_id": d.token_id, "logprob": d.logprob, "top_logprobs": [{"token_id": i, "logprob": p} for i, p in d.top_logprobs or ()]}
            for d in output.logprobs]
    return found


def report(output, *, counts=None, is_seed_drawn: bool = False, is_json: bool = False) -> None:
    """What was used and how fast it went, on stderr; where only warnings are shown, at least a seed that nobody else knows.

    `counts`: the backend's StepCounts, told where they have reasons.
    """
    sampling, stats = output.sampling, output.stats
    if not output.text and output.reasoning and output.finish_reason in ("stop", "length") and not is_json:
        log.warning("the answer is empty: all %d tokens went into reasoning (--show-thinking shows it, --reasoning-effort none turns it off)",
                    stats.completion_tokens)
    seed = "" if sampling.greedy else f"seed {sampling.seed}" + " (drawn)" * is_seed_drawn
    if not log.isEnabledFor(logging.INFO):
        if seed and is_seed_drawn and not is_json:
            say(f"{seed}; repeat with --seed {sampling.seed}")
        return
    used = [f"temperature {sampling.temperature:g}"] + [f"{name} {value:g}" for name, off in (("top_p", 1), ("top_k", 0), ("min_p", 0))
                                                        if (value := getattr(sampling, name)) != off]
    parts = [f"prompt {stats.prompt_tokens} tokens" + f" ({stats.cached_tokens} kept from before)" * bool(stats.cached_tokens) + _rate(stats.prefill_tok_per_s),
             f"answer {stats.completion_tokens} tokens" + _rate(stats.tok_per_s)]
    if stats.ttft_s is not None:
        parts.append(f"first after {stats.ttft_s:.2f} s")
    if stats.speculative and stats.speculative.steps:
        parts.append(_drafts(stats.speculative))
    if counts and counts.reasons:
        parts.append(", ".join(f"{n} {name} steps" for name, n in counts.steps.items()) + f" ({', '.join(f'{n}: {why}' for why, n in counts.reasons.items())})")
    log.info("%s", "; ".join([*parts, f"end: {output.finish_reason}", f"peak memory {_peak_memory()}", ", ".join([*used, seed] if seed else used)]))


def _drafts(s) -> str:
    rate = f", {s.acceptance_rate:.0%} of them accepted" if s.proposed else ""
    return f"{s.acceptance_length:.2f} tokens a verify step with {s.k} draft{'s' * (s.k > 1)}{rate}"


def _rate(tokens_per_s: float | None) -> str:
    return "" if tokens_per_s is None else f", {tokens_per_s:.1f} tok/s"


def _peak_memory() -> str:
    try:
        import resource
    except ImportError:   # not a POSIX system
        return "unknown"
    unit = 1 if sys.platform == "darwin" else 1024
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9:.2f} GB"
