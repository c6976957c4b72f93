"""Kimi K3 decode on NVIDIA GPUs without torch; a NumPy reference everywhere else.

    from k3cuda import LLM, SamplingParams

    with LLM("demo") as llm:
        print(llm.generate("Hello", SamplingParams(temperature=0, max_tokens=16))[0].text)
"""
import importlib

__version__ = "0.1.0"
__license__ = "Apache-2.0"   # SPDX; of the trained demo too

# Public names and where they live; loaded when they are asked for, so that `import k3cuda` costs nothing.
_HOMES = {"LLM": "llm", "Stream": "stream", "Session": "session", "SamplingParams": "runtime.sampling", "Output": "runtime.output", "Chunk": "runtime.output",
          "Stats": "runtime.request"}
_HOMES |= dict.fromkeys(("K3Error", "UsageError", "RequestError", "ConfigError", "CheckpointError", "OutOfMemory", "DeviceError",
                         "PromptTooLong", "NumericalError", "RankDied", "Aborted"), "errors")
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *_HOMES})
