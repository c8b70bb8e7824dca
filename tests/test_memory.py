"""memory.py: the ledger counts what is held, the contract names what should be gone."""

import json
import time
from pathlib import Path

import pytest
import torch

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
