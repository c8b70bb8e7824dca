"""worker.py: what it changes in vLLM, by itself. That an engine made so computes the policy is test_rollout.py's."""

import pytest
import torch

import engine
import weights
import worker


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


@pytest.mark.gpu
def test_draws_in_one_kernel_follow_the_distribution_and_the_seed():
    """The real kernel, over logits that spread 16 possible ids over two of its blocks of 1024."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    worker._draw_in_one_kernel()
    sampler, ids = TopKTopPSampler("processed_logprobs"), torch.arange(0, 1600, 100, device="cuda")
    logits = torch.full((1024, 1600), float("-inf"), device="cuda")
    logits[:, ids] = torch.linspace(0, 3, 16, device="cuda")

    def seeded(*seeds: int) -> dict[int, torch.Generator]:
        return {row: torch.Generator("cuda").manual_seed(seed) for row, seed in enumerate(seeds)}

    rows = seeded(*(engine._seed(0, i) for i in range(1024)))
    draws = [sampler(logits.clone(), rows, None, None) for _ in range(8)]
    assert torch.equal(draws[0][1], logits.log_softmax(-1))
    counts = torch.bincount(torch.cat([tokens for tokens, _ in draws]), minlength=1600)[ids]
    expected = logits[0, ids].softmax(0) * counts.sum()
    assert counts.sum() == 8192
    assert ((counts - expected) ** 2 / expected).sum() < 37.7  # 0.999 of chi-square, 15 degrees of freedom

    flat = torch.zeros(3, 50000, device="cuda")  # equal tokens by chance: 1 in 50000
    one, other = seeded(2**62 + 1), seeded(5, 6, 2**62 + 1)
    alone = [int(sampler(flat[:1].clone(), one, None, None)[0]) for _ in range(8)]
    del other[1]  # a greedy row
    beside = [sampler(flat.clone(), other, None, None)[0].tolist() for _ in range(8)]
    assert [row[2] for row in beside] == alone and len(set(alone)) == 8
    assert not {row[0] for row in beside} & set(alone)
    one[0].set_offset(one[0].get_offset() - 4)  # as vLLM does when it discards a draw
    assert int(sampler(flat[:1].clone(), one, None, None)[0]) == alone[-1]
    tokens, logprobs = sampler(logits[:9].clone(), {}, torch.full((9,), 3, device="cuda"), None)  # top-k
    assert set(tokens.tolist()) <= set(ids[-3:].tolist()) and (logprobs[0] > float("-inf")).sum() == 3
