"""Schedule: what runs when. Three phases, three barriers, one loop for every system.

            Phase 1: everyone reads θk                         Phase 2: rollout memory is gone      Phase 3: nobody
            reads θk
    engine  [prefill][ decode . . . . . . . . . . . . . . . ]
    trainer          [ref prefix][actor prefix]                 [ref suffix][actor suffix][backward]  [optimizer → θk+1]
            ├ barrier 1                                         ├ barrier 2                           ├ barrier 3

`overlap none` computes a prefix where its suffix needs it, after generation; `overlap prefix` computes it beside
decode. That is the whole difference: the same functions see the same θk, in the same order of groups, so the update is
the same bit for bit.

With T_D the decode time alone, T_P the prefix makespan and Δ the decode slowdown caused by overlap, the saving over the
serial order is min(T_P − Δ, T_D) (Rollplex, Equation 1).

Run:
    python sched.py --decode-s 133.7 --prefix-s 60 --slowdown-s 1.2     # what overlap can save; needs no hardware
Left out on purpose: complete-group overlap, disaggregated placement, starting MPS (processes join one that serves).
To change when things run, edit Schedule.iterate; to change what is computed, edit model.py or the loss in train.py.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

import memory

# N responses a prompt, S response tokens padded to the group's longest.


# ---- phase timeline --------------------------------------------------------------------------------------------------


class Timeline:
    """Named intervals of one process on the host's monotonic clock; outermost ones also add up to seconds per phase."""

    def __init__(self, rank: int):
        self.rank = rank
        self.phase = "start-up"  # the outermost interval now open, for error messages
        self.seconds: dict[str, float] = {}
        self._events: list[dict] = []
        self._depth = 0

    @contextmanager
    def span(self, name: str, **args) -> Iterator[None]:
        start = time.monotonic_ns()
        self._depth += 1
        if self._depth == 1:
            self.phase = name
        try:
            yield
            if self._depth == 1:
                memory.synchronize()  # sync point: a phase has ended when the device has finished it
        finally:
            end = time.monotonic_ns()
            self._depth -= 1
            if self._depth == 0:
                self.seconds[name] = self.seconds.get(name, 0.0) + (end - start) / 1e9
            self.add(name, "train", start, end, args)

    def add(self, name: str, lane: str, start_ns: int, end_ns: int, args: dict | None = None) -> None:
        """Record an interval that was measured elsewhere on this host, the engine's for instance."""
        event = dict(name=name, ph="X", ts=start_ns / 1e3, dur=(end_ns - start_ns) / 1e3, pid=self.rank, tid=lane)
        self._events.append(event | {"args": args or {}})

    def take(self) -> tuple[list[dict], dict[str, float]]:
        """Events and seconds per phase since the last call."""
        taken = self._events, self.seconds
        self._events, self.seconds = [], {}
        return taken


class TraceFile:
    """Appends Chrome trace events (ui.perfetto.dev opens them), readable at any moment: the format lets the last
    bracket miss."""

    def __init__(self, path: Path):
        self._file = path.open("a")
        if path.stat().st_size == 0:
            self._file.write("[\n")

    def write(self, events: list[dict]) -> None:
        self._file.writelines(json.dumps(event) + ",\n" for event in events)
        self._file.flush()


# ---- one iteration ---------------------------------------------------------------------------------------------------


@dataclass
class Group:
    """A prompt and its N responses, and what the phases leave with it."""

    sample: object  # data.Sample
    responses: list = field(default_factory=list)  # rollout.Response, by index
    rewards: torch.Tensor | None = None  # [N] float32
    advantages: torch.Tensor | None = None  # [N] float32
    tokens: torch.Tensor | None = None  # [N, S] int64, padded with 0
    mask: torch.Tensor | None = None  # [N, S] bool, True where a token counts in the loss
    rollout_logprobs: torch.Tensor | None = None  # [N, S] float32, the engine's
    ref_logprobs: torch.Tensor | None = None  # [N, S] float32

    def pack(self) -> None:
        """Pad the responses into tensors. One dummy position keeps the shapes valid if every response is empty."""
        n, s = len(self.responses), max(1, *(len(r.token_ids) for r in self.responses))
        self.tokens = torch.zeros(n, s, dtype=torch.int64)
        self.mask = torch.zeros(n, s, dtype=torch.bool)
        self.rollout_logprobs = torch.zeros(n, s)
        for i, response in enumerate(self.responses):
            length = len(response.token_ids)
            self.tokens[i, :length] = torch.tensor(response.token_ids, dtype=torch.int64)
            self.mask[i, :length] = True
            self.rollout_logprobs[i, :length] = torch.tensor(response.logprobs)
        for name in ("tokens", "mask", "rollout_logprobs"):
            setattr(self, name, getattr(self, name).to(memory.device()))

    def drop(self) -> None:
        """Let go of the tensors once the loss has combined them."""
        self.tokens = self.mask = self.rollout_logprobs = self.ref_logprobs = None


