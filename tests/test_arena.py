"""arena.py: regions keep their address, give pages back, and are one memory for two processes; a pool never grows."""

import itertools
import os
import random
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

from arena import Arena, HostPool, align, attach

MIB = 1 << 20


def test_release_gives_pages_back_and_keeps_the_address():
    arena = Arena({"snapshot": 8 * MIB, "gradient": 4 * MIB})
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
    arena = Arena({"gradient": MIB})
    region = arena.acquire("gradient")
    region.fill_(1)
    arena.check()
    arena.release("gradient")
    arena.check()
    region[5] = 1  # a write after the last use
    with pytest.raises(RuntimeError, match="'gradient' is released but 4096 bytes of it are resident"):
        arena.check()


def test_another_process_maps_the_same_bytes():
    arena = Arena({"snapshot": MIB})
    region = arena.acquire("snapshot")
    region[7] = 42
    child = "import sys, arena; t = arena.attach(sys.argv[1], int(sys.argv[2])); assert t[7] == 42; t[8] = 43"
    command = [sys.executable, "-c", child, arena.handle("snapshot"), str(MIB)]
    subprocess.run(command, check=True, cwd=ROOT)
    assert region[8] == 43


def test_release_is_seen_by_the_other_mapping():
    arena = Arena({"snapshot": MIB})
    arena.acquire("snapshot").fill_(9)
    other = attach(arena.handle("snapshot"), MIB)
    assert other[3] == 9
    arena.release("snapshot")
    assert other[3] == 0


def test_attach_refuses_a_wrong_size_and_a_dead_owner():
    arena = Arena({"snapshot": MIB})
    with pytest.raises(ValueError, match=f"has {MIB} bytes, expected {2 * MIB}"):
        attach(arena.handle("snapshot"), 2 * MIB)
    with pytest.raises(ValueError, match="owner must outlive"):
        attach("/proc/999999999/fd/3", MIB)


def test_regions_need_a_size():
    with pytest.raises(ValueError, match="'reference' needs a positive size"):
        Arena({"reference": 0})


def test_pool_never_grows_and_does_not_overlap():
    pool = HostPool(4096)
    a = pool.alloc("a", (100,), torch.float32).fill_(1)
    b = pool.alloc("b", (10, 10), torch.bfloat16).fill_(2)
    assert (a == 1).all() and (b == 2).all()
    assert b.data_ptr() - a.data_ptr() >= a.nbytes and b.data_ptr() % 2 == 0
    with pytest.raises(MemoryError, match="c needs 4096 bytes"):
        pool.alloc("c", (1024,), torch.float32)
    assert pool.nbytes == 4096


@pytest.mark.parametrize("nbytes, expected", [(0, 0), (1, 512), (512, 512), (513, 1024)])
def test_align(nbytes, expected):
    assert align(nbytes) == expected


def test_borrowed_blocks_never_overlap_and_all_come_back():
    """Random borrowing and returning against a plain map of who owns each 512 bytes."""
    pool, rng, lent = HostPool(1024, lend_bytes=64 * 512), random.Random(0), {}
    fixed = pool.alloc("state", (256,), torch.float32).fill_(7)
    for i in range(3000):
        if lent and rng.random() < 0.5:
            block, tensor = lent.pop(rng.choice(list(lent)))
            assert (tensor == block[0]).all()  # nobody wrote into it
            pool.give_back(block)
            continue
        elements = rng.randint(1, 1500)
        try:
            block, tensor = pool.borrow("x", (elements,), torch.float32)
        except MemoryError:
            owned = sum(block[1] for block, _ in lent.values())
            assert pool.lent_bytes == owned  # refused only for want of one piece that is long enough
            free = sorted(
                set(range(64)) - {k for b, _ in lent.values() for k in range(b[0] // 512 - 2, sum(b) // 512 - 2)}
            )
            runs = [len(list(g)) for _, g in itertools.groupby(enumerate(free), lambda e: e[1] - e[0])]
            assert align(4 * elements) > 512 * max(runs, default=0)
            continue
        lent[i] = block, tensor.fill_(block[0])
    for block, _ in lent.values():
        pool.give_back(block)
    assert pool.lent_bytes == 0 and pool.borrow("all", (64 * 512,), torch.uint8)[0] == (1024, 64 * 512)
    assert (fixed == 7).all()
    with pytest.raises(
        MemoryError, match=r"an activation needs 32.50 KiB, 32.00 KiB of 32.00 KiB are lent: raise --mem"
    ):
        pool.borrow("an activation", (65 * 512,), torch.uint8)
