"""optimizer.py against torch.optim.AdamW, bit for bit, and its promises about skips, resume and memory."""

import math
import threading
from dataclasses import replace
from functools import partial
from itertools import permutations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode

import hardware
from arena import HostPool
from optimizer import OptimizerConfig, Segment, StreamedAdamW, ahead_bytes, lr_at, workspace_bytes

SHAPES = [(1,), (33, 5), (7,), (40, 129), (50_001,), (64,)]  # odd sizes; one above torch's 32768-element thread grain
TOTAL = sum(math.prod(shape) for shape in SHAPES)
CONFIG = OptimizerConfig(lr=1e-2, max_grad_norm=0.0, warmup_steps=3, schedule="cosine", decay_steps=10)


@pytest.fixture(autouse=True)
def one_thread():
    """Small chunks are bound by thread start-up where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def chunk(elements: int) -> float:
    """chunk_mib that makes slots of `elements` parameters."""
    return elements * 12 / 2**20


def load_ahead(optimizer):
    """As the schedule does beside the last micro-batches; how many elements have come once there is room for no
    more."""
    optimizer.load_ahead(torch.full((optimizer.ahead_bytes,), 255, dtype=torch.uint8))
    return optimizer._ahead[1].result()


def build(config, dtype=torch.float32, decay=lambda i: True, shapes=SHAPES, seed=0, **marks):
    """A StreamedAdamW over fresh random destinations, one per shape: (optimizer, flat gradient, destinations).

    marks: functions of a tensor's number that say whether its segment is counted, partial."""
    torch.manual_seed(seed)
    dests = [torch.randn(shape).to(dtype) for shape in shapes]
    total = sum(dest.numel() for dest in dests)
    segments, offset = [], 0
    for i, dest in enumerate(dests):
        own = {name: mark(i) for name, mark in marks.items()}
        segments.append(Segment(f"weight{i}", dest.numel(), offset, dest.view(-1), decay(i), **own))
        offset += dest.numel()
    grad = torch.zeros(total)
    optimizer = StreamedAdamW(segments, grad, HostPool(12 * total + 2048), config)
    optimizer.init_master()
    return optimizer, grad, dests


def gradient(step: int, total: int = TOTAL) -> torch.Tensor:
    """Values over ten orders of magnitude, some exactly zero."""
    generator = torch.Generator().manual_seed(1000 + step)
    size = 10 ** torch.empty(total).uniform_(-8, 2, generator=generator)
    return torch.randn(total, generator=generator) * size * (torch.rand(total, generator=generator) > 0.1)


def torch_adamw(dests, config, decay=lambda i: True):
    """torch's own AdamW on FP32 copies, one parameter per destination."""
    params = [torch.nn.Parameter(dest.float().clone()) for dest in dests]
    groups = [{"params": [p], "weight_decay": config.weight_decay if decay(i) else 0.0} for i, p in enumerate(params)]
    return params, torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, foreach=False)


def torch_step(reference, params, flat_grad, lr):
    for group in reference.param_groups:
        group["lr"] = lr
    for param, grad in zip(params, flat_grad.split([p.numel() for p in params]), strict=True):
        param.grad = grad.view(param.shape).clone()
    reference.step()


def assert_same(optimizer, params, reference):
    torch.testing.assert_close(optimizer.master, torch.cat([p.detach().view(-1) for p in params]), rtol=0, atol=0)
    for name in ("exp_avg", "exp_avg_sq"):
        expected = torch.cat([reference.state[p][name].view(-1) for p in params])
        torch.testing.assert_close(getattr(optimizer, name), expected, rtol=0, atol=0)


