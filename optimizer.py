"""AdamW whose FP32 state lives in host memory and visits the device a chunk at a time.

FP32 master weights and the two Adam moments take 12 bytes a parameter, six times the BF16 weights, so they never sit on
the device together. They are three flat tensors in the host pool. Phase 3 cuts that flat space into chunks of equal
size and passes each through a small workspace of three slots; all that stays on the device is the new snapshot. The
gradient is on the device already: its buffer is read where it is, and used up.

    flat space   | segment 0 | segment 1      | segment 2 (transposed storage) | ...      offsets in elements
    chunks       |     0      |     1      |     2      |     3      | ...                cuts fall inside tensors

    host pool            workspace: 3 slots x [master, exp_avg, exp_avg_sq]                shared snapshot
    master      ─load──▶ slot (j+1) % 3   ┐
    exp_avg              slot  j    % 3   ├ update: AdamW in place, then cast ───────────▶ segment.dest (BF16 or FP32)
    exp_avg_sq ◀offload─ slot (j-1) % 3   ┘ gradient buffer [a, b): scaled, then scratch

Each stage has its own stream. Chunk j+1 loads and chunk j-1 returns while chunk j is updated; a slot is loaded again
only after its offload. On a CPU the three streams are one and the stages take turns.

Both directions at once are slower than one alone, and in Phase 2 neither is used. So `load_ahead` fills further slots
with the first chunks beside the last micro-batches, when the kept prefixes have left room; of those `step` only has the
copies out to wait for. Afterwards these slots take turns with the workspace's three.

    Phase 2, last micro-batches      Phase 3
    load 0 │ 1 │ …       norm, still load … │ the rest, while a slot is free │ update 0 │ 1 │ … │ offload 0 │ 1 │ …

A GPU has one engine for copies in, and serves what it is given in order: an upload of the micro-batch would wait for
every byte enqueued before it. So a thread loads ahead in pieces of 60 MiB, each once the one before has arrived; an
upload then waits for one at most, about 1 ms. `step` stops the thread where it has got to, once the norm is known, and
streams the rest, so `ahead_gib` is room: how much comes ahead depends on the time there is. A step for which nothing
was loaded ahead begins with what fits into the workspace beside the norm's scratch.

Nothing is written before the whole gradient is known to be good: `step` first sums squares (FP64) and adds them over
the tensor-parallel group; if any rank saw NaN or Inf, every rank skips the step and no byte of any rank changes.

Rounding. The update is the sequence of operations of torch.optim.AdamW (torch 2.11, `_single_tensor_adam`), all of them
elementwise, so where the cuts fall cannot change a bit. tests/test_optimizer.py verifies on a CPU that master weights,
moments and FP32 destinations are bit-identical to torch.optim.AdamW(foreach=False), in chunks of 96 elements as in one,
with weight decay, and with gradients times the same grad_scale * clip_coef. Only that factor deviates: ours comes
from an FP64 norm and is applied in one multiplication, clip_grad_norm_'s from FP32 (about 1e-7 relative apart).

Run:
    CPU:  OMP_NUM_THREADS=2 python optimizer.py --params-million 64
    GPU:  python optimizer.py --params-million 4000 --config.chunk-mib 512 [--config.ahead-gib 20]

Left out on purpose: sharding the state over data-parallel replicas (each replica updates its own snapshot; the gradient
is already summed over them), AMSGrad, parameter groups with their own learning rate, and a fused kernel.
To change the update, edit `_adamw`; to change what is clipped or skipped, edit `step`.
"""

import math
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, zip_longest
from typing import Any, Literal

import torch
import torch.distributed as dist
import tyro
from torch import Tensor

import hardware
from arena import HostPool

