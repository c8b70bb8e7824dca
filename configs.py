"""Configurations: which Qwen2.5-VL models there are, and a model directory for one that has no weights.

A directory holds what transformers and vLLM read: config.json, a tokenizer and the processor. A published model brings
its own; a named configuration (tiny, qwen2.5-vl-3b …) gets one made here, with a byte-level tokenizer, since the real
vocabulary cannot be had without the model's files.

Run:
    python configs.py qwen2.5-vl-7b        # its dimensions; needs no weights
Left out on purpose: model code (model.py), tensor layouts (weights.py). Imports neither megatron nor vllm, so that the
planner and the data tools start fast.
To add a size, add a row to CONFIGS; to add a model family, add its configuration here and see weights.table().
"""

import json
import os
import shutil
import sys
from pathlib import Path

from transformers import AutoConfig, Qwen2_5_VLConfig

# Published dimensions (config.json of Qwen/Qwen2.5-VL-*-Instruct): hidden, MLP, layers, heads, key/value heads,
# vocabulary, tied, then the vision tower's MLP.
CONFIGS = {
    "qwen2.5-vl-3b": (2048, 11008, 36, 16, 2, 151936, True, 3420),
    "qwen2.5-vl-7b": (3584, 18944, 28, 28, 4, 152064, False, 3420),
    "qwen2.5-vl-32b": (5120, 27648, 64, 40, 8, 152064, False, 3456),
    "qwen2.5-vl-72b": (8192, 29568, 80, 64, 8, 152064, False, 3456),
}
NAMES = ("tiny", *CONFIGS)  # without weights of their own
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"]
SPECIAL_TOKENS += ["<|image_pad|>", "<|video_pad|>"]


# ---- configurations and model directories ----------------------------------------------------------------------------


def load_config(model: str) -> Qwen2_5_VLConfig:
    """The transformers configuration of a model name (tiny, qwen2.5-vl-3b …) or directory. Raises ValueError with the
    fix."""
    if model in NAMES:
        return _named_config(model)
    path = Path(model)
    if not (path / "config.json").is_file():
        names = ", ".join(NAMES)
        raise ValueError(f"--model {model}: expected one of {names} or a directory with a config.json")
    config = AutoConfig.from_pretrained(path)
    if config.model_type != "qwen2_5_vl":
        raise ValueError(f"--model {model}: config.json has model_type {config.model_type!r}, expected qwen2_5_vl")
    return config


def _named_config(name: str) -> Qwen2_5_VLConfig:
    if name == "tiny":  # head size 32: the smallest that vLLM's CPU attention has
        hidden, inner, layers, heads, kv, vocab, tied, vision_inner = 128, 256, 2, 4, 2, 384, False, 128
        vision = dict(depth=2, hidden_size=64, num_heads=2, fullatt_block_indexes=[1], initializer_range=0.1)
        sections, std, positions = [4, 6, 6], 0.06, 4096
    else:
        hidden, inner, layers, heads, kv, vocab, tied, vision_inner = CONFIGS[name]
        vision = dict(
            depth=32, hidden_size=1280, num_heads=16, fullatt_block_indexes=[7, 15, 23, 31], initializer_range=0.02
        )
        sections, std, positions = [16, 24, 24], 0.02, 128000
    ids = {token: i for i, token in enumerate(SPECIAL_TOKENS)}  # make_model_dir's tokenizer puts them first
    text = dict(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        vocab_size=vocab,
        max_position_embeddings=positions,
        rms_norm_eps=1e-6,
        initializer_range=std,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections},
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|im_end|>"],
    )
    vision |= dict(intermediate_size=vision_inner, out_hidden_size=hidden, window_size=112, tokens_per_second=2)
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        vision_token_id=ids["<|vision_pad|>"],
        tie_word_embeddings=tied,
    )


def make_model_dir(name: str, root: str | Path) -> Path:
    """A directory for a named configuration without weights: config, a byte-level tokenizer made here, and the
    processor.

    The real vocabulary cannot be had without the model's files; ids above the tokenizer's are never produced by it.
    Returns the directory `root`/`name`, made once."""
    target = Path(root) / name
    if (target / "config.json").is_file():
        return target
    partial = target.with_name(f"{name}.{os.getpid()}.partial")  # several ranks may make it at once; the first one wins
    partial.mkdir(parents=True)
    _save_processor(partial)
    _named_config(name).save_pretrained(partial)
    config = json.loads((partial / "config.json").read_text())
    config["architectures"] = ["Qwen2_5_VLForConditionalGeneration"]  # vLLM finds the model class by this
    (partial / "config.json").write_text(json.dumps(config, indent=2))
    try:
        partial.rename(target)
    except OSError:
        shutil.rmtree(partial)
        if not (target / "config.json").is_file():
            raise
    return target


_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _save_processor(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=384, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet)
    corpus = [
        "<answer>A</answer> <think> the </think> Which color direction shape moving video Options: A. B. C. D."
    ] * 8
    tokenizer.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[t for t in SPECIAL_TOKENS if t not in ("<|im_end|>", "<|endoftext|>")],
    )
    fast.chat_template = _CHAT_TEMPLATE
    budget = dict(min_pixels=4 * 28 * 28, max_pixels=16384 * 28 * 28)
    video_budget = dict(min_pixels=4 * 28 * 28, max_pixels=768 * 28 * 28)
    Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**budget),
        tokenizer=fast,
        video_processor=Qwen2VLVideoProcessor(**video_budget),
        chat_template=_CHAT_TEMPLATE,
    ).save_pretrained(directory)


def forbidden_ids(config) -> list[int]:
    """Ids a policy must never produce: visual placeholders and markers, and Qwen's <|endoftext|>, which only pads."""
    ids = [config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id]
    ids += [getattr(config, "vision_token_id", None), config.text_config.bos_token_id]
    return sorted({i for i in ids if i is not None and i != config.text_config.eos_token_id})


if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else "tiny"
    try:
        print(load_config(name).text_config)
    except ValueError as error:
        sys.exit(f"configs.py: {error}")
