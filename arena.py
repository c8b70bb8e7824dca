"""Arena: device memory with stable addresses that two processes share, and the host pool.

    one trainer rank (one GPU)                              its engine worker on the same GPU
    ┌────────────── Arena ──────────────────┐
    │ snapshot   rollout-sized weights      │◄── attach(handle) ──  every engine parameter is a view in here
    │ fused_qkv  Case-3 training layout     │
    │ reference  frozen weights, 2 windows  │    release(name): pages go back, the address stays
    │ gradient   FP32, Phase 2 and 3        │    acquire(name): pages may be touched again, same address
    │ workspace  optimizer chunks, Phase 3  │
    │ ahead      more, beside Phase 2's last│
    │            micro-batches              │
    └───────────────────────────────────────┘
    ┌────────────── HostPool ───────────────┐
    │ master, exp_avg, exp_avg_sq, reference│    preallocated once, never grows
    └───────────────────────────────────────┘

Releasing pages does not invalidate a tensor: its address, shape and strides stay, only the bytes are gone. On a CPU a
region is a memfd: MAP_SHARED pages that another process maps by path, given back by punching a hole in the file. On a
GPU it is a reserved range of addresses: physical memory is created, mapped and released with CUDA's virtual-memory
calls, and reaches the other process as a file descriptor over a Unix socket.

Run:
    python arena.py         # CPU or GPU: share a region with another process, release it, acquire it again
Left out on purpose: sharing a physical page between objects of different phases, paging by layer.
To change how memory comes and goes, edit Arena; to change when, the acquire and release calls in sched.py.
"""

import mmap
import os
import secrets
import socket
import threading
from bisect import bisect
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import torch

from hardware import device, empty_cache, readable
from memory import Ledger

ALIGN_BYTES = 512  # tensors inside a region start at multiples of this


# ---- arena -----------------------------------------------------------------------------------------------------------


def check_mappable() -> None:
    """Raise ValueError if this rank's GPU cannot share memory between processes; nothing to check on a CPU."""
    if device().type != "cuda":
        return
    for feature, attribute in (
        ("virtual memory management", "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"),
        ("memory handles as file descriptors", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"),
    ):
        attribute = getattr(_cuda().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{attribute}")
        if not _driver("cuDeviceGetAttribute", attribute, torch.cuda.current_device()):
            raise ValueError(
                f"GPU {torch.cuda.get_device_name()}: no {feature} (CUDA), which the arena is made of; virtual GPUs "
                "and old drivers lack it: use another GPU or driver"
            )


class Arena:
    """Named regions of device memory with constant addresses, some of them shared with another process.

    `sizes` maps a region's name to its bytes. Every region starts released. Keep the arena until every process that
    attached has stopped: closing it here does not take the pages from them, but nothing else will ever write them
    again. Every mapped region counts in `ledger`, under its own name or the tag that `tags` gives it."""

    def __init__(self, sizes: dict[str, int], ledger: Ledger | None = None, tags: dict[str, str] | None = None):
        self._ledger, self._tags = ledger or Ledger(), tags or {}
        kind = _DeviceRegion if device().type == "cuda" else _HostRegion
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
            self._ledger.add(self._tags.get(name, name), self.nbytes(name))
            self._regions[name].map()
            self._resident.add(name)
        return self._regions[name].bytes

    def mapped(self, name: str) -> bool:
        """Whether the region is acquired and not released."""
        return name in self._resident

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in one of the regions."""
        address = tensor.untyped_storage().data_ptr()
        return any(r.bytes.data_ptr() <= address < r.bytes.data_ptr() + r.bytes.numel() for r in self._regions.values())

    def release(self, name: str) -> None:
        """Give the region's pages back. Its tensors stay valid objects at the same address; their contents are gone.

        The caller has synchronised: nothing queued on the device may still touch the region.
        """
        if name in self._resident:
            self._regions[name].unmap()
            self._resident.discard(name)
            self._ledger.add(self._tags.get(name, name), -self.nbytes(name))

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
        empty_cache(self._size + 2**28)  # the driver does not know what PyTorch's allocator could give back
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
            fd = int(_driver("cuMemExportToShareableHandle", self._memory, _file_descriptor(), 0))
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
    size = _granules(nbytes)
    memory = _driver("cuMemImportFromShareableHandle", fds[0], _file_descriptor())
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


def _file_descriptor():
    """The kind of handle that another process can be given."""
    return _cuda().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _allocation():
    cuda = _cuda()
    prop = cuda.CUmemAllocationProp()
    prop.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = torch.cuda.current_device()
    prop.requestedHandleTypes = _file_descriptor()
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
    """One preallocated block of host memory (pinned on a GPU machine) that hands out tensors and never grows.

    alloc() is for what stays as long as the pool; borrow() is for what comes and goes, out of the last `lend_bytes`.
    `block` (uint8) is used in place of host memory: on the device, what the pool would have kept off it.
    """

    def __init__(self, nbytes: int, lend_bytes: int = 0, block: torch.Tensor | None = None):
        self._end = align(nbytes) if block is None else block.numel()  # of what is not lent
        if block is None:
            size = self._end + lend_bytes
            block = _pinned(size) if device().type == "cuda" else torch.empty(size, dtype=torch.uint8)
        self._block, self._used_bytes = block, 0
        self._free = [(self._end, lend_bytes)] if lend_bytes else []  # (start, bytes), by start, never adjacent
        self.lent_bytes = self.lent_peak_bytes = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return self._block.numel()

    def alloc(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor inside the pool. Raises MemoryError naming `name` if the pool is too small."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        start = align(self._used_bytes)
        if start + nbytes > self._end:
            raise MemoryError(f"host pool: {name} needs {nbytes} bytes, {self._end - start} of {self._end} are left")
        self._used_bytes = start + nbytes
        return self._block[start : start + nbytes].view(dtype).view(shape)

    def borrow(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[tuple[int, int], torch.Tensor]:
        """A block and an uninitialised tensor in it, until give_back(block). Raises MemoryError when all is lent."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        size = align(nbytes)
        with self._lock:
            i = next((i for i, (_, free) in enumerate(self._free) if free >= size), None)
            if i is None:
                lent = f"{readable(self.lent_bytes)} of {readable(self.nbytes - self._end)} are lent"
                fix = "raise --memory.offload-gib, or use --memory.activations recompute"
                raise MemoryError(f"host pool: {name} needs {readable(size)}, {lent}: {fix}")
            start, free = self._free.pop(i)
            if free > size:
                self._free.insert(i, (start + size, free - size))
            self.lent_bytes += size
            self.lent_peak_bytes = max(self.lent_peak_bytes, self.lent_bytes)
        return (start, size), self._block[start : start + nbytes].view(dtype).view(shape)

    def give_back(self, block: tuple[int, int]) -> None:
        """Return a borrowed block; its tensor must not be used any more."""
        with self._lock:
            self.lent_bytes -= block[1]
            i = bisect(self._free, block)
            if i < len(self._free) and block[0] + block[1] == self._free[i][0]:
                block = block[0], block[1] + self._free.pop(i)[1]
            if i and sum(self._free[i - 1]) == block[0]:
                i, block = i - 1, (self._free[i - 1][0], self._free[i - 1][1] + block[1])
                self._free[i] = block
            else:
                self._free.insert(i, block)


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
    import time

    if len(sys.argv) == 3:  # the second process
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
    print(f"released {size >> 20} MiB in {release_ms:.1f} ms, resident {arena.resident_bytes()} bytes")
    arena.acquire("snapshot")
    print(f"acquired again at the same address: {shared.data_ptr() == address}, reads {shared[:4].tolist()}")