@pytest.mark.parametrize("elements", [96, 1024, 20_000, 1_000_000])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("decay", [lambda i: True, lambda i: i in (0, 3)], ids=["all", "mask"])
def test_bit_identical_to_torch(elements, weight_decay, decay):
    config = replace(CONFIG, weight_decay=weight_decay, chunk_mib=chunk(elements))
    optimizer, grad, dests = build(config, decay=decay)
    params, reference = torch_adamw(dests, config, decay)
    assert (len(optimizer.chunks) == 1) == (elements > TOTAL)
    for step in range(12):
        grad.copy_(gradient(step))
        info = optimizer.step(step)
        torch_step(reference, params, gradient(step), lr_at(step, config))
        assert not info.skipped and info.clip_coef == 1.0
        assert info.bytes_loaded == info.bytes_offloaded == 12 * TOTAL
    assert_same(optimizer, params, reference)
    for dest, param in zip(dests, params, strict=True):
        assert torch.equal(dest, param)


@pytest.mark.parametrize("elements", [1024, 8192, 20_000])
@pytest.mark.parametrize("room", [1, 2, 3.5, 7, 1000])
def test_bit_identical_where_chunks_were_loaded_ahead(elements, room):
    """Also in steps in between that load nothing ahead. `room` in chunks: less than there are, nearly all, more."""
    config = replace(CONFIG, weight_decay=0.1, max_grad_norm=0.5, chunk_mib=chunk(elements))
    config = replace(config, ahead_gib=room * config.chunk_mib / 1024)
    optimizer, grad, dests = build(config, decay=lambda i: i in (0, 3))
    params, reference = torch_adamw(dests, config, lambda i: i in (0, 3))
    chunks = len(optimizer.chunks)
    for step in range(8):
        grad.copy_(gradient(step))
        if step % 3 != 1:
            loaded = load_ahead(optimizer)
            assert loaded == optimizer.chunks[min(int(room), chunks - 3)][0]
            for state in (optimizer.master, optimizer.exp_avg, optimizer.exp_avg_sq):
                state[:loaded] = math.nan  # what is there is not loaded again
        info = optimizer.step(step)
        assert info.clip_coef < 1 and not info.skipped and optimizer._ahead is None
        assert step % 3 == 1 or info.bytes_ahead == 12 * loaded
        torch_step(reference, params, gradient(step) * info.clip_coef, lr_at(step, config))
    assert_same(optimizer, params, reference)
    assert all(torch.equal(dest, param) for dest, param in zip(dests, params, strict=True))
    assert optimizer.ahead_bytes == ahead_bytes(config, TOTAL) == min(int(room), chunks - 3) * 12 * elements
    assert optimizer.workspace.nbytes == workspace_bytes(config) == 3 * 12 * elements  # and no more of it


@pytest.mark.parametrize("pieces", [1, 5, 9, 10, 17])
def test_bit_identical_wherever_loading_ahead_is_told_to_stop(pieces, monkeypatch):
    """After pieces of 1000 elements, nine of them a chunk whose last is short."""
    monkeypatch.setattr("optimizer._PIECE", 1000)
    config = replace(CONFIG, weight_decay=0.1, chunk_mib=chunk(8192), ahead_gib=4 * chunk(8192) / 1024)
    optimizer, grad, dests = build(config)
    params, reference = torch_adamw(dests, config)
    size, waited, synchronize = optimizer.chunks[0][1], [], hardware.synchronize
    assert 7000 < size < 8000 and len(optimizer.chunks) == 7
    ends = [c for a, b in optimizer.chunks for c in [*range(a + 1000, b, 1000), b]]

    def stops(every_stream=True):
        """Once it has waited for its last piece the thread is told to stop."""
        if threading.current_thread() is not threading.main_thread():
            waited.append(every_stream)
            if len(waited) == pieces:
                optimizer._halt.set()
        synchronize(every_stream)

    monkeypatch.setattr(hardware, "synchronize", stops)
    for step in range(3):
        waited.clear()
        assert load_ahead(optimizer) == ends[pieces - 1] and waited == [False] * pieces
        for state in (optimizer.master, optimizer.exp_avg, optimizer.exp_avg_sq):
            state[: ends[pieces - 1]] = math.nan  # what is there is not loaded again
        grad.copy_(gradient(step))
        assert optimizer.step(step).bytes_ahead == 12 * ends[pieces - 1]
        torch_step(reference, params, gradient(step), lr_at(step, config))
    assert_same(optimizer, params, reference)
    assert all(torch.equal(dest, param) for dest, param in zip(dests, params, strict=True))


