"""plan.py: weights and activations against what is really allocated and saved, peaks against a walk through the step,
verdicts by planning again.

Run under torchrun (by test_formulas_…), the file itself measures: see _measure().
"""

import json
import math
import os
import resource
import subprocess
import sys
import weakref
from dataclasses import fields, replace
from itertools import product
from pathlib import Path

import pytest
import torch

import configs
import data
import memory
import plan
import weights
from arena import Arena
from memory import MemoryConfig
from plan import GIB, Workload

# ---- weights, and the paper's Table 1 --------------------------------------------------------------------------------


def test_nominal_parameters_give_the_papers_table():
    """Weight rows from 32.5 B to 0.1 GiB; the preserved KV from the whole batch in both roles; its rows' own sum."""
    w = Workload(prompt_tokens=8192, response_tokens=2048)
    rows = {name: row for name, *row in plan.table1(configs.load_config("qwen2.5-vl-32b"), w)}
    nominal = [round(row[1], 1) for row in rows.values() if row[1]]
    assert nominal == [7.6, 15.1, 15.1, 30.3, 7.6, 15.1] == [row[2] for row in rows.values() if row[1]]
    assert rows["actor: preserved prefix KV"][0] == 16.0 == rows["actor: preserved prefix KV"][2]
    paper = {name: row[2] for name, row in rows.items()}
    assert sum(paper.values()) - paper["total"] - paper["rollout: runtime buffers"] == pytest.approx(164.1)
    assert rows["total"][0] == pytest.approx(sum(row[0] for row in rows.values()) - rows["total"][0])


@pytest.mark.parametrize("name", ["qwen2.5-vl-3b", "qwen2.5-vl-7b"])
def test_parameters_are_those_of_transformers(name):
    from transformers import Qwen2_5_VLForConditionalGeneration

    config = configs.load_config(name)
    with torch.device("meta"):
        expected = sum(p.numel() for p in Qwen2_5_VLForConditionalGeneration(config).parameters())
    p = plan.plan(config, 1, 1, 1, Workload(qkv="split"), MemoryConfig())
    optimizer = p.peak("3").bytes
    assert optimizer["gradient"] == 4 * expected and p.host["FP32 master weights and moments"] == 12 * expected
    assert 2 * expected <= optimizer["snapshot"] < 2 * expected * 1.0001  # and alignment


def test_fused_qkv_is_the_papers_case_3():
    """7.2 % of the language model; the trainer keeps an eighth of it beside the snapshot."""
    config = configs.load_config("qwen2.5-vl-32b")
    counts = weights.coverage([row for row in weights.table(config) if not row.hf.startswith("visual.")])
    shares = [100 * counts[case] / sum(counts.values()) for case in (1, 2, 3)]
    assert shares == pytest.approx([60.0, 32.8, 7.2], abs=0.1)
    fused, split = (
        plan.plan(config, 8, 8, 4, Workload(qkv=qkv), MemoryConfig()).peak("3").bytes for qkv in ("fused", "split")
    )
    assert fused["snapshot"] - split["snapshot"] == pytest.approx(2 * counts[3] / 8, rel=1e-3)


# ---- activations -----------------------------------------------------------------------------------------------------

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
    memory.answer_cuda_queries()
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
    planned = plan.prefix_bytes(config, w, tp, again), n * s * plan.suffix_token_bytes(config, w, tp, again)
    planned += (plan.boundary_bytes(config, w, tp),) * 2 + (plan.prefix_bytes(config, w, tp, again, True),)
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
    assert plan.prefix_bytes(config, cpu, 1) - plan.prefix_bytes(config, gpu, 1) == norms * (8 - 2) * hidden
    assert plan.vision_bytes(config, cpu) - plan.vision_bytes(config, gpu) == (65 * 6 + 32 * 2) * 1280


# ---- windows ---------------------------------------------------------------------------------------------------------


