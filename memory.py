"""Memory: what may be on the device when, and what is.

    MemoryConfig     what stays on the device: every policy can be switched off
    CONTRACT         the paper's Table 3: which object may be there at which barrier  ─┐
    Ledger           bytes by object, as they come and go ─────────────────────────────┴─ compared at each barrier
    SavedTensors     what autograd keeps: counted in the ledger, or moved to the host pool
    MemoryLog        the ledger over time, RUN/memory-*.jsonl

An object occupies device memory only between its first latency-critical use and its last use (Rollplex, §3.2). A Ledger
counts every object as it comes and goes: regions when arena.py maps them, tensors that autograd keeps as long as it
keeps them. At each barrier its contents are compared with CONTRACT; what should have been gone is an error that names
it. The same counts make the peak of each phase, the limit and the memory log.

Run:
    python memory.py                     # CPU or GPU: what the memory log costs
    python memory.py --model qwen2.5-vl-32b --train-tp 8 --rollout-tp 4      # what will fit, see plan.py
To change what stays in device memory, edit CONTRACT and the acquire and release calls in sched.py; to change how, edit
arena.py.
"""

import json
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from hardware import Stream, device, host_bytes, limit_allocator, readable, unnamed_bytes

if TYPE_CHECKING:  # arena.py imports this file
    from arena import Arena, HostPool


@dataclass(frozen=True)
class MemoryConfig:
    """What stays in device memory. Each policy can be switched off, which is Figure 8's ablation of it."""

    activations: Literal["keep", "offload", "recompute"] = "keep"
    """Of actor prefixes, between their forward and backward: keep them on the device, move them to the host pool as
    they are produced, or drop them and compute the prefix a second time."""
    keep_tokens: int = 0
    """With activations keep: of how many prompt tokens a replica's prefixes may run beside decode and are kept, in
    whole micro-batches; the others are computed after it, where their suffixes need them. 0: all may."""
    recompute_vision: bool = False
    """Of actor prefixes that run beside decode keep only the input of each block of the vision tower, most of whose
    bytes are the blocks', and compute the rest again, block by block, in its backward: a second forward pass of the
    tower, for which about twice as many prefixes can be kept."""
    recompute_layers: bool = False
    """Keep only the input of each layer that a training pass saves (language model and vision tower) and compute the
    rest again, layer by layer, in its backward: a second forward pass of prefixes and suffixes, whose activations then
    no longer bound the budgets. `activations` decides about a prefix's inputs as about all that it saves otherwise."""
    offload_gib: float = 4.0
    """Part of the host pool for offloaded activations, GiB a rank; used with activations offload only."""
    state_offload: bool = True
    """FP32 master weights and moments live in the host pool; off: on the device, always."""
    chunked_optimizer: bool = True
    """The optimizer's state visits the device in chunks of --optimizer.chunk-mib; off: all of it at once."""
    weight_sharing: bool = True
    """The engine reads the trainer's snapshot; off: it has a copy of its own, written at each publication."""
    engine_release: bool = True
    """The engine's KV cache leaves the device after generation; off: it stays."""
    reference_paging: bool = True
    """The reference's weights are on the device only around their two windows; off: always."""
    hbm_limit_gib: float = 0.0
    """Behave as a device of this size, GiB: what would exceed it is an error that names the object and the phase. 0:
    the device's own size, or no limit on a CPU."""
    host_limit_gib: float = 0.0
    """Host memory that the ranks of a host and their engines may need together, GiB; checked at the start. 0: the
    memory limit of the control group, or what the host has available."""
    sample_ms: float = 25.0
    """Interval of the memory log, RUN/memory-*.jsonl, in milliseconds; 50 or less shows every phase. 0 writes none."""

    def validate(self) -> None:
        """Raise ValueError naming the field, its value and the fix."""
        for name in ("hbm_limit_gib", "host_limit_gib", "sample_ms", "offload_gib", "keep_tokens"):
            value = getattr(self, name)
            if value < 0:
                raise ValueError(f"--memory.{name.replace('_', '-')} {value}: expected 0 or more")
        if self.activations == "offload" and not self.offload_gib:
            raise ValueError("--memory.offload-gib 0: expected room for the activations that are offloaded")

    def check_given(self, given: set[str], overlap: str, reference: bool) -> None:
        """Raise ValueError for a field that somebody gave and that cannot take effect beside the others.

        given: fields as the command line names them (memory.keep-tokens); what is not among them, a default or the
        planner's choice, may well have no effect. reference: there is one (--algo.kl-coef)."""
        activations, keeps = f"--memory.activations {self.activations}", self.activations == "keep"
        other, fix = ("--overlap none", "--overlap prefix") if keeps else (activations, "--memory.activations keep")
        why = f"or {fix} beside it: with {other} no actor prefix is kept beside decode"
        rules = (  # field, whether it asks for something, whether it gets it, what was expected
            ("keep-tokens", self.keep_tokens, keeps and overlap == "prefix", f"0, {why}"),
            ("recompute-vision", self.recompute_vision, keeps and overlap == "prefix", f"off, {why}"),
            ("recompute-vision", self.recompute_vision, not self.recompute_layers,
             "off with --memory.recompute-layers, which computes the vision tower's blocks again as well"),
            ("offload-gib", self.offload_gib, self.activations == "offload",
             f"--memory.activations offload beside it: with {activations} nothing is offloaded"),
            ("reference-paging", not self.reference_paging, reference,
             "on with --algo.kl-coef 0: there is no reference to stay on the device"),
        )  # fmt: skip
        for field, asks, gets, expected in rules:
            if f"memory.{field}" in given and asks and not gets:
                raise ValueError(f"--memory.{field}: expected {expected}")