def test_a_step_takes_what_has_come_and_does_not_wait_for_the_rest(monkeypatch):
    monkeypatch.setattr("optimizer._PIECE", 32)
    config = replace(CONFIG, chunk_mib=chunk(8192), ahead_gib=4 * chunk(8192) / 1024)
    optimizer, grad, _ = build(config)
    plain, plain_grad, _ = build(config)
    room, come = torch.full((optimizer.ahead_bytes,), 255, dtype=torch.uint8), []
    for step in range(20):
        for each in (grad, plain_grad):
            each.copy_(gradient(step))
        optimizer.load_ahead(room)
        come.append(optimizer.step(step).bytes_ahead)
        plain.step(step)
        assert all(torch.equal(a, b) for a, b in zip(snapshot(plain), snapshot(optimizer), strict=True))
    assert min(come) < 12 * optimizer.chunks[3][1]


@pytest.mark.parametrize(("elements", "slots"), [(20_000, 1), (40_000, 2)])
def test_bit_identical_with_what_comes_beside_the_norm(elements, slots):
    config = replace(CONFIG, weight_decay=0.1, max_grad_norm=0.5, chunk_mib=chunk(elements))
    optimizer, grad, dests = build(config)
    params, reference = torch_adamw(dests, config)
    for step in range(3):
        grad.copy_(gradient(step))
        optimizer.load_ahead()  # as step does, which need not wait until they are there
        loaded = optimizer._ahead[1].result()
        assert loaded == optimizer.chunks[slots - 1][1]
        for state in (optimizer.master, optimizer.exp_avg, optimizer.exp_avg_sq):
            state[:loaded] = math.nan
        info = optimizer.step(step)
        assert info.clip_coef < 1 and info.bytes_ahead == 12 * loaded
        torch_step(reference, params, gradient(step) * info.clip_coef, lr_at(step, config))
    assert_same(optimizer, params, reference)


def test_an_error_of_a_load_ahead_reaches_the_step():
    config = replace(CONFIG, chunk_mib=chunk(8192), ahead_gib=4 * chunk(8192) / 1024)
    optimizer, grad, _ = build(config)
    grad.copy_(gradient(0))
    state, before = optimizer.exp_avg, snapshot(optimizer)
    optimizer.exp_avg = state[:10_000]
    with pytest.raises(RuntimeError, match="must match the size"):
        load_ahead(optimizer)  # waits until the thread has got there
    with pytest.raises(RuntimeError, match="must match the size"):
        optimizer.step(0)
    optimizer.exp_avg = state
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(optimizer), strict=True))
    assert not optimizer.step(0).skipped  # and it is forgotten


def test_what_was_loaded_ahead_is_forgotten_when_the_state_changes():
    """A skipped step, and whatever else passes over the state, must not leave chunks for a later step."""
    config = replace(CONFIG, weight_decay=0.1, chunk_mib=chunk(4096), ahead_gib=5 * chunk(4096) / 1024)
    optimizer, grad, dests = build(config)
    plain, plain_grad, plain_dests = build(config)
    grad.copy_(gradient(0))
    grad[3] = math.inf
    bad, before, room = grad.clone(), snapshot(optimizer), torch.zeros(optimizer.ahead_bytes, dtype=torch.uint8)
    optimizer.load_ahead(room)
    assert optimizer.step(0).skipped and torch.equal(grad, bad)
    room.fill_(255)  # it is given back
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(optimizer), strict=True))

    def both(step, ahead):
        grad.copy_(gradient(step))
        plain_grad.copy_(gradient(step))
        if ahead:
            load_ahead(optimizer)
        optimizer.step(step)
        plain.step(step)
        assert all(torch.equal(a, b) for a, b in zip(snapshot(plain), snapshot(optimizer), strict=True))

    both(1, False)
    both(2, True)
    load_ahead(optimizer)
    other = build(config, seed=5)[0].state_dict()
    for each in (optimizer, plain):
        each.load_state_dict(other)
    both(3, False)
    load_ahead(optimizer)
    for each, own in ((optimizer, dests), (plain, plain_dests)):
        own[3].fill_(0.5)
        each.init_master()
    both(4, False)


