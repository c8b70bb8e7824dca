"""rollout.py with a real engine: one copy of the weights, the trainer's policy, caches, reproducibility, clean ends."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

import configs
import model as models
import rollout
import weights
from arena import Arena
from rollout import Binding, EngineClient, EngineDied, Request, RolloutConfig

# B prompts, N responses per prompt, P prompt tokens, S response tokens, V vocabulary.
CONFIG = RolloutConfig(n=16, max_new_tokens=24, max_num_seqs=8, kv_cache_gib=1 / 32, silence_timeout_s=60)
MAX_PROMPT = 160
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "x", "OMP_NUM_THREADS": "1"}
QUESTION = "<|im_start|>user\n{}Which color is it?<|im_end|>\n<|im_start|>assistant\n"


class Policy:
    """A tiny random model in an arena, as a trainer owns it, and transformers' model with the same weights."""

    def __init__(self, root: Path, vocab: int = 384, tied: bool = False, q: int = 1, qkv: str = "split"):
        self.model_dir = configs.make_model_dir("tiny", root)
        path = self.model_dir / "config.json"
        changed = json.loads(path.read_text()) | {"tie_word_embeddings": tied}
        changed["text_config"]["vocab_size"] = vocab
        path.write_text(json.dumps(changed))
        self.config = configs.load_config(str(self.model_dir))
        self.plan, self.binding, (self.arena,) = self.share(1, q, qkv)
        self.bytes = self.arena.acquire("snapshot")
        self.views = weights.engine_views(self.bytes, self.plan)
        self.processor = AutoProcessor.from_pretrained(self.model_dir)

    def share(self, tp: int, q: int = 1, qkv: str = "split") -> tuple[weights.Layout, Binding, list[Arena]]:
        """The same initial weights, laid out for engines of `tp` workers, each with its own arena, and a trainer of
        q·tp ranks."""
        plan = weights.layout(self.config, q * tp, tp, qkv, torch.float32)
        arenas = [Arena({"snapshot": plan.nbytes}) for _ in range(tp)]
        fused = torch.zeros(weights.fused_nbytes(plan), dtype=torch.uint8)
        for rank, arena in enumerate(arenas):
            weights.init_random(weights.Snapshot(plan, q * rank, arena.acquire("snapshot"), fused), 3, self.config)
        handles = tuple(arena.handle("snapshot") for arena in arenas)
        return plan, Binding(str(self.model_dir), handles, plan.nbytes, q * tp, qkv, "float32"), arenas

    def prompt(self, text: str, frames: np.ndarray | None = None, fps: float = 2.0) -> SimpleNamespace:
        """A prompt for both sides, expanded by transformers' processor. frames [T, H, W, 3] uint8."""
        tokens, media, inputs = self.processor.tokenizer(text)["input_ids"], [], {}
        if frames is not None:
            kind = "video" if len(frames) > 1 else "image"
            media = [SimpleNamespace(kind=kind, frames=frames, fps=fps)]
            about = {"fps": fps, "total_num_frames": len(frames), "frames_indices": list(range(len(frames)))}
            inputs = (
                {"videos": [frames], "video_metadata": [about], "do_sample_frames": False}
                if kind == "video"
                else {"images": list(frames)}
            )
        made = dict(self.processor(text=[text], return_tensors="pt", **inputs))
        grid = made.get("video_grid_thw", made.get("image_grid_thw", torch.zeros(0, 3, dtype=torch.int64)))
        seconds = [2 / fps] if frames is not None else []
        return SimpleNamespace(
            ids=tokens, media=media, made=made, grid=grid, seconds=seconds, expanded=made["input_ids"][0].tolist()
        )

    def positions(self, prompt, length: int) -> torch.Tensor:
        """[3, P + S] for a prompt followed by text, from model.py's rule."""
        start = models.positions(prompt.expanded, prompt.grid.tolist(), prompt.seconds, self.config)
        rest = start[:, -1:] + torch.arange(1, length - len(prompt.expanded) + 1)
        return torch.cat([start, rest], dim=1)

    @torch.no_grad()
    def logprobs(self, prompt, tokens: list[int], temperature: float) -> torch.Tensor:
        """transformers' log-probabilities [S] of a response, by the arena's present weights, with given positions."""
        model = Qwen2_5_VLForConditionalGeneration(self.config).float().eval()
        values = {}
        for slot in self.plan.slots:
            tensor = slot.tensor(self.bytes, torch.float32)
            name = slot.logical.hf.removeprefix("model.")
            name = (
                name
                if name == "lm_head.weight"
                else f"model.{'' if name.startswith('visual') else 'language_model.'}{name}"
            )
            values[name] = tensor.t() if slot.logical.axis == 1 else tensor
        values.setdefault("lm_head.weight", values["model.language_model.embed_tokens.weight"])  # tied
        model.load_state_dict(values)
        ids = torch.tensor([prompt.expanded + tokens])
        pixels = {k: v for k, v in prompt.made.items() if "pixel" in k or "grid_thw" in k}
        pos = self.positions(prompt, ids.shape[1])[:, None]  # [3, 1, P + S]
        logits = model(input_ids=ids, position_ids=pos, use_cache=False, **pixels).logits[
            0, len(prompt.expanded) - 1 : -1
        ]
        logits[:, configs.forbidden_ids(self.config)] += models.FORBIDDEN_BIAS
        return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def clip(frames: int, side: int = 56, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (frames, side, side, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return Policy(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def engine(policy, tmp_path_factory):
    """One engine for the whole file, started as a torchrun rank would: with torchrun's variables in the environment."""
    before = dict(os.environ)
    os.environ.update(TORCHRUN)
    try:
        forbidden = configs.forbidden_ids(policy.config)
        run_dir = tmp_path_factory.mktemp("run")
        client = EngineClient(
            CONFIG, policy.binding, engine=0, max_prompt_tokens=MAX_PROMPT, forbidden_ids=forbidden, run_dir=run_dir
        )
    finally:
        os.environ.clear()
        os.environ.update(before)
    try:
        ready = client.ready()
        print(f"\nengine ready after {ready['start_s']:.1f} s")
        yield client
    finally:
        client.stop()


@pytest.fixture(autouse=True)
def published(request, policy):
    """Leave the weights and the engine's caches as they were for the next test."""
    before = policy.bytes.clone()
    yield
    policy.bytes.copy_(before)
    if "engine" in request.fixturenames and (client := request.getfixturevalue("engine")).died is None:
        client.publish(0)


def generate(engine, *requests: Request):
    engine.generate(requests)
    return engine.wait()


def greedy(engine, prompt, name: str = "greedy"):
    (response,) = generate(engine, Request(name, prompt.ids, prompt.media, 1, seed=0, temperature=0.0))
    return response


# ---- one copy --------------------------------------------------------------------------------------------------------


def test_a_message_arrives_with_its_arrays():
    ours, theirs = (Connection(end.detach()) for end in socket.socketpair())
    frames = np.random.default_rng(0).integers(0, 255, (3, 400, 400, 3), dtype=np.uint8)  # more than a socket holds
    media = [("image", frames[:1], 1.0), ("video", frames, 2.5), ("video", frames[:0], 1.0)]
    message = "prepare", [Request("a", [1, 2], media, 2, 7)], {"one": np.float32(1)}
    parts = rollout.pack_message(message) + rollout.pack_message(("stop",))
    sender = threading.Thread(target=lambda: [ours.send_bytes(part) for part in parts])
    sender.start()
    name, (request,), rest = rollout.receive_message(theirs)
    assert (name, rest, rollout.receive_message(theirs)) == ("prepare", {"one": 1}, ("stop",))
    sender.join()
    assert [(kind, fps) for kind, _, fps in request.media] == [(kind, fps) for kind, _, fps in media]
    for (_, got, _), (_, expected, _) in zip(request.media, media, strict=True):
        assert np.array_equal(got, expected) and got.flags.writeable and got.shape == expected.shape
    ours.close()
    with pytest.raises(EOFError):
        rollout.receive_message(theirs)


def test_every_parameter_lies_in_the_snapshot(engine, policy):
    (worker,) = engine.report()
    low, size = worker["snapshot"]
    assert size == policy.plan.nbytes and worker["outside"] == []
    assert worker["loading"]["parameter_bytes"] == 0
    assert worker["parameters"].keys() == policy.views.keys()
    for name, (start, nbytes) in worker["parameters"].items():
        here = policy.views[name]
        assert (start - low, nbytes) == (here.data_ptr() - policy.bytes.data_ptr(), here.nbytes), name


def test_an_engine_starts_without_memory_for_weights(tmp_path):
    """What building the model takes does not grow with it: 136 MB here, tied, Case 3, for one of two engines."""
    policy = Policy(tmp_path, vocab=2**18, tied=True, q=2, qkv="fused")
    forbidden = configs.forbidden_ids(policy.config)
    with EngineClient(
        CONFIG, policy.binding, engine=4, max_prompt_tokens=MAX_PROMPT, forbidden_ids=forbidden, run_dir=tmp_path
    ) as client:
        client.ready()
        (worker,) = client.report()
        prompt = policy.prompt("Which?")
        response = greedy(client, prompt)
    assert worker["outside"] == [] and worker["snapshot"][1] == policy.plan.nbytes > 128 << 20
    assert worker["loading"]["parameter_bytes"] == 0 and worker["loading"]["made_bytes"] < 8 << 20  # rotary tables
    expected = policy.logprobs(prompt, response.token_ids, 1.0)
    assert (torch.tensor(response.logprobs) - expected).abs().max() <= 1e-4


def test_the_trainers_environment_is_not_inherited(engine):
    seen = Path(f"/proc/{engine.process.pid}/environ").read_text().split("\0")
    assert not {entry.partition("=")[0] for entry in seen} & TORCHRUN.keys()


def test_a_write_is_seen_without_any_call(engine, policy):
    prompt = policy.prompt("Which?")  # shorter than a KV block, so nothing of it is cached
    first = greedy(engine, prompt)
    before = policy.bytes.clone()
    for name in (
        "language_model.model.layers.1.mlp.down_proj.weight",
        "language_model.model.layers.0.self_attn.qkv_proj.weight",
    ):
        policy.views[name].neg_()
        changed = greedy(engine, prompt)
        assert changed.token_ids != first.token_ids, name
        policy.bytes.copy_(before)
        restored = greedy(engine, prompt)
        assert (restored.token_ids, restored.logprobs) == (first.token_ids, first.logprobs), name


# ---- one policy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", ["video", "image", "text"])
def test_logprobs_equal_transformers(engine, policy, kind, temperature):
    if kind == "text":
        prompt = policy.prompt(QUESTION.format(""))
    else:
        text = QUESTION.format(f"<|vision_start|><|{kind}_pad|><|vision_end|>")
        prompt = policy.prompt(text, clip(8 if kind == "video" else 1), fps=3.0)
    responses = generate(engine, Request(kind, prompt.ids, prompt.media, 3, seed=1, temperature=temperature))
    for response in responses:
        assert response.prompt_ids == prompt.expanded
        expected = policy.logprobs(prompt, response.token_ids, temperature)
        assert (torch.tensor(response.logprobs) - expected).abs().max() <= 1e-4


def test_positions_are_those_of_the_trainer_and_depend_on_the_rate(engine, policy):
    text, seen = QUESTION.format("<|vision_start|><|video_pad|><|vision_end|>"), []
    for fps in (0.5, 2.0, 3.0):
        prompt = policy.prompt(text, clip(8), fps)
        ids, positions = engine.positions(Request("positions", prompt.ids, prompt.media, 1, seed=0))
        assert ids == prompt.expanded
        assert torch.equal(positions, policy.positions(prompt, len(ids)))
        seen.append(int(positions.max()))
    assert seen[0] > seen[1] > seen[2]


def test_several_media_in_one_prompt(engine, policy):
    """Two clips of different rates and an image between them: each keeps its own metadata."""
    ids = policy.processor.tokenizer("<|video_pad|>and<|image_pad|>and<|video_pad|>?")["input_ids"]
    media = [
        SimpleNamespace(kind=k, frames=clip(t, seed=t), fps=fps)
        for k, t, fps in (("video", 4, 0.5), ("image", 1, 1.0), ("video", 6, 2.0))
    ]
    request = Request("several", ids, media, 1, seed=0)
    expanded, positions = engine.positions(request)
    grid = [[(len(m.frames) + 1) // 2, 4, 4] for m in media]
    assert torch.equal(positions, models.positions(expanded, grid, [4.0, 1.0, 1.0], policy.config))
    assert generate(engine, request)[0].prompt_ids == expanded


def test_forbidden_ids_are_never_sampled(engine, policy):
    prompt = policy.prompt("Which?")
    policy.views["language_model.lm_head.weight"].zero_()  # flat logits, hotter than any temperature
    responses = generate(engine, *(Request(str(i), prompt.ids, [], 16, seed=i, temperature=2.0) for i in range(8)))
    sampled = np.bincount([token for response in responses for token in response.token_ids], minlength=384)
    assert sampled[configs.forbidden_ids(policy.config)].sum() == 0
    allowed = np.delete(sampled, configs.forbidden_ids(policy.config))
    assert sampled.sum() > 2500 and allowed.mean() * 4 > 20  # unmasked, 4 ids would have been hit about 27 times


def test_the_end_token_stops_a_response(engine, policy):
    end, prompt = policy.config.text_config.eos_token_id, policy.prompt("Which?")
    policy.views["language_model.lm_head.weight"].zero_()  # every allowed id equally likely: 380 of them
    responses = generate(engine, *(Request(str(i), prompt.ids, [], 16, seed=i) for i in range(12)))
    stopped = [response for response in responses if response.finish_reason == "stop"]
    assert 2 <= len(stopped) <= 40  # expected 11.7 of 192
    assert all(
        r.token_ids[-1] == end and end not in r.token_ids[:-1] and len(r.logprobs) == len(r.token_ids) for r in stopped
    )
    assert all(
        r.finish_reason == "length" and len(r.token_ids) == CONFIG.max_new_tokens for r in responses if r not in stopped
    )


def test_given_lengths_are_met_and_leave_the_distribution_alone(engine, policy):
    """The end token is sampled as often as any other and ends nothing; log-probabilities count it in."""
    end, prompt, lengths = policy.config.text_config.eos_token_id, policy.prompt("Which?"), tuple(range(9, 25))
    policy.views["language_model.lm_head.weight"].zero_()  # every allowed id equally likely: 380 of them
    requests = [Request(str(i), prompt.ids, [], 16, seed=i, lengths=lengths) for i in range(8)]
    responses = generate(engine, *requests)
    assert [len(r.token_ids) for r in responses] == 8 * list(lengths)
    passed = [r for r in responses if end in r.token_ids[:-1]]
    assert passed  # 2112 tokens, so 5.6 expected
    for response in (*passed[:2], responses[3]):
        expected = policy.logprobs(prompt, response.token_ids, 1.0)
        assert (torch.tensor(response.logprobs) - expected).abs().max() <= 1e-4
    for wrong in ((5,), (5,) * 15 + (0,), (5,) * 15 + (CONFIG.max_new_tokens + 1,)):
        with pytest.raises(ValueError, match="request 0 has lengths .* expected 16 from 1 to .*max_new_tokens 24"):
            engine.generate([replace(requests[0], lengths=wrong)])


# ---- caches ----------------------------------------------------------------------------------------------------------


def test_publish_drops_encoder_features(engine, policy):
    """Without publish() the engine answers from vision features of the old weights, with it from new ones."""
    prompt = policy.prompt("<|vision_start|><|video_pad|><|vision_end|>?", clip(2))
    assert len(prompt.expanded) < CONFIG.block_tokens  # no full block, so only the encoder cache can be stale
    old = greedy(engine, prompt)
    for name, view in policy.views.items():
        if name.startswith("visual.merger"):
            view.mul_(-3)
    stale = greedy(engine, prompt)
    assert (stale.token_ids, stale.logprobs) == (old.token_ids, old.logprobs)
    engine.publish(1)
    new = greedy(engine, prompt)
    assert new.version == 1
    expected = policy.logprobs(prompt, new.token_ids, 1.0)
    assert (torch.tensor(new.logprobs) - expected).abs().max() <= 1e-4
    assert (
        policy.logprobs(prompt, old.token_ids, 1.0) - torch.tensor(old.logprobs)
    ).abs().max() > 1e-2  # they do differ


def test_publish_drops_the_prefix_cache(engine, policy):
    prompt = policy.prompt(QUESTION.format("") + "a b c d e f g h i j k l m n o p q r s t u v w x y z")
    assert len(prompt.expanded) > CONFIG.block_tokens
    greedy(engine, prompt)
    policy.views["language_model.model.layers.0.self_attn.qkv_proj.weight"].neg_()
    for publish, fresh in ((False, False), (True, True)):
        if publish:
            engine.publish(1)
        response = greedy(engine, prompt)
        gap = (torch.tensor(response.logprobs) - policy.logprobs(prompt, response.token_ids, 1.0)).abs().max()
        assert (gap <= 1e-4) == fresh, f"after publish: {publish}, gap {gap}"


# ---- generation ------------------------------------------------------------------------------------------------------


def test_seeds_reproduce(engine, policy):
    video = policy.prompt(QUESTION.format("<|vision_start|><|video_pad|><|vision_end|>"), clip(8))
    text = policy.prompt("Which?")
    requests = [Request("a", video.ids, video.media, 4, seed=5), Request("b", text.ids, [], 4, seed=6)]
    first = generate(engine, *requests)
    engine.publish(0)
    again = generate(engine, *requests)
    assert [(r.token_ids, r.logprobs) for r in first] == [(r.token_ids, r.logprobs) for r in again]
    assert [(r.request_id, r.index) for r in first] == [(name, i) for name in "ab" for i in range(4)]
    assert len({tuple(r.token_ids) for r in first}) == 8
    (alone,) = generate(engine, replace(requests[1], n=1))  # another batch, the same random stream
    assert alone.token_ids == first[4].token_ids
    other = generate(engine, replace(requests[1], seed=7))
    assert not {tuple(r.token_ids) for r in other} & {tuple(r.token_ids) for r in first}


def test_responses_stream(engine, policy):
    prompt = policy.prompt("Which?")
    engine.generate([Request(str(i), prompt.ids, [], 16, seed=i) for i in range(20)])  # 8 at once (max_num_seqs)
    arrived = []
    while not arrived:
        time.sleep(0.001)
        arrived += engine.poll()
    assert len(arrived) < 320
    rest = engine.wait()
    order = [(int(r.request_id), r.index) for r in rest]
    assert order == sorted(order)
    assert sorted(order + [(int(r.request_id), r.index) for r in arrived]) == [
        (i, j) for i in range(20) for j in range(16)
    ]
    first = [r.finished_ns for r in arrived + rest if r.request_id == "0"]  # sent before its group was complete
    assert max(first) - min(first) > 2e6


def test_a_group_shares_its_prompt_and_the_timeline_shows_it(engine, policy):
    prompt = policy.prompt(QUESTION.format("<|vision_start|><|video_pad|><|vision_end|>"), clip(16))
    engine.take_stats()
    start_ns = time.monotonic_ns()
    responses = generate(engine, Request("group", prompt.ids, prompt.media, 16, seed=0))
    stats = engine.take_stats()
    assert stats.prompt_tokens == 16 * len(prompt.expanded)
    shared = len(prompt.expanded) // CONFIG.block_tokens * CONFIG.block_tokens
    assert stats.cached_tokens == 15 * shared > 0  # one prefill for the group
    kinds = [work.kind for work in stats.timeline]
    assert kinds[0] == "preprocess" and {"prefill", "decode"} <= set(kinds) and len(kinds) < 40
    edges = [edge for work in stats.timeline for edge in (work.start_ns, work.end_ns)]
    assert edges == sorted(edges) and start_ns < edges[0] and edges[-1] < time.monotonic_ns()
    assert (
        sum(work.tokens for work in stats.timeline) == stats.output_tokens == sum(len(r.token_ids) for r in responses)
    )


def test_prompts_of_one_step_keep_their_own_media(engine, policy):
    question = QUESTION.format("<|vision_start|><|{}_pad|><|vision_end|>")
    clips = [clip(8), clip(1, seed=1), clip(4, side=84, seed=2), None, clip(6, seed=3)]
    prompts = [
        policy.prompt(QUESTION.format("") if c is None else question.format("video" if len(c) > 1 else "image"), c)
        for c in clips
    ]
    engine.take_stats()
    responses = generate(engine, *(Request(str(i), p.ids, p.media, 1, seed=i) for i, p in enumerate(prompts)))
    together = next(work for work in engine.take_stats().timeline if work.kind == "prefill")
    assert (together.steps, together.tokens) == (1, 5)
    for prompt, response in zip(prompts, responses, strict=True):
        expected = policy.logprobs(prompt, response.token_ids, 1.0)
        assert (torch.tensor(response.logprobs) - expected).abs().max() <= 1e-4


def test_abort_returns_partial_responses(engine, policy):
    prompt = policy.prompt("Which?")
    requests = [Request(str(i), prompt.ids, [], 16, seed=i) for i in range(20)]
    engine.generate(requests)
    arrived = []
    while not arrived:
        arrived += engine.poll()
    engine.abort()
    responses = arrived + engine.wait()
    assert sorted((int(r.request_id), r.index) for r in responses) == [(i, j) for i in range(20) for j in range(16)]
    aborted = [r for r in responses if r.finish_reason == "abort"]
    assert any(0 < len(r.token_ids) < CONFIG.max_new_tokens for r in aborted) and len(aborted) > 100
    assert all(len(r.logprobs) == len(r.token_ids) for r in responses)
    full = generate(
        engine, *requests[:1]
    )  # the engine goes on, and a partial response is the beginning of the whole one
    for partial in (r for r in aborted if r.request_id == "0"):
        assert partial.token_ids == full[partial.index].token_ids[: len(partial.token_ids)]


def test_refusals_leave_the_engine_usable(engine, policy):
    text = policy.prompt("Which?")
    with pytest.raises(RuntimeError, match="the limit is 160"):
        generate(engine, Request("long", [9] * (MAX_PROMPT + 1), [], 2, seed=0))
    with pytest.raises(RuntimeError, match="refused a request: lost"):
        generate(engine, Request("lost", text.ids, [SimpleNamespace(kind="video", frames=clip(4), fps=2.0)], 2, seed=0))
    with pytest.raises(ValueError, match="n must be at least 1"):
        engine.generate([Request("none", text.ids, [], 0, seed=0)])
    engine.generate([Request(str(i), text.ids, [], 16, seed=i) for i in range(20)])
    with pytest.raises(RuntimeError, match=r"refused publish: \d+ requests are running"):
        engine.publish(1)
    with pytest.raises(ValueError, match="ids must differ"):
        engine.generate([Request("0", text.ids, [], 1, seed=0)])
    assert len(engine.wait()) == 320


def test_a_refused_prompt_costs_its_neighbours_nothing(engine, policy):
    """Prompts are preprocessed ahead, also those that will be refused, or aborted meanwhile."""
    video = policy.prompt(QUESTION.format("<|vision_start|><|video_pad|><|vision_end|>"), clip(8))
    good = [Request(str(i), video.ids, video.media, 2, seed=i) for i in range(3)]
    alone = {(r.request_id, r.index): r.token_ids for r in generate(engine, *good)}
    engine.generate([good[0], Request("long", [9] * (MAX_PROMPT + 1), [], 2, seed=0), *good[1:]])
    beside, deadline = [], time.monotonic() + 60
    while len(beside) < 6 and time.monotonic() < deadline:
        beside += engine.poll()
    assert {(r.request_id, r.index): r.token_ids for r in beside} == alone
    with pytest.raises(RuntimeError, match="refused a request: long"):
        engine.wait()
    engine.generate([Request(f"busy{i}", video.ids, video.media, 16, seed=i) for i in range(60)])  # 16 fit in a step
    engine.wait_for_prompts()
    assert len(engine.poll()) < 960  # before the answers
    engine.generate([Request(f"more{i}", video.ids, video.media, 16, seed=i) for i in range(60)])
    engine.abort()
    engine.wait_for_prompts()  # though many never came into a batch
    assert 960 < len(engine.wait()) <= 1920  # less what poll() took
    again = {(r.request_id, r.index): r.token_ids for r in generate(engine, *good)}
    assert again == alone


def test_kv_release_gives_memory_back(engine, policy):
    prompt = policy.prompt(QUESTION.format("<|vision_start|><|video_pad|><|vision_end|>"), clip(8))
    busy = [Request(str(i), [9 + i] * 150, [], 8, seed=i) for i in range(16)]
    generate(engine, *busy)
    before = greedy(engine, prompt)
    used = engine.report()[0]
    (released,) = engine.release_kv()
    after = engine.report()[0]
    assert released["resident_before"] == used["kv_resident_bytes"] > 8 << 20 and released["resident_after"] == 0
    assert used["rss_bytes"] - after["rss_bytes"] > 0.9 * released["resident_before"]
    with pytest.raises(RuntimeError, match="call restore_kv"):
        greedy(engine, prompt)
    engine.restore_kv()
    again = greedy(engine, prompt)
    assert (again.token_ids, again.logprobs) == (before.token_ids, before.logprobs)


# ---- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("temperature", 5.0),
        ("top_p", 0.0),
        ("kv_cache_gib", 0.0),
        ("block_tokens", 48),
        ("silence_timeout_s", 0.0),
    ],
)
def test_config_errors_name_the_field(field, value):
    with pytest.raises(ValueError, match=f"--rollout.{field.replace('_', '-')}"):
        RolloutConfig(**{field: value})


def gone_within(pid: int, seconds: float) -> bool:
    """Whether nothing of the session that `pid` leads is alive after at most `seconds`."""
    deadline = time.monotonic() + seconds
    while rollout._session_members(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("frozen", [True, False])
def test_a_killed_trainer_takes_its_engine_along(policy, tmp_path, frozen):
    """SIGKILL while the engine is starting; frozen, it cannot notice by itself that its socket was closed."""
    source = (
        "import sys, time, rollout\n"
        f"client = rollout.EngineClient(rollout.RolloutConfig(), rollout.{policy.binding!r}, engine=1,"
        f" max_prompt_tokens=64, forbidden_ids=[], run_dir={str(tmp_path)!r})\n"
        "print(client.process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(rollout.__file__).parent)}
    trainer = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, env=environment)
    pid = int(trainer.stdout.readline())
    try:
        time.sleep(1 if frozen else 3)
        assert rollout._session_members(pid) == [pid]
        if frozen:
            os.kill(pid, signal.SIGSTOP)
        trainer.kill()
        assert gone_within(pid, 5)
    finally:
        trainer.kill()
        trainer.wait()
        for left in rollout._session_members(pid):  # only if the test fails
            os.kill(left, signal.SIGKILL)


def test_an_engine_that_does_not_get_ready_is_killed(policy, tmp_path):
    config = RolloutConfig(start_timeout_s=1.5)
    client = EngineClient(config, policy.binding, engine=2, max_prompt_tokens=64, forbidden_ids=[], run_dir=tmp_path)
    os.kill(client.process.pid, signal.SIGSTOP)
    with pytest.raises(EngineDied, match=r"engine 2 was not ready in time.*phase 'start'; exit code -9"):
        client.ready()
    assert gone_within(client.process.pid, 0)


def test_an_engine_that_cannot_start_says_why(policy, tmp_path):
    wrong = replace(policy.binding, nbytes=policy.plan.nbytes - 4096)
    client = EngineClient(CONFIG, wrong, engine=3, max_prompt_tokens=64, forbidden_ids=[], run_dir=tmp_path)
    with pytest.raises(EngineDied, match=r"exit code 1(.|\n)*the trainer's snapshot has"):
        client.ready()
    assert gone_within(client.process.pid, 0)


def shared_memory(pid: int) -> set[str]:
    """Names in /dev/shm that a process has mapped."""
    return set(re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text()))


def test_tensor_parallel_engine(engine, policy, tmp_path):
    """Two worker processes: the answers of one, each parameter in its own rank's snapshot, nothing left of a crash."""
    prompt = policy.prompt(QUESTION.format("<|vision_start|><|video_pad|><|vision_end|>"), clip(8))
    single = greedy(engine, prompt)
    plan, binding, arenas = policy.share(2)
    config, forbidden = replace(CONFIG, tp=2), configs.forbidden_ids(policy.config)
    with EngineClient(
        config, binding, engine=0, max_prompt_tokens=MAX_PROMPT, forbidden_ids=forbidden, run_dir=tmp_path
    ) as client:
        client.ready()
        double = greedy(client, prompt)
        assert double.token_ids == single.token_ids
        assert np.abs(np.subtract(double.logprobs, single.logprobs)).max() < 1e-4
        (whole,) = engine.report()
        for worker in client.report():
            assert worker["outside"] == [] and worker["snapshot"][1] == plan.nbytes
            assert worker["loading"]["parameter_bytes"] == 0
            for name, (_, nbytes) in worker["parameters"].items():  # mm_encoder_tp_mode="data": the whole vision tower
                assert not name.startswith("visual.") or nbytes == whole["parameters"][name][1], name
        assert all(worker["resident_after"] == 0 for worker in client.release_kv())
        members = rollout._session_members(client.process.pid)
        names = set().union(*(shared_memory(pid) for pid in members))
        client.restore_kv()
        client.generate([Request(str(i), prompt.ids, prompt.media, 16, seed=i) for i in range(100)])
        os.kill(client.report()[1]["pid"], signal.SIGKILL)
        with pytest.raises(EngineDied, match="engine 0 ended in phase 'generate'"):
            client.wait()
        assert len(members) >= 3 and names and gone_within(client.process.pid, 0)
        assert not [name for name in names if Path(name).exists()]
    del arenas  # kept until here: they own the engine's weights


def test_a_killed_engine_is_reported(engine, policy):  # the last test that uses the engine
    names = shared_memory(engine.process.pid)
    prompt = policy.prompt("Which?")
    assert not engine.generating
    engine.generate([Request(str(i), prompt.ids, [], 16, seed=i) for i in range(200)])
    assert engine.generating
    while not engine.poll():
        time.sleep(0.01)
    start = time.monotonic()
    os.kill(engine.process.pid, signal.SIGKILL)
    with pytest.raises(EngineDied) as error:
        engine.wait()
    assert time.monotonic() - start < 10
    text = str(error.value)
    assert "engine 0 ended in phase 'generate'; exit code -9; last message: " in text
    assert "engine0.log" in text and "Initializing a V1 LLM engine" in Path(engine.log_path).read_text()
    assert gone_within(engine.process.pid, 0) and not [name for name in names if Path(name).exists()]
    with pytest.raises(EngineDied, match="engine 0 ended"):
        engine.publish(1)
    with pytest.raises(EngineDied, match="engine 0 ended"):
        _ = engine.generating
