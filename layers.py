"""Layers: autograd functions that the language model and the vision tower share. They decide what a layer keeps.

    Again       a layer keeps its input; backward computes it a second time, one layer at a time
    gated_mlp   down(silu(gate(x)) · up(x)) keeps gate(x) and up(x), half of what its parts would

Run: tests/test_layers.py. Left out on purpose: fused kernels of our own.
To trade memory for time otherwise, change what a forward pass saves here; plan.py has the bytes.
"""

import torch
import torch.nn.functional as F

ALIGN = 8  # elements: 16 bytes of BF16, without which a row's start misses a GPU's fast matrix kernels


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
