"""Run under torchrun by test_sched.py: real engines, both schedules from the same state, responses and weights
compared."""

import json
import sched
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import memory
import train
from run import prepare_run
from trainer import Trainer, join


def run_step(trainer: Trainer, overlap: str, state: dict, position: int) -> dict:
    """One GRPO step from `state` under one schedule; everything that it read and wrote."""
    trainer.arena.acquire("workspace")
    trainer.optimizer.load_state_dict(state)
    trainer.arena.release("workspace")
    trainer.snapshot.publish()
    if trainer.engine is not None:
        trainer.engine.publish(0)
    dist.barrier()
    trainer.schedule.overlap = overlap
    seen: list = []
    original = trainer.schedule._actor_gradients

    def watch(batches, loss):  # after the responses are in, before anything is computed from them
        groups = [group for batch in batches for group in batch.groups]
        seen.extend((r.request_id, r.index, tuple(r.token_ids), tuple(r.logprobs)) for g in groups for r in g.responses)
        assert all(r.prompt_ids == g.sample.input_ids.tolist() for g in groups for r in g.responses)
        original(batches, loss)

    trainer.schedule._actor_gradients = watch
    metrics, _ = train.train_step(trainer, 0, position)
    trainer.schedule._actor_gradients = original
    events, seconds = trainer.timeline.take()
    optimizer = trainer.optimizer
    weights = [trainer.snapshot.bytes, optimizer.master, optimizer.exp_avg, optimizer.exp_avg_sq]
    weights = [tensor.clone() for tensor in weights]
    return dict(responses=seen, weights=weights, metrics=metrics, events=events, seconds=seconds)


def overlapped_us(events: list[dict], names: set[str], group: dist.ProcessGroup) -> float:
    """Microseconds that training spans of these names share with work of this rank's engine, over all ranks."""
    engine = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"].startswith("engine")]
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == "train" and e["name"] in names]
    shared = torch.tensor([max(0.0, min(b, d) - max(a, c)) for a, b in spans for c, d in engine]).sum()
    dist.all_reduce(shared, group=group)
    return shared.item()


def main() -> None:
    run_dir, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    config = replace(
        train.TINY,
        run_dir=str(run_dir),
        prompts=6,
        micro_tokens=256,
        rollout=replace(train.TINY.rollout, max_new_tokens=64),
    )
    policy = memory.MemoryConfig(activations="offload", offload_gib=0.1, **options.pop("memory", {}))
    # Five chunks, two of them ahead; the workspace holds a block of the norm, which is then the same at any chunk size.
    ahead_gib = 2.5 / 1024 if policy.chunked_optimizer and policy.state_offload else 0.0
    adam = replace(train.TINY.optimizer, chunk_mib=1.25, ahead_gib=ahead_gib)
    config = replace(config, algo=replace(config.algo, kl_coef=0.1), memory=policy, optimizer=adam, **options)
    ranks = join(config)
    run_dir, model_dir = prepare_run(config, ranks)
    trainer = Trainer(config, ranks, run_dir, model_dir)
    try:
        check(trainer)
    finally:
        trainer.close()
    dist.destroy_process_group()


def ended_rollouts(trainer: Trainer, state: dict) -> list[tuple[str, dict]]:
    """Steps whose rollout is said to be over when so many prefixes have been computed: Phase 2 computes the others."""
    own, runs = trainer.schedule._rollout_goes_on, []
    for computed in (0, 1, 4):  # of three of the reference, then three of the actor
        asked = iter([True] * (computed + 1))  # once at the start, too
        trainer.schedule._rollout_goes_on = lambda asked=asked: next(asked, False)
        runs.append((f"prefix, {computed} beside decode", run_step(trainer, "prefix", state, 0)))
        events = sorted((e for e in runs[-1][1]["events"] if e["tid"] == "train"), key=lambda e: e["ts"])
        names = [e["name"] for e in events]
        later = names[names.index("reference") :]
        assert later.count("reference prefix") == max(0, 3 - computed), later
        assert later.count("actor prefix") == 3 - max(0, computed - 3), later
        assert runs[-1][1]["metrics"]["prefix_share"] == pytest.approx(computed / 6, abs=0.05)
    trainer.schedule._rollout_goes_on = own
    return runs


