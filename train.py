"""Train a vision-language model with GRPO: Megatron-Core computes the update, vLLM generates, both on one copy of the
weights.

    torchrun ─┬─ rank 0: trainer ──────── socket ─── engine.py: engine 0 (vLLM)
              │    └── arena: snapshot ◄─ same pages ─┘
              └─ rank 1: trainer ──────── socket ─── engine.py: engine 1 (vLLM)
                   └── arena: snapshot ◄─ same pages ─┘

One step: sample prompts, generate N responses each, reward them, compare each with its group, take one gradient step
(synchronous and on-policy: the responses come from exactly the weights that are updated). `main` holds the loop;
sched.py says in which order a step's parts run, and `--overlap` chooses it.

Run:
    torchrun --nproc-per-node 2 train.py                               # CPU: a tiny model learns to name colours
    torchrun --nproc-per-node 2 train.py --overlap none                # the serial order; the same update, bit for bit
    torchrun --nproc-per-node 2 train.py --model DIR --data.path FILE  # your checkpoint, your data
Left out on purpose: several optimizer steps per rollout, a learned reward model, a critic.
To change the algorithm, edit advantages() and policy_loss(); to change when things run, edit sched.py.
"""

import logging
import math
import os
import warnings

# Before Megatron is imported: it and torch's extension builder warn about every optional package that is not installed.
warnings.filterwarnings("ignore", module=r"megatron\..*")
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
# Before torch is: imports ask whether there is a GPU, and CUDA, which would start for the answer, must not start before
# mps.share_gpu has set what MPS reads. NVML answers without it.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import gc  # noqa: E402
import json  # noqa: E402
import sched  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
from dataclasses import asdict, dataclass, field, replace  # noqa: E402
from datetime import timedelta  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Literal  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import tyro  # noqa: E402
from megatron.core import parallel_state  # noqa: E402

