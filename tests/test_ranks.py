"""Ranks as processes: the same bytes and tokens as ranks in one process, and nothing that is not the same everywhere."""
import os
import socket
import struct
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from k3cuda import LLM, SamplingParams
from k3cuda.errors import ConfigError, DeviceError, RankDied, RanksDiffer, UsageError
from k3cuda.runtime import rank_watch, wire
from k3cuda.runtime.backend import DraftAsk, Judge, Judged
from k3cuda.runtime.collectives import TcpRanks
from k3cuda.runtime.launch import Launch
from k3cuda.runtime.machine import Gpu
from k3cuda.runtime.made_config import made_config
from k3cuda.runtime.made_model import MadeCheckpoint
from k3cuda.runtime.open_model import _require_gpu
from k3cuda.runtime.rank_backend import CHECK_EVERY, RankedBackend, follow
from k3cuda.runtime.rank_calls import DECODE, ENCODE
from k3cuda.runtime.rank_job import Job, open_job
from k3cuda.runtime.rendezvous import Joined
from k3cuda.runtime.sampling import Draw, Drawn
from k3cuda.runtime.write_checkpoint import write_checkpoint
from models import step_rows
from rank_oracle import check_moves

IDS = [5, 80, 200, 3, 41, 7, 300, 12]
SIZES = {"max_model_len": 128, "max_batch": 2}


def answers(model, tp, ranks, params, **options):
    """(logits, tokens of two requests side by side, of a fork) of one model."""
    with LLM(model, tp=tp, ranks=ranks, **SIZES, **options) as llm:
        assert llm.backend.ranks == ranks and llm.backend.tp == tp
        logits = llm.logits(IDS)
        tokens = [o.token_ids for o in llm.generate([IDS, IDS[:3]], params)]
        with llm.prefill(IDS) as session, session.fork() as copy:
            copy.feed([9])
            forked = copy.logits.copy()
        return logits, tokens, forked


@pytest.mark.parametrize("options", [{}, {"draft_model": "tiny-random-draft", "num_drafts": 3}], ids=["plain", "drafts"])
def test_processes_give_the_bytes_of_virtual_ranks(options):
    params = [SamplingParams(max_tokens=6, seed=7), SamplingParams(max_tokens=4, temperature=0, frequency_penalty=0.5)]
    got, want = (answers("tiny-random", 2, ranks, params, **options) for ranks in ("processes", "virtual"))
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[2], want[2])
    assert got[1] == want[1] == answers("tiny-random", 1, "virtual", params, **options)[1]


def test_sixteen_processes(tmp_path):
    write_checkpoint(MadeCheckpoint(made_config(), seed=3), tmp_path / "model")
    logits = []
    for tp, ranks in ((16, "processes"), (16, "virtual"), (1, "virtual")):
        with LLM(tmp_path / "model", tp=tp, ranks=ranks, **SIZES) as llm:
            logits.append(llm.logits(IDS[:2]))
            if ranks == "processes":
                assert llm.buffer("kda_qkv").shape[-1] * 16 == llm.cfg.dims()["kda_dim"]
                with pytest.raises(UsageError, match="rank 3 is another process"):
                    llm.buffer("logits", 3)
    np.testing.assert_array_equal(logits[0], logits[1])
    np.testing.assert_array_equal(logits[0].argmax(-1), logits[2].argmax(-1))


@pytest.mark.parametrize("draft", [None, "tiny-random-draft-gqa"])
def test_more_processes_than_heads(draft):
    """Of the model, of experts' pieces and of its draft: the bytes of virtual ranks, and the tokens of one rank."""
    params = SamplingParams(max_tokens=6, seed=7)
    got, want, one = (answers("tiny-random", tp, ranks, params, draft_model=draft) for tp, ranks in ((8, "processes"), (8, "virtual"), (1, "virtual")))
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[2], want[2])
    assert got[1] == want[1] == one[1]


def test_what_cannot_be_refused_later_is_refused_before_a_process_starts(monkeypatch):
    monkeypatch.setattr("k3cuda.runtime.rank_job.Workers", lambda *args: pytest.fail("a process was started"))
    for options, kind, text in (({"tp": 3}, Exception, "1, 2, 4"), ({"tp": 2, "max_batch": 65}, UsageError, "max_batch"), ({"tp": 2, "draft_model": "/nowhere"}, Exception, "nowhere"),
                                ({"tp": 2, "rendezvous_timeout": 0}, UsageError, "above 0"), ({"tp": 2, "collectives": "mpi"}, UsageError, "wanted nccl, peer"),
                                ({"tp": 2, "collectives": "peer"}, UsageError, "found 'peer' with decode_backend 'reference', where nothing crosses GPUs")):
        with pytest.raises(kind, match=text):
            LLM("tiny-random", ranks="processes", **options)
    with pytest.raises(UsageError, match="found 'peer' with all ranks in one process"):
        LLM("tiny-random", tp=2, collectives="peer")
    with pytest.raises(UsageError, match="open the model themselves"):
        LLM(MadeCheckpoint(made_config()), tp=2, ranks="processes")
    with pytest.raises(UsageError, match="ranks: found 'many'"):
        LLM("tiny-random", tp=2, ranks="many")


