"""Run under torchrun by test_weights.py: layouts, exchange, reconstruction and export against transformers' own
tensors."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Qwen2_5_VLForConditionalGeneration

import configs
import weights
from arena import Arena


def engine_reference(hf: dict[str, torch.Tensor], config, rollout_tp: int, j: int) -> dict[str, torch.Tensor]:
    """What vLLM's own loader would put into rollout rank j: written from vLLM's layout rules, not from weights.py."""
    out = {}
    hf = padded(hf)
    take = lambda name, axis: hf[name].chunk(rollout_tp, axis)[j]  # noqa: E731
    text = "model.language_model."
    for i in range(config.text_config.num_hidden_layers):
        source, target = f"{text}layers.{i}.", f"language_model.model.layers.{i}."
        for kind in ("weight", "bias"):
            parts = [take(f"{source}self_attn.{x}_proj.{kind}", 0) for x in "qkv"]
            out[f"{target}self_attn.qkv_proj.{kind}"] = torch.cat(parts)
        out[f"{target}self_attn.o_proj.weight"] = take(f"{source}self_attn.o_proj.weight", 1)
        out[f"{target}mlp.gate_up_proj.weight"] = torch.cat(
            [take(f"{source}mlp.{x}_proj.weight", 0) for x in ("gate", "up")]
        )
        out[f"{target}mlp.down_proj.weight"] = take(f"{source}mlp.down_proj.weight", 1)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[f"{target}{norm}.weight"] = hf[f"{source}{norm}.weight"]
    out["language_model.model.embed_tokens.weight"] = take(f"{text}embed_tokens.weight", 0)
    out["language_model.model.norm.weight"] = hf[f"{text}norm.weight"]
    if not config.tie_word_embeddings:
        out["language_model.lm_head.weight"] = take("lm_head.weight", 0)
    for name, tensor in hf.items():
        if name.startswith("model.visual.") and "up_proj" not in name:
            target = name.removeprefix("model.").replace("gate_proj", "gate_up_proj")
            pair = [tensor, hf[name.replace("gate_proj", "up_proj")]] if "gate_proj" in name else [tensor]
            out[target] = torch.cat(pair)
    return out


def padded(hf: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The checkpoint with its vocabulary padded by zero rows to a multiple of 64, as vLLM pads it."""
    out = dict(hf)
    for name in ("lm_head.weight", "model.language_model.embed_tokens.weight"):
        out[name] = torch.nn.functional.pad(hf[name], (0, 0, 0, -len(hf[name]) % 64))
    return out


def case(root: Path, source: Path, rollout_tp: int, qkv: str, dtype: torch.dtype) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    config = configs.load_config(str(source))
    hf = Qwen2_5_VLForConditionalGeneration.from_pretrained(source, dtype=dtype).state_dict()
    plan = weights.layout(config, world, rollout_tp, qkv, dtype)
    q, group = plan.q, None
    for first in range(0, world, q):
        made = dist.new_group(range(first, first + q))
        group = made if first <= rank < first + q else group
    arena = Arena({"snapshot": plan.nbytes} | ({"fused": weights.fused_nbytes(plan)} if qkv == "fused" else {}))
    fused = arena.acquire("fused") if qkv == "fused" else None
    snapshot = weights.Snapshot(plan, rank, arena.acquire("snapshot"), fused, group)
    weights.load_hf(snapshot, source)
    expected = engine_reference(hf, config, rollout_tp, rank // q)

    def compare(stage: str) -> None:
        views = weights.engine_views(snapshot.bytes, plan)
        assert views.keys() == expected.keys(), sorted(views.keys() ^ expected.keys())
        for name, tensor in expected.items():
            assert torch.equal(views[name], tensor), f"{stage}: {name}"

    compare("loaded")
    # Forget everything that this rank does not own, as after an update of its own shard only; publish must bring it
    # back.
    own = {shard.name: snapshot.flat(shard).clone() for shard in snapshot.shards}
    snapshot.bytes.zero_()
    for shard in snapshot.shards:
        snapshot.flat(shard).copy_(own[shard.name])
    snapshot.publish()
    compare("published")
    # Every trainer parameter is the right slice of the checkpoint, seen through its own name and orientation.
    for shard in snapshot.shards:
        rows = [row for row in weights.table(config, qkv) if row.train == shard.name]
        if len(rows) == 1 and not shard.replicated:
            published = rows[0].hf.replace("model.", "model.language_model.", 1)
            wanted = padded(hf)[published].chunk(world, rows[0].axis)[rank]
            assert torch.equal(shard.parameter(snapshot.flat(shard)), wanted), shard.name
    weights.export_hf(snapshot, source, root / "export", shard_bytes=200_000)
    again = Qwen2_5_VLForConditionalGeneration.from_pretrained(root / "export", dtype=dtype).state_dict()
    assert again.keys() == hf.keys() and all(torch.equal(again[name], hf[name]) for name in hf)
    if rank == 0:
        index = json.loads((root / "export" / "model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) > 1  # really sharded
    dist.barrier()


def main() -> None:
    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for source, rollout_tp, qkv, dtype in json.loads(sys.argv[2]):
        case(root, Path(source), rollout_tp, qkv, getattr(torch, dtype))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
