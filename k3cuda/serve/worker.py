"""The one thread that owns the model: it opens it, steps it and closes it. The event loop gives it jobs and gets lists of events back."""
import asyncio
import logging
import queue
import threading
from collections import deque
from concurrent.futures import Future
from functools import partial

from ..errors import Aborted, K3Error, loses_model
from ..runtime.request import Event, Request
from .metrics import Metrics
from .refusals import Refusal
from .scoring import Scorer

log = logging.getLogger("k3cuda")


class Job:
    """One prompt on its way. Made in the event loop, whose methods these are; the worker only reads it.

    Args:
        request: for the engine; no other job may ever have its `request_id`.
        events: takes (index, Event) of the engine; the last one has a `finish_reason`.
        index: which prompt of its call it is.
        score: report the log-probabilities of the prompt, with so many most likely tokens; None: don't.
        generate: False where only the prompt is scored.

    Attributes:
        accepted: done when the engine has taken it; has the error where it was refused.
        scores: of the prompt's tokens after the first one, once there are any.
    """

    def __init__(self, request: Request, events: asyncio.Queue, index: int = 0, *, score: int | None = None, generate: bool = True):
        self.request, self.events, self.index, self.score, self.generate = request, events, index, score, generate
        self.accepted: asyncio.Future = asyncio.get_running_loop().create_future()
        self.scores, self.is_over = (), False

    def accept(self) -> None:
        if not self.accepted.done():
            self.accepted.set_result(None)

    def refuse(self, error: Exception) -> None:
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()   # a client that left never asks
        else:
            self.events.put_nowait((self.index, Event(self.request.request_id, finish_reason="error", error=error)))

    def take(self, event: Event) -> None:
        self.events.put_nowait((self.index, event))


