"""attention.py: packed responses attend to their prompt's prefix and to themselves as one softmax does, written out.

Run on a GPU too: python -m pytest -m gpu tests/test_attention.py
"""

import pytest
import torch

import attention
import hardware

# Tokens of each prompt's prefix, and of its responses. With gaps: the third prompt is one token long, the fifth has no
# response in this pass.
WITHOUT_GAPS = [7, 130, 33], [[5, 1, 34], [4], [2, 2]]
WITH_GAPS = [7, 20, 0, 130, 9, 21], [[5, 1, 34], [3, 3], [4], [2, 2], [], [3]]


def attention_inputs(layout: tuple, ratio: int, head: int, dtype: torch.dtype, device: str):
    """Query, key, value, all prefixes' key and value, and what BoundaryAttention knows of them."""
    (prefixes, lengths), kv = layout, 2
    generator = torch.Generator().manual_seed(ratio * head)

    def rand(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, head, generator=generator).to(device, dtype).requires_grad_()

    total = sum(map(sum, lengths))
    tensors = [rand(total, ratio * kv), rand(total, kv), rand(total, kv), rand(sum(prefixes), kv)]
    tensors.append(rand(sum(prefixes), kv))
    return tensors, attention.suffix_boundary({}, prefixes, lengths)


def softmax_by_hand(query, key, value, shared_key, shared_value, layout: tuple) -> torch.Tensor:
    """Response by response, [prefix, own past] as one matrix of scores."""
    outputs, start, ratio = [], 0, query.shape[1] // key.shape[1]
    prefixes = zip(*(x.split(layout[0]) for x in (shared_key, shared_value)), strict=True)
    for pair, n in [(pair, n) for pair, own in zip(prefixes, layout[1], strict=True) for n in own]:
        rows, p = slice(start, start := start + n), len(pair[0])
        k, v = (
            torch.cat([shared, own[rows]]).repeat_interleave(ratio, 1)
            for shared, own in zip(pair, (key, value), strict=True)
        )
        scores = torch.einsum("qhd,khd->hqk", query[rows], k) / query.shape[2] ** 0.5
        later = (torch.arange(p + n) > p + torch.arange(n)[:, None]).to(query.device)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1), v))
    return torch.cat(outputs)


ON_A_GPU = pytest.param(torch.bfloat16, 1e-2, "cuda", marks=pytest.mark.gpu, id="bf16-gpu")


@pytest.mark.parametrize(
    "dtype, bar, device",
    [
        pytest.param(torch.float32, 2e-6, "cpu", id="fp32"),
        pytest.param(torch.bfloat16, 1e-2, "cpu", id="bf16"),
        ON_A_GPU,
    ],
)
@pytest.mark.parametrize("layout", [WITHOUT_GAPS, WITH_GAPS], ids=["all", "gaps"])
@pytest.mark.parametrize("head", [32, 64, 128])
@pytest.mark.parametrize("ratio", [1, 2, 8])
def test_suffix_attention_and_its_gradients_by_hand(ratio, head, layout, dtype, bar, device):
    """Of query, key, value, and of the prefixes: summed over the responses that share one, zero where none does. The
    same bits each time."""
    hardware.select_device(0)
    tensors, boundary = attention_inputs(layout, ratio, head, dtype, device)
    assert [len(run.queries.lengths) for run in boundary.runs] == ([3] if layout is WITHOUT_GAPS else [2, 1, 1])
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = softmax_by_hand(*exact, layout)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)

    def run() -> list[torch.Tensor]:
        out = attention.SharedPrefix.apply(*tensors[:3], boundary.sequences, boundary.runs, *tensors[3:])
        return [out, *torch.autograd.grad((out * weight).sum(), tensors)]

    got = run()
    want = torch.autograd.grad((expected * weight.double()).sum(), exact)
    for i, (a, b) in enumerate(zip(got, [expected, *want], strict=True)):
        assert (a.double() - b).norm() <= bar * b.norm(), f"tensor {i}: {(a.double() - b).norm() / b.norm():.1e}"
    assert all(torch.equal(a, b) for _ in range(5) for a, b in zip(got, run(), strict=True))


def test_float32_on_a_gpu_is_refused():
    with pytest.raises(ValueError, match="--dtype float32: .* use --dtype bfloat16"):
        attention.require_kernels(torch.device("cuda"), torch.float32)
    attention.require_kernels(torch.device("cuda"), torch.bfloat16)
    attention.require_kernels(torch.device("cpu"), torch.float32)
