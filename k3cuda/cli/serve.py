"""`k3cuda serve`: an OpenAI-compatible server. docs/serve.md says how it runs and what it takes."""
import json
import os
import re
from urllib.parse import urlsplit

import click

from ..errors import UsageError
from . import options
from .answers import loading, shows_progress, work_for_rank_0
from .output import say
from .pasted import OF_A_SERVER, flags_of

MAX_BATCH, PREFIX_CACHE, MOST = 8, 8, 64   # defaults, and what the two may be together


class Origins(click.ParamType):
    """Origins of web pages with commas between them, or as vLLM takes them, a JSON list."""

    name = "list"

    def convert(self, value, param, ctx):
        if not isinstance(value, str):
            return value
        try:
            found = json.loads(value) if value.lstrip().startswith("[") else value.split(",")
        except (ValueError, RecursionError) as e:
            self.fail(f"no JSON ({e})", param, ctx)
        for origin in found:
            if not (isinstance(origin, str) and (origin == "*" or _as_sent(origin) == origin)):
                self.fail(f"found {origin!r:.60}, wanted * or origins as browsers send them, such as https://page.example:8443 (small letters, no port that "
                          "the scheme has anyway, no path)", param, ctx)
        return tuple(found)


def _as_sent(origin: str) -> str | None:
    """How a browser writes the origin; None where there is none such."""
    try:
        parts = urlsplit(origin)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return None
    if not re.fullmatch(r"[a-z0-9.-]+|[0-9a-f:.]+", host):
        return None
    usual = {"http": 80, "https": 443}.get(parts.scheme)
    return f"{parts.scheme}://" + (f"[{host}]" if ":" in host else host) + ("" if port in (None, usual) else f":{port}")


def _check_key(key: str | None) -> None:
    """UsageError for a key that opens the server, or that no client can send; it is a secret, so no message shows it."""
    if key == "":   # a secret that was not filled in must not open the server
        raise UsageError("--api-key: found an empty key", "give one, or neither the flag nor K3CUDA_API_KEY for a server without")
    if key is not None and key != key.strip():   # headers lose them on their way
        raise UsageError("--api-key: found blanks or a line's end around the key", "take them off: in a shell \"$(cat FILE)\" leaves out the end of a file's last line")
    if key is not None and not key.isprintable():   # lone surrogates are what was no UTF-8
        raise UsageError("--api-key: found bytes that are no UTF-8, or characters that no header can carry", "give a key of printable characters")


@click.command(cls=options.Command)
@options.model()
@options.flags(
    options.flag("--host", default="127.0.0.1", metavar="ADDRESS", help="0.0.0.0 for all interfaces.  [default: 127.0.0.1]"),
    options.flag("--port", type=click.IntRange(0, 65535), default=8000, help="0: a free one.  [default: 8000]"),
    options.flag("--api-key", metavar="KEY", envvar="K3CUDA_API_KEY", help="Answer only requests that have it.  [default: none]"),
    options.flag("--served-model-name", multiple=True, metavar="NAME", help="What requests call the model; may be repeated.  [default: MODEL]"),
    options.flag("--reasoning-effort", type=click.Choice(["none", "low", "high", "max"], False), aliases=["--thinking-effort"],
                 help=f"Where a request says nothing.  [default: {options.DEFAULT_EFFORT}]"),
    options.flag("--prefix-cache", type=click.IntRange(min=0), metavar="N",
                 help="Beginnings of texts to keep; each costs what a sequence of --max-batch does; 0: none.  [default: 8]"),
    options.flag("--no-enable-prefix-caching", is_flag=True, hidden=True, aliases=["--disable-radix-cache"]),
    options.flag("--seed", "-s", type=click.IntRange(0, (1 << 64) - 1), aliases=["--random-seed"],
                 help="Of requests without one, which then have theirs in order of arrival.  [default: random]"),
    options.flag("--max-queue", type=click.IntRange(min=0), default=512, metavar="N", aliases=["--max-queued-requests"],
                 help="Requests that may wait; more get status 429.  [default: 512]"),
    options.flag("--max-body", type=click.IntRange(min=1), default=32 << 20, metavar="BYTES", help="Longest body.  [default: 33554432, 32 MiB]"),
    options.flag("--allowed-origins", type=Origins(), default=(), metavar="LIST",
                 help="Origins of web pages whose scripts may ask (CORS), with commas; * for all.  [default: none]"),
    options.flag("--shutdown-grace", type=options.Number(min=0), default=30, metavar="SECONDS",
                 help="For requests to end after SIGTERM or Ctrl-C.  [default: 30]"))
@options.server_engine(MAX_BATCH)
@options.flags(*flags_of(OF_A_SERVER))
def serve(model, host, port, api_key, served_model_name, reasoning_effort, prefix_cache, no_enable_prefix_caching, seed, max_queue, max_body,
          allowed_origins, shutdown_grace, no_progress, **engine):
    """Serve a model to OpenAI clients until a signal comes, or the model is lost."""
    try:
        from ..serve import server
    except ImportError as e:
        raise UsageError(f"serve needs the package {e.name}, which is not installed", "pip install 'k3cuda[serve]'") from e
    from ..serve.http import Limits

    _check_key(os.environ.get("K3CUDA_API_KEY") if api_key is None else api_key)
    names = served_model_name or (model,)
    for name in names:
        if not name.isprintable():   # every list of models and every line of the metrics has it
            raise UsageError(f"--served-model-name: found {name!r:.80}, wanted UTF-8 text on one line", "give another name")
    effort, engine = options.effort(reasoning_effort, False, model), options.engine_arguments(engine)
    if no_enable_prefix_caching:
        prefix_cache = 0
    elif prefix_cache is None:
        prefix_cache = max(0, min(PREFIX_CACHE, MOST - engine["max_batch"]))
    engine |= {"prefix_cache": prefix_cache}
    work_for_rank_0(model, **engine)
    engine |= {"load_progress": not no_progress and shows_progress()}
    with server.bind(host, port) as listener:
        with loading(model, not no_progress):
            service = server.open_service(model, engine, names=names, effort=effort,
                                          max_queue=max_queue, limits=Limits(max_body=max_body), api_key=api_key, seed=seed,
                                          allowed_origins=allowed_origins)
        address, port = listener.getsockname()[:2]
        address = f"[{address}]" if ":" in address else address
        listener.listen(server.BACKLOG)   # only now: who connects earlier would take a model that loads for one that hangs
        say(f"{service.names[0]} is served at http://{address}:{port}/v1; Ctrl-C ends")
        server.serve(service, listener, shutdown_grace)
