"""Runs the items of an evaluation and counts their scores. docs/eval.md says what the numbers mean."""
import hashlib
import json
import math
from collections import deque
from dataclasses import asdict, dataclass, replace

from ..errors import PromptTooLong, RequestError, UsageError
from .chat import render
from .scorers import Scorer

Z95 = 1.959963984540054   # two-sided 95 % point of the normal distribution


@dataclass(frozen=True)
class Item:
    """One question. `right` is what its scorer read from the record; `prompt_sha256` tells whether a stored answer is one to this prompt."""

    id: str
    messages: list
    right: object
    prompt_sha256: str


def read_items(text: str, name: str, scorer: Scorer, system: str | None = None) -> list[Item]:
    """Items of JSON lines: {"id", "messages" or "prompt", "answer"}; other keys are the data set's own.

    Args:
        name: of the file, for errors. system: a system message to put first.
    Raises:
        UsageError: no items, a line that is no such record, an id that stands twice. RequestError: messages that cannot be rendered.
    """
    items, lines = [], {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            item = _item(json.loads(line), scorer, system)
        except RequestError as e:
            raise RequestError(e.name, f"{where}: {e.message}", e.hint) from e
        except (ValueError, RecursionError) as e:
            raise UsageError(f"{where}: {e}") from e
        if item.id in lines:
            raise UsageError(f"{where}: found the id {item.id!r:.60} of line {lines[item.id]} again, wanted one id an item")
        lines[item.id] = number
        items.append(item)
    if not items:
        raise UsageError(f"{name}: found no items", "give a file with one JSON object a line")
    return items


def _item(record, scorer: Scorer, system: str | None) -> Item:
    if not isinstance(record, dict):
        raise ValueError(f"found {type(record).__name__}, wanted an object with id, messages and answer")
    name = record.get("id")
    if not isinstance(name, (str, int)) or isinstance(name, bool) or name == "":
        raise ValueError(f"id: found {name!r:.60}, wanted text or an integer")
    if ("messages" in record) == ("prompt" in record):
        raise ValueError("wanted one of messages and prompt")
    messages = record["messages"] if "messages" in record else [{"role": "user", "content": record["prompt"]}]
    if system is not None and isinstance(messages, list):
        messages = [{"role": "system", "content": system}, *messages]
    render(messages)
    canonical = json.dumps(messages, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return Item(str(name), messages, scorer.read(record), hashlib.sha256(canonical.encode()).hexdigest())


def seed_of(seed: int, item_id: str, run: int) -> int:
    """The seed of one answer: independent of order, batch and of what a stopped evaluation had done before."""
    return int.from_bytes(hashlib.sha256(f"{seed}\n{run}\n{item_id}".encode()).digest()[:8], "little")


def run(llm, todo, params, seed: int, effort: str, scorer: Scorer, width: int):
    """Answers to (item, run) pairs, each yielded when it has ended.

    Args:
        params: sampling of every answer; its seed is replaced. width: answers under way at a time; more than the model's slots keep them full.
    Yields:
        JSON-ready dictionaries, docs/eval.md. `error` is set, and `score` None, where there is no answer to score.
    """
    waiting, under_way = deque(todo), []
    try:
        while waiting or under_way:
            while waiting and len(under_way) < width:
                item, number = waiting.popleft()
                own = replace(params, seed=seed_of(seed, item.id, number))
                try:
                    under_way.append((item, number, llm.stream_chat(item.messages, own, reasoning_effort=effort)))
                except PromptTooLong as e:
                    yield _answer(item, number, own.seed) | {"error": e.message}
            if under_way:
                next(under_way[0][2])   # a step of the model, for all of them
            for entry in [e for e in under_way if e[2].output is not None]:
                under_way.remove(entry)
                item, number, stream = entry
                yield _scored(item, number, stream.output, scorer)
    finally:
        for _, _, stream in under_way:
            stream.close()


def _answer(item: Item, number: int, seed: int) -> dict:
    return {"id": item.id, "run": number, "prompt_sha256": item.prompt_sha256, "seed": seed, "score": None, "found": None, "text": None,
            "reasoning": None, "finish_reason": None, "prompt_tokens": None, "completion_tokens": None, "reasoning_tokens": None,
            "ttft_s": None, "decode_s": None, "speculative": None, "error": None}


def _scored(item: Item, number: int, output, scorer: Scorer) -> dict:
    stats = output.stats
    answer = _answer(item, number, output.sampling.seed) | {
        "text": output.text, "reasoning": output.reasoning, "finish_reason": output.finish_reason,
        "prompt_tokens": stats.prompt_tokens, "completion_tokens": stats.completion_tokens, "reasoning_tokens": stats.reasoning_tokens,
        "ttft_s": stats.ttft_s, "decode_s": stats.decode_s, "speculative": stats.speculative and asdict(stats.speculative)}
    if output.finish_reason in ("error", "abort"):
        return answer | {"error": str(output.error or "aborted")}
    return rescored(answer, item, scorer)


def rescored(answer: dict, item: Item, scorer: Scorer) -> dict:
    """An answer that did not fail with the score that its text has now: right answers and scorers may have been put right since."""
    score, found = scorer.score(answer["text"], item.right)
    return answer | {"score": score, "found": found}


def wilson(mean: float, n: int) -> tuple[float, float]:
    """95 % interval of a mean of n scores from 0 to 1 (Wilson 1927). For scores between 0 and 1 it is too wide rather than too narrow: no
    distribution on [0, 1] has more variance than mean * (1 - mean)."""
    z = Z95
    centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(max(mean * (1 - mean), 0) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def _means(answers) -> dict[str, float]:
    """The mean score of each item over its runs."""
    scores: dict[str, list[float]] = {}
    for a in answers:
        if a["error"] is None:
            scores.setdefault(a["id"], []).append(a["score"])
    return {name: sum(s) / len(s) for name, s in scores.items()}


def summary(answers) -> dict:
    """Counts, the mean over items of their mean over runs, and its 95 % interval; None where nothing was scored."""
    answers = list(answers)
    means = _means(answers)
    mean = sum(means.values()) / len(means) if means else None
    low, high = (None, None) if mean is None else wilson(mean, len(means))
    drafts = [a["speculative"] for a in answers if a["speculative"] and a["speculative"]["steps"]]
    steps = sum(d["steps"] for d in drafts)
    return {"items": len(means), "answers": sum(a["error"] is None for a in answers), "failed": sum(a["error"] is not None for a in answers),
            "cut": sum(a["finish_reason"] == "length" for a in answers),
            "unread": sum(a["error"] is None and a["found"] is None for a in answers),
            "score": mean, "low": low, "high": high,
            "completion_tokens": sum(a["completion_tokens"] or 0 for a in answers),
            "reasoning_tokens": sum(a["reasoning_tokens"] or 0 for a in answers),
            "acceptance_length": sum(d["acceptance_length"] * d["steps"] for d in drafts) / steps if steps else None}


def compare(answers, baseline) -> dict:
    """Two evaluations of the same items side by side, on the answers to the same prompts that both have a score for.

    Returns:
        items; score, baseline: means over them; better, worse: items whose mean over runs rose or fell; sign_test_p: two-sided, exact;
        None where no item changed; changed: the answers whose score is another one.
    """
    theirs = {_key(b): b for b in baseline if b["error"] is None}
    pairs = [(a, theirs[_key(a)]) for a in answers if a["error"] is None and _key(a) in theirs]
    ours_of, theirs_of = _means(a for a, _ in pairs), _means(b for _, b in pairs)
    better = sum(ours_of[name] > theirs_of[name] for name in ours_of)
    worse = sum(ours_of[name] < theirs_of[name] for name in ours_of)
    n = len(ours_of)
    return {"items": n, "score": sum(ours_of.values()) / n if n else None, "baseline": sum(theirs_of.values()) / n if n else None,
            "better": better, "worse": worse, "sign_test_p": sign_test(better, worse),
            "changed": [{"id": a["id"], "run": a["run"], "score": a["score"], "baseline": b["score"]} for a, b in pairs if a["score"] != b["score"]]}


def _key(answer: dict) -> tuple:
    return answer["id"], answer["run"], answer["prompt_sha256"]


def sign_test(better: int, worse: int) -> float | None:
    """How likely a split at least so uneven is if both directions are equally likely."""
    n = better + worse
    if n == 0:
        return None
    tail = sum(math.comb(n, k) for k in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**n)
