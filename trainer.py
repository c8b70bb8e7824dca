"""A trainer rank: what it owns, built once, and what a step asks of it.

    join()      process groups and Megatron's parallel state ─► Ranks
    Trainer()   arena, host pool ─► engine, which boots meanwhile ─► weights ─► actor, optimizer, data ─► schedule
    freeze_reference(), wait_for_engines()                                      then steps can run (train.py):
    samples(), requests(), score(), look_ahead()                                what they ask for

The order matters: the engine needs only the arena's pages, so it starts first; whoever maps a region here gives it back
before the first step, since between steps only the snapshot is there (memory.CONTRACT).

Run:
    torchrun --nproc-per-node 2 train.py
Left out on purpose: what a step computes (train.py) and when (sched.py).
To give a rank another object, allocate it in _allocate() and add it to memory.CONTRACT.
"""

import gc
import os
import sched
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state

import configs
import data
import hardware
import memory
import model as models
import mps
import optimizer as optim
import plan
import rollout
import run
import vision
import weights
from arena import ALIGN_BYTES, Arena, HostPool, align, check_mappable
from reward import Scorer

if TYPE_CHECKING:
    from train import Config


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


def join(config: "Config") -> Ranks:
    """Join torchrun's process group and build Megatron's parallel state. Collective over all ranks."""
    torch.set_num_threads(1)  # a fixed reduction order, and the engines want the other cores
    mps.share_gpu(config)  # before CUDA starts
    hardware.select_device(int(os.environ["LOCAL_RANK"]))
    hardware.answer_cuda_queries()
    if not dist.is_initialized():
        dist.init_process_group(hardware.backend(), timeout=timedelta(minutes=30))
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


def begin_run(config: "Config", ends: run.Ends) -> Ranks:
    """Join, and check this rank's GPU before anything is allocated. Ranks are connected first: each has its own GPU,
    and the first that fails says so for all. Collective over all ranks."""
    ranks = join(config)
    ends.connect(ranks)
    hardware.check_device()
    check_mappable()
    return ranks


class Trainer:
    """Everything one rank owns, built once: arena, pool, model, reference, optimizer, engine and data."""

    def __init__(self, config: "Config", ranks: Ranks, run_dir: Path, model_dir: Path):
        self.config, self.ranks, self.run_dir, self.model_dir = config, ranks, run_dir, model_dir
        hf_config = configs.load_config(str(model_dir))
        self.plan = weights.layout(hf_config, ranks.tp, config.rollout_tp, config.qkv, config.torch_dtype)
        self.timeline = sched.Timeline(ranks.rank)
        self.load = hardware.GpuLoad(lambda: self.timeline.phase)
        self.shards = weights.shards(self.plan, ranks.tp_rank)
        self.numel = sum(torch.Size(shard.storage).numel() for shard in self.shards)
        limit = config.memory.hbm_limit_gib
        self.ledger = memory.Ledger(int(limit * 2**30) if limit else None)
        self._allocate()
        header = dict(capacity_bytes=self.ledger.limit_bytes or hardware.device_bytes())
        self.log_header, self.log = header | {"gpu": ranks.rank}, None
        if config.memory.sample_ms:
            path, header = run_dir / f"memory-rank{ranks.rank}.jsonl", {"process": "trainer"} | self.log_header
            self.log = memory.MemoryLog(path, header, self.ledger.sample, config.memory.sample_ms)
        self.engine = self._start_engine(hf_config)  # boots while the rest is built: it needs only the pages
        self._load_weights(hf_config)
        self.actor = models.QwenVL(hf_config, config.torch_dtype, config.qkv, config.memory.recompute_layers)
        self._make_optimizer()
        self._open_data()
        self.scorer = Scorer(config.reward, self.run_dir) if self.engine is not None else None
        self._make_schedule()

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
        hardware.check_host(*needs, int(policy.host_limit_gib * 2**30))
        parameters = sum(weights.coverage(self.plan.rows).values())
        run.check_disk(config, self.run_dir, self.ranks.tp * state, dtype.itemsize * parameters)
        self.arena = Arena(sizes, self.ledger, tags)
        self.pool = HostPool(on_host, lend)
        fused = self.arena.acquire("fused_qkv") if config.qkv == "fused" else None
        copy = None if policy.weight_sharing else self.arena.acquire("engine_weights")
        snapshot, exchange = self.arena.acquire("snapshot"), self.ranks.exchange
        self.snapshot = weights.Snapshot(self.plan, self.ranks.tp_rank, snapshot, fused, exchange, copy)
        self.saved = memory.SavedTensors(self.ledger, self.arena, self.pool if lend else None)

    def _start_engine(self, hf_config) -> rollout.EngineClient | None:
        """Trainer ranks 0 … q-1 of a replica start engine e on the GPUs e, e+q, e+2q, …; the others return None."""
        region = "snapshot" if self.config.memory.weight_sharing else "engine_weights"
        handles = sched.gathered(self.arena.handle(region), self.ranks.control)
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

    def _make_optimizer(self) -> None:
        """Bind the actor's parameters and their gradients to the arena, and the optimizer to both."""
        config = self.config
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

    def _open_data(self) -> None:
        config = self.config
        self.dataset = data.Dataset(config.data, self.model_dir, self.run_dir.parent / "data")
        self.loader = data.Loader(self.dataset, self.run_dir, self.ranks.rank, self.ranks.world)
        self.coming: dict[int, dict] = {}  # position -> what look_ahead() has fetched from there on
        self.eval_loader = None
        if config.eval_every:
            held_out = data.Dataset(config.data, self.model_dir, self.run_dir.parent / "data", split="eval")
            self.eval_loader = data.Loader(held_out, self.run_dir, self.ranks.rank, self.ranks.world)

    def _make_schedule(self) -> None:
        config = self.config
        policy = config.sm_policy if config.overlap == "prefix" else "none"
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
            config.memory,
            micro_tokens=config.micro_tokens,
            log=self.log,
            partition=sched.Partition(sched.candidates(policy, config.prefix_sms)),
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
        pieces = sched.gathered(loader.fetch(slots), self.ranks.everyone)
        return {slot: sample for piece in pieces for slot, sample in piece.items()}

    def look_ahead(self, position: int, step: int) -> None:
        """Have the engine preprocess the prompts of `step`, whose samples are those from `position` on; none of them
        if a rank is still decoding. Collective over all ranks."""
        self.coming = {}
        slots = self.loader.missing({}, position, self.config.prompts)
        if not all(sched.gathered(self.loader.decoded(slots), self.ranks.everyone)):
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

    def score(self, pairs: list[tuple[data.Sample, rollout.Response]]) -> list[float]:
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
        self.load.close()
        for name in ("loader", "eval_loader", "scorer"):
            if getattr(self, name, None) is not None:
                getattr(self, name).close()


def _accumulate_into(buffer: torch.Tensor):
    """Add each finished parameter gradient to its FP32 place in the arena, and drop it."""

    def hook(parameter: torch.Tensor) -> None:
        buffer.add_(parameter.grad)
        parameter.grad = None

    return hook


def _seed(config: "Config", step: int, sample: data.Sample) -> int:
    """Of one prompt's responses: the same in every schedule and after a resume."""
    return hash((config.seed, step, sample.index)) % 2**31