def gpus(monkeypatch, count, capability="9.0"):
    found = tuple(Gpu(i, "a GPU", capability, 1 << 37) for i in range(count))
    monkeypatch.setattr("k3cuda.runtime.rank_job.probe_driver", lambda: SimpleNamespace(gpus=found))
    monkeypatch.setattr("k3cuda.runtime.nccl.library", lambda: None)


@pytest.mark.parametrize(("count", "text"), [(0, "tp: found 4, but 0 GPUs are visible here"), (1, "tp: found 4, but 1 GPU is visible here"), (3, "use a tp of at most 3")])
def test_more_ranks_than_gpus(count, text, monkeypatch):
    gpus(monkeypatch, count)
    with pytest.raises(DeviceError, match=text) as e:
        Job(None, 4, {}, {}, 1).choose_gpu()
    assert e.value.code == 5


def test_the_gpu_of_a_rank_is_by_its_local_rank(monkeypatch):
    gpus(monkeypatch, 4)
    places = [Launch("x", r, 8, r % 4, 4, "h", 1, "t") for r in range(8)]
    jobs = [Job(place, 8, {}, {}, 1) for place in places]
    for job in jobs:
        job.choose_gpu()
    assert [job.device for job in jobs] == [0, 1, 2, 3] * 2
    gpus(monkeypatch, 2)
    with pytest.raises(DeviceError, match="local rank 3 has no GPU"):
        jobs[3].choose_gpu()
    for name in ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE", "NCCL_MAX_NCHANNELS"):
        monkeypatch.setenv(name, "")   # put back afterwards
    monkeypatch.setenv("K3CUDA_SHARE_GPU", "1")   # the test switch
    for job in jobs:
        job.choose_gpu()
    assert [job.device for job in jobs] == [0, 1] * 4 and os.environ["NCCL_HOSTID"].endswith("7")


def test_a_rank_opens_no_gpu_but_its_own(monkeypatch):
    """Where there is no driver it says so, and not that ranks are more than GPUs."""
    opened, gpu = [], SimpleNamespace(problem=None, gpus=(None,) * 4)
    monkeypatch.setattr("k3cuda.runtime.open_model.probe_driver", lambda: gpu)
    monkeypatch.setattr("k3cuda.runtime.cuda_driver.require_gpu", opened.append)
    gpus(monkeypatch, 4)
    job = Job(Launch("x", 6, 8, 2, 4, "h", 1, "t"), 8, {}, {}, 1)
    _require_gpu("standard", "f32", job), _require_gpu("standard", "f32", None)
    gpu.problem = "no NVIDIA driver"
    _require_gpu("standard", "f32", Job(None, 8, {}, {}, 1))
    assert opened == [2, 0, 0]


@pytest.mark.parametrize(("count", "options", "are_processes"), [
    (4, {}, True), (8, {}, True), (4, {"decode_backend": "latency_specialized"}, True), (3, {}, False), (4, {"ranks": "virtual"}, False),
    (4, {"tp": 1}, False), (4, {"decode_backend": "reference"}, False),
    (4, {"model": MadeCheckpoint(made_config())}, False), (4, {"tp": "4"}, False),
    (4, {"capability": "7.5"}, False),
], ids=["enough", "more", "in one launch", "too few", "virtual", "one rank", "on the CPU", "an open model", "no number", "other GPUs"])
def test_ranks_have_a_gpu_each_where_there_are_enough(count, options, are_processes, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    asked = {"ranks": "auto", "model": "tiny-random", "tp": 4, "decode_backend": "standard", "capability": "9.0"} | options
    gpus(monkeypatch, count, asked.pop("capability"))
    job = open_job(asked.pop("ranks"), None, asked.pop("model"), None, asked, 60)
    assert (job is not None) == are_processes


def test_a_launcher_that_started_another_number(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="tp: found 2, but RANK and WORLD_SIZE started 4 processes"):
        LLM("tiny-random", tp=2)
    with LLM("tiny-random", tp=2, ranks="virtual", **SIZES) as llm:   # who says so is left alone
        assert llm.backend.ranks == "virtual"


# ---- what moves ----

def test_collectives_move_alike():
    """Every shape of a plan, in F32 and as integers, over three processes' worth of connections."""
    tp, rng = 3, np.random.default_rng(0)
    pairs = {r: socket.socketpair() for r in range(1, tp)}
    ranks = [TcpRanks(0, tp, {r: pair[0] for r, pair in pairs.items()})] + [TcpRanks(r, tp, {0: pairs[r][1]}) for r in range(1, tp)]
    check_moves(ranks, ((2, 6), (1, 4, 9), (5, 3), (0, 6)), rng)
    for pair in pairs.values():
        pair[0].close()
        pair[1].close()


def test_calls_are_the_same_on_the_other_side():
    params = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, min_p=0.01, seed=3, stop=("x",)).resolved({})
    plain = Draw(params, (1 << 64) - 1, 9, prompt_ids=[1, 2], output_ids=[3])
    penal = Draw(SamplingParams(temperature=1 / 3, repetition_penalty=1.1).resolved({}), 5, 9, prompt_ids=[1, 2], output_ids=[3])
    for name, args in (("open_slot", (1, range(4, 6))), ("copy_slot", (0, 1, (2, 3))), ("step", (step_rows((0, 4, [7, 8]), (2, 0, [9])),)),
                       ("commit", (np.array([True, False]),)), ("propose", ([DraftAsk(1, 2, 3, 1 << 63, 0.1)],)), ("sample", ([plain, penal],)),
                       ("accept", ([Judge(1, (4, 5), (plain, penal))],))):
        message = wire.packed({"args": ENCODE[name](*args)})
        there = DECODE[name](*wire.unpacked(message)["args"])
        assert str(ENCODE[name](*there)) == str(ENCODE[name](*args)), name
    same, _ = DECODE["sample"](*ENCODE["sample"]([plain, penal]))[0]
    assert (same.params.temperature, same.params.top_p, same.params.top_k, same.params.min_p) == (0.7, 0.9, 5, 0.01) and same.seed == plain.seed
    assert not same.output_ids and DECODE["sample"](*ENCODE["sample"]([penal]))[0][0].output_ids == [3]


