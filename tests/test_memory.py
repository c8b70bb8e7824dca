"""memory.py: the ledger counts what is held, the contract names what should be gone, hosts and GPUs are as they say."""

import json
import time
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from conftest import ROOT

import memory
from arena import Arena, HostPool

MIB = 1 << 20
CONTRACT_RANKS = Path(__file__).parent / "ranks_contract.py"


# ---- ledger ----------------------------------------------------------------------------------------------------------


def test_a_storage_counts_once_and_as_long_as_somebody_uses_it():
    ledger = memory.Ledger()
    tensor = torch.zeros(1000)
    one, two = tensor[:10], tensor[500:]
    ledger.track("prefix_activations", tensor, one)
    ledger.track("prefix_activations", tensor, two)
    assert ledger.held() == {"prefix_activations": 4000}
    leaf = tensor[3:5]
    ledger.track("actor_boundary", tensor, leaf)  # a boundary is what it is, whoever else keeps the bytes
    assert ledger.held() == {"actor_boundary": 4000}
    del one, leaf
    assert ledger.held() == {"actor_boundary": 4000}
    del two
    assert ledger.held() == {}


def test_peaks_are_those_of_their_phase():
    ledger = memory.Ledger()
    arena = Arena({"snapshot": MIB, "workspace": 2 * MIB}, ledger, {"workspace": "optimizer_state"})
    arena.acquire("snapshot")
    ledger.enter("1")
    ledger.set("rollout_kv", 5 * MIB)
    ledger.set("rollout_kv", 0)
    ledger.enter("3")
    arena.acquire("workspace")
    arena.release("workspace")
    assert ledger.peaks["1"] == {"snapshot": MIB, "rollout_kv": 5 * MIB}
    assert ledger.peaks["3"] == {"snapshot": MIB, "optimizer_state": 2 * MIB}
    assert ledger.held() == {"snapshot": MIB}


def test_the_limit_names_object_phase_and_what_is_held():
    ledger = memory.Ledger(limit_bytes=4 * MIB)
    arena = Arena({"snapshot": MIB, "gradient": 3 * MIB, "reference": MIB}, ledger)
    arena.acquire("snapshot")
    ledger.enter("2")
    arena.acquire("gradient")
    expected = (
        r"phase 2: reference needs 1.00 MiB where 4.00 MiB of 4.00 MiB are in use \(gradient 3.00 MiB, snapshot 1"
    )
    with pytest.raises(MemoryError, match=expected):
        arena.acquire("reference")
    arena.release("gradient")
    arena.acquire("reference")  # nothing was counted by the refusal
    assert ledger.held() == {"snapshot": MIB, "reference": MIB}


