"""What a rank needs beside its weights, and the longest context that fits: every byte counted, to the page."""
from dataclasses import replace

import pytest
from test_draft_config import PUBLIC, read

from k3cuda.config import PAGE_SIZE, RELEASED_FOLDER, K3Config
from k3cuda.draft_buffers import cache_bytes
from k3cuda.draft_plan import build_draft_plan
from k3cuda.emit import arena_offsets
from k3cuda.plan import Taps, build_plan
from k3cuda.runtime.step_room import longest_fit, mla_work_bytes, rank_room, session_bytes, slot_pages_of


@pytest.fixture(scope="module")
def plan():
    return build_plan(K3Config.from_json(RELEASED_FOLDER), 16)


def test_a_rank_of_the_release_with_one_long_context(plan):
    """24 MLA layers of 576 values a token, 69 KDA layers of six heads, four bytes a page for its place in the table."""
    tokens, cfg = 1 << 20, plan.cfg
    session = session_bytes(plan, 1, tokens // PAGE_SIZE, tokens // PAGE_SIZE, "fp8_e4m3")
    assert session == {"kda_state": 69 * 6 * 128 * 128 * 4, "conv_state": 69 * 3 * 3 * 768 * 2, "mla_cache": 24 * tokens * 576,
                       "page_table": 4 * tokens // PAGE_SIZE}
    chunks = 8192 // 256 + (65536 - 8192) // 512 + (tokens - 65536) // 1024
    assert mla_work_bytes(plan, tokens // PAGE_SIZE) == chunks * 64 * 6 * (8 + 4 * 512)
    assert rank_room(plan, 1, tokens, "fp8_e4m3") == arena_offsets(plan)[1] + sum(session.values()) + chunks * 64 * 6 * 2056


@pytest.mark.parametrize("slots", [1, 8, 64])
@pytest.mark.parametrize("kv", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("gigabytes", [3, 8.5, 30])
def test_the_longest_fit_fits_and_a_page_more_does_not(plan, slots, kv, gigabytes):
    room = int(gigabytes * 1e9)
    fits = longest_fit(plan, room, slots, kv)
    assert fits % PAGE_SIZE == 0
    if fits:
        assert rank_room(plan, slots, fits, kv) <= room
    assert fits == plan.cfg.max_position_embeddings or rank_room(plan, slots, fits + 1, kv) > room


def test_work_space_is_counted(plan):
    """Nearly half a gigabyte where one sequence fills 8 GB."""
    fits = longest_fit(plan, int(8e9), 1, "fp8_e4m3")
    pages = fits // PAGE_SIZE
    work, cache = mla_work_bytes(plan, pages), session_bytes(plan, 1, pages, pages, "fp8_e4m3")["mla_cache"]
    assert work > 0.05 * cache


def test_nothing_fits(plan):
    assert longest_fit(plan, arena_offsets(plan)[1], 1, "bf16") == 0
    assert longest_fit(plan, -5, 1, "bf16") == 0


def test_the_models_own_limit_may_end_inside_a_page():
    plan = build_plan(replace(K3Config.from_json(RELEASED_FOLDER), max_position_embeddings=1000), 16)
    assert longest_fit(plan, 1 << 40, 4, "bf16") == 1000


@pytest.mark.parametrize("draft", ["Inferact", "RadixArk"])
def test_a_draft_takes_its_part(plan, draft):
    """Its cache, its blocks' spare positions, its arena and the laws of acceptance: the longest fit with it fits, and a page more does not."""
    cfg = read(PUBLIC[draft])
    beside, drafts = build_plan(plan.cfg, 16, Taps(cfg.target_layer_ids, cfg.tap_stream)), build_draft_plan(cfg, 16)
    room, spare = int(8.5e9), cfg.block_size - 1
    fits = longest_fit(beside, room, 8, "fp8_e4m3", drafts)
    assert (fits + spare) % PAGE_SIZE == 0 and 0 < fits < longest_fit(plan, room, 8, "fp8_e4m3")
    assert rank_room(beside, 8, fits, "fp8_e4m3", drafts) <= room < rank_room(beside, 8, fits + 1, "fp8_e4m3", drafts)
    pages = slot_pages_of(fits, drafts)
    session = session_bytes(drafts, 8, 8 * pages, pages, "bf16")
    assert set(session) == {f"{cfg.family}_cache"} and sum(session.values()) == 8 * pages * PAGE_SIZE * cache_bytes(cfg, 16)
    work = mla_work_bytes(drafts, pages) if cfg.family == "mla" else 0
    assert rank_room(beside, 8, fits, "fp8_e4m3", drafts) == (rank_room(beside, 8, fits + spare, "fp8_e4m3") + arena_offsets(drafts)[1] + sum(session.values())
                                                             + work + 2 * 64 * cfg.vocab_size * 4)