def rollout_that_ends_first(trainer: Trainer, state: dict) -> tuple[str, dict]:
    """A step that looks for something to overlap when the engines are done: it finds that, and computes no prefix."""
    wait = trainer.schedule._wait_for_prompts

    def wait_for_responses() -> None:
        wait()
        while trainer.engine is not None and trainer.engine.generating:
            time.sleep(0.001)
        dist.barrier(group=trainer.ranks.control)

    trainer.schedule._wait_for_prompts = wait_for_responses
    run = run_step(trainer, "prefix", state, 0)
    trainer.schedule._wait_for_prompts = wait
    assert run["metrics"]["prefix_share"] == 0 and "rollout wait" in run["seconds"]
    return "prefix, after the rollout", run


def chosen_partitions(trainer: Trainer, state: dict) -> list[tuple[str, dict]]:
    """Steps with a choice of SMs, which a CPU's streams ignore: the choice, its serial step and what ranks tell each
    other are as on a GPU."""
    partition = trainer.schedule.partition = sched.Partition((0, 8))
    runs = [(f"prefix, choice {i}", run_step(trainer, "prefix", state, 0)) for i in range(5)]
    assert [m.sms for m in partition.history[:4]] == [0, None, 0, 8] and partition.history[4].sms in (0, 8)
    assert all(m.decode_s > 0 and m.decode_steps > 0 and m.prefix_tokens > 0 for m in partition.history)
    assert all(m.prefix_s > 0.001 for m in partition.history if m.sms is not None), partition.history
    assert [run["metrics"]["prefix_sms"] for _, run in runs] == [m.sms for m in partition.history]
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, partition.history, group=trainer.ranks.control)
    assert all(other == partition.history for other in everyone), "ranks measured or chose differently"
    names = {event["name"] for event in runs[1][1]["events"] if event["tid"] == "train"}
    assert "reference prefix" in names and runs[1][1]["seconds"].keys().isdisjoint({"reference prefix", "actor prefix"})
    own, trainer.schedule.partition = trainer.schedule.policy, sched.Partition((8,))
    trainer.schedule.policy = replace(own, activations="keep", recompute_vision=True)  # saved under a limit
    runs.append(("prefix, 8 SMs, kept", run_step(trainer, "prefix", state, 0)))
    trainer.schedule.policy, trainer.schedule.partition = own, sched.Partition()
    return runs


def loading_ahead(trainer: Trainer, state: dict) -> list[tuple[str, dict]]:
    """Steps that load chunks beside the last two of three micro-batches, or the last if a prefix waits for it."""
    own, runs = trainer.schedule.policy, [("none, ahead", run_step(trainer, "none", state, 0))]
    starts = {
        name: [e["ts"] for e in runs[0][1]["events"] if e["name"] == name] for name in ("load ahead", "actor prefix")
    }
    assert sum(ts < starts["load ahead"][0] for ts in starts["actor prefix"]) == 1 and len(starts["actor prefix"]) == 3
    for activations, tokens in (("keep", 0), ("keep", 300), ("offload", 0), ("recompute", 0)):
        trainer.schedule.policy = replace(own, activations=activations, keep_tokens=tokens)
        runs.append((f"prefix, {activations} {tokens}, ahead", run_step(trainer, "prefix", state, 0)))
    trainer.schedule.policy = own
    assert [sum(e["name"] == "load ahead" for e in run["events"]) for _, run in runs] == [1] * 5
    return runs


def prepared_beforehand(trainer: Trainer, state: dict) -> None:
    """A step whose prompts the one before has given to the engines gives what it gives without that."""
    while not trainer.coming:  # its samples may not all be decoded yet when a step looks
        run_step(trainer, "none", state, 0)
    (position,), sent = trainer.coming, []
    if trainer.engine is not None:
        send = trainer.engine._send
        trainer.engine._send = lambda message: (sent.append(message), send(message))
    runs = [run_step(trainer, "prefix", state, position) for _ in range(2)]
    if trainer.engine is not None:
        trainer.engine._send = send
        first, second = ([r.media for r in message[2]] for message in sent if message[0] == "generate")
        assert all(media is None for media in first) and all(second)
    assert runs[0]["responses"] == runs[1]["responses"], "prepared prompts: the engines answered differently"
    for a, b in zip(runs[0]["weights"], runs[1]["weights"], strict=True):
        assert torch.equal(a, b), "prepared prompts: another update"