_SLOTS = 3  # one chunk loading, one updating, one returning
_ROWS = 3  # FP32 rows of a slot: master, exp_avg, exp_avg_sq
_ALIGN = 32  # elements: chunk cuts fall on 128-byte boundaries of the FP32 tensors
_NORM_BLOCK, _NORM_BLOCKS = 1 << 20, 256  # elements squared at once, at least; and about how many blocks there are
_PIECE = 5 << 20  # elements loaded ahead at once: 60 MiB, for which an upload may have to wait
_STATE = ("master", "exp_avg", "exp_avg_sq")
_COUNTERS = ("adam_steps", "skipped_in_row", "skipped_total")


@dataclass(frozen=True)
class OptimizerConfig:
    lr: float = 1e-6
    """Peak learning rate. Fine-tuning a pretrained model: 1e-7 to 5e-6; a tiny model from scratch: 1e-4 to 3e-3."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of Adam's first and second moment, each in [0, 1)."""
    eps: float = 1e-8
    """Added to the root of the second moment, after bias correction."""
    weight_decay: float = 0.0
    """Decoupled weight decay: each step takes lr * weight_decay off a weight. Norms and biases are exempt. 0 to 0.1."""
    max_grad_norm: float = 5.0
    """Clip the gradient to this global L2 norm. 0 switches clipping off; the norm is still measured."""
    warmup_steps: int = 0
    """Steps of linear warm-up from lr / warmup_steps to lr."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up: held, or brought down to min_lr_ratio * lr at decay_steps."""
    decay_steps: int = 0
    """Step at which linear and cosine arrive at min_lr_ratio * lr, counted from the run's start, warm-up included."""
    min_lr_ratio: float = 0.0
    """Where linear and cosine end, as a share of lr, in [0, 1]."""
    chunk_mib: float = 64.0
    """Workspace of one chunk in MiB (12 bytes a parameter); three are in use at once. 4 to 512: large enough that a
    copy is not dominated by its start, small enough to fit beside the gradient."""
    ahead_gib: float = 0.0
    """Device memory for chunks that are loaded ahead, beside the last micro-batches of Phase 2, GiB; 0: none. As many
    whole chunks as fit, and no more than there are besides the workspace's three; those that have not come by then are
    loaded in Phase 3. `python plan.py --ahead-gib` says whether there is room for them; nothing else does."""
    max_skipped_steps: int = 3
    """Non-finite gradients tolerated in a row: every rank skips such a step; one more than this stops the run."""

    def validate(self) -> None:
        """Raise ValueError naming the field, its value and the fix."""
        _check(self.lr > 0, f"optimizer.lr is {self.lr}: it must be above 0")
        _check(all(0 <= b < 1 for b in self.betas), f"optimizer.betas are {self.betas}: each must lie in [0, 1)")
        _check(self.eps > 0, f"optimizer.eps is {self.eps}: it must be above 0")
        for name in ("weight_decay", "max_grad_norm", "warmup_steps", "max_skipped_steps"):
            value = getattr(self, name)
            _check(value >= 0, f"optimizer.{name} is {value}: it must not be negative")
        _check(_capacity(self) > 0, f"optimizer.chunk_mib is {self.chunk_mib}: the smallest chunk is 384 bytes")
        whole = f"0, or room for a chunk of chunk_mib {self.chunk_mib} at the least"
        _check(self.ahead_gib == 0 or _ahead(self) > 0, f"optimizer.ahead_gib is {self.ahead_gib}: it must be {whole}")
        if self.schedule == "constant":
            unused = self.decay_steps or self.min_lr_ratio
            _check(not unused, "optimizer.decay_steps and min_lr_ratio do nothing with schedule constant: leave them 0")
            return
        _check(0 <= self.min_lr_ratio <= 1, f"optimizer.min_lr_ratio is {self.min_lr_ratio}: it must lie in [0, 1]")
        wanted = f"set it above warmup_steps ({self.warmup_steps}), usually to the run's number of steps"
        late = self.decay_steps > self.warmup_steps
        _check(late, f"optimizer.decay_steps is {self.decay_steps} with schedule {self.schedule}: {wanted}")


