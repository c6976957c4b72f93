"""One process's part in a job: meets the other ranks, loads beside them, and works for rank 0 until it ends."""
import logging
import os
import secrets
import signal
import threading
import time
from typing import Callable, NoReturn

from .. import __version__
from ..errors import DeviceError, K3Error, UsageError
from . import nccl, wire
from .collectives import TcpRanks
from .launch import Launch, launched
from .loading import Loading
from .machine import AUTO_RANKS, ON_GPU, PROCESSES, RANKS, VIRTUAL, gpu_problem, probe_driver
from .model_identity import identity
from .rank_backend import RankedBackend, follow
from .rank_watch import EXPLAIN_S, Watch
from .rank_workers import Workers
from .rendezvous import Joined, Server
from .rendezvous_join import Told, join
from .shared_load import SharedLoading

log = logging.getLogger("k3cuda")

MAX_TIMEOUT_S = 86_400
SHARE_GPU = "K3CUDA_SHARE_GPU"   # test switch: ranks of this machine share its GPUs, as evenly as they can
_SECRET_BYTES = 32
_ended: list["Job"] = []         # of this process, under a launcher: there is but one


def open_job(ranks, place: Launch | None, model, draft_model, given: dict, timeout) -> "Job | None":
    """The job that this process belongs to; None where all ranks run in it.

    Args:
        ranks: "virtual", "processes", or "auto": processes where a launcher has started several, or where a backend on GPUs has one here for each.
        place: in the job, where the caller knows it.
        model, draft_model: as users name them. given: other arguments of `open_model`, JSON-ready; equal on every rank.
        timeout: seconds for all ranks to come.
    Raises:
        UsageError: another number of processes than of ranks, a contradiction in what the launcher says, or a model that other processes cannot open.
    """
    if ranks not in RANKS:
        raise UsageError(f"ranks: found {ranks!r:.60}, wanted {', '.join(RANKS)}")
    tp = given["tp"]
    place = None if ranks == VIRTUAL else place or launched()
    if place is not None and place.size != tp:
        raise UsageError(f"tp: found {tp}, but {place.launcher} started {place.size} processes", f"give a tp of {place.size}, or start another number")
    if place is None and (tp == 1 or ranks != PROCESSES and not (ranks == AUTO_RANKS and _have_gpus(given, model, draft_model))):
        return None
    if place is not None and _ended:
        raise UsageError("a second model in one job: the other ranks have ended with the first one", "open one model, or start one job for each")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= MAX_TIMEOUT_S:
        raise UsageError(f"rendezvous_timeout: found {timeout!r:.60}, wanted seconds above 0, up to {MAX_TIMEOUT_S}")
    if bad := [m for m in (model, draft_model) if not isinstance(m, (str, os.PathLike, type(None)))]:
        raise UsageError(f"found an open {type(bad[0]).__name__} with ranks that are processes, which open the model themselves", "give its folder or file")
    named = {"model": os.fspath(model), "draft_model": draft_model and os.fspath(draft_model)}
    facts = {"version": __version__, "model": identity(model), "draft model": identity(draft_model)} | given
    return Job(place, tp, facts, {"ranks": PROCESSES, "rendezvous_timeout": timeout} | named | given, timeout)


def _have_gpus(given: dict, model, draft_model) -> bool:
    """Whether ranks that nobody has started belong on GPUs of their own: the kernels run on as many of those visible, and other processes can open the models."""
    are_named = all(isinstance(m, (str, os.PathLike, type(None))) for m in (model, draft_model))
    if given["decode_backend"] not in ON_GPU or not are_named or not isinstance(given["tp"], int):
        return False
    gpus = probe_driver().gpus
    return len(gpus) >= given["tp"] and not any(map(gpu_problem, gpus[:given["tp"]]))


