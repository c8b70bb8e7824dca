"""layers.py: values and gradients are those of the plain computation; less is kept."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import layers


def mlp(inner: int, bias: bool) -> tuple[torch.Tensor, nn.ModuleList]:
    torch.manual_seed(0)
    sizes = [(16, inner), (16, inner), (inner, 16)]
    return torch.randn(5, 16).double().requires_grad_(), nn.ModuleList(nn.Linear(*s, bias).double() for s in sizes)


@pytest.mark.parametrize("inner", [24, 13], ids=["aligned", "filled up"])
@pytest.mark.parametrize("bias", [True, False])
def test_gated_mlp_and_its_gradients(inner, bias):
    x, (gate, up, down) = mlp(inner, bias)
    parameters = [x, *(p for part in (gate, up, down) for p in part.parameters())]
    out, expected = layers.gated_mlp(x, gate, up, down), down(F.silu(gate(x)) * up(x))
    assert torch.allclose(out, expected, rtol=0, atol=1e-14)
    weight = torch.randn_like(out)
    got, want = (torch.autograd.grad((o * weight).sum(), parameters) for o in (out, expected))
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=1e-13)


def test_gated_mlp_keeps_half():
    """Of what is as wide as the inner layer: gate and up, where the plain computation also keeps what follows."""
    x, parts = mlp(24, False)
    counts = []
    for run in (layers.gated_mlp, lambda x, gate, up, down: down(F.silu(gate(x)) * up(x))):
        saved = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=saved: s.setdefault(t.data_ptr(), t), lambda t: t):
            run(x, *parts)
        counts.append(sum(t.shape == (5, 24) for t in saved.values()))
    assert counts == [2, 4]


def test_a_layer_again_gives_the_same_bits_and_keeps_its_input():
    x, parts = mlp(13, True)
    layer = lambda x: (parts[2](F.silu(parts[0](x))), x * 2)  # noqa: E731
    results = []
    parts[1].requires_grad_(False)
    for run in (layer, lambda x: layers.Again.apply(layer, x)):
        saved, shared = [], x.clone()
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=saved: s.append(t.data_ptr()) or t, lambda t: t):
            first, second = run(shared)
        (gradient,) = torch.autograd.grad(first.sum(), shared, retain_graph=True)
        parts.zero_grad()  # a layer again reaches its parameters even so
        (first.square().sum() + second.sum()).backward()
        results.append([first, second, gradient, *(p.grad.clone() for i in (0, 2) for p in parts[i].parameters())])
    assert saved == [shared.data_ptr()]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
