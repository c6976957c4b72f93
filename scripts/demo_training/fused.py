"""What a training step does between its matrix products, on a GPU: one kernel of fused.cu each way for what would be tens of PyTorch's.

A function has the values of the one of the same name in plain.py, up to the order of sums. Kernels are compiled and loaded when they are first called,
which must be before a CUDA graph is captured. Heads have 128 channels, other rows a multiple of 4 and at most 256.
"""
import functools
from ctypes import c_float, c_int, c_longlong, c_void_p
from pathlib import Path

import torch

from k3cuda.config import L2NORM_EPS
from k3cuda.runtime.cuda_driver import Launch, Module, open_device
from k3cuda.runtime.cuda_jit import compile_cuda

from .kda import SUB, UnitLowerInverse

HEAD, RUN, ROWS, MOST_WIDTH, MOST_SOURCES, WARPS = 128, 32, 8, 256, 4, 4   # as in fused.cu; WARPS of a block
THREADS = 32 * WARPS
_ANY = torch.bfloat16   # of kernels where all is F32: training loads this module in any case
SOURCE = Path(__file__).with_name("fused.cu")


def source(dtype, chunk: int) -> str:
    return f"#define CHUNK {chunk}\n" + "#define BF16\n" * (dtype == torch.bfloat16) + SOURCE.read_text(encoding="utf-8")


@functools.cache
def _function(device: int, dtype, chunk: int, name: str):
    return _module(device, dtype, chunk).function(name)


@functools.cache
def _module(device: int, dtype, chunk: int):
    return Module(compile_cuda(source(dtype, chunk), open_device(device).arch, name="fused.cu").cubin)


def start(name: str, dtype, chunk: int, grid, arguments) -> None:
    """One kernel on PyTorch's current stream; `arguments` are ctypes values."""
    device = torch.cuda.current_device()
    open_device(device)   # backward passes run in a thread of PyTorch's own
    Launch(_function(device, dtype, chunk, name), grid, THREADS, arguments, stream=torch.cuda.current_stream().cuda_stream).launch()


def _run(name: str, dtype, grid, *arguments, chunk: int = 64) -> None:
    """Tensors, ints as int32, floats as float32; a ctypes value stays what it is."""
    def as_ctypes(x):
        if isinstance(x, torch.Tensor):
            assert x.is_contiguous()
            return c_void_p(x.data_ptr())
        return c_int(x) if isinstance(x, int) else c_float(x) if isinstance(x, float) else x

    start(name, dtype, chunk, grid, [as_ctypes(x) for x in arguments])


def _blocks(n: int, each: int) -> int:
    return -(-n // each)


def _f32(like, *shape):
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _checked(width: int, most: int = MOST_WIDTH) -> None:
    if width % 4 or width > most:
        raise ValueError(f"rows of {width}: fused.cu wants a multiple of 4, at most {most}; train with --plain")


def conv_heads(y, taps, heads: int, scale: float | None):
    return _Conv.apply(y, taps, heads, scale)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, taps, heads, scale):
        b, t, c = y.shape
        if c != heads * HEAD or taps.shape != (c, 4):
            raise ValueError(f"{heads} heads of {c} channels, taps {tuple(taps.shape)}: fused.cu wants heads of {HEAD} and 4 taps; train with --plain")
        y, taps, out = y.contiguous(), taps.contiguous(), _f32(y, b * heads, t, HEAD)
        ctx.save_for_backward(y, taps)
        ctx.sizes = heads, scale
        _run("conv_forward", y.dtype, (_blocks(t, RUN * WARPS), heads, b), y, taps, out, t, heads, float(scale or 0), L2NORM_EPS, int(scale is not None))
        return out

    @staticmethod
    def backward(ctx, grad):
        (y, taps), (heads, scale), grad = ctx.saved_tensors, ctx.sizes, grad.contiguous()
        b, t, c = y.shape
        of_y, parts = torch.empty_like(y), _f32(y, b * _blocks(t, RUN), c, 4)
        _run("conv_backward", y.dtype, (_blocks(t, RUN * WARPS), heads, b), y, taps, grad, of_y, parts, t, heads, float(scale or 0), L2NORM_EPS,
             int(scale is not None))
        return of_y, parts.sum(0), None, None


def decay_sums(f, bias, steep, chunk: int, bound: float):
    return _Decay.apply(f, bias, steep, chunk, bound)