# ---- contract --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One object of the paper's Table 3: its lifetime, and at which barriers it may be in device memory."""

    tag: str
    object: str
    produced: str
    consumed: str
    autograd: str
    residency: str
    in_phase1_peak: str
    barriers: str  # digits of the barriers at which it may be there: barrier k opens phase k
    required: str  # digits of the barriers at which it must be there
    releases: str  # who takes it away, for the error


# Rollplex, appendix, Table 3; the two last rows are ours. The runtime keeps no prefix log-probabilities: the loss needs
# only those of response tokens, and the first of them comes from the last prompt token, which is part of the suffix.
CONTRACT = (
    Row(
        "rollout_kv", "rollout KV", "P1 prefill", "P1 decode", "n/a (inference)",
        "released after generation", "yes", "", "", "Schedule._collect (it stays with --memory.no-engine-release)",
    ),
    Row(
        "actor_boundary", "boundary prefix KV (training actor)", "P1 prefix fwd", "P2 suffix fwd/bwd", "attached",
        "kept until the suffix has consumed it", "yes", "2", "", "Schedule._actor_gradients",
    ),
    Row(
        "reference_boundary", "boundary prefix KV (reference)", "P1 prefix fwd", "P2 scoring", "detached",
        "kept until scoring has consumed it", "yes", "2", "", "Schedule._reference_logprobs",
    ),
    Row(
        "reference", "reference-model parameters", "permanent (frozen)", "P1 ref prefix / P2 ref scoring",
        "n/a (frozen)", "host pool; on the device around the reference's two windows", "yes (during ref prefix)", "",
        "", "PagedReference (they stay with --memory.no-reference-paging)",
    ),
    Row(
        "logprobs", "log-probabilities of responses", "P1 rollout, P2 scoring", "P2 training", "detached",
        "kept until the loss has combined them", "yes (small)", "2", "", "Schedule._actor_gradients",
    ),
    Row(
        "prefix_activations", "training-prefix activation/checkpoint state", "P1 prefix fwd",
        "P2 backward (reload or recompute)", "attached", "host pool, or dropped for recompute", "yes (handles)", "", "",
        "model.QwenVL.prefix_backward (they stay with --memory.activations keep)",
    ),
    Row(
        "suffix_activations", "suffix activations", "P2 suffix fwd", "P2 backward", "attached",
        "one micro-batch at a time", "P2-only", "", "", "the backward pass in Schedule._actor_gradients",
    ),
    Row(
        "gradient", "gradient buffer", "P2 backward", "P3 optimizer", "leaf grads", "Phases 2 and 3", "no", "3", "3",
        "Schedule.update",
    ),
    Row(
        "snapshot", "BF16 actor snapshot", "P3 cast (prev iter)", "P1/P2 fwd+bwd", "n/a (regenerable)",
        "always; overwritten chunk by chunk", "yes", "123", "123", "nobody",
    ),
    Row(
        "optimizer_state", "FP32 master weights + Adam moments", "permanent", "P3 optimizer", "n/a",
        "host pool; one window of chunks in Phase 3, its first ones from the last micro-batches of Phase 2 on", "no",
        "", "",
        "Schedule.update (it stays with --memory.no-state-offload)",
    ),
    Row(
        "engine_weights", "the engine's own copy of its weights", "publication", "P1 rollout", "n/a", "none: shared",
        "no", "", "", "nobody: --memory.no-weight-sharing makes the copy",
    ),
    Row(
        "engine_other", "the engine's activations, graphs and workspace", "engine start", "P1 rollout", "n/a",
        "always", "yes", "123", "", "nobody",
    ),
)  # fmt: skip


