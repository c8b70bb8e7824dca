"""layers.py: values and gradients are those of the plain computation; less is kept. Kernels equal PyTorch's steps and
formulas in FP64, here in Triton's interpreter.

Run: TRITON_INTERPRET=1 PYTHONPATH=. python tests/test_layers.py     # only the kernels
"""

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


def turned(x: torch.Tensor, angle: torch.Tensor, heads: int) -> torch.Tensor:
    """Pairs (x[i], x[i + D / 2]) of the first heads as complex numbers, times exp(i angle), in FP64."""
    pairs = torch.complex(*x.double().chunk(2, -1))
    pairs[..., :heads, :] *= torch.polar(torch.ones_like(angle.double()), angle.double())
    return torch.cat([pairs.real, pairs.imag], -1)


@pytest.mark.parametrize("heads", [None, 4, 0], ids=["all heads", "some heads", "no head"])
def test_rotation_and_its_gradient(heads):
    x = torch.randn(3, 2, 6, 8, dtype=torch.double, requires_grad=True)
    angle = torch.randn(3, 2, 1, 4, dtype=torch.double)
    run = lambda x: layers.rotate(x, angle.cos(), angle.sin(), heads)  # noqa: E731
    assert torch.allclose(run(x), turned(x.detach(), angle, 6 if heads is None else heads), rtol=0, atol=1e-14)
    assert torch.autograd.gradcheck(run, (x,))


