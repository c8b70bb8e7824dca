"""Train a vision-language model with GRPO: Megatron-Core computes the update, vLLM generates, both on one copy of the
weights.

    torchrun ─┬─ rank 0: trainer ──────── socket ─── engine.py: engine 0 (vLLM)
              │    └── arena: snapshot ◄─ same pages ─┘
              └─ rank 1: trainer ──────── socket ─── engine.py: engine 1 (vLLM)
                   └── arena: snapshot ◄─ same pages ─┘

One step: sample prompts, generate N responses each, reward them, compare each with its group, take one gradient step
(synchronous and on-policy: the responses come from exactly the weights that are updated). `train` holds the loop;
sched.py says in which order a step's parts run, and `--overlap` chooses it. What a rank owns is built in trainer.py;
what a run leaves behind, and how it ends, is in run.py; settings.py chooses what the command line leaves open.

Run:
    torchrun --nproc-per-node 2 train.py                               # CPU: a tiny model learns to name colours
    torchrun --nproc-per-node 2 train.py --overlap none                # the serial order; the same update, bit for bit
    torchrun --nproc-per-node 2 train.py --model DIR --data.path FILE  # your checkpoint, your data
Left out on purpose: several optimizer steps per rollout, a learned reward model, a critic.
To change the algorithm, edit advantages() and policy_loss(); to change when things run, edit sched.py.
"""

import gc
import logging
import os
import warnings

# Before Megatron is imported: it and torch's extension builder warn about every optional package that is not installed.
warnings.filterwarnings("ignore", module=r"megatron\..*")
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
# Before torch is: imports ask whether there is a GPU, and CUDA, which would start for the answer, must not start before
# mps.share_gpu has set what MPS reads. NVML answers without it.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
gc.disable()  # what imports make stays, and searching it for garbage took a third of their time (measured)

import sched  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
from dataclasses import dataclass, field  # noqa: E402
from typing import TYPE_CHECKING, Literal  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import tyro  # noqa: E402

import configs  # noqa: E402
import data  # noqa: E402
import hardware  # noqa: E402
import rollout  # noqa: E402
import settings  # noqa: E402
import weights  # noqa: E402
from data import DataConfig  # noqa: E402
from memory import MemoryConfig  # noqa: E402
from optimizer import OptimizerConfig  # noqa: E402
from reward import RewardConfig  # noqa: E402
from rollout import RolloutConfig  # noqa: E402
from run import (  # noqa: E402
    LOST,
    Ends,
    Log,
    alone,
    facts,
    load_checkpoint,
    prepare_run,
    save_checkpoint,
    source_means,
    step_metrics,
    write_plan,
)
from sizes import require  # noqa: E402

if TYPE_CHECKING:  # it imports Megatron, which takes seconds and a dry run does without: train() imports it
    from trainer import Trainer

gc.freeze()
gc.enable()

# ---- configuration ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AlgoConfig:
    """GRPO: the loss and what it compares."""

    kl_coef: float = 0.04
    """Weight of the KL term to the frozen reference (Video-R1: 0.04). 0 skips the reference model wholly."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token estimator of KL(policy || reference): k1 = -r, k2 = r²/2, k3 = exp(r) - 1 - r, with r = log p_ref - log
    p."""
    clip_low: float = 0.2
    """Lower clip of the probability ratio: it counts as at least 1 - clip_low."""
    clip_high: float = 0.2
    """Upper clip of the probability ratio: it counts as at most 1 + clip_high (DAPO raises it to 0.28)."""
    normalize_std: bool = True
    """Divide a group's centred rewards by their standard deviation (GRPO); off: centre only (Dr. GRPO)."""
    aggregate: Literal["token", "sequence"] = "token"
    """token: mean over all response tokens of the step. sequence: mean over each response, then over responses."""
    tis_cap: float = 0.0
    """Truncated importance sampling for the engine's mismatch: weigh tokens by min(p_train / p_rollout, cap). 0 is off;
    2 is usual."""
    mask_truncated: bool = False
    """Leave responses that hit the token limit out of the loss (they still count in their group's rewards)."""

    def validate(self) -> None:
        require(self.kl_coef >= 0, "algo.kl-coef", self.kl_coef, "0 or more")
        require(0 <= self.clip_low <= 1, "algo.clip-low", self.clip_low, "0 to 1")
        require(self.clip_high >= 0, "algo.clip-high", self.clip_high, "0 or more")
        require(self.tis_cap >= 0, "algo.tis-cap", self.tis_cap, "0 (off) or a positive cap")


