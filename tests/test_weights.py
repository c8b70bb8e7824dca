"""weights.py: the engine sees what vLLM's loader would have loaded, at every pair of degrees; checkpoints survive a
round trip."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from transformers import Qwen2_5_VLForConditionalGeneration

import configs
import weights

RANKS = Path(__file__).parent / "ranks_weights.py"


def checkpoint(root: Path, name: str, tied: bool, kv_heads: int = 2, vocab: int = 384) -> Path:
    """A sharded Hugging Face directory with random weights, biases included, written by transformers."""
    target = root / name
    config = configs.load_config(str(configs.make_model_dir("tiny", root)))
    config.tie_word_embeddings = tied
    config.text_config.num_key_value_heads = kv_heads
    config.text_config.vocab_size = vocab
    torch.manual_seed(1)
    model = Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.tie_weights()
    model.save_pretrained(target, max_shard_size="500KB")
    assert len(list(target.glob("*.safetensors"))) > 1
    return target


def test_two_ranks_one_engine_each(tmp_path, torchrun):
    untied, tied = (
        checkpoint(tmp_path, "untied", False),
        checkpoint(tmp_path, "tied", True, vocab=400),
    )  # 400: rows of padding
    cases = [(untied, 1, "fused", "float32"), (untied, 1, "split", "bfloat16"), (tied, 2, "fused", "float32")]
    torchrun(RANKS, str(tmp_path), json.dumps([[str(source), *rest] for source, *rest in cases]))


def test_four_ranks_two_engines_of_two(tmp_path, torchrun):
    source = checkpoint(tmp_path, "untied", False, kv_heads=4)
    cases = [(str(source), 2, "fused", "float32"), (str(source), 1, "split", "float32")]
    torchrun(RANKS, str(tmp_path), json.dumps(cases), ranks=4)


def test_paper_coverage_of_32b():
    """Rollplex §4.4: 19.7 / 10.7 / 2.4 B parameters of the language model, 1.1 GiB of Case 3 at rollout TP 4."""
    config = configs.load_config("qwen2.5-vl-32b")
    rows = [row for row in weights.table(config) if not row.hf.startswith("visual.")]
    counts = weights.coverage(rows)
    assert [counts[case] / 1e9 for case in (1, 2, 3)] == pytest.approx([19.7, 10.7, 2.4], abs=0.06)
    total = sum(counts.values())
    assert [100 * counts[case] / total for case in (1, 2, 3)] == pytest.approx([60.0, 32.8, 7.2], abs=0.1)
    plan = weights.layout(config, 8, 4, "fused", torch.bfloat16)
    case3 = sum(math.prod(slot.storage) * 2 for slot in plan.slots if slot.logical.case == 3)
    assert case3 / 2**30 == pytest.approx(1.1, abs=0.02)
    assert weights.coverage(weights.table(config, "split"))[3] == 0


@pytest.mark.parametrize(
    "name, billions",
    [("qwen2.5-vl-3b", 3.75), ("qwen2.5-vl-7b", 8.29), ("qwen2.5-vl-32b", 33.45), ("qwen2.5-vl-72b", 73.41)],
)
def test_named_configurations_have_the_published_size(name, billions):
    assert sum(weights.coverage(weights.table(configs.load_config(name))).values()) / 1e9 == pytest.approx(
        billions, abs=0.01
    )


def test_snapshot_is_the_weights_and_little_else():
    """Beyond one rollout shard there is only alignment."""
    config = configs.load_config("qwen2.5-vl-7b")
    plan = weights.layout(config, 2, 1, "split", torch.bfloat16)
    exact = sum(math.prod(row.shape) * 2 for row in weights.table(config, "split"))
    assert exact <= plan.nbytes < exact * 1.0001


@pytest.mark.parametrize(
    "train_tp, rollout_tp, qkv, message",
    [
        (2, 4, "fused", "--train-tp 2 must be a positive multiple of --rollout-tp 4"),
        (3, 1, "fused", "--train-tp 3 does not divide the model's 2 key/value heads"),
        (4, 1, "fused", "--train-tp 4 does not divide the model's 2 key/value heads"),
        (2, 1, "mixed", "--qkv mixed: expected fused or split"),
    ],
)
def test_impossible_layouts_name_the_field(train_tp, rollout_tp, qkv, message):
    with pytest.raises(ValueError, match=message):
        weights.layout(configs.load_config("tiny"), train_tp, rollout_tp, qkv, torch.float32)


def test_missing_weights_name_the_fix(tmp_path):
    directory = configs.make_model_dir("tiny", tmp_path)
    plan = weights.layout(configs.load_config("tiny"), 1, 1, "split", torch.float32)
    snapshot = weights.Snapshot(plan, 0, torch.zeros(plan.nbytes, dtype=torch.uint8), None)
    with pytest.raises(ValueError, match="no \\*.safetensors there; pass --weights random"):
        weights.load_hf(snapshot, directory)


def test_bind_engine_refuses_a_parameter_it_does_not_know():
    plan = weights.layout(configs.load_config("tiny"), 1, 1, "split", torch.float32)
    with pytest.raises(RuntimeError, match="disagree about parameters"):
        weights.bind_engine(torch.nn.Linear(2, 2), torch.zeros(plan.nbytes, dtype=torch.uint8), plan)


def test_command_line_prints_the_coverage():
    out = subprocess.run([sys.executable, "weights.py"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "Case 3  permuted copy          2.35 B    7.2 %" in out
