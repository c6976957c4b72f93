"""The exchange inside a kernel between ranks that are streams of this process, on one GPU: no byte is lost in thousands of exchanges that run into
one another, and a rank that sends nothing is named. Between processes and GPUs: test_ranks_nccl.py."""
import random
from types import SimpleNamespace

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy", reason="CuPy holds the device's memory; install k3cuda[cu13] or k3cuda[cu12]")

from k3cuda.emit import MoveLayout  # noqa: E402
from k3cuda.errors import ExchangeTimeout  # noqa: E402
from k3cuda.runtime.cuda_driver import Launch, Module, open_device  # noqa: E402
from k3cuda.runtime.cuda_kernels import compile_moves  # noqa: E402
from k3cuda.runtime.peer_exchange import STATE_WORDS, TROUBLE_WORDS, PeerExchange, memory_bytes  # noqa: E402
from k3cuda.runtime.peer_memory import EMPTY_BYTE  # noqa: E402
from k3cuda.runtime.rank_moves import THREADS, blocks_for, part_bytes, rank_move  # noqa: E402

WIDTH, REPLAYS, BLOCKS = 448, 401, 16   # values of a row that a rank has; a few blocks, so that all ranks' fit at once


@pytest.fixture(scope="module")
def module():
    return Module(compile_moves(open_device().arch).cubin)


class Ranks:
    def __init__(self, module, tp, capacity, limit_s):
        self.streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(tp)]
        self.memory = [cupy.full(memory_bytes(capacity), EMPTY_BYTE, cupy.uint8) for _ in range(tp)]
        self.states = [cupy.zeros(STATE_WORDS * len(capacity), cupy.uint32) for _ in range(tp)]
        peers = SimpleNamespace(addresses=[m.data.ptr for m in self.memory])
        self.exchanges = []
        for rank, stream in enumerate(self.streams):
            def kernel(name, arguments, vectors, stream=stream, dependent=False):
                return Launch(module.function(name), blocks_for(vectors, BLOCKS), THREADS, arguments, stream=stream.ptr, dependent=dependent)
            trouble = np.frombuffer(cupy.cuda.alloc_pinned_memory(4 * TROUBLE_WORDS), np.uint32, TROUBLE_WORDS)
            trouble[:] = 0
            self.exchanges.append(PeerExchange(rank, peers, capacity, self.states[rank].data.ptr, trouble, kernel, limit_s))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_thousands_of_exchanges_bring_every_byte(tp, overlap, module):
    """Gathers, stacks and scatters of 1, 8 and 64 rows in turn, in graphs whose ranks drift: each is launched as often, in orders of its own."""
    part, dice = WIDTH * 4, random.Random(tp)
    layouts = [at for rows in (1, 64, 8) for at in (MoveLayout(rows, part, part, part * tp, part, False, tp, 0, 0),
                                                   MoveLayout(rows, part * tp, part * tp, part * tp, part * tp * rows, False, tp, 0, 0),
                                                   MoveLayout(rows, part, part * tp, part, part * rows, True, tp, 0, 0))]
    ranks = Ranks(module, tp, {tp: max(map(part_bytes, layouts))}, limit_s=20)
    words = np.random.default_rng(tp).integers(0, 1 << 32, (tp, len(layouts), 64 * WIDTH * tp), np.uint32)
    words[words == 0xFFFFFFFF] = 0x80000000
    sources = [[cupy.asarray(words[r, i]) for i in range(len(layouts))] for r in range(tp)]
    targets = [[cupy.zeros(64 * WIDTH * tp * tp, cupy.uint32) for _ in layouts] for _ in range(tp)]
    cupy.cuda.Device().synchronize()
    graphs = []
    for r, (exchange, stream) in enumerate(zip(ranks.exchanges, ranks.streams)):
        launches = [exchange.launch(f"exchange {i}", [rank_move(at, sources[r][i].data.ptr, targets[r][i].data.ptr)], dependent=overlap and i > 0)
                    for i, at in enumerate(layouts)]
        with stream:
            stream.begin_capture()
            for launch in launches:
                launch.launch()
            graphs.append(stream.end_capture())
    for _ in range(REPLAYS):
        for r in dice.sample(range(tp), tp):
            graphs[r].launch(ranks.streams[r])
    for stream in ranks.streams:
        stream.synchronize()
    for r, exchange in enumerate(ranks.exchanges):
        exchange.check()
        assert bool((ranks.memory[r] == EMPTY_BYTE).all()) and int(ranks.states[r][0]) == REPLAYS * len(layouts) % 2
        for i, at in enumerate(layouts):
            sent = [words[s, i][:at.rows * at.source_row // 4].reshape(at.rows, -1) for s in range(tp)]
            got = targets[r][i].get()[:at.rows * WIDTH * tp * (tp if at.slice > part else 1)]
            if at.is_cut:
                wanted = np.stack([x[:, r * WIDTH:(r + 1) * WIDTH] for x in sent])
            else:
                wanted = np.concatenate(sent, axis=1) if at.slice == part else np.stack(sent)
            np.testing.assert_array_equal(got, wanted.reshape(-1), err_msg=f"rank {r}, exchange {i}")


def test_a_rank_that_sends_nothing_is_named(module):
    ranks = Ranks(module, 2, {2: 4096}, limit_s=0.2)
    source, target = cupy.ones(256, cupy.float32), cupy.zeros(512, cupy.float32)
    cupy.cuda.Device().synchronize()
    layout = MoveLayout(1, 1024, 1024, 2048, 1024, False, 2, 0, 0)
    for name in ("a gather", "the next"):
        ranks.exchanges[0].launch(name, [rank_move(layout, source.data.ptr, target.data.ptr)]).launch()
    ranks.streams[0].synchronize()
    with pytest.raises(ExchangeTimeout, match="rank 0 waited 0.2 s for the part of rank 1 in a gather"):
        ranks.exchanges[0].check()
    assert ranks.exchanges[1].check() is None
