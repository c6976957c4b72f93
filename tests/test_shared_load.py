"""Processes of one host share one reading: every byte comes from the disk once, and whoever dies or fails ends all of them, with nothing left."""
import hashlib
import json
import os
import secrets
import subprocess
import sys

import pytest
from command import ENVIRONMENT, k3_json

from damage import small_checkpoint
from k3cuda.runtime.checkpoint import Checkpoint
from k3cuda.runtime.load_plan import wanted_bytes
from k3cuda.runtime.made_config import made_config
from k3cuda.runtime.made_model import MadeCheckpoint
from k3cuda.runtime.repacking import repack
from k3cuda.runtime.write_checkpoint import write_checkpoint
from k3cuda.weights import all_weights

CFG = made_config()
# One rank: loads, and prints what it got and what it read itself. The disk has a rate; `act` says what happens at the second unit.
RANK = """
import hashlib, json, os, signal, sys, threading, time
from k3cuda.errors import K3Error
from k3cuda.runtime import loader
from k3cuda.runtime.checkpoint import Checkpoint
from k3cuda.runtime.shared_load import SharedLoading

folder, tp, rank, first, end, secret, rate, act = sys.argv[1:]
tp, rank, ranks, rate = int(tp), int(rank), range(int(first), int(end)), float(rate)
read, preadv, lock, free = [], os.preadv, threading.Lock(), [0.0]

def throttled(fd, buffers, offset):
    count = preadv(fd, buffers, offset)
    with lock:
        read.append(count)
        free[0] = max(free[0], time.perf_counter()) + count / rate
        until = free[0]
    time.sleep(max(0.0, until - time.perf_counter()))
    return count

def cut_once(*_):
    if act == "truncated" and not read:
        path = list(source.shards.files.values())[3].path
        os.truncate(path, path.stat().st_size // 2)
    return throttled(*_)

source, found = Checkpoint.open(folder), {}
os.preadv = cut_once
start = time.perf_counter()
loading = SharedLoading("buffered", False, rank, ranks, bytes.fromhex(secret))
try:
    for n, (unit, arrays) in enumerate(loading.slices(source, tp, range(rank, rank + 1))):
        if n == 2 and act == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if n == 2 and act == "leaves":
            break
        for name, array in arrays.items():
            assert len(array) == 1 and array.flags.owndata
            found[f"{unit.layer} {name}"] = hashlib.sha256(array.tobytes()).hexdigest()
except K3Error as e:
    print(e, file=sys.stderr)
    sys.exit(e.code)
maps = open("/proc/self/maps").read()
print(json.dumps({"found": found, "read": sum(read), "loading": loading.to_dict(), "summary": loading.summary(), "seconds": time.perf_counter() - start,
                  "left": maps.count("k3cuda-load") + sum("k3cuda-load" in os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}"))}))
"""


@pytest.fixture(scope="module")
def coded():
    return MadeCheckpoint(CFG, fill="positions")


@pytest.fixture(scope="module")
def stored(coded, tmp_path_factory):
    return write_checkpoint(coded, tmp_path_factory.mktemp("coded") / "m")


def ranks_of_a_host(folder, tp, ranks, rate=1e12, acts=None):
    """(exit code, stdout, stderr) of each, all on one host."""
    secret, before = secrets.token_hex(16), set(os.listdir("/dev/shm"))
    running = [subprocess.Popen([sys.executable, "-c", RANK, str(folder), *map(str, (tp, rank, ranks.start, ranks.stop, secret, rate, (acts or {}).get(rank, "")))],
                                env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for rank in ranks]
    done = [(p.communicate(timeout=100), p.returncode) for p in running]
    assert set(os.listdir("/dev/shm")) <= before
    return [(code, out, err) for (out, err), code in done]


@pytest.mark.parametrize("tp, ranks", [(2, range(2)), (4, range(4)), (16, range(5, 8))])
def test_every_byte_is_read_once_by_one_of_them(coded, stored, tp, ranks):
    rate = 8e6   # bytes a second: half a second for all of it
    documents = []
    for code, out, err in ranks_of_a_host(stored, tp, ranks, rate):
        assert code == 0, err
        documents.append(json.loads(out))
    for rank, document in zip(ranks, documents):
        want = {f"{layer} {w.name}": hashlib.sha256(coded.rank_slices(w, layer, tp, rank)[None].tobytes()).hexdigest() for layer, w in all_weights(CFG)}
        assert document["found"] == want and document["left"] == 0
    reader, *others = documents
    wanted = wanted_bytes(CFG, tp, ranks)
    assert reader["loading"]["wanted_bytes"] == wanted and wanted <= reader["loading"]["read_bytes"] <= reader["read"] <= 1.3 * reader["loading"]["read_bytes"]
    assert reader["seconds"] > wanted / rate and all(d["read"] == d["loading"]["read_bytes"] == 0 for d in others)
    if len(ranks) == tp:   # the text of the model, whatever tp
        assert reader["loading"]["read_bytes"] == Checkpoint.open(stored).shards.text_bytes - 3 * 4 * (128 - 16)   # but for what pads A_log
    assert all(d["summary"].endswith(f"rank {ranks.start} reads for all of this host") for d in others)


@pytest.mark.parametrize("act, who", [("killed", 0), ("killed", 2), ("leaves", 0), ("leaves", 1)])
def test_one_that_ends_ends_all(stored, who, act):
    for rank, (code, out, err) in enumerate(ranks_of_a_host(stored, 4, range(3), acts={who: act})):
        if rank == who:
            assert code == (-9 if act == "killed" else 0)
        else:
            assert code == 9 and f"rank {who} ended while the weights were loaded" in err, (rank, code, err)


def test_what_the_reader_meets_ends_all(coded, tmp_path):
    folder = write_checkpoint(coded, tmp_path / "m")
    for code, _, err in ranks_of_a_host(folder, 4, range(3), acts={0: "truncated"}):
        assert code == 3 and "while it was read: it has become shorter since it was checked" in err


def test_a_rank_that_never_comes(stored, monkeypatch):
    from k3cuda.errors import RankDied
    from k3cuda.runtime import shared_load

    monkeypatch.setattr(shared_load, "MEET_S", 0.2)
    source = Checkpoint.open(stored)
    for rank, words in ((0, "rank 1 did not come"), (1, "rank 0, which reads for this host, was not there within 0.2 s")):
        loading = shared_load.SharedLoading("buffered", False, rank, range(2), secrets.token_bytes(8))
        with pytest.raises(RankDied, match=words):
            list(loading.slices(source, 2, range(rank, rank + 1)))


def test_ranks_of_a_job(tmp_path):
    """As the command starts them; of a repacked model each reads its own files."""
    folder = small_checkpoint(tmp_path / "m")
    repack(folder, 2, tmp_path / "r")
    ask = ["-p", "hi", "-n", "3", "--no-think", "--seed", "3", "--json"]
    want = k3_json("generate", folder, "--tp", "2", *ask)
    shared = k3_json("generate", folder, "--tp", "2", "--ranks", "processes", *ask)
    own = k3_json("generate", tmp_path / "r", "--ranks", "processes", *ask)
    assert shared["token_ids"] == own["token_ids"] == want["token_ids"]
    assert shared["loading"]["read_bytes"] == want["loading"]["read_bytes"] and shared["loading"]["kept_bytes"] == want["loading"]["kept_bytes"]
    assert 0.4 < own["loading"]["read_bytes"] / want["loading"]["read_bytes"] < 0.7
