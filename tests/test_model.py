"""model.py: the split computation equals transformers' ordinary one, values and gradients; positions are vLLM's
rule. Kernels equal PyTorch's steps, here in Triton's interpreter.

Run: TRITON_INTERPRET=1 PYTHONPATH=. python tests/test_model.py     # only the kernels
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_weights import checkpoint

import configs
import memory
import model as models

RANKS = Path(__file__).parent / "ranks_model.py"


def test_logprobs_and_gradients_equal_transformers(tmp_path, torchrun):
    """fp32: 1e-5, through the boundary into projector and vision tower. bf16: as near as its rounding allows."""
    untied, tied = checkpoint_small(tmp_path, "untied", False), checkpoint_small(tmp_path, "tied", True)
    cases = [
        (untied, ["video"], "fused", "float32", 1e-5, 1e-5),
        (untied, ["wide image", "video", "image", "wide video"], "split", "float32", 1e-5, 1e-5),  # two more prompts
        (untied, ["image"], "split", "float32", 1e-5, 1e-5),  # one slice for two ranks
        (tied, ["video"], "fused", "float32", 1e-5, 1e-5),
        (untied, [], "fused", "float32", 1e-5, 1e-5),
        (untied, ["video"], "fused", "bfloat16", 6e-2, 6e-2),
    ]
    torchrun(RANKS, json.dumps([[str(source), *rest] for source, *rest in cases]))


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
    samples = [SimpleNamespace(input_ids=torch.zeros(p + 1)) for p in prefixes]
    return tensors, models._suffix_boundary(SimpleNamespace(samples=samples, kv={}), lengths)


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
    memory.select_device(0)
    tensors, boundary = attention_inputs(layout, ratio, head, dtype, device)
    assert [len(run.queries.lengths) for run in boundary.runs] == ([3] if layout is WITHOUT_GAPS else [2, 1, 1])
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = softmax_by_hand(*exact, layout)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)

    def run() -> list[torch.Tensor]:
        out = models._SharedPrefix.apply(*tensors[:3], boundary.sequences, boundary.runs, *tensors[3:])
        return [out, *torch.autograd.grad((out * weight).sum(), tensors)]

    got = run()
    want = torch.autograd.grad((expected * weight.double()).sum(), exact)
    for i, (a, b) in enumerate(zip(got, [expected, *want], strict=True)):
        assert (a.double() - b).norm() <= bar * b.norm(), f"tensor {i}: {(a.double() - b).norm() / b.norm():.1e}"
    assert all(torch.equal(a, b) for _ in range(5) for a, b in zip(got, run(), strict=True))


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
    logprobs = ((exact + bias) / temperature).log_softmax(-1)[torch.arange(rows), targets]
    (gradient,) = torch.autograd.grad((logprobs * weight).sum(), exact)
    return logits, bias, targets, weight, logprobs.detach(), gradient


@pytest.mark.parametrize("case", LOGITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_logprobs_of_targets_by_hand(case, dtype, device, monkeypatch):
    """On one rank; of the size of the logits nothing is kept but these, in their dtype."""
    monkeypatch.setattr(models.parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(models.parallel_state, "get_tensor_model_parallel_world_size", lambda: 1)
    logits, bias, targets, weight, logprobs, gradient = (t.to(device) for t in logits_by_hand(*case))
    leaf, saved = logits.to(dtype).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        got = models._TargetLogprobs.apply(leaf * 1, targets, bias, case[2])
    assert saved[-4].dtype == dtype and all(t.numel() == case[0] for t in saved[-3:])
    (got * weight).sum().backward()
    assert got.dtype == torch.float32 and leaf.grad.dtype == dtype
    assert (got - logprobs).norm() <= (1e-6 if dtype == torch.float32 else 1e-2) * logprobs.norm()
    assert (leaf.grad - gradient).norm() <= (1e-6 if dtype == torch.float32 else 4e-2) * gradient.norm()


def kernels(device: str) -> None:
    """Those of the log-probabilities, beside PyTorch's steps; in BF16 both round a gradient once (the interpreter
    cuts off)."""
    for case in LOGITS[:2]:
        logits, bias, targets, weight, *_ = logits_by_hand(*case)
        for dtype, bar in ((torch.float32, 2e-6), (torch.bfloat16, 2**-7)):
            for columns in (targets, targets - 300):  # of a second rank, too
                x, temperature = logits.to(dtype), case[2]
                plain = models._row_statistics(x, columns, bias, temperature)
                here = [t.clone().to(device) for t in (x, weight, columns, *plain[:2], bias)]
                got = models._row_statistics_fused(here[0], here[2], here[-1], temperature)
                assert all(torch.allclose(a.cpu(), b, rtol=2e-6, atol=0) for a, b in zip(got, plain, strict=True))
                models._into_gradient(x, weight, columns, *plain[:2], bias, temperature)
                models._into_gradient_fused(*here, temperature)
                assert (here[0].cpu() - x).norm() <= bar * x.norm()


def test_kernels_in_tritons_interpreter(tritons_interpreter):
    tritons_interpreter(__file__)


@pytest.mark.gpu
def test_kernels_on_a_gpu():
    kernels("cuda")


def test_one_rank_alone(tmp_path, torchrun):
    source = checkpoint_small(tmp_path, "untied", False)
    torchrun(RANKS, json.dumps([(str(source), ["video"], "fused", "float32", 1e-5, 1e-5)]), ranks=1)


def checkpoint_small(root: Path, name: str, tied: bool) -> Path:
    """As in test_weights, scaled so that activations and gradients are of ordinary size."""
    from safetensors.torch import load_file, save_file

    source = checkpoint(root, name, tied)
    for path in source.glob("*.safetensors"):
        tensors = load_file(path)
        for key, tensor in tensors.items():
            norm = "norm" in key or "ln_q" in key
            tensors[key] = (
                1 + 0.1 * tensor if norm else tensor * (0.1 if tensor.dim() == 1 else tensor[0].numel() ** -0.5)
            )
        save_file(tensors, path, metadata={"format": "pt"})
    return source


def test_float32_on_a_gpu_is_refused():
    with pytest.raises(ValueError, match="--dtype float32: .* use --dtype bfloat16"):
        models._require_kernels(torch.device("cuda"), torch.float32)
    models._require_kernels(torch.device("cuda"), torch.bfloat16)
    models._require_kernels(torch.device("cpu"), torch.float32)


def test_placeholders_without_media_are_an_error():
    model = SimpleNamespace(config=configs.load_config("tiny"))
    ids = torch.tensor([70, model.config.video_token_id, 71])
    sample = SimpleNamespace(input_ids=ids, media=[], visual_tokens=2)
    with pytest.raises(RuntimeError, match="1 visual placeholders in the prompts, 2 features"):
        models.QwenVL._embed(model, [sample], ids)


@pytest.mark.parametrize(
    "second_per_grid, expected_t",
    [(0.5, [0, 1, 2, 3]), (1.0, [0, 2, 4, 6]), (2 / 3, [0, 1, 2, 4]), (0.2, [0, 0, 0, 1])],
)
def test_positions_by_hand(second_per_grid, expected_t):
    """Two text tokens, a 4 x 2 x 2 video (after merging), two more: temporal steps truncate after the product with 2
    per second."""
    config = configs.load_config("tiny")
    video = config.video_token_id
    ids = [70, 71, *[video] * 16, 72, 73]
    got = models.positions(ids, [[4, 4, 4]], [second_per_grid], config)
    t = [0, 1] + [2 + step for step in expected_t for _ in range(4)]
    h = [0, 1] + [2 + y for _ in range(4) for y in (0, 0, 1, 1)]
    w = [0, 1] + [2 + x for _ in range(4) for x in (0, 1, 0, 1)]
    after = max(t + h + w) + 1
    assert got.tolist() == [row + [after, after + 1] for row in (t, h, w)]


def test_text_positions_are_a_plain_count():
    config = configs.load_config("tiny")
    assert torch.equal(models.positions([70] * 5, [], [], config), torch.arange(5).expand(3, 5))


if __name__ == "__main__":
    kernels("cpu")
