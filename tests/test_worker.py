"""worker.py: what it changes in vLLM, by itself. That an engine made so computes the policy is test_rollout.py's."""

import math
import statistics
from collections import Counter

import pytest
import torch

import configs
import weights
import worker
from rollout import EngineClient, Request, RolloutConfig, random_weights


def test_a_tensor_left_without_memory_is_named():
    with torch.device("cpu"), worker._WithoutMemory(torch.device("cpu")) as building:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.RMSNorm(2))
        model.register_buffer("cache", torch.zeros(3).cos())  # real, 12 bytes and 12 more
        model[0].table = torch.empty(3)
        model.register_buffer("scale", torch.ones(()))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.cache.tolist() == [1, 1, 1] and building.made_bytes == 24
    for parameter in model.parameters():
        weights._place(parameter, torch.zeros(parameter.shape))
    with pytest.raises(RuntimeError, match=r"2 tensors of the engine's model have no memory, \['scale', '0.table'\]"):
        building.check(model)


def rotation() -> None:
    """vLLM's own rotary embedding, in PyTorch's steps, and what we put in place of its kernels."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding

    worker._rotate_in_one_kernel()
    torch.manual_seed(0)
    with set_current_vllm_config(VllmConfig()):
        layer = MRotaryEmbedding(128, 128, 32768, 1e6, True, torch.float32, mrope_section=[16, 24, 24])
    for positions in (torch.randint(0, 5000, (3, 12))[:, :9], torch.arange(3000, 3009)):
        query, key, value = torch.randn(9, 10 * 128).split([6 * 128, 2 * 128, 2 * 128], 1)  # as after one product
        wanted, before = layer.forward_native(positions, query.clone(), key.clone()), value.clone()
        got = layer.forward_cuda(positions, query, key)
        assert all(torch.allclose(a, b, rtol=0, atol=2e-6) for a, b in zip(got, wanted, strict=True))
        assert got[0].data_ptr() == query.data_ptr() and torch.equal(value, before)


def test_queries_and_keys_are_rotated_as_by_vllm(tritons_interpreter):
    tritons_interpreter(__file__)


# ---- a real engine on a GPU ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """An engine that reads a tiny random model's BF16 snapshot in this process's arena."""
    root = tmp_path_factory.mktemp("gpu")
    config, binding, _arena, _ = random_weights("tiny", root)
    sampling = RolloutConfig(n=16, max_new_tokens=48, max_num_seqs=64, kv_cache_gib=0.25, max_num_batched_tokens=2048)
    limits = {"max_prompt_tokens": 160, "forbidden_ids": configs.forbidden_ids(config)}
    with EngineClient(sampling, binding, engine=0, devices=[0], run_dir=root, **limits) as engine:
        engine.ready()
        yield engine


def generate(client, *requests: Request) -> list[tuple]:
    client.generate(requests)
    return sorted((r.request_id, r.index, r.token_ids, r.logprobs) for r in client.wait())


@pytest.mark.gpu
def test_graphs_replay_after_the_kv_cache_left_and_came_back(client):
    """Greedy and drawn tokens, and their log-probabilities, bit for bit. Other memory takes the pages in between."""
    prompts = [list(range(40 + i, 60 + 3 * i)) for i in range(12)]
    asked = [Request(f"{i}", ids, [], 4, seed=i, temperature=float(i % 2)) for i, ids in enumerate(prompts)]
    before = generate(client, *asked)
    for _ in range(2):
        (report,) = client.release_kv()
        assert report["resident_after"] == 0 < report["resident_before"]
        taken = torch.full((report["resident_before"],), 0x7F, dtype=torch.uint8, device="cuda")  # NaNs, as BF16
        client.restore_kv()
        del taken
        assert generate(client, *asked) == before
    assert len({tuple(tokens) for _, _, tokens, _ in before}) > 12  # neither one prompt's tokens nor one draw's


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_draws_follow_the_log_probabilities_that_come_with_them(client, temperature):
    """First tokens of one prompt, each with a seed of its own: how often, against its log-probability."""
    asked = [Request(f"{i}", [41, 42, 43], [], 16, i, temperature, (1,) * 16) for i in range(512)]
    drawn = [(tokens[0], logprobs[0]) for _, _, tokens, logprobs in generate(client, *asked)]
    counts = Counter(token for token, _ in drawn)
    chance = {token: math.exp(statistics.mean(p for t, p in drawn if t == token)) for token in counts}
    frequent = [token for token in counts if chance[token] * len(drawn) >= 5]  # for chi-square to hold
    expected = {token: chance[token] * len(drawn) for token in frequent}
    assert sum(chance.values()) == pytest.approx(1, abs=0.01) and len(frequent) > 30
    chi_square = sum((counts[token] - expected[token]) ** 2 / expected[token] for token in frequent)
    freedom = len(frequent) - 1
    assert abs(chi_square - freedom) < 4 * math.sqrt(2 * freedom)
    assert generate(client, *asked[:8]) == generate(client, *asked[:8])


if __name__ == "__main__":
    rotation()
