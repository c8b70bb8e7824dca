"""Memory: an arena with stable addresses that two processes share, a host pool, and everything that depends on the
device.

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

An object occupies device memory only between its first latency-critical use and its last use (Rollplex, §3.2). What
makes that cheap is that releasing pages does not invalidate a tensor: its address, shape and strides stay, only the
bytes are gone. On a CPU a region is a memfd: MAP_SHARED pages that another process maps by path, given back by punching
a hole in the file. On a GPU it is a reserved range of addresses: physical memory is created, mapped and
released with CUDA's virtual-memory calls, and reaches the other process as a file descriptor over a Unix socket.

Run:
    python memory.py                     # CPU or GPU: share a region with a second process, release it, time it
Left out on purpose: saved-tensor offload, the planner and the contract of Table 3.
To change what stays in device memory, edit the acquire and release calls in sched.py; to change how, edit Arena.
"""

import mmap
import os
import secrets
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import numpy as np
import torch

ALIGN_BYTES = 512  # tensors inside a region start at multiples of this


# ---- device section: the only place that asks what hardware there is -------------------------------------------------


def device() -> torch.device:
    """The device this process computes on: its current GPU, or the CPU where none is visible."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def select_device(local_rank: int) -> None:
    """Make GPU `local_rank` this process's current one. Raises ValueError if there are fewer; nothing to do on a
    CPU."""
    if not torch.cuda.is_available():
        return
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"--nproc-per-node {local_rank + 1} or more: this host has {torch.cuda.device_count()} visible GPUs"
        )
    if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        raise ValueError(
            "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True, which clashes with shared mappings: unset it"
        )
    torch.cuda.set_device(local_rank)


def visible_devices(ranks: list[int]) -> dict[str, str]:
    """Environment that lets a subprocess see only the GPUs of these local ranks; empty on a CPU."""
    if not torch.cuda.is_available():
        return {}
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[rank] for rank in ranks)}


def empty_cache() -> None:
    """Give what PyTorch's allocator caches back to the device."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def backend() -> str:
    """torch.distributed backend for the device."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def synchronize() -> None:
    """Wait until the device has finished everything queued; a sync point on a GPU, nothing to wait for on a CPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# Dense BF16, from the vendors' data sheets, by what the device's name contains.
_PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "H800": 989e12, "A100": 312e12, "H20": 148e12}


