"""train.py: the algorithm against formulas written out, the configuration's errors, and whole runs with real
engines."""

import json
import math
import os
import re
import sched
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, finish, leftovers, metrics, start

import configs
import plan
import settings
import train

TRAIN = ROOT / "train.py"

# ---- the algorithm ---------------------------------------------------------------------------------------------------


def test_equal_rewards_give_exactly_zero():
    for value in (0.0, 1.0, 0.1):  # 0.1 x 8 has a mean that is not 0.1 in float32
        for normalize_std in (True, False):
            got = train.advantages(torch.full((8,), value), normalize_std)
            assert torch.equal(got, torch.zeros(8)), (value, normalize_std, got)
    assert torch.equal(train.advantages(torch.tensor([0.3]), True), torch.zeros(1))


def test_advantages_by_hand():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0])
    std = math.sqrt(0.4 * 0.6)
    expected = torch.tensor([0.6, -0.4, -0.4, 0.6, -0.4])
    assert torch.allclose(train.advantages(rewards, False), expected)
    assert torch.allclose(train.advantages(rewards, True), expected / std, atol=1e-5)


def example(seed: int = 0) -> tuple:
    g = torch.Generator().manual_seed(seed)
    new, old, rollout, ref = (-torch.rand(4, 5, generator=g) * 2 for _ in range(4))
    mask = torch.arange(5) < torch.tensor([5, 3, 1, 4])[:, None]
    return new, old, rollout, ref, torch.tensor([1.0, -0.5, 0.7, -1.2]), mask