def _walk(p: plan.Plan, state: dict) -> dict[str, int]:
    """Peak of each phase by taking every step of sched.py's schedule one object at a time, all prompts of full length;
    no temporaries. Under "later" the peak around prefixes that could not wait beside decode."""
    w, policy, peaks, held = p.workload, p.policy, {}, {}
    groups, mb = w.prompts * p.train_tp // p.world, max(1, w.micro_tokens // w.prompt_tokens)
    sizes = [min(mb, groups - i) for i in range(0, groups, mb)]
    config, tp, kind, again = p.hf_config, p.train_tp, policy.activations, policy.recompute_layers
    edge, saved = plan.boundary_bytes(config, w, tp), plan.prefix_bytes(config, w, tp, again)
    held_twice = 0 if again else edge * 27 // 28
    waiting = plan.prefix_bytes(config, w, tp, again, policy.recompute_vision) - held_twice
    most, ahead = (kind == "keep" and policy.keep_tokens) or groups * w.prompt_tokens, w.overlap == "prefix"
    waits = [ahead and sum(sizes[: i + 1]) * w.prompt_tokens <= most for i in range(len(sizes))]

    def put(phase: str, tag: str, nbytes: int) -> None:
        held[tag] = held.get(tag, 0) + nbytes
        assert held[tag] >= 0
        peaks[phase] = max(peaks.get(phase, 0), sum(held.values()))

    def reference(phase: str, sign: int) -> None:
        if policy.reference_paging:
            put(phase, "reference", sign * state["reference"])

    def prefix(phase: str, size: int, kept: int) -> None:
        put(phase, "actor_boundary", size * edge)
        if kind == "keep":
            put(phase, "prefix_activations", size * kept)
        if kind == "offload":  # all of it at once, then gone
            put(phase, "prefix_activations", size * saved)
            put(phase, "prefix_activations", -size * saved)

    def suffixes(phase: str, size: int, token_bytes: int) -> None:
        left, whole = size * w.n, max(1, w.micro_tokens // w.response_tokens)  # responses
        while left > 0:
            tokens = min(left, whole) * w.response_tokens
            put(phase, "suffix_activations", tokens * token_bytes)
            put(phase, "suffix_activations", -tokens * token_bytes)
            left -= whole

    put("1", "snapshot", state["snapshot"])
    for tag, there in state["always"].items():
        put("1", tag, there)
    if policy.engine_release:
        put("1", "rollout_kv", p.kv_bytes)
    if ahead:
        reference("1", +1)
        for size in sizes:
            put("1", "reference_boundary", size * edge)
        reference("1", -1)
        for size in (size for size, beside in zip(sizes, waits, strict=True) if beside):
            prefix("1", size, waiting)
    if policy.engine_release:
        put("2", "rollout_kv", -p.kv_bytes)
        del peaks["2"]
    put("2", "logprobs", groups * w.n * w.response_tokens * 17)
    reference("2", +1)
    for size in sizes:
        if not ahead:
            put("2", "reference_boundary", size * edge)
        put("2", "reference_boundary", -size * edge)
    reference("2", -1)
    put("2", "gradient", state["gradient"])
    for i, (size, beside) in enumerate(zip(sizes, waits, strict=True)):
        phase, kept = "later" if ahead and not beside else "2", waiting if beside else saved - held_twice
        if i == len(sizes) - 1:
            put(phase, "chunks", state["chunks"])  # loaded ahead
        if not beside:
            prefix(phase, size, kept)
        suffixes(phase, size, plan.suffix_token_bytes(config, w, tp, again))
        if again:
            suffixes(phase, size, plan.suffix_again_token_bytes(config, w, tp))
        second = saved + edge // (1 if again else 28)  # keys and values too, in all layers or in the last
        consumed = 0 if kind == "keep" else size * (state["layer"] if kind == "offload" else second)
        consumed += size * plan.prefix_again_bytes(config, w, tp) if again and kind != "offload" else 0
        put(phase, "prefix_activations", consumed)
        put(phase, "prefix_activations", -consumed - (size * kept if kind == "keep" else 0))
        put(phase, "actor_boundary", -size * edge)
    put("3", "logprobs", -held["logprobs"])
    del peaks["3"]
    put("3", "workspace", state["workspace"])
    return peaks | {"2": max(peaks.get("2", 0), peaks.get("later", 0))}


def _state(config, w: Workload, off: str | None = None, kv_bytes: int = 0) -> dict:
    """What _walk() needs to know at train TP 4 and rollout TP 2, where the policy `off` is off."""
    layout = weights.layout(config, 4, 2, "fused", torch.bfloat16)
    numel = sum(math.prod(shard.storage) for shard in weights.shards(layout, 0))
    whole = {"engine_weights": layout.nbytes, "rollout_kv": kv_bytes, "reference": 2 * numel}
    whole["optimizer_state"] = 12 * numel
    tags = {"engine_release": "rollout_kv", "reference_paging": "reference", "weight_sharing": "engine_weights"}
    tag = (tags | {"state_offload": "optimizer_state"}).get(off)
    # What one layer saves; of eight slices of 128 tokens, or of five, a rank of four has two.
    layer = max(999 * plan.layer_bytes(plan._dims(config, 4), w), 4 * 256 * plan.vision_bytes(config, w) // 32)
    state = dict(snapshot=layout.nbytes + weights.fused_nbytes(layout), gradient=4 * numel, reference=2 * numel)
    slot = int(w.chunk_mib * 2**20) // (32 * 12) * 32 * 12  # 12 bytes a parameter, in multiples of 32
    ahead = min(int(w.ahead_gib * 2**30) // slot, math.ceil(12 * numel / slot) - 3)
    state |= dict(workspace=3 * slot, chunks=max(0, ahead) * slot)
    return state | dict(layer=layer, always={tag: whole[tag]} if tag else {})


@pytest.mark.parametrize("off", [None, "engine_release", "reference_paging", "weight_sharing", "state_offload"])
@pytest.mark.parametrize("overlap", ["none", "prefix"])
@pytest.mark.parametrize("activations", ["keep", "offload", "recompute"])
@pytest.mark.parametrize("layers", [False, True])
def test_peaks_equal_a_walk_through_the_step(off, overlap, activations, layers):
    """Micro-batches of one prompt, several, all; passes of one response that is longer than micro_tokens, several, all.
    Prompts are all media, or all in one micro-batch: shorter ones cannot bring more media into one then."""
    config, policy = configs.load_config("qwen2.5-vl-7b"), MemoryConfig(activations, recompute_layers=layers)
    policy = replace(policy, **{off: False}) if off else policy
    cases = (1000, 1000, 500, 64.0), (2000, 1000, 40, 64.0), (4000, 1000, 1000, 4096.0), (500, 1000, 2000, 64.0)
    for micro_tokens, visual, response, chunk in (*cases, (8000, 600, 1000, 64.0)):
        w = Workload(8, 8, 1000, visual, response, micro_tokens, overlap=overlap, chunk_mib=chunk, device="cpu")
        p = plan.plan(config, 4, 4, 2, w, policy)
        walked = _walk(p, _state(config, w, off, p.kv_bytes))
        assert {phase: p.peak(phase).total for phase in "123"} == walked, (micro_tokens, response)


@pytest.mark.parametrize("overlap", ["none", "prefix"])
@pytest.mark.parametrize("again", ["none", "vision", "layers"])
@pytest.mark.parametrize("micro_tokens", [1000, 2000, 4000])
def test_kept_prefixes_equal_a_walk_through_the_step(overlap, again, micro_tokens):
    """--memory.keep-tokens: exactly in whole micro-batches; in between at least what is kept, since shorter
    prompts would fill it, and never less for more."""
    config = configs.load_config("qwen2.5-vl-7b")
    w = Workload(8, 8, 1000, 1000, 40, micro_tokens, overlap=overlap, device="cpu")
    state, totals = _state(config, w), {}
    recomputed = dict(recompute_vision=again == "vision", recompute_layers=again == "layers")
    for keep in range(500, 8501, 500):
        p = plan.plan(config, 4, 4, 2, w, MemoryConfig(keep_tokens=keep, **recomputed))
        planned = {phase: p.peak(phase).total for phase in "123"}
        later = [x.total for x in p.windows if x.name.endswith("of a later prefix")]
        planned |= {"later": max(later)} if later else {}
        walked, totals[keep] = _walk(p, state), planned
        assert ("later" in planned) == ("later" in walked) == (overlap == "prefix" and keep < 8000)
        if keep % micro_tokens == 0 or keep >= 8000 or overlap == "none":
            assert planned == walked, keep
        else:
            assert all(planned[name] >= walked[name] for name in walked), keep
    for phase in "12":
        peaks = [planned[phase] for planned in totals.values()]
        assert peaks == sorted(peaks)
        if overlap == "prefix" and again == "none":
            assert peaks[0] < peaks[-1]
    everything = plan.plan(config, 4, 4, 2, w, MemoryConfig(**recomputed))
    assert totals[8000] == totals[8500] == {phase: everything.peak(phase).total for phase in "123"}


def test_short_prompts_that_are_all_media_fit_into_what_is_planned():
    """As many of them as micro_tokens and keep_tokens allow need no more than planned for long prompts with as many
    visual tokens each."""
    config = configs.load_config("qwen2.5-vl-7b")
    policies = MemoryConfig("recompute"), MemoryConfig(keep_tokens=16384), MemoryConfig("offload"), MemoryConfig()
    for policy, overlap, micro_tokens in product(policies, ("none", "prefix"), (2048, 8192, 2**20)):
        long = Workload(prompt_tokens=4096, visual_tokens=1024, micro_tokens=micro_tokens, overlap=overlap)
        short = replace(long, prompt_tokens=1024)
        windows = [plan.plan(config, 2, 2, 1, w, policy).windows for w in (short, long)]
        assert [x.name for x in windows[0]] == [x.name for x in windows[1]]
        for few, many in zip(*windows, strict=True):
            assert few.total <= many.total, (policy, overlap, micro_tokens, few.name)
    w = Workload(micro_tokens=8192)
    backward = plan.plan(config, 2, 2, 1, w, MemoryConfig("recompute")).windows[-2].bytes["prefix_activations"]
    media = plan.prefix_bytes(config, replace(w, visual_tokens=4096), 2)
    assert backward == 2 * media + 2 * plan.boundary_bytes(config, w, 2) // 28


@pytest.mark.parametrize("overlap", ["none", "prefix"])
@pytest.mark.parametrize("activations", ["keep", "offload", "recompute"])
@pytest.mark.parametrize("again", ["none", "vision", "layers"])
def test_chunks_loaded_ahead_equal_a_walk_through_the_step(overlap, activations, again):
    """They arrive before the last micro-batch, which may have waited or not, be one of several or the only one."""
    config = configs.load_config("qwen2.5-vl-7b")
    recomputed = dict(recompute_vision=again == "vision", recompute_layers=again == "layers")
    names = set()
    for micro_tokens, keep, ahead_gib in product((1000, 4000, 8000), (0, 4000, 8000), (0.0, 1.5, 20.0, 100.0)):
        policy = MemoryConfig(activations, keep_tokens=keep, **recomputed)
        w = Workload(8, 8, 1000, 1000, 40, micro_tokens, overlap=overlap, ahead_gib=ahead_gib, device="cpu")
        p = plan.plan(config, 4, 4, 2, w, policy)
        state = _state(config, w)
        walked = {phase: total for phase, total in _walk(p, state).items() if phase in "123"}
        if micro_tokens <= (keep or 8000):  # otherwise more is planned than is kept
            assert {phase: p.peak(phase).total for phase in "123"} == walked, (micro_tokens, keep)
        assert p.peak("3").bytes["optimizer_state"] == state["workspace"] + state["chunks"]
        assert p.peak("start-up").bytes["optimizer_state"] == state["workspace"] < 3 * 2**26
        held = [x for x in p.windows if x.phase == "2" and "optimizer_state" in x.bytes]
        assert bool(held) == bool(ahead_gib) and {x.bytes["optimizer_state"] for x in held} <= {state["chunks"]}
        names |= {x.name.partition(" of ")[2] for x in held}
        assert not any("optimizer_state" in x.bytes for x in p.windows if x.phase == "1")
    later = {"a later prefix"} if activations == "keep" else set()
    assert names == ({""} if overlap == "none" else {"the last micro-batch"} | later)


def test_every_policy_makes_some_window_smaller():
    """Figure 8's ablations: each switch, off, costs memory in the phases that its object should have left."""
    config, w = configs.load_config("qwen2.5-vl-32b"), Workload()
    on = plan.plan(config, 8, 8, 4, w, MemoryConfig(activations="recompute"))
    for name, phases in dict(
        state_offload="123", engine_release="23", weight_sharing="123", reference_paging="2"
    ).items():
        off = on.replan(**{name: False})
        grown = [phase for phase in "123" if off.peak(phase).total > on.peak(phase).total]
        assert set(phases) <= set(grown), (name, grown)
    assert on.replan(chunked_optimizer=False).peak("3").bytes["optimizer_state"] == pytest.approx(
        12 * on.peak("3").bytes["gradient"] / 4, rel=1e-6
    )


# ---- verdict, budgets, defaults --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message, change",
    [
        (dict(activations="keep"), "phase 1 (actor prefix)", "--memory.activations recompute"),
        (dict(state_offload=False), "phase start-up", "without --memory.no-state-offload"),
        (dict(chunked_optimizer=False), "phase start-up (engine and opt", "without --memory.no-chunked-optimizer"),
        (dict(engine_release=False), "phase 2", "without --memory.no-engine-release"),
        (dict(micro_tokens=32768), "the first object beyond is suffix_activations", "--micro-tokens 8192"),
        (dict(response_tokens=16384, kv_cache_gib=9.0), "suffix_activations", "--memory.recompute-layers"),
        (dict(prompt_tokens=16384, visual_tokens=16000), "is prefix_activations", "--memory.recompute-layers"),
        (dict(prompts=256), "is actor_boundary", ""),
        (dict(kv_cache_gib=70.0), "the first object beyond is rollout_kv", "a smaller KV cache"),
    ],
)
def test_the_cheapest_change_really_fits(changes, message, change):
    """On a GPU that has just room without the changes: the verdict names what does not fit, and its fixed plan, planned
    again from scratch, does."""
    config = configs.load_config("qwen2.5-vl-32b")
    p = plan.plan(config, 8, 8, 4, Workload(), MemoryConfig(activations="recompute"))
    limit, p = p.peak_bytes, p.replan(**changes)
    judged = plan.verdict(p, limit)
    assert not judged.fits and p.peak_bytes > limit and message in judged.text
    fixed = judged.fixed
    again = plan.plan(config, fixed.world, fixed.train_tp, fixed.rollout_tp, fixed.workload, fixed.policy)
    assert again.peak_bytes == fixed.peak_bytes <= limit
    assert f"Cheapest change: {change}" in judged.text


def test_no_needless_change_is_named():
    """Of several changes none could be left out; a policy that is off is switched on before anything that costs."""
    config = configs.load_config("qwen2.5-vl-32b")
    p = plan.plan(config, 8, 8, 4, Workload(), MemoryConfig(activations="recompute", weight_sharing=False))
    changes, _ = plan.cheapest(p, p.peak_bytes - 1)
    assert [change.text for change in changes] == ["without --memory.no-weight-sharing"]
    p = p.replan(weight_sharing=True)
    for limit in range(60, 81):  # at some of them the KV cache is made smaller, and then need not have been
        for q in (p.replan(kv_cache_gib=34.0), p.replan(activations="keep", micro_tokens=32768, kv_cache_gib=60.0)):
            changes, fixed = plan.cheapest(q, limit * GIB)
            assert plan.fits(fixed, limit * GIB)
            for change in changes:
                fewer = plan._make(q, [other for other in changes if other is not change])
                assert fewer is None or not plan.fits(fewer, limit * GIB), f"{change.text} was not needed"


def test_verdict_counts_the_host_and_says_when_nothing_helps():
    config = configs.load_config("qwen2.5-vl-7b")
    p = plan.plan(config, 2, 2, 1, Workload(), MemoryConfig(activations="recompute"))
    good = plan.verdict(p, 141 * GIB)
    assert good.fits and good.text.startswith("fits: ") and good.fixed is p
    assert "a host needs" in plan.verdict(p, 141 * GIB, 64 * GIB).text
    assert plan.verdict(p, 1 * GIB) == plan.Verdict(False, plan.verdict(p, 1 * GIB).text, None)
    assert "No change known here" in plan.verdict(p, 1 * GIB).text
    tight = plan.verdict(p, p.peak_bytes * 1.01)
    assert tight.fits and "less than the 5% to keep in reserve" in tight.text


def test_budgets_are_the_largest_that_fit():
    config, limit = configs.load_config("qwen2.5-vl-7b"), 141 * GIB
    p = plan.plan(config, 2, 2, 1, Workload(), MemoryConfig(activations="recompute"))
    most = plan.budgets(p, limit)

    def peak(**changes) -> int:
        smallest = plan.kv_bytes(config, replace(p.workload, **changes), 1, 8) / GIB
        return p.replan(**({"kv_cache_gib": smallest} | changes)).peak_bytes

    for fields_of, step in (
        (lambda x: dict(prompt_tokens=int(most["prompt"] + x)), 1),
        (lambda x: dict(prompt_tokens=int(most["visual"] + x), visual_tokens=int(most["visual"] + x)), 1),
        (lambda x: dict(response_tokens=int(most["response"] + x)), 1),
        (lambda x: dict(kv_cache_gib=most["kv_gib"] + x), 0.25),
    ):
        assert peak(**fields_of(0)) <= limit < peak(**fields_of(step))
    assert set(plan.budgets(p, 1 * GIB).values()) == {0}


@pytest.mark.parametrize(
    "name, world, gib",
    [("3b", 1, 141), ("3b", 4, 80), ("7b", 2, 80), ("7b", 2, 141), ("32b", 8, 80), ("32b", 8, 141), ("72b", 16, 141)],
)
def test_choose_fits_and_no_smaller_rollout_degree_does(name, world, gib):
    config = configs.load_config(f"qwen2.5-vl-{name}")
    s = plan.choose(config, world, gib * GIB, 0, Workload())
    w = replace(
        Workload(), micro_tokens=s.micro_tokens, kv_cache_gib=s.kv_cache_gib, max_num_seqs=s.max_num_seqs,
        max_num_batched_tokens=s.max_num_batched_tokens, chunk_mib=s.chunk_mib,
    )  # fmt: skip
    policy = MemoryConfig(activations=s.activations, keep_tokens=s.keep_tokens, recompute_vision=s.recompute_vision)
    again = plan.plan(config, world, s.train_tp, s.rollout_tp, w, policy)
    assert again.peak_bytes == s.plan.peak_bytes <= gib * GIB * (1 - plan.RESERVE)
    assert set(s.reasons) >= {f.name for f in fields(s)} - {"plan", "reasons", "offload_gib"}
    for train_tp, rollout_tp in product([1, 2, 4, 8], repeat=2):
        if rollout_tp < s.rollout_tp and train_tp % rollout_tp == 0 and world % train_tp == 0:
            smallest = Workload(micro_tokens=2048, max_num_seqs=8, max_num_batched_tokens=4096)
            try:
                p = plan.plan(config, world, train_tp, rollout_tp, smallest, MemoryConfig(activations="recompute"))
            except ValueError:
                continue  # more degrees than key/value heads
            assert p.peak_bytes > gib * GIB * (1 - plan.RESERVE)


def test_choose_takes_the_papers_degrees_where_its_model_just_fits():
    """Where rollout TP 2 just does not fit any more, however small passes and KV cache are."""
    config, smallest = configs.load_config("qwen2.5-vl-32b"), Workload(micro_tokens=2048, max_num_seqs=8)
    p = plan.plan(config, 8, 8, 2, smallest, MemoryConfig(activations="recompute"))
    limit = math.ceil(p.peak_bytes / (1 - plan.RESERVE))
    assert 75 * GIB < limit < 80 * GIB
    s = plan.choose(config, 8, limit, 0, Workload())
    assert (s.train_tp, s.rollout_tp, s.activations, s.micro_tokens) == (8, 2, "recompute", 2048)
    s = plan.choose(config, 8, limit - 2, 0, Workload())
    assert (s.train_tp, s.rollout_tp, s.activations, s.keep_tokens) == (8, 4, "keep", 4096)  # one prompt
    tight = s.plan.peak_bytes / (1 - plan.RESERVE / 2)  # would fit, but into half of the reserve
    assert plan.choose(config, 8, tight, 0, Workload()).plan.peak_bytes <= tight * (1 - plan.RESERVE)


def test_layers_are_computed_again_only_where_nothing_fits_without():
    """12k prompts with 32B on 8 x 80 GiB: not without it at any degree. The paper's 8k prompt and 2k response do."""
    config, w = configs.load_config("qwen2.5-vl-32b"), Workload(prompt_tokens=12288, response_tokens=2048)
    s = plan.choose(config, 8, 80 * GIB, 0, w)
    assert (s.train_tp, s.activations, s.recompute_layers) == (8, "recompute", True)
    assert "nothing fits without" in s.reasons["recompute_layers"]
    for rollout_tp, kind in product([1, 2, 4, 8], ["keep", "recompute"]):
        policy, smallest = MemoryConfig(kind), replace(w, max_num_seqs=8, micro_tokens=2048)
        assert plan.plan(config, 8, 8, rollout_tp, smallest, policy).peak_bytes > 80 * GIB * (1 - plan.RESERVE)
    assert not plan.choose(config, 8, 80 * GIB, 0, replace(w, prompt_tokens=8192)).recompute_layers
    given = plan.choose(config, 8, 80 * GIB, 0, Workload(), MemoryConfig(recompute_layers=True))
    assert given.recompute_layers and given.plan.policy.recompute_layers
    p = plan.plan(config, 8, 8, 4, w, MemoryConfig(activations="recompute"))
    changes, fixed = plan.cheapest(p, 80 * GIB)
    assert [change.text for change in changes] == ["--memory.recompute-layers"] and fixed.policy.recompute_layers


def test_the_vision_tower_is_computed_again_before_fewer_prompts_are_kept():
    p = plan.plan(configs.load_config("qwen2.5-vl-7b"), 2, 2, 1, Workload(), MemoryConfig())
    limit = p.replan(recompute_vision=True).peak_bytes
    changes, fixed = plan.cheapest(p.replan(chunk_mib=16.0, kv_cache_gib=1.0), limit)
    assert [change.text for change in changes] == ["--memory.recompute-vision"] and fixed.policy.recompute_vision


def test_choose_keeps_as_many_prompts_as_fit():
    config, w = configs.load_config("qwen2.5-vl-7b"), Workload(prompt_tokens=1500, response_tokens=600)
    s = plan.choose(config, 2, 141 * GIB, 0, w, given=dict(train_tp=2))
    assert s.activations == "keep" and s.keep_tokens % 1500 == 0 and s.keep_tokens >= s.micro_tokens
    assert s.plan.policy.keep_tokens == s.keep_tokens < 32 * 1500
    room = 141 * GIB * (1 - plan.RESERVE)
    assert s.plan.peak_bytes <= room < s.plan.replan(keep_tokens=s.keep_tokens + 1500).peak_bytes
    assert f"{s.keep_tokens // 1500} of the 32 prompts" in s.reasons["keep_tokens"]
    assert s.recompute_vision  # so more of them: with the tower's activations too
    whole = plan.choose(config, 2, 141 * GIB, 0, w, given=dict(train_tp=2, recompute_vision=False))
    assert not whole.recompute_vision and 1.5 * whole.keep_tokens < s.keep_tokens
    some = plan.choose(config, 2, 141 * GIB, 0, replace(w, prompts=18), given=dict(train_tp=2))
    assert (some.activations, some.keep_tokens, some.recompute_vision) == ("keep", 0, True)  # all of them
    text = plan.choose(config, 2, 141 * GIB, 0, replace(w, visual_tokens=0), given=dict(train_tp=2))
    assert not text.recompute_vision  # there is nothing to spare
    few = plan.choose(config, 2, 141 * GIB, 0, replace(w, prompts=8), given=dict(train_tp=2))
    assert (few.activations, few.keep_tokens) == ("keep", 0)  # all of them
    serial = plan.choose(config, 2, 141 * GIB, 0, replace(w, overlap="none"), given=dict(train_tp=2))
    assert (serial.activations, serial.keep_tokens) == ("keep", 0)  # one micro-batch at a time


def test_chunks_are_loaded_ahead_only_where_that_is_asked_for():
    config, w = configs.load_config("qwen2.5-vl-7b"), Workload(prompt_tokens=1500, response_tokens=600)
    plain, asked = (plan.choose(config, 2, 141 * GIB, 0, replace(w, ahead_gib=gib)).plan for gib in (0.0, 40.0))
    assert (plain.workload.ahead_gib, asked.workload.ahead_gib) == (0, 40)
    ahead = asked.peak("3").bytes["optimizer_state"] - plain.peak("3").bytes["optimizer_state"]
    assert 39 * GIB < ahead <= 40 * GIB and asked.peak_bytes <= 141 * GIB * (1 - plan.RESERVE)
    for name in ("state_offload", "chunked_optimizer"):
        with pytest.raises(ValueError, match="--ahead-gib 2.0: expected 0: no chunks come from the host"):
            plan.plan(config, 2, 2, 1, replace(w, ahead_gib=2.0), MemoryConfig(**{name: False}))


def test_loading_ahead_is_given_up_first():
    config = configs.load_config("qwen2.5-vl-7b")
    p = plan.plan(config, 2, 2, 1, Workload(ahead_gib=40.0), MemoryConfig(activations="recompute"))
    less = p.replan(ahead_gib=0.0)
    assert less.peak_bytes < p.peak_bytes
    changes, fixed = plan.cheapest(p, less.peak_bytes)
    assert [change.text for change in changes] == ["--optimizer.ahead-gib 0"] and fixed.peak_bytes == less.peak_bytes


def test_choose_leaves_what_is_given():
    """Every value as it is, in the plan too; the rest follows from it."""
    config, w = configs.load_config("qwen2.5-vl-7b"), Workload(prompt_tokens=1500, response_tokens=600)
    free = plan.choose(config, 2, 141 * GIB, 0, w)
    assert free.train_tp == 1 and "as given" not in free.reasons.values()

    def chosen(**given) -> plan.Settings:
        s = plan.choose(config, 2, 141 * GIB, 0, w, given=given)
        for name, value in given.items():
            assert getattr(s, name) == value and s.reasons[name] == "as given"
            owner = next(x for x in (s.plan, s.plan.workload, s.plan.policy) if hasattr(x, name))
            assert getattr(owner, name) == value
        assert [name for name, reason in s.reasons.items() if reason == "as given"] == [
            n for n in s.reasons if n in given
        ]
        return s

    s = chosen(train_tp=2, rollout_tp=1)  # with the settings for train TP 1 most of the memory would stay empty
    p = s.plan.replan(**{name: getattr(free, name) for name in ("micro_tokens", "activations", "keep_tokens")})
    assert s.plan.peak_bytes > p.peak_bytes and s.plan.peak_bytes > 0.9 * (1 - plan.RESERVE) * 141 * GIB
    chosen(rollout_tp=2)
    chosen(activations="recompute", max_num_seqs=24, kv_cache_gib=3.3, max_num_batched_tokens=6000, chunk_mib=32.0)
    assert chosen(micro_tokens=3000).max_num_seqs == free.max_num_seqs
    assert chosen(keep_tokens=6000, micro_tokens=3000).activations == "keep"
    assert chosen(activations="keep", train_tp=2).keep_tokens > 0
    assert chosen(activations="offload").offload_gib > 0
    assert chosen(recompute_layers=True).activations == "keep"  # of a layer only its input
    assert plan.choose(config, 2, 141 * GIB, 0, w, given=dict(train_tp=0)).train_tp == 2


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(train_tp=3), "--train-tp 3: expected a divisor of 2 GPUs"),
        (dict(train_tp=1, rollout_tp=2), "--train-tp 1 must be a positive multiple of --rollout-tp 2"),
        (dict(rollout_tp=0), "--rollout-tp 0: expected 1 or more"),
        (dict(micro_tokens=0), "--micro-tokens 0: expected 1 or more"),
        (dict(keep_tokens=-1), "--memory.keep-tokens -1"),
        (dict(activations="keep", keep_tokens=0, recompute_layers=False), "nearest is .* keep, which does not fit"),
        (dict(kv_cache_gib=140.0), "does not fit: .* rollout_kv"),
    ],
)
def test_choose_says_why_it_cannot_leave_what_is_given(given, message):
    config, w = configs.load_config("qwen2.5-vl-7b"), Workload(prompt_tokens=1500, response_tokens=600)
    with pytest.raises(ValueError, match=message):
        plan.choose(config, 2, 141 * GIB, 0, w, given=given)


