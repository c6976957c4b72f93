"""Loading as the command does it: the modes, what is said, and how trouble ends."""
import os
import re
import time

import pytest
from command import k3, k3_json

from damage import shard
from k3cuda.runtime.loading import Loading
from k3cuda.runtime.preflight import check


def answer(folder, *more):
    return k3_json("generate", folder, "-p", "hi", "-n", "6", "--no-think", "--seed", "3", "--json", *more)["token_ids"]


def test_every_mode_gives_the_same_answer(pristine):
    want = answer(pristine)
    for mode in ("auto", "direct", "buffered", "mmap"):
        assert answer(pristine, "--load-mode", mode, "--tp", "2" if mode == "direct" else "1") == want
    assert b"load_mode: found 'fast', wanted auto, direct, buffered, mmap" in k3("generate", pristine, "-p", "hi", "--load-mode", "fast", code=2).stderr


def test_what_loading_took_is_in_the_document(pristine):
    ask = ["-p", "hi", "-n", "2", "--no-think", "--seed", "3", "--json"]
    found = k3_json("generate", pristine, "--tp", "2", *ask)["loading"]
    nbytes = check(pristine).facts["bytes_per_rank"]["2"]
    assert found["mode"] == "buffered" and found["kept_bytes"] == 2 * nbytes and found["read_bytes"] == found["wanted_bytes"] < found["kept_bytes"]   # norms are held twice
    assert min(found["wall_s"], found["read_s"], found["copy_s"], found["repack_s"]) > 0 and found["compile_s"] == found["capture_s"] == 0
    assert k3_json("generate", "tiny-random", *ask)["loading"] == dict.fromkeys(found, 0) | {"mode": None}


def test_phases_of_a_gpu_are_counted_and_shown():
    """Compiling and capturing, which no backend of the CPU does."""
    loading = Loading()
    loading.kept_bytes = loading.read_bytes = 1
    for name in ("compile", "capture"):
        with pytest.raises(ZeroDivisionError), loading.phase(name):   # also of what fails
            time.sleep(0.06)
            1 / 0
    assert loading.to_dict()["compile_s"] >= 0.06 <= loading.to_dict()["capture_s"]
    assert re.search(r"; overlapping: compile 0\.\d s, capture 0\.\d s$", loading.summary())


def test_what_is_said(pristine):
    lines = k3("generate", pristine, "-p", "hi", "-n", "1", "--no-think", "-v").stderr.decode().splitlines()
    (reading,) = [line for line in lines if line.startswith("reading ")]
    assert reading.startswith(f"reading {pristine}: buffered (the page cache can keep it for the next start), ") and reading.endswith(" at a time")
    (loaded,) = [line for line in lines if line.startswith("loaded ")]
    assert "(1.0 bytes for each one kept)" in loaded
    assert k3("generate", pristine, "-p", "hi", "-n", "1", "--no-think").stderr.count(b"\n") == 1   # the seed: short loads say nothing


@pytest.mark.parametrize("number", range(1, 6))
def test_damage_ends_in_code_3(folder, number):
    os.truncate(folder / shard(number), (folder / shard(number)).stat().st_size - 1)
    error = k3("generate", folder, "-p", "hi", code=3).stderr.decode()
    assert shard(number) in error and "truncated by 1 bytes" in error