def small_network() -> tuple[torch.nn.Module, memory.Ledger, Arena]:
    """Parameters in an arena; tanh saves its own output, which its node must not own through a hook."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh())
    ledger = memory.Ledger()
    arena = Arena({"snapshot": 64 * 1024}, ledger)
    flat, offset = arena.acquire("snapshot").view(torch.float32), 0
    for parameter in network.parameters():
        n = parameter.numel()
        flat[offset : offset + n] = parameter.detach().flatten()
        parameter.data = flat[offset : offset + n].view(parameter.shape)
        offset += n
    return network, ledger, arena


@pytest.mark.parametrize("way", ["counted", "offloaded"])
def test_saved_tensors_give_the_same_gradients_and_leave_nothing(way):
    network, ledger, arena = small_network()
    pool = HostPool(0, lend_bytes=MIB)
    saved = memory.SavedTensors(ledger, arena, pool)
    x = torch.randn(32, 64)
    network(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in network.parameters()]
    network.zero_grad()
    before = ledger.held()
    with saved.counted("prefix_activations") if way == "counted" else saved.offloaded():
        loss = network(x).square().sum()
    activations = ledger.held().get("prefix_activations", 0)
    size = 32 * 64 * 4
    if way == "counted":  # x and the two outputs of tanh, which the next layer and the square save again
        assert activations == 3 * size and pool.lent_bytes == 0
    else:  # a copy for each use
        assert activations == 0 and pool.lent_bytes == 5 * size
    loss.backward()
    for parameter, gradient in zip(network.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
    del loss
    assert ledger.held() == before and pool.lent_bytes == 0


def test_the_log_is_a_step_function_of_what_was_held(tmp_path):
    ledger = memory.Ledger()
    log = memory.MemoryLog(tmp_path / "log.jsonl", {"process": "trainer", "gpu": 3}, ledger.sample, 5)
    ledger.enter("1")
    ledger.set("gradient", 100)
    time.sleep(0.2)
    log.sample("barrier 2")
    ledger.enter("2")
    ledger.set("gradient", 0)
    time.sleep(0.2)
    log.close()
    header, *lines = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert header == {"process": "trainer", "gpu": 3, "sample_ms": 5}
    assert [line["mark"] for line in lines if line["mark"]] == ["barrier 2", "end"]
    assert len(lines) <= 6  # most of the 80 samples said nothing new
    held = [(line["phase"], line["bytes"].get("gradient", 0)) for line in lines]
    assert ("1", 100) in held and held[-1] == ("2", 0)
    assert all(line["host_bytes"] > 2**20 for line in lines)
    assert [line["t_ns"] for line in lines] == sorted(line["t_ns"] for line in lines)


# ---- contract --------------------------------------------------------------------------------------------------------


def test_a_policy_that_is_off_lets_its_object_stay():
    off = {
        "rollout_kv": {"engine_release": False},
        "reference": {"reference_paging": False},
        "optimizer_state": {"state_offload": False},
        "engine_weights": {"weight_sharing": False},
    }
    for tag, switch in off.items():
        held = {"snapshot": 1, tag: MIB}
        with pytest.raises(memory.ContractError, match=f"barrier 1: {tag} .*1.00 MiB.* is still in device memory"):
            memory.check_contract("1", held, memory.MemoryConfig())
        memory.check_contract("1", held, memory.MemoryConfig(**switch))


def test_chunks_loaded_ahead_may_be_there_when_phase_3_opens():
    """So many bytes of the optimizer's state and no more, and at no other barrier."""
    policy, held = memory.MemoryConfig(), {"snapshot": 1, "gradient": 1, "optimizer_state": 2 * MIB}
    memory.check_contract("3", held, policy, 2 * MIB)
    for barrier, ahead_bytes in (("1", 2 * MIB), ("2", 2 * MIB), ("3", 2 * MIB - 1), ("3", 0)):
        with pytest.raises(
            memory.ContractError, match=f"barrier {barrier}: .*optimizer_state .*2.00 MiB.* is still in"
        ):
            memory.check_contract(barrier, held, policy, ahead_bytes)


def test_what_is_missing_is_named_too():
    with pytest.raises(
        memory.ContractError, match="gradient buffer.* is not in device memory, but P3 optimizer is to co"
    ):
        memory.check_contract("3", {"snapshot": 1}, memory.MemoryConfig())


def test_every_row_of_the_contract_can_be_broken_and_is_named(tmp_path, torchrun):
    torchrun(CONTRACT_RANKS, str(tmp_path / "run"))


# ---- the host and its GPUs -------------------------------------------------------------------------------------------

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
    nbytes, where = memory.host_limit(root=root)
    assert nbytes == gib * GIB and source in where, where


def test_what_the_run_holds_already_is_available_to_it(tmp_path):
    assert memory.host_limit(5 * GIB, host(tmp_path, "0::/\n", {}))[0] == 205 * GIB
    limited = host(tmp_path / "limited", "0::/\n", {"sys/fs/cgroup/memory.max": str(203 * GIB)})
    assert memory.host_limit(5 * GIB, limited) == (203 * GIB, f"memory.max of {limited}/sys/fs/cgroup")