import configs  # noqa: E402
import data  # noqa: E402
import memory  # noqa: E402
import model as models  # noqa: E402
import mps  # noqa: E402
import optimizer as optim  # noqa: E402
import plan  # noqa: E402
import rollout  # noqa: E402
import vision  # noqa: E402
import weights  # noqa: E402
from arena import ALIGN_BYTES, Arena, HostPool, align, check_mappable  # noqa: E402
from data import DataConfig  # noqa: E402
from memory import MemoryConfig  # noqa: E402
from optimizer import OptimizerConfig  # noqa: E402
from reward import RewardConfig, Scorer  # noqa: E402
from rollout import RolloutConfig  # noqa: E402

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
        _require(self.kl_coef >= 0, "algo.kl-coef", self.kl_coef, "0 or more")
        _require(0 <= self.clip_low <= 1, "algo.clip-low", self.clip_low, "0 to 1")
        _require(self.clip_high >= 0, "algo.clip-high", self.clip_high, "0 or more")
        _require(self.tis_cap >= 0, "algo.tis-cap", self.tis_cap, "0 (off) or a positive cap")


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

    sm_policy: Literal["none", "default", "thread-cap", "affinity", "green-context", "priority", "auto"] = "default"
    """GPU only: how prefixes and decode share SMs. none: time slices, MPS is left alone. All others join or start MPS;
    default: without limits. thread-cap: the trainer gets --prefix-percent of the threads, in every phase.
    green-context: prefixes get --prefix-sms SMs. priority: the trainer is below normal. auto: green contexts of the
    size that was fastest in the run's first steps, and since. affinity (static SM partitions): not available."""
    prefix_sms: int = 0
    """SMs of the overlapped prefixes with --sm-policy green-context; a multiple of 8 on Hopper."""
    prefix_percent: int = 0
    """Percent of the GPU's threads for the trainer with --sm-policy thread-cap."""

    warmup_steps: int = 0
    """Supervised steps before GRPO that teach the answer format alone: the answer is a random option, so no question is
    answered."""
    checkpoint_every: int = 50
    """Steps between checkpoints for --resume (the last two are kept). 0: none."""
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
        return self.model == "tiny" or self.model in configs.CONFIGS

    def tp(self, world: int) -> int:
        return self.train_tp or world

    def validate(self, world: int) -> None:
        """Cross-field checks that need no model. Raises ValueError with the field and the fix."""
        for part in (self.algo, self.data, self.reward, self.memory, self.optimizer):
            part.validate()
        _require(self.steps >= 0, "steps", self.steps, "0 or more")
        _require(self.dry_run or not self.gpus, "gpus", self.gpus, "--dry-run; torchrun says how many a run has")
        self._validate_sharing()
        expected = "0 with --memory.no-state-offload or --memory.no-chunked-optimizer: there are no chunks to load"
        chunks = self.memory.state_offload and self.memory.chunked_optimizer
        _require(chunks or not self.optimizer.ahead_gib, "optimizer.ahead-gib", self.optimizer.ahead_gib, expected)
        held_out = bool(self.data.eval_path or self.data.eval_fraction)
        _require(
            held_out or not self.eval_every, "eval-every", self.eval_every, "--data.eval-fraction or --data.eval-path"
        )
        _require(self.eval_samples >= 1, "eval-samples", self.eval_samples, "1 or more")
        _require(self.prompts >= 1, "prompts", self.prompts, "1 or more")
        _require(self.micro_tokens >= 1, "micro-tokens", self.micro_tokens, "1 or more")
        tp = self.tp(world)
        _require(tp > 0 and world % tp == 0, "train-tp", tp, f"a divisor of the {world} ranks that torchrun started")
        _require(
            self.prompts % (world // tp) == 0, "prompts", self.prompts, f"a multiple of the {world // tp} replicas"
        )
        self._validate_sampling()
        _require(not (self.resume and not self.run_dir), "run-dir", "''", "the run to --resume")

    def _validate_sharing(self) -> None:
        """A policy that cannot take effect is refused; whether there is a GPU to share is for mps.share_gpu."""
        policy, sms, percent = self.sm_policy, self.prefix_sms, self.prefix_percent
        limits = policy not in ("none", "default")
        _require(self.overlap != "none" or not limits, "sm-policy", policy, "default: nothing overlaps decode")
        limited = self.algo.kl_coef > 0 or self.memory.activations == "recompute"  # what saves nothing for a backward
        expected = "default with --algo.kl-coef 0, or --memory.activations recompute: no other prefixes are limited"
        _require(limited or policy not in ("green-context", "auto"), "sm-policy", policy, expected)
        instead = "green-context: static SM partitions (MPS of CUDA 13.1) are not available here"
        _require(policy != "affinity", "sm-policy", policy, instead)
        expected = "the prefixes' SMs with --sm-policy green-context, 0 with any other"
        _require(sms > 0 if policy == "green-context" else sms == 0, "prefix-sms", sms, expected)
        expected = "1 to 100 with --sm-policy thread-cap, 0 with any other"
        _require(1 <= percent <= 100 if policy == "thread-cap" else percent == 0, "prefix-percent", percent, expected)

    def _validate_sampling(self) -> None:
        """The trainer's log-probabilities are over the whole vocabulary at the engine's temperature."""
        sampling, whole = self.rollout, "the trainer's distribution is over the whole vocabulary"
        _require(
            sampling.temperature > 0, "rollout.temperature", sampling.temperature, "above 0: greedy has no gradient"
        )
        _require(sampling.top_p == 1, "rollout.top-p", sampling.top_p, f"1: {whole}")
        _require(sampling.top_k == 0, "rollout.top-k", sampling.top_k, f"0: {whole}")


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


def parse(argv: list[str], chosen: plan.Settings | None = None) -> Config:
    """The command line on top of the preset of its --model: TINY for tiny, the published recipe (Config's defaults)
    otherwise, with the planner's settings if there are any."""
    name = next((argv[i + 1] for i, a in enumerate(argv[:-1]) if a == "--model"), None)
    name = next((a.removeprefix("--model=") for a in argv if a.startswith("--model=")), name)
    default = TINY if name in (None, "tiny") else Config()
    default = default if chosen is None else _with(default, chosen)
    return tyro.cli(Config, default=default, args=argv)


def _with(config: Config, chosen: plan.Settings) -> Config:
    """`config` with what the planner chose; flags on the command line still override it."""
    sizes = {name: getattr(chosen, name) for name in ("kv_cache_gib", "max_num_seqs", "max_num_batched_tokens")}
    fields = "activations", "keep_tokens", "recompute_vision", "recompute_layers"
    residency = {name: getattr(chosen, name) for name in fields}
    residency |= dict(offload_gib=chosen.offload_gib or config.memory.offload_gib)
    return replace(
        config,
        train_tp=chosen.train_tp,
        rollout_tp=chosen.rollout_tp,
        micro_tokens=chosen.micro_tokens,
        rollout=replace(config.rollout, **sizes),
        optimizer=replace(config.optimizer, chunk_mib=chosen.chunk_mib),
        memory=replace(config.memory, **residency),
    )


def configure(argv: list[str], world: int) -> tuple[Config, str]:
    """Parse and check everything that can be checked before anything starts; also says what was chosen and why. Raises
    ValueError with the field and the fix.

    Where the size of the GPUs is known, what the command line leaves open of degrees, micro-batches, KV cache, chunks
    and residency is the planner's. Where nothing fits, by the plan, the text says so, and the run may try.
    """
    config, text = parse(argv), ""
    world, hbm_bytes = config.gpus or world, _hbm_bytes(config)
    hf_config = configs.load_config(config.model)
    if config.model != "tiny" and hbm_bytes:
        try:
            settings = plan.choose(
                hf_config, world, hbm_bytes, 0, workload(config), config.memory, _given(argv, config)
            )
            config = parse(argv, settings)
            given = f"{world} GPUs of {hbm_bytes / 2**30:.0f} GiB"
            text = f"chosen for {given}, where no flag says otherwise:\n{plan.choice(settings)}\n"
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


def _given(argv: list[str], config: Config) -> dict:
    """Of what the planner would choose (plan.Settings), the values that the command line gives."""
    flags = named_flags(argv)
    owners = (
        (config, "", "train-tp", "rollout-tp", "micro-tokens"),
        (config.memory, "memory.", "activations", "keep-tokens", "recompute-vision", "recompute-layers"),
        (config.rollout, "rollout.", "kv-cache-gib", "max-num-seqs", "max-num-batched-tokens"),
        (config.optimizer, "optimizer.", "chunk-mib"),
    )
    named = ((owner, name.replace("-", "_"), prefix + name) for owner, prefix, *names in owners for name in names)
    return {field: getattr(owner, field) for owner, field, flag in named if flag in flags}


def explain(config: Config, world: int) -> str:
    """Every object by phase, and whether it fits, for --dry-run."""
    world = config.gpus or world
    degrees = world, config.tp(world), config.rollout_tp
    planned = plan.plan(configs.load_config(config.model), *degrees, workload(config), config.memory)
    return f"{config.model}: {plan.report(planned, _hbm_bytes(config) or 80 * 2**30)}\n"


def _hbm_bytes(config: Config) -> int:
    """Size to plan for: the limit given, this host's GPUs, or in a dry run without either 80 GiB; 0 if unknown."""
    return int(config.memory.hbm_limit_gib * 2**30) or memory.gpu_bytes() or (80 * 2**30 if config.dry_run else 0)


def workload(config: Config) -> plan.Workload:
    """The largest step that the configuration allows, as the planner wants it."""
    prompt, most = config.data.max_prompt_tokens, config.data.max_frames // 2 * (config.data.max_pixels // 28**2)
    return plan.Workload(
        prompts=config.prompts,
        n=config.rollout.n,
        prompt_tokens=prompt,
        visual_tokens=min(prompt, most),
        response_tokens=config.rollout.max_new_tokens,
        micro_tokens=config.micro_tokens,
        slice_tokens=config.data.max_pixels // 28**2,
        kv_cache_gib=config.rollout.kv_cache_gib,
        max_num_seqs=config.rollout.max_num_seqs,
        max_num_batched_tokens=config.rollout.max_num_batched_tokens,
        chunk_mib=config.optimizer.chunk_mib,
        ahead_gib=config.optimizer.ahead_gib,
        dtype=config.dtype,
        qkv=config.qkv,
        overlap=config.overlap,
        reference=config.algo.kl_coef > 0,
        device="cuda" if memory.gpu_bytes() or config.dry_run else "cpu",
    )


def _check_model(config: Config, hf_config, world: int) -> None:
    weights.check_degrees(hf_config, config.tp(world), config.rollout_tp, config.qkv)
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    most = hf_config.text_config.max_position_embeddings
    expected = f"together with --rollout.max-new-tokens {response} at most the model's {most} positions"
    _require(prompt + response <= most, "data.max-prompt-tokens", prompt, expected)


def _require(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise ValueError(f"--{name} {value}: expected {expected}")


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


# ---- one trainer rank ------------------------------------------------------------------------------------------------


@dataclass
class Ranks:
    """Where this process stands: its replica, its place in it, and the groups that talk."""

    rank: int
    world: int
    tp: int
    tp_rank: int
    replica: int
    tp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    control: dist.ProcessGroup  # gloo over the replica, for objects and barriers
    everyone: dist.ProcessGroup  # gloo over all ranks, likewise
    exchange: dist.ProcessGroup | None  # the q ranks whose shards form one rollout shard


def join(config: Config) -> Ranks:
    """Join torchrun's process group and build Megatron's parallel state. Collective over all ranks."""
    torch.set_num_threads(1)  # a fixed reduction order, and the engines want the other cores
    mps.share_gpu(config.overlap, config.sm_policy, config.prefix_percent)  # before CUDA starts
    memory.select_device(int(os.environ["LOCAL_RANK"]))
    memory.answer_cuda_queries()
    if not dist.is_initialized():
        dist.init_process_group(memory.backend(), timeout=timedelta(minutes=30))
    rank, world = dist.get_rank(), dist.get_world_size()
    tp = config.tp(world)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    q, control, exchange = tp // config.rollout_tp, None, None
    everyone = dist.new_group(backend="gloo")
    for first in range(0, world, tp):  # new_group is collective: every rank makes every group
        group = dist.new_group(range(first, first + tp), backend="gloo")
        control = group if first <= rank < first + tp else control
    for first in range(0, world, q):
        group = dist.new_group(range(first, first + q))
        exchange = group if first <= rank < first + q else exchange
    groups = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_data_parallel_group()
    return Ranks(rank, world, tp, rank % tp, rank // tp, *groups, control, everyone, exchange)


class Trainer:
    """Everything one rank owns, built once: arena, pool, model, reference, optimizer, engine and data."""

    def __init__(self, config: Config, ranks: Ranks, run_dir: Path, model_dir: Path):
        self.config, self.ranks, self.run_dir, self.model_dir = config, ranks, run_dir, model_dir
        hf_config = configs.load_config(str(model_dir))
        self.plan = weights.layout(hf_config, ranks.tp, config.rollout_tp, config.qkv, config.torch_dtype)
        self.timeline = sched.Timeline(ranks.rank)
        self.shards = weights.shards(self.plan, ranks.tp_rank)
        self.numel = sum(torch.Size(shard.storage).numel() for shard in self.shards)
        limit = config.memory.hbm_limit_gib
        self.ledger = memory.Ledger(int(limit * 2**30) if limit else None)
        self._allocate()
        header = dict(capacity_bytes=self.ledger.limit_bytes or memory.device_bytes())
        self.log_header, self.log = header | {"gpu": ranks.rank}, None
        if config.memory.sample_ms:
            path, header = run_dir / f"memory-rank{ranks.rank}.jsonl", {"process": "trainer"} | self.log_header
            self.log = memory.MemoryLog(path, header, self.ledger.sample, config.memory.sample_ms)
        self.engine = self._start_engine(hf_config)  # boots while the rest is built: it needs only the pages
        self._load_weights(hf_config)
        self._build(hf_config)

    def _allocate(self) -> None:
        config, policy, dtype = self.config, self.config.memory, self.config.torch_dtype
        unchunked = 0 if policy.chunked_optimizer else self.numel
        state = 12 * self.numel + 4 * ALIGN_BYTES
        sizes = {
            "snapshot": self.plan.nbytes,
            "gradient": 4 * self.numel,
            "workspace": optim.workspace_bytes(config.optimizer, unchunked),
        }
        if ahead := optim.ahead_bytes(config.optimizer, self.numel):
            sizes["ahead"] = ahead
        if config.qkv == "fused":
            sizes["fused_qkv"] = weights.fused_nbytes(self.plan)
        if config.algo.kl_coef:
            sizes["reference"] = dtype.itemsize * self.numel
        if not policy.state_offload:
            sizes["state"] = state
        if not policy.weight_sharing:
            sizes["engine_weights"] = self.plan.nbytes
        tags = {"fused_qkv": "snapshot"} | dict.fromkeys(("workspace", "ahead", "state"), "optimizer_state")
        lend = int(policy.offload_gib * 2**30) if policy.activations == "offload" else 0
        on_host = align(sizes.get("reference", 0)) + (state if policy.state_offload else 0)
        needs = on_host + lend, sum(sizes.values()), plan.engine_host_bytes(config.rollout_tp)
        memory.check_host(*needs, int(policy.host_limit_gib * 2**30))
        self.arena = Arena(sizes, self.ledger, tags)
        self.pool = HostPool(on_host, lend)
        fused = self.arena.acquire("fused_qkv") if config.qkv == "fused" else None
        copy = None if policy.weight_sharing else self.arena.acquire("engine_weights")
        snapshot, exchange = self.arena.acquire("snapshot"), self.ranks.exchange
        self.snapshot = weights.Snapshot(self.plan, self.ranks.tp_rank, snapshot, fused, exchange, copy)
        self.saved = memory.SavedTensors(self.ledger, self.arena, self.pool if lend else None)

    def _start_engine(self, hf_config) -> "rollout.EngineClient | None":
        """Trainer ranks 0 … q-1 of a replica start engine e on the GPUs e, e+q, e+2q, …; the others return None."""
        handles: list = [None] * self.ranks.tp
        region = "snapshot" if self.config.memory.weight_sharing else "engine_weights"
        dist.all_gather_object(handles, self.arena.handle(region), group=self.ranks.control)
        e, q = self.ranks.tp_rank, self.plan.q
        if e >= q:
            return None
        config = self.config
        return rollout.EngineClient(
            replace(config.rollout, tp=config.rollout_tp),
            rollout.Binding(
                str(self.model_dir), tuple(handles[e::q]), self.plan.nbytes, self.ranks.tp, config.qkv, config.dtype
            ),
            engine=self.ranks.replica * q + e,
            max_prompt_tokens=config.data.max_prompt_tokens,
            forbidden_ids=configs.forbidden_ids(hf_config),
            run_dir=self.run_dir,
            devices=range(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_RANK"]) + self.ranks.tp - e, q),
        )

    def _load_weights(self, hf_config) -> None:
        if self.config.named or self.config.weights == "random":
            weights.init_random(self.snapshot, self.config.seed, hf_config)
        else:
            weights.load_hf(self.snapshot, self.model_dir)
        self.snapshot.copy_out()

    def _build(self, hf_config) -> None:
        config = self.config
        self.actor = models.QwenVL(hf_config, config.torch_dtype, config.qkv, config.memory.recompute_layers)
        self.actor.bind({s.name: s.parameter(self.snapshot.flat(s)) for s in self.shards}, requires_grad=True)
        gradient = self.arena.acquire("gradient").view(torch.float32)
        segments, offset, views = [], 0, {}
        for shard in self.shards:
            n = torch.Size(shard.storage).numel()
            views[shard.name] = shard.parameter(gradient[offset : offset + n])
            counted, partial = not shard.replicated or self.ranks.tp_rank == 0, vision.is_partial(shard.name)
            decay, dest = len(shard.storage) > 1, self.snapshot.flat(shard)
            segments.append(optim.Segment(shard.name, n, offset, dest, decay, counted, partial))
            offset += n
        for name, parameter in self.actor.named_parameters():
            parameter.register_post_accumulate_grad_hook(_accumulate_into(views[name]))
        workspace = self.arena.acquire("workspace")
        policy = config.memory
        pool = self.pool if policy.state_offload else HostPool(0, block=self.arena.acquire("state"))
        self.optimizer = optim.StreamedAdamW(
            segments, gradient, pool, config.optimizer, workspace, unchunked=not policy.chunked_optimizer
        )
        self.optimizer.init_master()
        self.arena.release("workspace")
        self.arena.release("gradient")
        self.dataset = data.Dataset(config.data, self.model_dir, self.run_dir.parent / "data")
        self.loader = data.Loader(self.dataset, self.run_dir, self.ranks.rank, self.ranks.world)
        self.coming: dict[int, dict] = {}  # position -> what look_ahead() has fetched from there on
        self.eval_loader = None
        if config.eval_every:
            held_out = data.Dataset(config.data, self.model_dir, self.run_dir.parent / "data", split="eval")
            self.eval_loader = data.Loader(held_out, self.run_dir, self.ranks.rank, self.ranks.world)
        self.scorer = Scorer(config.reward, self.run_dir) if self.engine is not None else None
        self.schedule = sched.Schedule(
            config.overlap,
            config.rollout.temperature,
            self.actor,
            None,
            self.engine,
            self.optimizer,
            self.snapshot,
            self.arena,
            self.timeline,
            self.ranks.control,
            self.ranks.tp_group,
            self.ranks.dp_group,
            self.ledger,
            self.saved,
            policy,
            micro_tokens=config.micro_tokens,
            log=self.log,
            partition=sched.Partition(sched.candidates(config.sm_policy, config.prefix_sms)),
        )

    def freeze_reference(self, saved: Path | None = None) -> None:
        """Copy θ0, or the reference a resumed run had, into the host pool, and bind the reference model to its arena
        region."""
        if not self.config.algo.kl_coef:
            return
        dtype = self.config.torch_dtype
        host = self.pool.alloc("reference", (self.numel * dtype.itemsize,), torch.uint8)
        if saved is not None:
            host.copy_(torch.load(saved))
        region = self.arena.acquire("reference").view(dtype)
        views, offset = {}, 0
        for shard in self.shards:
            n = torch.Size(shard.storage).numel()
            if saved is None:
                host.view(dtype)[offset : offset + n].copy_(self.snapshot.flat(shard))
            views[shard.name] = shard.parameter(region[offset : offset + n])
            offset += n
        self.arena.release("reference")
        reference = models.QwenVL(self.actor.config, dtype, self.config.qkv)
        reference.bind(views, requires_grad=False)
        self.schedule.reference = sched.PagedReference(reference, self.arena, host, self.config.memory.reference_paging)
        self.reference_host = host

    def wait_for_engines(self) -> dict | None:
        """Wait until this rank's engine is ready, learn what every device's engine holds, and start its log.

        Returns EngineClient.ready(), or None on ranks without an engine. Collective over the replica.
        """
        gc.collect()
        gc.freeze()  # what is there by now stays: searching it again held up a step by 0.3 s now and then (measured)
        ranks, schedule, ready = self.ranks, self.schedule, None
        mine: dict[int, dict] = {}
        if self.engine is not None:
            ready = self.engine.ready()
            self.engine.publish(0)
            schedule.workers = list(range(ranks.tp_rank, ranks.tp, self.plan.q))
            mine = dict(zip(schedule.workers, self.engine.release_kv(), strict=True))
            if self.log is not None:
                self._log_engine_memory()
            if not self.config.memory.engine_release:
                self.engine.restore_kv()
        schedule.kv_bytes = schedule.note_engine(mine)["kv_bytes"]
        if not self.config.memory.engine_release:
            self.ledger.set("rollout_kv", schedule.kv_bytes)
        return ready

    def _log_engine_memory(self) -> None:
        number, first = self.engine.engine, self.ranks.replica * self.ranks.tp
        common = self.log_header | {"process": "engine", "engine": number}
        headers = [common | {"gpu": first + rank} for rank in self.schedule.workers]
        paths = [self.run_dir / f"memory-engine{number}-{j}.jsonl" for j in range(len(headers))]
        self.engine.log_memory(paths, headers, self.config.memory.sample_ms)

    def samples(self, loader: data.Loader, position: int, count: int) -> tuple[list[data.Sample], int]:
        """The next `count` usable samples, decoded by all ranks together. Collective over all ranks."""
        have = self.coming.pop(position, {}) if loader is self.loader else {}
        while slots := loader.missing(have, position, count):
            have |= self._fetch(loader, slots)
        return loader.take(have, position, count)

    def _fetch(self, loader: data.Loader, slots: list[int]) -> dict:
        pieces: list = [None] * self.ranks.world
        dist.all_gather_object(pieces, loader.fetch(slots), group=self.ranks.everyone)
        return {slot: sample for piece in pieces for slot, sample in piece.items()}

    def look_ahead(self, position: int, step: int) -> None:
        """Have the engine preprocess the prompts of `step`, whose samples are those from `position` on; none of them
        if a rank is still decoding. Collective over all ranks."""
        self.coming = {}
        slots, votes = self.loader.missing({}, position, self.config.prompts), [False] * self.ranks.world
        dist.all_gather_object(votes, self.loader.decoded(slots), group=self.ranks.everyone)
        if not all(votes):
            return
        self.coming = {position: self._fetch(self.loader, slots) if slots else {}}
        # Of slots that turned out bad, samples() finds others behind these.
        samples = self.mine(self.loader.usable(self.coming[position]))
        if self.engine is not None:
            self.engine.prepare(self.requests(samples, step, self.config.rollout.n))

    def mine(self, samples: list) -> list:
        """This replica's share of what belongs to a step's prompts."""
        return samples[self.ranks.replica :: self.ranks.world // self.ranks.tp]

    def requests(
        self,
        samples: list[data.Sample],
        step: int,
        n: int,
        temperature: float | None = None,
        lengths: list[tuple[int, ...]] | None = None,
    ) -> list:
        """What this rank's engine is asked of the replica's samples; ids are positions in `samples`.

        lengths: of each sample's n responses, tokens; None: as the policy ends them."""
        fixed = [None] * len(samples) if lengths is None else lengths
        return [
            rollout.Request(
                str(i), sample.prompt_ids, sample.media, n, _seed(self.config, step, sample), temperature, fixed[i]
            )
            for i, sample in enumerate(samples)
            if i % self.plan.q == self.ranks.tp_rank
        ]

    def score(self, pairs: list[tuple[data.Sample, "rollout.Response"]]) -> list[float]:
        """Rewards of responses, by the worker processes."""
        futures = []
        for sample, response in pairs:
            text = self.dataset.tokenizer.decode(response.token_ids, skip_special_tokens=True)
            finished = response.finish_reason == "stop"
            futures.append(self.scorer.submit(sample, text, finished, len(response.token_ids)))
        return self.scorer.collect(futures)

    def close(self) -> None:
        """End the engine and every worker process."""
        if self.engine is not None:
            self.engine.stop()
        if self.log is not None:
            self.log.close()
        for name in ("loader", "eval_loader", "scorer"):
            if getattr(self, name, None) is not None:
                getattr(self, name).close()


def _accumulate_into(buffer: torch.Tensor):
    """Add each finished parameter gradient to its FP32 place in the arena, and drop it."""

    def hook(parameter: torch.Tensor) -> None:
        buffer.add_(parameter.grad)
        parameter.grad = None

    return hook


# ---- steps -----------------------------------------------------------------------------------------------------------


def warm_up(trainer: Trainer, step: int, position: int) -> tuple[float, int]:
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
        targets.append(tokenizer(text, return_tensors="pt")["input_ids"].to(memory.device()))
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
    trainer: Trainer, step: int, position: int, lengths: list[tuple[int, ...]] | None = None
) -> tuple[dict, int]:
    """One GRPO step: returns this step's metrics (the same on every rank) and the next data position.

    lengths: tokens of each of the step's prompts' responses, for measurements; None: as the policy ends them."""
    config, timeline = trainer.config, trainer.timeline
    start = time.monotonic()
    wait_before = trainer.loader.wait_s
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
            group.advantages = advantages(group.rewards, config.algo.normalize_std).to(memory.device())
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
    metrics = _metrics(trainer, groups, sums, info, time.monotonic() - start)
    metrics["data_wait_s"] = trainer.loader.wait_s - wait_before
    return metrics, position


def evaluate(trainer: Trainer, step: int) -> dict[str, float]:
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
    everyone: list = [None] * ranks.world
    mine = [(sample.source, reward) for (sample, _), reward in zip(pairs, rewards, strict=True)]
    dist.all_gather_object(everyone, mine, group=ranks.everyone)
    scored = [entry for entries in everyone for entry in entries]
    by_source = {source: [r for s, r in scored if s == source] for source in sorted({s for s, _ in scored})}
    result = {"eval/reward_mean": sum(r for _, r in scored) / len(scored)}
    return result | {f"eval/{source}": sum(values) / len(values) for source, values in by_source.items()}


def _seed(config: Config, step: int, sample: data.Sample) -> int:
    """Of one prompt's responses: the same in every schedule and after a resume."""
    return hash((config.seed, step, sample.index)) % 2**31


def _metrics(
    trainer: Trainer, groups: list[sched.Group], sums: dict[str, torch.Tensor], info: optim.StepInfo, step_s: float
) -> dict:
    """What README's table explains, from sums over all replicas. Collective over all ranks."""
    responses = [r for group in groups for r in group.responses]
    stats, history = trainer.schedule.rollout, trainer.schedule.partition.history
    mine = dict(
        sums={name: value.item() for name, value in sums.items()},
        rewards=[(group.sample.source, reward) for group in groups for reward in group.rewards.tolist()],
        flat=sum(not group.advantages.any() for group in groups),
        lengths=[len(r.token_ids) for r in responses],
        truncated=sum(r.finish_reason == "length" for r in responses),
        nll=-sum(sum(r.logprobs) for r in responses),
        prompt_tokens=sum(len(group.sample.input_ids) for group in groups),
        visual_tokens=sum(group.sample.visual_tokens for group in groups),
        slices=sum(int(group.sample.grid_thw[:, 0].sum()) for group in groups),
        flops=sum(_group_flops(trainer, group) for group in groups),
        chance=[1 / len(group.sample.options) for group in groups if group.sample.options],
        peaks={phase: sum(trainer.ledger.peaks.get(phase, {}).values()) for phase in "123"},
        host_bytes=memory.host_bytes() + trainer.schedule.engine_host_bytes,
        generate_s=stats.seconds if stats else 0.0,
    )
    everyone: list = [None] * trainer.ranks.world
    dist.all_gather_object(everyone, mine, group=trainer.ranks.everyone)
    replicas = everyone[:: trainer.ranks.tp]
    total = {
        name: sum(r["sums"].get(name, 0.0) for r in replicas) for name in ("loss", "kl", "gap", "clipped", "tokens")
    }
    tokens = max(1.0, total["tokens"])
    rewards = [reward for r in replicas for _, reward in r["rewards"]]
    lengths = [length for r in replicas for length in r["lengths"]]
    scale = tokens if trainer.config.algo.aggregate == "token" else max(1, sum(length > 0 for length in lengths))
    chance = [c for r in replicas for c in r["chance"]]
    sources = sorted({source for r in replicas for source, _ in r["rewards"]})
    by_source = {s: [reward for r in replicas for source, reward in r["rewards"] if source == s] for s in sources}
    return {
        "reward_mean": sum(rewards) / len(rewards),
        **({f"reward/{s}": sum(v) / len(v) for s, v in by_source.items()} if len(sources) > 1 else {}),
        **({"chance": sum(chance) / len(chance)} if len(chance) == trainer.config.prompts else {}),
        "loss": total["loss"] / scale,
        "kl": total["kl"] / tokens,
        "clip_fraction": total["clipped"] / tokens,
        "logprob_diff_mean": total["gap"] / tokens,
        "logprob_diff_max": max(r["sums"].get("gap_max", 0.0) for r in replicas),
        "entropy": sum(r["nll"] for r in replicas) / max(1, sum(lengths)),
        "equal_reward_groups": sum(r["flat"] for r in replicas) / trainer.config.prompts,
        "response_tokens_mean": sum(lengths) / len(lengths),
        "truncated_fraction": sum(r["truncated"] for r in replicas) / len(lengths),
        "prompt_tokens_mean": sum(r["prompt_tokens"] for r in replicas) / trainer.config.prompts,
        "visual_tokens_mean": sum(r["visual_tokens"] for r in replicas) / trainer.config.prompts,
        "slice_tokens_mean": sum(r["visual_tokens"] for r in replicas) / max(1, sum(r["slices"] for r in replicas)),
        "grad_norm": info.grad_norm,
        "lr": info.lr,
        "skipped": info.skipped,
        "bad_samples": trainer.loader.bad,
        **({"prefix_sms": history[-1].sms} if history and trainer.schedule.overlap == "prefix" else {}),
        "generate_s": (generate_s := max(r["generate_s"] for r in everyone)),
        "tok_s_generate": sum(lengths) / max(generate_s, 1e-9),
        "step_s": step_s,
        **{f"memory/phase{phase}_peak_bytes": max(r["peaks"][phase] for r in everyone) for phase in "123"},
        "memory/host_bytes": sum(r["host_bytes"] for r in everyone),
        "model_flops": sum(r["flops"] for r in replicas),
        "tokens": sum(lengths) + sum(r["prompt_tokens"] for r in replicas),
    }


def _group_flops(trainer: Trainer, group: sched.Group) -> float:
    """Useful floating-point operations of one group in a step: 2 per weight and token forward, 4 backward, and
    attention.

    Forward and backward for the actor, forward for the reference; a recomputed forward does not count. Prompt tokens
    meet neither the output layer nor, in the last layer, more than its QKV. The vision tower's few window attentions
    are left out, its weights are not."""
    text, responses = trainer.actor.config.text_config, sum(len(r.token_ids) for r in group.responses)
    p, patches = len(group.sample.input_ids), 4 * group.sample.visual_tokens
    numel = {row.hf: torch.Size(row.shape).numel() for row in trainer.plan.rows}
    tower = sum(n for name, n in numel.items() if name.startswith("visual."))
    layers = sum(n for name, n in numel.items() if name.startswith("model.layers."))
    last = f"model.layers.{text.num_hidden_layers - 1}."
    unused = sum(n for name, n in numel.items() if name.startswith(last) and not name.startswith(f"{last}self_attn."))
    unused += numel[f"{last}self_attn.o_proj.weight"]
    output = numel["model.embed_tokens.weight"]  # as large as the output layer
    forward = 2 * ((layers - unused) * p + (layers + output) * responses + tower * patches)
    pairs = p * p / 2 + sum(len(r.token_ids) * (p + len(r.token_ids) / 2) for r in group.responses)
    forward += 4 * text.hidden_size * text.num_hidden_layers * pairs  # (query, key) pairs, the prompt's once
    return forward * (3 + (trainer.schedule.reference is not None))


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def save_checkpoint(trainer: Trainer, step: int, position: int) -> None:
    """Write what the next step starts from; it appears under its name only when every rank's part is there.
    Collective."""
    ranks = trainer.ranks
    final = trainer.run_dir / f"checkpoint-{step:06d}"
    partial = final.with_suffix(".partial")
    if ranks.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    if ranks.replica == 0:  # replicas hold the same state
        state = dict(
            optimizer=trainer.optimizer.state_dict(),
            position=position,
            seen=trainer.loader.seen,
            bad=trainer.loader.bad,
        )
        torch.save(state, partial / f"rank{ranks.tp_rank}.pt")
    dist.barrier()
    if ranks.rank == 0:
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for old in sorted(trainer.run_dir.glob("checkpoint-??????"))[:-2]:
            shutil.rmtree(old)


def load_checkpoint(trainer: Trainer) -> tuple[int, int]:
    """Restore the last complete checkpoint; returns the next step and data position. Raises ValueError if there is
    none."""
    found = sorted(trainer.run_dir.glob("checkpoint-??????"))
    if not found:
        raise ValueError(f"--resume: {trainer.run_dir} has no checkpoint; start without --resume in a new --run-dir")
    state = torch.load(found[-1] / f"rank{trainer.ranks.tp_rank}.pt", weights_only=True, mmap=True)
    trainer.arena.acquire("workspace")
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.arena.release("workspace")
    trainer.snapshot.publish()
    trainer.loader.seen, trainer.loader.bad = state["seen"], state["bad"]
    return int(found[-1].name.removeprefix("checkpoint-")), state["position"]


# ---- logging ---------------------------------------------------------------------------------------------------------


class Log:
    """Rank 0's output: the step line, metrics.jsonl, trace.json and, if asked, Weights & Biases."""

    def __init__(self, config: Config, run_dir: Path, ranks: Ranks):
        self.config, self.ranks, self.begin = config, ranks, time.monotonic()
        if ranks.rank:
            return
        memory.peak_flops()  # measured once: now, while nothing else uses the device
        self._path = run_dir / "metrics.jsonl"
        self._metrics = self._path.open("a")
        self._trace = sched.TraceFile(run_dir / "trace.json")
        self._wandb = None
        if config.wandb != "off":
            import wandb

            self._wandb = wandb.init(project="rollplex", mode=config.wandb, dir=run_dir, config=asdict(config))

    def rewind(self, step: int) -> None:
        """Drop what was logged for `step` and later: a resumed run computes it again."""
        if self.ranks.rank == 0:
            lines = self._path.read_text().splitlines(keepends=True)
            self._metrics.close()
            self._path.write_text("".join(line for line in lines if json.loads(line)["step"] < step))
            self._metrics = self._path.open("a")

    def step(self, step: int, metrics: dict, timeline: sched.Timeline) -> None:
        """Collective over all ranks: gathers their trace events. Seconds per phase are rank 0's and add up to
        step_s."""
        events, seconds = timeline.take()
        gathered: list = [None] * self.ranks.world
        dist.all_gather_object(gathered, events, group=self.ranks.everyone)
        if self.ranks.rank:
            return
        everything = (event for rank_events in gathered for event in rank_events)
        self._trace.write([event | {"args": {"step": step} | event["args"]} for event in everything])
        seconds["other"] = metrics["step_s"] - sum(seconds.values())
        metrics |= {f"phase/{name}": value for name, value in seconds.items()}
        busy = sum(seconds.get(name, 0.0) for name in ("reference prefix", "actor prefix", "reference", "actor"))
        metrics["tok_s_train"] = metrics["tokens"] / max(busy, 1e-9)
        peak = memory.peak_flops()
        metrics["mfu"] = None if peak is None else metrics["model_flops"] / self.ranks.world / max(busy, 1e-9) / peak
        metrics["elapsed_s"] = time.monotonic() - self.begin
        record = {"step": step} | metrics
        self._metrics.write(json.dumps(record) + "\n")
        self._metrics.flush()
        if self._wandb is not None:
            self._wandb.log(record, step=step)
        print(self._line(step, metrics, seconds), flush=True)

    def _line(self, step: int, m: dict, seconds: dict[str, float]) -> str:
        eta_s = (self.config.steps - step - 1) * m["step_s"]
        phases = " ".join(f"{name} {value:.2f}" for name, value in seconds.items() if value >= 0.005 or name == "other")
        mfu = "n/a" if m["mfu"] is None else f"{m['mfu']:.1%}"
        parts = (
            f"step {step + 1}/{self.config.steps}",
            f"reward {m['reward_mean']:.3f}  loss {m['loss']:+.4f}  kl {m['kl']:.4f}  clip {m['clip_fraction']:.3f}",
            f"|Δlogp| {m['logprob_diff_mean']:.1e} (max {m['logprob_diff_max']:.1e})",
            f"grad {m['grad_norm']:.2f}{' SKIPPED' if m['skipped'] else ''}  len {m['response_tokens_mean']:.1f}",
            f"gen {m['tok_s_generate']:.0f} tok/s  train {m['tok_s_train']:.0f} tok/s  MFU {mfu}",
            f"{m['step_s']:.2f} s = {phases}  (data waited {m['data_wait_s']:.2f})  eta {eta_s / 60:.0f} min",
        )
        evaluation = f"\n  evaluation: reward {m['eval/reward_mean']:.3f}" if "eval/reward_mean" in m else ""
        return "  ".join(parts) + evaluation

    def say(self, text: str) -> None:
        if self.ranks.rank == 0:
            print(text, flush=True)

    def close(self) -> None:
        if self.ranks.rank == 0 and self._wandb is not None:
            self._wandb.finish()


def facts(trainer: Trainer) -> str:
    """Derived figures, once per run: what a step costs and what a rank holds."""
    config, plan, ranks = trainer.config, trainer.plan, trainer.ranks
    parameters = weights.coverage(plan.rows)
    total = sum(parameters.values())
    share = " / ".join(f"{100 * count / total:.1f}" for count in parameters.values())
    responses = config.prompts * config.rollout.n
    reference = trainer.arena.nbytes("reference") if config.algo.kl_coef else 0
    case3 = weights.fused_nbytes(plan) if config.qkv == "fused" else 0
    rows = (
        ("weights, shared with the engine", plan.nbytes, f"rollout TP shard; cases 1/2/3: {share} % of parameters"),
        ("weights, the trainer's own QKV", case3, "Case 3, permuted into the snapshot after each update"),
        ("reference weights", reference, "host; on the device only around their two windows"),
        ("gradients", 4 * trainer.numel, "FP32, Phases 2 and 3"),
        ("optimizer state", 12 * trainer.numel, "host: FP32 master and two moments"),
        ("optimizer workspace", optim.workspace_bytes(config.optimizer), "Phase 3, whatever the model's size"),
        ("optimizer, loaded ahead", trainer.optimizer.ahead_bytes, "from the last micro-batch of Phase 2 on"),
        ("KV cache of the engine", config.rollout.kv_cache_gib * 2**30, "Phase 1"),
    )
    lines = [
        f"{config.model}: {total / 1e6:.2f} M parameters, {config.dtype}; {ranks.world} ranks, train TP {ranks.tp}, "
        f"rollout TP {config.rollout_tp}, {ranks.world // config.rollout_tp} engines",
        f"a step: {config.prompts} prompts, at most {config.prompts * config.data.max_prompt_tokens} tokens; "
        f"{responses} responses, at most {responses * config.rollout.max_new_tokens} tokens",
        "bytes per rank:",
    ]
    return "\n".join(lines + [f"  {name:32s} {nbytes / 2**20:10.2f} MiB  {text}" for name, nbytes, text in rows])


def write_plan(trainer: Trainer, metrics: dict) -> None:
    """RUN/plan.json: what the planner expects in each phase of a step like this one, for `bench.py memory`."""
    config, ranks = trainer.config, trainer.ranks
    names = "prompt", "visual", "slice", "response"
    tokens = {f"{name}_tokens": math.ceil(metrics[f"{name}_tokens_mean"]) for name in names}
    tokens["slice_tokens"] = max(1, tokens["slice_tokens"])  # 0 without media
    whole = max(1, config.micro_tokens // tokens["prompt_tokens"])  # prompts at once
    step = replace(workload(config), micro_tokens=whole * tokens["prompt_tokens"], exact=True, **tokens)
    planned = plan.plan(trainer.actor.config, ranks.world, ranks.tp, config.rollout_tp, step, config.memory)
    phases = {phase: planned.peak(phase).bytes for phase in "123"}
    (trainer.run_dir / "plan.json").write_text(json.dumps({"phase": phases}, indent=1))


# ---- ends ------------------------------------------------------------------------------------------------------------


LOST = "lost another rank, which ended without saying why (killed, or out of memory?)"


class Ends:
    """However a rank ends, its engine ends with it, and one rank says why.

    A signal handler in Python runs only between bytecodes, so a rank that hangs in a collective would not notice
    SIGTERM. The signal's C half still writes to a pipe; a thread reads it and ends the process. The same thread watches
    the engine."""

    def __init__(self, rank: int):
        self.rank, self.trainer, self.timeline, self.run_dir, self.step = rank, None, None, None, None
        self._store: dist.TCPStore | None = None
        self._siblings: list[int] = []  # process ids of this host's ranks
        self._ending = threading.Lock()
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        import select

        while True:
            if select.select([self._read], [], [], 0.5)[0]:
                number = signal.Signals(os.read(self._read, 1)[0])
                if number == signal.SIGTERM and not all(map(_lives, self._siblings)):
                    self.fail(LOST, 1)  # torchrun, which has noticed before a collective did
                self.fail("interrupted" if number == signal.SIGINT else f"stopped by {number.name}", 128 + number)
            engine = self.trainer and self.trainer.engine
            if engine and engine.died is not None:
                self.fail(str(engine.died), 1)

    def fail(self, reason: str, status: int) -> None:
        """Say why, unless another rank did; stop the engine; end the process. Safe from any thread: the first is the
        one that does it."""
        self._ending.acquire()  # for good: whoever comes later waits here for the end
        where = f"rank {self.rank}" + (f", step {self.step + 1}" if self.step is not None else "")
        where += f", {self.timeline.phase}" if self.timeline else ""
        if self._first(f"{where}: {reason}"):
            print(f"\nrollplex stopped: {where}: {reason}", file=sys.stderr, flush=True)
            if self.run_dir is not None and any(self.run_dir.glob("checkpoint-??????")):
                print(f"continue with --run-dir {self.run_dir} --resume", file=sys.stderr, flush=True)
        try:
            if self.trainer is not None:
                self.trainer.close()
        finally:
            os._exit(status)

    def connect(self, ranks: Ranks) -> None:
        """Call once the process group exists; collective over all ranks. A connection to the store of its own: the
        group's is locked while a collective waits on it."""
        everyone: list = [None] * ranks.world
        dist.all_gather_object(everyone, (socket.gethostname(), os.getpid()), group=ranks.everyone)
        self._siblings = [pid for host, pid in everyone if host == socket.gethostname()]
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        limit = timedelta(seconds=5)
        self._store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)

    def _first(self, reason: str) -> bool:
        """Whether this rank is the first to report: the others fail only because it did."""
        if self._store is None:  # nothing is distributed yet, and every rank of a host sees the same error
            return os.environ.get("LOCAL_RANK", "0") == "0"
        try:
            return self._store.compare_set("rollplex/failure", "", reason).decode() == reason
        except RuntimeError:  # torchrun is gone, and the store with it
            return True


def _lives(pid: int) -> bool:
    """Whether a process is there, and not only its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# ---- the loop --------------------------------------------------------------------------------------------------------


def prepare_run(config: Config, ranks: Ranks) -> tuple[Path, Path]:
    """Agree on the run directory and the model directory; rank 0 makes them. Collective."""
    chosen: list = [config.run_dir or f"runs/{Path(config.model).name}-{config.overlap}-{time.strftime('%m%d-%H%M%S')}"]
    dist.broadcast_object_list(chosen, group=ranks.everyone)
    run_dir = Path(chosen[0])
    if ranks.rank == 0:
        if (run_dir / "metrics.jsonl").exists() and not config.resume:
            raise ValueError(f"--run-dir {run_dir}: has a run already; add --resume to continue it, or choose another")
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.json").write_text(json.dumps(asdict(config), indent=1))
        if not config.data.path:
            data.make_synthetic(run_dir.parent / "data", config.data)
    dist.barrier()
    model_dir = configs.make_model_dir(config.model, run_dir.parent / "models") if config.named else Path(config.model)
    return run_dir, model_dir


def train(config: Config, text: str, ends: Ends) -> None:
    ranks = join(config)
    ends.connect(ranks)
    memory.check_device()  # each rank its own GPU: the first to fail says so
    check_mappable()
    run_dir, model_dir = prepare_run(config, ranks)
    log = Log(config, run_dir, ranks)
    log.say(json.dumps(asdict(config)))
    if text:
        log.say(text.rstrip())
    ends.trainer = trainer = Trainer(config, ranks, run_dir, model_dir)
    ends.timeline, ends.run_dir = trainer.timeline, run_dir
    log.say(facts(trainer))

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
            torch.save(trainer.reference_host.clone(), reference)  # the tensor alone, not the pool that it lies in
    log.say(f"engines: waiting until they are ready (log: {run_dir}/engine*.log)")
    if (ready := trainer.wait_for_engines()) is not None:
        log.say(f"engine 0 ready after {ready['start_s']:.0f} s, all {ready['parameters']} parameters inside the arena")
    dist.barrier()
    trainer.timeline.take()

    for step in range(first, config.steps):
        ends.step = step
        metrics, position = train_step(trainer, step, position)
        if config.eval_every and (step + 1) % config.eval_every == 0:
            metrics |= evaluate(trainer, step)
        log.step(step, metrics, trainer.timeline)
        if step == first and ranks.rank == 0:
            write_plan(trainer, metrics)
        if config.checkpoint_every and (step + 1) % config.checkpoint_every == 0:
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


def main() -> None:
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    try:
        config, text = configure(sys.argv[1:], world)
        if config.dry_run:
            print(text + explain(config, world) if rank == 0 else "", end="")
            return
        _require(
            "RANK" in os.environ,
            "nproc-per-node",
            "(none)",
            "train.py under torchrun: torchrun --nproc-per-node 2 train.py",
        )
    except ValueError as error:
        if rank == 0:
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