class Job:
    """From `meet` to `close`.

    Args:
        place: this process, as its launcher says it; None: rank 0, which starts the others here.
        tp: ranks.
        facts: what must be the same on every rank.
        arguments: of `open_model`, JSON-ready, for processes that this one starts.
        timeout: seconds for all ranks to come.
    """

    def __init__(self, place: Launch | None, tp: int, facts: dict, arguments: dict, timeout: float):
        self.rank, self.tp, self._place, self._facts, self._arguments, self._timeout = place.rank if place else 0, tp, place, facts, arguments, timeout
        self.device: int | None = None   # index of this rank's GPU
        self._workers: Workers | None = None
        self._watch: Watch | None = None
        self._joined: Joined | None = None

    def choose_gpu(self) -> None:
        """Sets `device`, the index of this rank's GPU. Raises DeviceError where there are fewer than ranks, or no NCCL."""
        visible = len(probe_driver().gpus)
        if os.environ.get(SHARE_GPU):
            nccl.share_gpus(self.rank)
            self.device = self.rank % max(visible, 1)
        else:
            if self._place is None and visible < self.tp:   # all of them are to be here
                raise DeviceError(f"tp: found {self.tp}, but {visible} GPU{'s are' if visible != 1 else ' is'} visible here",
                                  f"use a tp of at most {visible}, or start ranks on several machines by a launcher")
            self.device = nccl.device_index(self._place.local_rank if self._place else 0, visible)
        nccl.library()

    def meet(self, error: K3Error | None = None) -> None:
        """Meets the other ranks. A rank that rank 0 knows to have failed ends here with SystemExit, without a word.

        Errors of `Server.meet` and `join`.
        """
        try:
            if self.rank:
                place = self._place
                _leave_signals_to_rank_0()
                self._joined = join(place.host, place.port, place.token, place.rank, place.size, self._facts, error, self._timeout)
            else:
                self._joined = self._serve(error)
        except Told as e:
            log.debug("rank %d: %s", self.rank, e.error)
            self.close()
            raise SystemExit(e.error.code) from e
        except BaseException:
            self.close()
            raise
        self._watch = Watch(self._joined, words=self._workers.words if self._workers else lambda rank: "")

    def refuse(self, error: K3Error) -> None:
        """Tells the other ranks that this one cannot go on; where it would have started them, they are not."""
        if self._place is not None:
            try:
                self.meet(error)
            except K3Error as e:   # they did not come either: the first trouble counts
                if e is not error:
                    log.debug("rank %d: %s", self.rank, e)

    def _serve(self, error: K3Error | None) -> Joined:
        place = self._place
        token = place.token if place else secrets.token_hex(32)
        server = Server(place.host, place.port, token) if place else Server("127.0.0.1", 0, token)
        try:
            if place is None:
                self._workers = Workers(self.tp, {"size": self.tp, "port": server.port, "token": token, "arguments": self._arguments})
            return server.meet(self.tp, self._facts, self._payload, error=error, timeout=self._timeout,
                               look=self._workers.check if self._workers else lambda: None)
        finally:
            server.close()

    def _payload(self) -> bytes:
        """A secret of this meeting, and NCCL's id where there are GPUs."""
        return secrets.token_bytes(_SECRET_BYTES) + (b"" if self.device is None else nccl.unique_id())

    def building(self):
        """See Watch.building."""
        return self._watch.building()

    def communicator(self) -> nccl.Communicator:
        """Of all ranks, on the GPU that is current. Every rank asks for it at the same time, once."""
        return nccl.Communicator(self._joined.payload[_SECRET_BYTES:], self.rank, self.tp)

    def share(self, loading: Loading) -> Loading:
        """How this rank reads its weights: those of one host, where they are neighbours, read every byte once. After `meet`."""
        hosts = [host.rpartition(", ")[0] for host in self._joined.hosts]   # "host, pid"
        here = [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]
        ranks = range(here[0], here[-1] + 1)
        if len(here) == 1 or here != list(ranks):
            return loading
        return SharedLoading(loading.mode, loading.show, self.rank, ranks, self._joined.payload[:_SECRET_BYTES])

    def load(self, make: Callable, fits: Callable[[], int] | None = None):
        """Builds this rank's backend beside the others. Returns the one for the engine on rank 0; on other ranks it does not return.

        Args:
            make: (collectives over TCP, context) -> backend.
            fits: the context that this rank has room for; the least of all is taken. None: the backend itself finds out, and is told afterwards.
        Raises:
            what any rank raises, with its exit code.
        """
        watch, data = self._watch, self._joined.data
        try:
            with watch.call(is_step=False):
                tcp = TcpRanks(self.rank, self.tp, data, watch.progress)
                own = make(tcp, self._least(fits()) if fits else None)
                if not fits and (least := self._least(own.max_model_len)) != own.max_model_len:
                    own.bind_cache(least)
                if self.rank:
                    wire.send(data[0], {"ready": True})
                else:
                    for sock in data.values():
                        wire.receive(sock)
            if self.rank:
                self._follow(own)
            return RankedBackend(own, data, watch, self.close)
        except BaseException as e:
            self.close()
            if self.rank and isinstance(e, K3Error):
                raise SystemExit(e.code) from e   # rank 0 has the words
            raise

    def _least(self, length: int) -> int:
        data = self._joined.data
        if self.rank:
            wire.send(data[0], {"fits": length})
            return wire.receive(data[0])["length"]
        length = min([length, *(wire.receive(sock)["fits"] for sock in data.values())])
        for sock in data.values():
            wire.send(sock, {"length": length})
        return length

    def _follow(self, own) -> NoReturn:
        try:
            follow(own, self._joined.data[0], self._watch)
        except wire.LinkLost:   # rank 0 has closed; the watch hears whether that was meant, and ends the process
            time.sleep(2 * EXPLAIN_S)
            os._exit(9)

    def close(self) -> None:
        """Ends the job, and the processes that were started for it; may be called twice."""
        if self._watch:
            self._watch.close()
            if self._place is not None:
                _ended.append(self)
        if self._workers:
            self._workers.close(at_once=self._watch is None)
            self._workers = None


def _leave_signals_to_rank_0() -> None:
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
