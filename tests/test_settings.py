"""settings.py: chosen settings against plans made again from scratch, and against what else could have been chosen."""

import math
from dataclasses import fields, replace
from itertools import product

import pytest

import configs
import plan
import settings
import verdict
from memory import MemoryConfig
from sizes import GIB, Workload


@pytest.mark.parametrize(
    "name, world, gib",
    [("3b", 1, 141), ("3b", 4, 80), ("7b", 2, 80), ("7b", 2, 141), ("32b", 8, 80), ("32b", 8, 141), ("72b", 16, 141)],
)
def test_choose_fits_and_no_smaller_rollout_degree_does(name, world, gib):
    config = configs.load_config(f"qwen2.5-vl-{name}")
    s = settings.choose(config, world, gib * GIB, 0, Workload())
    w = replace(
        Workload(), micro_tokens=s.micro_tokens, kv_cache_gib=s.kv_cache_gib, max_num_seqs=s.max_num_seqs,
        max_num_batched_tokens=s.max_num_batched_tokens, chunk_mib=s.chunk_mib,
    )  # fmt: skip
    policy = MemoryConfig(activations=s.activations, keep_tokens=s.keep_tokens, recompute_vision=s.recompute_vision)
    again = plan.plan(config, world, s.train_tp, s.rollout_tp, w, policy)
    assert again.peak_bytes == s.plan.peak_bytes <= gib * GIB * (1 - verdict.RESERVE)
    assert set(s.reasons) >= {f.name for f in fields(s)} - {"plan", "reasons", "offload_gib"}
    for train_tp, rollout_tp in product([1, 2, 4, 8], repeat=2):
        if rollout_tp < s.rollout_tp and train_tp % rollout_tp == 0 and world % train_tp == 0:
            smallest = Workload(micro_tokens=2048, max_num_seqs=8, max_num_batched_tokens=4096)
            try:
                p = plan.plan(config, world, train_tp, rollout_tp, smallest, MemoryConfig(activations="recompute"))
            except ValueError:
                continue  # more degrees than key/value heads
            assert p.peak_bytes > gib * GIB * (1 - verdict.RESERVE)


def test_choose_takes_the_papers_degrees_where_its_model_just_fits():
    """Where rollout TP 2 just does not fit any more, however small passes and KV cache are."""
    config, smallest = configs.load_config("qwen2.5-vl-32b"), Workload(micro_tokens=2048, max_num_seqs=8)
    p = plan.plan(config, 8, 8, 2, smallest, MemoryConfig(activations="recompute"))
    limit = math.ceil(p.peak_bytes / (1 - verdict.RESERVE))
    assert 75 * GIB < limit < 80 * GIB
    s = settings.choose(config, 8, limit, 0, Workload())
    assert (s.train_tp, s.rollout_tp, s.activations, s.micro_tokens) == (8, 2, "recompute", 2048)
    s = settings.choose(config, 8, limit - 2, 0, Workload())
    assert (s.train_tp, s.rollout_tp, s.activations, s.keep_tokens) == (8, 4, "keep", 4096)  # one prompt
    tight = s.plan.peak_bytes / (1 - verdict.RESERVE / 2)  # would fit, but into half of the reserve
    assert settings.choose(config, 8, tight, 0, Workload()).plan.peak_bytes <= tight * (1 - verdict.RESERVE)