def peak_flops() -> float | None:
    """Dense BF16 peak of the device in FLOP/s, or None where it is unknown (MFU then prints n/a)."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for key, peak in _PEAK_FLOPS.items() if key in name), None)


def answer_cuda_queries() -> None:
    """Megatron-Core 0.16.1 asks torch.cuda.current_device() even in CPU runs (its M-RoPE table): answer with the
    CPU."""
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: torch.device("cpu")


class Stream:
    """A queue of device work: `with stream:` enqueues on it, record() marks a point, wait(mark) orders after one.

    `sms` limits it to that many of the GPU's SMs (a green context), 0 to none. A CPU executes at once and in program
    order, so there the marks carry nothing."""

    def __init__(self, sms: int = 0):
        self._cuda = self._context = None
        if torch.cuda.is_available() and sms:
            from torch.cuda.green_contexts import GreenContext

            self._green = GreenContext.create(num_sms=sms, device_id=torch.cuda.current_device())
            self._cuda = self._green.Stream()
        elif torch.cuda.is_available():
            self._cuda = torch.cuda.Stream()

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

    def follow(self) -> None:
        """Run nothing enqueued from here on before what the current stream has been given."""
        if self._cuda is not None:
            self._cuda.wait_stream(torch.cuda.current_stream())

    def lead(self) -> None:
        """Let the current stream run nothing from here on before what this one has been given."""
        if self._cuda is not None:
            torch.cuda.current_stream().wait_stream(self._cuda)


def stream(sms: int = 0) -> Stream:
    """A new stream on the device, on `sms` of its SMs only if that is not 0."""
    return Stream(sms)


@dataclass(frozen=True)
class MemoryConfig:
    """What stays in device memory."""

    activations: Literal["keep", "recompute"] = "keep"
    """Of actor prefixes, between their forward and backward: keep them, or drop them and compute the prefix a second
    time."""


# ---- arena -----------------------------------------------------------------------------------------------------------


class Arena:
    """Named regions of device memory with constant addresses, some of them shared with another process.

    `sizes` maps a region's name to its bytes. Every region starts released. Keep the arena until every process that
    attached has stopped: closing it here does not take the pages from them, but nothing else will ever write them
    again."""

    def __init__(self, sizes: dict[str, int]):
        kind = _DeviceRegion if torch.cuda.is_available() else _HostRegion
        for name, nbytes in sizes.items():
            if nbytes <= 0:
                raise ValueError(f"arena region {name!r} needs a positive size, got {nbytes} bytes")
        self._regions = {name: kind(name, nbytes) for name, nbytes in sizes.items()}
        self._resident: set[str] = set()

    def handle(self, name: str) -> str:
        """What another process of the same user passes to attach() to map the same physical bytes."""
        return self._regions[name].handle()

    def acquire(self, name: str) -> torch.Tensor:
        """Make the region usable and return its bytes, uint8 [nbytes]. A CPU's fresh pages read as zero, a GPU's as
        anything."""
        if name not in self._resident:
            self._regions[name].map()
            self._resident.add(name)
        return self._regions[name].bytes

    def release(self, name: str) -> None:
        """Give the region's pages back. Its tensors stay valid objects at the same address; their contents are gone.

        The caller has synchronised: nothing queued on the device may still touch the region.
        """
        if name in self._resident:
            self._regions[name].unmap()
            self._resident.discard(name)

    def nbytes(self, name: str) -> int:
        """Size of a region, resident or not."""
        return self._regions[name].bytes.numel()

    def resident_bytes(self, name: str | None = None) -> int:
        """Bytes of physical memory that back one region, or all of them: the kernel's count on a CPU, what is mapped on
        a GPU."""
        regions = self._regions.values() if name is None else [self._regions[name]]
        return sum(region.resident_bytes() for region in regions)

    def check(self) -> None:
        """Raise RuntimeError if a released region has pages: somebody wrote through a tensor after its last use."""
        for name, region in self._regions.items():
            if name not in self._resident and region.resident_bytes():
                raise RuntimeError(
                    f"arena region {name!r} is released but {region.resident_bytes()} bytes of it are resident: "
                    "a tensor in it was written after release()"
                )


class _HostRegion:
    """A memfd: MAP_SHARED pages at one address, given back by punching a hole in the file."""

    def __init__(self, name: str, nbytes: int):
        self._fd = os.memfd_create(f"rollplex-{name}", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, nbytes)
        self._pages = mmap.mmap(self._fd, nbytes)
        self.bytes = torch.frombuffer(self._pages, dtype=torch.uint8)

    def handle(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def map(self) -> None:
        pass  # the kernel supplies pages at the first touch

    def unmap(self) -> None:
        self._pages.madvise(mmap.MADV_REMOVE)  # also gone for whoever attached

    def resident_bytes(self) -> int:
        return os.fstat(self._fd).st_blocks * 512


class _DeviceRegion:
    """A reserved range of GPU addresses; map() puts fresh physical memory behind it (CUDA driver API, virtual
    memory)."""

    def __init__(self, name: str, nbytes: int):
        self._name, self._size, self._memory, self._server = name, _granules(nbytes), None, None
        self._address = _driver("cuMemAddressReserve", self._size, 0, 0, 0)
        self.map()  # torch looks the address up once, so it has to be mapped while the tensor is made
        self.bytes = _tensor_at(int(self._address), nbytes)
        self.unmap()

    def map(self) -> None:
        self._memory = _driver("cuMemCreate", self._size, _allocation(), 0)
        _map(self._address, self._size, self._memory)

    def unmap(self) -> None:
        torch.cuda.synchronize()  # sync point: nothing may use the range any more
        _driver("cuMemUnmap", self._address, self._size)
        _driver("cuMemRelease", self._memory)
        self._memory = None

    def resident_bytes(self) -> int:
        return self._size if self._memory is not None else 0

    def handle(self) -> str:
        """Serve the memory's file descriptor to whoever connects: a descriptor's number means nothing in another
        process."""
        if self._server is None:
            kinds = _cuda().CUmemAllocationHandleType
            posix = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            fd = int(_driver("cuMemExportToShareableHandle", self._memory, posix, 0))
            self._server = socket.socket(socket.AF_UNIX)
            self._server.bind(f"\0rollplex-{os.getpid()}-{secrets.token_hex(8)}")  # abstract: no file to leave behind
            self._server.listen()
            threading.Thread(target=self._serve, args=(fd,), daemon=True).start()
        return "cuda:" + self._server.getsockname()[1:].decode()

    def _serve(self, fd: int) -> None:
        while True:
            connection, _ = self._server.accept()
            with connection:
                socket.send_fds(connection, [self._name.encode()], [fd])


def attach(handle: str, nbytes: int) -> torch.Tensor:
    """Map another process's region: uint8 [nbytes], the same physical bytes. Raises ValueError if the owner is gone."""
    try:
        return (_attach_device if handle.startswith("cuda:") else _attach_host)(handle, nbytes)
    except OSError as error:
        raise ValueError(
            f"cannot attach to arena handle {handle!r}: {error}; its owner must outlive every attach"
        ) from error