def test_chunks_are_balanced_and_split_tensors():
    optimizer, _, _ = build(replace(CONFIG, chunk_mib=chunk(20_000)))
    sizes = [b - a for a, b in optimizer.chunks]
    assert [a for a, _ in optimizer.chunks] == [0, *(b for _, b in optimizer.chunks[:-1])]
    assert optimizer.chunks[-1][1] == TOTAL
    assert max(sizes) <= 20_000 and len(sizes) == math.ceil(TOTAL / 20_000)
    assert max(sizes) - min(sizes) <= 32 * len(sizes)


def test_clipping_and_scale_follow_torch():
    config = replace(CONFIG, max_grad_norm=0.5, chunk_mib=chunk(1024), weight_decay=0.01)
    optimizer, grad, dests = build(config)
    exact, exact_optimizer = torch_adamw(dests, config)
    clipped, clipped_optimizer = torch_adamw(dests, config)
    for step in range(10):
        grad.copy_(gradient(step))
        scale, lr, own = 1 / (3 + step), lr_at(step, config), gradient(step)
        info = optimizer.step(step, grad_scale=scale)
        torch_step(exact_optimizer, exact, own * (scale * info.clip_coef), lr)
        for param, g in zip(clipped, (own * scale).split([p.numel() for p in clipped]), strict=True):
            param.grad = g.view(param.shape).clone()
        norm = torch.nn.utils.clip_grad_norm_(clipped, 0.5)
        torch_step(clipped_optimizer, clipped, torch.cat([p.grad.view(-1) for p in clipped]), lr)
        assert info.clip_coef < 1
        assert info.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        assert info.grad_norm == pytest.approx(float((own.double() * scale).norm()), rel=1e-12)
    assert_same(optimizer, exact, exact_optimizer)
    own = torch.cat([p.detach().view(-1) for p in clipped])
    torch.testing.assert_close(optimizer.master, own, rtol=1e-5, atol=1e-6)


def test_the_norm_is_the_same_at_any_chunk_size_whose_workspace_holds_a_block():
    """More than a block, and a part of one: 2.7 MiB are enough for its 2**20 elements in FP64."""
    total, norms = 5 << 19, []
    for chunk_mib, beside in ((2.7, 0), (8.0, 1), (10.0, 2), (64.0, 2)):
        optimizer, grad, _ = build(replace(CONFIG, chunk_mib=chunk_mib), shapes=[(total,)])
        grad.copy_(gradient(0, total))
        norms.append(optimizer.step(0).grad_norm)
        assert optimizer._beside_norm == beside
    assert len({*norms}) == 1 and norms[0] == pytest.approx(float(gradient(0, total).double().norm()), rel=1e-12)


def test_small_norm_is_not_clipped():
    optimizer, grad, _ = build(replace(CONFIG, max_grad_norm=5.0))
    grad.fill_(1e-3)
    assert optimizer.step(0).clip_coef == 1.0


def test_norm_counts_only_counted_segments():
    optimizer, grad, _ = build(CONFIG, counted=lambda i: i in (1, 2, 4))
    grad.copy_(gradient(0))
    parts = grad.double().split([math.prod(shape) for shape in SHAPES])
    expected = math.sqrt(sum(float(parts[i].square().sum()) for i in (1, 2, 4)))
    assert optimizer.step(0).grad_norm == pytest.approx(expected, rel=1e-12)


def test_bf16_destinations_are_the_rounded_master():
    config = replace(CONFIG, chunk_mib=chunk(96))
    optimizer, grad, dests = build(config, dtype=torch.bfloat16)
    params, reference = torch_adamw(dests, config)
    start = torch.cat([dest.view(-1) for dest in dests])
    for step in range(10):
        grad.copy_(gradient(step))
        optimizer.step(step)
        torch_step(reference, params, gradient(step), lr_at(step, config))
        written = torch.cat([dest.view(-1) for dest in dests])
        assert torch.equal(written, optimizer.master.to(torch.bfloat16))
    assert_same(optimizer, params, reference)  # the FP32 weights never went through BF16
    assert not torch.equal(written, start)


