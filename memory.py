"""Memory: what may be on the device when, what is, and everything that depends on the device.

    device section   the only place that asks what hardware there is
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

import ctypes
import functools
import itertools
import json
import mmap
import os
import shutil
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:  # arena.py imports this file
    from arena import Arena, HostPool


# ---- device section: the only place that asks what hardware there is -------------------------------------------------


def device() -> torch.device:
    """The device this process computes on: its current GPU, or the CPU where none is visible."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


WHOLE_GPU = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100", "CUDA_MPS_CLIENT_PRIORITY": "0"}  # MPS's own defaults
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED
_DRIVER = Path("/dev/nvidiactl")  # there if the kernel has NVIDIA's driver


def gpu_host(driver: Path = _DRIVER) -> bool:
    """Whether there is a GPU for this process, found out without starting CUDA: MPS has to be chosen before."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1", "NoDevFiles")
    return driver.exists() and not hidden


def cuda_started() -> bool:
    """Whether this process has initialised CUDA: any other call than cuInit() fails before. Asks the driver itself,
    since PyTorch's answer is about PyTorch."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())) != _NOT_INITIALIZED


def check_driver(driver: Path = _DRIVER) -> None:
    """Raise ValueError, with PyTorch's own reason, if there is a GPU that PyTorch cannot use."""
    if gpu_host(driver) and not torch.cuda.is_available():
        try:
            torch.cuda.init()
            reason = "torch.cuda.is_available() is False"
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
        raise ValueError(
            f"PyTorch {torch.__version__} cannot use this host's GPU: {reason}. Install the driver or the PyTorch that "
            "fits (requirements-gpu.txt), or hide the GPUs with CUDA_VISIBLE_DEVICES= to run on the CPU"
        )


def select_device(local_rank: int) -> None:
    """Make GPU `local_rank` this process's current one; nothing to do on a CPU. Raises ValueError if this host's ranks
    are more than its GPUs, or PyTorch cannot use them."""
    check_driver()
    if not torch.cuda.is_available():
        return
    _same_bits_again()
    ranks = max(local_rank + 1, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))  # so that all ranks see the same error
    if ranks > torch.cuda.device_count():
        raise ValueError(f"--nproc-per-node {ranks}: this host has {torch.cuda.device_count()} visible GPUs")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:True" in os.environ.get(name, ""):
            raise ValueError(f"{name} has expandable_segments:True, which clashes with shared mappings: unset it")
    torch.cuda.set_device(local_rank)


