"""model.py: the split computation equals transformers' ordinary one, values and gradients; positions are vLLM's
rule."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_weights import checkpoint

import configs
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