def allowed_barriers(row: Row, policy: MemoryConfig) -> str:
    """Barriers at which `row` may be in device memory under `policy`: a policy that is off keeps its object there."""
    kept = {
        "rollout_kv": not policy.engine_release,
        "reference": not policy.reference_paging,
        "optimizer_state": not policy.state_offload,
        "engine_weights": not policy.weight_sharing,
    }
    if row.tag == "prefix_activations" and policy.activations == "keep":
        return "2"
    return "123" if kept.get(row.tag) else row.barriers


def check_contract(barrier: str, held: dict[str, int], policy: MemoryConfig, ahead_bytes: int = 0) -> None:
    """Compare what the device holds ({tag: bytes}) with CONTRACT at barrier "1", "2" or "3". ahead_bytes: of the
    optimizer's state that may be there when Phase 3 opens, loaded beside the last micro-batches.

    Raises ContractError with a line for each object that should be gone (its size, its last use, who should have
    released it) or is missing.
    """
    wrong = []
    for row in CONTRACT:
        nbytes = held.get(row.tag, 0)
        loaded_ahead = row.tag == "optimizer_state" and barrier == "3" and nbytes <= ahead_bytes
        if nbytes and barrier not in allowed_barriers(row, policy) and not loaded_ahead:
            wrong.append(
                f"{row.tag} ({row.object}, {readable(nbytes)}) is still in device memory; produced: {row.produced}; "
                f"last use: {row.consumed}; to be released by {row.releases}"
            )
        if not nbytes and barrier in row.required:
            wrong.append(f"{row.tag} ({row.object}) is not in device memory, but {row.consumed} is to come")
    if wrong:
        raise ContractError(f"barrier {barrier}: " + "; ".join(wrong))


class ContractError(RuntimeError):
    """An object was in device memory outside its lifetime, or missing inside it."""


# ---- ledger ----------------------------------------------------------------------------------------------------------


# Objects that PyTorch's allocator holds; the others are regions, or the engine's.
_ALLOCATED = ("actor_boundary", "reference_boundary", "logprobs", "prefix_activations", "suffix_activations")


