"""Run under torchrun by test_model.py: prefix and suffixes against transformers' ordinary full-sequence forward and
backward."""

import json
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from test_logprobs import LOGITS, logits_by_hand
from transformers import Qwen2_5_VLForConditionalGeneration

import configs
import hardware
import model as models
import vision
import weights
from arena import Arena
from data import Media, Sample, patchify
from logprobs import TargetLogprobs

TEMPERATURE = 0.7
# t, h, w
SIZES = {"video": (8, 56, 84), "image": (1, 56, 56), "wide video": (6, 140, 252), "wide image": (1, 252, 140)}


def make_sample(config, kinds: list[str], seed: int, words: int = 9) -> Sample:
    """A prompt with the media given (see SIZES), random pixels and random text around them."""
    import numpy as np

    rng = np.random.default_rng(seed)
    ids, media = [1, 70, 71], []
    for kind in kinds:
        frames = rng.integers(0, 256, (*SIZES[kind], 3), dtype=np.uint8)
        kind = kind.split()[-1]
        media.append(Media(kind, frames, 3.0))
        t, h, w = media[-1].grid
        pad = config.video_token_id if kind == "video" else config.image_token_id
        ids += [config.vision_start_token_id, *[pad] * (t * h * w // 4), config.vision_end_token_id]
    ids += rng.integers(60, 300, words).tolist()
    grid = torch.tensor([m.grid for m in media], dtype=torch.int64).reshape(-1, 3)
    seconds = [2 / m.fps if m.kind == "video" else 1.0 for m in media]
    return Sample(0, "test", ids, torch.tensor(ids), media, grid, seconds, "", "", "", [])


def reference_logprobs(hf, config, sample: Sample, responses: torch.Tensor) -> torch.Tensor:
    """[N, S] by transformers: every response after its own copy of the prompt, in one ordinary pass."""
    n, s = responses.shape
    ids = torch.cat([sample.input_ids.expand(n, -1), responses], 1)
    prompt = models.positions(sample.input_ids.tolist(), sample.grid_thw.tolist(), sample.second_per_grid, config)
    tail = int(prompt.max()) + 1 + torch.arange(s)
    position = torch.cat([prompt[:, None].expand(3, n, -1), tail.expand(3, n, s)], -1)
    media: dict = {"pixel_values_videos": [], "video_grid_thw": [], "pixel_values": [], "image_grid_thw": []}
    for medium, grid in zip(sample.media, sample.grid_thw, strict=True):
        video = medium.kind == "video"
        names = ("pixel_values_videos", "video_grid_thw") if video else ("pixel_values", "image_grid_thw")
        media[names[0]].append(patchify(torch.from_numpy(medium.frames)))
        media[names[1]].append(grid)
    inputs = {k: (torch.cat(v) if k.startswith("pixel") else torch.stack(v)) for k, v in media.items() if v}
    inputs = {k: v.repeat(n, 1) for k, v in inputs.items()}
    inputs = {k: v.to(hf.dtype) if k.startswith("pixel") else v for k, v in inputs.items()}
    logits = hf(input_ids=ids, position_ids=position, use_cache=False, **inputs).logits[:, -s - 1 : -1].float()
    bias = torch.zeros(logits.shape[-1])
    bias[configs.forbidden_ids(config)] = -100.0
    return ((logits + bias) / TEMPERATURE).log_softmax(-1).gather(-1, responses[..., None])[..., 0]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)).item()