def _attach_host(handle: str, nbytes: int) -> torch.Tensor:
    fd = os.open(handle, os.O_RDWR)
    try:
        if (size := os.fstat(fd).st_size) != nbytes:
            raise ValueError(
                f"arena handle {handle!r} has {size} bytes, expected {nbytes}: the layouts of the two sides differ"
            )
        return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)  # the tensor keeps the mapping alive
    finally:
        os.close(fd)


def _attach_device(handle: str, nbytes: int) -> torch.Tensor:
    torch.cuda.current_stream()  # the context must exist
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect("\0" + handle.removeprefix("cuda:"))
        _, fds, _, _ = socket.recv_fds(connection, 256, 1)
    posix = _cuda().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    size = _granules(nbytes)
    memory = _driver("cuMemImportFromShareableHandle", fds[0], posix)
    os.close(fds[0])
    address = _driver("cuMemAddressReserve", size, 0, 0, 0)
    _map(address, size, memory)
    return _tensor_at(int(address), nbytes)  # mapped until the process ends


# -- CUDA virtual memory, through cuda-python's driver bindings


def _cuda():
    from cuda.bindings import driver

    return driver


def _driver(function: str, *arguments):
    """Call a driver function; return its one result, or None. Raises RuntimeError naming the function."""
    status, *results = getattr(_cuda(), function)(*arguments)
    if int(status):
        raise RuntimeError(f"{function} failed: {status}")
    return results[0] if results else None


def _allocation():
    cuda = _cuda()
    prop = cuda.CUmemAllocationProp()
    prop.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = torch.cuda.current_device()
    prop.requestedHandleTypes = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return prop


def _granules(nbytes: int) -> int:
    torch.zeros(1, device="cuda")  # the driver calls below need torch's context to be current
    recommended = _cuda().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    return align(nbytes, int(_driver("cuMemGetAllocationGranularity", _allocation(), recommended)))


def _map(address, size: int, memory) -> None:
    cuda = _cuda()
    _driver("cuMemMap", address, size, 0, memory, 0)
    access = cuda.CUmemAccessDesc()
    access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = torch.cuda.current_device()
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    _driver("cuMemSetAccess", address, size, [access], 1)


def _tensor_at(address: int, nbytes: int) -> torch.Tensor:
    place = SimpleNamespace(
        __cuda_array_interface__=dict(shape=(nbytes,), typestr="|u1", data=(address, False), version=3)
    )
    return torch.as_tensor(place, device="cuda")


# ---- host pool -------------------------------------------------------------------------------------------------------


class HostPool:
    """One preallocated block of host memory (pinned on a GPU machine) that hands out tensors and never grows."""

    def __init__(self, nbytes: int):
        self._block = _pinned(nbytes) if torch.cuda.is_available() else torch.empty(nbytes, dtype=torch.uint8)
        self._used_bytes = 0

    @property
    def nbytes(self) -> int:
        return self._block.numel()

    def alloc(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor inside the pool. Raises MemoryError naming `name` if the pool is too small."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        start = align(self._used_bytes)
        if start + nbytes > self.nbytes:
            raise MemoryError(
                f"host pool: {name} needs {nbytes} bytes, {self.nbytes - start} of {self.nbytes} are left"
            )
        self._used_bytes = start + nbytes
        return self._block[start : start + nbytes].view(dtype).view(shape)


def _pinned(nbytes: int) -> torch.Tensor:
    """Page-locked host memory. Touched by several threads first: the host grows as it is touched, which is slow in
    one."""
    block = torch.empty(align(nbytes, mmap.PAGESIZE), dtype=torch.uint8)
    parts = block.numpy().reshape(-1)[:: mmap.PAGESIZE]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda part: part.fill(0), np.array_split(parts, 64)))
    if status := int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.numel(), 0)):
        raise MemoryError(
            f"cannot pin {nbytes / 2**30:.1f} GiB of host memory (cudaHostRegister: {status}); "
            "the optimizer's state and the reference have to fit there"
        )
    return block


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
