"""Reading a checkpoint's slices: right in every mode for every set of ranks, each byte once, a bounded way ahead, and never half."""
import errno
import os
import threading
import time

import numpy as np
import pytest

from damage import SMALL, fail_reads_after, key, shard
from k3cuda.errors import CheckpointError, UsageError
from k3cuda.runtime import block_reader, loader
from k3cuda.runtime.block_reader import BUFFERED, DIRECT, MAPPED
from k3cuda.runtime.checkpoint import Checkpoint
from k3cuda.runtime.load_plan import ALIGN, blocks_of, parts_of_layers, wanted_bytes, whole_layers
from k3cuda.runtime.loader import Loader
from k3cuda.runtime.loading import Loading
from k3cuda.runtime.made_config import made_config
from k3cuda.runtime.made_model import MadeCheckpoint
from k3cuda.runtime.slices import HostSlices
from k3cuda.runtime.write_checkpoint import write_checkpoint
from k3cuda.weights import LEGAL_TP, all_weights, model_bytes, rank_slice
from models import FEW_PIECES

CFG = made_config()   # divides over 1 to 16 ranks
SMALL_BUFFER = 4 * ALIGN   # so that tensors of the small model are cut, and blocks hold few


@pytest.fixture(scope="module")
def coded():
    return MadeCheckpoint(CFG, fill="positions")


@pytest.fixture(scope="module", params=["shards", "one file"])
def stored(request, coded, tmp_path_factory):
    return Checkpoint.open(write_checkpoint(coded, tmp_path_factory.mktemp("coded") / "m", single_file=request.param == "one file"))


def load(checkpoint, tp, ranks, mode, units=None, **options):
    """(layer, weight name) -> array of all ranks and experts, joined from the units that bring it."""
    loading, parts, dims = Loading(mode), {}, checkpoint.cfg.dims()
    for unit, target in loading.run(checkpoint, tp, ranks, units or whole_layers(checkpoint.cfg), lambda u: HostSlices(u, dims, tp, ranks), **options):
        for name, array in target.arrays.items():
            parts.setdefault((unit.layer, name), []).append(array)
    return {name: np.concatenate(arrays, axis=1) if len(arrays) > 1 else arrays[0] for name, arrays in parts.items()}, loading


@pytest.fixture(scope="module")
def whole(coded):
    """Every weight uncut."""
    return {(layer, w): coded.rank_slices(w, layer, 1, 0) for layer, w in all_weights(CFG)}


def check(found, whole, tp, ranks):
    assert found.keys() == {(layer, w.name) for layer, w in whole}
    for (layer, w), array in whole.items():
        for i, rank in enumerate(ranks):
            want = array[(..., *rank_slice(w, CFG.dims(), tp, rank))]
            got = found[layer, w.name][i]
            assert got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == want.tobytes(), (layer, w.name, rank)


@pytest.mark.parametrize("mode, capacity", [(DIRECT, SMALL_BUFFER), (DIRECT, 1 << 20), (BUFFERED, SMALL_BUFFER), (MAPPED, SMALL_BUFFER)])
@pytest.mark.parametrize("tp, ranks", [*((tp, range(tp)) for tp in LEGAL_TP), (16, range(5, 6)), (16, range(8, 16)), (4, range(1, 3))])
def test_positions_come_to_their_ranks(stored, whole, mode, capacity, tp, ranks):
    found, loading = load(stored, tp, ranks, mode, capacity=capacity)
    check(found, whole, tp, ranks)
    assert loading.mode == mode and loading.kept_bytes == sum(a.nbytes for a in found.values())
    assert loading.wanted_bytes == wanted_bytes(CFG, tp, ranks)


@pytest.mark.parametrize("tp, ranks", [(8, range(8)), (16, range(16)), (16, range(3, 6)), (16, range(9, 12)), (4, range(2, 3))])
def test_ranks_without_a_piece_get_zeros(tmp_path, tp, ranks):
    """And read nothing for it: also a unit that nobody here has a piece of comes in its turn."""
    few = MadeCheckpoint(FEW_PIECES, fill="positions")
    checkpoint = Checkpoint.open(write_checkpoint(few, tmp_path / "m"))
    found, loading = load(checkpoint, tp, ranks, BUFFERED, list(parts_of_layers(FEW_PIECES, tp, ranks, 20_000)), capacity=SMALL_BUFFER)
    for layer, w in all_weights(FEW_PIECES):
        want = np.stack([few.rank_slices(w, layer, tp, rank) for rank in ranks])
        assert found[layer, w.name].tobytes() == want.tobytes() and found[layer, w.name].shape == want.shape, (layer, w.name)
    assert loading.wanted_bytes == wanted_bytes(FEW_PIECES, tp, ranks) and (ranks.start < 4 or loading.wanted_bytes < 0.3 * checkpoint.shards.text_bytes)