def case(source: Path, kinds: list[str], qkv: str, dtype: torch.dtype, logprob_bar: float, gradient_bar: float) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    config = configs.load_config(str(source))
    plan = weights.layout(config, world, 1, qkv, dtype)
    arena = Arena({"snapshot": plan.nbytes} | ({"fused": weights.fused_nbytes(plan)} if qkv == "fused" else {}))
    snapshot = weights.Snapshot(
        plan, rank, arena.acquire("snapshot"), arena.acquire("fused") if qkv == "fused" else None, dist.group.WORLD
    )
    weights.load_hf(snapshot, source)
    actor = models.QwenVL(config, dtype, qkv)
    actor.bind({s.name: s.parameter(snapshot.flat(s)) for s in snapshot.shards}, requires_grad=True)
    hf = Qwen2_5_VLForConditionalGeneration.from_pretrained(source, dtype=dtype)

    sample, other = make_sample(config, kinds, seed=3), make_sample(config, kinds[2:], seed=4, words=5)
    token = replace(make_sample(config, [], seed=4), input_ids=other.input_ids[-1:])
    samples = [sample, token, other]  # the second is a prompt of one token
    lengths = [[6, 1, 0, 3], [2], [3, 5]]
    generator = torch.Generator().manual_seed(2)
    responses = [torch.randint(60, 300, (len(own), max(own)), generator=generator) for own in lengths]
    masks = [torch.arange(max(own)) < torch.tensor(own)[:, None] for own in lengths]
    factors = [torch.randn(mask.shape, generator=generator) * mask for mask in masks]

    def backward(keep: bool) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Log-probabilities, and the gradients at the boundary; the parameters' are left with them."""
        prefix = actor.prefix(samples, keep)
        ours = actor.suffix(prefix, responses, lengths, TEMPERATURE)
        sum((a * b).sum() for a, b in zip(ours, factors, strict=True)).backward()
        boundary = [leaf.grad for leaf in prefix.leaves()]
        attached = [weakref.ref(tensor) for pair in (prefix.attached or {}).values() for tensor in pair]
        actor.prefix_backward(prefix)
        assert not any(ref() is not None for ref in attached), "keys and values outlive the prefix's backward"
        return ours, boundary

    ours, boundary = backward(keep=True)
    check_shares(actor, samples)
    theirs = [reference_logprobs(hf, config, s, r) for s, r in zip(samples, responses, strict=True)]
    sum((a * b).sum() for a, b in zip(theirs, factors, strict=True)).backward()
    for i, mask in enumerate(masks):
        assert not ours[i][:, 1:][~mask[:, 1:]].any(), "padding is not zero"
        gap = (ours[i] - theirs[i])[mask].abs().max().item()
        assert gap <= logprob_bar, f"{kinds} {qkv} {dtype} prompt {i}: log-probabilities differ by {gap}"

    kept = {name: parameter.grad.clone() for name, parameter in actor.named_parameters() if parameter.grad is not None}
    for layers, keep in ((False, False), (True, True), (True, False)):
        actor.zero_grad()
        actor.recompute_layers = layers
        again, edge = backward(keep)
        grads = {name: parameter.grad for name, parameter in actor.named_parameters() if parameter.grad is not None}
        assert grads.keys() == kept.keys() and all(torch.equal(a, b) for a, b in zip(again, ours, strict=True))
        for name, gradient in kept.items():
            assert torch.equal(gradient, grads[name]), f"{name}: computing again {layers, keep} changed its gradient"
        for a, b in zip(boundary, edge, strict=True):
            assert (a is b is None) or torch.equal(a, b), f"computing again {layers, keep} changed the boundary's"
    only_layer_inputs_are_saved(actor, sample, responses[0], lengths[0])
    actor.recompute_layers = False

    with torch.no_grad():
        frozen = actor.prefix(samples)
        assert frozen.attached is None
        again = actor.suffix(frozen, responses, lengths, TEMPERATURE)
        assert all(torch.equal(a, b) for a, b in zip(again, ours, strict=True))
    compare_gradients(actor, dict(hf.named_parameters()), weights.table(config, qkv), plan, gradient_bar)
    nothing_but_a_token(actor, samples[1], ours[1], responses[1], lengths[1], logprob_bar)
    responses_share_their_prefix(actor, config)


def check_shares(actor, samples: list) -> None:
    """After a backward pass: a rank without a slice has no gradient of the vision tower, every other one has."""
    grid = torch.cat([sample.grid_thw for sample in samples]).tolist()
    own = vision.share_out(grid, dist.get_world_size())[dist.get_rank()]
    for name, parameter in actor.named_parameters():
        if vision.is_partial(name):
            assert (parameter.grad is not None) == bool(own), f"{name}: this rank encodes {own} of {grid}"


