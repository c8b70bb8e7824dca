"""Layers: autograd functions that the language model and the vision tower share. They decide what a layer keeps.

    Again       a layer keeps its input; backward computes it a second time, one layer at a time
    Packed      sequences of different lengths, end to end
    gated_mlp   down(silu(gate(x)) · up(x)) keeps gate(x) and up(x), half of what its parts would

Run: python layers.py                     # what a gated MLP keeps, and its time
Left out on purpose: fused kernels of our own.
To trade memory for time otherwise, change what a forward pass saves here; plan.py has the bytes.
"""

import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

import memory

ALIGN = 8  # elements: 16 bytes of BF16, without which a row's start misses a GPU's fast matrix kernels


class Packed:
    """Sequences of these lengths, end to end in a tensor's first dimension; `starts` [n + 1] int32 bounds them."""

    def __init__(self, lengths: Sequence[int]):
        self.lengths, self.longest = lengths, max(lengths)
        self.starts = memory.upload(F.pad(torch.tensor(lengths).cumsum(0), (1, 0)), torch.int32)


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
        return F.linear(F.silu(gate) * up, _filled(down_weight, 1), down_bias)

    @staticmethod
    def backward(ctx, grad):
        x, gate, up, gate_weight, up_weight, down_weight = ctx.saved_tensors
        inner, silu = len(gate_weight), F.silu(gate)
        d_down = (grad.t() @ (silu * up))[:, :inner]
        d_inner = grad @ _filled(down_weight, 1)
        d_up = d_inner * silu
        d_gate = torch.ops.aten.silu_backward(d_inner.mul_(up), gate)
        dx = torch.addmm(d_gate @ _filled(gate_weight), d_up, _filled(up_weight))
        weights = (d_gate.t() @ x)[:inner], (d_up.t() @ x)[:inner], d_down
        sums = d_gate[:, :inner], d_up[:, :inner], grad
        biases = [values.sum(0) if biased else None for values, biased in zip(sums, ctx.biased, strict=True)]
        return dx, *(part for pair in zip(weights, biases, strict=True) for part in pair)


def _filled(weight: torch.Tensor | None, dim: int = 0) -> torch.Tensor | None:
    missing = 0 if weight is None else -weight.shape[dim] % ALIGN
    return F.pad(weight, (0, 0) * (weight.dim() - 1 - dim) + (0, missing)) if missing else weight


def time_and_bytes(run: Callable[[], torch.Tensor]) -> str:
    """Median time of five forward and backward passes of run(), and what autograd keeps between them."""
    seconds, saved = [], {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    for _ in range(5):
        saved.clear()
        memory.synchronize()
        start = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            out = run()
        out.sum().backward()
        memory.synchronize()
        seconds.append(time.perf_counter() - start)
    mib = sum(saved.values()) / 2**20
    return f"{1e3 * sorted(seconds)[2]:.0f} ms, keeps {mib:.0f} MiB for backward, weights included"


def _main() -> None:
    """A gated MLP of 1024 and 4096 on 512 tokens, plain and as gated_mlp()."""
    gate, up, down = (torch.nn.Linear(*size, bias=False) for size in ((1024, 4096), (1024, 4096), (4096, 1024)))
    x = torch.randn(512, 1024, requires_grad=True)
    print("gated_mlp:", time_and_bytes(lambda: gated_mlp(x, gate, up, down)))
    print("plain:", time_and_bytes(lambda: down(F.silu(gate(x)) * up(x))))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding in FP32: x [..., heads, D], cos and sin [..., 1, D / 2] float32 -> as x."""
    return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -sin), None, None


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)



if __name__ == "__main__":
    _main()
