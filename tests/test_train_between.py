"""What the training of the demo does between its products: its own kernels, run on the CPU, against PyTorch's operations, values and gradients; and chunks of
KDA against the recurrence."""
import sys

import pytest

torch = pytest.importorskip("torch", reason="PyTorch trains the demo; nothing else needs it")

from command import ROOT  # noqa: E402
from shim import host  # noqa: E402

sys.path.append(str(ROOT / "scripts"))
from demo_training import fused, kda, plain  # noqa: E402
from demo_training.experts import Places  # noqa: E402
from demo_training.model import K3  # noqa: E402
from demo_training.shapes import config  # noqa: E402
from demo_training.vocabulary import train_tokenizer  # noqa: E402

BOTH_WAYS = ("conv", "decay", "factors", "gated", "situ", "norm", "mix", "spread", "collect")
KERNELS = ["inverse_forward", *(f"{name}_{way}" for name in BOTH_WAYS for way in ("forward", "backward"))]
BF16 = 2**-8   # of a value, rounded once


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    if host.COMPILER is None:
        pytest.skip("no g++")
    built = {}

    def library(dtype, chunk):
        if (dtype, chunk) not in built:
            built[dtype, chunk] = host.build(fused.source(dtype, chunk), KERNELS, tmp_path_factory.mktemp("fused"))
        return built[dtype, chunk]

    return library


@pytest.fixture
def on_host(monkeypatch, libraries):
    monkeypatch.setattr(fused, "start", lambda name, dtype, chunk, grid, arguments: host.launch(libraries(dtype, chunk), name, grid, fused.THREADS, arguments))


def values(*shape, dtype=torch.float32, seed=0, size=1.0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * size).to(dtype).requires_grad_()


def both(name, inputs, *more, limit):
    """`inputs` are what has gradients, a list of them too."""
    found = []
    for module in (plain, fused):
        flat = [x.detach().clone().requires_grad_() for part in inputs for x in (part if isinstance(part, list) else [part])]
        left = iter(flat)
        given = [[next(left) for _ in part] if isinstance(part, list) else next(left) for part in inputs]
        out = getattr(module, name)(*given, *more)
        outs = out if isinstance(out, tuple) else (out,)
        torch.autograd.backward(outs, [values(*o.shape, dtype=o.dtype, seed=7 + i).detach() for i, o in enumerate(outs)])
        found.append([*(o.detach() for o in outs), *(x.grad for x in flat)])
    for i, (want, got) in enumerate(zip(*found, strict=True)):
        assert want.dtype == got.dtype and want.shape == got.shape and torch.isfinite(got).all(), (name, i)
        scale = float(want.float().norm())
        assert scale > 0 and float((got.float() - want.float()).norm()) <= limit * scale, (name, i)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 3e-6), (torch.bfloat16, BF16)])
@pytest.mark.parametrize("t", [16, 48, 160])
def test_convolution_and_gated_norm(on_host, dtype, limit, t):
    for scale in (None, 0.5):
        both("conv_heads", [values(2, t, 256, dtype=dtype), values(256, 4)], 2, scale, limit=limit)
    both("gated_norm", [values(4, t, 128, seed=1), values(128), values(2, t, 256, dtype=dtype)], 2, 1e-5, limit=limit)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 3e-6), (torch.bfloat16, BF16)])
@pytest.mark.parametrize("chunk", [16, 64])
def test_decays(on_host, dtype, limit, chunk):
    both("decay_sums", [values(2, 128, 256, dtype=dtype), values(256), values(2).detach().exp()], chunk, -5.0, limit=limit)


@pytest.mark.parametrize("chunk", [16, 32, 64])
def test_factors(on_host, chunk):
    q, k, v = (values(3, 2, chunk, 128, seed=i, size=0.1) for i in range(3))
    total = -torch.rand(3, 2, chunk, 128, generator=torch.Generator().manual_seed(5)).cumsum(2)
    both("factors", [q, k, v, total, torch.rand(3, 2, chunk, 1, generator=torch.Generator().manual_seed(6))], limit=3e-6)


@pytest.mark.parametrize("chunk", [16, 32, 64])
def test_inverse(on_host, chunk):
    both("unit_lower_inverse", [(values(3, 3, chunk, chunk, size=chunk**-0.5).tril(-1)).detach()], limit=3e-6)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 3e-6), (torch.bfloat16, BF16)])
def test_rows(on_host, dtype, limit):
    for width in (64, 192):
        both("rms_norm", [values(5, 9, width, dtype=dtype), values(width)], 1e-5, limit=limit)
    both("situ", [values(3, 70, 128, dtype=dtype, size=3), values(3, 70, 128, dtype=dtype, size=3, seed=1)], 4.0, 25.0, limit=limit)
    for count in (2, 3, 4):
        both("mix", [[values(3, 15, 192, dtype=dtype, seed=s) for s in range(count)], values(192)], 1e-5, limit=limit)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 3e-6), (torch.bfloat16, BF16)])
@pytest.mark.parametrize("room", [8, 48])
def test_rows_of_experts(on_host, dtype, limit, room):
    """Also where choices have no place, and rows are padding."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.rand(40, 8, generator=generator).topk(3).indices
    places = Places(ids, torch.arange(40) % 7 > 0, 8, room)
    assert (places.left_out > 0) == (room == 8)
    both("spread", [values(40, 64, dtype=dtype)], places, limit=limit)
    both("collect", [values(8 * room, 64, dtype=dtype)], places, *[values(40, 3)], limit=limit)
    both("collect", [values(8 * room, 64, dtype=dtype)], places, values(40, 3, seed=2), limit=limit)


def test_a_whole_step(on_host):
    """Gradients of every parameter; rows of another length than whole chunks too."""
    cfg = config("toy", train_tokenizer())
    for t in (48, 56):
        ids, found = torch.randint(0, cfg.vocab_size, (3, t), generator=torch.Generator().manual_seed(t)), []
        for between in (plain, fused):
            model = K3(cfg, 0, between=between)
            loss = model.logits(model(ids, torch.arange(t)[None].expand(3, -1) < t - 5)).square().mean()
            loss.backward()
            found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        assert len(found[0]) > 40
        for want, got in zip(*found, strict=True):
            assert float((got - want).norm()) <= 2e-5 * float(want.norm()) + 1e-9


def test_chunks_are_the_recurrence():
    q, k, v = (values(2, 64, 128, seed=i) for i in range(3))
    decay = -torch.rand(2, 64, 128, generator=torch.Generator().manual_seed(5)) * 5
    beta = torch.rand(2, 64, generator=torch.Generator().manual_seed(6))
    k = k / k.norm(dim=-1, keepdim=True)
    want = kda.kda_recurrence(q, k, v, decay, beta).detach()
    for chunk in (16, 32, 64):
        got = kda.kda_chunked(q, k, v, decay.unflatten(1, (-1, chunk)).cumsum(2).flatten(1, 2), beta, chunk).detach()
        assert float((got - want).norm()) <= 1e-5 * float(want.norm())