def _same_bits_again() -> None:
    """Kernels that add in an order that changes (flash attention's backward among them) are replaced by those that do
    not: only then can two schedules give the same update. Call before CUDA starts."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)  # with warn_only flash attention would not be
    torch.utils.deterministic.fill_uninitialized_memory = False


FOREIGN_GIB = 2.0  # on a GPU before our first allocation: our CUDA context and the MPS server need less (assumed)


def check_device() -> None:
    """Raise ValueError if somebody else uses this rank's GPU. Call once before the first allocation; nothing to check
    on a CPU."""
    if not torch.cuda.is_available():
        return
    free, total = torch.cuda.mem_get_info()
    if total - free > FOREIGN_GIB * 2**30:
        raise ValueError(
            f"GPU {torch.cuda.current_device()}: {(total - free) / 2**30:.1f} GiB are in use before our first "
            f"allocation, more than {FOREIGN_GIB:.0f}: another process runs there; nvidia-smi names it: end it"
        )


def host_limit(held_bytes: int = 0, root: Path = Path("/")) -> tuple[int, str]:
    """Bytes that the processes of this control group may hold together, and where it says so: the least memory limit
    of the group and its parents (version 1 or 2, at the usual mount points), or what the host has available with the
    held_bytes that the run has taken already. A limit above the host's memory is a virtual machine's whose memory grows
    as it is used, so what is available there now says nothing."""
    lines = [line.split() for line in (root / "proc/meminfo").read_text().splitlines()]
    sizes = {words[0]: int(words[1]) << 10 for words in lines if words[0] in ("MemTotal:", "MemAvailable:")}
    limits = []
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else []:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            places, name = ("sys/fs/cgroup", "sys/fs/cgroup/unified"), "memory.max"
        elif "memory" in controllers.split(","):
            places, name = ("sys/fs/cgroup/memory",), "memory.limit_in_bytes"
        else:
            continue
        for place in places:
            parts = [part for part in path.split("/") if part]
            for depth in range(len(parts), -1, -1):
                file = Path(root / place, *parts[:depth], name)
                if file.is_file() and (text := file.read_text().strip()) != "max" and int(text) < 2**60:
                    limits.append((int(text), f"{name} of {file.parent}"))
    if all(limit <= sizes["MemTotal:"] for limit, _ in limits):
        limits.append((sizes["MemAvailable:"] + held_bytes, "MemAvailable of /proc/meminfo"))
    return min(limits)


def check_host(
    pool_bytes: int, region_bytes: int, engine_bytes: int, limit_bytes: int = 0, root: Path = Path("/")
) -> None:
    """Raise ValueError if this host's ranks need more host memory than limit_bytes (0: host_limit's), before any of it
    is allocated.

    Every rank of the host calls it with its own needs, which are taken to be all ranks': pool_bytes is its HostPool,
    region_bytes its arena (host memory on a CPU only), engine_bytes what its share of the engines takes."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    needs = {
        "host pools": ranks * pool_bytes,
        "arenas": 0 if torch.cuda.is_available() else ranks * region_bytes,
        "engines": ranks * engine_bytes,
        "trainers": ranks * host_bytes(),  # as they are now
    }
    limit, source = (limit_bytes, "--memory.host-limit-gib") if limit_bytes else host_limit(needs["trainers"], root)
    if (total := sum(needs.values())) > limit:
        split = ", ".join(f"{name} {readable(nbytes)}" for name, nbytes in needs.items() if nbytes)
        raise ValueError(
            f"host memory: this host's ranks ({ranks}) need {readable(total)} ({split}), but {readable(limit)} "
            f"are all that {source} allows: lower --memory.offload-gib or use --memory.activations "
            "recompute, run fewer ranks on a host, or raise the limit (--memory.host-limit-gib if you know better)"
        )


def visible_devices(ranks: list[int]) -> dict[str, str]:
    """Environment that lets a subprocess see only the GPUs of these local ranks, whole and at normal priority: what
    holds the trainer back (mps.share_gpu) is not for its engine. Empty on a CPU."""
    if not torch.cuda.is_available():
        return {}
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[rank] for rank in ranks)} | WHOLE_GPU


def empty_cache(needed_bytes: int | None = None) -> None:
    """Give what PyTorch's allocator caches back to the device; with `needed_bytes` only if less than that is free."""
    if torch.cuda.is_available() and (needed_bytes is None or torch.cuda.mem_get_info()[0] < needed_bytes):
        torch.cuda.empty_cache()


def has_room(nbytes: int) -> bool:
    """Whether so much is free on the device, once the allocator has given back what it caches if need be."""
    empty_cache(nbytes)
    return not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] >= nbytes


def allocator_bytes() -> int:
    """What PyTorch's allocator of this process has taken from the device, tensors and cache; 0 on a CPU."""
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0


def unnamed_bytes(named: int, allocated: int) -> int:
    """What is in use on the device besides `named` bytes, `allocated` of which are tensors of PyTorch's allocator:
    temporaries at their highest since the last call, and what CUDA's runtime and other processes hold. Memory that the
    allocator keeps for later is not in use. 0 on a CPU."""
    if not torch.cuda.is_available():
        return 0
    before = torch.cuda.memory_reserved()  # and after: the allocator may give memory back meanwhile
    free, total = torch.cuda.mem_get_info()
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    outside = total - free - max(before, torch.cuda.memory_reserved()) - (named - allocated)
    return max(0, peak - allocated) + max(0, outside)


