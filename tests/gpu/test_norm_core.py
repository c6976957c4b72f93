"""The sum of parts, AttnRes mixture and RMSNorm of a row against float64, and against themselves by bytes."""
import core_kernels as ck
import numpy as np
import pytest
from core_kernels import BF16, down, fill, poisoned, up

pytestmark = pytest.mark.gpu
F32, EPS = np.float32, 1e-5
# (n, leaves, parts, closed blocks at most, blocks a row, threads): hidden and latent of TP16, one rank, and the small model's.
SHAPES = ((7168, 16, 16, 8, 16, 448), (7168, 16, 16, 8, 8, 448), (7168, 16, 16, 8, 8, 896), (7168, 16, 1, 8, 16, 448), (7168, 16, 16, 8, 16, 224),
          (3584, 16, 16, 0, 8, 448), (3584, 16, 16, 0, 16, 224), (3584, 16, 16, 0, 1, 512), (128, 8, 2, 2, 1, 128), (128, 8, 2, 2, 8, 32),
          (64, 4, 2, 0, 2, 32), (64, 4, 2, 0, 1, 64), (7168, 16, 16, 8, 1, 0, 2), (7168, 16, 1, 8, 1, 0, 2), (128, 8, 2, 2, 1, 0, 2),   # of wide steps
          (7168, 16, 16, 8, 8, 256), (7168, 16, 16, 8, 1, 0), (7168, 16, 1, 8, 1, 0))   # a block a row, of few rows
KERNELS = {s: ck.norm_row(*s) for s in SHAPES}
# One rounding to BF16 is 1.7e-3 in L2.
F32_LIMIT, BF16_LIMIT = 1e-6, 3e-3


@pytest.fixture(scope="module")
def cores():
    return ck.Cores(KERNELS.values())


class Rows:
    def __init__(self, shape, rows, seed=0):
        n, leaves, parts, blocks, *_ = shape
        g = np.random.default_rng(seed)
        self.n, self.rows = n, rows
        self.parts = g.standard_normal((parts, rows, n)).astype(F32)
        self.hidden = g.standard_normal((rows, n)).astype(F32)
        # Sizes grow with depth in a real model; scores near each other, so that the softmax is no choice of one.
        self.blocks = (g.standard_normal((max(blocks, 1), rows, n)) * (1 + np.arange(max(blocks, 1)))[:, None, None]).astype(F32)
        self.score = (g.standard_normal(n) / np.sqrt(n)).astype(F32)
        self.weight = (1 + 0.3 * g.standard_normal(n)).astype(BF16)
        self.slots = np.arange(rows, dtype=np.int32)

    def run(self, cores, shape, *, num_blocks=0, hidden=True, parts=True, snapshot=False, row_map=None):
        rows, n = self.rows, self.n
        out_rows = rows if row_map is None else len(row_map)
        out, prefix = poisoned((out_rows, n), BF16), poisoned((rows, n), F32)
        blocks, closed = up(self.blocks), poisoned((rows, n), F32)
        args = fill(ck.NormRow, row_slot=up(self.slots), row_map=None if row_map is None else up(np.asarray(row_map, np.int32)), rows=rows, part_rows=rows,
                    parts=up(self.parts) if parts else None, hidden=up(self.hidden) if hidden else None, hidden_out=prefix,
                    snapshot=closed if snapshot else None, blocks=blocks, num_blocks=num_blocks, score=up(self.score), weight=up(self.weight),
                    out=out, eps=EPS)
        cores.run(KERNELS[shape], out_rows * shape[4], [args], shared=ck.norm_shared(*shape))
        return {"out": down(out, BF16), "hidden": down(prefix), "closed": down(closed)}

    def want(self, num_blocks=0, hidden=True, parts=True):
        p = self.parts.astype(np.float64).sum(0) * parts + self.hidden.astype(np.float64) * hidden
        v = np.concatenate([self.blocks[:num_blocks], p[None]]).astype(np.float64)
        s = (v * self.score).sum(-1) / np.sqrt((v * v).mean(-1) + EPS)
        e = np.exp(s - s.max(0))
        x = (e[..., None] * v).sum(0) / e.sum(0)[:, None] if num_blocks else p
        return {"out": x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * self.weight.astype(np.float64), "hidden": p}


