"""The server under test: what it is asked and what it says about itself."""
import json
import re
import time
from dataclasses import dataclass, field

import numpy as np

from ..errors import BenchmarkError, UsageError
from ..runtime.request_times import Times, draft_numbers
from .answers import Answer, error_of, read_answer, times_of
from .http_client import Address, Failed, request

CHAT = "chat/completions"   # how the path of an endpoint ends that takes messages
EVERYWHERE = 1000           # ids below it are in every vocabulary
NO_STREAM = ("application/json", "text/html")   # others are read as one: not every server names its streams as it should
LONGEST_PAGE = 8 << 20      # bytes of a page that is no stream
WORDS = ("time year people way day man thing woman life child world school state family student group country problem hand part place case week "
         "company system program question work government number night point home water room mother area money story fact month lot right study "
         "book eye job word business issue side kind head house service friend father power hour game line end member law car city").split()
_SAMPLE = re.compile(r'^([\w:]+)(?:\{([^}]*)\})? (\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)', re.M)
_PREFIX = "vllm:spec_decode_num_"


@dataclass(frozen=True)
class Target:
    """A server and how it is asked.

    Attributes:
        endpoint: path of the route. model: the name it is asked for.
        extra_body: fields that go over those of ours in every body; None takes one out.
        timeout_s: for a whole request. stall_s: for the next byte of one.
    """

    address: Address
    endpoint: str
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    extra_body: dict = field(default_factory=dict)
    timeout_s: float = 3600
    stall_s: float = 600

    @property
    def takes_messages(self) -> bool:
        return self.endpoint.rstrip("/").endswith(CHAT)

    async def ask(self, prompt, prompt_tokens: int, max_tokens: int, clock=time.perf_counter) -> tuple[Times, Answer | None]:
        """One request: its times, with `error` set and no answer where it failed.

        Args:
            prompt: text or token ids, or messages, as the endpoint takes them. prompt_tokens: how many that are, for a server that does not say.
        """
        import asyncio

        body = {"model": self.model, "messages" if self.takes_messages else "prompt": prompt, "max_tokens": max_tokens, "stream": True,
                "stream_options": {"include_usage": True}} | self.extra_body
        data = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
        sent = clock()
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await self._answer(data, clock)
            return times_of(answer, sent, prompt_tokens), answer
        except TimeoutError:
            reason = f"it took more than {self.timeout_s:g} s"
        except Failed as e:
            reason = str(e)
        return Times(prompt_tokens, sent, error=reason), None

    async def _answer(self, data: bytes, clock) -> Answer:
        headers = [("Content-Type", "application/json"), ("Accept", "text/event-stream"), *self._key()]
        async with request(self.address, "POST", self.endpoint, data, headers, self.stall_s) as response:
            if response.status != 200:
                raise Failed(_refused(response.status, await response.read(1 << 16)))
            kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind in NO_STREAM:
                raise Failed(f"the answer is {kind}, wanted text/event-stream")
            return await read_answer(response.pieces, clock)

    def _key(self) -> list:
        return [] if self.api_key is None else [("Authorization", f"Bearer {self.api_key}")]

    async def page(self, path: str, body: dict | None = None) -> bytes:
        """A page that is no stream: GET, or POST of `body`. Raises Failed."""
        data = b"" if body is None else json.dumps(body).encode()
        headers = [("Content-Type", "application/json")] * bool(data) + self._key()
        async with request(self.address, "POST" if data else "GET", path, data, headers, min(self.stall_s, 60)) as response:
            found = await response.read(LONGEST_PAGE)
            if response.status != 200:
                raise Failed(_refused(response.status, found))
            return found

    async def first_model(self) -> str:
        """What the server calls its model. BenchmarkError where there is no server, UsageError where it does not say."""
        try:
            return str(json.loads(await self.page("/v1/models"))["data"][0]["id"])
        except Failed as e:
            raise BenchmarkError(f"{self.address.name}/v1/models: {e}", "see that the server runs, or name the model with --model") from e
        except (ValueError, LookupError, TypeError) as e:
            raise UsageError(f"{self.address.name}/v1/models: found no model", "name one with --model") from e

    async def vocab_size(self) -> int:
        """Ids below it are tokens: the server's word, else a number that holds everywhere."""
        found = await self._told("/tokenizer_info", "vocab_size")
        return found or EVERYWHERE

    async def tokens_a_word(self) -> float:
        """Of text made of WORDS, by the server's own count; 1 where it does not count."""
        found = await self._told("/tokenize", "count", {"model": self.model, "prompt": " ".join(WORDS)})
        return found / len(WORDS) if found else 1.0

    async def _told(self, path: str, name: str, body: dict | None = None) -> int | None:
        try:
            found = json.loads(await self.page(path, body))
        except (Failed, ValueError, RecursionError):
            return None
        value = found.get(name) if isinstance(found, dict) else None
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    async def draft_counts(self) -> dict | None:
        """Totals of its drafts so far, from its metrics under vLLM's names; None where there are none."""
        try:
            return draft_counts((await self.page("/metrics")).decode("utf-8", "replace"))
        except Failed:
            return None


def draft_counts(metrics: str) -> dict | None:
    """{"drafts", "draft_tokens", "accepted_tokens": totals, "per_position": {place: accepted}} of a Prometheus page."""
    found, places = {}, {}
    for name, labels, value in _SAMPLE.findall(metrics):
        what = name.removeprefix(_PREFIX).removesuffix("_total")
        if not name.startswith(_PREFIX):
            continue
        if what == "accepted_tokens_per_pos":
            if place := re.search(r'position="(\d+)"', labels):
                places[int(place[1])] = places.get(int(place[1]), 0) + float(value)
        elif what in ("drafts", "draft_tokens", "accepted_tokens"):
            found[what] = found.get(what, 0) + float(value)   # several engines of one server add up
    return found | {"per_position": places} if len(found) == 3 else None


def drafts_between(before: dict | None, after: dict | None) -> dict:
    """The numbers of `summary` about drafts, of what the server verified in between; none where it does not say."""
    if before is None or after is None:
        return draft_numbers(None, None, None, None, ())
    drafts, proposed, accepted = (round(after[name] - before[name]) for name in ("drafts", "draft_tokens", "accepted_tokens"))
    places = [round(n - before["per_position"].get(place, 0)) for place, n in sorted(after["per_position"].items())]
    if min(drafts, proposed, accepted, *places) < 0:   # it was started anew in between
        return drafts_between(None, None)
    return draft_numbers(drafts, proposed, accepted, drafts + accepted, places)


def random_prompt(rng: np.random.Generator, tokens: int, vocab_size: int) -> list[int]:
    return rng.integers(0, vocab_size, tokens).tolist()


def random_words(rng: np.random.Generator, words: int) -> str:
    return " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), words))


def _refused(status: int, body: bytes) -> str:
    try:
        message = error_of(json.loads(body))
    except (ValueError, RecursionError):
        message = ""
    return f"status {status}" + (f": {message}" if message else "")
