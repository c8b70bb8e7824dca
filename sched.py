"""Schedule: what runs when. Three phases, three barriers, one loop for every system.

            Phase 1: everyone reads θk                         Phase 2: rollout memory is gone      Phase 3: θk → θk+1
    engine  [prefill][ decode . . . . . . . . . . . . . . . ]   [preprocess next prompts]
    trainer           [ref prefix][actor prefix]                [ref suffix][actor suffix][backward]  [optimizer → θk+1]
    PCIe                                                                             [load ahead . . . . stream . . . .]
            ├ barrier 1                                         ├ barrier 2                           ├ barrier 3

`overlap none` computes a prefix where its suffix needs it, after generation; `overlap prefix` computes it beside
decode, as long as there is any. That is the whole difference: the same functions see the same θk, in the same order of
groups, so the update is the same bit for bit.

With T_D the decode time alone, T_P the prefix makespan and Δ the decode slowdown caused by overlap, the saving over the
serial order is min(T_P − Δ, T_D) (Rollplex, Equation 1).

Run:
    python sched.py --decode-s 133.7 --prefix-s 60 --slowdown-s 1.2     # what overlap can save; needs no hardware
Left out on purpose: complete-group overlap, disaggregated placement.
To change when things run, edit Schedule.iterate; to change which SMs prefixes get, edit choose_sms; to change what is
computed, edit model.py or the loss in train.py.
"""

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist

import hardware
import memory
from arena import Arena

# N responses a prompt, S response tokens padded to the group's longest.

SPEAKS_WITHIN_S = 5.0  # torchrun ends all ranks with the first that ends: so long the others wait for the one to speak
_AHEAD_BATCHES = 2  # beside the last so many the first chunks of the optimizer may come in: 40 GiB take about a second


# ---- what ranks tell each other --------------------------------------------------------------------------------------


def gathered(mine: object, group: dist.ProcessGroup) -> list:
    """Every rank's object, by rank in the group. Collective over it."""
    pieces: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(pieces, mine, group=group)
    return pieces


def leave_it_to_rank_0(status: int) -> None:
    """Before ranks know each other, each finds the same fault: all but rank 0, which says so next, end here."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(SPEAKS_WITHIN_S)
        sys.exit(status)


# ---- micro-batches ---------------------------------------------------------------------------------------------------


def packed(lengths: list[int], most: int) -> list[slice]:
    """Neighbours of these lengths (tokens) together, in order, up to `most` tokens. What is longer goes alone."""
    runs, start, total = [], 0, 0
    for i, length in enumerate(lengths):
        total += length
        if i > start and total > most:
            runs.append(slice(start, i))
            start, total = i, length
    return [*runs, slice(start, len(lengths))] if lengths else runs


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
    def span(self, name: str, every_stream: bool = True, **args) -> Iterator[None]:
        """An interval. Outermost, it ends when the device has finished: on every stream, or only on the current one,
        so that copies on others go on into the next."""
        start = time.monotonic_ns()
        self._depth += 1
        if self._depth == 1:
            self.phase = name
        try:
            yield
            if self._depth == 1:
                hardware.synchronize(every_stream)  # sync point: a phase has ended when the device has finished it
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
            setattr(self, name, getattr(self, name).to(hardware.device()))

    def part(self, rows: slice) -> "Group":
        """Its responses `rows` alone, as the loss sees them."""
        names = "advantages", "tokens", "mask", "rollout_logprobs", "ref_logprobs"
        return replace(self, **{name: None if (x := getattr(self, name)) is None else x[rows] for name in names})

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
    def tokens(self) -> int:
        """Of its prompts."""
        return sum(len(group.sample.input_ids) for group in self.groups)

    def passes(self, most: int) -> Iterator["SuffixPass"]:
        """The suffixes of all its responses, in passes of at most `most` response tokens."""
        owners = [(g, i) for g, group in enumerate(self.groups) for i in range(len(group.responses))]
        lengths = [max(1, len(self.groups[g].responses[i].token_ids)) for g, i in owners]
        for run in packed(lengths, most):
            rows = [[i for g, i in owners[run] if g == own] for own in range(len(self.groups))]
            yield SuffixPass(self.groups, [slice(own[0], own[-1] + 1) if own else slice(0) for own in rows])


@dataclass
class SuffixPass:
    """Responses of a micro-batch whose suffixes are computed together: of each group the rows."""

    groups: list[Group]
    rows: list[slice]

    @property
    def responses(self) -> tuple[list[torch.Tensor], list[list[int]]]:
        """What model.suffix() takes: each group's tokens, and their lengths."""
        pairs = list(zip(self.groups, self.rows, strict=True))
        return [g.tokens[r] for g, r in pairs], [[len(x.token_ids) for x in g.responses[r]] for g, r in pairs]

    def parts(self, logprobs: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, Group]]:
        """Each group that has responses here, with their log-probabilities."""
        for values, group, rows in zip(logprobs, self.groups, self.rows, strict=True):
            if len(values):
                yield values, group.part(rows)


