"""Events of Chrome's trace format (chrome://tracing, Perfetto), which a file holds as one JSON list."""


def bar(name: str, process: int, line: int, begin_ns: float, end_ns: float, **more) -> dict:
    """Something that takes from one time to another, on a line of a process; `more`: what a click on it shows."""
    return {"name": name, "ph": "X", "pid": process, "tid": line, "ts": round(begin_ns / 1e3, 3), "dur": round((end_ns - begin_ns) / 1e3, 3), "args": more}


def moment(name: str, process: int, line: int, at_ns: float, **more) -> dict:
    return {"name": name, "ph": "i", "s": "t", "pid": process, "tid": line, "ts": round(at_ns / 1e3, 3), "args": more}


def value(name: str, process: int, at_ns: float, found: float) -> dict:
    """What a counter has from this time on."""
    return {"name": name, "ph": "C", "pid": process, "ts": round(at_ns / 1e3, 3), "args": {name: found}}


def process_name(process: int, name: str) -> dict:
    return {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}


def line_name(process: int, line: int, name: str) -> dict:
    return {"name": "thread_name", "ph": "M", "pid": process, "tid": line, "args": {"name": name}}