def test_rotation_keeps_the_angles():
    angle = torch.randn(5, 1, 4)
    cos, sin, saved = angle.cos(), angle.sin(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        layers.rotate(torch.randn(5, 6, 8, requires_grad=True), cos, sin)
    assert saved == [cos.data_ptr(), sin.data_ptr()]


# ---- kernels ---------------------------------------------------------------------------------------------------------


def narrowed(exact: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """In the dtype of `got`: Triton's interpreter cuts off what a GPU rounds to BF16."""
    if got.is_cuda or got.dtype != torch.bfloat16:
        return exact.to(got.dtype)
    return (exact.float().view(torch.int32) & -65536).view(torch.float).bfloat16()


def close(got: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> bool:
    """A kernel's result beside the same in FP64, and in PyTorch's steps. In BF16 hardly a value is not the exact one,
    rounded; PyTorch's may be a few roundings away."""
    assert got.dtype == plain.dtype and got.shape == plain.shape == exact.shape and got.is_contiguous()
    if got.dtype == torch.float:
        return all(torch.allclose(got.cpu().double(), t.double(), rtol=1e-5, atol=1e-4) for t in (exact, plain))
    differ = (got.cpu() != narrowed(exact, got)).sum()
    return differ <= 0.01 * got.numel() and torch.allclose(got.cpu().float(), plain.float(), rtol=2**-5, atol=2**-6)


def gated_kernels(device: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    gate, up, grad = (3 * torch.randn(shape, dtype=torch.float).to(dtype) for _ in range(3))
    gate.view(-1)[:5] = torch.tensor([0, 200, -200, 30, -30])[: gate.numel()]  # exp() is out of range, or nearly
    exact = [t.double().requires_grad_() for t in (gate, up)]
    silu = exact[0] / (1 + (-exact[0]).exp())
    gradients = torch.autograd.grad(silu * exact[1], exact, grad.double())
    here = [t.clone().to(device) for t in (grad, gate, up)]
    inner = narrowed(silu.detach(), here[1]).double() * up.double()  # silu is rounded first, as PyTorch and vLLM do
    wanted = *gradients, inner
    assert close(layers._gated_fused(*here[1:]), inner, layers._gated(gate, up))
    got, plain = layers._gated_backward_fused(*here), layers._gated_backward(grad.clone(), gate, up)
    assert all(close(*three) for three in zip(got, wanted, plain, strict=True))
    assert torch.equal(here[1].cpu(), gate) and torch.equal(here[2].cpu(), up)  # a second backward finds them


def rotation_kernel(device: str, dtype: torch.dtype, whole: tuple[int, ...], part: slice, heads: int) -> None:
    """Of a slice of the heads of a tensor [.., H, D]; in batch-first order, too, whose rows are not a view."""
    torch.manual_seed(0)
    x = torch.randn(whole).to(dtype)[..., part, :]
    angle = 10 * torch.randn(*whole[:-2], 1, whole[-1] // 2)
    cos, sin = angle.cos(), angle.sin()
    for order in ((lambda t: t), (lambda t: t.transpose(0, 1))) if len(whole) == 4 else ((lambda t: t),):
        arguments = [order(t) for t in (x, cos, sin)]
        got = layers._rotated_fused(*(order(t.to(device)) for t in (x, cos, sin)), heads)
        assert close(got, turned(arguments[0], order(angle), heads), layers._rotated(*arguments, heads))
    ones = torch.ones(1, device=device, dtype=dtype).expand(x.shape)  # the gradient of a sum: no stride at all
    assert torch.equal(layers._rotated_fused(ones, cos.to(device), sin.to(device), heads),
                       layers._rotated_fused(ones.contiguous(), cos.to(device), sin.to(device), heads))  # fmt: skip


def in_place_kernel(device: str, dtype: torch.dtype, heads: int, keys: int, section: list[int]) -> None:
    """Queries and keys within rows that hold values, too; positions of a long video, within a longer tensor."""
    torch.manual_seed(0)
    half, tokens = sum(section), 7
    mixed = torch.randn(tokens, (heads + 2 * keys) * 2 * half).to(dtype)
    positions = torch.randint(0, 40000, (3, tokens + 2))
    inverse = 1e6 ** -(torch.arange(half) / half)
    axis = torch.repeat_interleave(torch.arange(3), torch.tensor(section))  # [D / 2]
    angle = positions[axis, :tokens].T[:, None] * inverse  # [T, 1, D / 2] in FP32, as the trainer rounds it
    wanted = mixed.view(tokens, -1, 2 * half)
    wanted = turned(wanted, angle, heads + keys), layers._rotated(wanted, angle.cos(), angle.sin(), heads + keys)
    here = mixed.to(device)
    parts = here.split([n * 2 * half for n in (heads, keys, keys)], 1)
    layers.rotate_in_place(*parts[:2], positions.to(device)[:, :tokens], inverse.to(device), section)
    assert close(here.view(tokens, -1, 2 * half), *wanted)


def kernels(device: str) -> None:
    """All of them, at sizes that do and do not fill a program's block."""
    for dtype in (torch.float, torch.bfloat16):
        for shape in ((1, 1), (3, 37), (2, 2048), (41, 333)):
            gated_kernels(device, dtype, shape)
        for whole, part, heads in (
            ((7, 48, 80), slice(None), 32),  # vision: queries, keys, values
            ((5, 1, 36, 128), slice(0, 28), 28),  # queries of a mixed tensor
            ((5, 2, 36, 128), slice(28, 32), 4),  # keys
            ((3, 2, 3, 6), slice(None), 2),
            ((1, 1, 2), slice(None), 1),
        ):
            rotation_kernel(device, dtype, whole, part, heads)
        in_place_kernel(device, dtype, 28, 4, [16, 24, 24])
        in_place_kernel(device, dtype, 3, 1, [1, 2, 0])


def test_kernels_in_tritons_interpreter(tritons_interpreter):
    tritons_interpreter(__file__)


@pytest.mark.gpu
def test_kernels_on_a_gpu():
    kernels("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, bar", [(torch.float, 1e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
def test_gradients_on_a_gpu_equal_a_cpus_in_fp64(dtype, bar):
    """Through autograd, and so in its thread and on a stream of its own."""
    x, parts = mlp(24, True)
    x, parts = x.detach().to(dtype), parts.to(dtype)  # both compute from the same numbers
    angle, results = torch.randn(5, 1, 4).double(), []
    for device, dtype_here in (("cpu", torch.double), ("cuda", dtype)):
        inputs = x.detach().to(device, dtype_here).requires_grad_(), *parts.to(device, dtype_here)
        cos, sin = (t.to(device, torch.promote_types(dtype_here, torch.float)) for t in (angle.cos(), angle.sin()))
        with torch.cuda.stream(torch.cuda.Stream()):
            out = layers.gated_mlp(layers.rotate(inputs[0].view(5, 2, 8), cos, sin).flatten(1), *inputs[1:])
            out.square().sum().backward()
        torch.cuda.synchronize()
        results.append([t.detach().cpu() for t in (out, inputs[0].grad, *(p.grad for p in parts.parameters()))])
        parts.zero_grad()
    for exact, got in zip(*results, strict=True):
        assert (got.double() - exact).norm() <= bar * exact.norm()


if __name__ == "__main__":
    kernels("cpu")