@dataclass(frozen=True)
class Config:
    """Rollplex: synchronous on-policy GRPO for Qwen2.5-VL. Megatron-Core trains, vLLM generates, on one copy of the
    weights."""

    model: str = "tiny"
    """tiny, qwen2.5-vl-3b, -7b, -32b, -72b, or a Hugging Face directory of a Qwen2.5-VL model."""
    weights: Literal["auto", "random"] = "auto"
    """auto: from the model directory's safetensors; a named configuration has none and is initialised. random:
    initialise."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of weights and activations. The optimizer's state is always float32."""
    run_dir: str = ""
    """Where metrics, trace, logs and checkpoints go. Empty: runs/<model>-<overlap>-<date>. An existing run needs
    --resume."""
    resume: bool = False
    """Continue run_dir from its last checkpoint, exactly as if it had never stopped."""
    seed: int = 0
    """Of initial weights, data order and sampling."""
    dry_run: bool = False
    """Print what the run would hold in memory, whether it fits, and stop; needs no GPU, no weights and no torchrun."""
    gpus: int = 0
    """With --dry-run: GPUs to plan for. 0: as many ranks as torchrun started."""
    steps: int = 100
    """GRPO steps, that is rollouts and updates."""
    prompts: int = 32
    """Prompt groups a step, over all replicas."""
    micro_tokens: int = 8192
    """Tokens that the trainer computes at once: prompts together, and their responses together, up to so many; what is
    longer goes alone. A GPU has enough to do from some 8192 on."""

    train_tp: int = 0
    """Tensor-parallel degree of training. 0: all ranks form one replica; otherwise ranks / train_tp replicas are
    data-parallel."""
    rollout_tp: int = 1
    """Tensor-parallel degree of each engine; divides train_tp. A replica has train_tp / rollout_tp engines."""
    qkv: Literal["fused", "split"] = "fused"
    """fused: Megatron's interleaved QKV, permuted after each update (Case 3). split: three weights, everything
    shared."""
    placement: Literal["colocated"] = "colocated"
    """Trainer and engines share the GPUs."""
    overlap: Literal["none", "prefix"] = "prefix"
    """none: serial phases (the papers' Colocate). prefix: reference and actor prefixes run beside decode (Rollplex)."""

    sm_policy: Literal["none", "default", "thread-cap", "affinity", "green-context", "priority", "auto"] = (
        "green-context"
    )
    """GPU only: how prefixes and decode share SMs. none: time slices, MPS is left alone. All others join or start MPS.
    default: without limits. priority: the trainer is below normal, so that what decodes goes first. green-context:
    prefixes get --prefix-sms SMs. auto: green contexts of the size that was fastest in the run's first steps, and
    since. thread-cap: the trainer gets --prefix-percent of the threads, in every phase. affinity (static SM
    partitions): not available."""
    prefix_sms: int = 0
    """SMs of the overlapped prefixes with --sm-policy green-context; a multiple of 8 on Hopper, 0: half of them."""
    prefix_priority: Literal["low", "normal"] = "low"
    """Priority of the trainer with --sm-policy green-context or auto. low: as with priority, what decodes goes first,
    also on the prefixes' SMs."""
    prefix_percent: int = 0
    """Percent of the GPU's threads for the trainer with --sm-policy thread-cap."""

    warmup_steps: int = 0
    """Supervised steps before GRPO that teach the answer format alone: the answer is a random option, so no question is
    answered."""
    checkpoint_every: int = 50
    """Steps between checkpoints for --resume (the last two are kept), besides one after the last step. 0: none."""
    export: bool = True
    """Write the trained model to run_dir/model as a Hugging Face directory."""
    eval_every: int = 0
    """Steps between evaluations on the held-out split (--data.eval-fraction or --data.eval-path). 0: none."""
    eval_samples: int = 64
    """Prompts of one evaluation, always the same ones; one response each."""
    eval_temperature: float = 0.0
    """Sampling temperature of evaluation; 0 is greedy."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Also log to Weights & Biases. metrics.jsonl is always written."""

    algo: AlgoConfig = field(default_factory=AlgoConfig)
    """GRPO"""
    data: DataConfig = field(default_factory=DataConfig)
    """Prompts and media"""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """What a response is worth"""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """Residency"""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """The engines"""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW"""

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def named(self) -> bool:
        """A configuration this repository knows, without weights of its own."""
        return self.model in configs.NAMES

    def tp(self, world: int) -> int:
        return self.train_tp or world

    def validate(self, world: int) -> None:
        """Cross-field checks that need no model. Raises ValueError with the field and the fix."""
        for part in (self.algo, self.data, self.reward, self.memory, self.optimizer):
            part.validate()
        require(self.steps >= 0, "steps", self.steps, "0 or more")
        require(self.dry_run or not self.gpus, "gpus", self.gpus, "--dry-run; torchrun says how many a run has")
        self._validate_sharing()
        expected = "0 with --memory.no-state-offload or --memory.no-chunked-optimizer: there are no chunks to load"
        chunks = self.memory.state_offload and self.memory.chunked_optimizer
        require(chunks or not self.optimizer.ahead_gib, "optimizer.ahead-gib", self.optimizer.ahead_gib, expected)
        held_out = bool(self.data.eval_path or self.data.eval_fraction)
        require(
            held_out or not self.eval_every, "eval-every", self.eval_every, "--data.eval-fraction or --data.eval-path"
        )
        require(self.eval_samples >= 1, "eval-samples", self.eval_samples, "1 or more")
        require(self.prompts >= 1, "prompts", self.prompts, "1 or more")
        require(self.micro_tokens >= 1, "micro-tokens", self.micro_tokens, "1 or more")
        tp = self.tp(world)
        require(tp > 0 and world % tp == 0, "train-tp", tp, f"a divisor of the {world} ranks that torchrun started")
        require(self.prompts % (world // tp) == 0, "prompts", self.prompts, f"a multiple of the {world // tp} replicas")
        self._validate_sampling()
        require(not (self.resume and not self.run_dir), "run-dir", "''", "the run to --resume")

    def _validate_sharing(self) -> None:
        """A policy that cannot take effect is refused; whether there is a GPU to share is for mps.share_gpu."""
        policy, sms, percent = self.sm_policy, self.prefix_sms, self.prefix_percent
        overlaps = self.overlap != "none"
        require(overlaps or policy not in ("thread-cap", "auto"), "sm-policy", policy, "none: nothing overlaps decode")
        instead = "green-context: static SM partitions (MPS of CUDA 13.1) are not available here"
        require(policy != "affinity", "sm-policy", policy, instead)
        expected = "0, or the SMs that prefixes get with --overlap prefix and --sm-policy green-context"
        require(sms == 0 or (sms > 0 and overlaps and policy == "green-context"), "prefix-sms", sms, expected)
        normal, limits = self.prefix_priority == "normal", policy in ("green-context", "auto")
        expected = "low, or --overlap prefix and --sm-policy green-context or auto beside it"
        require(not normal or (limits and overlaps), "prefix-priority", "normal", expected)
        expected = "1 to 100 with --sm-policy thread-cap, 0 with any other"
        require(1 <= percent <= 100 if policy == "thread-cap" else percent == 0, "prefix-percent", percent, expected)

    def _validate_sampling(self) -> None:
        """The trainer's log-probabilities are over the whole vocabulary at the engine's temperature."""
        sampling, whole = self.rollout, "the trainer's distribution is over the whole vocabulary"
        require(
            sampling.temperature > 0, "rollout.temperature", sampling.temperature, "above 0: greedy has no gradient"
        )
        require(sampling.top_p == 1, "rollout.top-p", sampling.top_p, f"1: {whole}")
        require(sampling.top_k == 0, "rollout.top-k", sampling.top_k, f"0: {whole}")


# What `train.py` alone runs: small enough for two cores, and large enough to be every mechanism.
TINY = Config(
    dtype="float32",
    steps=100,
    prompts=16,
    micro_tokens=1024,
    warmup_steps=40,
    algo=AlgoConfig(kl_coef=0.1),
    data=DataConfig(max_prompt_tokens=512),
    rollout=RolloutConfig(max_new_tokens=12),
    optimizer=OptimizerConfig(lr=1e-3, max_grad_norm=1.0, chunk_mib=4.0),
)


def parse(argv: list[str], chosen: settings.Settings | None = None) -> Config:
    """The command line on top of the preset of its --model: TINY for tiny, the published recipe (Config's defaults)
    otherwise, with the planner's settings if there are any."""
    name = next((argv[i + 1] for i, a in enumerate(argv[:-1]) if a == "--model"), None)
    name = next((a.removeprefix("--model=") for a in argv if a.startswith("--model=")), name)
    default = TINY if name in (None, "tiny") else Config()
    default = default if chosen is None else settings.applied(default, chosen)
    return tyro.cli(Config, default=default, args=argv)


def configure(argv: list[str], world: int) -> tuple[Config, str]:
    """Parse and check everything that can be checked before anything starts; also says what was chosen and why. Raises
    ValueError with the field and the fix.

    Where the size of the GPUs is known, what the command line leaves open of degrees, micro-batches, KV cache, chunks
    and residency is the planner's. Where nothing fits, by the plan, the text says so, and the run may try.
    """
    config, text = parse(argv), ""
    world, hbm_bytes = config.gpus or world, settings.planned_hbm_bytes(config)
    hf_config = configs.load_config(config.model)
    if config.model != "tiny" and hbm_bytes:
        try:
            step, given = settings.workload(config), settings.given(config, named_flags(argv))
            chosen = settings.choose(hf_config, world, hbm_bytes, 0, step, config.memory, given)
            config = parse(argv, chosen)
            gpus = f"{world} GPUs of {hbm_bytes / 2**30:.0f} GiB"
            text = f"chosen for {gpus}, where no flag says otherwise:\n{settings.choice(chosen)}\n"
        except ValueError as error:
            text = f"no settings were found for {error}\n"
    config.validate(world)
    config.memory.check_given(named_flags(argv), config.overlap, config.algo.kl_coef > 0)
    _check_model(config, hf_config, world)
    return config, text


def named_flags(argv: list[str]) -> set[str]:
    """Of the fields that the command line names: export for `--no-export`, memory.keep-tokens for
    `--memory.keep_tokens=9`, memory.engine-release for `--memory.no-engine-release`."""
    flags = (part.removeprefix("--").partition("=")[0] for part in argv if part.startswith("--"))
    return {flag.replace("_", "-").replace(".no-", ".").removeprefix("no-") for flag in flags}


def _check_model(config: Config, hf_config, world: int) -> None:
    weights.check_degrees(hf_config, config.tp(world), config.rollout_tp, config.qkv)
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    most = hf_config.text_config.max_position_embeddings
    expected = f"together with --rollout.max-new-tokens {response} at most the model's {most} positions"
    require(prompt + response <= most, "data.max-prompt-tokens", prompt, expected)


# ---- the algorithm ---------------------------------------------------------------------------------------------------


def advantages(rewards: torch.Tensor, normalize_std: bool) -> torch.Tensor:
    """[N] rewards of one group -> [N] advantages; exactly zero where all rewards are equal (DeepSeekMath, equation
    21)."""
    if (rewards == rewards[0]).all():
        return torch.zeros_like(rewards)
    centred = rewards - rewards.mean()
    return centred / (rewards.std(unbiased=False) + 1e-6) if normalize_std else centred


def kl_estimate(new: torch.Tensor, ref: torch.Tensor, estimator: str) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference) from log-probabilities of tokens that the policy sampled."""
    r = ref - new
    return {"k1": -r, "k2": r * r / 2, "k3": torch.exp(r) - 1 - r}[estimator]


def policy_loss(
    new: torch.Tensor,
    old: torch.Tensor,
    rollout: torch.Tensor,
    ref: torch.Tensor | None,
    advantage: torch.Tensor,
    mask: torch.Tensor,
    algo: AlgoConfig,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Unnormalised clipped GRPO loss of one group, and sums for the metrics.

    new, old, rollout, ref, mask: [N, S], log-probabilities by the weights being trained, by the weights that sampled
    (trainer's and engine's arithmetic), by the reference; mask selects the tokens that count. advantage: [N]. The sum
    over all groups divided by denominator() is the step's loss."""
    # Padding may hold anything; zeroed first, because 0 times an infinite gradient would be NaN.
    new, old, rollout = (x.masked_fill(~mask, 0.0) for x in (new, old, rollout))
    ratio = torch.exp(new - old)
    advantage = advantage[:, None]  # [N, 1]
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - algo.clip_low, 1 + algo.clip_high) * advantage)
    if algo.tis_cap:
        gain = gain * torch.exp(old - rollout).clamp(max=algo.tis_cap).detach()
    loss = -gain
    kl = torch.zeros_like(new) if ref is None else kl_estimate(new, ref.masked_fill(~mask, 0.0), algo.kl_estimator)
    if algo.kl_coef:
        loss = loss + algo.kl_coef * kl
    weight = mask.to(new.dtype)
    if algo.aggregate == "sequence":
        weight = weight / weight.sum(1, keepdim=True).clamp(min=1)
    gap = (old - rollout).abs().detach()
    clipped = ((ratio < 1 - algo.clip_low) & (advantage < 0)) | ((ratio > 1 + algo.clip_high) & (advantage > 0))
    total = (loss * weight).sum()
    sums = dict(loss=total, kl=(kl * mask).sum(), gap=gap.sum(), clipped=(clipped & mask).sum(), tokens=mask.sum())
    return total, {name: value.detach().double() for name, value in sums.items()} | {"gap_max": gap.max().double()}


