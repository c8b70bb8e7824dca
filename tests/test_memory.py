"""memory.py: regions keep their address, give their pages back, and are one memory for two processes."""

import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

import memory

MIB = 1 << 20


def test_release_gives_pages_back_and_keeps_the_address():
    arena = memory.Arena({"snapshot": 8 * MIB, "gradient": 4 * MIB})
    region = arena.acquire("snapshot")
    view = region.view(torch.float32)[100:200]
    before = os.popen(f"grep -c rollplex-snapshot /proc/{os.getpid()}/maps").read()
    region.fill_(1)
    assert arena.resident_bytes("snapshot") == 8 * MIB and arena.resident_bytes("gradient") == 0
    address = view.data_ptr()
    arena.release("snapshot")
    assert arena.resident_bytes() == 0  # the kernel's count, not ours
    assert arena.acquire("snapshot").data_ptr() == region.data_ptr() and view.data_ptr() == address
    assert not view.any()  # fresh pages read as zero through the old tensor
    view.fill_(2.0)
    assert region.view(torch.float32)[150] == 2.0
    assert os.popen(f"grep -c rollplex-snapshot /proc/{os.getpid()}/maps").read() == before  # one mapping all along


def test_check_names_a_region_written_after_its_release():
    arena = memory.Arena({"gradient": MIB})
    region = arena.acquire("gradient")
    region.fill_(1)
    arena.check()
    arena.release("gradient")
    arena.check()
    region[5] = 1  # a write after the last use
    with pytest.raises(RuntimeError, match="'gradient' is released but 4096 bytes of it are resident"):
        arena.check()


def test_another_process_maps_the_same_bytes():
    arena = memory.Arena({"snapshot": MIB})
    region = arena.acquire("snapshot")
    region[7] = 42
    child = "import sys, memory; t = memory.attach(sys.argv[1], int(sys.argv[2])); assert t[7] == 42; t[8] = 43"
    command = [sys.executable, "-c", child, arena.handle("snapshot"), str(MIB)]
    subprocess.run(command, check=True, cwd=ROOT)
    assert region[8] == 43


def test_release_is_seen_by_the_other_mapping():
    arena = memory.Arena({"snapshot": MIB})
    arena.acquire("snapshot").fill_(9)
    other = memory.attach(arena.handle("snapshot"), MIB)
    assert other[3] == 9
    arena.release("snapshot")
    assert other[3] == 0


def test_attach_refuses_a_wrong_size_and_a_dead_owner():
    arena = memory.Arena({"snapshot": MIB})
    with pytest.raises(ValueError, match=f"has {MIB} bytes, expected {2 * MIB}"):
        memory.attach(arena.handle("snapshot"), 2 * MIB)
    with pytest.raises(ValueError, match="owner must outlive"):
        memory.attach("/proc/999999999/fd/3", MIB)


def test_regions_need_a_size():
    with pytest.raises(ValueError, match="'reference' needs a positive size"):
        memory.Arena({"reference": 0})


def test_pool_never_grows_and_does_not_overlap():
    pool = memory.HostPool(4096)
    a = pool.alloc("a", (100,), torch.float32).fill_(1)
    b = pool.alloc("b", (10, 10), torch.bfloat16).fill_(2)
    assert (a == 1).all() and (b == 2).all()
    assert b.data_ptr() - a.data_ptr() >= a.nbytes and b.data_ptr() % 2 == 0
    with pytest.raises(MemoryError, match="c needs 4096 bytes"):
        pool.alloc("c", (1024,), torch.float32)
    assert pool.nbytes == 4096


@pytest.mark.parametrize("nbytes, expected", [(0, 0), (1, 512), (512, 512), (513, 1024)])
def test_align(nbytes, expected):
    assert memory.align(nbytes) == expected
