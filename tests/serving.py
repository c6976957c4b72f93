"""Servers for tests: in this process on a backend that says what it is told to, listening at a free port."""
import importlib.util
import os
import socket
import threading
from contextlib import contextmanager

import pytest
from scripted import END, TOKENIZER, Scripted

from k3cuda.errors import CheckpointError
from k3cuda.runtime.open_model import Model

# CI installs k3cuda[test], which has all of them, and names its CUDA line: nothing may then be skipped.
MISSING = [name for name in ("starlette", "uvicorn", "openai", "httpx") if importlib.util.find_spec(name) is None]
if MISSING and "REQUIRE_CUDA_LINE" not in os.environ:
    pytest.skip(f"{', '.join(MISSING)} not installed; install k3cuda[test]", allow_module_level=True)

import httpx  # noqa: E402

from k3cuda.serve import server as server_module  # noqa: E402
from k3cuda.serve.http import Limits  # noqa: E402


class Running:
    """A server that runs: `url`, `backend`, `service`, an httpx client `http`, and `stop()`."""

    def __init__(self, monkeypatch, script=None, *, tokenizer=TOKENIZER, names=("tiny-random",), effort="none", max_queue=512, limits=Limits(), api_key=None,
                 grace_s=5.0, generation_config=None, prefix_cache=0, seed=None, allowed_origins=(), **backend):
        self.backend = Scripted(TOKENIZER.vocab_size, **backend)
        self.backend.script = None if script is None else TOKENIZER.encode(script, allow_special=True)
        model = Model(self.backend, tokenizer, generation_config or {}, (END,), CheckpointError("no tokenizer here"), prefix_cache)
        monkeypatch.setattr(server_module, "open_model", lambda *_, **__: model)
        listener = server_module.bind("127.0.0.1", 0)
        self.service = server_module.open_service("tiny-random", {}, names=names, effort=effort, max_queue=max_queue, limits=limits, api_key=api_key, seed=seed,
                                                  allowed_origins=allowed_origins)
        listener.listen(server_module.BACKLOG)
        self.server = server_module.Server(self.service, grace_s)
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=30)
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()

    @property
    def engine(self):
        return self.service.worker.ready.result()

    def post(self, path, **body):
        return self.http.post(path, json=body)

    def stop(self) -> None:
        self.http.close()
        self.server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive(), "the server did not end"
        self.service.worker.join(5)
        assert self.backend.closed


@pytest.fixture
def serving(monkeypatch):
    """Makes servers; arguments of Running."""
    made = []

    def make(*args, **options) -> Running:
        made.append(Running(monkeypatch, *args, **options))
        return made[-1]

    yield make
    for running in made:
        running.stop()


@contextmanager
def raw(running, data: bytes, receive_buffer: int | None = None):
    """A bare connection that has sent `data`."""
    with socket.socket() as connection:
        if receive_buffer is not None:   # before it connects: the window is agreed on then
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(20)
        connection.connect(("127.0.0.1", running.port))
        connection.sendall(data)
        yield connection
