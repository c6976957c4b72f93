"""The C++ of a single launch of a program, and what its kernel is given."""
import ctypes

import numpy as np

from .block_program import MAX_FIELDS, MAX_INPUTS, MAX_KINDS, BlockProgram
from .emit_sizes import MAX_SHARED
from .launch_kinds import Product

TOKENS_OF_ENTRY = 8   # expert_core.cuh
COPY = 7680           # bytes of a bulk copy at most: the fastest measured (docs/megakernel-log.md)
# What a wait inside a step may take, in nanoseconds; the kernel counts in units of 1,024 (launch_ring.cuh). The longest step measured takes 15 ms, and no wait waits for a
# host: blocks of a launch begin together, ranks in launches of their own meet before it, with a limit of its own (`meet_ns`). So this is 30 steps, which leaves room
# for other processes' turns on the GPU. From above: a lost value is to have its name within 2 s of the launch's beginning, also where a producer names it
# (PRODUCER_LIMITS), and the driver needs 0.9 s to tell the host of a trap (with 2 s here an H200's host knew after 2.9).
LIMIT_NS = 500_000_000
PRODUCER_LIMITS = 2   # limits that producers wait for: who they wait for speaks first
# Of a phase in a block, in the order of LaunchStamp: times but for the last, which is bytes.
STAMPS = ("begins", "input_here", "units_done", "slot_clean", "cleared", "produces", "first_copy", "last_copy", "products_done", "copied")
ISSUE_BINS, ISSUE_CYCLES = 32768, 1024   # of LaunchStamps.issued
COUNT_BYTES, FAILED_AT = 128 * 19, 8   # of LaunchCounts; where in it `failed` stands


def constants(program: BlockProgram, *, ring: int = 224 * 1024, copy: int = COPY, shared: int = MAX_SHARED, name: str = "product_chain",
              receive_batch: int = 4, poll: bool = False, probed: bool = False, stamped: bool = False, ranks_here: bool = False, hop_kinds: tuple[int, ...] = (),
              hop_cycles: int = 0) -> str:
    """C++ of the shape of kernel `name`, and of its constant `name_launch`: threads, bytes of shared memory, blocks of a cluster, slots of the ring.

    Args:
        ring: bytes of the ring at most. copy: bytes of a bulk copy at most. shared: bytes of shared memory of a block.
        receive_batch: vectors that a thread asks for at once, at most. poll: who waits for the ring does not sleep.
        probed: with records of what phases make, for tests and benchmarks. stamped: with times of phases (LaunchStamps).
        ranks_here: all of the program's ranks are in the launch, groups of blocks behind one another; else each has a launch of its own.
        hop_kinds: kinds of phases (launch_step.hop_kinds) that go on waiting `hop_cycles` for what a collective brings, a benchmark's slow link.
    """
    here = program.ranks if ranks_here else 1
    streaming = next((i for i, k in enumerate(program.kinds) if k.is_chosen or isinstance(k, Product)), -1)
    numbers = f"{program.tokens}, {program.grid.cluster}, {program.top_k}, {ring}, {copy}, {program.page}, {shared}, {streaming}"
    hops = f"#define K3_LINK_KINDS {sum(1 << i for i in hop_kinds)}u\n#define K3_LINK_CYCLES {hop_cycles}\n" if hop_cycles and hop_kinds else ""
    kinds = ", ".join(k.kind(copy, most) for k, most in zip(program.kinds, program.most))
    return (f'{hops}#define K3_RECEIVE_BATCH {receive_batch}\n#define K3_POLL {int(poll)}\n#define K3_PROBED {int(probed)}\n#define K3_STAMPED {int(stamped)}\n'
            f"#define K3_PRODUCER_LIMITS {PRODUCER_LIMITS}\n"
            f'#define K3_RANKS {program.ranks}\n#define K3_RANKS_HERE {here}\n#define K3_SCOPE "{"sys" if program.ranks > here else "gpu"}"\n#include "launch_core.cuh"\n'
            f"typedef LaunchShape<{numbers}, LaunchKinds<{kinds}>> {name}_shape;\n"
            f'extern "C" __constant__ int {name}_launch[4] = {{kLaunchThreads, {name}_shape::kSmem, {name}_shape::kCluster, {name}_shape::kSlots}};\n')


def source(program: BlockProgram, *, name: str = "product_chain", ranks_here: bool = False, **shape) -> str:
    """C++ of kernel `name` and of its constants; `shape` as there. It takes a LaunchArgs or, with `ranks_here`, the address of one for each rank."""
    given, own = ("const LaunchArgs* ranks", "ranks[blockIdx.x / rank_blocks()]") if ranks_here else ("const __grid_constant__ LaunchArgs a", "a")
    return (constants(program, name=name, ranks_here=ranks_here, **shape) + f'extern "C" __global__ void __launch_bounds__(kLaunchThreads, 1) {name}({given}) {{\n'
            f"  K3_DYN_SMEM(u8, smem);\n  launch_run<{name}_shape>({own}, smem);\n}}\n")


