"""Attention across the boundary: packed responses attend to their prompt's prefix, one copy for all, and to themselves.

    K, V of the boundary     [ prompt 0              | prompt 1         ]      once for all responses, never copied
                                 ▲          ▲            ▲                     a flash kernel: each to its whole prompt
    responses in one row     [ r0 r0 r0 | r1 r1 r1 r1 | r0 r0 | r1 | r2 r2 ]
                                 ▼          ▼            ▼                     a flash kernel, causal: each to itself
    K, V of the same row     [ r0 r0 r0 | r1 r1 r1 r1 | r0 r0 | r1 | r2 r2 ]

Prompts and responses of unequal length travel end to end, without padding. The two calls are merged by their
log-sum-exp, so that the result is one softmax over a prompt and a response's own past. A prefix pass, whose row is
prompts, has the second call only.

The kernels are PyTorch's. What a layer projects and rotates before and captures for the boundary is in model.py.

Run: python attention.py                  # CPU or GPU: a prompt with 16 responses, its K and V shared and copied
Left out on purpose: an attention kernel that merges both parts itself, FP32 on a GPU.
To change who attends to whom, edit suffix_boundary(); to call another kernel, _flash() and _flash_backward().
"""

from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import torch

import hardware
from layers import Packed, time_and_bytes

# T tokens of a pass (packed), H query heads, K key/value heads of this rank, D head size.


@dataclass
class Boundary:
    """Tells the attention layers what to do in one forward pass; travels in Megatron's packed_seq_params argument.

    A pass is one row of sequences, prompts or responses, end to end. A prefix pass fills `kv` with each layer's key and
    value, [tokens of all prefixes, K, D]; a suffix pass reads them there.
    """

    sequences: Packed
    kv: dict = field(default_factory=dict)
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None  # cosine and sine [T, 1, D / 2] float32, for all layers
    runs: list["Run"] | None = None  # in a suffix pass
    again: bool = False  # whether layers keep only their input


class Run(NamedTuple):
    """Neighbouring prompts that have both responses in a pass and a prefix: one call of a kernel, which need not know
    what to do with an empty sequence."""

    rows: slice  # of the pass
    keys: slice  # of the boundary
    queries: Packed  # each prompt's rows as one sequence
    prefixes: Packed


def suffix_boundary(kv: dict, prefixes: list[int], lengths: list[list[int]], again: bool = False) -> Boundary:
    """For prefixes of so many tokens, whose keys and values `kv` has, and responses of these lengths, prompt by
    prompt."""
    counts = [(sum(own), prefix) for own, prefix in zip(lengths, prefixes, strict=True)]
    runs, row, key = [], 0, 0
    for attend, neighbours in groupby(counts, all):
        queries, tokens = zip(*neighbours, strict=True)
        rows, keys = slice(row, row := row + sum(queries)), slice(key, key := key + sum(tokens))
        runs += [Run(rows, keys, Packed(queries), Packed(tokens))] if attend else []
    return Boundary(Packed([n for own in lengths for n in own]), kv, runs=runs, again=again)


class SharedPrefix(torch.autograd.Function):
    """Packed responses attend to their prompt's prefix, one copy for all N, and causally to themselves.

    Either part is a softmax of its own; the softmax over both weighs their outputs by their shares of the total, which
    the parts' log-sum-exps give. Backward, a flash kernel needs probabilities, exp(score − log-sum-exp), and the row
    sums of output · its gradient: handed the merged output and log-sum-exp, it returns the exact gradients of the
    merged softmax through its own part (the trick of ring attention).
    """

    @staticmethod
    def forward(ctx, query, key, value, sequences, runs, *prefixes):
        """query [T, H, D], key and value [T, K, D] of `sequences`; prefixes: key and value [·, K, D] of all prompts, of
        which `runs` says who attends to which; none in a prefix pass -> [T, H, D]."""
        out, lse = _flash(query, key, value, sequences, sequences, True)
        for rows, keys, *packed in runs:
            part, part_lse = _flash(query[rows], *(x[keys] for x in prefixes), *packed, False)
            share = torch.sigmoid(part_lse - lse[:, rows]).t()[:, :, None]  # the prefix's of the total
            out[rows].lerp_(part, share.to(out.dtype))
            lse[:, rows] = torch.logaddexp(lse[:, rows], part_lse)
        ctx.sequences, ctx.runs = sequences, runs
        ctx.save_for_backward(query, key, value, out, lse, *prefixes)
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, out, lse, *prefixes = ctx.saved_tensors
        dq, dk, dv = _flash_backward(grad, query, key, value, out, lse, ctx.sequences, ctx.sequences, True)
        shared = [None] * len(prefixes)
        for rows, keys, *packed in ctx.runs:
            ours = query[rows], *(x[keys] for x in prefixes), out[rows], lse[:, rows]
            part, *parts = _flash_backward(grad[rows], *ours, *packed, False)
            dq[rows].add_(part)
            for i, (gradient, whole) in enumerate(zip(parts, prefixes, strict=True)):
                if len(gradient) == len(whole):
                    shared[i] = gradient
                else:
                    shared[i] = torch.zeros_like(whole) if shared[i] is None else shared[i]
                    shared[i][keys] = gradient
        return dq, dk, dv, None, None, *shared


