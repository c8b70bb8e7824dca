"""Hardware: the only place that asks what there is, and most of what then differs.

    before CUDA starts   gpu_host, cuda_started, check_driver     what MPS needs to know, asked without starting it
    start-up             select_device, check_device, check_host  each a clear error before anything is allocated
    memory               empty_cache, has_room, device_bytes, …   what PyTorch's allocator, the GPU and the host have
    queues               Stream, SmLimit, synchronize, upload     a CPU executes at once and in program order
    load                 GpuLoad                                  SM clock and power in each phase

Run:
    python hardware.py                   # what this machine has
To support other hardware, edit this file; arena.py has a kind of region for either answer, and kernels follow their
tensors.
"""

import ctypes
import functools
import itertools
import mmap
import os
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode


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
    """Wait until the device has finished everything queued, or only what the current stream, or an SmLimit's in its
    place, was given; a sync point on a GPU, nothing to wait for on a CPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize() if every_stream else _current_stream().synchronize()


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

            if sms % 8 or not 0 < sms <= sm_count():
                raise ValueError(f"prefixes on {sms} SMs: expected a multiple of 8, at most this GPU's {sm_count()}")
            try:
                self._green = GreenContext.create(num_sms=sms, device_id=torch.cuda.current_device())
            except RuntimeError as error:
                raise ValueError(f"no green context of {sms} SMs here ({error}): take --sm-policy priority") from error
            self._cuda = self._green.Stream()

    def __enter__(self) -> "SmLimit":
        if self.on_gpu:
            empty_cache()  # what the allocator keeps for the current stream is no use to this one
            Stream(self._cuda).follow()
            self._outer = torch.cuda.current_stream()
        SmLimit.entered = self
        return super().__enter__()

    def __exit__(self, *exc) -> None:
        super().__exit__(*exc)
        SmLimit.entered = None
        if self.on_gpu:
            Stream(self._cuda).lead()
        empty_cache()  # the allocator keeps what was freed for this stream alone

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        with launching():
            return function(*args, **(kwargs or {}))

    @property
    def on_gpu(self) -> bool:
        return self._cuda is not None

    def instead_of(self, current: "torch.cuda.Stream | None") -> "torch.cuda.Stream | None":
        """The stream that kernels meant for `current` go to."""
        return self._cuda if current == self._outer else current


def launching() -> AbstractContextManager:
    """Around a launch that PyTorch's dispatcher does not see, so that an SmLimit counts for it, too."""
    limited = SmLimit.entered is not None and SmLimit.entered.on_gpu
    return torch.cuda.stream(_current_stream()) if limited else nullcontext()


LOAD_EVERY_S = 0.05  # between two samples of GpuLoad


class GpuLoad:
    """Mean SM clock and power of this process's GPU in each phase, sampled by a thread of its own; nothing on a CPU, or
    where NVML does not know them.

    A GPU at its power limit lowers its clock, so that two things side by side are slower than their SMs explain."""

    def __init__(self, phase: Callable[[], str]):
        """phase: the name of what is going on now."""
        self._phase, self._stop, self._lock = phase, threading.Event(), threading.Lock()
        self._samples: dict[str, list[tuple[float, float]]] = {}  # phase -> (MHz, W)
        if torch.cuda.is_available() and gpu_load(device()) is not None:
            threading.Thread(target=self._run, args=(device(),), name="GPU load", daemon=True).start()

    def _run(self, own: torch.device) -> None:
        while not self._stop.wait(LOAD_EVERY_S):
            if (sample := gpu_load(own)) is not None:
                with self._lock:
                    self._samples.setdefault(self._phase(), []).append(sample)

    def take(self) -> dict[str, float]:
        """PHASE/MHz and PHASE/W -> means since the last call."""
        with self._lock:
            taken, self._samples = self._samples, {}
        means = {}
        for phase, samples in taken.items():
            for unit, values in zip(("MHz", "W"), zip(*samples, strict=True), strict=True):
                means[f"{phase}/{unit}"] = statistics.fmean(values)
        return means

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()


def gpu_load(gpu: torch.device) -> tuple[float, float] | None:
    """SM clock, MHz, and power, W, a mean of its last second; None where NVML, or its package, does not know them."""
    try:
        from pynvml import NVMLError
    except ImportError:
        return None
    try:
        return float(torch.cuda.clock_rate(gpu)), torch.cuda.power_draw(gpu) / 1e3
    except NVMLError:
        return None


def host_bytes() -> int:
    """Resident host memory of this process without what it shares: its regions and files are not its own."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * mmap.PAGESIZE


def readable(nbytes: int) -> str:
    """1.50 GiB, 12.25 MiB or 3.00 KiB."""
    unit, name = (2**30, "GiB") if nbytes >= 2**28 else (2**20, "MiB") if nbytes >= 2**18 else (2**10, "KiB")
    return f"{nbytes / unit:.2f} {name}"


if __name__ == "__main__":
    print(f"{device()}: {device_bytes() or 'n/a'} bytes; matrix product {peak_flops() or 'n/a'} FLOP/s")
    if torch.cuda.is_available():
        begin = time.perf_counter()
        loads = [gpu_load(device()) for _ in range(100)]
        cost_ms = 10 * (time.perf_counter() - begin)
        often = f"{cost_ms:.2f} ms to ask, every {1e3 * LOAD_EVERY_S:.0f} ms of a run"
        print(f"SM clock (MHz) and power (W): {loads[-1] or 'n/a'}; {often}")
    limit, why = host_limit()
    print(f"host memory for this process: {limit / 2**30:.1f} GiB, {why}")
