"""Layers: autograd functions that the language model and the vision tower share. They decide what a layer keeps.

    Again       a layer keeps its input; backward computes it a second time, one layer at a time
    Packed      sequences of different lengths, end to end
    gated_mlp   down(silu(gate(x)) · up(x)) keeps gate(x) and up(x), half of what its parts would
    rotate      the rotary embedding keeps cosines and sines
    rotate_in_place     the same without a backward pass, for the engine

What is elementwise in the last three is bound by memory's bandwidth, so on a GPU a kernel of ours (Triton) reads and
writes each tensor once. Beside the trainer's calls stands the same in PyTorch's steps: a CPU runs these, and they say
what the kernel has to compute. In BF16 forward rounds where they do, which is where the engine's kernels round, too.

Run: python layers.py                     # what a gated MLP keeps, and its time
Left out on purpose: tuning the kernels as they run (it costs start-up time, and every run gets the same kernels).
To trade memory for time otherwise, change what a forward pass saves here; sizes.py has the bytes.
"""

import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

import hardware

ALIGN = 8  # elements: 16 bytes of BF16, without which a row's start misses a GPU's fast matrix kernels


class Packed:
    """Sequences of these lengths, end to end in a tensor's first dimension; `starts` [n + 1] int32 bounds them."""

    def __init__(self, lengths: Sequence[int]):
        self.lengths, self.longest = lengths, max(lengths)
        self.starts = hardware.upload(F.pad(torch.tensor(lengths).cumsum(0), (1, 0)), torch.int32)


class Again(torch.autograd.Function):
    """Runs a layer of which autograd keeps only the input; backward runs it a second time and goes back through that.

    `layer` takes the input and returns a tuple of outputs. Whatever else it reads gets its gradient from the second
    run itself: parameters through their hooks, a suffix's prefix keys and values in their `.grad`. Hooks for saved
    tensors that surround the outer backward see what the second run saves.
    """

    @staticmethod
    def forward(ctx, layer, hidden):
        ctx.layer = layer
        ctx.save_for_backward(hidden)
        ctx.set_materialize_grads(False)
        return layer(hidden.detach())  # detached: Megatron enables gradients for its residual additions

    @staticmethod
    def backward(ctx, *grads):
        hidden = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            outputs = ctx.layer(hidden)
        used = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
        torch.autograd.backward(*zip(*used, strict=True))
        return None, hidden.grad


def gated_mlp(x: torch.Tensor, gate, up, down) -> torch.Tensor:
    """down(silu(gate(x)) · up(x)) of three linear layers (any modules with weight and bias) on x [tokens, hidden]."""
    return _GatedMLP.apply(x, gate.weight, gate.bias, up.weight, up.bias, down.weight, down.bias)


class _GatedMLP(torch.autograd.Function):
    """Saves x, gate(x) and up(x): the rest is elementwise and computed again. An inner width that is no multiple of
    ALIGN is filled up with zeros."""

    @staticmethod
    def forward(ctx, x, gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias):
        gate = F.linear(x, _filled(gate_weight), _filled(gate_bias))
        up = F.linear(x, _filled(up_weight), _filled(up_bias))
        ctx.save_for_backward(x, gate, up, gate_weight, up_weight, down_weight)
        ctx.biased = [bias is not None for bias in (gate_bias, up_bias, down_bias)]
        return F.linear(_gated(gate, up), _filled(down_weight, 1), down_bias)

    @staticmethod
    def backward(ctx, grad):
        x, gate, up, gate_weight, up_weight, down_weight = ctx.saved_tensors
        width = len(gate_weight)
        d_gate, d_up, inner = _gated_backward(grad @ _filled(down_weight, 1), gate, up)
        d_down = (grad.t() @ inner)[:, :width]
        del inner  # its memory is free for what follows
        dx = torch.addmm(d_gate @ _filled(gate_weight), d_up, _filled(up_weight))
        weights = (d_gate.t() @ x)[:width], (d_up.t() @ x)[:width], d_down
        sums = d_gate[:, :width], d_up[:, :width], grad
        biases = [values.sum(0) if biased else None for values, biased in zip(sums, ctx.biased, strict=True)]
        return dx, *(part for pair in zip(weights, biases, strict=True) for part in pair)