class _Decay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, f, bias, steep, chunk, bound):
        (b, t, c), heads = f.shape, len(steep)
        if c != heads * HEAD or t % chunk:
            raise ValueError(f"{heads} heads of {c} channels, {t} tokens in chunks of {chunk}: fused.cu wants heads of {HEAD} and whole chunks")
        f, bias, steep, out = f.contiguous(), bias.contiguous(), steep.contiguous(), _f32(f, b * heads, t, HEAD)
        ctx.save_for_backward(f, bias, steep)
        ctx.sizes = chunk, bound
        _run("decay_forward", f.dtype, (t // chunk, heads, b), f, bias, steep, out, t, heads, float(bound), chunk=chunk)
        return out

    @staticmethod
    def backward(ctx, grad):
        (f, bias, steep), (chunk, bound), grad = ctx.saved_tensors, ctx.sizes, grad.contiguous()
        (b, t, c), heads = f.shape, len(steep)
        of_f, parts = torch.empty_like(f), _f32(f, 2, b * (t // chunk), c)
        _run("decay_backward", f.dtype, (t // chunk, heads, b), f, bias, steep, grad, of_f, parts, t, heads, float(bound), chunk=chunk)
        of_bias, of_steep = parts.sum(1)
        return of_f, of_bias, of_steep.view(heads, HEAD).sum(1), None, None


def factors(q, k, v, total, beta):
    return _Factors.apply(q, k, v, total, beta)


class _Factors(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, total, beta):
        b, n, c, d = q.shape
        if d != HEAD:
            raise ValueError(f"heads of {d} channels: fused.cu wants {HEAD}; train with --plain")
        inputs = [x.contiguous() for x in (q, k, v, total, beta)]
        left, right = _f32(q, b, n, c // SUB, 2 * SUB, d), _f32(q, b, n, c // SUB, c, d)
        values, keys, write, read = (torch.empty_like(inputs[0]) for _ in range(4))
        kept = _f32(q, b, n, d, 1)
        _run("factors_forward", _ANY, b * n, *inputs, left, right, values, keys, write, read, kept, chunk=c)
        ctx.save_for_backward(*inputs)
        return left, right, values, keys, write, read, kept

    @staticmethod
    def backward(ctx, *grads):
        inputs = ctx.saved_tensors
        b, n, c, _ = inputs[0].shape
        found = [torch.empty_like(x) for x in inputs]
        _run("factors_backward", _ANY, b * n, *inputs, *(g.contiguous() for g in grads), *found, chunk=c)
        return tuple(found)


def unit_lower_inverse(a):
    return _Inverse.apply(a)


class _Inverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        a, c = a.contiguous(), a.shape[-1]
        out, chunks = torch.empty_like(a), a.numel() // c**2
        _run("inverse_forward", _ANY, _blocks(chunks, HEAD // c), a, out, chunks, chunk=c)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        return UnitLowerInverse.backward(ctx, grad)


def gated_norm(o, weight, gate, heads: int, eps: float):
    return _Gated.apply(o, weight, gate, heads, eps)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, o, weight, gate, heads, eps):
        b, t, _ = gate.shape
        if o.shape != (b * heads, t, HEAD):
            raise ValueError(f"outputs of heads {tuple(o.shape)}: fused.cu wants [{b * heads}, {t}, {HEAD}]; train with --plain")
        o, weight, gate, out = o.contiguous(), weight.contiguous(), gate.contiguous(), torch.empty_like(gate, memory_format=torch.contiguous_format)
        ctx.save_for_backward(o, weight, gate)
        ctx.sizes = heads, eps
        _run("gated_forward", gate.dtype, (_blocks(t, RUN * WARPS), heads, b), o, weight, gate, out, t, heads, float(eps))
        return out

    @staticmethod
    def backward(ctx, grad):
        (o, weight, gate), (heads, eps), grad = ctx.saved_tensors, ctx.sizes, grad.contiguous()
        b, t, _ = gate.shape
        of_o, of_gate, parts = torch.empty_like(o), torch.empty_like(gate), _f32(o, b * heads * _blocks(t, RUN), HEAD)
        _run("gated_backward", gate.dtype, (_blocks(t, RUN * WARPS), heads, b), o, weight, gate, grad, of_o, of_gate, parts, t, heads, float(eps))
        return of_o, parts.sum(0), of_gate, None, None


def situ(gate, up, b: float, c: float):
    return _Situ.apply(gate, up, b, c)


class _Situ(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, b, c):
        _checked(gate.shape[-1], gate.shape[-1])
        gate, up = gate.contiguous(), up.contiguous()
        out, fours = torch.empty_like(gate), gate.numel() // 4
        ctx.save_for_backward(gate, up)
        ctx.sizes = b, c
        _run("situ_forward", gate.dtype, _blocks(fours, THREADS), gate, up, out, c_longlong(fours), float(b), float(c))
        return out

    @staticmethod
    def backward(ctx, grad):
        (gate, up), (b, c), grad = ctx.saved_tensors, ctx.sizes, grad.contiguous()
        of_gate, of_up, fours = torch.empty_like(gate), torch.empty_like(up), gate.numel() // 4
        _run("situ_backward", gate.dtype, _blocks(fours, THREADS), gate, up, grad, of_gate, of_up, c_longlong(fours), float(b), float(c))
        return of_gate, of_up, None, None


def rms_norm(x, weight, eps: float):
    return _Norm.apply(x, weight, eps)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        width = x.shape[-1]
        _checked(width)
        x, weight = x.contiguous(), weight.contiguous()
        out, rows = torch.empty_like(x), x.numel() // width
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        _run("norm_forward", x.dtype, _blocks(rows, ROWS * WARPS), x, weight, out, rows, width, float(eps))
        return out

    @staticmethod
    def backward(ctx, grad):
        (x, weight), grad, width = ctx.saved_tensors, grad.contiguous(), ctx.saved_tensors[0].shape[-1]
        rows = x.numel() // width
        blocks = _blocks(rows, ROWS * WARPS)
        of_x, parts = torch.empty_like(x), _f32(x, blocks * WARPS, width)
        _run("norm_backward", x.dtype, blocks, x, weight, grad, of_x, parts, rows, width, float(ctx.eps))
        return of_x, parts.sum(0), None


def mix(sources, vector, eps: float):
    return _Mix.apply(vector, eps, *sources)


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, vector, eps, *sources):
        width, count = len(vector), len(sources)
        _checked(width)
        if count > MOST_SOURCES:
            raise ValueError(f"{count} sources of a mixture: fused.cu wants at most {MOST_SOURCES}; train with --plain")
        vector, sources = vector.contiguous(), [x.contiguous() for x in sources]
        out, rows = torch.empty_like(sources[0]), sources[0].numel() // width
        ctx.save_for_backward(vector, *sources)
        ctx.eps = eps
        _run("mix_forward", out.dtype, _blocks(rows, ROWS * WARPS), *_all_places(sources), vector, out, count, rows, width, float(eps))
        return out

    @staticmethod
    def backward(ctx, grad):
        (vector, *sources), grad, width = ctx.saved_tensors, grad.contiguous(), grad.shape[-1]
        rows, of_sources = grad.numel() // width, [torch.empty_like(x) for x in sources]
        blocks = _blocks(rows, ROWS * WARPS)
        parts = _f32(grad, blocks * WARPS, width)
        _run("mix_backward", grad.dtype, blocks, *_all_places(sources), vector, grad, *_all_places(of_sources), parts, len(sources), rows, width, float(ctx.eps))
        return parts.sum(0), None, *of_sources


def _all_places(tensors):
    return [*tensors, *[tensors[0]] * (MOST_SOURCES - len(tensors))]


def spread(x, places):
    return _Spread.apply(x, places.of_choice, places.row_of)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, of_choice, row_of):
        (n, z), x = x.shape, x.contiguous()
        _checked(z)
        out = x.new_empty(len(row_of), z)
        ctx.save_for_backward(of_choice)
        _run("spread_forward", x.dtype, _blocks(out.numel() // 4, THREADS), x, row_of.contiguous(), out, c_longlong(out.numel() // 4), z, n)
        return out

    @staticmethod
    def backward(ctx, grad):
        (of_choice,), grad = ctx.saved_tensors, grad.contiguous()
        n, k = of_choice.shape
        found = grad.new_empty(n, grad.shape[1])
        _run("spread_backward", grad.dtype, _blocks(found.numel() // 4, THREADS), grad, of_choice.contiguous(), found, c_longlong(found.numel() // 4),
             grad.shape[1], k, c_longlong(len(grad)))
        return found, None, None


def collect(y, places, share):
    return _Collect.apply(y, places.of_choice, share)


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, of_choice, share):
        y, of_choice, share = y.contiguous(), of_choice.contiguous(), share.contiguous()
        (n, k), z = of_choice.shape, y.shape[1]
        _checked(z)
        out = y.new_empty(n, z)
        ctx.save_for_backward(y, of_choice, share)
        _run("collect_forward", y.dtype, _blocks(n * z // 4, THREADS), y, of_choice, share, out, c_longlong(n * z // 4), z, k, c_longlong(len(y)))
        return out

    @staticmethod
    def backward(ctx, grad):
        (y, of_choice, share), grad = ctx.saved_tensors, grad.contiguous()
        (n, k), z = of_choice.shape, y.shape[1]
        of_y, of_share = torch.zeros_like(y), torch.empty_like(share)
        _run("collect_backward", y.dtype, _blocks(n, WARPS), y, of_choice, share, grad, of_y, of_share, n, z, k, c_longlong(len(y)))
        return of_y, None, of_share