@dataclass(frozen=True)
class Segment:
    """One tensor's place in the flat space of one rank."""

    name: str
    numel: int
    offset: int  # elements from the start of the flat space; segments follow one another without gaps
    dest: Tensor  # [numel] contiguous BF16 or FP32 view of where the weight lies, in storage order (Case 2: transposed)
    decay: bool = True  # weight decay applies
    counted: bool = True  # adds to the global norm on this rank: a replicated tensor only on tensor-parallel rank 0
    partial: bool = False  # this rank's gradient is its share of a replicated tensor's: sum_gradients adds them up

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class StepInfo:
    grad_norm: float  # global L2 norm of the scaled gradient before clipping; not finite when skipped
    lr: float
    skipped: bool  # a gradient was not finite on some rank: nothing changed, Adam's step count included
    clip_coef: float  # factor from clipping, at most 1
    bytes_loaded: int  # copied to the device, in the step or ahead of it: 12 bytes a parameter
    bytes_offloaded: int  # copied back to the host pool: as many
    seconds: float
    bytes_ahead: int = 0  # of bytes_loaded: what had arrived when the norm was known
    nonfinite: str = ""  # "rank 1: layers.3.mlp.up" for each rank that saw NaN or Inf, when skipped


def lr_at(step: int, config: OptimizerConfig) -> float:
    """Learning rate of a step, counted from 0 and skipped steps included."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / (config.decay_steps - config.warmup_steps))
    shape = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)


def workspace_bytes(config: OptimizerConfig, unchunked: int = 0) -> int:
    """Device memory that the update uses, whatever the size of the model; all of it if `unchunked` parameters come at
    once."""
    slots, capacity = _slots(config, unchunked)
    return slots * _ROWS * 4 * capacity


def ahead_chunks(config: OptimizerConfig, total: int) -> int:
    """Chunks of `total` parameters that are loaded ahead: as many as fit, but for the last three, which need only the
    workspace."""
    return max(0, min(_ahead(config), len(_balanced_chunks(total, _capacity(config))) - _SLOTS))


def ahead_bytes(config: OptimizerConfig, total: int) -> int:
    """Device memory for them, besides the workspace."""
    return ahead_chunks(config, total) * _ROWS * 4 * _capacity(config)


class StreamedAdamW:
    """AdamW over `segments`, streamed through `workspace`.

    segments:  one a tensor, in offset order, together covering [0, total)
    grad_flat: [total] FP32, in the same order; sum_gradients adds to it, and an update uses it up
    pool:      a HostPool with 12 bytes a parameter to spare
    workspace: uint8 or FP32, at least workspace_bytes(config), mapped whenever a method runs; None allocates it
    unchunked: load, update and return everything as one chunk, which needs workspace_bytes(config, parameters)

    Every destination equals its master weight cast to the destination's dtype, after init_master, step and
    load_state_dict alike. sum_gradients comes before step, so that replicas, and replicated tensors, stay equal.
    """

    def __init__(
        self,
        segments: list[Segment],
        grad_flat: Tensor,
        pool: HostPool,
        config: OptimizerConfig,
        workspace: Tensor | None = None,
        unchunked: bool = False,
    ):
        config.validate()
        self.config = config
        self.segments = segments
        self.total = _check_segments(segments)
        _check_flat("grad_flat", grad_flat, self.total, (torch.float32,))
        self.grad = grad_flat
        whole = self.total if unchunked else 0
        slots, capacity = _slots(config, whole)
        self.workspace = _fp32_workspace(workspace, workspace_bytes(config, whole))
        self.slots = self.workspace.view(slots, _ROWS, capacity)
        self.ahead_bytes = 0 if unchunked else ahead_bytes(config, self.total)  # what load_ahead() has a use for
        # While chunks load ahead: the coming step's slots, and a future of how many elements have come into them.
        self._ahead: tuple[list[Tensor], Future] | None = None
        self._halt, self._loader = threading.Event(), ThreadPoolExecutor(1, "load ahead")
        shape = (self.total,)  # 12 bytes a parameter in all: over 1 GiB from 90 million parameters up
        self.master, self.exp_avg, self.exp_avg_sq = (
            pool.alloc(f"optimizer.{n}", shape, torch.float32) for n in _STATE
        )
        self.exp_avg.zero_()
        self.exp_avg_sq.zero_()
        self.adam_steps = 0  # updates made: t of the bias correction, so a skipped step does not count
        self.skipped_in_row = 0
        self.skipped_total = 0
        self.chunks = _balanced_chunks(self.total, capacity)
        self._block = self._norm_block()
        self._beside_norm = (self.workspace.numel() - 2 * self._block) // self.slots[0].numel()  # slots, FP64 is 2 FP32
        self._segment_runs = [(s.offset, s.end, s) for s in segments]
        self._decay_runs = _runs(segments, lambda s: s.decay)
        self._counted_runs = _runs(segments, lambda s: s.counted)
        self._partial_runs = _runs(segments, lambda s: s.partial)
        self._load, self._update, self._offload = hardware.Stream(), hardware.Stream(), hardware.Stream()

    @torch.no_grad()
    def init_master(self) -> None:
        """Set the FP32 master weights from the destinations (exact: BF16 to FP32 only widens)."""
        self._stream((), self._read_dest, (self.master,))

    @torch.no_grad()
    def write_dest(self) -> None:
        """Regenerate every destination from the master weights."""
        self._stream((self.master,), self._write_dest, ())

    @torch.no_grad()
    def sum_gradients(self, tp_group=None, dp_group=None) -> None:
        """Add up partial gradients over the tensor-parallel group, then all over the replicas, in FP32 and in place.

        Collective, like step. One all-reduce for each run of partial segments: the model's are one run.
        """
        if tp_group is not None and dist.get_world_size(tp_group) > 1:
            for a, b, shares in self._partial_runs:
                if shares:
                    dist.all_reduce(self.grad[a:b], group=tp_group)
        if dp_group is not None and dist.get_world_size(dp_group) > 1:
            dist.all_reduce(self.grad, group=dp_group)

    @torch.no_grad()
    def load_ahead(self, room: Tensor | None = None) -> None:
        """Start to load the first chunks into `room`, where the next step finds what has come. Waits for nothing.

        room: uint8, ahead_bytes, mapped until that step has returned, and of no use to what streams have been given so
        far: the loads do not wait for that. None: the workspace, as far as the norm leaves it alone. A skipped step
        forgets them, and so does whatever else passes over the state before the step. What a load raises, these raise.
        """
        self._stop_loading()
        first, more = self.slots[: self._beside_norm], self.slots[self._beside_norm :]
        if room is not None:
            first, more = room[: self.ahead_bytes].view(torch.float32).view(-1, *self.slots.shape[1:]), self.slots
        self._halt.clear()
        self._ahead = [*first, *more], self._loader.submit(self._load_pieces, first)

    @torch.no_grad()
    def step(self, step_index: int, grad_scale: float = 1.0, tp_group=None, dp_group=None) -> StepInfo:
        """One update from `grad_flat * grad_scale`, clipped; or none, on any rank, if the gradient is not finite.

        An update leaves nothing of use in grad_flat; a skipped step leaves it as it is.

        step_index: trainer step from 0, sets the learning rate.  grad_scale: 1 / the loss's denominator.
        Collective: every rank of both process groups calls it. A None group means this rank alone.
        Raises RuntimeError on every rank after more than max_skipped_steps skips in a row.
        """
        start = time.perf_counter()
        _check(math.isfinite(grad_scale), f"grad_scale is {grad_scale}: the loss's denominator must not be 0")
        lr = lr_at(step_index, self.config)
        if self._ahead is None:
            self.load_ahead()
        norm, bad = self._global_norm(grad_scale, tp_group, dp_group)
        slots, come = self._stop_loading()
        if bad:
            where = self._locate_nonfinite(tp_group, dp_group)
            self._count_skip(step_index, where)
            return StepInfo(norm, lr, True, 1.0, 0, 0, time.perf_counter() - start, nonfinite=where)
        self.skipped_in_row = 0
        self.adam_steps += 1
        limit = self.config.max_grad_norm
        clip_coef = min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
        update = partial(self._adamw, lr=lr, scale=grad_scale * clip_coef)
        self._stream(self._state, update, self._state, slots, come)
        moved = 12 * self.total, 12 * self.total
        return StepInfo(norm, lr, False, clip_coef, *moved, time.perf_counter() - start, 12 * come)

    def state_dict(self) -> dict[str, Any]:
        """Everything that exact resume needs. The tensors are references: save them before the next step."""
        layout = [[s.name, s.numel] for s in self.segments]
        return {"layout": layout} | {name: getattr(self, name) for name in _STATE + _COUNTERS}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state and regenerate the destinations from its master weights."""
        for saved, own in zip_longest(state["layout"], self.segments):
            seen, here = saved and tuple(saved), own and (own.name, own.numel)
            fix = "resume with the model, train_tp and qkv layout of the run that saved it"
            _check(seen == here, f"optimizer state is for another layout (saved {seen}, here {here}): {fix}")
        for name in _STATE:
            getattr(self, name).copy_(state[name])
        for name in _COUNTERS:
            setattr(self, name, state[name])
        self.write_dest()

    @property
    def _state(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.master, self.exp_avg, self.exp_avg_sq

    def _load_pieces(self, slots: Tensor) -> int:
        """Load the first chunks into `slots` until told to halt, in a thread of its own; returns the elements loaded.
        Every piece is waited for: nothing is queued before an upload but the one that is on its way."""
        come = 0
        with torch.cuda.device_of(slots):  # a thread begins on GPU 0; nothing on a CPU
            for slot, (a, b) in zip(slots, self.chunks, strict=False):
                for c in range(a, b, _PIECE):
                    if self._halt.is_set():
                        return come
                    come = min(c + _PIECE, b)
                    self._fill(slot[:, c - a : come - a], self._state, c, come)
                    with self._load:
                        hardware.synchronize(every_stream=False)  # sync point, of this thread alone
        return come

    def _stop_loading(self) -> tuple[list[Tensor], int]:
        """Stop the thread and forget what it was loading, which is returned: the coming step's slots, and how many
        elements lie in the first of them. Raises what a load raised."""
        if self._ahead is None:
            return [*self.slots], 0
        (slots, pieces), self._ahead = self._ahead, None
        self._halt.set()
        return slots, pieces.result()  # sync point: until the piece on its way is there

    def _fill(self, rows: Tensor, loads: tuple[Tensor, ...], a: int, b: int, after=None):
        """Enqueue copies of elements [a, b) of `loads` into a slot's rows, after a mark; returns the mark of their
        end."""
        with self._load:
            if after is not None:
                self._load.wait(after)
            for row, source in zip(rows, loads, strict=False):
                row.copy_(source[a:b], non_blocking=True)
            return self._load.record()

    def _stream(
        self,
        loads: tuple[Tensor, ...],
        work: Callable,
        offloads: tuple[Tensor, ...],
        slots: Sequence[Tensor] = (),
        come: int = 0,
    ) -> None:
        """Pass every chunk through load, update and offload.

        `loads` fill a slot's rows in order, work(rows [3, b - a], a, b) runs on them, and they go back to `offloads`.
        `slots`, the workspace's if none are given, take turns; in the first of them `come` elements lie already. The
        host only enqueues: marks on the streams keep the stages of one chunk, and the uses of one slot, in order.
        """
        self._stop_loading()  # after this pass what was loaded is not the state's any more
        slots = slots or [*self.slots]
        offloaded, count = [None] * len(slots), len(slots)
        for j, (a, b) in enumerate(self.chunks):
            rows, c = slots[j % count][:, : b - a], min(max(a, come), b)
            # Until it is offloaded the slot may still hold an earlier chunk.
            loaded = self._fill(rows[:, c - a :], loads, c, b, offloaded[j % count])
            with self._update:
                self._update.wait(loaded)
                work(rows, a, b)
                updated = self._update.record()
            with self._offload:
                self._offload.wait(updated)
                for row, target in zip(rows, offloads, strict=False):
                    target[a:b].copy_(row, non_blocking=True)
                offloaded[j % count] = self._offload.record()
        hardware.synchronize()  # sync point: the host reads the state, and others the snapshot, from here on

    def _adamw(self, rows: Tensor, a: int, b: int, lr: float, scale: float) -> None:
        """AdamW on flat elements [a, b). rows [3, b - a]: master, exp_avg, exp_avg_sq; the gradient lies in its buffer.

        Operations and their order are torch's, bias corrections in Python floats included. Nothing is allocated.
        """
        (master, exp_avg, exp_avg_sq), grad = rows, self.grad[a:b]
        (beta1, beta2), t = self.config.betas, self.adam_steps
        grad.mul_(scale)
        if self.config.weight_decay != 0:
            for c, d, decay in _clipped(self._decay_runs, a, b):
                if decay:
                    master[c - a : d - a].mul_(1 - lr * self.config.weight_decay)
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denom = torch.sqrt(exp_avg_sq, out=grad)  # the gradient is used up: its place becomes the denominator's
        denom.div_((1 - beta2**t) ** 0.5).add_(self.config.eps)
        master.addcdiv_(exp_avg, denom, value=-(lr / (1 - beta1**t)))
        self._write_dest(rows, a, b)

    def _write_dest(self, rows: Tensor, a: int, b: int) -> None:
        for c, d, segment in _clipped(self._segment_runs, a, b):
            segment.dest[c - segment.offset : d - segment.offset].copy_(rows[0, c - a : d - a])

    def _read_dest(self, rows: Tensor, a: int, b: int) -> None:
        for c, d, segment in _clipped(self._segment_runs, a, b):
            rows[0, c - a : d - a].copy_(segment.dest[c - segment.offset : d - segment.offset])

    def _global_norm(self, scale: float, tp_group, dp_group) -> tuple[float, bool]:
        """L2 norm of the scaled gradient over the tensor-parallel group, and whether any rank's gradient is not finite.

        A sum of squares in FP64 cannot overflow from finite FP32 values, so it is finite exactly if they all are.
        """
        sums = [torch.zeros((), dtype=torch.float64, device=self.workspace.device) for _ in range(2)]
        for a, b, counted in self._counted_runs:
            sums[counted] += self._sum_squares(a, b)
        squares = torch.stack([sums[True], (~torch.isfinite(sums[True] + sums[False])).double()])
        if tp_group is not None:
            dist.all_reduce(squares, group=tp_group)  # every tensor-parallel rank
        if dp_group is not None:
            dist.all_reduce(squares, op=dist.ReduceOp.MAX, group=dp_group)  # every replica: their sums are equal
        total, bad = squares.tolist()  # sync point: also orders the streams behind whatever made the gradient
        return (math.nan if bad else math.sqrt(total) * abs(scale)), bad > 0

    def _norm_block(self) -> int:
        """Elements of a block of the norm.

        A block costs four launches, so their size, a power of two, follows the model's. It depends on chunk_mib, and
        with it the norm's last bits, only where a block does not fit into the workspace: below 2.7 up to 500 million
        parameters, 43 at 8 billion.
        """
        block = max(_NORM_BLOCK, 1 << (self.total // _NORM_BLOCKS).bit_length() >> 1)
        return min(block, self.workspace.numel() // 2, self.total)

    def _sum_squares(self, a: int, b: int) -> Tensor:
        """Sum of squares of the gradient's elements [a, b): 0-d FP64, in order, in blocks widened in the workspace."""
        wide = self.workspace.view(torch.float64)[-self._block :]  # the slots before it may be loading
        total = torch.zeros((), dtype=torch.float64, device=wide.device)
        for c in range(a, b, self._block):
            d = min(c + self._block, b)
            values = wide[: d - c].copy_(self.grad[c:d])
            total += torch.dot(values, values)
        return total

    def _locate_nonfinite(self, tp_group, dp_group) -> str:
        """Rank and first bad segment of every rank that has one. A collective, like step; only on the failure path."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        bad = (s.name for s in self.segments if not torch.isfinite(self._sum_squares(s.offset, s.end)))
        found = [f"rank {rank}: {name}" for name in bad][:1]
        for group in (tp_group, dp_group):
            if group is not None:
                parts = [None] * dist.get_world_size(group)
                dist.all_gather_object(parts, found, group=group)
                found = sorted({entry for part in parts for entry in part})
        return ", ".join(found)

    def _count_skip(self, step_index: int, where: str) -> None:
        self.skipped_in_row += 1
        self.skipped_total += 1
        allowed = self.config.max_skipped_steps
        if self.skipped_in_row > allowed:
            raise RuntimeError(
                f"step {step_index}: gradient not finite for {self.skipped_in_row} steps in a row, "
                f"optimizer.max_skipped_steps allows {allowed}; first bad tensor on {where}. "
                "Look at loss and grad_norm in the steps before it; lower optimizer.lr or optimizer.max_grad_norm"
            )


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _capacity(config: OptimizerConfig) -> int:
    """Parameters that fit in one slot."""
    return int(config.chunk_mib * 2**20) // (_ROWS * 4) // _ALIGN * _ALIGN


def _ahead(config: OptimizerConfig) -> int:
    """Chunks that fit into ahead_gib, which may be a multiple of chunk_mib but for rounding."""
    return int(config.ahead_gib * 1024 / config.chunk_mib + 1e-6)


def _slots(config: OptimizerConfig, unchunked: int) -> tuple[int, int]:
    """Slots of the workspace and parameters that fit in one."""
    return (1, -(-unchunked // _ALIGN) * _ALIGN) if unchunked else (_SLOTS, _capacity(config))


def _check_segments(segments: list[Segment]) -> int:
    """Elements of the flat space. Raises ValueError where segments leave gaps or two destinations overlap."""
    _check(len(segments) > 0, "the optimizer got no segments: no parameter is trained")
    end = 0
    for s in segments:
        _check(s.numel > 0, f"segment {s.name} is empty")
        _check(s.offset == end, f"segment {s.name} starts at element {s.offset}, the one before it ends at {end}")
        _check_flat(f"dest of segment {s.name}", s.dest, s.numel, (torch.bfloat16, torch.float32))
        end = s.end
    spans = sorted((s.dest.data_ptr(), s.dest.data_ptr() + s.dest.nbytes, s.name) for s in segments)
    for (_, stop, first), (start, _, second) in pairwise(spans):
        _check(stop <= start, f"dest of segment {first} overlaps that of {second}: list a shared weight once")
    return end


def _check_flat(what: str, tensor: Tensor, numel: int, dtypes: tuple[torch.dtype, ...]) -> None:
    good = tensor.shape == (numel,) and tensor.is_contiguous() and tensor.dtype in dtypes
    wanted = f"a contiguous 1-D tensor of {numel} {' or '.join(map(str, dtypes))}"
    _check(good, f"{what} must be {wanted}, got {list(tensor.shape)} strides {tensor.stride()} {tensor.dtype}")


def _fp32_workspace(workspace: Tensor | None, need: int) -> Tensor:
    """`workspace` cut to the `need` bytes of the slots, viewed as FP32; allocated if None."""
    if workspace is None:
        workspace = torch.empty(need, dtype=torch.uint8, device=hardware.device())
    good = workspace.dim() == 1 and workspace.is_contiguous() and workspace.nbytes >= need
    fix = "enlarge it or lower optimizer.chunk_mib"
    _check(good, f"the workspace must be a contiguous 1-D tensor of {need} bytes, got {workspace.nbytes}: {fix}")
    return workspace.view(torch.uint8)[:need].view(torch.float32)


def _balanced_chunks(total: int, capacity: int) -> list[tuple[int, int]]:
    """The fewest [a, b) that cover [0, total) with at most `capacity` elements each, equal up to rounding by _ALIGN."""
    count = -(-total // capacity)
    size = -(-total // count)
    size = -(-size // _ALIGN) * _ALIGN
    return [(a, min(a + size, total)) for a in range(0, total, size)]


def _runs(segments: list[Segment], key: Callable[[Segment], bool]) -> list[tuple[int, int, bool]]:
    """Maximal stretches (a, b, value) of the flat space on which key(segment) is the same."""
    runs: list[tuple[int, int, bool]] = []
    for s in segments:
        start = runs.pop()[0] if runs and runs[-1][2] == key(s) else s.offset
        runs.append((start, s.end, key(s)))
    return runs


def _clipped(runs: list[tuple[int, int, Any]], a: int, b: int) -> Iterator[tuple[int, int, Any]]:
    """The parts of sorted `runs` that lie in [a, b)."""
    first = bisect_right(runs, a, key=lambda run: run[1])
    for start, end, value in runs[first:]:
        if start >= b:
            return
        yield max(start, a), min(end, b), value


@dataclass(frozen=True)
class _Demo:
    params_million: float = 64
    """Parameters in millions; each takes 12 bytes of host memory and, for this demonstration, 10 of device memory."""
    steps: int = 5
    """Steps to time, after a first one that also touches the memory."""
    config: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(weight_decay=0.01))


def _copy_rate(target: Tensor, source: Tensor) -> float:
    """Bytes a second of one plain copy, the second of two."""
    for _ in range(2):
        start = time.perf_counter()
        target.copy_(source)
        hardware.synchronize()
    return source.nbytes / (time.perf_counter() - start)


def _main(demo: _Demo) -> None:
    total, device = int(demo.params_million * 1e6), hardware.device()
    dest = torch.randn(total, device=device).bfloat16()
    cuts = [total * i // 64 for i in range(65)]
    segments = [Segment(f"tensor {a}", b - a, a, dest[a:b]) for a, b in pairwise(cuts)]
    grad = torch.randn(total, device=device)
    optimizer = StreamedAdamW(segments, grad, HostPool(12 * total + 4096), demo.config)
    optimizer.init_master()
    room, infos = torch.empty(optimizer.ahead_bytes, dtype=torch.uint8, device=device), []
    for i in range(1 + demo.steps):
        if len(room):
            optimizer.load_ahead(room)
            wait([optimizer._ahead[1]])  # the clock starts when they are there
        infos.append(optimizer.step(i, 1e-3))
    infos = infos[1:]
    seconds, info = sorted(info.seconds for info in infos)[len(infos) // 2], infos[0]
    ahead = len(room) // optimizer.slots[0].nbytes  # chunks
    loaded = info.bytes_loaded - 12 * sum(b - a for a, b in optimizer.chunks[:ahead])
    moved_gb = (loaded + info.bytes_offloaded) / 1e9
    scratch = torch.empty_like(grad)
    rate_in, rate_out = _copy_rate(scratch, optimizer.master), _copy_rate(optimizer.exp_avg, scratch)
    floor = loaded / rate_in + info.bytes_offloaded / rate_out
    chunks = f"{len(optimizer.chunks)} chunks of at most {demo.config.chunk_mib:g} MiB, {ahead} of them loaded before"
    print(f"{total / 1e6:g} M parameters, {chunks}, on {device} with {torch.get_num_threads()} threads")
    print(f"step      {seconds:.3f} s (median of {demo.steps}), {moved_gb:.2f} GB moved, {moved_gb / seconds:.1f} GB/s")
    print(f"floor     {floor:.3f} s for the copies alone: in at {rate_in / 1e9:.1f}, out at {rate_out / 1e9:.1f} GB/s")
    print(f"distance  {seconds / floor:.2f} x the floor (below 1 is possible where both directions run at once)")
    used_mib = (workspace_bytes(demo.config) + len(room)) / 2**20
    print(f"memory    workspace {used_mib:.0f} MiB, host pool {12 * total / 2**30:.2f} GiB")


if __name__ == "__main__":
    _main(tyro.cli(_Demo, description=__doc__.splitlines()[0]))