def _filled(weight: torch.Tensor | None, dim: int = 0) -> torch.Tensor | None:
    missing = 0 if weight is None else -weight.shape[dim] % ALIGN
    return F.pad(weight, (0, 0) * (weight.dim() - 1 - dim) + (0, missing)) if missing else weight


def _gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up"""
    return _gated_fused(gate, up) if gate.is_cuda else F.silu(gate) * up


def _gated_fused(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(gate)
    _flat(_gated_kernel, gate, up, out)
    return out


def _gated_backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gradients of gate and of up from that of silu(gate) · up, and silu(gate) · up again. `grad` is overwritten; gate
    and up are not, since a second backward may need them."""
    if grad.is_cuda:
        return _gated_backward_fused(grad, gate, up)
    silu = F.silu(gate)
    inner = silu * up
    d_up = silu.mul_(grad)
    return torch.ops.aten.silu_backward(grad.mul_(up), gate), d_up, inner


def _gated_backward_fused(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
    d_gate, inner = torch.empty_like(gate), torch.empty_like(gate)
    _flat(_gated_backward_kernel, grad, gate, up, d_gate, inner)
    return d_gate, grad, inner


def _flat(kernel, *tensors: torch.Tensor) -> None:
    """Run an elementwise kernel over contiguous tensors of one size."""
    n, block = tensors[0].numel(), 2048
    assert all(t.is_contiguous() and t.numel() == n for t in tensors), "elementwise kernels go through memory in order"
    with hardware.launching():
        kernel[(triton.cdiv(n, block),)](*tensors, n, BLOCK=block)


@triton.jit
def _gated_kernel(gate, up, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    g = tl.load(gate + at, inside).to(tl.float32)
    u = tl.load(up + at, inside).to(tl.float32)
    silu = (g * tl.sigmoid(g)).to(out.dtype.element_ty).to(tl.float32)  # as PyTorch and the engine round
    tl.store(out + at, silu * u, inside)


@triton.jit
def _gated_backward_kernel(grad, gate, up, d_gate, inner, n, BLOCK: tl.constexpr):
    """up's gradient takes the place of `grad`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    d = tl.load(grad + at, inside).to(tl.float32)
    g = tl.load(gate + at, inside).to(tl.float32)
    u = tl.load(up + at, inside).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    tl.store(inner + at, silu.to(inner.dtype.element_ty).to(tl.float32) * u, inside)  # as forward rounded it
    tl.store(grad + at, d * silu, inside)
    tl.store(d_gate + at, d * u * (sigmoid + silu * (1 - sigmoid)), inside)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int | None = None) -> torch.Tensor:
    """Rotary embedding of x [..., H, D], cosine and sine [..., 1, D / 2] float32, in FP32 and rounded once to x's dtype
    -> contiguous [..., H, D]. Only the first `heads` heads are rotated, if given; the others are copied."""
    return _Rotate.apply(x, cos, sin, x.shape[-2] if heads is None else heads)


class _Rotate(torch.autograd.Function):
    """Saves cosines and sines: the gradient is turned back."""

    @staticmethod
    def forward(ctx, x, cos, sin, heads):
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        return _rotated(x, cos, sin, heads)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -sin, ctx.heads), None, None, None


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> torch.Tensor:
    if x.is_cuda:
        return _rotated_fused(x, cos, sin, heads)
    out = torch.empty(x.shape, dtype=x.dtype)
    a, b = x[..., :heads, :].chunk(2, -1)
    left, right = out[..., :heads, :].chunk(2, -1)
    torch.sub(a * cos, b * sin, out=left)
    torch.add(b * cos, a * sin, out=right)
    out[..., heads:, :] = x[..., heads:, :]
    return out


def _rotated_fused(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half = x.shape[-1] // 2
    cos, sin = (part.expand(*x.shape[:-2], 1, half).reshape(-1, half).contiguous() for part in (cos, sin))
    rows = x.flatten(0, -3)  # a view of queries or keys within one tensor, if the leading dimensions allow it
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    strides = rows.stride(0), rows.stride(1)
    with hardware.launching():
        _rotate_kernel[(len(rows),)](rows, cos, sin, out, *strides, heads, HEADS=x.shape[-2], HALF=half)
    return out


@triton.jit
def _rotate_kernel(x, cos, sin, out, row_stride, head_stride, rotated, HEADS: tl.constexpr, HALF: tl.constexpr):
    """A program takes a row: all heads of a token, [HEADS, 2 · HALF], in a tile whose sides are powers of two."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, triton.next_power_of_2(HEADS))[:, None]
    column = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    inside = (head < HEADS) & (column < HALF)
    c = tl.load(cos + row * HALF + column, column < HALF)
    s = tl.load(sin + row * HALF + column, column < HALF)
    source = x + row * row_stride + head.to(tl.int64) * head_stride + column
    a = tl.load(source, inside).to(tl.float32)
    b = tl.load(source + HALF, inside).to(tl.float32)
    target = out + (row * HEADS + head) * 2 * HALF + column
    tl.store(target, tl.where(head < rotated, a * c - b * s, a), inside)
    tl.store(target + HALF, tl.where(head < rotated, b * c + a * s, b), inside)


def rotate_in_place(query, key, positions, inverse, section: Sequence[int]) -> None:
    """M-RoPE of query [T, H · D] and key [T, K · D], whose rows may be parts of longer ones; CUDA only.

    positions: int64 [3, T], temporal, height and width. inverse: float32 [D / 2], angle per position. section: how many
    of these take each axis. Angles, cosines and sines in FP32, as the trainer's are; rounded once, to the dtype.
    """
    half = len(inverse)
    assert query.stride(1) == key.stride(1) == positions.stride(1) == 1 and sum(section) == half
    heads = query.shape[1] // (2 * half), key.shape[1] // (2 * half)
    strides = query.stride(0), key.stride(0), positions.stride(0)
    ends = section[0], section[0] + section[1]
    _rotate_in_place_kernel[(len(query),)](query, key, positions, inverse, *strides, *ends, *heads, HALF=half)


@triton.jit
def _rotate_in_place_kernel(
    query, key, positions, inverse, query_stride, key_stride, axis_stride, height, width,
    HEADS: tl.constexpr, KEYS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """A program takes a token. Columns from `height` on turn by its second position, from `width` on by the third."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, triton.next_power_of_2(HALF))
    axis = (column >= height).to(tl.int64) + (column >= width).to(tl.int64)
    position = tl.load(positions + axis * axis_stride + row, column < HALF)
    angle = position.to(tl.float32) * tl.load(inverse + column, column < HALF)
    c, s = tl.cos(angle)[None, :], tl.sin(angle)[None, :]
    _turn_heads(query + row * query_stride, c, s, HEADS, HALF)
    _turn_heads(key + row * key_stride, c, s, KEYS, HALF)


@triton.jit
def _turn_heads(row, c, s, HEADS: tl.constexpr, HALF: tl.constexpr):
    head = tl.arange(0, triton.next_power_of_2(HEADS))[:, None]
    column = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    inside = (head < HEADS) & (column < HALF)
    here = row + head * 2 * HALF + column
    a = tl.load(here, inside).to(tl.float32)
    b = tl.load(here + HALF, inside).to(tl.float32)
    tl.store(here, a * c - b * s, inside)
    tl.store(here + HALF, b * c + a * s, inside)


def time_and_bytes(run: Callable[[], torch.Tensor]) -> str:
    """Median time of five forward and backward passes of run(), and what autograd keeps between them."""
    seconds, saved = [], {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    for _ in range(5):
        saved.clear()
        hardware.synchronize()
        start = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            out = run()
        out.sum().backward()
        hardware.synchronize()
        seconds.append(time.perf_counter() - start)
    mib = sum(saved.values()) / 2**20
    return f"{1e3 * sorted(seconds)[2]:.0f} ms, keeps {mib:.0f} MiB for backward, weights included"


def _main() -> None:
    """A gated MLP of 1024 and 4096 on 512 tokens, plain and as gated_mlp()."""
    gate, up, down = (torch.nn.Linear(*size, bias=False) for size in ((1024, 4096), (1024, 4096), (4096, 1024)))
    x = torch.randn(512, 1024, requires_grad=True)
    print("gated_mlp:", time_and_bytes(lambda: gated_mlp(x, gate, up, down)))
    print("plain:", time_and_bytes(lambda: down(F.silu(gate(x)) * up(x))))


if __name__ == "__main__":
    _main()
