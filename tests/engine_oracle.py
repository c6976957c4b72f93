"""What a request must give, by brute force, and how tests drive an engine on the fake backend."""
from fake_backend import FakeBackend, fake_logits

from k3cuda.reference.sample import sample_row
from k3cuda.runtime.engine import Engine
from k3cuda.runtime.request import Request
from k3cuda.runtime.sampling import Draw, SamplingParams
from k3cuda.runtime.text_stream import TextStream

VOCAB = 24     # small, so that stop tokens and stop strings are met by chance
EOS = (20, 23)  # without text, as the release's end token


class Letters:
    """A tokenizer: ids 0 to 19 are one to three letters of a small alphabet, the rest has no text."""

    @staticmethod
    def token_bytes(i):
        return ("abc"[i % 3] + "abca"[i // 3 % 4] * (i % 2) + "b" * (i % 5 == 0)).encode() if i < 20 else b""


def text_of(params):
    return TextStream(Letters, params.stop)


def alone(prompt, params, *, context, eos=EOS, bad=lambda tokens: False):
    """What a request must give: (ids, text, finish_reason, stop_reason), by brute force over whole prefixes and whole texts."""
    tokens, text = list(prompt), ""
    limit = min(params.max_tokens or context, context - len(prompt))
    while True:
        output = tokens[len(prompt):]
        if bad(tokens):
            return output, text, "error", None
        draw = Draw(params, params.seed, len(tokens), prompt_ids=list(prompt), output_ids=output)
        token = sample_row(fake_logits(tokens, VOCAB), draw).token_id
        tokens.append(token)
        output.append(token)
        if token in eos and not params.ignore_eos:
            return output, text + Letters.token_bytes(token).decode(), "stop", None
        if token in params.stop_token_ids:
            return output, text, "stop", token
        before, text = text, text + Letters.token_bytes(token).decode()
        for end in range(len(before) + 1, len(text) + 1):  # the match that ends first, of several the longest
            hits = [s for s in params.stop if text[:end].endswith(s)]
            if hits:
                hit = max(hits, key=len)
                return output, text[:end - len(hit)], "stop", hit
        if len(output) == limit:
            return output, text, "length", None


def drive(engine, most=5000):
    """Steps until nothing is left; {request_id: (ids, text, finish_reason, stop_reason)} and the last event of each."""
    answers, last = {}, {}
    for _ in range(most):
        collect(engine.step(), answers, last)
        if not engine.has_work:
            return answers, last
    raise AssertionError("the engine does not come to an end")


def collect(events, answers, last):
    for e in events:
        ids, text = answers.get(e.request_id, ([], ""))[:2]
        assert e.request_id not in last, "an event after the end"
        answers[e.request_id] = (ids + list(e.token_ids), text + e.delta.content, e.finish_reason, e.stop_reason)
        if e.finish_reason:
            last[e.request_id] = e


def run(requests, **backend):
    engine = Engine(FakeBackend(VOCAB, **backend))
    for request in requests:
        engine.add(request)
    answers, last = drive(engine)
    assert engine.scheduler.free == (engine.scheduler.num_slots, engine.scheduler.num_pages)
    return answers, last, engine


def request(name, prompt, text=True, **given_):
    params = SamplingParams(**{"seed": 1, "max_tokens": 12} | given_).resolved({})
    return Request(name, prompt, params, EOS, text_of(params) if text else None)


def a_failure_ends_what_runs(call, raised, want, **backend):
    """Two of three requests run when a backend's `call` raises: they end with `want` and its words, the third as if alone, nothing is held."""
    engine = Engine(FakeBackend(VOCAB, num_slots=2, fail={call: raised}, **backend))
    for name in "abc":
        engine.add(request(name, [1, 2], ignore_eos=True))
    answers, last = drive(engine)
    assert [last[n].finish_reason for n in "abc"] == ["error", "error", "length"] if call else ["error", "length", "length"]
    assert isinstance(last["a"].error, want) and str(raised) in str(last["a"].error)
    assert answers["c"] == run([request("c", [1, 2], ignore_eos=True)])[0]["c"]
    assert engine.scheduler.free == (2, engine.scheduler.num_pages)