def test_the_needs_of_all_local_ranks_count(tmp_path, monkeypatch):
    root = host(tmp_path, "0::/\n", {"sys/fs/cgroup/memory.max": str(100 * GIB)})
    mine = memory.host_bytes()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    memory.check_host(15 * GIB, 2 * GIB, 5 * GIB, root=root)  # 88 GiB and the ranks themselves
    with pytest.raises(ValueError, match="--memory.offload-gib") as error:
        memory.check_host(20 * GIB, 2 * GIB, 5 * GIB, root=root)  # 108
    text = str(error.value)
    assert "this host's ranks (4) need" in text and "host pools 80.00 GiB" in text and "engines 20.00 GiB" in text
    assert "100.00 GiB are all that memory.max of" in text
    assert ("arenas 8.00 GiB" in text) == (memory.device().type == "cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    memory.check_host(20 * GIB, 2 * GIB, 5 * GIB, root=root)
    memory.check_host(120 * GIB, 2 * GIB, 5 * GIB, 200 * GIB, root)  # who runs it knows better
    with pytest.raises(ValueError, match="20.00 GiB are all that --memory.host-limit-gib allows"):
        memory.check_host(20 * GIB, 2 * GIB, 5 * GIB, 20 * GIB, root)
    with pytest.raises(ValueError, match="trainers"):  # the ranks' own processes count
        memory.check_host(0, 0, 100 * GIB - mine // 2, root=root)


def test_a_gpu_that_pytorch_cannot_use_is_an_error_with_its_reason(tmp_path, monkeypatch):
    """The driver's device file is there, CUDA is not: as where PyTorch and the driver do not fit."""
    if torch.cuda.is_available():
        pytest.skip("PyTorch can use this host's GPU")
    driver = tmp_path / "nvidiactl"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert not memory.gpu_host(driver)
    memory.check_driver(driver)
    driver.touch()
    assert memory.gpu_host(driver)
    with pytest.raises(ValueError, match="cannot use this host's GPU: (Found no NVIDIA driver|Torch not compiled)"):
        memory.check_driver(driver)
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert not memory.gpu_host(driver)
        memory.check_driver(driver)


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
    state, peak = torch.cuda.get_rng_state(), memory.peak_flops()
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


_SEEN: list[torch.cuda.Stream] = []


class _Streams(torch.autograd.Function):
    """Notes the streams of its two passes."""

    @staticmethod
    def forward(ctx, x):
        with memory.launching():
            _SEEN.append(torch.cuda.current_stream())
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        _SEEN.append(torch.cuda.current_stream())
        return grad


@pytest.mark.gpu
def test_a_limit_of_sms_holds_back_the_forward_pass_alone():
    outer, limit = torch.cuda.current_stream(), memory.SmLimit(16)
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def passes() -> tuple[list[float], torch.Tensor]:
        """Seconds of forward and backward, and the gradient of x."""
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
        return [b - a for a, b in pairwise(marks)], grad

    times, grads = {}, {}
    for name, context in (("warm-up", nullcontext()), ("free", nullcontext()), ("limited", limit)):
        _SEEN.clear()
        times[name], grads[name] = passes()
        forward, backward = _SEEN
        assert backward == outer and (forward == outer) == (context is not limit)
    assert torch.equal(grads["free"], grads["limited"])
    assert times["limited"][0] > 3 * times["free"][0]  # 16 of 132 SMs
    assert times["limited"][1] < 1.5 * times["free"][1]


def test_a_limit_changes_nothing_on_a_cpu():
    x = torch.randn(3, 3, requires_grad=True)
    with memory.SmLimit(8):
        y = (x @ x).relu().sum()
    y.backward()
    grad, x.grad = x.grad, None
    (x @ x).relu().sum().backward()
    assert torch.equal(x.grad, grad) and memory.SmLimit.entered is None
