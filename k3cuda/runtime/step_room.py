"""How many bytes of a GPU a rank needs beside its weights, and the longest context that fits. No device is needed to know it."""
from ..buffers import buffer_bytes
from ..config import DECODE_ROWS, PAGE_SIZE
from ..context_split import page_tokens
from ..draft_plan import DraftPlan
from ..emit import arena_offsets
from ..plan import Plan
from ..tables import tables_of

MLA_CHUNKS = ((256, 8192), (512, 65536), (1024, None))  # mla_work.cuh: positions of a chunk, and where chunks of that length end
# What no table counts: kernels and graphs of every bucket, tables of the copy engine, what steps in one launch exchange (at most 50 MB at TP16), and memory
# lost where allocations are rounded up.
KERNEL_BYTES = 512 << 20
MEMORY_UTILIZATION = 0.92   # part of a GPU's memory that is used, unless a caller says otherwise


def session_bytes(plan: Plan | DraftPlan, slots: int, pages: int, slot_pages: int, kv_cache_dtype: str) -> dict[str, int]:
    """Bytes of every buffer that comes as a pointer, on one rank; what a draft is lent is its target's."""
    t = tables_of(plan, slots, pages, slot_pages)
    return {n: buffer_bytes(t.buffers[n], t.dims, kv_cache_dtype) for n in t.session if n not in t.lent}


def mla_chunks(length: int) -> int:
    """Chunks that hold the first `length` positions, as `mla_chunks` of mla_work.cuh counts them."""
    count = start = 0
    for size, end in MLA_CHUNKS:
        stop = length if end is None else min(length, end)
        count += -(-max(stop - start, 0) // size)
        start = end
    return count


def mla_partials(plan: Plan | DraftPlan, slot_pages: int) -> int:
    """Partial results of the split context that one launch can have at most: of every chunk of a whole context and row, for the heads of a group's ranks."""
    return mla_chunks(slot_pages * PAGE_SIZE) * DECODE_ROWS * (tables_of(plan).dims["num_attention_heads"] // plan.tp) * plan.dcp


def mla_work_bytes(plan: Plan | DraftPlan, slot_pages: int) -> int:
    """Bytes of `Step.mla_work`: of every partial a maximum, a sum, and a latent."""
    return mla_partials(plan, slot_pages) * (8 + 4 * plan.cfg.kv_lora_rank)


def slot_pages_of(tokens: int, draft: DraftPlan | None = None, dcp: int = 1) -> int:
    """Pages of a slot for `tokens` tokens, and behind them for the rows of a draft's last block but its first; `dcp` ranks hold a page together."""
    return -(-(tokens + spare_positions(draft)) // page_tokens(dcp))


def spare_positions(draft: DraftPlan | None) -> int:
    return draft.block_rows - 1 if draft else 0


def rank_room(plan: Plan, slots: int, tokens: int, kv_cache_dtype: str, draft: DraftPlan | None = None) -> int:
    """Bytes of a rank beside its weights and its draft's, for `slots` sequences of up to `tokens` tokens, `KERNEL_BYTES` left out."""
    slot_pages = slot_pages_of(tokens, draft, plan.dcp)
    room = _memory_bytes(plan, slots, slot_pages, kv_cache_dtype)
    return room if draft is None else room + _memory_bytes(draft, slots, slot_pages * plan.dcp, "bf16") + accept_work_bytes(draft.cfg.vocab_size)


def accept_work_bytes(vocab_size: int) -> int:
    """Bytes of the laws that acceptance keeps of every row of logits, the target's and the draft's, F32."""
    return 2 * DECODE_ROWS * vocab_size * 4


def _memory_bytes(plan: Plan | DraftPlan, slots: int, slot_pages: int, kv_cache_dtype: str) -> int:
    """Of a `RankMemory`."""
    session = session_bytes(plan, slots, slots * slot_pages, slot_pages, kv_cache_dtype)
    work = mla_work_bytes(plan, slot_pages) if "mla_cache" in session else 0
    return arena_offsets(plan)[1] + sum(session.values()) + work


def longest_fit(plan: Plan, room: int, slots: int, kv_cache_dtype: str, draft: DraftPlan | None = None) -> int:
    """The most tokens, whole pages but for a draft's spare positions and the model's own limit, for which `rank_room` is at most `room` bytes;
    0: not even a page."""
    page = page_tokens(plan.dcp)
    low, high = 0, slot_pages_of(plan.cfg.max_position_embeddings, draft, plan.dcp)   # pages that fit, pages that may
    while low < high:
        middle = (low + high + 1) // 2
        if rank_room(plan, slots, middle * page - spare_positions(draft), kv_cache_dtype, draft) <= room:
            low = middle
        else:
            high = middle - 1
    return max(min(low * page - spare_positions(draft), plan.cfg.max_position_embeddings), 0)
