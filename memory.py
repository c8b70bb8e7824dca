"""Memory: an arena with stable addresses that two processes share, a host pool, and everything that depends on the device.

    one trainer rank (one GPU)                              its engine worker on the same GPU
    ┌────────────── Arena ──────────────────┐
    │ snapshot   rollout-sized weights      │◄── attach(handle) ──  every engine parameter is a view in here
    │ fused_qkv  Case-3 training layout     │
    │ reference  frozen weights, 2 windows  │    release(name): pages go back, the address stays
    │ gradient   FP32, Phase 2 and 3        │    acquire(name): pages may be touched again, same address
    │ workspace  optimizer chunks, Phase 3  │
    └───────────────────────────────────────┘
    ┌────────────── HostPool ───────────────┐
    │ master, exp_avg, exp_avg_sq, reference│    preallocated once, never grows
    └───────────────────────────────────────┘

An object occupies device memory only between its first latency-critical use and its last use (Rollplex, §3.2). What makes that
cheap is that releasing pages does not invalidate a tensor: its address, shape and strides stay, only the bytes are gone.
On a CPU a region is a memfd: MAP_SHARED pages that another process maps by path, given back by punching a hole in the file.
On a GPU it will be a CUDA virtual-memory reservation with exportable physical handles; the interface is the same.

Run:
    python memory.py                     # CPU: share a region with a second process, release it, time it
Left out on purpose: the CUDA backend (device() says so plainly), saved-tensor offload, the planner and the Table 3 contract.
To change what stays in device memory, edit the acquire and release calls in sched.py; to change how, edit Arena.
"""

import mmap
import os
import time
from dataclasses import dataclass

import torch

ALIGN_BYTES = 512  # tensors inside a region start at multiples of this


# ---- device section: the only place that asks what hardware there is --------------------------------------------------------


def device() -> torch.device:
    """The device this process computes on. Raises NotImplementedError where only the (unbuilt) GPU runtime would do."""
    if torch.cuda.is_available():
        raise NotImplementedError(
            "the GPU runtime is not built yet; expected a machine without a visible GPU, saw "
            f"{torch.cuda.device_count()}. Set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU"
        )
    return torch.device("cpu")


def backend() -> str:
    """torch.distributed backend for the device."""
    return "gloo" if device().type == "cpu" else "nccl"


def synchronize() -> None:
    """Wait until the device has finished everything queued; a sync point on a GPU, nothing to wait for on a CPU."""


def peak_flops() -> float | None:
    """Dense BF16 peak of the device in FLOP/s, or None where it is unknown (MFU then prints n/a)."""
    return None


def answer_cuda_queries() -> None:
    """Megatron-Core 0.16.1 asks torch.cuda.current_device() even in CPU runs (its M-RoPE table): answer with the CPU."""
    if device().type == "cpu":
        torch.cuda.current_device = device


class Stream:
    """A queue of device work: `with stream:` enqueues on it, record() marks a point, wait(mark) orders after one.

    A CPU executes at once and in program order, so here the marks carry nothing.
    """

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exc) -> None:
        pass

    def record(self) -> None:
        """Mark everything enqueued so far; pass the result to another stream's wait()."""

    def wait(self, mark: None) -> None:
        """Run nothing enqueued from here on before `mark` is reached."""


def stream() -> Stream:
    """A new stream on the device."""
    return Stream()


# ---- arena ------------------------------------------------------------------------------------------------------------------


@dataclass
class _Region:
    fd: int
    nbytes: int
    pages: mmap.mmap
    bytes: torch.Tensor
    resident: bool = False