def test_transposed_destination():
    """Case 2: the parameter is the .t() of its storage; destination and gradient are flat in storage order."""
    config = replace(CONFIG, chunk_mib=chunk(96), weight_decay=0.1)
    optimizer, grad, (storage,) = build(config, shapes=[(13, 37)])
    parameter = torch.nn.Parameter(storage.t())  # [37, 13] as the layer sees it, no copy
    params, reference = torch_adamw([storage.t().contiguous()], config)
    for step in range(10):
        inputs = torch.randn(5, 13)
        parameter.grad = None
        (inputs @ parameter.t()).square().mean().backward()
        grad.view(13, 37).t().copy_(parameter.grad)
        optimizer.step(step)
        torch_step(reference, params, parameter.grad.reshape(-1), lr_at(step, config))
        assert torch.equal(parameter, params[0]), f"step {step}"


def test_first_step_is_bias_corrected():
    """At t = 1 both corrections cancel the (1 - beta) factors: every weight moves by lr against its gradient's sign."""
    config = OptimizerConfig(lr=1e-3, max_grad_norm=0.0)
    optimizer, grad, _ = build(config)
    before, signs = optimizer.master.clone(), torch.randn(TOTAL).sign()
    grad.copy_(signs * torch.empty(TOTAL).uniform_(0.1, 10))
    optimizer.step(0)
    torch.testing.assert_close(before - optimizer.master, 1e-3 * signs, rtol=1e-3, atol=1e-6)


def test_resume_equals_uninterrupted(tmp_path):
    config = replace(CONFIG, weight_decay=0.1, chunk_mib=chunk(1024))
    whole, whole_grad, whole_dests = build(config, dtype=torch.bfloat16)
    first, first_grad, _ = build(config, dtype=torch.bfloat16)
    for step in range(12):
        whole_grad.copy_(gradient(step))
        if step == 2:
            whole_grad[5] = math.nan  # a skipped step before the save: trainer step and Adam's t part company
        if step < 6:
            first_grad.copy_(whole_grad)
            first.step(step)
        whole.step(step)
    torch.save(first.state_dict(), tmp_path / "optimizer.pt")
    second, second_grad, second_dests = build(replace(config, chunk_mib=chunk(4096)), dtype=torch.bfloat16, seed=9)
    second.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    assert torch.equal(torch.cat([d.view(-1) for d in second_dests]), first.master.to(torch.bfloat16))
    for step in range(6, 12):
        second_grad.copy_(gradient(step))
        second.step(step)
    assert second.adam_steps == whole.adam_steps == 11 and second.skipped_total == 1
    for name in ("master", "exp_avg", "exp_avg_sq"):
        assert torch.equal(getattr(second, name), getattr(whole, name))
    assert all(torch.equal(a, b) for a, b in zip(second_dests, whole_dests, strict=True))


def test_state_of_another_layout_is_refused():
    state = build(CONFIG)[0].state_dict()
    other, _, _ = build(CONFIG, shapes=SHAPES[:-1])
    with pytest.raises(ValueError, match=r"another layout \(saved \('weight5', 64\), here None\).*train_tp"):
        other.load_state_dict(state)


def test_skipped_step_does_not_advance_adam():
    optimizer, grad, dests = build(CONFIG)
    before = snapshot(optimizer)
    grad.copy_(gradient(0))
    grad[3] = math.inf
    info = optimizer.step(0)
    assert info.skipped and math.isnan(info.grad_norm) and info.nonfinite == "rank 0: weight1"
    assert info.bytes_loaded == info.bytes_offloaded == 0
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(optimizer), strict=True))
    params, reference = torch_adamw(dests, CONFIG)
    grad.copy_(gradient(1))
    assert not optimizer.step(1).skipped
    torch_step(reference, params, gradient(1), lr_at(1, CONFIG))
    assert_same(optimizer, params, reference)


