"""What a worker process runs: `python -m k3cuda.runtime.rank_worker`, with one line of JSON on stdin (rank_workers.py)."""
import json
import logging
import os
import signal
import sys


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):   # rank 0 decides; it is also told, and the pipe ends with it
        signal.signal(number, signal.SIG_IGN)
    line = bytearray()
    while not line.endswith(b"\n"):   # byte by byte: what follows is the pipe's end, which a thread waits for
        part = os.read(0, 1)
        if not part:
            sys.exit(9)
        line += part
    work = json.loads(line)
    from .rank_workers import tie_to_parent

    tie_to_parent(work["parent"])
    log, handler = logging.getLogger("k3cuda"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"[r{work['rank']}] %(levelname)s: %(message)s"))
    log.addHandler(handler)
    log.setLevel(work["log_level"])
    log.propagate = False
    from .launch import Launch
    from .open_model import open_model
    from .process_end import leave

    rank, size = work["rank"], work["size"]
    place = Launch("k3cuda", rank, size, rank, size, "127.0.0.1", work["port"], work["token"])
    try:
        open_model(place=place, **work["arguments"])
    except SystemExit as end:   # as every rank but 0 ends
        leave(end.code)


if __name__ == "__main__":
    main()