@pytest.mark.parametrize("aggregate", ["token", "sequence"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("tis_cap", [0.0, 1.5])
def test_policy_loss_against_the_formula(aggregate, estimator, tis_cap):
    """The published objective, token by token, in Python floats."""
    new, old, rollout, ref, advantage, mask = example()
    algo = train.AlgoConfig(
        kl_coef=0.3, kl_estimator=estimator, clip_low=0.2, clip_high=0.28, aggregate=aggregate, tis_cap=tis_cap
    )
    total, sums = train.policy_loss(new, old, rollout, ref, advantage, mask, algo)
    expected, clipped = 0.0, 0
    for i in range(4):
        length = int(mask[i].sum())
        for t in range(length):
            a, ratio = advantage[i].item(), math.exp(new[i, t] - old[i, t])
            gain = min(ratio * a, min(max(ratio, 0.8), 1.28) * a)
            gain *= min(math.exp(old[i, t] - rollout[i, t]), tis_cap) if tis_cap else 1.0
            r = (ref[i, t] - new[i, t]).item()
            kl = {"k1": -r, "k2": r * r / 2, "k3": math.exp(r) - 1 - r}[estimator]
            expected += (-gain + 0.3 * kl) / (length if aggregate == "sequence" else 1)
            clipped += (a > 0 and ratio > 1.28) or (a < 0 and ratio < 0.8)
    assert total.item() == pytest.approx(expected, rel=1e-5)
    assert sums["clipped"].item() == clipped > 0
    assert sums["tokens"].item() == 13
    assert sums["gap"].item() == pytest.approx(((old - rollout).abs() * mask).sum().item(), rel=1e-6)


def test_masked_tokens_and_the_mismatch_weight_have_no_gradient():
    new, old, rollout, ref, advantage, mask = example(1)
    new.requires_grad_()
    old = old.requires_grad_()
    train.policy_loss(new, old.detach(), rollout, ref, advantage, mask, train.AlgoConfig(tis_cap=2.0))[0].backward()
    assert torch.isfinite(new.grad).all() and (new.grad[~mask] == 0).all() and (new.grad[mask] != 0).any()


def test_a_masked_infinity_stays_out():
    """Padding positions can hold anything, also a log-probability of minus infinity."""
    new, _, rollout, ref, advantage, mask = example(2)
    new[~mask], ref[~mask] = -math.inf, -math.inf
    new.requires_grad_()
    total, sums = train.policy_loss(new, new.detach(), rollout, ref, advantage, mask, train.AlgoConfig())
    total.backward()
    assert torch.isfinite(total) and torch.isfinite(new.grad).all() and math.isfinite(sums["kl"].item())


def test_on_policy_gradient_is_the_policy_gradient():
    """With old = new the ratio is 1 and the gradient is −A per token, whatever the clip range."""
    new, _, rollout, _, advantage, mask = example(3)
    new.requires_grad_()
    train.policy_loss(new, new.detach(), rollout, None, advantage, mask, train.AlgoConfig(kl_coef=0.0, clip_low=0.0))[
        0
    ].backward()
    assert torch.allclose(new.grad, -advantage[:, None] * mask)


def test_denominator_counts_tokens_or_responses():
    group = sched.Group(None, mask=torch.tensor([[True, True, False], [False, False, False], [True, True, True]]))
    assert train.denominator([group, group], train.AlgoConfig(aggregate="token")) == 10
    assert train.denominator([group, group], train.AlgoConfig(aggregate="sequence")) == 4


# ---- configuration ---------------------------------------------------------------------------------------------------


def test_presets_follow_the_model():
    assert train.parse([]) == train.TINY
    assert train.parse(["--model=tiny", "--steps", "3"]) == replace(train.TINY, steps=3)
    assert train.parse(["--model", "qwen2.5-vl-7b", "--weights", "random"]) == train.Config(
        model="qwen2.5-vl-7b", weights="random"
    )


def test_the_planner_fills_in_what_the_command_line_leaves_open():
    """32B on 8 GPUs needs no other flag; here the limit says how large they are, on a GPU machine the driver."""
    command = ["--model", "qwen2.5-vl-32b", "--memory.hbm-limit-gib", "80"]
    config, text = train.configure(command, world=8)
    assert (
        "chosen for 8 GPUs of 80 GiB" in text
        and config.train_tp == 8
        and config.rollout_tp in (1, 2, 4, 8)
        and config.rollout.kv_cache_gib >= 1
    )
    hf_config = configs.load_config(config.model)
    arguments = 8, config.train_tp, config.rollout_tp, settings.workload(config), config.memory
    assert plan.plan(hf_config, *arguments).peak_bytes <= 0.95 * 80 * 2**30
    given = ["--rollout.kv-cache-gib", "2.5", "--optimizer.chunk_mib=32", "--rollout-tp", "8"]
    own, _ = train.configure([*command, *given, "--optimizer.ahead-gib", "1"], world=8)
    assert (own.rollout.kv_cache_gib, own.optimizer.chunk_mib, own.rollout_tp) == (2.5, 32, 8)
    assert (config.optimizer.ahead_gib, own.optimizer.ahead_gib) == (0, 1)
    for flag, wanted in (("recompute-vision", True), ("no-recompute-vision", False), ("recompute-layers", True)):
        own, _ = train.configure([*command, f"--memory.{flag}"], world=8)  # whatever the planner would choose
        assert getattr(own.memory, flag.removeprefix("no-").replace("-", "_")) == wanted
    assert "no settings were found for 1 GPU of 80 GiB" in train.configure(command, world=1)[1]


def test_dry_run_prints_the_plan_and_starts_nothing(tmp_path):
    arguments = ["--dry-run", "--gpus", "8", "--model", "qwen2.5-vl-7b", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, str(TRAIN), *arguments], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert "rollout_kv" in done.stdout and "fits" in done.stdout and "host, GiB" in done.stdout
    assert not (tmp_path / "run").exists()
    check = "import sys, train; sys.exit(any(m.partition('.')[0] in ('megatron', 'vllm') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT).returncode == 0  # they import for seconds


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "/no/such/dir"], "--model /no/such/dir: expected one of tiny"),
        (["--gpus", "8"], "--gpus 8: expected --dry-run"),
        (["--memory.hbm-limit-gib", "-1"], "--memory.hbm-limit-gib -1.0: expected 0 or more"),
        (["--train-tp", "3"], "--train-tp 3: expected a divisor of the 2 ranks"),
        (["--rollout-tp", "4"], "--train-tp 2 must be a positive multiple of --rollout-tp 4"),
        (["--prompts", "0"], "--prompts 0: expected 1 or more"),
        (["--data.max-prompt-tokens", "9000"], "--data.max-prompt-tokens 9000: expected together with"),
        (["--resume"], "--run-dir '': expected the run to --resume"),
        (["--algo.clip-low", "2"], "--algo.clip-low 2.0: expected 0 to 1"),
        (["--rollout.temperature", "0"], "--rollout.temperature 0.0: expected above 0"),
        (["--rollout.top-p", "0.9"], "--rollout.top-p 0.9: expected 1"),
        (["--eval-every", "5"], "--eval-every 5: expected --data.eval-fraction or --data.eval-path"),
        (["--optimizer.lr", "0"], "optimizer.lr is 0.0: it must be above 0"),
        (["--optimizer.ahead-gib", "1", "--memory.no-chunked-optimizer"], "--optimizer.ahead-gib 1.0: expected 0 with"),
        (["--optimizer.ahead-gib", "1", "--memory.no-state-offload"], "--optimizer.ahead-gib 1.0: expected 0 with"),
    ],
)
def test_bad_arguments_name_the_field(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        train.configure(arguments, world=2)


@pytest.mark.parametrize(
    "given, message",
    [
        ("--memory.activations recompute --memory.keep-tokens 9", "keep-tokens: expected 0, or --memory.activations k"),
        ("--memory.activations offload --memory.keep-tokens 9", "keep-tokens: expected 0, or --memory.activations k"),
        ("--memory.activations offload --memory.recompute-vision", "recompute-vision: expected off, or --memory.act"),
        ("--memory.recompute-vision --memory.recompute-layers", "recompute-vision: expected off with --memory.recom"),
        ("--memory.offload-gib 9", "offload-gib: expected --memory.activations offload beside it: with --memory.act"),
        ("--memory.keep-tokens 9 --overlap none", "keep-tokens: expected 0, or --overlap prefix beside it: with --ov"),
        ("--memory.recompute_vision --overlap none", "recompute-vision: expected off, or --overlap prefix beside it"),
        ("--memory.no-reference-paging --algo.kl-coef 0", "reference-paging: expected on with --algo.kl-coef 0"),
    ],
)
def test_a_memory_switch_that_cannot_take_effect_is_refused(given, message):
    with pytest.raises(ValueError, match=re.escape(f"--memory.{message}")):
        train.configure(given.split(), world=2)


def test_memory_switches_that_take_effect_or_ask_for_nothing_are_not_refused():
    for given in (
        "--memory.activations offload --memory.offload-gib 9",
        "--memory.activations recompute --memory.keep-tokens 0 --memory.no-recompute-vision --algo.kl-coef 0",
        "--memory.keep-tokens 9 --memory.recompute-vision --memory.no-reference-paging",
        "--memory.keep-tokens 9 --memory.recompute-layers --memory.activations keep",
        "--memory.no-state-offload --memory.no-chunked-optimizer --memory.no-engine-release --overlap none",
    ):
        train.configure(given.split(), world=2)


def test_what_the_planner_chooses_may_have_no_effect_but_what_is_given_may_not():
    """At 60 GiB the planner lets 32B's prefixes be computed again, and leaves offload_gib at its default."""
    command = ["--model", "qwen2.5-vl-32b", "--memory.hbm-limit-gib", "60"]
    config, _ = train.configure(command, world=8)
    assert config.memory.activations == "recompute" and config.memory.offload_gib > 0
    with pytest.raises(ValueError, match="--memory.offload-gib: .* with --memory.activations recompute"):
        train.configure([*command, "--memory.offload-gib", "9"], world=8)
    config, text = train.configure([*command, "--memory.recompute-vision"], world=8)  # needs something that is kept
    assert config.memory.activations == "keep" and "keep 4096 tokens, which does not fit" in text


def test_a_bad_argument_starts_nothing_and_is_said_once():
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "2"}
    command = [sys.executable, str(TRAIN), "--train-tp", "3"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert (
        done.returncode == 2
        and done.stderr.strip() == "error: --train-tp 3: expected a divisor of the 2 ranks that torchrun started"
    )


def test_help_explains_every_field():
    text = subprocess.run(
        [sys.executable, str(TRAIN), "--help"], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout
    for name in (
        "--overlap",
        "--qkv",
        "--algo.kl-coef",
        "--data.path",
        "--rollout.temperature",
        "--optimizer.chunk-mib",
    ):
        assert name in text
    assert "reference and actor prefixes run beside decode" in " ".join(text.replace("│", " ").split())


# ---- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
def test_it_learns(tmp_path):
    """The README's run, shortened: from chance (1/4) to at least twice chance."""
    run_dir = tmp_path / "learn"
    held_out = ("--eval-every", "55", "--data.eval-fraction", "0.1", "--eval-samples", "32")
    out = finish(start(run_dir, "--steps", "110", *held_out), 600)
    rows = metrics(run_dir)
    rewards = [row["reward_mean"] for row in rows]
    assert sum(rewards[:5]) / 5 < 0.4 and sum(rewards[-10:]) / 10 >= 0.5, rewards
    evaluations = [row["eval/reward_mean"] for row in rows if "eval/reward_mean" in row]
    assert len(evaluations) == 2 and evaluations[1] >= 0.5, evaluations  # greedy, on clips never trained on
    assert max(row["logprob_diff_mean"] for row in rows) <= 1e-4
    for row in rows:
        assert sum(v for k, v in row.items() if k.startswith("phase/")) == pytest.approx(row["step_s"], abs=1e-6)
    assert "all 43 parameters inside the arena" in out and "step 110/110" in out
    names = {event["name"] for event in json.loads((run_dir / "trace.json").read_text().rstrip().rstrip(",") + "]")}
    assert {"reference prefix", "actor prefix", "actor suffix", "backward", "optimizer", "decode"} <= names
    from transformers import Qwen2_5_VLForConditionalGeneration

    Qwen2_5_VLForConditionalGeneration.from_pretrained(run_dir / "model")
    assert not leftovers(run_dir)


@pytest.mark.timeout(300)
def test_two_replicas_share_the_prompts_and_the_gradient(tmp_path):
    """Data parallel: two replicas of one rank take the step that one replica takes, up to the order of the sum."""
    arguments = ["--steps", "2", "--prompts", "4", "--warmup-steps", "3"]
    finish(start(tmp_path / "one", *arguments, ranks=1), 150)
    finish(start(tmp_path / "two", *arguments, "--train-tp", "1", ranks=2), 150)
    for a, b in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        for name in ("reward_mean", "response_tokens_mean", "loss", "kl", "grad_norm"):
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-5), name
