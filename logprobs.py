"""Log-probabilities of given tokens: log_softmax((logits + bias) / temperature) at one target a row, in FP32.

    logits [T, V], in the model's dtype ─► of each row: maximum, sum of exponentials, value at the target ─► [T] float32
                  │                            └ [T] each, over the tensor-parallel ranks' parts of V
                  └ kept; backward overwrites them with their gradient

Of the logits, the largest tensor of a pass, autograd keeps what the matrix product gave, and no FP32 copy ever exists:
a GPU makes log-probabilities and gradients from it in a kernel of ours (Triton) each, a CPU in chunks of rows. The
CPU's steps also say what a kernel has to compute.

Run: python logprobs.py                   # CPU or GPU: time and saved bytes, ours and PyTorch's
Left out on purpose: the whole distribution (nothing here needs an entropy), more than one backward pass.
To change the distribution, edit both branches of _row_statistics() and _into_gradient().
"""

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import hardware
from layers import time_and_bytes

# T tokens (rows), V vocabulary rows of this rank.

CHUNK = 2**22  # FP32 elements that a CPU has at once; a GPU has a few in registers
LOWEST = -3e38  # in place of a maximum of -inf: a rank's rows may all be padding of the vocabulary


class TargetLogprobs(torch.autograd.Function):
    """log_softmax((logits + bias) / temperature) at one target a row, in FP32.

    Saves the logits as they come, in the model's dtype, and of each row the maximum and the sum of exponentials. The
    gradient takes the logits' place, so there can be only one backward pass.
    """

    @staticmethod
    def forward(ctx, logits, targets, bias, temperature, group=None):
        """logits [T, V] and bias [V] float32 of this rank's part of the vocabulary, targets [T] int64 -> [T] float32. A
        collective of `group`, whose ranks share out the vocabulary; None: this rank has all of it."""
        columns = targets if group is None else targets - logits.shape[1] * group.rank()
        highest, total, chosen = _row_statistics(logits, columns, bias, temperature)
        if group is not None and group.size() > 1:
            own = highest.clone()
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
            dist.all_reduce(total.mul_((own - highest).exp()), group=group)
            dist.all_reduce(chosen, group=group)
        ctx.bias, ctx.temperature = bias, temperature
        ctx.save_for_backward(logits, columns, highest, total)
        return chosen - highest - total.log()

    @staticmethod
    def backward(ctx, grad):
        logits, *rows = ctx.saved_tensors
        _into_gradient(logits, grad.contiguous(), *rows, ctx.bias, ctx.temperature)
        return logits, None, None, None, None


def _row_statistics(logits, columns, bias, temperature: float) -> tuple[torch.Tensor, ...]:
    """Of each row of (logits + bias) / temperature the maximum, the sum of exp(value - maximum), and the value at the
    column, 0 if that is outside: [T] float32 each."""
    if logits.is_cuda:
        return _row_statistics_fused(logits, columns, bias, temperature)
    parts = []
    for x, column in zip(*_in_chunks(logits, columns), strict=True):
        x = (x + bias).div_(temperature)
        own = (column >= 0) & (column < len(bias))
        chosen = x.gather(1, (column * own)[:, None])[:, 0].where(own, 0)
        highest = x.amax(1).clamp(min=LOWEST)
        parts.append((highest, x.sub_(highest[:, None]).exp_().sum(1), chosen))
    return tuple(map(torch.cat, zip(*parts, strict=True)))


def _into_gradient(logits, grad, columns, highest, total, bias, temperature: float) -> None:
    """Overwrite logits with grad · ((column is the target) - softmax) / temperature."""
    if logits.is_cuda:
        _into_gradient_fused(logits, grad, columns, highest, total, bias, temperature)
        return
    rows = grad / temperature, columns, highest, total
    for x, scale, column, top, sums in zip(*_in_chunks(logits, *rows), strict=True):
        softmax = (x + bias).div_(temperature).sub_(top[:, None]).exp_()
        softmax.mul_((-scale / sums)[:, None])
        own = ((column >= 0) & (column < len(bias))).nonzero()[:, 0]
        softmax[own, column[own]] += scale[own]
        x.copy_(softmax)


def _in_chunks(logits: torch.Tensor, *rows: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    n = max(1, CHUNK // logits.shape[1])
    return [tensor.split(n) for tensor in (logits, *rows)]


def _row_statistics_fused(logits, columns, bias, temperature: float) -> tuple[torch.Tensor, ...]:
    assert logits.is_contiguous(), "the kernel takes rows one behind the other"
    out = [torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(3)]
    _statistics_kernel[(len(logits),)](logits, columns, bias, *out, temperature, len(bias), BLOCK=4096, num_warps=8)
    return tuple(out)


def _into_gradient_fused(logits, grad, columns, highest, total, bias, temperature: float) -> None:
    block = 4096
    grid = len(logits), triton.cdiv(len(bias), block)
    rows = grad, columns, highest, total
    _gradient_kernel[grid](logits, *rows, bias, temperature, len(bias), BLOCK=block, num_warps=8)


@triton.jit
def _statistics_kernel(logits, columns, bias, highest, total, chosen, temperature, width, BLOCK: tl.constexpr):
    """A program takes a row; each of its lanes has a maximum and a sum of its own until the end."""
    row = tl.program_id(0).to(tl.int64)
    top = tl.full([BLOCK], -3e38, tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < width
        x = tl.load(logits + row * width + at, inside, other=0).to(tl.float32)
        x = (x + tl.load(bias + at, inside, other=float("-inf"))) / temperature
        higher = tl.maximum(top, x)
        sums = sums * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
    most = tl.max(top, 0)
    tl.store(highest + row, most)
    tl.store(total + row, tl.sum(sums * tl.exp(top - most), 0))
    column = tl.load(columns + row)
    own = (column >= 0) & (column < width)
    value = tl.load(logits + row * width + column, own, other=0).to(tl.float32) + tl.load(bias + column, own, other=0)
    tl.store(chosen + row, value / temperature)


@triton.jit
def _gradient_kernel(logits, grad, columns, highest, total, bias, temperature, width, BLOCK: tl.constexpr):
    """A program takes a block of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    place = logits + row * width + at
    x = (tl.load(place, inside, other=0).to(tl.float32) + tl.load(bias + at, inside, other=0)) / temperature
    softmax = tl.exp(x - tl.load(highest + row)) / tl.load(total + row)
    target = tl.where(at == tl.load(columns + row), 1.0, 0.0)
    tl.store(place, (target - softmax) * (tl.load(grad + row) / temperature), inside)


def _main() -> None:
    """512 tokens and a vocabulary of 32768, by TargetLogprobs and by log_softmax() of FP32 logits."""
    hardware.select_device(0)
    dtype, device = torch.bfloat16, hardware.device()
    logits, bias = torch.randn(512, 32768, dtype=dtype, device=device, requires_grad=True), torch.zeros(32768)
    targets, bias = torch.randint(32768, (512,), device=device), bias.to(device)
    # Times 1, as a matrix product's output: the gradient takes its place.
    print("ours:", time_and_bytes(lambda: TargetLogprobs.apply(logits * 1, targets, bias, 0.7)))
    plain = lambda: (((logits * 1).float() + bias) / 0.7).log_softmax(-1).gather(-1, targets[:, None])  # noqa: E731
    print("plain:", time_and_bytes(plain))


if __name__ == "__main__":
    _main()