@pytest.mark.parametrize("tp, ranks", [(2, range(2)), (16, range(3, 5))])
def test_parts_of_layers(stored, whole, tp, ranks):
    most = 20_000 * len(ranks)
    units = list(parts_of_layers(CFG, tp, ranks, most))
    assert max(len(u.experts) for u in units) < CFG.num_experts and [u.layer for u in units[:2]] == [None, 0]
    found, _ = load(stored, tp, ranks, BUFFERED, units, capacity=SMALL_BUFFER)
    check(found, whole, tp, ranks)


@pytest.mark.parametrize("tp", LEGAL_TP)
def test_a_node_reads_each_byte_once(stored, monkeypatch, tp):
    """The text of the model, whatever the number of ranks: what reaches the system is counted."""
    read, preadv = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: read.append(n := preadv(fd, buffers, offset)) or n)
    _, loading = load(stored, tp, range(tp), BUFFERED)
    whole = sum(t.end - t.begin for f in stored.shards.files.values() for t in f.tensors.values())
    padding = sum((128 - 16) * 4 for layer in range(4) if CFG.is_kda(layer))   # of A_log: read along, wanted by nobody
    assert loading.wanted_bytes == loading.read_bytes == whole - padding
    requests = len(read)
    assert loading.read_bytes <= sum(read) <= loading.read_bytes + 2 * ALIGN * requests


def test_a_lone_rank_says_what_it_reads_beyond_its_own(stored):
    _, loading = load(stored, 16, range(7, 8), BUFFERED, capacity=SMALL_BUFFER)
    columns = sum(w.nbytes for w in _column_cut(16))
    assert loading.wanted_bytes == model_bytes(CFG, 16) + 15 * columns
    assert f"({loading.read_bytes / model_bytes(CFG, 16):.1f} bytes for each one kept)" in loading.summary()


def _column_cut(tp):
    """A rank's part of every weight that is cut by columns."""
    made = MadeCheckpoint(CFG)
    return [made.rank_slices(w, layer, tp, 0) for layer, w in all_weights(CFG) if w.cut and w.cut.axis]


