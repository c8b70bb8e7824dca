"""vision.py: the tower equals transformers', values and gradients; media are shared out in whole slices."""

import pytest
import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

import configs
import vision


@pytest.mark.parametrize(
    "grid, ranks, expected",
    [
        ([[8, 4, 6]], 1, [[[8, 4, 6]]]),
        ([[8, 4, 6]], 4, [[[2, 4, 6]]] * 4),
        ([[3, 4, 4]], 2, [[[1, 4, 4]], [[2, 4, 4]]]),
        ([[1, 4, 4]], 3, [[], [[1, 4, 4]], []]),
        ([[1, 8, 8], [4, 4, 4], [1, 8, 8]], 2, [[[1, 8, 8], [2, 4, 4]], [[2, 4, 4], [1, 8, 8]]]),
        ([[2, 4, 4], [1, 20, 20]], 4, [[[2, 4, 4]], [], [[1, 20, 20]], []]),
        ([], 2, [[], []]),
    ],
)
def test_media_are_shared_out_in_whole_slices(grid, ranks, expected):
    assert vision.share_out(grid, ranks) == expected


def test_shares_are_contiguous_and_balanced():
    """No rank has more than an equal share and a slice; clips of one size differ by a slice at most."""
    generator = torch.Generator().manual_seed(0)
    for ranks in (2, 3, 8):
        for _ in range(50):
            grid = [[t, 2 * h, 2 * w] for t, h, w in torch.randint(1, 9, (5, 3), generator=generator).tolist()]
            parts = vision.share_out(grid, ranks)
            slices = [[h, w] for part in parts for t, h, w in part for _ in range(t)]
            assert slices == [[h, w] for t, h, w in grid for _ in range(t)]
            patches = [sum(t * h * w for t, h, w in part) for part in parts]
            assert max(patches) <= sum(patches) / ranks + max(h * w for _, h, w in grid)
            same = vision.share_out([[t, 4, 4] for t, _, _ in grid], ranks)
            counts = [sum(t for t, _, _ in part) for part in same]
            assert max(counts) - min(counts) <= 1


def both(inner: int, dtype: torch.dtype):
    """A tower with windowed and full blocks and random weights, ours and transformers'."""
    config = configs.load_config("tiny").vision_config
    config.depth, config.fullatt_block_indexes, config.intermediate_size = 3, [1], inner
    torch.manual_seed(0)
    theirs = Qwen2_5_VisionTransformerPretrainedModel(config).to(dtype)
    for parameter in theirs.parameters():
        parameter.data = parameter.data + 0.1 * torch.randn_like(parameter)
    ours = vision.VisionTower(config, dtype)
    ours.load_state_dict(theirs.state_dict(), assign=True)
    for parameter in ours.parameters():
        parameter.data = parameter.data.clone()
    return ours, theirs


@pytest.mark.parametrize("dtype, bar", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("inner", [128, 100], ids=["aligned", "filled up"])
def test_features_and_gradients_equal_transformers(inner, dtype, bar):
    """Grids with whole windows, cut windows, windows that are a whole slice, and one of a single token."""
    ours, theirs = both(inner, dtype)
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in theirs.named_parameters()}
    grid = torch.tensor([[2, 16, 16], [1, 18, 10], [3, 4, 6], [1, 2, 2]])
    pixels = torch.randn(int(grid.prod(1).sum()), 1176).to(dtype)
    got, expected = ours(pixels, grid.tolist()), theirs(pixels, grid_thw=grid).pooler_output
    weight = torch.randn_like(expected)
    (got * weight).sum().backward()
    (expected * weight).sum().backward()
    for name, a, b in [("features", got, expected)] + [
        (name, p.grad, ours.get_parameter(name).grad) for name, p in theirs.named_parameters()
    ]:
        error = (a.double() - b.double()).norm() / b.double().norm()
        assert error <= bar, f"{name}: {error:.1e}"
