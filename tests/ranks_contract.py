"""Run under torchrun by test_memory.py: breaks every row of the memory contract in a real step, and sees which barrier
says what."""

import gc
import sched
import sys
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch.distributed as dist

import memory
import train
from arena import Arena
from run import prepare_run
from trainer import Trainer, join

leaked: list = []  # what a broken step keeps
allowed_barriers = memory.allowed_barriers


@contextmanager
def mapped(arena: Arena, region: str):
    arena.acquire(region).zero_()
    yield
    arena.release(region)


@contextmanager
def unmapped(arena: Arena, region: str):
    contents = arena.acquire(region).clone()
    arena.release(region)
    yield
    arena.acquire(region).copy_(contents)


def breaks(trainer: Trainer) -> dict[str, tuple[str, AbstractContextManager]]:
    """Row -> the barrier that must notice, and a context manager under which a step breaks the row."""
    schedule, actor, reference = trainer.schedule, trainer.actor, trainer.schedule.reference
    prefix_backward, suffix, scoring = actor.prefix_backward, actor.suffix, reference.model.suffix

    def keep_boundary(prefix):
        leaked.extend(prefix.leaves())
        prefix_backward(prefix)

    def keep_reference_boundary(prefix, *arguments):
        leaked.extend(prefix.leaves())
        return scoring(prefix, *arguments)

    def keep_graph(*arguments):
        leaked.append(suffix(*arguments))  # a second graph, which no backward pass frees
        return suffix(*arguments)

    def drops_prefixes(row, policy):  # although this run keeps them
        return allowed_barriers(row, replace(policy, activations="recompute"))

    return {
        "rollout_kv": ("2", patch.object(schedule, "release_kv", lambda: None)),
        "actor_boundary": ("3", patch.object(actor, "prefix_backward", keep_boundary)),
        "reference_boundary": ("3", patch.object(reference.model, "suffix", keep_reference_boundary)),
        "reference": ("2", patch.object(sched.PagedReference, "__exit__", lambda self, *exc: None)),
        "logprobs": ("3", patch.object(sched.Group, "drop", lambda self: None)),
        "prefix_activations": ("2", patch.object(memory, "allowed_barriers", drops_prefixes)),
        "suffix_activations": ("3", patch.object(actor, "suffix", keep_graph)),
        "gradient": ("1", mapped(trainer.arena, "gradient")),
        "optimizer_state": ("1", mapped(trainer.arena, "workspace")),
        "snapshot": ("1", unmapped(trainer.arena, "snapshot")),
    }


def breaks_of_state(trainer: Trainer) -> list[tuple[str, AbstractContextManager]]:
    """More ways to break the optimizer state's row, whose chunks that are loaded ahead are there at barrier 3 alone."""
    schedule, arena = trainer.schedule, trainer.arena
    collect, load_ahead = schedule._collect, schedule._load_ahead

    def too_early(*arguments):
        arena.acquire("ahead")
        collect(*arguments)

    def too_much():
        load_ahead()
        arena.acquire("workspace")

    return [
        ("1", mapped(arena, "ahead")),
        ("2", patch.object(schedule, "_collect", too_early)),
        ("3", patch.object(schedule, "_load_ahead", too_much)),
    ]


def check(trainer: Trainer, row: str, barrier: str, broken: AbstractContextManager) -> None:
    """A broken step stops at its barrier with the object's name; afterwards everything is as it was."""
    text = "no error"
    with broken:
        try:
            train.train_step(trainer, 1, 0)
        except memory.ContractError as error:
            text = str(error)
    leaked.clear()
    gc.collect()
    for region in ("gradient", "workspace", "ahead", "reference"):
        trainer.arena.release(region)
    trainer.schedule.release_kv()
    ours = next(r for r in memory.CONTRACT if r.tag == row)
    assert text.startswith(f"barrier {barrier}: ") and f"{row} ({ours.object}" in text, f"{row}: {text}"
    assert ours.consumed in text and (ours.releases in text or row == "snapshot"), f"{row}: {text}"


def main() -> None:
    config = replace(train.TINY, run_dir=sys.argv[1], prompts=4, micro_tokens=256, qkv="split")
    config = replace(config, rollout=replace(config.rollout, n=2, max_new_tokens=8))
    config = replace(config, optimizer=replace(config.optimizer, chunk_mib=0.5, ahead_gib=1 / 1024))
    ranks = join(config)
    trainer = Trainer(config, ranks, *prepare_run(config, ranks))
    try:
        trainer.freeze_reference()
        trainer.wait_for_engines()
        trainer.schedule._rollout_goes_on = lambda: True  # all prefixes run in Phase 1, however busy the host
        train.train_step(trainer, 0, 0)  # as it is, nothing is wrong
        rows = breaks(trainer)
        assert rows.keys() == {row.tag for row in memory.CONTRACT} - {"engine_weights", "engine_other"}
        for row, (barrier, broken) in rows.items():
            check(trainer, row, barrier, broken)
        for barrier, broken in breaks_of_state(trainer):
            check(trainer, "optimizer_state", barrier, broken)
        train.train_step(trainer, 2, 0)  # and nothing is left
    finally:
        trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