def test_layers_are_computed_again_only_where_nothing_fits_without():
    """12k prompts with 32B on 8 x 80 GiB: not without it at any degree. The paper's 8k prompt and 2k response do."""
    config, w = configs.load_config("qwen2.5-vl-32b"), Workload(prompt_tokens=12288, response_tokens=2048)
    s = settings.choose(config, 8, 80 * GIB, 0, w)
    assert (s.train_tp, s.activations, s.recompute_layers) == (8, "recompute", True)
    assert "nothing fits without" in s.reasons["recompute_layers"]
    for rollout_tp, kind in product([1, 2, 4, 8], ["keep", "recompute"]):
        policy, smallest = MemoryConfig(kind), replace(w, max_num_seqs=8, micro_tokens=2048)
        assert plan.plan(config, 8, 8, rollout_tp, smallest, policy).peak_bytes > 80 * GIB * (1 - verdict.RESERVE)
    assert not settings.choose(config, 8, 80 * GIB, 0, replace(w, prompt_tokens=8192)).recompute_layers
    given = settings.choose(config, 8, 80 * GIB, 0, Workload(), MemoryConfig(recompute_layers=True))
    assert given.recompute_layers and given.plan.policy.recompute_layers
    p = plan.plan(config, 8, 8, 4, w, MemoryConfig(activations="recompute"))
    changes, fixed = verdict.cheapest(p, 80 * GIB)
    assert [change.text for change in changes] == ["--memory.recompute-layers"] and fixed.policy.recompute_layers


def test_choose_keeps_as_many_prompts_as_fit():
    config, w = configs.load_config("qwen2.5-vl-7b"), Workload(prompt_tokens=1500, response_tokens=600)
    s = settings.choose(config, 2, 141 * GIB, 0, w, given=dict(train_tp=2))
    assert s.activations == "keep" and s.keep_tokens % 1500 == 0 and s.keep_tokens >= s.micro_tokens
    assert s.plan.policy.keep_tokens == s.keep_tokens < 32 * 1500
    room = 141 * GIB * (1 - verdict.RESERVE)
    assert s.plan.peak_bytes <= room < s.plan.replan(keep_tokens=s.keep_tokens + 1500).peak_bytes
    assert f"{s.keep_tokens // 1500} of the 32 prompts" in s.reasons["keep_tokens"]
    assert s.recompute_vision  # so more of them: with the tower's activations too
    whole = settings.choose(config, 2, 141 * GIB, 0, w, given=dict(train_tp=2, recompute_vision=False))
    assert not whole.recompute_vision and 1.5 * whole.keep_tokens < s.keep_tokens
    some = settings.choose(config, 2, 141 * GIB, 0, replace(w, prompts=18), given=dict(train_tp=2))
    assert (some.activations, some.keep_tokens, some.recompute_vision) == ("keep", 0, True)  # all of them
    text = settings.choose(config, 2, 141 * GIB, 0, replace(w, visual_tokens=0), given=dict(train_tp=2))
    assert not text.recompute_vision  # there is nothing to spare
    few = settings.choose(config, 2, 141 * GIB, 0, replace(w, prompts=8), given=dict(train_tp=2))
    assert (few.activations, few.keep_tokens) == ("keep", 0)  # all of them
    serial = settings.choose(config, 2, 141 * GIB, 0, replace(w, overlap="none"), given=dict(train_tp=2))
    assert (serial.activations, serial.keep_tokens) == ("keep", 0)  # one micro-batch at a time


def test_chunks_are_loaded_ahead_only_where_that_is_asked_for():
    config, w = configs.load_config("qwen2.5-vl-7b"), Workload(prompt_tokens=1500, response_tokens=600)
    plain, asked = (settings.choose(config, 2, 141 * GIB, 0, replace(w, ahead_gib=gib)).plan for gib in (0.0, 40.0))
    assert (plain.workload.ahead_gib, asked.workload.ahead_gib) == (0, 40)
    ahead = asked.peak("3").bytes["optimizer_state"] - plain.peak("3").bytes["optimizer_state"]
    assert 39 * GIB < ahead <= 40 * GIB and asked.peak_bytes <= 141 * GIB * (1 - verdict.RESERVE)
    for name in ("state_offload", "chunked_optimizer"):
        with pytest.raises(ValueError, match="--ahead-gib 2.0: expected 0: no chunks come from the host"):
            plan.plan(config, 2, 2, 1, replace(w, ahead_gib=2.0), MemoryConfig(**{name: False}))


