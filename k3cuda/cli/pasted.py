"""Flags that people paste from a command of vLLM or SGLang, and that change nothing here: each is accepted, with one line that says why.

Flags that would change what runs are not here: they are refused as unknown, or for what they hold.
"""
from .flag_kinds import NotNeeded, flag

_FLAG = {"is_flag": True}
_TP = "give --tp alone"


def _one_of(*values):
    return {"accepts": lambda value: value.lower() in values, "wanted": " or ".join(values)}


def _most_of_the_memory(value: str) -> bool:
    try:
        return 0.9 <= float(value) <= 1
    except ValueError:
        return False


# Of every command that opens a model. Where a flag takes a value it is not looked at, unless the entry says what it may be.
OF_A_MODEL = {
    "--trust-remote-code": ("no code of a checkpoint is ever run", _FLAG),
    "--revision": ("the files in the folder are read as they are", {}),
    "--tokenizer": ("the tokenizer is the checkpoint's own", {}),
    "--tokenizer-mode": ("there is one tokenizer, the checkpoint's own", {}),
    "--tokenizer-revision": ("the tokenizer is the checkpoint's own", {}),
    "--generation-config": ("sampling defaults are the checkpoint's", _one_of("auto")),
    "--dtype": ("the precisions are those of docs/numerics.md", {}),
    "--quantization": ("the released formats are read as they are", {}),
    "--mamba-ssm-cache-dtype": ("the states of KDA are F32", _one_of("float32", "auto")),
    "--gpu-memory-utilization": ("0.92 of a GPU's memory is used; --max-model-len and --max-batch make it less",
                                 {"accepts": _most_of_the_memory, "wanted": "0.9 to 1, since this version has no budget for GPU memory",
                                  "aliases": ["--mem-fraction-static", "--kv-cache-free-gpu-memory-fraction"]}),
    "--no-mmap": ("files are mapped only where --load-mode says so", _FLAG | {"aliases": ["--weight-loader-disable-mmap"]}),
    "--enable-chunked-prefill": ("prompts always run in chunks beside the answers of others", _FLAG),
    "--chunked-prefill-size": ("the rows of a step are fixed", {"aliases": ["--max-prefill-tokens"]}),
    "--max-num-batched-tokens": ("the rows of a step are fixed", {}),
    "--enforce-eager": ("the launches of a step are fixed", _FLAG | {"aliases": ["--disable-cuda-graph"]}),
    "--cuda-graph-max-bs": ("the launches of a step are fixed", {"aliases": ["--max-cudagraph-capture-size"]}),
    "--compilation-config": ("kernels are compiled ahead, see k3cuda compile", {}),
    "--enable-expert-parallel": ("how experts lie over the ranks is fixed, see docs/design.md", _FLAG),
    "--moe-runner-backend": ("the experts have one path", {"aliases": ["--moe-backend"]}),
    "--ep-size": ("how experts lie over the ranks is fixed, see docs/design.md", {"aliases": ["--expert-parallel-size"]}),
    "--pipeline-parallel-size": ("ranks share every layer", _one_of("1") | {"aliases": ["-pp", "--pp-size"], "instead": _TP}),
    "--data-parallel-size": ("a process has one copy of the model", _one_of("1") | {"aliases": ["-dp", "--dp-size"], "instead": _TP}),
    "--disable-custom-all-reduce": ("the collectives of a step are part of its plan", _FLAG),
    "--block-size": ("a page of the cache has 64 tokens", {"aliases": ["--page-size"]}),
    "--swap-space": ("a request that runs is never moved out", {}),
    "--async-scheduling": ("a step is launched before the tokens of the one before it are read where the backend can", _FLAG),
    "--distributed-executor-backend": ("--ranks says how ranks run", {}),
    "--limit-mm-per-prompt": ("only text is read", {}),
    "--language-model-only": ("only text is read", _FLAG),
    "--mm-encoder-tp-mode": ("only text is read", {}),
    "--speculative-algorithm": ("--draft-model alone says that drafts are made", _one_of("dspark")),
    "--speculative-num-steps": ("the drafts of a step are made at once, --num-speculative-tokens says how many", {}),
    "--speculative-eagle-topk": ("drafts are one sequence", _one_of("1")),
}
OF_A_SERVER = {
    "--reasoning-parser": ("reasoning is read from the token ids of the format, always", {}),
    "--tool-call-parser": ("tool calls are read from the token ids of the format, always", {}),
    "--enable-prefix-caching": ("prefixes are kept, --prefix-cache says how many", _FLAG),
    "--enable-auto-tool-choice": ("tools of a request are always offered to the model", _FLAG),
    "--enable-reasoning": ("reasoning is always told apart", _FLAG),
    "--enable-prompt-tokens-details": ("usage always says what was cached", _FLAG | {"aliases": ["--enable-cache-report"]}),
    "--enable-metrics": ("/metrics is always there", _FLAG),
    "--schedule-policy": ("requests run in order of arrival", _one_of("fcfs") | {"aliases": ["--scheduling-policy"]}),
    "--uvicorn-log-level": ("the log has one level, --log-level", {}),
    "--disable-uvicorn-access-log": ("the line of each request is at level info", _FLAG),
    "--disable-log-requests": ("prompt text is never logged", _FLAG | {"aliases": ["--no-enable-log-requests"]}),
    "--disable-log-stats": ("counts are at /metrics only", _FLAG),
    "--allowed-methods": ("scripts of --allowed-origins may do what the routes take", {}),
    "--allowed-headers": ("scripts of --allowed-origins may send any header", {}),
    "--skip-server-warmup": ("nothing is warmed up", _FLAG),
}
# Of `vllm bench serve`.
OF_A_BENCHMARK = {
    "--backend": ("what is asked is the --endpoint", {"aliases": ["--endpoint-type"]}),
    "--dataset-name": ("prompts are drawn at random", _one_of("random")),
    "--tokenizer": ("tokens are counted by the server", {}),
    "--trust-remote-code": ("no code of a checkpoint is ever run", _FLAG),
    "--percentile-metrics": ("all of them are printed", {}),
    "--save-result": ("the result is on stdout, or in --output", _FLAG),
    "--disable-tqdm": ("there is no bar", _FLAG),
}


def flags_of(table: dict) -> tuple:
    """Hidden flags for `options.flags`."""
    return tuple(flag(name, cls=NotNeeded, why=why, **attributes) for name, (why, attributes) in table.items())