def test_keeping_fewer_prompts_is_named_before_keeping_none():
    config = configs.load_config("qwen2.5-vl-7b")
    p = plan.plan(config, 2, 2, 1, Workload(), MemoryConfig(recompute_vision=True))
    half = p.replan(keep_tokens=16 * 4096).peak_bytes
    for limit, tokens in ((half, 16 * 4096), (half - 1, 8 * 4096)):
        changes, fixed = plan.cheapest(p.replan(chunk_mib=16.0, kv_cache_gib=1.0), limit)
        assert [change.text for change in changes] == [f"--memory.keep-tokens {tokens}"]
        assert fixed.policy.keep_tokens == tokens


def test_offloading_needs_room_on_the_host_for_what_waits():
    """Of all groups when prefixes run ahead, else of a micro-batch."""
    config, policy = configs.load_config("qwen2.5-vl-7b"), MemoryConfig(activations="offload")
    ahead = plan.plan(config, 2, 2, 1, Workload(visual_tokens=0, micro_tokens=8192), policy)
    serial = ahead.replan(overlap="none")
    one = plan.OFFLOAD_FACTOR * plan.prefix_bytes(config, ahead.workload, 2)
    assert ahead.host["offloaded activations"] == pytest.approx(32 * one)
    assert serial.host["offloaded activations"] == pytest.approx(2 * one)