class Ledger:
    """Bytes of device memory by object, as they change; the highest total of each phase, and a limit.

    Regions are added by the arena. A tensor counts under its tag as long as the object that uses it lives, its whole
    storage once however many tensors share it. Thread-safe: backward passes and the log use it from their own threads.
    """

    def __init__(self, limit_bytes: int | None = None):
        self.limit_bytes, self.phase = limit_bytes, "start-up"
        self.bytes: dict[str, int] = {}
        self.peaks: dict[str, dict[str, int]] = {}  # phase -> what was held when its total was highest
        self._total, self._highest = 0, -1  # of all tags, now and at most in this phase
        self._storages: dict[int, list] = {}  # address -> [bytes, tag, users]
        self._lock = threading.RLock()  # reentrant: a finalizer may run inside add()

    def add(self, tag: str, nbytes: int) -> None:
        """Count `nbytes` more (or fewer) under `tag`. Raises MemoryError, and counts nothing, above the limit."""
        with self._lock:
            if nbytes > 0 and not self.has_room(nbytes):
                largest = sorted(self.bytes.items(), key=lambda entry: -entry[1])[:4]
                held = ", ".join(f"{name} {readable(n)}" for name, n in largest if n)
                raise MemoryError(
                    f"phase {self.phase}: {tag} needs {readable(nbytes)} where {readable(self._total)} of "
                    f"{readable(self.limit_bytes)} are in use ({held}): see python plan.py --help for what would fit"
                )
            self.bytes[tag] = self.bytes.get(tag, 0) + nbytes
            self._total += nbytes
            if self.limit_bytes is not None and tag not in _ALLOCATED:
                limit_allocator(self.limit_bytes - sum(n for t, n in self.bytes.items() if t not in _ALLOCATED))
            self._note_peak()

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes more stay below the limit."""
        return self.limit_bytes is None or self._total + nbytes <= self.limit_bytes

    def _note_peak(self) -> None:
        if self._total > self._highest:
            self._highest, self.peaks[self.phase] = self._total, {t: n for t, n in self.bytes.items() if n}

    def set(self, tag: str, nbytes: int) -> None:
        """Make `tag` stand at `nbytes`: for what another process holds on this device."""
        with self._lock:
            self.add(tag, nbytes - self.bytes.get(tag, 0))

    def enter(self, phase: str) -> None:
        """A phase begins: its peak starts at what is held now."""
        with self._lock:
            self.phase, self._highest = phase, -1
            self._note_peak()

    def track(self, tag: str, tensor: torch.Tensor, user: object) -> None:
        """Count the tensor's storage under `tag` until `user`, which holds it, is gone; a storage counts once."""
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if not address:
            return
        with self._lock:
            if (entry := self._storages.get(address)) is None:
                self.add(tag, nbytes)
                self._storages[address] = [nbytes, tag, 1]
            else:
                entry[2] += 1
                if entry[1] != tag and tag.endswith("boundary"):  # kept for the suffixes, whatever else keeps it
                    self.add(entry[1], -entry[0])
                    self.add(tag, entry[0])
                    entry[1] = tag
        weakref.finalize(user, self._untrack, address).atexit = False

    def _untrack(self, address: int) -> None:
        with self._lock:
            entry = self._storages[address]
            entry[2] -= 1
            if not entry[2]:
                del self._storages[address]
                self.add(entry[1], -entry[0])

    def sample(self) -> tuple[str, dict[str, int]]:
        """Phase and what this process holds, for its memory log. "other" is all that is in use besides, so also what an
        engine's allocator holds at the moment: the engine writes that, and its KV cache, into a log of its own."""
        held = self.held()
        held.pop("engine_other", None)  # known as it was at the last release
        other = unnamed_bytes(sum(held.values()), sum(held.get(tag, 0) for tag in _ALLOCATED))
        held.pop("rollout_kv", None)
        return self.phase, held | {"other": other}

    def held(self) -> dict[str, int]:
        """What is in device memory now, {tag: bytes}, without empty entries."""
        with self._lock:
            return {tag: nbytes for tag, nbytes in self.bytes.items() if nbytes}


