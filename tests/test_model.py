"""model.py: the split computation equals transformers' ordinary one, values and gradients; positions are vLLM's
rule."""

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
