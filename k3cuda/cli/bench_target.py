"""Flags of the benchmarks that ask a server: where it is and how it is asked."""
import json

import click

from ..errors import UsageError
from . import options
from .bench_table import ALLOW
from .output import say

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def _fields(ctx, option, value):
    """A JSON object."""
    if value is None:
        return {}
    try:
        found = json.loads(value, parse_constant=_no_constant)
    except ValueError as e:
        raise click.UsageError(f"{option.opts[0]}: no JSON ({e})", ctx) from e
    if not isinstance(found, dict):
        raise click.UsageError(f"{option.opts[0]}: found {value!r:.60}, wanted a JSON object", ctx)
    return found


def _no_constant(name: str):
    raise ValueError(f"{name} is no JSON")


URL = "http://127.0.0.1:8000"
ASKING = (
    options.flag("--endpoint", metavar="PATH", help="The route that is asked."),
    options.flag("--api-key", metavar="KEY", envvar=["K3CUDA_API_KEY", "OPENAI_API_KEY"], help="Sent as Authorization: Bearer KEY.  [default: none]"),
    options.flag("--extra-body", callback=_fields, metavar="JSON", help="Fields to put into every request; null takes one of ours out."),
    options.flag("--timeout", type=options.Number(0, min_open=True), default=3600, metavar="SECONDS",
                 help="A request that takes longer has failed.  [default: 3600]"),
    options.flag("--stall-timeout", type=options.Number(0, min_open=True), default=600, metavar="SECONDS",
                 help="So has one of which nothing arrives for so long.  [default: 600]"))
COUNTING = (
    options.flag("--metric-percentiles", default="50,90,99", metavar="LIST", help="Percentiles to print.  [default: 50,90,99]"),
    options.flag("--save-detailed", is_flag=True, help="Put times of every request into the result."), ALLOW)

def percentile_list(text: str) -> tuple:
    """UsageError for what is no list of percentiles."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (-1.0,)
    if not all(0 <= p <= 100 for p in found):
        raise UsageError(f"--metric-percentiles: found {text!r:.60}, wanted numbers from 0 to 100 with commas between them")
    return tuple(int(p) if p == int(p) else p for p in found)


def make_target(base_url, endpoint, model, api_key, extra_body, timeout, stall_timeout):
    """The Target of the flags of the same names; `base_url` may end in the /v1 that every client of OpenAI is given."""
    from ..bench.http_client import Address
    from ..bench.target import Target

    if endpoint != endpoint.strip() or not endpoint.startswith("/") or not endpoint.isascii() or not endpoint.isprintable() or " " in endpoint:
        raise UsageError(f"--endpoint: found {endpoint!r:.80}, wanted a path like {COMPLETIONS}")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise UsageError("--api-key: found characters that no header can carry")
    return Target(Address.of(base_url.rstrip("/").removesuffix("/v1")), endpoint, model, api_key, extra_body, timeout, stall_timeout)


def detail(times) -> dict:
    """Lists with an element a request, under the names of vLLM."""
    done = [t if t.error is None else None for t in times]
    return {"input_lens": [t.prompt_tokens for t in times], "output_lens": [t and t.tokens for t in done], "ttfts": [t and t.ttft for t in done],
            "itls": [t and t.itl for t in done], "e2els": [t and t.e2el for t in done], "errors": [t.error for t in times]}


def counted_by(times) -> dict:
    """How many requests had their tokens counted by the server, and how many by their events."""
    done = [t for t in times if t.error is None]
    usage = sum(t.counted is not None for t in done)
    if usage < len(done):
        say(f"{len(done) - usage} answers came without usage: each of their events is counted as one token")
    return {"usage": usage, "events": len(done) - usage}