def require_kernels(device: torch.device, dtype: torch.dtype) -> None:
    if device.type == "cuda" and dtype == torch.float32:
        raise ValueError("--dtype float32: a GPU's flash attention has no kernel for it; use --dtype bfloat16")


def _flash(query, key, value, queries: Packed, keys: Packed, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's flash kernel on packed sequences: query [T, H, D], key and value [·, K, D] -> output [T, H, D] and
    log-sum-exp [H, T] float32. As torch/nn/attention/varlen.py (2.11) calls it; on a CPU sequence by sequence."""
    if query.is_cuda:
        ends = queries.starts, keys.starts, queries.longest, keys.longest
        return torch.ops.aten._flash_attention_forward(query, key, value, *ends, 0.0, causal, False)[:2]
    sequences = zip(_heads_first(query, queries), _heads_first(key, keys), _heads_first(value, keys), strict=True)
    call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    outs, lses = zip(*(call(*sequence, 0.0, causal) for sequence in sequences), strict=True)
    return _tokens_first(outs), torch.cat(lses, dim=2)[0]


def _flash_backward(grad, query, key, value, out, lse, queries: Packed, keys: Packed, causal: bool):
    """Gradients of query, key and value, given output, log-sum-exp and gradient of the softmax that _flash was a part
    of."""
    if query.is_cuda:
        ends = queries.starts, keys.starts, queries.longest, keys.longest
        random = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
        tensors = grad, query, key, value, out, lse.contiguous()
        return torch.ops.aten._flash_attention_backward(*tensors, *ends, 0.0, causal, *random)
    grads, qs, outs = (_heads_first(x, queries) for x in (grad, query, out))
    sequences = zip(grads, qs, _heads_first(key, keys), _heads_first(value, keys), outs, strict=True)
    call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    lses = lse[None].split(queries.lengths, dim=2)
    results = [call(*sequence, own, 0.0, causal) for sequence, own in zip(sequences, lses, strict=True)]
    return [_tokens_first(gradients) for gradients in zip(*results, strict=True)]


def _heads_first(x: torch.Tensor, packed: Packed) -> list[torch.Tensor]:
    """[tokens, heads, D] -> each sequence as [1, heads, tokens, D]."""
    return [sequence.transpose(0, 1)[None] for sequence in x.split(packed.lengths)]


def _tokens_first(sequences: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.cat([sequence[0].transpose(0, 1) for sequence in sequences])


def _main() -> None:
    """Forward and backward of one prompt and its responses, the prompt's keys and values shared and copied."""
    hardware.select_device(0)
    dtype = torch.bfloat16 if hardware.device().type == "cuda" else torch.float32
    prompt, n, s = 1024, 16, 64
    tensors = [torch.randn(prompt + n * s, heads, 64, dtype=dtype, device=hardware.device()) for heads in (8, 2, 2)]
    tensors = [tensor.requires_grad_() for tensor in tensors]
    own = torch.arange(prompt, prompt + n * s).view(n, s)
    copies = torch.cat([torch.arange(prompt).expand(n, -1), own], 1).flatten().to(hardware.device())

    def shared() -> torch.Tensor:
        prefix, responses = zip(*(tensor.split([prompt, n * s]) for tensor in tensors), strict=True)
        boundary = suffix_boundary({}, [prompt], [[s] * n])
        out = SharedPrefix.apply(*prefix, Packed([prompt]), [])
        return torch.cat([out, SharedPrefix.apply(*responses, boundary.sequences, boundary.runs, *prefix[1:])])

    def copied() -> torch.Tensor:
        return SharedPrefix.apply(*(tensor[copies] for tensor in tensors), Packed([prompt + s] * n), [])

    print("shared:", time_and_bytes(shared))
    print("copied:", time_and_bytes(copied))
    print(f"largest difference: {(shared()[copies] - copied()).abs().max():.1e}")


if __name__ == "__main__":
    _main()
