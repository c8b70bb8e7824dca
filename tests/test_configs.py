"""configs.py: a made model directory is one that transformers reads; names and sizes are the published ones."""

import pytest
from transformers import AutoProcessor

import configs


def test_model_directory_is_complete_and_stable(tmp_path):
    first = configs.make_model_dir("tiny", tmp_path)
    stamp = (first / "config.json").stat().st_mtime_ns
    assert configs.make_model_dir("tiny", tmp_path) == first and (first / "config.json").stat().st_mtime_ns == stamp
    processor = AutoProcessor.from_pretrained(first)
    config = configs.load_config(str(first))
    tokenizer = processor.tokenizer
    assert tokenizer.convert_tokens_to_ids("<|video_pad|>") == config.video_token_id
    assert tokenizer.eos_token_id == config.text_config.eos_token_id and len(tokenizer) <= config.text_config.vocab_size
    text = "<answer>B</answer> Ünïcödé 漢"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert not list(tmp_path.glob("*.partial"))


def test_forbidden_ids_are_the_visual_tokens_and_the_padding(tmp_path):
    directory = configs.make_model_dir("tiny", tmp_path)
    tokenizer = AutoProcessor.from_pretrained(directory).tokenizer
    names = ["<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
    assert configs.forbidden_ids(configs.load_config(str(directory))) == sorted(tokenizer.convert_tokens_to_ids(names))
    assert tokenizer.pad_token_id in configs.forbidden_ids(configs.load_config("tiny"))


def test_unknown_model_names_the_choices(tmp_path):
    with pytest.raises(ValueError, match="--model no-such: expected one of tiny, qwen2.5-vl-3b"):
        configs.load_config("no-such")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="model_type 'llama', expected qwen2_5_vl"):
        configs.load_config(str(tmp_path))


def test_named_configurations_match_the_published_heads():
    """Head size 128 throughout, and M-RoPE sections that fill half of it."""
    for name in configs.CONFIGS:
        text = configs.load_config(name).text_config
        assert text.hidden_size // text.num_attention_heads == 128
        assert sum(text.rope_parameters["mrope_section"]) == 64