def activations(trainer: Trainer, state: dict) -> list[tuple[str, dict]]:
    """Steps in which they are kept, offloaded or computed again, of layers or of the tower, for all prompts or some."""
    own, runs = trainer.schedule.policy, []
    for layers, kind in product((False, True), ("keep", "offload", "recompute")):
        trainer.schedule.policy = replace(own, activations=kind, recompute_layers=layers)
        trainer.actor.recompute_layers = layers
        runs.append((f"prefix, {kind}, layers {layers}", run_step(trainer, "prefix", state, 0)))
    runs.append(("none, layers True", run_step(trainer, "none", state, 0)))
    trainer.actor.recompute_layers = False
    for tower, tokens in ((False, 300), (True, 300), (True, 0)):
        some = replace(own, activations="keep", keep_tokens=tokens, recompute_vision=tower)
        trainer.schedule.policy = some
        runs.append((f"prefix, {tokens or 'all'} tokens kept, tower {tower}", run_step(trainer, "prefix", state, 0)))
    counts = [sum(e["name"] == "actor prefix" for e in run["events"]) for _, run in runs[-3:]]
    assert counts == [3, 3, 1]  # two of the three micro-batches after the rollout, and a span around the others
    trainer.schedule.policy = own
    return runs


def check(trainer: Trainer) -> None:
    ahead_bytes, trainer.optimizer.ahead_bytes = trainer.optimizer.ahead_bytes, 0  # at first none does
    trainer.freeze_reference()
    for i in range(2):  # move away from the reference, so that the KL term has a gradient
        train.warm_up(trainer, i, 100 + 10 * i)
    trainer.wait_for_engines()
    trainer.timeline.take()
    state = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in trainer.optimizer.state_dict().items()}
    serial = run_step(trainer, "none", state, 0)
    prefixes, control = {"reference prefix", "actor prefix"}, trainer.ranks.control
    assert overlapped_us(serial["events"], prefixes, control) == 0
    runs = [("none, again", run_step(trainer, "none", state, 0))]
    shared_us = 0.0
    while shared_us < 1000 and len(runs) < 6:  # a busy host may let an engine sleep through a trainer's prefixes
        runs.append(("prefix", run_step(trainer, "prefix", state, 0)))
        shared_us = overlapped_us(runs[-1][1]["events"], prefixes, control)
    own = trainer.schedule.policy
    if everything := own.state_offload:  # a run with these policies off need not do all of it again
        runs += [*ended_rollouts(trainer, state), rollout_that_ends_first(trainer, state)]
    trainer.schedule._rollout_goes_on = lambda: True  # from here on all prefixes run in Phase 1, however busy the host
    runs += activations(trainer, state) if everything else []
    runs += chosen_partitions(trainer, state)
    assert not any(event["name"] == "load ahead" for _, run in runs for event in run["events"])
    assert (ahead_bytes > 0) == (own.chunked_optimizer and own.state_offload)
    if ahead_bytes:
        trainer.optimizer.ahead_bytes = ahead_bytes
        runs += loading_ahead(trainer, state)
    prepared_beforehand(trainer, state)
    assert trainer.pool.lent_bytes == 0 < trainer.pool.lent_peak_bytes  # offload used the pool, and gave all back
    assert shared_us >= 1000, "prefixes did not run beside the engines"

    for name, run in runs:
        assert run["responses"] == serial["responses"], f"{name}: the engines answered differently"
        for a, b in zip(serial["weights"], run["weights"], strict=True):
            assert torch.equal(a, b), f"{name}: {(a != b).sum().item()} elements differ from the serial update"
    before = state["master"]
    assert not torch.equal(before, serial["weights"][1]) and serial["metrics"]["grad_norm"] > 0
    assert serial["metrics"]["kl"] > 0  # the reference took part
    bar = 1e-4 if trainer.config.dtype == "float32" else 2e-2
    assert serial["metrics"]["logprob_diff_mean"] <= bar, serial["metrics"]["logprob_diff_mean"]

    # The replicated parameters, and every gathered slab, are the same on all ranks of the replica (rollout TP 1).
    digests: list = [None] * dist.get_world_size()
    digest = trainer.snapshot.bytes.cpu().to(torch.int64).cumsum(0).sum().item()
    dist.all_gather_object(digests, digest, group=trainer.ranks.control)
    assert len(set(digests)) == 1, "ranks hold different snapshots"
    if trainer.ranks.rank == 0:
        (trainer.run_dir / "digest").write_text(str(digest))


if __name__ == "__main__":
    main()
