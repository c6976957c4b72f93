"""Bodies that nobody would send: whatever comes, it is answered, refused by name, and the server goes on. No 500."""
import json

from hypothesis import HealthCheck, given, settings, strategies as st
from scripted import USER
from serving import serving  # noqa: F401, the fixture

from k3cuda.serve.fields import CHAT, COMPLETION

TEXT = st.text(max_size=12) | st.sampled_from(["a", "", "\ud800", "<|sep|>", "\x00", "none", "tiny-random", "auto", "user", "tool", "function", "text"])
NUMBER = st.integers(-2, 600) | st.sampled_from([2**63, 2**64, 10**40, -1, 0.5, 1e-9, 1e300, -0.0]) | st.floats(allow_nan=False, allow_infinity=False)
VALUE = st.recursive(st.none() | st.booleans() | NUMBER | TEXT, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
    st.sampled_from(["type", "role", "content", "text", "function", "name", "arguments", "tool_calls", "id", "tools", "parameters", "include_usage", "schema",
                     "thinking", "json_schema"]) | TEXT, inner, max_size=4), max_leaves=10)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool", "developer"])}, optional={
    name: VALUE for name in ("content", "tool_calls", "tool_call_id", "name", "reasoning_content", "tools")})
MESSAGES = st.just(USER) | st.lists(MESSAGE, max_size=4) | VALUE
PROMPT = TEXT | st.lists(st.integers(-1, 600), max_size=6) | st.lists(TEXT | st.lists(st.integers(0, 581), max_size=3), max_size=3) | VALUE
# What may stand in a field, something fitting among it.
FITTING = {
    "messages": MESSAGES, "prompt": PROMPT, "model": st.just("tiny-random"), "stream": st.booleans(), "echo": st.booleans(), "logprobs": st.booleans() | st.integers(0, 20),
    "top_logprobs": st.integers(0, 20), "stream_options": st.just({"include_usage": True}), "max_tokens": st.integers(0, 9), "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1), "stop": st.lists(TEXT, max_size=3), "tool_choice": st.sampled_from(["auto", "none", "required"]),
    "reasoning_effort": st.sampled_from(["none", "minimal", "high"]),
}
# What every route takes, so that half of the requests have only odd mixtures of sound fields: without these nearly all would be refused.
SOUND = FITTING | {"messages": st.just(USER), "prompt": st.text("ab \u00fc", min_size=1, max_size=9) | st.lists(st.integers(0, 581), min_size=1, max_size=6),
                   "tokens": st.lists(st.integers(0, 581), max_size=6), "tool_choice": st.sampled_from(["auto", "none"])}
FEW = {"max_tokens": 5}   # most answers end soon


@st.composite
def bodies(draw, names: set[str], *always: str):
    """`always`, and up to four other fields; or no object at all."""
    if draw(st.integers(0, 19)) == 0:
        return draw(VALUE)
    is_sound = draw(st.booleans())
    others = sorted((names & SOUND.keys() if is_sound else names) - {*always})
    chosen = [*always, *draw(st.lists(st.sampled_from(others), max_size=4, unique=True))]
    return FEW | {name: draw(SOUND[name] if is_sound else FITTING[name] if name in FITTING and draw(st.integers(0, 3)) else VALUE) for name in chosen}


REQUESTS = (st.tuples(st.just("/v1/chat/completions"), bodies(CHAT, "messages")) | st.tuples(st.just("/v1/completions"), bodies(COMPLETION, "prompt"))
            | st.tuples(st.just("/tokenize"), bodies({"tools", "reasoning_effort", "return_token_strs", "model"}, "prompt"))
            | st.tuples(st.just("/tokenize"), bodies({"tools", "reasoning_effort", "return_token_strs", "model"}, "messages"))
            | st.tuples(st.just("/detokenize"), bodies({"model"}, "tokens")))


def test_no_body_stops_the_server(serving):
    running, statuses = serving(max_model_len=320, num_slots=2), {}

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(REQUESTS)
    def sent(request):
        path, body = request
        found = running.http.post(path, content=json.dumps(body).encode())
        statuses[found.status_code] = statuses.get(found.status_code, 0) + 1
        assert found.status_code in (200, 400, 404), (found.status_code, found.text)
        if "event-stream" in found.headers["content-type"]:
            assert found.text.endswith("data: [DONE]\n\n") and '"error"' not in found.text
        else:
            assert ("error" in found.json()) == (found.status_code != 200)

    sent()
    assert statuses[200] > 10 and statuses[400] > 10, statuses   # neither all nothing nor all right
    # One more answer: what was stopped before it has left the engine by then, since the worker takes everything in order.
    assert running.post("/v1/completions", prompt="a", **FEW).status_code == 200
    assert running.http.get("/health").status_code == 200 and running.engine.scheduler.free[0] == 2 and running.service.worker.in_flight == 0


def test_no_bytes_stop_the_server(serving):
    running = serving(max_model_len=64)

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.binary(max_size=40), st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]))
    def sent(data, path):
        assert running.http.post(path, content=data).status_code == 400

    sent()
