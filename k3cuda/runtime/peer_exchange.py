"""The exchange inside a kernel (kernels_cu/peer_exchange.cuh) over memory that ranks have mapped (peer_memory.py)."""
import ctypes
from typing import Callable

from ..config import DECODE_ROWS
from ..draft_plan import DraftPlan
from ..emit import layout_of
from ..errors import ExchangeTimeout, PlanError
from ..plan import Plan
from ..tables import tables_of
from ..weights import LEGAL_TP
from .collectives import members
from .peer_memory import EMPTY_BYTE, Peers
from .rank_moves import THREADS, VECTOR, RankMove, part_bytes

EXCHANGE = "peer_exchange"
TURNS, MOST_MOVES = 2, 2
STATE_WORDS, TROUBLE_WORDS = 4, 2   # of 32 bits
# What a rank waits for another one's part. Ranks meet behind whatever takes long (cuda_rank.py), and the watch of the processes (rank_watch.py) finds
# one that is gone or hangs in seconds: this is for scripts without it.
LIMIT_S = 600.0


def sizes() -> str:
    """exchange_sizes.cuh: what kernels and this module must agree on."""
    empty = int.from_bytes([EMPTY_BYTE] * 4, "big")
    return (f"#pragma once\nconstexpr int kMoveThreads = {THREADS}, kTurns = {TURNS}, kMostMoves = {MOST_MOVES}, kMostRanks = {LEGAL_TP[-1]};\n"
            f"constexpr unsigned kEmpty = {empty}u;   // no vector has it that has arrived\n")


class Exchange(ctypes.Structure):
    """`struct Exchange`; a test compares its size with the compiled one."""

    _fields_ = [("move", RankMove * MOST_MOVES), ("inbox", ctypes.c_void_p * LEGAL_TP[-1]), ("state", ctypes.c_void_p), ("trouble", ctypes.c_void_p),
                ("limit_ns", ctypes.c_uint64), *((name, ctypes.c_int) for name in ("moves", "place", "capacity", "what"))]


def capacities(*plans: Plan | DraftPlan) -> dict[int, int]:
    """Ranks of a group -> bytes that one of them sends another in an exchange at most, in steps of up to DECODE_ROWS rows."""
    out = {}
    for plan in plans:
        tables = tables_of(plan)
        for op in (*plan.context, *plan.ops) if isinstance(plan, DraftPlan) else plan.ops:
            layouts = [layout_of(m, plan, tables, DECODE_ROWS) for m in op.stage.moves]
            for ranks in {at.ranks for at in layouts}:
                out[ranks] = max(out.get(ranks, 0), sum(map(part_bytes, layouts)))
    return out


def memory_bytes(capacity: dict[int, int]) -> int:
    """Of the memory that each rank gives to the others."""
    return sum(TURNS * ranks * nbytes for ranks, nbytes in capacity.items())


class PeerExchange:
    """Exchanges of one rank.

    Args:
        peers: mapped, `memory_bytes(capacity)` of each. capacity: of `capacities`.
        state: address of zeroed device memory, STATE_WORDS words for each size of a group.
        trouble: uint32 [TROUBLE_WORDS] array of zeros in host memory that the device sees.
        limit_s: seconds that a wait may take.
        kernel: as NcclMove's.
    """

    def __init__(self, rank: int, peers: Peers, capacity: dict[int, int], state: int, trouble, kernel: Callable, limit_s: float = LIMIT_S):
        self._rank, self._peers, self._capacity, self._trouble, self._kernel, self._limit_s = rank, peers, capacity, trouble, kernel, limit_s
        self._asked: list[tuple[str, range]] = []   # name and group of what has been launched
        self._places, at = {}, 0
        for number, (ranks, nbytes) in enumerate(capacity.items()):
            self._places[ranks] = at, state + 4 * STATE_WORDS * number
            at += TURNS * ranks * nbytes

    def launch(self, name: str, moves: list[RankMove], **options):
        """What launches one exchange, which messages call `name`, of up to MOST_MOVES moves between the same ranks. `options`: of `kernel`.

        Raises PlanError where a rank would send another more than there is room for.
        """
        ranks, = {m.ranks for m in moves}
        vectors = [m.rows * -(-m.slice // VECTOR) for m in moves]
        if sum(vectors) * VECTOR > self._capacity[ranks]:
            raise PlanError(f"{name}: a rank sends another {sum(vectors) * VECTOR} bytes, its memory has room for {self._capacity[ranks]}")
        group, (at, state) = members(self._rank, ranks), self._places[ranks]
        if (name, group) not in self._asked:
            self._asked.append((name, group))
        e = Exchange(state=state, trouble=self._trouble.ctypes.data, limit_ns=int(self._limit_s * 1e9), moves=len(moves), place=self._rank - group[0],
                     capacity=self._capacity[ranks] // VECTOR, what=self._asked.index((name, group)))
        for i, move in enumerate(moves):
            e.move[i] = move
        for place, rank in enumerate(group):
            e.inbox[place] = self._peers.addresses[rank] + at
        return self._kernel(EXCHANGE, [e], ranks * max(vectors), **options)

    def check(self) -> None:
        """Raises ExchangeTimeout once a wait has taken too long; what is asked behind it may be anything."""
        if self._trouble[0]:
            name, group = self._asked[int(self._trouble[0]) - 1]
            raise ExchangeTimeout(f"rank {self._rank} waited {self._limit_s:g} s for the part of rank {group[int(self._trouble[1])]} in {name}",
                                  "see whether that rank still runs; with --collectives nccl its end alone ends the wait")

    def close(self) -> None:
        """Behind the last launch."""
        self._peers.close()