def choice_dtype(items: int) -> np.dtype:
    """LaunchChoice of rows that have `items` (row, place) pairs."""
    return np.dtype([("entries", "i4"), ("items", "i4"), ("entry", "u4", items + 1), ("item", "u2", items), ("weight", "f4", items), ("factor", "f4", items),
                     ("place", "u2", items), ("order", "u2", items)])


def choice(ids: np.ndarray, weights: np.ndarray, tokens: int) -> np.ndarray:
    """LaunchChoice [1] of the experts `ids` [rows, top_k], with weights of the same shape, for a kernel of `tokens` rows."""
    made, entry, start = np.zeros(1, choice_dtype(tokens * ids.shape[1])), [], 0
    to, flat = made[0], ids.reshape(-1)
    for expert, count in zip(*np.unique(flat, return_counts=True)):
        entry += [int(expert) | first << 16 for first in range(start, start + int(count), TOKENS_OF_ENTRY)]
        start += int(count)
    to["entries"], to["items"], to["item"][:start], to["weight"][:start] = len(entry), start, np.argsort(flat, kind="stable"), weights.reshape(-1)
    to["entry"][:len(entry) + 1] = [*entry, start << 16]
    return made


def _fields(kind, names: str) -> list:
    return [(name, kind) for name in names.split()]


class LaunchInput(ctypes.Structure):
    _fields_ = _fields(ctypes.c_uint16, "at row vectors")


class LaunchField(ctypes.Structure):
    _fields_ = _fields(ctypes.c_uint16, "at width limit copies own")


class LaunchLink(ctypes.Structure):
    _fields_ = [("inputs", LaunchInput * MAX_INPUTS), ("fields", LaunchField * MAX_FIELDS), *_fields(ctypes.c_uint16, "row record_row"), ("vectors", ctypes.c_int)]


class LaunchPeer(ctypes.Structure):
    _fields_ = _fields(ctypes.c_void_p, "exchange result counts")


class LaunchStamps(ctypes.Structure):
    """Phases whose times are kept, and where, in uint64: words[blocks][phases][STAMPS], which begin as zeros, by each block's own clock;
    clocks[blocks][2][2], begin and end of the launch in nanoseconds and by that clock. issued, uint32 [blocks][ISSUE_BINS], which begin as zeros: bytes over time."""

    _fields_ = [*_fields(ctypes.c_void_p, "words clocks issued"), *_fields(ctypes.c_int, "first phases")]


class LaunchArgs(ctypes.Structure):
    """As in launch_args.cuh: addresses, then numbers."""

    _fields_ = [*_fields(ctypes.c_void_p, "weights programs row_slot logit_rows input exchange result record stamps counts peers failed trouble late"),
                *_fields(ctypes.c_uint32, "limit meet"),
                *_fields(ctypes.c_int, "phases clearings words rows block_rows slot_vectors record_vectors window first_window"),
                *_fields(ctypes.c_float, "situ_beta situ_linear_beta routed_scale norm_eps"), ("links", LaunchLink * MAX_KINDS), ("rank", ctypes.c_int)]


def _placed(field: tuple[int, ...], rank: int, ranks: int) -> tuple[int, ...]:
    """LaunchField of a rank: where its own part of the rows lies, in those of all others too."""
    at, width, limit, copies, own = field
    if ranks == 1 or copies == 1:
        return field
    if not copies:
        return at + rank * (width // ranks), width, limit, copies, own
    return at + rank * width, max(0, min(width, limit - rank * width)), limit, copies, own


def arguments(program: BlockProgram, *, window: int, first_window: int | None = None, limit_ns: int = LIMIT_NS, meet_ns: int = 0, rank: int = 0,
              situ: tuple[float, float] = (1.0, 1.0), routed_scale: float = 1.0, norm_eps: float = 0.0, block_rows: int = 0, **addresses: int) -> LaunchArgs:
    """The kernel's argument.

    Args:
        window: bytes that a block has in flight at most.
        first_window: the same for phases of the first kind that has weights (kda_in of a layer); None: the same.
        limit_ns: nanoseconds that any wait inside a step may take.
        meet_ns: nanoseconds that ranks in launches of their own wait for one another when they begin, at most.
        rank: this one's number, where there are several.
        situ: the two betas of the activation. routed_scale: what a row's expert weights add up to. norm_eps: of every norm.
        block_rows: rows that a closed block has room for.
        addresses: the pointers of LaunchArgs but `failed`; those left out are null.
    """
    args = LaunchArgs(limit=limit_ns >> 10, meet=meet_ns >> 10, rank=rank, phases=program.phases, clearings=program.clearings, words=program.words.shape[1],
                      rows=program.rows, block_rows=block_rows,
                      slot_vectors=program.slot_vectors, record_vectors=program.record_vectors, window=window,
                      first_window=window if first_window is None else first_window, situ_beta=situ[0],
                      situ_linear_beta=situ[1], routed_scale=routed_scale, norm_eps=norm_eps, failed=addresses["counts"] + FAILED_AT, **addresses)
    for i, link in enumerate(program.links):
        args.links[i] = LaunchLink(tuple(link.inputs), tuple(_placed(f, rank, program.ranks) for f in link.fields), link.row, link.record_row, link.vectors)
    return args
