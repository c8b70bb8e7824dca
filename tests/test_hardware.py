"""hardware.py: hosts and GPUs are as they say, and a limit of SMs holds back what it should."""

import time
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from conftest import ROOT

import hardware

MIB = 1 << 20


GIB = 1 << 30
MEMINFO = "MemTotal:       263850240 kB\nMemFree:         1000000 kB\nMemAvailable:   209715200 kB\nBuffers:  12 kB\n"
UNLIMITED = "9223372036854771712\n"  # what version 1 says


def host(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A host's /proc and /sys/fs/cgroup as the kernel writes them, 200 GiB available."""
    for name, text in {"proc/meminfo": MEMINFO, "proc/self/cgroup": groups, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V1 = "9:pids:/\n4:cpu,memory:/docker/abc/job\n1:name=systemd:/init\n0::/\n"


@pytest.mark.parametrize(
    "groups, files, gib, source",
    [
        ("0::/\n", {}, 200, "MemAvailable of /proc/meminfo"),
        ("0::/\n", {"memory.max": "max\n"}, 200, "MemAvailable"),
        ("0::/\n", {"memory.max": "68719476736\n"}, 64, "memory.max of"),  # a container's own namespace
        ("0::/a.slice/b\n", {"a.slice/memory.max": "34359738368\n", "a.slice/b/memory.max": "max\n"}, 32, "a.slice"),
        ("0::/a/b\n", {"a/memory.max": "34359738368\n", "a/b/memory.max": "17179869184\n"}, 16, "a/b"),
        ("0::/a\n", {"b/memory.max": "17179869184\n"}, 200, "MemAvailable"),  # somebody else's group
        ("0::/a\n", {"unified/a/memory.max": "17179869184\n"}, 16, "unified/a"),
        (V1, {"memory/memory.limit_in_bytes": UNLIMITED}, 200, "MemAvailable"),
        (V1, {"memory/memory.limit_in_bytes": "8589934592\n"}, 8, "memory.limit_in_bytes of"),  # the mount is the group
        (V1, {"memory/docker/abc/job/memory.limit_in_bytes": "4294967296\n",
              "memory/docker/memory.limit_in_bytes": UNLIMITED}, 4, "docker/abc/job"),
        (V1, {"memory/docker/memory.limit_in_bytes": "4294967296\n",
              "memory/docker/abc/job/memory.limit_in_bytes": UNLIMITED}, 4, "docker"),
        ("0::/\n", {"memory.max": str(230 << 30)}, 200, "MemAvailable"),  # below what is there, above what is free
        ("0::/\n", {"memory.max": str(512 << 30)}, 512, "memory.max of"),  # a virtual machine grows: 252 now
        ("4:cpu:/\n", {"memory/memory.limit_in_bytes": "4294967296\n"}, 200, "MemAvailable"),  # no memory controller
    ],
)  # fmt: skip
def test_the_limit_is_the_least_of_the_group_its_parents_and_the_host(tmp_path, groups, files, gib, source):
    root = host(tmp_path, groups, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    nbytes, where = hardware.host_limit(root=root)
    assert nbytes == gib * GIB and source in where, where


def test_what_the_run_holds_already_is_available_to_it(tmp_path):
    assert hardware.host_limit(5 * GIB, host(tmp_path, "0::/\n", {}))[0] == 205 * GIB
    limited = host(tmp_path / "limited", "0::/\n", {"sys/fs/cgroup/memory.max": str(203 * GIB)})
    assert hardware.host_limit(5 * GIB, limited) == (203 * GIB, f"memory.max of {limited}/sys/fs/cgroup")


def test_the_needs_of_all_local_ranks_count(tmp_path, monkeypatch):
    root = host(tmp_path, "0::/\n", {"sys/fs/cgroup/memory.max": str(100 * GIB)})
    mine = hardware.host_bytes()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    hardware.check_host(15 * GIB, 2 * GIB, 5 * GIB, root=root)  # 88 GiB and the ranks themselves
    with pytest.raises(ValueError, match="--memory.offload-gib") as error:
        hardware.check_host(20 * GIB, 2 * GIB, 5 * GIB, root=root)  # 108
    text = str(error.value)
    assert "this host's ranks (4) need" in text and "host pools 80.00 GiB" in text and "engines 20.00 GiB" in text
    assert "100.00 GiB are all that memory.max of" in text
    assert ("arenas 8.00 GiB" in text) == (hardware.device().type == "cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    hardware.check_host(20 * GIB, 2 * GIB, 5 * GIB, root=root)
    hardware.check_host(120 * GIB, 2 * GIB, 5 * GIB, 200 * GIB, root)  # who runs it knows better
    with pytest.raises(ValueError, match="20.00 GiB are all that --memory.host-limit-gib allows"):
        hardware.check_host(20 * GIB, 2 * GIB, 5 * GIB, 20 * GIB, root)
    with pytest.raises(ValueError, match="trainers"):  # the ranks' own processes count
        hardware.check_host(0, 0, 100 * GIB - mine // 2, root=root)


def test_a_gpu_that_pytorch_cannot_use_is_an_error_with_its_reason(tmp_path, monkeypatch):
    """The driver's device file is there, CUDA is not: as where PyTorch and the driver do not fit."""
    if torch.cuda.is_available():
        pytest.skip("PyTorch can use this host's GPU")
    driver = tmp_path / "nvidiactl"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert not hardware.gpu_host(driver)
    hardware.check_driver(driver)
    driver.touch()
    assert hardware.gpu_host(driver)
    with pytest.raises(ValueError, match="cannot use this host's GPU: (Found no NVIDIA driver|Torch not compiled)"):
        hardware.check_driver(driver)
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert not hardware.gpu_host(driver)
        hardware.check_driver(driver)


def test_a_run_that_needs_more_host_memory_than_there_is_stops_before_it_starts(tmp_path, torchrun):
    arguments = [
        "--run-dir",
        str(tmp_path / "run"),
        "--memory.activations",
        "offload",
        "--memory.offload-gib",
        "100000",
    ]
    done = torchrun(ROOT / "train.py", *arguments, check=False, timeout=120)
    assert done.returncode != 0 and done.stdout.count("rollplex stopped:") == 1, done.stdout[-3000:]
    said = done.stdout.split("rollplex stopped:")[1].split("\n")[0]
    assert "host memory: this host's ranks (2) need 2000" in said and "--memory.offload-gib" in said
    assert "exitcode  : 2" in done.stdout and not list((tmp_path / "run").glob("engine*.log"))


@pytest.mark.gpu
def test_peak_is_what_products_of_another_shape_nearly_reach():
    held = torch.cuda.memory_reserved()
    state, peak = torch.cuda.get_rng_state(), hardware.peak_flops()
    assert torch.cuda.memory_reserved() <= held + 64 * MIB  # the matrix library's workspace may stay
    assert torch.equal(torch.cuda.get_rng_state(), state)
    a, b = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in ((16384, 8192), (8192, 4096)))
    a @ b
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(50):
        a @ b
    torch.cuda.synchronize()
    rate = 50 * 2 * 16384 * 8192 * 4096 / (time.perf_counter() - start)
    assert 0.7 * peak < rate < 1.1 * peak


def test_a_cpu_has_no_load():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    load = hardware.GpuLoad(lambda: "any")
    time.sleep(3 * hardware.LOAD_EVERY_S)
    assert load.take() == {}


@pytest.mark.gpu
def test_each_phase_has_its_own_load():
    phase, a = "idle", torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    load = hardware.GpuLoad(lambda: phase)
    time.sleep(2)  # the power is a mean of its last second
    phase, start = "busy", time.monotonic()
    while time.monotonic() < start + 3:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()
    phase = "after"
    found = load.take()
    load.close()
    assert {"idle/MHz", "idle/W", "busy/MHz", "busy/W"} <= found.keys()
    assert found["busy/W"] > 1.5 * found["idle/W"] > 0 and 500 < found["busy/MHz"] < 3000
    time.sleep(4 * hardware.LOAD_EVERY_S)
    load.take()
    time.sleep(4 * hardware.LOAD_EVERY_S)
    assert load.take() == {}  # its thread has ended


_SEEN: list[torch.cuda.Stream] = []


class _Streams(torch.autograd.Function):
    """Notes the streams of its two passes."""

    @staticmethod
    def forward(ctx, x):
        with hardware.launching():
            _SEEN.append(torch.cuda.current_stream())
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        _SEEN.append(torch.cuda.current_stream())
        return grad


@pytest.mark.gpu
def test_a_limit_of_sms_holds_back_the_forward_pass_alone():
    outer, limit = torch.cuda.current_stream(), hardware.SmLimit(16)
    x = (torch.randn(4096, 4096, device="cuda") / 64).bfloat16().requires_grad_()

    def passes() -> tuple[list[float], list[torch.Tensor]]:
        """Seconds of forward and backward; the result and its gradient with respect to x."""
        marks = [time.monotonic()]
        with context:
            y = _Streams.apply(x @ x)
            for _ in range(20):
                y = torch.tanh(y @ x)
            torch.cuda.synchronize()
        marks.append(time.monotonic())
        (grad,) = torch.autograd.grad(y.sum(), x)
        torch.cuda.synchronize()
        marks.append(time.monotonic())
        return [b - a for a, b in pairwise(marks)], [y.detach(), grad]

    times, results = {}, {}
    for name, context in 2 * [("free", nullcontext()), ("limited", limit)]:  # the second time counts
        _SEEN.clear()
        times[name], results[name] = passes()
        forward, backward = _SEEN
        assert backward == outer and (forward == outer) == (context is not limit)
    for free, limited in zip(results["free"], results["limited"], strict=True):
        assert torch.equal(free, limited) and free.abs().sum() > 0
    assert times["limited"][0] > 3 * times["free"][0]  # 16 of 132 SMs
    assert times["limited"][1] < 1.5 * times["free"][1]
    with pytest.raises(ValueError, match="prefixes on 20 SMs: expected a multiple of 8, at most this GPU's"):
        hardware.SmLimit(20)


def test_a_limit_changes_nothing_on_a_cpu():
    x = torch.randn(3, 3, requires_grad=True)
    with hardware.SmLimit(8):
        y = (x @ x).relu().sum()
    y.backward()
    grad, x.grad = x.grad, None
    (x @ x).relu().sum().backward()
    assert torch.equal(x.grad, grad) and hardware.SmLimit.entered is None