# ---- what is decided ----

class Sampler:
    """A backend that draws token 7, from some draw on another one."""

    def __init__(self, wrong_from=1 << 30):
        self.wrong_from, self.count = wrong_from, 0

    def sample(self, draws):
        self.count += 1
        return [Drawn(7 + (self.count >= self.wrong_from))]

    def accept(self, judges):
        return [Judged(1, tuple(self.sample(None)))]

    def close(self):
        self.is_closed = True


def pair(wrong_from):
    here, there = socket.socketpair()
    watch = SimpleNamespace(failure=None, call=nullcontext)

    def run():
        try:
            follow(Sampler(wrong_from), there, watch)
        except wire.LinkLost:
            pass

    threading.Thread(target=run, daemon=True).start()
    return RankedBackend(Sampler(), {1: here}, watch, here.close)


@pytest.mark.parametrize("call", ["sample", "accept"])
def test_ranks_that_decide_differently_are_stopped(call):
    backend = pair(wrong_from=CHECK_EVERY + 5)
    for _ in range(2 * CHECK_EVERY - 1):
        getattr(backend, call)([])
    with pytest.raises(RanksDiffer, match="rank 1 decided other tokens than rank 0") as e:
        getattr(backend, call)([])
    assert e.value.code == 7


def test_a_short_answer_is_compared_at_its_end():
    backend = pair(wrong_from=3)
    for _ in range(3):
        backend.sample([])
    with pytest.raises(RanksDiffer):
        backend.close()
    assert backend.is_closed
    backend.close()
    alike = pair(wrong_from=1 << 30)
    alike.sample([])
    alike.close()


# ---- who hangs ----

def test_building_is_no_hang_and_standing_still_is(monkeypatch):
    monkeypatch.setattr(rank_watch, "BEAT_S", 0.05)
    here, there = socket.socketpair()
    watch = rank_watch.Watch(Joined(0, 2, b"", {1: here}, {}, ["a, pid 1", "b, pid 2"]), hang_s=0.5)
    over = threading.Event()

    def other():   # alive, and always at the same place
        while not over.wait(0.05):
            wire.send(there, {"progress": 3})

    threading.Thread(target=other, daemon=True).start()
    with watch.call(), watch.building():
        time.sleep(1.5)
    for _ in range(4):
        watch.progress()   # rank 0 is further than the other one
    with pytest.raises(RankDied, match=r"rank 1 \(b, pid 2\) hung: no rank got on for 0.5 s"), watch.call():
        while watch.failure is None:
            time.sleep(0.05)
        watch.check()
    over.set()
    watch.close()
    there.close()


# ---- messages ----

@pytest.mark.parametrize("data", [struct.pack("<I", 1 << 30) + bytes(40), struct.pack("<I", 2) + bytes(32) + b"{}", b"\x00" * 5])
def test_damaged_messages_are_no_messages(data):
    here, there = socket.socketpair()
    here.sendall(data)
    here.close()
    with there, pytest.raises(wire.LinkLost):
        wire.receive(there)


def test_messages_that_are_no_objects():
    for body in (b"[1]", b"{", b"\xff", b"[" * 100_000):
        with pytest.raises(wire.LinkLost):
            wire.unpacked(struct.pack("<I", len(body)) + wire.digest(b"", b"", b"", body) + body)


@pytest.mark.parametrize("error", [UsageError("a", "b"), ConfigError("c"), RanksDiffer("d"), MemoryError(), ValueError("odd")])
def test_errors_keep_their_code(error):
    told = wire.told(error)
    again = wire.raised(told, "rank 3: ")
    assert again.code == told["code"] == getattr(error, "code", 4 if isinstance(error, MemoryError) else 1)
    assert again.message == "rank 3: " + told["message"] and again.hint == told["hint"]