class SavedTensors:
    """Sees every tensor that autograd saves: counts it in the ledger, and moves it to the host pool if there is one.

    Parameters (they lie in `arena`) are left alone, and so is what is smaller than a page. Boundary keys and values are
    offloaded like the rest, but stay on the device as well: their leaves serve the suffixes.
    """

    def __init__(self, ledger: Ledger, arena: "Arena", pool: "HostPool | None" = None):
        self._ledger, self._arena, self._pool = ledger, arena, pool
        self._stream = Stream() if pool is not None else None  # copies go out beside the prefix that produces them

    @contextmanager
    def counted(self, tag: str) -> Iterator[None]:
        """Count what the forward pass inside, or a backward that computes again, saves under `tag`, on the device."""

        def pack(tensor: torch.Tensor):
            kept = _Kept(tensor)
            if not self._arena.contains(tensor):
                self._ledger.track(tag, tensor, kept)
            return kept

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield

    @contextmanager
    def offloaded(self) -> Iterator[None]:
        """Move what the forward pass inside saves to the pool; backward brings each tensor back when it needs it."""

        def pack(tensor: torch.Tensor):
            small = tensor.nbytes < mmap.PAGESIZE
            return _Kept(tensor) if small or self._arena.contains(tensor) else self._offload(tensor)

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield

    def _offload(self, tensor: torch.Tensor) -> "_Offloaded":
        block, host = self._pool.borrow("an offloaded activation", tensor.shape, tensor.dtype)
        self._stream.follow()
        with self._stream:
            host.copy_(tensor, non_blocking=True)
        self._stream.uses(tensor)
        return _Offloaded(self, block, host)


class _Kept:
    """A saved tensor that stays where it is; autograd drops this object when it drops the tensor.

    Detached: an output saved by its own node would otherwise hold the node that holds it, for ever.
    """

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor.detach()


class _Offloaded:
    """A saved tensor in the host pool; its block goes back when autograd drops this object."""

    def __init__(self, owner: SavedTensors, block: tuple[int, int], host: torch.Tensor):
        self._owner, self._host = owner, host
        weakref.finalize(self, owner._pool.give_back, block).atexit = False

    @property
    def tensor(self) -> torch.Tensor:
        self._owner._stream.lead()  # what is computed from here on waits for the copy out
        return torch.empty_like(self._host, device=device(), pin_memory=False).copy_(self._host, non_blocking=True)


def _unpack(packed: _Kept | _Offloaded) -> torch.Tensor:
    return packed.tensor


class MemoryLog:
    """Samples what a process holds on its device into a JSON-lines file, from a thread of its own.

    The first line is `header`. A sample that equals the one before is left out, so that the file is a step function. A
    resumed run goes on in the file that is there.
    """

    def __init__(self, path: Path, header: dict, read: Callable[[], tuple[str, dict[str, int]]], sample_ms: float):
        if path.is_file() and not (there := path.read_bytes()).endswith(b"\n"):  # the run was killed as it wrote
            path.write_bytes(there[: there.rfind(b"\n") + 1])
        self._read, self._interval_s, self._last, self._file = read, sample_ms / 1e3, None, path.open("a", 1)
        self._lock, self._stop, self._device = threading.Lock(), threading.Event(), device()
        if not self._file.tell():
            self._file.write(json.dumps(header | {"sample_ms": sample_ms}) + "\n")
        threading.Thread(target=self._run, name="memory log", daemon=True).start()

    def sample(self, mark: str = "") -> None:
        """Write what is held now, if it changed or is marked."""
        with self._lock:
            phase, held = self._read()
            if not mark and self._last == (phase, held):
                return
            self._last = phase, held
            line = {"t_ns": time.monotonic_ns(), "phase": phase, "bytes": held, "host_bytes": host_bytes()}
            self._file.write(json.dumps(line | {"mark": mark}) + "\n")

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread begins on GPU 0
        while not self._stop.wait(self._interval_s):
            self.sample()

    def close(self) -> None:
        """Stop the thread and write what is left."""
        self._stop.set()
        self.sample("end")


if __name__ == "__main__":
    import sys

    if "--model" in sys.argv or any(argument.startswith("--model=") for argument in sys.argv):
        import plan

        sys.exit(plan.main())

    ledger = Ledger(None)
    for tag in ("snapshot", "gradient", "actor_boundary", "prefix_activations"):
        ledger.set(tag, 256 << 20)
    log = MemoryLog(Path(os.devnull), {}, ledger.sample, MemoryConfig.sample_ms)
    start = time.perf_counter()
    for _ in range(1000):
        log.sample("written")
    sample_ms = time.perf_counter() - start  # of 1000, so milliseconds of one
    log.close()
    share = sample_ms / MemoryConfig.sample_ms
    print(f"a sample of the memory log takes {1e3 * sample_ms:.0f} us, {share:.2%} of its interval of a core")
