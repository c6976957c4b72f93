"""The standard decode backend as one rank of several processes, a GPU each: collectives are a Carrier's, captured in the step's graph."""
import logging
from contextlib import contextmanager, nullcontext

from ..config import DECODE_ROWS
from ..emit import layout_of
from ..errors import UsageError
from ..plan import Op
from .cuda_backend import CudaBackend
from .cuda_carry import Carrier
from .cuda_driver import known_failure
from .cuda_memory import RankMemory
from .cuda_launch_peers import LaunchPeers
from .machine import NCCL, PEER
from .nccl import Communicator
from .peer_exchange import capacities

log = logging.getLogger("k3cuda")


class CudaRank(CudaBackend):
    """One rank of `comm.size`. A step has at most DECODE_ROWS rows, and its draws are read before the next one begins.

    Args:
        comm: of all ranks; closed with the backend. device: index of this rank's GPU. options: as CudaBackend.
        building: a context around what takes seconds in the middle of a step: the others wait, and it is no hang.
        collectives: NCCL or PEER; where peers cannot be mapped NCCL takes over, and says so.
    Raises, where something is read, besides what CudaBackend raises:
        ExchangeTimeout: a rank has not sent its part in time.
    """

    overlaps, most_rows, _carrier = False, DECODE_ROWS, None

    def __init__(self, source, comm: Communicator, device: int, building=nullcontext, collectives: str = NCCL, **options):
        self._comm, self.device_index, self._building, self._asked = comm, device, building, collectives
        try:
            super().__init__(source, comm.size, only_rank=comm.rank, ride=False, carry=self._moves, building=self._built_together, **options)
            self._carrier.warm_up()
        except BaseException:
            self._let_go()
            raise

    def bind_cache(self, max_model_len: int | None) -> None:
        if self._carrier is None:   # before the cache takes what memory there is
            self._carrier = Carrier(self._comm, self.device, self.stream)
            if self._asked == PEER and (reason := self._carrier.use_peers(capacities(self.plan, *([self.draft.plan] if self.draft else [])))):
                log.log(logging.DEBUG if self._comm.rank else logging.WARNING, "collectives: %s instead of %s: %s", NCCL, PEER, reason)
            self.launch_peers = LaunchPeers(self._comm.rank, self.plan.cfg.vocab_size, self._carrier.share, self._carrier.gather, self._building)
        self.ranks = self._carrier.name   # no loopback: a rank embeds its own tokens, and what the others have comes from them
        super().bind_cache(max_model_len)

    @contextmanager
    def _built_together(self):
        """Around what one rank may take seconds for and another nothing: no exchange waits for it, since all ranks meet behind it.

        Who waits there builds nothing, so that a rank that never comes is a hang.
        """
        with self._building():
            yield
        self._carrier.meet()

    def kernels(self, bucket: int):
        with self._built_together():
            return super().kernels(bucket)

    def launches(self, what: str, bucket: int, overlap: bool = True, follows: bool = False):
        """As CudaBackend, with the carrier's launches in the place of collectives. Nothing begins under a launch before it that may be NCCL's."""
        overlap = overlap and self._carrier.name == PEER
        out = super().launches(what, bucket, overlap=overlap, follows=follows)
        return [(op, self._moves(op, self.memories[0], bucket, overlap) if op.stage.moves else group) for op, group in out]

    def _moves(self, op: Op, memory: RankMemory, rows: int, overlap: bool = False) -> list:
        """What takes the place of a collective on the memory of the target or of its draft, in a step of up to `rows` rows."""
        places, arena, at = [], memory.arena.data.ptr, memory.offsets
        for m in op.stage.moves:
            layout = layout_of(m, memory.plan, memory.tables, rows)
            source, target = arena + at[m.source] + op.kind_index * layout.source_layer, arena + at[m.target] + op.kind_index * layout.target_layer
            places.append((layout, source, target))
        return self._carrier.launches(str(op), places, overlap)

    # What is read has come through exchanges, if they have not failed.

    def logits(self):
        return self._sound(super().logits())

    def copy_logits(self, out) -> None:
        super().copy_logits(out)
        self.stream.synchronize()   # else nobody knows yet
        self._sound(None)

    def sample(self, draws):
        return self._sound(super().sample(draws))

    def propose(self, asks):
        return self._sound(super().propose(asks))

    def accept(self, judges):
        return self._sound(super().accept(judges))

    def _sound(self, read):
        self._carrier.check()
        return read

    def buffer(self, name: str, rank: int = 0):
        if rank != self._comm.rank and rank in range(self.tp):
            raise UsageError(f"buffer {name}: rank {rank} is another process", f"ask for rank {self._comm.rank}")
        array = super().buffer(name, 0 if rank == self._comm.rank else rank)
        self.stream.synchronize()
        return self._sound(array)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """May be called twice, and where there is nothing yet."""
        if known_failure():   # mappings and communicator ended with the context; what asks it for anything more fails, or waits for it
            return
        try:
            if self._carrier is not None:
                self._carrier.close()
        finally:
            self._comm.abort()   # the others may be gone already, and a gentle end would wait for them
