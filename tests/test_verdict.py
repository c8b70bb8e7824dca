"""verdict.py: verdicts, changes and budgets by planning again."""

from dataclasses import replace

import pytest

import configs
import plan
import sizes
import verdict
from memory import MemoryConfig
from sizes import GIB, Workload


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
    judged = verdict.verdict(p, limit)
    assert not judged.fits and p.peak_bytes > limit and message in judged.text
    fixed = judged.fixed
    again = plan.plan(config, fixed.world, fixed.train_tp, fixed.rollout_tp, fixed.workload, fixed.policy)
    assert again.peak_bytes == fixed.peak_bytes <= limit
    assert f"Cheapest change: {change}" in judged.text


def test_no_needless_change_is_named():
    """Of several changes none could be left out; a policy that is off is switched on before anything that costs."""
    config = configs.load_config("qwen2.5-vl-32b")
    p = plan.plan(config, 8, 8, 4, Workload(), MemoryConfig(activations="recompute", weight_sharing=False))
    changes, _ = verdict.cheapest(p, p.peak_bytes - 1)
    assert [change.text for change in changes] == ["without --memory.no-weight-sharing"]
    p = p.replan(weight_sharing=True)
    for limit in range(60, 81):  # at some of them the KV cache is made smaller, and then need not have been
        for q in (p.replan(kv_cache_gib=34.0), p.replan(activations="keep", micro_tokens=32768, kv_cache_gib=60.0)):
            changes, fixed = verdict.cheapest(q, limit * GIB)
            assert verdict.fits(fixed, limit * GIB)
            for change in changes:
                fewer = verdict._make(q, [other for other in changes if other is not change])
                assert fewer is None or not verdict.fits(fewer, limit * GIB), f"{change.text} was not needed"


def test_verdict_counts_the_host_and_says_when_nothing_helps():
    config = configs.load_config("qwen2.5-vl-7b")
    p = plan.plan(config, 2, 2, 1, Workload(), MemoryConfig(activations="recompute"))
    good = verdict.verdict(p, 141 * GIB)
    assert good.fits and good.text.startswith("fits: ") and good.fixed is p
    assert "a host needs" in verdict.verdict(p, 141 * GIB, 64 * GIB).text
    assert verdict.verdict(p, 1 * GIB) == verdict.Verdict(False, verdict.verdict(p, 1 * GIB).text, None)
    assert "No change known here" in verdict.verdict(p, 1 * GIB).text
    tight = verdict.verdict(p, p.peak_bytes * 1.01)
    assert tight.fits and "less than the 5% to keep in reserve" in tight.text


def test_the_vision_tower_is_computed_again_before_fewer_prompts_are_kept():
    p = plan.plan(configs.load_config("qwen2.5-vl-7b"), 2, 2, 1, Workload(), MemoryConfig())
    limit = p.replan(recompute_vision=True).peak_bytes
    changes, fixed = verdict.cheapest(p.replan(chunk_mib=16.0, kv_cache_gib=1.0), limit)
    assert [change.text for change in changes] == ["--memory.recompute-vision"] and fixed.policy.recompute_vision


def test_keeping_fewer_prompts_is_named_before_keeping_none():
    config = configs.load_config("qwen2.5-vl-7b")
    p = plan.plan(config, 2, 2, 1, Workload(), MemoryConfig(recompute_vision=True))
    half = p.replan(keep_tokens=16 * 4096).peak_bytes
    for limit, tokens in ((half, 16 * 4096), (half - 1, 8 * 4096)):
        changes, fixed = verdict.cheapest(p.replan(chunk_mib=16.0, kv_cache_gib=1.0), limit)
        assert [change.text for change in changes] == [f"--memory.keep-tokens {tokens}"]
        assert fixed.policy.keep_tokens == tokens


def test_loading_ahead_is_given_up_first():
    config = configs.load_config("qwen2.5-vl-7b")
    p = plan.plan(config, 2, 2, 1, Workload(ahead_gib=40.0), MemoryConfig(activations="recompute"))
    less = p.replan(ahead_gib=0.0)
    assert less.peak_bytes < p.peak_bytes
    changes, fixed = verdict.cheapest(p, less.peak_bytes)
    assert [change.text for change in changes] == ["--optimizer.ahead-gib 0"] and fixed.peak_bytes == less.peak_bytes


def test_budgets_are_the_largest_that_fit():
    config, limit = configs.load_config("qwen2.5-vl-7b"), 141 * GIB
    p = plan.plan(config, 2, 2, 1, Workload(), MemoryConfig(activations="recompute"))
    most = verdict.budgets(p, limit)

    def peak(**changes) -> int:
        smallest = sizes.kv_bytes(config, replace(p.workload, **changes), 1, 8) / GIB
        return p.replan(**({"kv_cache_gib": smallest} | changes)).peak_bytes

    for fields_of, step in (
        (lambda x: dict(prompt_tokens=int(most["prompt"] + x)), 1),
        (lambda x: dict(prompt_tokens=int(most["visual"] + x), visual_tokens=int(most["visual"] + x)), 1),
        (lambda x: dict(response_tokens=int(most["response"] + x)), 1),
        (lambda x: dict(kv_cache_gib=most["kv_gib"] + x), 0.25),
    ):
        assert peak(**fields_of(0)) <= limit < peak(**fields_of(step))
    assert set(verdict.budgets(p, 1 * GIB).values()) == {0}
