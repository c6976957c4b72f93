"""`k3cuda serve`: an OpenAI-compatible server. docs/serve.md says how it runs and what it takes."""
import click

from ..errors import UsageError
from . import options
from .answers import loading, shows_progress, work_for_rank_0
from .output import say

MAX_BATCH, PREFIX_CACHE, MOST = 8, 8, 64   # defaults, and what the two may be together
_FLAG = {"is_flag": True}
# What people paste from a vLLM command. Where a flag takes a value it is not looked at.
NOT_NEEDED = {
    ("--trust-remote-code",): ("no code of a checkpoint is ever run", _FLAG),
    ("--reasoning-parser",): ("reasoning is read from the token ids of the format, always", {}),
    ("--tool-call-parser",): ("tool calls are read from the token ids of the format, always", {}),
    ("--enable-prefix-caching",): ("prefixes are kept, --prefix-cache says how many", _FLAG),
    ("--enable-auto-tool-choice",): ("tools of a request are always offered to the model", _FLAG),
    ("--enable-reasoning",): ("reasoning is always told apart", _FLAG),
    ("--tokenizer",): ("the tokenizer is the checkpoint's own", {}),
    ("--tokenizer-mode",): ("there is one tokenizer, the checkpoint's own", {}),
    ("--dtype",): ("the precisions are those of docs/numerics.md", {}),
    ("--quantization",): ("the released formats are read as they are", {}),
    ("--enable-chunked-prefill",): ("prompts always run in chunks beside the answers of others", _FLAG),
    ("--max-num-batched-tokens",): ("the rows of a step are fixed", {}),
    ("--enforce-eager",): ("the launches of a step are fixed", _FLAG),
    ("--enable-expert-parallel",): ("how experts lie over the ranks is fixed, see docs/design.md", _FLAG),
    ("--block-size",): ("a page of the cache has 64 tokens", {}),
    ("--swap-space",): ("a request that runs is never moved out", {}),
    ("--async-scheduling",): ("a step is launched before the tokens of the one before it are read where the backend can", _FLAG),
    ("--distributed-executor-backend",): ("--ranks says how ranks are joined", {}),
    ("--limit-mm-per-prompt",): ("only text is read", {}),
    ("--mm-encoder-tp-mode",): ("only text is read", {}),
    ("--compilation-config",): ("kernels are compiled ahead, see k3cuda compile", {}),
    ("--uvicorn-log-level",): ("the log has one level, --log-level", {}),
    ("--disable-uvicorn-access-log",): ("the line of each request is at level info", _FLAG),
    ("--disable-log-requests",): ("prompt text is never logged", _FLAG),
    ("--disable-log-stats",): ("counts are at /metrics only", _FLAG),
}


@click.command(cls=options.Command)
@options.model()
@options.flags(
    options.flag("--host", default="127.0.0.1", metavar="ADDRESS", help="0.0.0.0 for all interfaces.  [default: 127.0.0.1]"),
    options.flag("--port", type=click.IntRange(0, 65535), default=8000, help="0: a free one.  [default: 8000]"),
    options.flag("--api-key", metavar="KEY", envvar="K3CUDA_API_KEY", help="Answer only requests that have it.  [default: none]"),
    options.flag("--served-model-name", multiple=True, metavar="NAME", help="What requests call the model; may be repeated.  [default: MODEL]"),
    options.flag("--reasoning-effort", type=click.Choice(["none", "low", "high", "max"], False), aliases=["--thinking-effort"],
                 help="Where a request says nothing.  [default: max; none for demo]"),
    options.flag("--prefix-cache", type=click.IntRange(min=0), metavar="N",
                 help="Beginnings of texts to keep; each costs what a sequence of --max-batch does; 0: none.  [default: 8]"),
    options.flag("--no-enable-prefix-caching", is_flag=True, hidden=True),
    options.flag("--max-queue", type=click.IntRange(min=0), default=512, metavar="N", aliases=["--max-queued-requests"],
                 help="Requests that may wait; more get status 429.  [default: 512]"),
    options.flag("--max-body", type=click.IntRange(min=1), default=32 << 20, metavar="BYTES", help="Longest body.  [default: 33554432, 32 MiB]"),
    options.flag("--shutdown-grace", type=click.FloatRange(min=0), default=30, metavar="SECONDS",
                 help="For requests to end after SIGTERM or Ctrl-C.  [default: 30]"))
@options.server_engine(MAX_BATCH)
@options.flags(*(options.flag(*names, cls=options.NotNeeded, why=why, **attributes) for names, (why, attributes) in NOT_NEEDED.items()))
def serve(model, host, port, api_key, served_model_name, reasoning_effort, prefix_cache, no_enable_prefix_caching, max_queue, max_body,
          shutdown_grace, no_progress, **engine):
    """Serve a model to OpenAI clients until a signal comes."""
    try:
        from ..serve import server
    except ImportError as e:
        raise UsageError(f"serve needs the package {e.name}, which is not installed", "pip install 'k3cuda[serve]'") from e
    from ..serve.http import Limits

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
            service = server.open_service(model, engine, names=served_model_name or (model,), effort=effort,
                                          max_queue=max_queue, limits=Limits(max_body=max_body), api_key=api_key)
        address, port = listener.getsockname()[:2]
        address = f"[{address}]" if ":" in address else address
        listener.listen(server.BACKLOG)   # only now: who connects earlier would take a model that loads for one that hangs
        say(f"{service.names[0]} is served at http://{address}:{port}/v1; Ctrl-C ends")
        server.serve(service, listener, shutdown_grace)
