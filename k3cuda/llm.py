"""The Python interface: text, ids or conversations in, answers out; sessions and buffers for scripts."""
import itertools
import logging
import random
import threading
import time
from collections import deque
from contextlib import contextmanager
from typing import Callable

import numpy as np

from .errors import UsageError
from .runtime.conversation import Dialogue, answer_reader, conversation_ids
from .runtime.engine import Engine
from .runtime.open_model import open_model
from .runtime.named_models import default_effort
from .runtime.output import Collector, Output
from .runtime.progress import Progress
from .runtime.prompt_arrays import as_ids, as_prompts
from .runtime.request import Request
from .runtime.sampling import SamplingParams
from .runtime.text_stream import TextStream
from .session import Session
from .stream import Stream

log = logging.getLogger("k3cuda")

LONG_ANSWER = 32_768  # an open max_tokens above it is announced


class LLM:
    """One model, loaded. A context manager; serves one caller at a time (streams and sessions may stay open while other calls run).

    Args:
        model: the folder of a checkpoint in the released layout or of a repacked model (docs/loading.md), one .safetensors file with its config.json beside it, "demo"
            or "tiny-random" (runtime/named_models.py); also an open checkpoint (runtime/tensor_source.py), or an open model (runtime/open_model.py), for which all that follows is settled.
        draft_model: a DSpark draft model for it, named likewise: "demo-draft" or "demo-draft-gqa" for "demo", their like for "tiny-random"; None: no speculation.
        tp: ranks the model is cut into; None: 1, or what a repacked model is for.
        dcp: how many ranks hold the MLA cache together, a divisor of `tp`; 1: every rank holds all of it.
        ranks: "virtual": all in this process; "processes": each in its own, with `rendezvous_timeout` seconds to meet; "auto": as a launcher, or a GPU for each, asks.
        collectives: what carries them between processes that have a GPU each: "nccl", or "peer", inside a kernel, where their memory can be mapped.
        decode_backend: "reference" (or "ref"), "standard", "latency_specialized", or "auto": the fastest that runs here (runtime/auto_backend.py).
        max_model_len: tokens of prompt and answer together; None: what fits, at most the model's own limit.
        max_batch: requests that run at once, 1 to 64; more are queued. None: 8, or as many as fit one step with their drafts.
        kv_cache_dtype: "auto" (as the activations; "bf16" on a GPU), "f32" (reference only), "bf16" or "fp8_e4m3".
        activation_dtype: "f32", or "bf16" to round where the release does.
        prefix_cache: beginnings of texts whose state is kept for prompts that share one; each costs what a sequence of `max_batch` does; 64 with those.
        load_mode: how files are read: "auto", "direct", "buffered" or "mmap" (docs/loading.md).
        load_progress: bytes and time left on stderr while loading; None: if that is a terminal.
        seed: makes the seeds that are drawn for requests without one reproducible, in order of the requests.
        drafting: with a draft model, options by name: num_drafts, draft_rows, acceptance, acceptance_length, draft_sampling, confidence_threshold.

    Attributes:
        cfg, tokenizer, generation_config: of the model.
        backend: runs it; its `counts` say how many steps ran on which decode backend.
        load_s: seconds that opening took. loading: what reading the weights took (runtime/loading.py).

    Raises:
        UsageError: an argument that no model could satisfy.
        CheckpointError, ConfigError: the model is missing, damaged, or cannot be cut that way; everything wrong is listed at once.
        OutOfMemory: weights or cache do not fit. DeviceError: the decode backend cannot run here.
        RankDied, ExchangeTimeout, RanksDiffer, StepTimeout: also in every later call: another process died, hung, sent nothing, or decided differently; a step in one launch ended itself.
    """

    def __init__(self, model="demo", draft_model=None, tp=None, *, dcp=1, decode_backend="auto", max_model_len=None, max_batch=None,
                 kv_cache_dtype="auto", activation_dtype="f32", prefix_cache=0, load_mode="auto", load_progress=None, ranks="auto",
                 collectives="nccl", rendezvous_timeout=60, seed=None, **drafting):
        self._engine = None
        seed = SamplingParams(seed=seed).seed  # the same rules
        start = time.perf_counter()
        opened = open_model(model, draft_model, tp=tp, dcp=dcp, decode_backend=decode_backend, max_model_len=max_model_len, max_batch=max_batch,
                            kv_cache_dtype=kv_cache_dtype, activation_dtype=activation_dtype, prefix_cache=prefix_cache, load_mode=load_mode,
                            load_progress=load_progress, ranks=ranks, collectives=collectives, rendezvous_timeout=rendezvous_timeout, **drafting)
        self.load_s = time.perf_counter() - start
        self.loading = opened.loading
        self.backend, self.generation_config, self._eos_ids = opened.backend, opened.generation_config, opened.eos_ids
        self._tokenizer, self._no_tokenizer = opened.tokenizer, opened.no_tokenizer
        self._engine = Engine(opened.backend, seeds=None if seed is None else random.Random(seed), prefix_cache=opened.prefix_cache)
        self._collectors: dict[str, Collector] = {}
        self._dropped: deque[Callable[[], None]] = deque()  # ends streams and sessions that were garbage collected while open
        self._ids, self._busy, self._announced, self._effort = itertools.count(), threading.Lock(), False, default_effort(model)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        """Frees the model; open streams and sessions end. May be called twice."""
        if self._engine is None:
            return
        with self._exclusive():
            self._engine.close()
            self._pump()  # tells the streams
            self._engine = None

    @property
    def cfg(self):
        return self.backend.cfg

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together that one request can have."""
        return self._open_engine().context

    @property
    def tokenizer(self):
        """Raises CheckpointError where the checkpoint has none: then prompts can only be token ids."""
        if self._tokenizer is None:
            raise self._no_tokenizer
        return self._tokenizer

    def generate(self, prompts, sampling_params=None, *, use_progress: bool | None = None) -> list[Output]:
        """Continues prompts as they are, without a chat format.

        Args:
            prompts: a string, a list of integers, a list of strings or of lists of integers, or an integer array [tokens] or
                [prompts, tokens] of NumPy, CuPy or anything with DLPack. Text is encoded as ordinary text: no markers, no BOS.
            sampling_params: one for all, or a list with one a prompt; None: the defaults of the checkpoint.
            use_progress: a line on stderr; None: if that is a terminal.
        Returns:
            one Output a prompt, in order; also for a single one. An answer that failed on the way has `error` set.
        Raises:
            UsageError, PromptTooLong: before anything runs, if any prompt cannot be run.
        """
        with self._exclusive():
            requests = [(ids, params, self._raw_text(params)) for ids, params in self._paired(self._encoded(prompts), sampling_params)]
            return self._run(requests, use_progress)

    def chat(self, messages, sampling_params=None, *, tools=None, reasoning_effort=None, tool_choice=None, response_format=None):
        """Answers a conversation, or a list of them.

        Args:
            messages: OpenAI-style dictionaries (runtime/chat.py: `render`), or a list of such lists.
            sampling_params: as for `generate`.
            tools: OpenAI-style declarations. tool_choice: None, "auto", "required" or "none".
            reasoning_effort: "max", "high", "low", or "none" to answer without thinking; None: "max", but "none" for models that are known by a name.
            response_format: None or an object with `type`; it is told to the model, not enforced.
        Returns:
            an Output, or a list of them for a list of conversations.
        Raises:
            RequestError: a conversation that cannot be rendered. Else as `generate`.
        """
        several = isinstance(messages, (list, tuple)) and bool(messages) and all(isinstance(m, (list, tuple)) for m in messages)
        with self._exclusive():
            options = dict(tools=tools, reasoning_effort=reasoning_effort, tool_choice=tool_choice, response_format=response_format)
            prompts = [self._rendered(m, **options) for m in (messages if several else [messages])]
            requests = [(ids, params, self._chat_text(params, reasoning_effort)) for ids, params in self._paired(prompts, sampling_params)]
            outputs = self._run(requests, False, is_chat=True)
            return outputs if several else outputs[0]

    def stream(self, prompt, sampling_params=None) -> Stream:
        """Continues one prompt and hands out what is new after each step; arguments and errors of `generate`."""
        with self._exclusive():
            (ids, params), = self._paired([self._one(prompt)], sampling_params)
            return Stream(self, self._add(ids, params, self._raw_text(params), is_stream=True))

    def stream_chat(self, messages, sampling_params=None, *, tools=None, reasoning_effort=None, tool_choice=None, response_format=None) -> Stream:
        """Answers one conversation and hands out what is new after each step; arguments and errors of `chat`, also for a runtime/dialogue.py: Dialogue."""
        with self._exclusive():
            ids = self._rendered(messages, tools=tools, reasoning_effort=reasoning_effort, tool_choice=tool_choice, response_format=response_format)
            (ids, params), = self._paired([ids], sampling_params)
            return Stream(self, self._add(ids, params, self._chat_text(params, reasoning_effort), is_chat=True, is_stream=True, keeps_end=isinstance(messages, Dialogue)))

    def logits(self, token_ids) -> np.ndarray:
        """What the model says after each token of a text, teacher-forced: one token a step from an empty state.

        Args:
            token_ids: int [tokens], list or array.
        Returns:
            float32 [tokens, vocab_size], raw; row i is the law of token i + 1.
        Raises:
            PromptTooLong, UsageError: as `generate`; also UsageError while open streams and sessions hold every slot.
        """
        with self._exclusive():
            return self._open_engine().by_hand.logits(as_ids(token_ids))

    def prefill(self, prompt) -> Session:
        """Runs one prompt, given as for `generate`, and leaves the rest to the caller: its logits, and the next tokens.

        Raises:
            PromptTooLong: no token, or more than the context holds.
            UsageError: ids outside the vocabulary, several prompts, or no slot that could be kept: `max_batch` of them exist.
        """
        with self._exclusive():
            ids = self._one(prompt)
            session = Session(self, self._open_engine().by_hand.open())
        try:
            session.feed(ids)
        except BaseException:
            session.close()
            raise
        return session

    def buffer(self, name: str, rank: int = 0):
        """An input, activation or state of the last step by its name in docs/dataflow.md, as an array that shares the model's memory.

        Returns:
            the whole buffer of one rank, as runtime/backend.py says: `Backend.buffer`, with its errors. Valid until `close`; a step of anything
            changes what is in it.
        """
        with self._exclusive():
            self._open_engine()
            return self.backend.buffer(name, rank)

    # Requests

    def _one(self, prompt) -> list[int]:
        prompts = self._encoded(prompt)
        if len(prompts) != 1:
            raise UsageError(f"found {len(prompts)} prompts, wanted one", "make a call for each; what they return runs side by side")
        return prompts[0]

    def _encoded(self, prompts) -> list[list[int]]:
        return [self.tokenizer.encode(p) if isinstance(p, str) else p for p in as_prompts(prompts)]

    def _rendered(self, messages, reasoning_effort: str | None, **options) -> list[int]:
        return conversation_ids(self.tokenizer, messages, reasoning_effort=self._effort if reasoning_effort is None else reasoning_effort, **options)

    def _paired(self, prompts: list[list[int]], given) -> list[tuple[list[int], SamplingParams]]:
        params = list(given) if isinstance(given, (list, tuple)) else [given] * len(prompts)
        if len(params) != len(prompts):
            raise UsageError(f"sampling_params: found {len(params)} for {len(prompts)} prompts", "give one for all, or one a prompt")
        for p in params:
            if p is not None and not isinstance(p, SamplingParams):
                raise UsageError(f"sampling_params: found {type(p).__name__}, wanted SamplingParams")
        return [(ids, (p or SamplingParams()).resolved(self.generation_config)) for ids, p in zip(prompts, params)]

    def _raw_text(self, params: SamplingParams):
        return None if self._tokenizer is None and not params.stop else TextStream(self.tokenizer, params.stop)

    def _chat_text(self, params: SamplingParams, reasoning_effort: str | None):
        return answer_reader(self.tokenizer, params, self._effort if reasoning_effort is None else reasoning_effort)

    def _add(self, ids, params, text, *, is_chat=False, is_stream=False, keeps_end=False) -> str:
        request_id = f"request-{next(self._ids)}"
        engine = self._open_engine()
        engine.add(Request(request_id, ids, params, self._eos_ids + ((self.tokenizer.end_of_msg_id,) if is_chat else ()), text, keeps_end))
        self._collectors[request_id] = Collector(ids, is_stream)
        if params.max_tokens is None and engine.context - len(ids) > LONG_ANSWER and not self._announced:
            self._announced = True
            log.warning("max_tokens is open: an answer may have %s tokens, the rest of the context", f"{engine.context - len(ids):,}")
        return request_id

    # The loop

    @contextmanager
    def _exclusive(self):
        if not self._busy.acquire(blocking=False):
            raise UsageError("another call on this LLM has not returned yet", "an LLM serves one caller at a time: pass all prompts in one call, or take turns")
        try:
            self._clear_dropped()
            yield
        finally:
            self._busy.release()

    def _open_engine(self) -> Engine:
        if self._engine is None:
            raise UsageError("this LLM is closed", "make a new one")
        return self._engine

    @property
    def _has_work(self) -> bool:
        return self._engine is not None and self._engine.has_work

    def _run(self, requests, use_progress, is_chat=False) -> list[Output]:
        """Runs requests to their ends; streams that are open advance with them. None is left behind when something is raised."""
        ids, progress = [], Progress(len(requests), use_progress)
        try:
            for request in requests:
                ids.append(self._add(*request, is_chat=is_chat))
            while any(self._collectors[i].output is None for i in ids):
                self._pump()
                progress.show([self._collectors[i] for i in ids])
            return [self._collectors[i].output for i in ids]
        finally:
            progress.close()
            for i in ids:
                self._forget(i)

    def _pump(self) -> None:
        self._clear_dropped()
        for event in self._open_engine().step():
            if event.request_id in self._collectors:
                self._collectors[event.request_id].take(event)

    def _clear_dropped(self) -> None:
        while self._dropped:
            self._dropped.popleft()()

    def _let_go(self, held) -> None:
        if self._engine is not None:
            self._engine.by_hand.close(held)

    def _forget(self, request_id: str) -> None:
        if self._engine is not None:
            self._engine.abort(request_id)
        self._collectors.pop(request_id, None)