@dataclass
class MicroBatch:
    """Groups that the trainer computes at once, and the prefix state that waits for their suffixes."""

    groups: list[Group]
    actor: object | None = None  # model.Prefix
    reference: object | None = None

    @property
    def samples(self) -> list:
        return [group.sample for group in self.groups]

    @property
    def tokens(self) -> list[torch.Tensor]:
        return [group.tokens for group in self.groups]


class PagedReference:
    """The frozen reference: its weights wait in the host pool and occupy the device only inside `with reference:`.

    Without `paging` they arrive at the first use and stay.
    """

    def __init__(self, model, arena: memory.Arena, weights: torch.Tensor, paging: bool = True):
        self.model, self._arena, self._weights, self._paging, self._there = model, arena, weights, paging, False

    def __enter__(self):
        if not self._there:
            self._arena.acquire("reference").copy_(self._weights)
            self._there = not self._paging
        return self.model

    def __exit__(self, *exc) -> None:
        if self._paging:
            self._arena.release("reference")


@dataclass
class Schedule:
    """The parts of one trainer rank, and the order in which an iteration uses them."""

    overlap: str
    temperature: float
    actor: object  # model.QwenVL on the snapshot
    reference: PagedReference | None  # None: no KL term, nothing to score
    engine: object | None  # rollout.EngineClient; None on ranks that start none
    optimizer: object  # optimizer.StreamedAdamW
    snapshot: object  # weights.Snapshot
    arena: memory.Arena
    timeline: Timeline
    control: dist.ProcessGroup  # gloo, the ranks of this data-parallel replica
    tp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    ledger: memory.Ledger
    saved: memory.SavedTensors
    policy: memory.MemoryConfig
    micro_batch: int = 1  # groups computed at once
    log: memory.MemoryLog | None = None
    kv_bytes: int = 0  # of the engine's KV cache on this rank's device, known once the engine is ready
    workers: list[int] = field(default_factory=list)  # ranks of the replica on whose devices this rank's engine works
    engine_host_bytes: int = 0  # of the engine's process on this rank's device, at the last release
    prefix_stream: memory.Stream = field(default_factory=memory.stream)  # what Phase 1 computes on, beside decode
    version: int = 0  # of the weights: the k of θk
    rollout: object | None = None  # rollout.Stats of the last generation on this rank's engine

    def iterate(
        self,
        groups: list[Group],
        requests: list,
        score: Callable[[list[Group]], None],
        prepare: Callable[[list[Group]], float],
        loss: Callable[[torch.Tensor, Group], torch.Tensor],
        step: int,
    ):
        """One synchronous on-policy iteration: read θk, write θk+1. Collective over all ranks; returns the optimizer's
        StepInfo.

        requests: for this rank's engine (rollout.Request; ids are positions in `groups`). score: fills in rewards for
        the groups that this rank's engine answered. prepare: fills in advantages, returns the loss's denominator over
        this replica. loss: unnormalised, of one group.
        """
        batches = [MicroBatch(groups[i : i + self.micro_batch]) for i in range(0, len(groups), self.micro_batch)]
        self._barrier("1: everyone reads θk")
        self.restore_kv()
        if self.engine is not None:
            self.engine.generate(requests)
        if self.overlap == "prefix":
            self.prefix_stream.follow()
            with self.prefix_stream:
                self._reference_prefixes(batches)
                self._actor_prefixes(batches)
            self.prefix_stream.lead()
        self._collect(groups, score)
        denominator = self._over_replicas(prepare(groups))

        self._barrier("2: rollout memory is gone")
        self._reference_logprobs(batches)
        self._actor_gradients(batches, loss)

        self._barrier("3: nobody reads θk")
        return self.update(step, 1.0 / max(1.0, denominator))

    def update(self, step: int, grad_scale: float):
        """Phase 3: stream the optimizer, publish θk+1, drop what the engines derived from θk."""
        with self.timeline.span("optimizer"):
            if dist.get_world_size(self.dp_group) > 1:
                dist.all_reduce(self.optimizer.grad, group=self.dp_group)
            self.arena.acquire("workspace")
            info = self.optimizer.step(step, grad_scale, self.tp_group, self.dp_group)
            self.arena.release("workspace")
            self.arena.release("gradient")
        with self.timeline.span("publish"):
            self.snapshot.publish()
            self.version += 1
            dist.barrier(group=self.control)  # every rank of the replica has written its pieces
            if self.engine is not None:
                self.engine.publish(self.version)
        return info

    def restore_kv(self) -> None:
        """Put memory behind the KV cache of this rank's engine."""
        if self.policy.engine_release:
            self.ledger.set("rollout_kv", self.kv_bytes)
            if self.engine is not None:
                self.engine.restore_kv()

    def release_kv(self) -> None:
        """Take the KV caches off the devices, and count what is left on this one. Collective over the replica."""
        if not self.policy.engine_release:
            return
        mine: dict[int, dict] = {}
        if self.engine is not None:
            mine = dict(zip(self.workers, self.engine.release_kv(), strict=True))
        pieces: list = [None] * dist.get_world_size(self.control)
        dist.all_gather_object(pieces, mine, group=self.control)
        own = {rank: report for piece in pieces for rank, report in piece.items()}[dist.get_rank(self.control)]
        self.ledger.set("rollout_kv", own["resident_after"])
        self.ledger.set("engine_other", own["other_bytes"])
        self.engine_host_bytes = own["host_bytes"]

    def begin_gradients(self) -> None:
        """Map the gradient buffer and zero it; the parameters' hooks add to it (train.py)."""
        self.arena.acquire("gradient").zero_()

    # -- Phase 1

    def _reference_prefixes(self, batches: list[MicroBatch]) -> None:
        if self.reference is None:
            return
        with self.timeline.span("reference prefix"), self.reference as model, torch.no_grad():
            for batch in batches:
                self._reference_prefix(model, batch)

    def _actor_prefixes(self, batches: list[MicroBatch]) -> None:
        with self.timeline.span("actor prefix"):
            for batch in batches:
                self._actor_prefix(batch)

    def _reference_prefix(self, model, batch: MicroBatch) -> None:
        batch.reference = model.prefix(batch.samples)
        self._count("reference_boundary", batch.reference.leaves())

    def _actor_prefix(self, batch: MicroBatch) -> None:
        """What autograd saves stays on the device, leaves it as it is produced, or is not saved at all."""
        offload = self.policy.activations == "offload"
        with self.saved.offloaded() if offload else self.saved.counted("prefix_activations"):
            batch.actor = self.actor.prefix(batch.samples, self.policy.activations != "recompute")
        self._count("actor_boundary", batch.actor.leaves())

    def _count(self, tag: str, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            self.ledger.track(tag, tensor, tensor)

    def _collect(self, groups: list[Group], score: Callable[[list[Group]], None]) -> None:
        """Wait for this rank's engine, score its responses, share both with the replica's other ranks."""
        answered = []
        with self.timeline.span("rollout wait"):
            for response in self.engine.wait() if self.engine is not None else []:
                groups[int(response.request_id)].responses.append(response)
        with self.timeline.span("release KV"):
            self.release_kv()
        self._record_engine()
        with self.timeline.span("reward"):
            answered = [(i, group) for i, group in enumerate(groups) if group.responses]
            score([group for _, group in answered])
        with self.timeline.span("gather responses"):
            pieces: list = [None] * dist.get_world_size(self.control)
            mine = [(i, group.responses, group.rewards) for i, group in answered]
            dist.all_gather_object(pieces, mine, group=self.control)
        for i, responses, rewards in (entry for piece in pieces for entry in piece):
            if any(response.prompt_ids != groups[i].sample.input_ids.tolist() for response in responses):
                raise RuntimeError(f"prompt {i}: the engine expanded its media to other token ids than the trainer")
            groups[i].responses, groups[i].rewards = sorted(responses, key=lambda r: r.index), rewards
            groups[i].pack()
            self._count("logprobs", [groups[i].tokens, groups[i].mask, groups[i].rollout_logprobs])

    def _record_engine(self) -> None:
        if self.engine is None:
            return
        self.rollout = self.engine.take_stats()
        for work in self.rollout.timeline:
            args = {"steps": work.steps, "tokens": work.tokens}
            self.timeline.add(work.kind, f"engine {self.engine.engine}", work.start_ns, work.end_ns, args)

    # -- Phase 2

    @torch.no_grad()
    def _reference_logprobs(self, batches: list[MicroBatch]) -> None:
        if self.reference is None:
            return
        with self.timeline.span("reference"), self.reference as model:
            for batch in batches:
                if batch.reference is None:
                    with self.timeline.span("reference prefix"):
                        self._reference_prefix(model, batch)
                logprobs = model.suffix(batch.reference, batch.tokens, self.temperature)
                for group, values in zip(batch.groups, logprobs, strict=True):
                    group.ref_logprobs = values
                    self._count("logprobs", [values])
                batch.reference = None  # last use of the boundary

    def _actor_gradients(self, batches: list[MicroBatch], loss: Callable[[torch.Tensor, Group], torch.Tensor]) -> None:
        self.begin_gradients()
        with self.timeline.span("actor"):
            for batch in batches:
                if batch.actor is None:
                    with self.timeline.span("actor prefix"):
                        self._actor_prefix(batch)
                with self.timeline.span("actor suffix"), self.saved.counted("suffix_activations"):
                    logprobs = self.actor.suffix(batch.actor, batch.tokens, self.temperature)
                    total = sum(loss(new, group) for new, group in zip(logprobs, batch.groups, strict=True))
                with self.timeline.span("backward"), self.saved.counted("prefix_activations"):  # of a recomputed prefix
                    total.backward()
                    del logprobs, total
                    self.actor.prefix_backward(batch.actor)
                batch.actor = None
                for group in batch.groups:
                    group.drop()

    # -- barriers

    def _barrier(self, name: str) -> None:
        """All ranks of the replica arrive before any goes on; memory must hold what the contract lets into the next
        phase."""
        with self.timeline.span("barrier", before=name):
            memory.synchronize()
            dist.barrier(group=self.control)
            self.arena.check()
            memory.check_contract(name[0], self.ledger.held(), self.policy)
            if self.log is not None:
                self.log.sample(f"barrier {name}")
            self.ledger.enter(name[0])

    def _over_replicas(self, value: float) -> float:
        total = torch.tensor(value, dtype=torch.float64, device=memory.device())
        dist.all_reduce(total, group=self.dp_group)
        return total.item()


# ---- the bound -------------------------------------------------------------------------------------------------------


def saving_s(decode_s: float, prefix_s: float, slowdown_s: float) -> float:
    """Seconds that overlap takes off the serial decode + prefix interval (Rollplex, Equation 1)."""
    return decode_s + prefix_s - max(decode_s + slowdown_s, prefix_s)


@dataclass(frozen=True)
class _Bound:
    decode_s: float = 133.7
    """Decode time of one step without overlap, seconds (the default is the paper's 7B LLaVA-Video rollout, Table 2)."""
    prefix_s: float = 60.0
    """Reference and actor prefix makespan, seconds."""
    slowdown_s: float = 0.0
    """Seconds by which overlap lengthens decode."""
    rest_s: float = 22.4
    """Suffixes, backward, update: the part that stays on the critical path."""


if __name__ == "__main__":
    import tyro

    args = tyro.cli(_Bound, description="What overlapping prefixes with decode can save (Equation 1).")
    saved = saving_s(args.decode_s, args.prefix_s, args.slowdown_s)
    serial = args.decode_s + args.prefix_s + args.rest_s
    overlapped = serial - saved
    print(f"serial {serial:.1f} s, overlapped {overlapped:.1f} s: saves {saved:.1f} s, {serial / overlapped:.2f}x")
    regime = "prefix-bounded" if args.decode_s + args.slowdown_s > args.prefix_s else "decode-bounded"
    most = min(args.prefix_s, args.decode_s)
    print(f"{regime}; the most that any overlap could save is min(prefix, decode) = {most:.1f} s")
