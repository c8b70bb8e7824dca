"""sizes.py: activations against what autograd really saves.

Run under torchrun (by test_formulas_…), the file itself measures: see _measure().
"""

import json
import math
import os
import weakref
from itertools import product
from pathlib import Path

import pytest
import torch

import configs
import data
import hardware
import memory
import plan
import sizes
import weights
from arena import Arena
from memory import MemoryConfig
from sizes import Workload

# hidden, MLP, layers, heads, kv heads, vocabulary, tied; vision: depth, hidden, heads, MLP, blocks of full attention
SHAPES = [
    (256, 640, 4, 8, 4, 512, False, 3, 64, 2, 160, [1]),
    (512, 1024, 4, 8, 2, 2048, False, 4, 128, 4, 256, [1, 3]),
    (384, 1000, 3, 6, 6, 512, True, 2, 96, 3, 200, [0]),
]
# grid of the clip or none, prompt tokens, prompts, responses, their tokens
# four slices; two prompts of two; three slices, of which one rank of two gets two; no media
STEPS = [((4, 8, 12), 150, 1, 4, 20), ((2, 8, 8), 80, 2, 8, 30), ((3, 8, 8), 90, 1, 4, 20), (None, 200, 1, 2, 60)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_formulas_equal_what_autograd_saves(ranks, torchrun):
    """Prefix (also one that keeps only the inputs of the tower's blocks), suffix and boundary of real models of several
    shapes, FP32 and BF16, fused and split QKV, whole or with layers that keep only their input: within 0.1 %. Token ids
    and masks are left out, where the ledger counts them too up to 30 bytes a token."""
    lines = torchrun(Path(__file__), ranks=ranks).stdout.splitlines()
    measured = [json.loads(line) for line in lines if line.startswith('{"case"')]
    assert len(measured) == 4 * len(SHAPES) * len(STEPS)
    for entry in measured:
        for name in ("prefix", "waiting prefix", "suffix"):
            assert entry[name][0] == pytest.approx(entry[name][1], rel=1e-3), (name, entry)
        for name in ("boundary", "frozen boundary"):
            assert entry[name][0] == entry[name][1], (name, entry)
        for tag, (planned, counted, tokens) in entry["ledger"].items():
            assert planned == pytest.approx(counted, rel=1e-3, abs=30 * tokens), (tag, entry)


def _config(shape: tuple):
    hidden, inner, layers, heads, kv, vocab, tied, depth, vision_hidden, vision_heads, vision_inner, full = shape
    config = configs.load_config("tiny")
    text, vision, half = config.text_config, config.vision_config, hidden // heads // 2
    text.hidden_size, text.intermediate_size, text.num_hidden_layers = hidden, inner, layers
    text.num_attention_heads, text.num_key_value_heads, text.vocab_size = heads, kv, vocab
    text.rope_parameters["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    vision.depth, vision.hidden_size, vision.num_heads, vision.intermediate_size = (
        depth, vision_hidden, vision_heads, vision_inner,
    )  # fmt: skip
    vision.out_hidden_size, vision.fullatt_block_indexes, config.tie_word_embeddings = hidden, full, tied
    return config


def _sample(config, grid: tuple | None, tokens: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    ids, media = torch.randint(60, 300, (tokens,), generator=generator), []
    if grid is not None:
        t, h, w = grid
        ids[1], ids[2 : 2 + math.prod(grid) // 4] = config.vision_start_token_id, config.video_token_id
        frames = torch.randint(256, (2 * t, 14 * h, 14 * w, 3), generator=generator, dtype=torch.uint8)
        media = [data.Media("video", frames.numpy(), 2.0)]
    grids = torch.tensor([m.grid for m in media]).reshape(-1, 3)
    return data.Sample(0, "", [], ids, media, grids, [1.0] * len(media), "", "", "", [])


class _Kept:
    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor.detach()  # detached, or an output would hold its own node


class _Saved:
    """Bytes of the distinct storages that autograd has saved inside and still holds, without those of `known`
    tensors, ids and masks."""

    def __init__(self, known: list[torch.Tensor]):
        self.known, self.held = {t.untyped_storage().data_ptr() for t in known}, weakref.WeakSet()

    def __enter__(self):
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc):
        self._hooks.__exit__(*exc)

    def _pack(self, tensor: torch.Tensor):
        kept = _Kept(tensor)
        self.held.add(kept)
        return kept

    @property
    def nbytes(self) -> int:
        tensors = [k.tensor for k in self.held if k.tensor.is_floating_point()]
        return _distinct_bytes([t for t in tensors if t.untyped_storage().data_ptr() not in self.known])


def _distinct_bytes(tensors: list[torch.Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _measure() -> None:
    """One rank: print, for each shape and step, what was planned and what was saved."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    import model as models

    torch.set_num_threads(1)
    hardware.answer_cuda_queries()
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    for (i, shape), dtype in product(enumerate(SHAPES), ("float32", "bfloat16")):
        config, qkv = _config(shape), ("fused", "split")[i % 2]
        layout = weights.layout(config, world, 1, qkv, getattr(torch, dtype))
        arena = Arena({"snapshot": layout.nbytes, "fused_qkv": max(512, weights.fused_nbytes(layout))})
        regions = arena.acquire("snapshot"), arena.acquire("fused_qkv")
        snapshot = weights.Snapshot(layout, rank, *regions, dist.group.WORLD)
        weights.init_random(snapshot, 0, config)
        model = models.QwenVL(config, getattr(torch, dtype), qkv)
        model.bind({s.name: s.parameter(snapshot.flat(s)) for s in snapshot.shards}, requires_grad=True)
        for step, model.recompute_layers in product(STEPS, (False, True)):
            case = {"case": [i, dtype, qkv, *step, model.recompute_layers]}
            entry = case | _measure_step(config, model, arena, regions, step, dtype, qkv)
            if rank == 0:
                print(json.dumps(entry), flush=True)
    dist.destroy_process_group()


def _measure_step(config, model, arena, regions: tuple, step: tuple, dtype: str, qkv: str) -> dict:
    grid, tokens, prompts, n, s = step
    tp, visual = int(os.environ["WORLD_SIZE"]), math.prod(grid) // 4 if grid else 0
    one = grid[1] * grid[2] // 4 if grid else 1
    together = prompts * max(tokens, n * s)
    w = Workload(prompts, n, tokens, visual, s, together, one, dtype=dtype, qkv=qkv, device="cpu")
    samples = [_sample(config, grid, tokens, i) for i in range(prompts)]
    responses = [torch.randint(60, 300, (n, s)) for _ in samples]
    known, lengths = [*regions, model.logit_bias], [[s] * n for _ in samples]
    with _Saved(known) as in_prefix:
        prefix = model.prefix(samples)
    with _Saved([*known, *prefix.leaves()]) as in_suffix:
        kept = model.suffix(prefix, responses, lengths, 1.0)
    with _Saved(known) as in_waiting:
        waiting = model.prefix(samples, recompute_vision=True)
    with torch.no_grad():
        frozen = model.prefix(samples)
    again = model.recompute_layers
    planned = sizes.prefix_bytes(config, w, tp, again), n * s * sizes.suffix_token_bytes(config, w, tp, again)
    planned += (sizes.boundary_bytes(config, w, tp),) * 2 + (sizes.prefix_bytes(config, w, tp, again, True),)
    assert waiting.attached
    assert all(own.requires_grad for own in kept)  # still there while counting
    counted = in_prefix.nbytes, in_suffix.nbytes, _distinct_bytes(prefix.leaves()), _distinct_bytes(frozen.leaves())
    counted = _most((*counted, in_waiting.nbytes))
    names = "prefix", "suffix", "boundary", "frozen boundary", "waiting prefix"
    found = {k: (prompts * p, c) for k, p, c in zip(names, planned, counted, strict=True)}
    return found | {"ledger": _through_the_ledger(config, model, arena, samples, responses, w, tp)}


def _through_the_ledger(config, model, arena, samples: list, responses: list, w: Workload, tp: int) -> dict:
    """The same by the runtime's own count, under the tags of its memory log, in the window that plan() has for it; and
    what there is at most in either backward. With the tokens whose ids may be among it."""
    ledger = memory.Ledger()
    saved = memory.SavedTensors(ledger, arena)
    with saved.counted("prefix_activations"):
        prefix = model.prefix(samples)
    for leaf in prefix.leaves():
        ledger.track("actor_boundary", leaf, leaf)
    with saved.counted("suffix_activations"):
        kept = model.suffix(prefix, responses, [[w.response_tokens] * w.n for _ in samples], 1.0)
    held = ledger.held()
    p = plan.plan(config, tp, tp, 1, w, MemoryConfig("keep", recompute_layers=model.recompute_layers))
    windows = {x.name: x.bytes for x in p.windows}
    tokens = dict(prefix_activations=w.prompts * w.prompt_tokens, actor_boundary=0)
    tokens["suffix_activations"] = w.prompts * w.n * w.response_tokens
    found = {tag: (windows["actor suffix"][tag], held[tag], tokens[tag]) for tag in tokens}
    for name, tag in (("suffix", "suffix_activations"), ("prefix", "prefix_activations")):
        ledger.enter(f"{name} backward")
        with saved.counted(tag):
            if name == "suffix":
                sum(own.sum() for own in kept).backward()
            else:
                model.prefix_backward(prefix)
        planned = max(windows[x].get(tag, 0) for x in (f"actor {name}", f"{name} backward") if x in windows)
        found[f"{name} backward"] = planned, ledger.peaks[f"{name} backward"][tag], tokens[tag]
    most = _most([counted for _, counted, _ in found.values()])
    return {name: (planned, m, t) for (name, (planned, _, t)), m in zip(found.items(), most, strict=True)}


def _most(counted) -> list[int]:
    """Of any rank: they encode different media."""
    import torch.distributed as dist

    most = torch.tensor(counted)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.tolist()


def test_device_changes_only_what_its_kernels_save():
    """A fused RMSNorm keeps its input in the model's dtype and nothing normalised; flash attention over windows writes
    one output. Everything else is the same on both."""
    config = configs.load_config("qwen2.5-vl-7b")
    cpu, gpu = Workload(device="cpu", prompt_tokens=2, visual_tokens=0), Workload(prompt_tokens=2, visual_tokens=0)
    norms, hidden = 2 * 27 + 1, 3584
    assert sizes.prefix_bytes(config, cpu, 1) - sizes.prefix_bytes(config, gpu, 1) == norms * (8 - 2) * hidden
    assert sizes.vision_bytes(config, cpu) - sizes.vision_bytes(config, gpu) == (65 * 6 + 32 * 2) * 1280


if __name__ == "__main__":
    _measure()