def only_layer_inputs_are_saved(actor, sample: Sample, responses: torch.Tensor, lengths: list[int]) -> None:
    """With recompute_layers what autograd saves inside each layer and block is its input, nothing else; without, more.
    The last layer of a prefix pass is never computed again."""
    calls, original = [], {}  # of each layer or block, whether only its input was saved

    def watch(owner, name: str, hidden_of) -> None:
        function = original[owner, name] = getattr(owner, name)

        def watched(*args, **kwargs):
            saved = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t.detach(), id):
                try:
                    return function(*args, **kwargs)
                finally:
                    calls.append(saved == [hidden_of(args, kwargs).data_ptr()])

        setattr(owner, name, watched)

    encodes = bool(vision.share_out(sample.grid_thw.tolist(), dist.get_world_size())[dist.get_rank()])
    blocks, layers = len(actor.vision.blocks) * encodes, actor.lm.decoder.layers
    watch(actor.vision, "_block", lambda args, kwargs: args[2])
    for layer in layers:
        watch(layer, "forward", lambda args, kwargs: kwargs["hidden_states"])
    for again in (True, False):
        actor.recompute_layers = again
        prefix = actor.prefix([sample])
        assert calls == [again] * (blocks + len(layers) - 1) + [False]
        calls.clear()
        actor.suffix(prefix, [responses], [lengths], TEMPERATURE)
        assert calls == [again] * len(layers)
        calls.clear()
    for (owner, name), function in original.items():
        setattr(owner, name, function)


def nothing_but_a_token(actor, sample: Sample, beside, responses, lengths: list[int], bar: float) -> None:
    """A micro-batch without any prefix gives what the prompt got beside others; one without any response gives
    zeros."""
    alone = actor.suffix(actor.prefix([sample]), [responses], [lengths], TEMPERATURE)[0]
    assert (alone - beside).abs().max() <= bar
    actor.zero_grad()
    prefix = actor.prefix([sample])
    empty = actor.suffix(prefix, [responses[:, :1]], [[0]], TEMPERATURE)[0]
    (empty * 0).sum().backward()
    actor.prefix_backward(prefix)
    assert not any(p.grad is not None and p.grad.any() for p in actor.parameters())


def responses_share_their_prefix(actor, config) -> None:
    """What one more response makes autograd keep does not depend on the prompt's length."""

    def saved_bytes(words: int, n: int) -> int:
        storages = {}

        def pack(tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor.detach()  # or an output would hold its own node

        prefix = actor.prefix([make_sample(config, [], seed=5, words=words)])
        responses = torch.full((n, 4), 70)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            kept = actor.suffix(prefix, [responses], [[4, 2] * (n // 2)], TEMPERATURE)
        assert kept[0].requires_grad
        return sum(storages.values())

    short, long = ([saved_bytes(words, n) for n in (2, 4, 8)] for words in (9, 99))
    assert short[2] - short[1] == 2 * (short[1] - short[0]) > 0, "not linear in the number of responses"
    assert long[2] - long[1] == short[2] - short[1], "every response keeps a copy of its prefix"


def logprobs_over_the_ranks() -> None:
    """Each rank has its part of the vocabulary, of which one may be nothing but padding."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for case in LOGITS:
        logits, bias, targets, weight, logprobs, gradient = logits_by_hand(*case)
        part = logits.chunk(world, 1)[rank].clone().requires_grad_()
        got = TargetLogprobs.apply(part * 1, targets, bias.chunk(world)[rank], case[2], dist.group.WORLD)
        (got * weight).sum().backward()
        assert relative(got, logprobs) <= 1e-6, f"{case}: log-probabilities"
        assert relative(part.grad, gradient.chunk(world, 1)[rank]) <= 1e-6, f"{case}: gradient"


def compare_gradients(actor, theirs: dict, table: list, plan, bar: float) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, parameter in actor.named_parameters():
        rows = [row for row in table if row.train == name]
        full = [
            theirs[row.hf.replace("model.", "model.language_model.", 1).replace("visual.", "model.visual.")]
            for row in rows
        ]
        if all(p.grad is None for p in full):  # a text-only prompt does not reach the vision tower
            assert parameter.grad is None, name
            continue
        if vision.is_partial(name):
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad)
        pieces = [
            p.grad if row.axis is None else p.grad.chunk(world, row.axis)[rank]
            for row, p in zip(rows, full, strict=True)
        ]
        if len(pieces) == 3:  # Megatron's order by head group
            groups = plan.groups // world
            pieces = [piece.reshape(groups, -1, *piece.shape[1:]) for piece in pieces]
            pieces = [torch.cat(pieces, 1).flatten(0, 1)]
        error = relative(parameter.grad, pieces[0])
        assert error <= bar, f"gradient of {name}: {error:.2e} relative to the ordinary backward"


def main() -> None:
    torch.set_num_threads(1)
    hardware.answer_cuda_queries()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    logprobs_over_the_ranks()
    for source, kinds, qkv, dtype, logprob_bar, gradient_bar in json.loads(sys.argv[1]):
        case(Path(source), kinds, qkv, getattr(torch, dtype), logprob_bar, gradient_bar)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