def test_choose_leaves_what_is_given():
    """Every value as it is, in the plan too; the rest follows from it."""
    config, w = configs.load_config("qwen2.5-vl-7b"), Workload(prompt_tokens=1500, response_tokens=600)
    free = settings.choose(config, 2, 141 * GIB, 0, w)
    assert free.train_tp == 1 and "as given" not in free.reasons.values()

    def chosen(**given) -> settings.Settings:
        s = settings.choose(config, 2, 141 * GIB, 0, w, given=given)
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
    assert s.plan.peak_bytes > p.peak_bytes and s.plan.peak_bytes > 0.9 * (1 - verdict.RESERVE) * 141 * GIB
    chosen(rollout_tp=2)
    chosen(activations="recompute", max_num_seqs=24, kv_cache_gib=3.3, max_num_batched_tokens=6000, chunk_mib=32.0)
    assert chosen(micro_tokens=3000).max_num_seqs == free.max_num_seqs
    assert chosen(keep_tokens=6000, micro_tokens=3000).activations == "keep"
    assert chosen(activations="keep", train_tp=2).keep_tokens > 0
    assert chosen(activations="offload").offload_gib > 0
    assert chosen(recompute_layers=True).activations == "keep"  # of a layer only its input
    assert settings.choose(config, 2, 141 * GIB, 0, w, given=dict(train_tp=0)).train_tp == 2


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
        settings.choose(config, 2, 141 * GIB, 0, w, given=given)


def test_choose_heeds_the_host_and_says_why_it_cannot():
    config = configs.load_config("qwen2.5-vl-7b")
    wide = settings.choose(config, 8, 141 * GIB, 0, Workload())
    narrow = settings.choose(config, 8, 141 * GIB, wide.plan.host_bytes - GIB, Workload())
    assert narrow.train_tp > wide.train_tp and narrow.plan.host_bytes < wide.plan.host_bytes
    with pytest.raises(ValueError, match="1 GPU of 40 GiB.*nearest is train TP 1.*does not fit: phase"):
        settings.choose(config, 1, 40 * GIB, 0, Workload())
    with pytest.raises(ValueError, match="--prompts 3: expected a multiple of the 8 replicas|does not divide"):
        settings.choose(
            configs.load_config("tiny"), 8, 80 * GIB, 0, Workload(prompts=3, prompt_tokens=64, visual_tokens=0)
        )


def test_what_is_chosen_reaches_the_configuration():
    """Every value lands where its flag would put it: the configuration's plan is the chosen one, and the flags give the
    values back."""
    import train

    config = train.Config(model="qwen2.5-vl-7b", dry_run=True)
    hf_config = configs.load_config(config.model)
    s = settings.choose(hf_config, 2, 141 * GIB, 0, settings.workload(config), given=dict(activations="offload"))
    assert s.offload_gib > 0
    filled = settings.applied(config, s)
    again = plan.plan(hf_config, 2, filled.train_tp, filled.rollout_tp, settings.workload(filled), filled.memory)
    assert again.peak_bytes == s.plan.peak_bytes and filled.memory.offload_gib == s.offload_gib
    values = {
        "--train-tp": s.train_tp, "--rollout-tp": s.rollout_tp, "--micro-tokens": s.micro_tokens,
        "--memory.activations": s.activations, "--memory.keep-tokens": s.keep_tokens,
        "--rollout.kv-cache-gib": s.kv_cache_gib, "--rollout.max-num-seqs": s.max_num_seqs,
        "--rollout.max-num-batched-tokens": s.max_num_batched_tokens, "--optimizer.chunk-mib": s.chunk_mib,
    }  # fmt: skip
    argv = ["--model", config.model, *(str(part) for pair in values.items() for part in pair)]
    argv += [f"--memory.{'' if getattr(s, name) else 'no-'}{name.replace('_', '-')}" for name in settings.CHOSEN[5:7]]
    parsed = train.parse(argv)
    assert settings.given(parsed, train.named_flags(argv)) == {name: getattr(s, name) for name in settings.CHOSEN}
    assert settings.given(parsed, {"seed"}) == {}