def test_huge_finite_gradient_is_not_taken_for_overflow():
    optimizer, grad, _ = build(replace(CONFIG, max_grad_norm=1.0))
    grad.fill_(1e30)  # its square overflows FP32
    info = optimizer.step(0)
    assert not info.skipped and info.grad_norm == pytest.approx(1e30 * math.sqrt(TOTAL), rel=1e-6)
    assert torch.isfinite(optimizer.master).all()


def test_stops_after_too_many_skips_in_a_row():
    optimizer, grad, _ = build(replace(CONFIG, max_skipped_steps=2))
    for step, value in enumerate([math.nan, math.nan, 1.0, math.nan, math.nan]):  # the good step resets the count
        grad.fill_(0.1)[-1] = value
        assert optimizer.step(step).skipped == math.isnan(value)
    with pytest.raises(RuntimeError, match="3 steps in a row.*max_skipped_steps allows 2.*rank 0: weight5"):
        optimizer.step(5)


def snapshot(optimizer):
    tensors = [optimizer.master, optimizer.exp_avg, optimizer.exp_avg_sq, *(s.dest for s in optimizer.segments)]
    return [tensor.clone() for tensor in tensors]


def _two_ranks(rank, init_file):
    """One of two gloo ranks. The last tensor is replicated, so only rank 0 counts it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=2)
    world = dist.group.WORLD
    last = len(SHAPES) - 1
    config = replace(CONFIG, max_grad_norm=1.0, max_skipped_steps=1)

    def fresh():
        optimizer, grad, _ = build(config, seed=rank, counted=lambda i: rank == 0 or i != last)
        return optimizer, grad

    def fill(grad, step):
        grad.copy_(gradient(2 * step + rank))
        grad[-64:] = gradient(500 + step, 64)  # replicated: equal on both ranks

    def skips(optimizer, grad, where, bad_rank, index, value, **groups):
        fill(grad, 0)
        if rank == bad_rank:
            grad[index] = value
        before = snapshot(optimizer)
        info = optimizer.step(0, 0.5, **groups)
        assert info.skipped and info.nonfinite == where and optimizer.adam_steps == 0
        assert all(torch.equal(a, b) for a, b in zip(before, snapshot(optimizer), strict=True))

    optimizer, grad = fresh()
    skips(optimizer, grad, "rank 1: weight4", 1, 6000, math.nan, tp_group=world)
    with pytest.raises(RuntimeError, match="2 steps in a row.*rank 1: weight0"):
        skips(optimizer, grad, "", 1, 0, math.inf, tp_group=world)
    skips(*fresh(), "rank 1: weight5", 1, -1, math.nan, tp_group=world)  # a tensor that rank 1 does not count
    skips(*fresh(), "rank 0: weight0", 0, 0, -math.inf, dp_group=world)

    optimizer, grad = fresh()
    fill(grad, 1)
    info = optimizer.step(0, 0.5, tp_group=world)
    every = torch.cat([gradient(2)[:-64], gradient(3)[:-64], gradient(501, 64)]).double()
    assert info.grad_norm == pytest.approx(0.5 * float(every.norm()), rel=1e-12)
    assert info.clip_coef == pytest.approx(1 / info.grad_norm, rel=1e-5)
    norms = [None, None]
    dist.all_gather_object(norms, info.grad_norm)
    assert norms[0] == norms[1]
    dist.destroy_process_group()


def _four_ranks(rank, init_file):
    """Two replicas of two ranks. Tensors 1 and 2, and the last, are partial: every rank has its share of their
    gradient, and counts it only on tensor-parallel rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=4)
    groups = {ranks: dist.new_group(ranks) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
    tp, dp = (group for ranks, group in groups.items() if rank in ranks)
    shared = (1, 2, len(SHAPES) - 1)
    optimizer, grad, _ = build(
        CONFIG, counted=lambda i: rank % 2 == 0 or i not in shared, partial=lambda i: i in shared
    )
    every = [gradient(i).round() for i in range(4)]  # whole numbers: their sums are exact
    grad.copy_(every[rank])
    optimizer.sum_gradients(tp, dp)
    for i, segment in enumerate(optimizer.segments):
        expected = sum(every if i in shared else every[rank % 2 :: 2])
        assert torch.equal(grad[segment.offset : segment.end], expected[segment.offset : segment.end]), segment.name
    parts = [None, None]
    own = sum(grad[s.offset : s.end].double().square().sum().item() for s in optimizer.segments if s.counted)
    dist.all_gather_object(parts, own, group=tp)
    info = optimizer.step(0, tp_group=tp, dp_group=dp)
    assert info.grad_norm == pytest.approx(sum(parts) ** 0.5, rel=1e-9)
    grad.fill_(0.1)
    if rank == 3:
        grad[-1] = math.inf  # of a share that rank 3 does not count
    optimizer.sum_gradients(tp, dp)
    assert optimizer.step(1, tp_group=tp, dp_group=dp).skipped
    dist.destroy_process_group()


def test_partial_gradients_are_added_up_before_the_norm(tmp_path):
    mp.spawn(_four_ranks, args=(tmp_path / "store",), nprocs=4)


def test_two_ranks_skip_together_and_share_the_norm(tmp_path):
    mp.spawn(_two_ranks, args=(tmp_path / "store",), nprocs=2)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, 1.0, 0.868198, 0.55, 0.231802, 0.1, 0.1]),
    ],
)
def test_lr_table(schedule, expected):
    extra = {} if schedule == "constant" else {"decay_steps": 8, "min_lr_ratio": 0.1}
    config = OptimizerConfig(lr=2e-3, warmup_steps=4, schedule=schedule, **extra)
    config.validate()
    assert [lr_at(step, config) for step in range(10)] == pytest.approx([2e-3 * x for x in expected], rel=1e-5)