class Worker:
    """Runs jobs on an engine in a thread of its own.

    Args:
        open_engine: makes the Engine, in that thread.
        max_queue: jobs that may wait for a slot; more are refused.
        metrics: is told of everything.

    Attributes:
        ready: a Future with the opened `Engine`, for its facts only; raises what opening raised.
        lost: what lost the engine, None while it is not: those that ran have that error, those that waited get status 503, and nothing runs any more.
        in_flight: jobs that are not over.
    """

    def __init__(self, open_engine, max_queue: int, metrics: Metrics):
        self._open_engine, self._max_queue, self.metrics = open_engine, max_queue, metrics
        self.ready: Future = Future()
        self.lost: K3Error | None = None
        self._inbox, self._loop = queue.SimpleQueue(), None
        self.in_flight = 0                           # of the event loop
        self._jobs: dict[str, Job] = {}              # from here on of the thread: by id, in the engine or being scored
        self._waiting: deque[Job] = deque()          # not yet given to the engine
        self._scorer: Scorer | None = None
        self._news, self._stopping = [], False
        self._thread = threading.Thread(target=self._run, name="k3cuda-engine", daemon=True)

    # The event loop's side

    def start(self) -> None:
        self._thread.start()

    @property
    def trouble(self) -> str | None:
        """Why nothing can be generated; None while it can."""
        return str(self.lost) if self.lost else (None if self._thread.is_alive() else "its thread ended")

    def engine_lost(self) -> Refusal:
        """For who asks while there is `trouble`."""
        return Refusal(503, f"the engine is lost: {self.trouble}", code="engine_lost")

    @property
    def capacity(self) -> int:
        """Jobs that can be in flight."""
        return self.ready.result().scheduler.num_slots + self._max_queue

    def submit(self, jobs: list[Job]) -> None:
        """Takes all of them or none. Refusal 429 where too many wait, 503 where nothing runs any more."""
        if self._stopping:
            raise Refusal(503, "the server is shutting down", code="shutting_down")
        if self.trouble is not None:
            raise self.engine_lost()
        if self.in_flight + len(jobs) > self.capacity:
            raise Refusal(429, f"{self.in_flight} requests run or wait, {len(jobs)} more are too many; come again later", code="queue_full",
                          headers={"Retry-After": "1"})
        self._loop = asyncio.get_running_loop()
        self.in_flight += len(jobs)
        for job in jobs:
            self._inbox.put((self._arrive, job))

    def cancel(self, jobs: list[Job]) -> None:
        """Ends those that are not over: their slots are free at the next step."""
        for job in jobs:
            if not job.is_over:
                self._inbox.put((self._abort, job))

    def stop(self) -> None:
        """Takes no more jobs, ends those that run, closes the model and ends the thread."""
        self._stopping = True
        self._inbox.put((self._abort_all,))

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def _refuse_late(self) -> None:
        """Those that arrived beside the thread's end."""
        while not self._inbox.empty():
            call, *jobs = self._inbox.get()
            if call == self._arrive:
                jobs[0].refuse(self.engine_lost())
                self._over(jobs[0])

    def _over(self, job: Job) -> None:
        job.is_over = True
        self.in_flight -= 1

    # The thread's side

    def _run(self) -> None:
        try:
            engine = self._open_engine()
        except BaseException as e:
            self.ready.set_exception(e)
            return
        self._engine = engine
        self.metrics.engine = engine
        self.ready.set_result(engine)
        try:
            while not (self._stopping and self._inbox.empty() and not self._jobs and not self._waiting):
                self._turn()
        except BaseException as e:
            self._lose(e)   # by a call that no job waits for too: the first trouble counts
            is_told = self.lost is not None
            self.lost = self.lost or K3Error(f"the engine thread ended: {type(e).__name__}: {e}", "the log has the traceback; please report it")
            log.error("the engine is lost: %s", self.lost, exc_info=e is not self.lost)
            for job in [*self._jobs.values(), *self._waiting]:
                self._tell(job.refuse, self.engine_lost() if is_told else K3Error("the engine is lost", "the server's log says why; it ends with this"))
                self._tell(self._over, job)
            self._tell(self._refuse_late)
            self._deliver()
        finally:
            try:
                engine.close()
            except Exception:   # of what is lost; else it is the first that is told
                log.log(logging.DEBUG if self.lost else logging.ERROR, "the engine did not close", exc_info=True)

    def _turn(self) -> None:
        """Takes what arrived, runs a step, hands out what it brought."""
        is_idle = not (self._engine.has_work or self._scorer or self._waiting)
        while is_idle or not self._inbox.empty():
            call, *jobs = self._inbox.get()
            call(*jobs)
            is_idle = False
        self._give_engine()
        if self._scorer:
            self._score()
        if self._engine.has_work:
            for event in self._engine.step():
                self._event(event)
        if self.lost:
            raise self.lost
        self._deliver()

    def _arrive(self, job: Job) -> None:
        self._waiting.append(job)
        self.metrics.arrived(job.request.request_id)

    def _give_engine(self) -> None:
        """In order of arrival. A job that wants scores is alone in this queue's front until it has them: see Scorer."""
        while self._waiting and not self._scorer:
            job = self._waiting[0]
            try:
                if job.score is not None and not job.scores and len(job.request.prompt_ids) > 1:
                    self._scorer = Scorer.open(self._engine, job.request, job.score, room=int(job.generate))
                    if self._scorer is None:
                        return   # no slot is free yet
                    self._waiting.popleft()
                    self._jobs[job.request.request_id] = job
                    self._tell(job.accept)
                    return
                self._waiting.popleft()
                self._add(job)
            except Exception as e:
                if self._waiting and self._waiting[0] is job:
                    self._waiting.popleft()
                self._refuse(job, e)

    def _add(self, job: Job) -> None:
        if job.generate:
            self._engine.add(job.request)
            self._jobs[job.request.request_id] = job
            self._tell(job.accept)
        else:
            self._tell(job.accept)
            self._end(job, partial(job.take, Event(job.request.request_id, finish_reason="length", sampling=job.request.params)))

    def _score(self) -> None:
        job = self._jobs[self._scorer.request_id]
        try:
            scores = self._scorer.advance()
        except Exception as e:
            self._scorer = None
            self._refuse(job, e)
            return
        if scores is not None:
            self._scorer, job.scores = None, scores
            del self._jobs[job.request.request_id]
            try:
                self._add(job)
            except Exception as e:
                self._refuse(job, e)

    def _event(self, event: Event) -> None:
        self.metrics.event(event)
        self._lose(event.error)
        job = self._jobs[event.request_id]
        if event.finish_reason is None:
            self._tell(job.take, event)
        else:
            self._end(job, partial(job.take, event))

    def _abort(self, job: Job) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
            self._end(job, partial(job.refuse, Aborted("the request was stopped")))
        elif self._scorer and self._scorer.request_id == job.request.request_id:
            self._scorer.close()
            self._scorer = None
            self._end(job, partial(job.refuse, Aborted("the request was stopped")))
        else:
            self._engine.abort(job.request.request_id)   # its last event comes with the next step

    def _abort_all(self) -> None:
        for job in [*self._jobs.values(), *self._waiting]:
            self._abort(job)

    def _end(self, job: Job, last) -> None:
        self._jobs.pop(job.request.request_id, None)
        self.metrics.left(job.request.request_id)
        self._tell(last)
        self._tell(self._over, job)

    def _refuse(self, job: Job, error: Exception) -> None:
        self._lose(error)
        self._end(job, partial(job.refuse, error))

    def _lose(self, error: BaseException | None) -> None:
        if loses_model(error):
            self.lost = self.lost or error

    def _tell(self, call, *args) -> None:
        self._news.append(partial(call, *args))

    def _deliver(self) -> None:
        """One hand-over a step: with hundreds of streams one for each event would cost more than the step."""
        if self._news and self._loop:
            news, self._news = self._news, []
            try:
                self._loop.call_soon_threadsafe(_call_all, news)
            except RuntimeError:   # the loop is closed: nobody listens any more
                pass


def _call_all(calls) -> None:
    for call in calls:
        call()