def test_choose_heeds_the_host_and_says_why_it_cannot():
    config = configs.load_config("qwen2.5-vl-7b")
    wide = plan.choose(config, 8, 141 * GIB, 0, Workload())
    narrow = plan.choose(config, 8, 141 * GIB, wide.plan.host_bytes - GIB, Workload())
    assert narrow.train_tp > wide.train_tp and narrow.plan.host_bytes < wide.plan.host_bytes
    with pytest.raises(ValueError, match="1 GPU of 40 GiB.*nearest is train TP 1.*does not fit: phase"):
        plan.choose(config, 1, 40 * GIB, 0, Workload())
    with pytest.raises(ValueError, match="--prompts 3: expected a multiple of the 8 replicas|does not divide"):
        plan.choose(configs.load_config("tiny"), 8, 80 * GIB, 0, Workload(prompts=3, prompt_tokens=64, visual_tokens=0))


# ---- command line ----------------------------------------------------------------------------------------------------


def _run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "plan.py", *arguments]
    return subprocess.run(command, cwd=Path(plan.__file__).parent, capture_output=True, text=True, timeout=60)


def test_command_line_answers_fast_and_needs_neither_megatron_nor_vllm():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = _run("--model", "qwen2.5-vl-32b", "--train-tp", "8", "--rollout-tp", "4")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert done.returncode == 0 and seconds < 15, (
        seconds,
        done.stderr,
    )  # of a core: 4.5; a shared machine takes longer
    for text in (
        "actor: FP32 Adam moments",
        "prefix_activations",
        "Cheapest change: ",
        "largest that fit",
        "host, GiB",
    ):
        assert text in done.stdout
    check = "import sys, plan; sys.exit(any(m.partition('.')[0] in ('megatron', 'vllm') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", check], cwd=Path(plan.__file__).parent).returncode == 0