def test_update_allocates_nothing_that_grows_with_the_model():
    """The profiler's record of allocations during a step: scalars of the norm only, also for 16 times the model."""
    config = replace(CONFIG, chunk_mib=chunk(16384), max_grad_norm=1.0, weight_decay=0.1)
    peaks = []
    for numel in (50_000, 800_000):
        optimizer, grad, _ = build(config, shapes=[(numel,)])
        grad.copy_(gradient(0, numel))
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
            optimizer.step(0)
        sizes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        assert sizes, "the profiler recorded no allocation at all"
        peaks.append(max(sizes))
        assert optimizer.workspace.nbytes == workspace_bytes(config) == 3 * 12 * 16384
    assert max(peaks) <= 4096


class LateStreams:
    """Streams as a GPU has them: work is queued when it is enqueued and runs later, in any order the marks allow."""

    def __init__(self, prefer):
        self.prefer, self.queues, self.reached = prefer, [], set()

    def stream(self):
        self.queues.append([])
        return LateStream(self.queues[-1])

    def synchronize(self, every_stream=True):
        """Run everything; at each turn the first stream of `prefer` that is not waiting for a mark. A thread that loads
        ahead waits for nothing, so that its work, too, comes as late as it can."""
        while every_stream and any(self.queues):
            candidates = (self.queues[i] for i in self.prefer)
            queue = next(q for q in candidates if q and (q[0][0] != "wait" or q[0][1] in self.reached))
            kind, item = queue.pop(0)
            if kind == "work":
                item()
            elif kind == "mark":
                self.reached.add(item)


class LateStream(TorchDispatchMode):
    """`with stream:` queues what its thread computes. Its follow() has nothing to wait for: what no stream was given
    ran at once."""

    VIEWS = ("slice", "select", "view", "unbind", "alias", "detach", "as_strided")

    def __init__(self, queue):
        super().__init__()
        self.queue = queue

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.overloadpacket.__name__ in self.VIEWS:
            return function(*args, **kwargs)
        self.queue.append(("work", partial(function, *args, **kwargs)))
        return kwargs.get("out", args[0])

    def record(self):
        mark = object()
        self.queue.append(("mark", mark))
        return mark

    def wait(self, mark):
        self.queue.append(("wait", mark))

    def follow(self):
        pass