@functools.cache
def gpu_bytes() -> int:
    """Size of this host's smallest GPU, 0 where there is none. Asks the driver's own tool: a CUDA call of ours would
    come before the environment that MPS reads."""
    if shutil.which("nvidia-smi") is None:
        return 0
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]  # MiB, a line each
    return min(int(line) for line in subprocess.check_output(query, text=True).split()) * 2**20


def limit_allocator(nbytes: int) -> None:
    """Let PyTorch's allocator of this process take no more than `nbytes` of the device; nothing to limit on a CPU."""
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, nbytes / device_bytes())))


def device_bytes() -> int | None:
    """Size of the device's memory; None on a CPU, which has no memory of its own."""
    return torch.cuda.get_device_properties(device()).total_memory if torch.cuda.is_available() else None


def sm_count() -> int:
    """Streaming multiprocessors of the device; 0 on a CPU."""
    return torch.cuda.get_device_properties(device()).multi_processor_count if torch.cuda.is_available() else 0


def upload(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A CPU tensor on the device, as `dtype`. To a GPU it goes through pinned memory: the host waits for nothing that
    the device still has to do. A CPU only converts it."""
    tensor = tensor.to(dtype or tensor.dtype)
    return tensor.contiguous().pin_memory().to(device(), non_blocking=True) if torch.cuda.is_available() else tensor


def backend() -> str:
    """torch.distributed backend for the device."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def synchronize(every_stream: bool = True) -> None:
    """Wait until the device has finished everything queued, or only what the current stream was given; a sync point on
    a GPU, nothing to wait for on a CPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize() if every_stream else torch.cuda.current_stream().synchronize()


@functools.cache
def peak_flops() -> float | None:
    """Dense BF16 peak of the device in FLOP/s: what the best of a few large matrix products reaches. None on a CPU (MFU
    then prints n/a).

    Measured at the first call, which should come while nothing else runs on the device: 0.1 s and 0.4 GiB, given back.
    Where MPS caps this process's threads (--sm-policy thread-cap), the peak is that of its share."""
    if not torch.cuda.is_available():
        return None
    side, own = 8192, torch.Generator(device()).manual_seed(0)  # the run's own random numbers stay as they are
    a, b = (torch.randn(side, side, generator=own, device=device(), dtype=torch.bfloat16) for _ in range(2))
    out, marks = torch.empty_like(a), [torch.cuda.Event(enable_timing=True) for _ in range(16)]
    for mark in marks:  # the host is ahead, so between two marks there is a product and nothing else
        mark.record()
        torch.mm(a, b, out=out)
    torch.cuda.synchronize()
    best_s = min(start.elapsed_time(end) for start, end in itertools.pairwise(marks)) / 1e3
    del a, b, out
    torch.cuda.empty_cache()
    return 2 * side**3 / best_s


def answer_cuda_queries() -> None:
    """Megatron-Core 0.16.1 asks torch.cuda.current_device() even in CPU runs (its M-RoPE table): answer with the
    CPU."""
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: torch.device("cpu")


class Stream:
    """A queue of device work, new unless it is given: `with stream:` enqueues on it, record() marks a point, wait(mark)
    orders after one.

    A CPU executes at once and in program order, so there the marks carry nothing."""

    def __init__(self, cuda: torch.cuda.Stream | None = None):
        self._cuda = torch.cuda.Stream() if cuda is None and torch.cuda.is_available() else cuda
        self._context = None

    def __enter__(self) -> "Stream":
        if self._cuda is not None:
            self._context = torch.cuda.stream(self._cuda)
            self._context.__enter__()
        return self

    def __exit__(self, *exc) -> None:
        if self._cuda is not None:
            self._context.__exit__(*exc)

    def record(self):
        """Mark everything enqueued so far; pass the result to another stream's wait()."""
        return None if self._cuda is None else self._cuda.record_event()

    def wait(self, mark) -> None:
        """Run nothing enqueued from here on before `mark` is reached."""
        if self._cuda is not None:
            self._cuda.wait_event(mark)

    def uses(self, tensor: torch.Tensor) -> None:
        """Keep the tensor's memory from being reused before this stream has passed what it was given so far."""
        if self._cuda is not None:
            tensor.record_stream(self._cuda)

    def follow(self) -> None:
        """Run nothing enqueued from here on before what the current stream has been given."""
        if self._cuda is not None:
            self._cuda.wait_stream(_current_stream())

    def lead(self) -> None:
        """Let the current stream run nothing from here on before what this one has been given."""
        if self._cuda is not None:
            _current_stream().wait_stream(self._cuda)


def _current_stream() -> "torch.cuda.Stream":
    current = torch.cuda.current_stream()
    return current if SmLimit.entered is None else SmLimit.entered.instead_of(current)


class SmLimit(TorchDispatchMode):
    """`with limit:` computes on `sms` of the GPU's SMs only (a green context), in order with what comes before and
    after; nothing changes on a CPU.

    Autograd runs a backward on the stream that is current when an operation of the forward pass notes it down. So the
    current stream stays what it is, and changes only while an operation launches its kernels, which PyTorch's
    dispatcher lets see (and launching() for kernels that it does not know of). What is saved here goes backward on all
    SMs. Operations that have a stream of their own keep it.
    """

    entered: "SmLimit | None" = None

    def __init__(self, sms: int):
        super().__init__()
        self._cuda = self._outer = None
        if torch.cuda.is_available():
            from torch.cuda.green_contexts import GreenContext

            self._green = GreenContext.create(num_sms=sms, device_id=torch.cuda.current_device())
            self._cuda = self._green.Stream()

    def __enter__(self) -> "SmLimit":
        if self._cuda is not None:
            Stream(self._cuda).follow()
            self._outer = torch.cuda.current_stream()
        SmLimit.entered = self
        return super().__enter__()

    def __exit__(self, *exc) -> None:
        super().__exit__(*exc)
        SmLimit.entered = None
        if self._cuda is not None:
            Stream(self._cuda).lead()
        empty_cache()  # the allocator keeps what was freed for this stream alone

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        with launching():
            return function(*args, **(kwargs or {}))

    def instead_of(self, current: "torch.cuda.Stream | None") -> "torch.cuda.Stream | None":
        """The stream that kernels meant for `current` go to."""
        return self._cuda if current == self._outer else current


def launching() -> AbstractContextManager:
    """Around a launch that PyTorch's dispatcher does not see, so that an SmLimit counts for it, too."""
    if SmLimit.entered is None or not torch.cuda.is_available():
        return nullcontext()
    return torch.cuda.stream(SmLimit.entered.instead_of(torch.cuda.current_stream()))


@dataclass(frozen=True)
class MemoryConfig:
    """What stays in device memory. Each policy can be switched off, which is Figure 8's ablation of it."""

    activations: Literal["keep", "offload", "recompute"] = "keep"
    """Of actor prefixes, between their forward and backward: keep them on the device, move them to the host pool as
    they are produced, or drop them and compute the prefix a second time."""
    keep_tokens: int = 0
    """With activations keep: of how many prompt tokens a replica's prefixes run beside decode and are kept, in whole
    micro-batches; the others are computed after it, where their suffixes need them. 0: all run beside decode."""
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


def readable(nbytes: int) -> str:
    """1.50 GiB, 12.25 MiB or 3.00 KiB."""
    unit, name = (2**30, "GiB") if nbytes >= 2**28 else (2**20, "MiB") if nbytes >= 2**18 else (2**10, "KiB")
    return f"{nbytes / unit:.2f} {name}"


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
            if nbytes > 0 and self.limit_bytes is not None and self._total + nbytes > self.limit_bytes:
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

    The first line is `header`. A sample that equals the one before is left out, so that the file is a step function.
    """

    def __init__(self, path: Path, header: dict, read: Callable[[], tuple[str, dict[str, int]]], sample_ms: float):
        self._read, self._interval_s, self._last, self._file = read, sample_ms / 1e3, None, path.open("w", 1)
        self._lock, self._stop, self._device = threading.Lock(), threading.Event(), device()
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


def host_bytes() -> int:
    """Resident host memory of this process without what it shares: its regions and files are not its own."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * mmap.PAGESIZE


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