class Arena:
    """Named regions of device memory with constant addresses, some of them shared with another process.

    `sizes` maps a region's name to its bytes. Every region starts released. Keep the arena until every process that attached has
    stopped: closing it here does not take the pages from them, but nothing else will ever write them again.
    """

    def __init__(self, sizes: dict[str, int]):
        self._regions: dict[str, _Region] = {}
        for name, nbytes in sizes.items():
            if nbytes <= 0:
                raise ValueError(f"arena region {name!r} needs a positive size, got {nbytes} bytes")
            fd = os.memfd_create(f"rollplex-{name}", os.MFD_CLOEXEC)
            os.ftruncate(fd, nbytes)
            pages = mmap.mmap(fd, nbytes)
            self._regions[name] = _Region(fd, nbytes, pages, torch.frombuffer(pages, dtype=torch.uint8))

    def handle(self, name: str) -> str:
        """What another process of the same user passes to attach() to map the same physical bytes."""
        return f"/proc/{os.getpid()}/fd/{self._regions[name].fd}"

    def acquire(self, name: str) -> torch.Tensor:
        """Make the region usable and return its bytes, uint8 [nbytes]. Fresh pages read as zero."""
        region = self._regions[name]
        region.resident = True
        return region.bytes

    def release(self, name: str) -> None:
        """Give the region's pages back. Its tensors stay valid objects at the same address; their contents are gone."""
        region = self._regions[name]
        region.pages.madvise(mmap.MADV_REMOVE)  # punches a hole in the memfd: also gone for whoever attached
        region.resident = False

    def nbytes(self, name: str) -> int:
        """Size of a region, resident or not."""
        return self._regions[name].nbytes

    def resident_bytes(self, name: str | None = None) -> int:
        """Bytes of physical memory that back one region, or all of them, as the kernel counts them."""
        regions = self._regions.values() if name is None else [self._regions[name]]
        return sum(os.fstat(region.fd).st_blocks * 512 for region in regions)

    def check(self) -> None:
        """Raise RuntimeError if a released region has pages: somebody wrote through a tensor after its last use."""
        for name, region in self._regions.items():
            if not region.resident and self.resident_bytes(name):
                raise RuntimeError(
                    f"arena region {name!r} is released but {self.resident_bytes(name)} bytes of it are resident: "
                    "a tensor in it was written after release()"
                )


def attach(handle: str, nbytes: int) -> torch.Tensor:
    """Map another process's region: uint8 [nbytes], the same physical bytes. Raises ValueError if the owner is gone."""
    try:
        fd = os.open(handle, os.O_RDWR)
    except OSError as error:
        raise ValueError(f"cannot attach to arena handle {handle!r}: {error}; its owner must outlive every attach") from error
    try:
        if (size := os.fstat(fd).st_size) != nbytes:
            raise ValueError(f"arena handle {handle!r} has {size} bytes, expected {nbytes}: the layouts of the two sides differ")
        return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)  # the tensor keeps the mapping alive
    finally:
        os.close(fd)


# ---- host pool --------------------------------------------------------------------------------------------------------------


class HostPool:
    """One preallocated block of host memory (pinned on a GPU machine) that hands out tensors and never grows."""

    def __init__(self, nbytes: int):
        self._block = torch.empty(nbytes, dtype=torch.uint8)
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def nbytes(self) -> int:
        return self._block.numel()

    def alloc(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor inside the pool. Raises MemoryError naming `name` if the pool is too small."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        start = align(self._used_bytes)
        if start + nbytes > self.nbytes:
            raise MemoryError(f"host pool: {name} needs {nbytes} bytes, {self.nbytes - start} of {self.nbytes} are left")
        self._used_bytes = start + nbytes
        return self._block[start : start + nbytes].view(dtype).view(shape)


def align(nbytes: int, to: int = ALIGN_BYTES) -> int:
    """`nbytes` rounded up to a multiple of `to`."""
    return -(-nbytes // to) * to


if __name__ == "__main__":
    import subprocess
    import sys

    if len(sys.argv) == 3:  # the second process of the demonstration
        attach(sys.argv[1], int(sys.argv[2]))[:4] = 7
        sys.exit()
    size = 256 << 20
    arena = Arena({"snapshot": size})
    shared = arena.acquire("snapshot")
    address = shared.data_ptr()
    shared.fill_(1)
    subprocess.run([sys.executable, __file__, arena.handle("snapshot"), str(size)], check=True)
    print(f"written by another process: {shared[:6].tolist()}, resident {arena.resident_bytes() >> 20} MiB")
    start = time.perf_counter()
    arena.release("snapshot")
    release_ms = (time.perf_counter() - start) * 1e3
    arena.acquire("snapshot")
    print(f"released {size >> 20} MiB in {release_ms:.1f} ms, resident {arena.resident_bytes()} bytes")
    print(f"acquired again at the same address: {shared.data_ptr() == address}, reads {shared[:4].tolist()}")
