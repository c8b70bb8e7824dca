"""logprobs.py: log-probabilities of targets and their gradients are those of FP64. Kernels equal PyTorch's steps, here
in Triton's interpreter.

Run: TRITON_INTERPRET=1 PYTHONPATH=. python tests/test_logprobs.py     # only the kernels
"""

import pytest
import torch

import logprobs

# Rows, vocabulary, temperature, share of the vocabulary that only pads it: less than a kernel's block, and more; all of
# a second rank's part.
LOGITS = [(5, 384, 0.7, 0.1), (3, 9000, 1.0, 0.5), (2000, 4224, 1.3, 0.0)]


def logits_by_hand(rows: int, vocab: int, temperature: float, padded: float) -> tuple[torch.Tensor, ...]:
    """Logits of ordinary size and one far above, a bias, targets, and in FP64 the log-probabilities of these and the
    gradient of their weighted sum: logits, bias, targets, weight, log-probabilities, gradient."""
    generator = torch.Generator().manual_seed(rows)
    logits = 4 * torch.randn(rows, vocab, generator=generator)
    logits[0, 7], bias = 200.0, torch.zeros(vocab)
    bias[2], bias[round(vocab * (1 - padded)) :] = -100.0, float("-inf")
    targets = torch.randint(round(vocab * (1 - padded)), (rows,), generator=generator)
    targets[-2:] = torch.tensor([0, round(vocab * (1 - padded)) - 1])
    weight, exact = torch.randn(rows, generator=generator), logits.double().requires_grad_()
    wanted = ((exact + bias) / temperature).log_softmax(-1)[torch.arange(rows), targets]
    (gradient,) = torch.autograd.grad((wanted * weight).sum(), exact)
    return logits, bias, targets, weight, wanted.detach(), gradient


@pytest.mark.parametrize("case", LOGITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_logprobs_of_targets_by_hand(case, dtype, device):
    """On one rank (on two: ranks_model.py); of the size of the logits nothing is kept but these, in their dtype."""
    logits, bias, targets, weight, wanted, gradient = (t.to(device) for t in logits_by_hand(*case))
    leaf, saved = logits.to(dtype).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        got = logprobs.TargetLogprobs.apply(leaf * 1, targets, bias, case[2])
    assert saved[-4].dtype == dtype and all(t.numel() == case[0] for t in saved[-3:])
    (got * weight).sum().backward()
    assert got.dtype == torch.float32 and leaf.grad.dtype == dtype
    assert (got - wanted).norm() <= (1e-6 if dtype == torch.float32 else 1e-2) * wanted.norm()
    assert (leaf.grad - gradient).norm() <= (1e-6 if dtype == torch.float32 else 4e-2) * gradient.norm()


def kernels(device: str) -> None:
    """Those of the log-probabilities, beside PyTorch's steps; in BF16 both round a gradient once (the interpreter
    cuts off)."""
    for case in LOGITS[:2]:
        logits, bias, targets, weight, *_ = logits_by_hand(*case)
        for dtype, bar in ((torch.float32, 2e-6), (torch.bfloat16, 2**-7)):
            for columns in (targets, targets - 300):  # of a second rank, too
                x, temperature = logits.to(dtype), case[2]
                plain = logprobs._row_statistics(x, columns, bias, temperature)
                here = [t.clone().to(device) for t in (x, weight, columns, *plain[:2], bias)]
                got = logprobs._row_statistics_fused(here[0], here[2], here[-1], temperature)
                assert all(torch.allclose(a.cpu(), b, rtol=2e-6, atol=0) for a, b in zip(got, plain, strict=True))
                logprobs._into_gradient(x, weight, columns, *plain[:2], bias, temperature)
                logprobs._into_gradient_fused(*here, temperature)
                assert (here[0].cpu() - x).norm() <= bar * x.norm()


def test_kernels_in_tritons_interpreter(tritons_interpreter):
    tritons_interpreter(__file__)


@pytest.mark.gpu
def test_kernels_on_a_gpu():
    kernels("cuda")


if __name__ == "__main__":
    kernels("cpu")