def test_the_plan_has_every_row_once_and_fills_its_buffers(stored):
    owner = stored.shards.owner
    for tp, ranks in ((1, range(1)), (16, range(3, 4)), (8, range(2, 6))):
        total = 0
        for unit in whole_layers(CFG):
            seen = set()
            for block in blocks_of(unit, CFG, owner, tp, ranks, SMALL_BUFFER):
                pages = sum(-(-r.stop // ALIGN) - r.start // ALIGN for r in block.ranges)
                assert pages * ALIGN <= SMALL_BUFFER and [r.start for r in block.ranges] == sorted(r.start for r in block.ranges)
                for r in block.ranges:
                    for s in r.segments:
                        assert r.start <= s.start and s.start + s.nbytes <= r.stop
                        rows = {(s.weight.name, s.expert, row) for row in range(s.first_row, s.first_row + s.rows)}
                        assert not rows & seen
                        seen |= rows
                        total += s.nbytes
        assert total == wanted_bytes(CFG, tp, ranks)


# ---- how far ahead, and how much at once ----

class Throttled:
    """A disk of so many bytes a second, which serves one request at a time."""

    needs_buffer = True

    def __init__(self, inner, rate):
        self.inner, self.rate, self.free, self.lock = inner, rate, 0.0, threading.Lock()

    def read(self, block, buffer):
        views = self.inner.read(block, buffer)
        with self.lock:
            self.free = max(self.free, time.perf_counter()) + sum(v.nbytes for v in views) / self.rate
            until = self.free
        time.sleep(max(0.0, until - time.perf_counter()))
        return views

    def close(self):
        self.inner.close()


def test_reading_goes_on_while_units_are_consumed(stored, monkeypatch):
    make = block_reader.make_reader
    rate = stored.shards.text_bytes / 1.0   # bytes a second: the whole in one second
    monkeypatch.setattr(loader, "make_reader", lambda mode, keep: Throttled(make(mode, keep), rate))
    loading, dims, start = Loading(BUFFERED), CFG.dims(), time.perf_counter()
    units = whole_layers(CFG)
    for unit, _ in loading.run(stored, 2, range(2), units, lambda u: HostSlices(u, dims, 2, range(2)), capacity=1 << 16):
        time.sleep(1.0 / 5)   # as long as reading: one after the other would take two seconds
    assert time.perf_counter() - start < 1.6
    assert loading.seconds["read"] > 0.9 and loading.seconds["repack"] > 0.9


def test_no_more_units_are_begun_than_may_be(stored):
    opened, consumed, most = [], [], 0
    dims = CFG.dims()

    def open_target(unit):
        opened.append(unit)
        return HostSlices(unit, dims, 4, range(4))

    units = list(parts_of_layers(CFG, 4, range(4), 1))
    for unit, _ in Loading(BUFFERED).run(stored, 4, range(4), units, open_target):
        time.sleep(0.005)   # time to run ahead
        most = max(most, len(opened) - len(consumed))
        consumed.append(unit)
    assert consumed == units and most == loader.AHEAD + 1


# ---- trouble ----

def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def refuses(checkpoint, words, mode=BUFFERED, error=CheckpointError):
    """Loading ends in this error, with no thread and no open file left."""
    threads, files = threading.active_count(), open_files()
    with pytest.raises(error, match=words) as caught:
        for _ in Loading(mode).slices(checkpoint, 2, range(2)):
            pass
    assert threading.active_count() == threads and open_files() == files
    return caught.value


@pytest.mark.parametrize("mode", [DIRECT, BUFFERED, MAPPED])
@pytest.mark.parametrize("number", range(1, 6))
def test_a_file_that_lost_a_byte_since_the_check(folder, mode, number):
    checkpoint = Checkpoint.open(folder)
    size = (folder / shard(number)).stat().st_size
    os.truncate(folder / shard(number), size - 1)
    error = refuses(checkpoint, rf"{shard(number)}: ended at byte {size - 1:,} while it was read", mode)
    assert error.code == 3


@pytest.mark.parametrize("nth", [0, 1, 2, 5])
def test_a_disk_that_fails_in_the_middle(folder, monkeypatch, nth):
    checkpoint = Checkpoint.open(folder)
    fail_reads_after(monkeypatch, nth)
    assert refuses(checkpoint, r"model-\d{5}-of-000007.safetensors: an error on reading at byte \d[\d,]* .Input/output error.; check the disk").code == 3


def test_a_file_that_went_away(folder):
    checkpoint = Checkpoint.open(folder)
    (folder / shard(3)).unlink()
    for mode in (DIRECT, BUFFERED, MAPPED):
        refuses(checkpoint, f"{shard(3)}: an error on reading at byte 0 .No such file", mode)


def test_values_that_no_trained_model_has(folder):
    owner = Checkpoint.open(folder).shards.owner[key(1, "input_layernorm.weight")]
    place = owner.tensors[key(1, "input_layernorm.weight")]
    with open(owner.path, "r+b") as f:
        f.seek(owner.data_start + place.begin)
        f.write(bytes(place.end - place.begin))
    refuses(Checkpoint.open(folder), f"{owner.path.name}: found {key(1, 'input_layernorm.weight')} with nothing but zeros")


def test_a_consumer_that_stops_leaves_nothing(folder):
    threads, files = threading.active_count(), open_files()
    slices = Loading(BUFFERED).slices(Checkpoint.open(folder), 1, range(1))
    next(slices)
    slices.close()
    assert threading.active_count() == threads and open_files() == files


def test_a_target_that_fails(folder):
    def open_target(unit):
        raise MemoryError

    with pytest.raises(MemoryError):
        list(Loading(BUFFERED).run(Checkpoint.open(folder), 1, range(1), whole_layers(SMALL), open_target))


# ---- which mode ----

def without_direct(monkeypatch):
    real = os.open

    def refuse(path, flags, *more, **named):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refuse)


def test_modes(folder, monkeypatch):
    files = list(Checkpoint.open(folder).shards.files.values())
    monkeypatch.setattr(block_reader, "memory_bytes", lambda: 1000)
    assert block_reader.choose_mode("auto", files, 500) == (BUFFERED, "the page cache can keep it for the next start")
    assert block_reader.choose_mode("auto", files, 501) == (DIRECT, "larger than half of the memory")
    assert block_reader.choose_mode("mmap", files, 501) == (MAPPED, "as asked")
    without_direct(monkeypatch)
    mode, why = block_reader.choose_mode("auto", files, 501)
    assert mode == BUFFERED and why == f"the file system of {files[0].path} has no direct reads (Invalid argument)"
    with pytest.raises(UsageError, match="load_mode direct: the file system of .*.safetensors has no direct reads"):
        block_reader.choose_mode("direct", files, 1)


@pytest.mark.parametrize("room, dropped", [(1 << 40, False), (1, True)])
def test_what_the_page_cache_cannot_keep_is_dropped(stored, monkeypatch, room, dropped):
    calls = []
    monkeypatch.setattr(loader, "memory_bytes", lambda: room)
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, size, advice: calls.append((advice, size)))
    _, loading = load(stored, 1, range(1), BUFFERED)
    assert {advice for advice, _ in calls} == ({os.POSIX_FADV_DONTNEED} if dropped else set())
    assert not dropped or sum(size for _, size in calls) >= loading.read_bytes