def test_without_degrees_it_says_how_many_gpus(capsys):
    plan.main(["--model", "qwen2.5-vl-7b", "--hbm-gib", "60"])
    printed = capsys.readouterr().out
    assert "1 GPU of 60 GiB, 5% in reserve: nearest is" in printed and "2 GPUs of 60 GiB are enough" in printed
    assert "\nfits: " in printed


def test_what_is_not_at_its_default_is_as_given(capsys):
    plan.main(
        ["--model", "qwen2.5-vl-7b", "--hbm-gib", "141", "--micro-tokens", "4096", "--memory.keep-tokens", "8192"]
    )
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for name, value in (("micro_tokens", "4096"), ("keep_tokens", "8192")):
        assert [name, value, "as", "given"] in lines
    assert any(line[:2] == ["activations", "keep"] for line in lines)


def test_table_is_markdown(capsys):
    plan.main(["--table"])
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2 + sum(len(counts) for counts in plan.COUNTS.values())
    assert all(row.count("|") == 6 for row in rows)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "qwen9"], "--model qwen9: expected one of tiny, qwen2.5-vl-3b"),
        (["--train-tp", "8", "--rollout-tp", "3"], "--train-tp 8 must be a positive multiple of --rollout-tp 3"),
        (["--train-tp", "3"], "--train-tp 3 does not divide the model's 8 key/value heads"),
        (["--gpus", "6", "--train-tp", "4"], "--train-tp 4: expected a divisor of 6 GPUs"),
        (["--gpus", "16", "--train-tp", "8", "--prompts", "3"], "--prompts 3: expected a multiple of the 2 replicas"),
        (["--rollout-tp", "4"], "--rollout-tp 4: expected --train-tp beside it"),
        (["--train-tp", "8", "--micro-tokens", "0"], "--micro-tokens 0: expected 1 or more"),
        (["--train-tp", "8", "--response-tokens", "0"], "--response-tokens 0: expected 1 or more"),
        (["--train-tp", "8", "--visual-tokens", "9999"], "--visual-tokens 9999: expected 0 to the prompt's 4096"),
        (["--hbm-gib", "0"], "--hbm-gib 0.0: expected above 0"),
        (["--gpus", "-1"], "--gpus -1: expected 0 (automatic) or more"),
        (["--train-tp", "8", "--memory.offload-gib", "-1"], "--memory.offload-gib -1"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        plan.main(arguments)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.startswith("error: ") and message in error and error.count("\n") == 1


def test_help_explains_every_field(capsys):
    with pytest.raises(SystemExit):
        plan.main(["--help"])
    text = capsys.readouterr().out
    for name in [f.name for cls in (plan.Args, Workload) for f in fields(cls)]:
        if name not in ("workload", "memory"):
            flag = name.replace("_", "-")
            assert f"--{flag} " in text or f"--no-{flag} " in text, name


if __name__ == "__main__":
    _measure()
