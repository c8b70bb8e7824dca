"""model.py: the split computation equals transformers' ordinary one, values and gradients; positions are vLLM's
rule."""

import json
from pathlib import Path

import pytest
import torch
from test_weights import checkpoint
from transformers import AutoProcessor

import model as models

RANKS = Path(__file__).parent / "ranks_model.py"


def test_logprobs_and_gradients_equal_transformers(tmp_path, torchrun):
    """fp32: 1e-5, through the boundary into projector and vision tower. bf16: as near as its rounding allows."""
    untied, tied = checkpoint_small(tmp_path, "untied", False), checkpoint_small(tmp_path, "tied", True)
    cases = [
        (untied, ["video"], "fused", "float32", 1e-5, 1e-5),
        (untied, ["image", "video"], "split", "float32", 1e-5, 1e-5),
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


@pytest.mark.parametrize(
    "second_per_grid, expected_t",
    [(0.5, [0, 1, 2, 3]), (1.0, [0, 2, 4, 6]), (2 / 3, [0, 1, 2, 4]), (0.2, [0, 0, 0, 1])],
)
def test_positions_by_hand(second_per_grid, expected_t):
    """Two text tokens, a 4 x 2 x 2 video (after merging), two more: temporal steps truncate after the product with 2
    per second."""
    config = models.load_config("tiny")
    video = config.video_token_id
    ids = [70, 71, *[video] * 16, 72, 73]
    got = models.positions(ids, [[4, 4, 4]], [second_per_grid], config)
    t = [0, 1] + [2 + step for step in expected_t for _ in range(4)]
    h = [0, 1] + [2 + y for _ in range(4) for y in (0, 0, 1, 1)]
    w = [0, 1] + [2 + x for _ in range(4) for x in (0, 1, 0, 1)]
    after = max(t + h + w) + 1
    assert got.tolist() == [row + [after, after + 1] for row in (t, h, w)]


def test_text_positions_are_a_plain_count():
    config = models.load_config("tiny")
    assert torch.equal(models.positions([70] * 5, [], [], config), torch.arange(5).expand(3, 5))


def test_model_directory_is_complete_and_stable(tmp_path):
    first = models.make_model_dir("tiny", tmp_path)
    stamp = (first / "config.json").stat().st_mtime_ns
    assert models.make_model_dir("tiny", tmp_path) == first and (first / "config.json").stat().st_mtime_ns == stamp
    processor = AutoProcessor.from_pretrained(first)
    config = models.load_config(str(first))
    tokenizer = processor.tokenizer
    assert tokenizer.convert_tokens_to_ids("<|video_pad|>") == config.video_token_id
    assert tokenizer.eos_token_id == config.text_config.eos_token_id and len(tokenizer) <= config.text_config.vocab_size
    text = "<answer>B</answer> Ünïcödé 漢"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert not list(tmp_path.glob("*.partial"))


def test_forbidden_ids_are_the_visual_tokens_and_the_padding(tmp_path):
    directory = models.make_model_dir("tiny", tmp_path)
    tokenizer = AutoProcessor.from_pretrained(directory).tokenizer
    names = ["<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
    assert models.forbidden_ids(models.load_config(str(directory))) == sorted(tokenizer.convert_tokens_to_ids(names))
    assert tokenizer.pad_token_id in models.forbidden_ids(models.load_config("tiny"))


def test_unknown_model_names_the_choices(tmp_path):
    with pytest.raises(ValueError, match="--model no-such: expected one of tiny, qwen2.5-vl-3b"):
        models.load_config("no-such")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="model_type 'llama', expected qwen2_5_vl"):
        models.load_config(str(tmp_path))


def test_named_configurations_match_the_published_heads():
    """Head size 128 throughout, and M-RoPE sections that fill half of it."""
    for name in models.CONFIGS:
        text = models.load_config(name).text_config
        assert text.hidden_size // text.num_attention_heads == 128
        assert sum(text.rope_parameters["mrope_section"]) == 64