def same(a, b):
    for name in a:
        assert a[name].tobytes() == b[name].tobytes(), name


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", (1, 9))
def test_matches_float64(cores, shape, rows):
    for num_blocks in {0, min(1, shape[3]), shape[3]}:
        case = Rows(shape, rows, seed=num_blocks + rows)
        got, want = case.run(cores, shape, num_blocks=num_blocks), case.want(num_blocks)
        assert ck.relative(got["hidden"], want["hidden"]) < F32_LIMIT
        assert ck.relative(got["out"], want["out"]) < BF16_LIMIT, num_blocks


@pytest.mark.parametrize("a, b", [(SHAPES[0], s) for s in (SHAPES[1], SHAPES[2], SHAPES[4], SHAPES[15])] + [(SHAPES[5], SHAPES[6]), (SHAPES[5], SHAPES[7]),
                                  (SHAPES[8], SHAPES[9]), (SHAPES[10], SHAPES[11]), (SHAPES[0], SHAPES[12]), (SHAPES[3], SHAPES[13]), (SHAPES[8], SHAPES[14]),
                                  (SHAPES[0], SHAPES[16]), (SHAPES[3], SHAPES[17])])
def test_bytes_do_not_depend_on_spread(cores, a, b):
    case = Rows(a, 5)
    blocks = max(a[3] - 1, 0)
    same(case.run(cores, a, num_blocks=blocks), case.run(cores, b, num_blocks=blocks))


@pytest.mark.parametrize("shape", (SHAPES[0], SHAPES[5], SHAPES[8], SHAPES[13], SHAPES[17]))
def test_row_alone_and_beside_nan(cores, shape):
    blocks = shape[3] and shape[3] - 1
    many = Rows(shape, 64, seed=4)
    whole = many.run(cores, shape, num_blocks=blocks)
    for row in (0, 7, 63):
        one = Rows(shape, 1)
        one.parts, one.hidden, one.blocks = many.parts[:, [row]], many.hidden[[row]], many.blocks[:, [row]]
        one.score, one.weight = many.score, many.weight
        same({k: v[row] for k, v in whole.items()}, {k: v[0] for k, v in one.run(cores, shape, num_blocks=blocks).items()})
    dead = np.arange(64) % 3 == 1
    many.parts[:, dead] = many.hidden[dead] = many.blocks[:, dead] = np.nan
    many.slots[dead] = -1
    beside = many.run(cores, shape, num_blocks=blocks)
    same({k: v[~dead] for k, v in whole.items()}, {k: v[~dead] for k, v in beside.items()})
    for v in beside.values():
        assert np.isnan(v[dead].astype(F32)).all()


@pytest.mark.parametrize("shape", (SHAPES[0], SHAPES[12], SHAPES[16]))
def test_snapshot_closes_the_block_and_empties_hidden(cores, shape):
    case = Rows(shape, 3)
    plain, closing = case.run(cores, shape, num_blocks=2), case.run(cores, shape, num_blocks=2, snapshot=True)
    assert plain["out"].tobytes() == closing["out"].tobytes() and plain["hidden"].tobytes() == closing["closed"].tobytes()
    assert (closing["hidden"] == 0).all() and np.isnan(plain["closed"]).all()


@pytest.mark.parametrize("hidden, parts", ((False, True), (True, False)))
def test_either_input_may_be_absent(cores, hidden, parts):
    case = Rows(SHAPES[0], 4)
    got, want = (f(num_blocks=3, hidden=hidden, parts=parts) for f in (lambda **k: case.run(cores, SHAPES[0], **k), case.want))
    assert ck.relative(got["hidden"], want["hidden"]) < F32_LIMIT and ck.relative(got["out"], want["out"]) < BF16_LIMIT


def test_row_map(cores):
    case = Rows(SHAPES[0], 8)
    whole, some = case.run(cores, SHAPES[0], num_blocks=8), case.run(cores, SHAPES[0], num_blocks=8, row_map=[2, 7, -1, -1])
    assert some["out"][:2].tobytes() == whole["out"][[2, 7]].tobytes()
    assert np.isnan(some["out"][2:].astype(F32)).all() and np.isnan(np.delete(some["hidden"], [2, 7], 0)).all()


def test_extreme_scores(cores):
    """A closed block that outweighs all others by e^80, and prefix sums that do: no overflow, no 0 / 0."""
    for which in (0, 1):
        case = Rows(SHAPES[0], 2)
        x = case.blocks[3] if which else case.parts.sum(0) + case.hidden
        case.score = (x[0] / np.linalg.norm(x[0]) * 2).astype(F32)
        assert ck.relative(case.run(cores, SHAPES[0], num_blocks=8)["out"], case.want(8)["out"]) < BF16_LIMIT