@pytest.mark.parametrize("prefer", list(permutations(range(3))), ids=str)
@pytest.mark.parametrize("ahead", [0, 4, 1000])
def test_marks_alone_keep_the_pipeline_in_order(prefer, ahead, monkeypatch):
    """Each stage as early or as late as the marks allow: a load that runs ahead must not hit a busy slot, nor an update
    run before the load that load_ahead enqueued."""
    config = replace(CONFIG, weight_decay=0.1, chunk_mib=chunk(4096), ahead_gib=ahead * chunk(4096) / 1024)
    plain, plain_grad, plain_dests = build(config)
    for step in range(3):
        plain_grad.copy_(gradient(step))
        plain.step(step)
    streams = LateStreams(prefer)
    monkeypatch.setattr(hardware, "Stream", streams.stream)
    monkeypatch.setattr(hardware, "synchronize", streams.synchronize)
    late, late_grad, late_dests = build(config)
    assert len(late.chunks) > 6
    for step in range(3):
        late_grad.copy_(gradient(step))
        if ahead:
            assert load_ahead(late) == late.chunks[min(ahead, len(late.chunks) - 3)][0] and any(streams.queues)
        late.step(step)
    assert streams.reached and not any(streams.queues)
    for name in ("master", "exp_avg", "exp_avg_sq"):
        assert torch.equal(getattr(late, name), getattr(plain, name))
    assert all(torch.equal(a, b) for a, b in zip(late_dests, plain_dests, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0.0}, "optimizer.lr is 0.0"),
        ({"betas": (0.9, 1.0)}, r"optimizer.betas are \(0.9, 1.0\)"),
        ({"weight_decay": -0.1}, "optimizer.weight_decay is -0.1"),
        ({"chunk_mib": 1e-6}, "optimizer.chunk_mib is 1e-06: the smallest chunk is 384 bytes"),
        ({"ahead_gib": -1.0}, "optimizer.ahead_gib is -1.0: it must be 0, or room for a chunk of chunk_mib 64.0"),
        ({"ahead_gib": 0.06}, "optimizer.ahead_gib is 0.06: it must be 0, or room"),
        ({"decay_steps": 5}, "do nothing with schedule constant"),
        ({"schedule": "cosine"}, "optimizer.decay_steps is 0 with schedule cosine: set it above warmup_steps"),
        ({"schedule": "linear", "decay_steps": 3, "min_lr_ratio": 2.0}, "optimizer.min_lr_ratio is 2.0"),
    ],
)
def test_config_errors_name_the_field(change, message):
    with pytest.raises(ValueError, match=message):
        replace(OptimizerConfig(), **change).validate()


def test_layout_errors_name_the_segment():
    pool, config, data = HostPool(4096), replace(CONFIG, chunk_mib=chunk(32)), torch.zeros(20)

    def make(*segments, grad=20, workspace=None):
        StreamedAdamW(list(segments), torch.zeros(grad), pool, config, workspace)

    whole = Segment("a", 20, 0, data)
    with pytest.raises(ValueError, match="segment b starts at element 12, the one before it ends at 10"):
        make(Segment("a", 10, 0, data[:10]), Segment("b", 8, 12, data[12:]))
    with pytest.raises(ValueError, match="dest of segment a overlaps that of b"):
        make(Segment("a", 10, 0, data[:10]), Segment("b", 10, 10, data[5:15]))
    with pytest.raises(
        ValueError, match=r"dest of segment a must be .* of 20 .*got \[20\] strides \(1,\) torch.float16"
    ):
        make(Segment("a", 20, 0, data.half()))
    with pytest.raises(ValueError, match="dest of segment a must be a contiguous"):
        make(Segment("a", 10, 0, data[::2]))
    with pytest.raises(ValueError, match=r"grad_flat must be .* of 20 torch.float32, got \[19\]"):
        make(whole, grad=19)
    with pytest.raises(ValueError, match="tensor of 1152 bytes, got 1151: enlarge it or lower optimizer.chunk_mib"):
        make(whole, workspace=torch.zeros(1151, dtype=torch.uint8))