class PagedReference:
    """The frozen reference: its weights wait in the host pool and occupy the device only inside `with reference:`.

    Without `paging` they arrive at the first use and stay.
    """

    def __init__(self, model, arena: Arena, weights: torch.Tensor, paging: bool = True):
        self.model, self._arena, self._weights, self._paging = model, arena, weights, paging

    def __enter__(self):
        if self._paging or not self._arena.mapped("reference"):
            self._arena.acquire("reference").copy_(self._weights)
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
    arena: Arena
    timeline: Timeline
    control: dist.ProcessGroup  # gloo, the ranks of this data-parallel replica
    tp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    ledger: memory.Ledger
    saved: memory.SavedTensors
    policy: memory.MemoryConfig
    micro_tokens: int = 8192  # prompt tokens of a micro-batch, response tokens of a suffix pass
    log: memory.MemoryLog | None = None
    kv_bytes: int = 0  # of the engine's KV cache on this rank's device, known once the engine is ready
    workers: list[int] = field(default_factory=list)  # ranks of the replica on whose devices this rank's engine works
    engine_host_bytes: int = 0  # of the engine's process on this rank's device, at the last release
    engine_step_bytes: int = 0  # that it had in a rollout besides its KV cache, and gave back, at most
    partition: "Partition" = field(default_factory=lambda: Partition())  # what Phase 1 computes on, beside decode
    beside_tokens: int = 0  # prompt tokens of the prefixes, of either role, that ran beside the last rollout
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
        look_ahead: Callable[[], None] = lambda: None,
    ):
        """One synchronous on-policy iteration: read θk, write θk+1. Collective over all ranks; returns the optimizer's
        StepInfo.

        requests: for this rank's engine (rollout.Request; ids are positions in `groups`). score: fills in rewards for
        the groups that this rank's engine answered. prepare: fills in advantages, returns the loss's denominator over
        this replica. loss: unnormalised, of one group. look_ahead: gives the engines, which are idle from then on,
        something of the next step to do.
        """
        batches = self.micro_batches(groups)
        self._barrier("1: everyone reads θk")
        self.restore_kv()
        if self.engine is not None:
            self.engine.generate(requests)
        self.beside_tokens = 0
        measured = self._overlapped_prefixes(batches) if self.overlap == "prefix" else None
        self._collect(groups, score)
        if measured is not None and self.partition.measures:
            self._measure(*measured)
        denominator = self._over_replicas(prepare(groups))

        self._barrier("2: rollout memory is gone")
        look_ahead()
        self._reference_logprobs(batches)
        self._actor_gradients(batches, loss)

        self._barrier("3: nobody reads θk")
        return self.update(step, 1.0 / max(1.0, denominator))

    def micro_batches(self, groups: list[Group]) -> list[MicroBatch]:
        """Neighbours together, up to micro_tokens prompt tokens."""
        lengths = [len(group.sample.input_ids) for group in groups]
        return [MicroBatch(groups[run]) for run in packed(lengths, self.micro_tokens)]

    def update(self, step: int, grad_scale: float):
        """Phase 3: stream the optimizer, publish θk+1, drop what the engines derived from θk."""
        with self.timeline.span("optimizer"):
            self.optimizer.sum_gradients(self.tp_group, self.dp_group)
            with self.timeline.span("map workspace"):
                self.arena.acquire("workspace")  # the allocator may have to give back all that it caches
            self._sample("optimizer")  # it may be over before the next sample
            info = self.optimizer.step(step, grad_scale, self.tp_group, self.dp_group)
            with self.timeline.span("unmap"):
                for region in ("workspace", "ahead", "gradient"):
                    self.arena.release(region)
        with self.timeline.span("publish"):
            self.snapshot.publish()
            self.version += 1
            dist.barrier(group=self.control)  # every rank of the replica has written its pieces
            if self.engine is not None:
                self.engine.publish(self.version)
        return info

    def restore_kv(self) -> None:
        """Put memory behind the KV cache of this rank's engine. Collective over the replica."""
        if self.policy.engine_release:
            self.ledger.set("rollout_kv", self.kv_bytes)
            # Another process takes it, and memory for its steps: the allocator here would not notice.
            hardware.empty_cache(self.kv_bytes + self.engine_step_bytes + 2**30)
            dist.barrier(group=self.control)
            if self.engine is not None:
                self.engine.restore_kv()

    def release_kv(self) -> None:
        """Take the KV caches off the devices, and count what is left on this one. Collective over the replica."""
        if not self.policy.engine_release:
            return
        mine: dict[int, dict] = {}
        if self.engine is not None:
            mine = dict(zip(self.workers, self.engine.release_kv(), strict=True))
        self.ledger.set("rollout_kv", self.note_engine(mine)["resident_after"])

    def note_engine(self, mine: dict[int, dict]) -> dict:
        """Share the reports of this rank's engine, {rank in the replica: report}, and note what the engine's process on
        this device holds besides its KV cache; returns that process's report. Collective over the replica."""
        reports = {rank: report for piece in gathered(mine, self.control) for rank, report in piece.items()}
        own = reports[dist.get_rank(self.control)]
        self.ledger.set("engine_other", own["other_bytes"])
        self.engine_step_bytes = max(self.engine_step_bytes, own["other_before"] - own["other_bytes"])
        self.engine_host_bytes = own["host_bytes"]
        return own

    def begin_gradients(self) -> None:
        """Map the gradient buffer and zero it; the parameters' hooks add to it (trainer.py)."""
        self.arena.acquire("gradient").zero_()

    # -- Phase 1

    def prefixes(
        self,
        batches: list[MicroBatch],
        limit: AbstractContextManager | None = None,
        go_on: Callable[[], bool] = lambda: True,
    ) -> None:
        """Compute the reference's prefixes, then the actor's; each batch keeps its own until its suffixes. limit: of
        SMs (hardware.SmLimit). go_on: asked before each; those left when it says no are Phase 2's."""
        with limit or nullcontext():
            self._reference_prefixes(batches, go_on)
            self._actor_prefixes(batches, go_on)

    def _overlapped_prefixes(self, batches: list[MicroBatch]) -> tuple[int | None, int, float]:
        """Prefixes until the rollout is over, on the SMs that they may use; returns those, the prefixes' tokens, and
        seconds."""
        self._wait_for_prompts()
        roles = [self._kept(batches)] + [batches] * (self.reference is not None)
        tokens = sum(batch.tokens for role in roles for batch in role)
        start_ns = time.monotonic_ns()
        if (sms := self.partition.next(tokens)) is not None:
            if self._rollout_goes_on():  # else not even the reference's weights need come
                self.prefixes(batches, self.partition.limits[sms], self._rollout_goes_on)
            done = [batch.tokens for batch in batches for p in (batch.reference, batch.actor) if p is not None]
            tokens = self.beside_tokens = sum(done)
        return sms, tokens, (time.monotonic_ns() - start_ns) / 1e9

    def _rollout_goes_on(self) -> bool:
        """Whether an engine of the replica still generates, now that the prefixes so far are computed. Collective over
        the replica: all its ranks compute the next prefix, or none."""
        hardware.synchronize(every_stream=False)  # sync point: what is enqueued could not be left to Phase 2 any more
        return any(gathered(self.engine is not None and self.engine.generating, self.control))

    def _wait_for_prompts(self) -> None:
        """Prefills and prefixes both fill a device: side by side they end no earlier than one after the other, and
        decode, which leaves room beside it, would start later. Collective over the replica."""
        with self.timeline.span("prefill wait"):
            if self.engine is not None:
                self.engine.wait_for_prompts()
            dist.barrier(group=self.control)

    def _measure(self, sms: int | None, tokens: int, prefix_s: float) -> None:
        """Give every rank of the replica its slowest rank's Phase 1, so that all choose alike. Collective over the
        replica."""
        decode_s = self.rollout.seconds if self.engine is not None else 0.0
        steps = sum(work.steps for work in self.rollout.timeline) if self.engine is not None else 0
        decode_s, steps, prefix_s = map(max, zip(*gathered((decode_s, steps, prefix_s), self.control), strict=True))
        self.partition.history.append(Measured(sms, decode_s, steps, prefix_s, tokens))

    def _reference_prefixes(self, batches: list[MicroBatch], go_on: Callable[[], bool]) -> None:
        if self.reference is None:
            return
        with self.timeline.span("reference prefix"), self.reference as model, torch.no_grad():
            for batch in batches:
                if not go_on():
                    break
                self._reference_prefix(model, batch)

    def _actor_prefixes(self, batches: list[MicroBatch], go_on: Callable[[], bool]) -> None:
        with self.timeline.span("actor prefix"):
            for batch in self._kept(batches):
                if not go_on():
                    break
                self._actor_prefix(batch, waits=True)

    def _kept(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Those whose actor prefixes memory lets wait; computing another one would spare Phase 2 nothing, which needs
        it once more."""
        most = self.policy.keep_tokens if self.policy.activations == "keep" else 0  # prompt tokens
        until = itertools.accumulate(batch.tokens for batch in batches)
        return [batch for batch, tokens in zip(batches, until, strict=True) if not most or tokens <= most]

    def _reference_prefix(self, model, batch: MicroBatch) -> None:
        batch.reference = model.prefix(batch.samples)
        self._count("reference_boundary", batch.reference.leaves())

    def _actor_prefix(self, batch: MicroBatch, waits: bool) -> None:
        """What autograd saves stays on the device, leaves it as it is produced, or is not saved at all. waits: for its
        suffixes beside other prefixes, rather than for the next moment."""
        kind = self.policy.activations
        again = waits and kind == "keep" and self.policy.recompute_vision
        with self.saved.offloaded() if kind == "offload" else self.saved.counted("prefix_activations"):
            batch.actor = self.actor.prefix(batch.samples, keep=kind != "recompute", recompute_vision=again)
        self._count("actor_boundary", batch.actor.leaves())

    def _count(self, tag: str, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            self.ledger.track(tag, tensor, tensor)

    def _collect(self, groups: list[Group], score: Callable[[list[Group]], None]) -> None:
        """Wait for this rank's engine, score its responses, share both with the replica's other ranks."""
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
            pieces = gathered([(i, group.responses, group.rewards) for i, group in answered], self.control)
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
                passes = [
                    model.suffix(batch.reference, *run.responses, self.temperature)
                    for run in batch.passes(self.micro_tokens)
                ]
                for group, *values in zip(batch.groups, *passes, strict=True):
                    group.ref_logprobs = torch.cat(values)
                    self._count("logprobs", [group.ref_logprobs])
                batch.reference = None  # last use of the boundary

    def _actor_gradients(self, batches: list[MicroBatch], loss: Callable[[torch.Tensor, Group], torch.Tensor]) -> None:
        self.begin_gradients()
        with self.timeline.span("actor", every_stream=False):  # what is loaded ahead may still be on its way
            for i, batch in enumerate(batches):
                waits = any(later.actor is not None for later in batches[i + 1 :])
                asked = self.optimizer.ahead_bytes and not self.arena.mapped("ahead")
                if asked and not waits and i >= len(batches) - _AHEAD_BATCHES:
                    self._load_ahead()
                if batch.actor is None:
                    with self.timeline.span("actor prefix"):
                        self._actor_prefix(batch, waits=False)
                for run in batch.passes(self.micro_tokens):
                    self._suffix_gradients(batch, run, loss)
                with self.timeline.span("backward"), self.saved.counted("prefix_activations"):
                    self.actor.prefix_backward(batch.actor)  # saves something where it computes a forward pass again
                batch.actor = None
                for group in batch.groups:
                    group.drop()

    def _load_ahead(self) -> None:
        """The optimizer's first chunks come in beside the last micro-batches, where the kept prefixes were."""
        with self.timeline.span("load ahead"):
            needed = self.optimizer.ahead_bytes
            room = self.ledger.has_room(needed) and hardware.has_room(needed + 2**30)
            if room:
                self.optimizer.load_ahead(self.arena.acquire("ahead"))
        self._sample("load ahead" if room else "no room to load ahead")

    def _suffix_gradients(self, batch: MicroBatch, run: SuffixPass, loss: Callable) -> None:
        """Forward and backward to the boundary, where the passes' gradients add up."""
        with self.saved.counted("suffix_activations"):
            with self.timeline.span("actor suffix"):
                logprobs = self.actor.suffix(batch.actor, *run.responses, self.temperature)
                total = sum(loss(new, group) for new, group in run.parts(logprobs))
            with self.timeline.span("backward"):
                total.backward()

    # -- barriers

    def _barrier(self, name: str) -> None:
        """All ranks of the replica arrive before any goes on; memory must hold what the contract lets into the next
        phase."""
        with self.timeline.span("barrier", every_stream=False, before=name):
            hardware.synchronize(every_stream=False)
            dist.barrier(group=self.control)
            self.arena.check()
            memory.check_contract(name[0], self.ledger.held(), self.policy, self.optimizer.ahead_bytes)
            self._sample()  # what the phase that ends had in use since the last
            self.ledger.enter(name[0])
            self._sample(f"barrier {name}")

    def _sample(self, mark: str = "") -> None:
        if self.log is not None:
            self.log.sample(mark)

    def _over_replicas(self, value: float) -> float:
        total = torch.tensor(value, dtype=torch.float64, device=hardware.device())
        dist.all_reduce(total, group=self.dp_group)
        return total.item()


# ---- SM partition ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Phase 1 of one step; the slowest rank of the replica counts."""

    sms: int | None  # that the prefixes could use, 0: all; None: they did not run beside decode
    decode_s: float  # the engine's work: T_D + Δ
    decode_steps: int
    prefix_s: float  # T_P on these SMs; means nothing where they did not run beside decode
    prefix_tokens: int  # of the prefixes, both roles, that ran beside decode; where none was to, of those that could


class Partition:
    """How many SMs overlapped prefixes can have (0: all), and how many are next: the only number, or choose_sms's of
    several."""

    def __init__(self, candidates: tuple[int, ...] = (0,)):
        # Made once: a green context is a partition.
        self.limits = {sms: hardware.SmLimit(sms) if sms else None for sms in candidates}
        self.history: list[Measured] = []

    @property
    def measures(self) -> bool:
        return len(self.limits) > 1

    def next(self, prefix_tokens: int) -> int | None:
        candidates = tuple(self.limits)
        return choose_sms(self.history, candidates, prefix_tokens) if self.measures else candidates[0]


def candidates(policy: str, prefix_sms: int) -> tuple[int, ...]:
    """SMs of the prefixes under --sm-policy: quarters of the GPU in multiples of 8 and all of it for auto, 0 (all) for
    policies that leave the prefixes' stream alone. Half of the GPU, unless prefix_sms says otherwise, for
    green-context."""
    quarters = [hardware.sm_count() * quarter // 32 * 8 for quarter in (1, 2, 3)]
    if policy == "auto":
        return *quarters, 0
    return (prefix_sms or quarters[1],) if policy == "green-context" else (0,)


def choose_sms(history: list[Measured], candidates: tuple[int, ...], prefix_tokens: int) -> int | None:
    """SMs for the next step's prefixes: of the candidates, the one with which the rollout and all prefixes that may run
    beside it (prefix_tokens) take least time.

    The first steps measure: one only warms up, one overlaps nothing (None) and shows decode alone, then each candidate
    has one. From a candidate's last step: T_P by prefix_tokens, and Δ by the share of overlapped time that decode lost;
    T_D by the engine's steps, of which the next step is taken to need as many as the last one. What the rollout's end
    leaves to Phase 2 is taken to be as fast there as with the fastest candidate. Deterministic; the first of equals.
    """
    history = [m for m in history if m.prefix_tokens]  # else the rollout was over before the first prefix
    tour = (candidates[0], None, *candidates)
    if len(history) < len(tour):
        return tour[len(history)]
    alone_s = statistics.median(m.decode_s / m.decode_steps for m in history if m.sms is None)  # an engine step
    decode_s = alone_s * history[-1].decode_steps

    last = {sms: next(m for m in reversed(history) if m.sms == sms) for sms in candidates}
    prefix_s = {sms: m.prefix_s * prefix_tokens / m.prefix_tokens for sms, m in last.items()}

    def together_s(sms: int) -> float:
        delta_s = last[sms].decode_s - alone_s * last[sms].decode_steps
        lost = min(0.99, max(0.0, delta_s / min(last[sms].decode_s, last[sms].prefix_s)))
        rollout_s = decode_s + lost * prefix_s[sms]
        if prefix_s[sms] > rollout_s:  # decode ends first
            rollout_s = decode_s / (1 - lost)
        return rollout_s + max(0.0, 1 - rollout_s / prefix_s[sms]) * min(prefix_s.values())

    return min(candidates, key=together_s)


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