def denominator(groups: list[sched.Group], algo: AlgoConfig) -> float:
    """What the summed loss is divided by: tokens or responses that count, over the groups given."""
    if algo.aggregate == "token":
        return float(sum(int(group.mask.sum()) for group in groups))
    return float(sum(int(group.mask.any(1).sum()) for group in groups))


# ---- steps -----------------------------------------------------------------------------------------------------------


def warm_up(trainer: "Trainer", step: int, position: int) -> tuple[float, int]:
    """One supervised step on `<answer>X</answer>` with a random option X for each prompt; returns the loss and the next
    position.

    It teaches where an answer goes and which letters there are, and nothing about the videos.
    """
    ranks, tokenizer = trainer.ranks, trainer.dataset.tokenizer
    samples, position = trainer.samples(trainer.loader, position, trainer.config.prompts)
    targets = []
    for i, sample in enumerate(samples):
        generator = torch.Generator().manual_seed(hash((trainer.config.seed, step, i)) % 2**63)
        choices = [option[0] for option in sample.options] or ["1"]
        letter = choices[int(torch.randint(len(choices), (1,), generator=generator))]
        text = f"<answer>{letter}</answer>{tokenizer.eos_token}"
        targets.append(tokenizer(text, return_tensors="pt")["input_ids"].to(hardware.device()))
    trainer.schedule.begin_gradients()
    total, tokens = 0.0, sum(target.numel() for target in targets)
    samples, targets = trainer.mine(samples), trainer.mine(targets)
    for run in sched.packed([len(sample.input_ids) for sample in samples], trainer.config.micro_tokens):
        prefix, batch = trainer.actor.prefix(samples[run]), targets[run]
        logprobs = trainer.actor.suffix(prefix, batch, [[target.numel()] for target in batch], 1.0)
        loss = -sum(values.sum() for values in logprobs)
        loss.backward()
        trainer.actor.prefix_backward(prefix)
        total += loss.item()
    trainer.schedule.update(step, 1.0 / tokens)
    return total * (ranks.world // ranks.tp) / tokens, position


def train_step(
    trainer: "Trainer", step: int, position: int, lengths: list[tuple[int, ...]] | None = None
) -> tuple[dict, int]:
    """One GRPO step: returns this step's metrics (the same on every rank) and the next data position.

    lengths: tokens of each of the step's prompts' responses, for measurements; None: as the policy ends them."""
    config, timeline = trainer.config, trainer.timeline
    start = time.monotonic()
    wait_before = trainer.loader.wait_s
    trainer.load.take()  # what came before is no step's
    with timeline.span("data"):
        samples, position = trainer.samples(trainer.loader, position, config.prompts)
    groups = [sched.Group(sample) for sample in trainer.mine(samples)]
    mine = None if lengths is None else trainer.mine(lengths)
    requests = trainer.requests([group.sample for group in groups], step, config.rollout.n, lengths=mine)
    sums: dict[str, torch.Tensor] = {}

    def score(answered: list[sched.Group]) -> None:
        rewards = iter(trainer.score([(group.sample, r) for group in answered for r in group.responses]))
        for group in answered:
            group.rewards = torch.tensor([next(rewards) for _ in group.responses])

    def prepare(answered: list[sched.Group]) -> float:
        for group in answered:
            group.advantages = advantages(group.rewards, config.algo.normalize_std).to(hardware.device())
            if config.algo.mask_truncated:
                group.mask[[i for i, r in enumerate(group.responses) if r.finish_reason == "length"]] = False
        return denominator(answered, config.algo)

    def loss(new: torch.Tensor, group: sched.Group) -> torch.Tensor:
        # One update per rollout: the weights that sampled are the weights being trained.
        arguments = new, new.detach(), group.rollout_logprobs, group.ref_logprobs, group.advantages, group.mask
        value, parts = policy_loss(*arguments, config.algo)
        for name, part in parts.items():  # stays on the device: reading a value would wait for it
            both = torch.stack([sums.get(name, torch.zeros_like(part)), part])
            sums[name] = both.amax() if name == "gap_max" else both.sum()
        return value

    def look_ahead() -> None:
        if step + 1 < config.steps:
            with timeline.span("data"):
                trainer.look_ahead(position, step + 1)

    info = trainer.schedule.iterate(groups, requests, score, prepare, loss, step, look_ahead)
    metrics = step_metrics(trainer, groups, sums, info, time.monotonic() - start)
    metrics["data_wait_s"] = trainer.loader.wait_s - wait_before
    return metrics, position


def evaluate(trainer: "Trainer", step: int) -> dict[str, float]:
    """Mean reward per source on the first eval_samples held-out prompts, one response each. Collective over all
    ranks."""
    config, ranks = trainer.config, trainer.ranks
    samples = trainer.mine(trainer.samples(trainer.eval_loader, 0, config.eval_samples)[0])
    pairs: list[tuple[data.Sample, rollout.Response]] = []
    trainer.schedule.restore_kv()
    if trainer.engine is not None:
        trainer.engine.generate(trainer.requests(samples, step, 1, config.eval_temperature))
        pairs = [(samples[int(response.request_id)], response) for response in trainer.engine.wait()]
        trainer.engine.take_stats()
    trainer.schedule.release_kv()
    rewards = trainer.score(pairs) if pairs else []
    mine = [(sample.source, reward) for (sample, _), reward in zip(pairs, rewards, strict=True)]
    scored = [entry for entries in sched.gathered(mine, ranks.everyone) for entry in entries]
    result = {"eval/reward_mean": sum(r for _, r in scored) / len(scored)}
    return result | {f"eval/{source}": mean for source, mean in source_means(scored).items()}


# ---- the loop --------------------------------------------------------------------------------------------------------


def train(config: Config, text: str, ends: Ends) -> None:
    from trainer import Trainer, begin_run

    ranks = begin_run(config, ends)
    run_dir, model_dir = prepare_run(config, ranks)
    log = Log(config, run_dir, ranks)
    log.say(f"settings: {run_dir}/config.json")
    if text:
        log.say(text.rstrip())
    ends.trainer = trainer = Trainer(config, ranks, run_dir, model_dir)
    ends.timeline, ends.run_dir = trainer.timeline, run_dir
    log.say(facts(trainer))

    first, position = begin(trainer, log)
    for step in range(first, config.steps):
        ends.step = step
        metrics, position = train_step(trainer, step, position)
        if config.eval_every and (step + 1) % config.eval_every == 0:
            metrics |= evaluate(trainer, step)
        log.step(step, metrics, trainer.timeline)
        if step == first and ranks.rank == 0:
            write_plan(trainer, metrics)
        last = step + 1 == config.steps
        if config.checkpoint_every and (last or (step + 1) % config.checkpoint_every == 0):
            save_checkpoint(trainer, step + 1, position)

    if config.export:
        if ranks.replica == 0:  # replicas hold the same weights
            weights.export_hf(trainer.snapshot, model_dir, run_dir / "model", ranks.tp_group)
        log.say(
            f"model: {run_dir}/model   metrics: {run_dir}/metrics.jsonl   trace: {run_dir}/trace.json (ui.perfetto.dev)"
        )
        log.say(f"curves: python bench.py curves {run_dir}")
    log.close()
    trainer.close()
    dist.destroy_process_group()


def begin(trainer: "Trainer", log: Log) -> tuple[int, int]:
    """What comes before the first step: warm-up or a checkpoint, the reference, waiting for the engines. Returns the
    first step and its data position. Collective over all ranks."""
    config, ranks, run_dir = trainer.config, trainer.ranks, trainer.run_dir
    first, position = 0, 0
    reference = run_dir / f"reference-rank{ranks.tp_rank}.pt"
    if config.resume:
        trainer.freeze_reference(reference if config.warmup_steps else None)  # without warm-up it is θ0, still in place
        first, position = load_checkpoint(trainer)
        log.rewind(first)
        log.say(f"resumed at step {first}")
    else:
        for i in range(config.warmup_steps):
            loss, position = warm_up(trainer, i, position)
            if i % 10 == 9 or i == config.warmup_steps - 1:
                log.say(f"warm-up {i + 1}/{config.warmup_steps}  supervised loss {loss:.4f} nats a token")
        trainer.freeze_reference()
        if config.algo.kl_coef and config.warmup_steps and ranks.replica == 0:
            torch.save(alone(trainer.reference_host), reference)
    log.say(f"engines: waiting until they are ready (log: {run_dir}/engine*.log)")
    if (ready := trainer.wait_for_engines()) is not None:
        log.say(f"engine 0 ready after {ready['start_s']:.0f} s, all {ready['parameters']} parameters inside the arena")
    dist.barrier()
    trainer.timeline.take()
    return first, position


def main() -> None:
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    try:
        config, text = configure(sys.argv[1:], world)
        if config.dry_run:
            print(text + settings.explain(config, world) if rank == 0 else "", end="")
            return
        require(
            "RANK" in os.environ,
            "nproc-per-node",
            "(none)",
            "train.py under torchrun: torchrun --nproc-per-node 2 train.py",
        )
    except ValueError as error:
        sched.leave_it_to_rank_0(2)
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    ends = Ends(rank)
    try:
        train(config, text, ends)
    except ValueError as error:
        ends.fail(str(error), 2)
    except BaseException as error:
        if "closed by peer" in str(error) or "reset by peer" in str(error):  # gloo, when the other end is gone
            ends.fail(LOST, 1)
        detail = "" if isinstance(error, rollout.EngineDied | MemoryError) else "\n" + traceback.format_exc()
        ends.fail(f"{type(error).__name__}: {error}{detail}", 1)


if __name__ == "__main__":
    main()
