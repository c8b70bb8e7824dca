"""sched.py: the schedules compute one and the same update with real engines; the timeline adds up; the bound is
Equation 1."""

import json
import re
import sched
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

import hardware
import rollout

RANKS = Path(__file__).parent / "ranks_schedule.py"


POLICIES = ("state_offload", "chunked_optimizer", "weight_sharing", "engine_release", "reference_paging")


@pytest.fixture(scope="module")
def digests() -> dict[str, str]:
    return {}


@pytest.mark.parametrize(
    "options",
    [{"qkv": "fused"}, {"qkv": "split", "dtype": "bfloat16"}, {"memory": dict.fromkeys(POLICIES, False)}],
    ids=["fp32-fused", "bf16-split", "fp32-fused-no-policies"],
)
def test_both_schedules_give_the_same_update_bit_for_bit(tmp_path, torchrun, options, digests, request):
    """And so do the ways to treat activations, within one run, and runs with all memory policies on or off."""
    torchrun(RANKS, str(tmp_path / "run"), json.dumps(options))
    digests[request.node.callspec.id] = (tmp_path / "run" / "digest").read_text()
    if "memory" in options and "fp32-fused" in digests:
        assert digests["fp32-fused-no-policies"] == digests["fp32-fused"]


def test_timeline_adds_up_outermost_spans_only():
    timeline = sched.Timeline(rank=3)
    with timeline.span("actor", group=1):
        with timeline.span("backward"):
            time.sleep(0.02)
        assert timeline.phase == "actor"
    with timeline.span("optimizer"):
        time.sleep(0.01)
    events, seconds = timeline.take()
    assert seconds.keys() == {"actor", "optimizer"} and seconds["actor"] >= 0.02 and seconds["optimizer"] >= 0.01
    by_name = {event["name"]: event for event in events}
    assert by_name["backward"]["ts"] >= by_name["actor"]["ts"] and by_name["actor"]["args"] == {"group": 1}
    assert all(event["pid"] == 3 and event["tid"] == "train" for event in events)
    assert timeline.take() == ([], {})


def test_a_span_is_closed_by_an_exception():
    timeline = sched.Timeline(0)
    with pytest.raises(KeyError), timeline.span("reward"):
        raise KeyError
    with timeline.span("actor"):
        pass
    assert set(timeline.take()[1]) == {"reward", "actor"} and timeline.phase == "actor"


def test_trace_is_readable_at_any_moment(tmp_path):
    trace = sched.TraceFile(tmp_path / "trace.json")
    for step in range(3):
        trace.write([dict(name="actor", ph="X", ts=step, dur=1, pid=0, tid="train", args={"step": step})])
    text = (tmp_path / "trace.json").read_text()
    events = json.loads(text.rstrip().rstrip(",") + "]")  # as Perfetto reads an unfinished array
    assert [event["args"]["step"] for event in events] == [0, 1, 2]


def answer(index: int, token_ids: list[int], logprobs: list[float]) -> rollout.Response:
    return rollout.Response("0", index, token_ids, logprobs, "stop", 0, 0)


def test_group_packs_ragged_responses():
    group = sched.Group(None, [answer(0, [5, 6, 7], [-0.1, -0.2, -0.3]), answer(1, [8], [-1.0]), answer(2, [], [])])
    group.pack()
    assert group.tokens.tolist() == [[5, 6, 7], [8, 0, 0], [0, 0, 0]]
    assert group.mask.tolist() == [[True] * 3, [True, False, False], [False] * 3]
    assert torch.allclose(group.rollout_logprobs, torch.tensor([[-0.1, -0.2, -0.3], [-1.0, 0, 0], [0, 0, 0]]))
    empty = sched.Group(None, [answer(0, [], [])])
    empty.pack()
    assert empty.tokens.shape == (1, 1) and not empty.mask.any()


@pytest.mark.parametrize(
    "decode, prefix, slowdown, saved",
    [(100, 60, 0, 60), (100, 60, 5, 55), (40, 60, 0, 40), (40, 60, 10, 40), (40, 60, 25, 35), (100, 0, 0, 0)],
)
def test_equation_1(decode, prefix, slowdown, saved):
    """S = min(T_P − Δ, T_D) where the prefix fits beside decode, T_D where it does not (Rollplex §3.1)."""
    assert sched.saving_s(decode, prefix, slowdown) == pytest.approx(saved)


def test_command_line_prints_the_bound():
    command = [sys.executable, "sched.py", "--decode-s", "100", "--prefix-s", "60", "--rest-s", "40"]
    out = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "serial 200.0 s, overlapped 140.0 s: saves 60.0 s, 1.43x" in out and "prefix-bounded" in out


# ---- SM partition ----------------------------------------------------------------------------------------------------

SMS = (32, 64, 0)


def measured(sms: int | None, slow: float, rate: float, steps: int = 1000, tokens: int = 60_000) -> sched.Measured:
    """Phase 1 on a GPU where decode alone takes 10 ms a step and advances 1/slow as fast beside prefixes, which run at
    `rate` tokens/s until it ends: played out in ticks of 1 ms, with no formula of choose_sms."""
    decode_left, prefix_left, decode_s, prefix_s = steps * 0.010, 0 if sms is None else tokens, 0.0, 0.0
    while decode_left > 0:
        both = prefix_left > 0
        decode_s += 0.001
        prefix_s += 0.001 if both else 0
        decode_left -= 0.001 / slow if both else 0.001
        prefix_left -= rate * 0.001 if both else 0
    return sched.Measured(sms, decode_s, steps, prefix_s, tokens if sms is None else tokens - max(0, prefix_left))


# sms -> (decode slowdown, prefix tokens/s); the first step is slow by itself and must not count
GPU = {32: (1.05, 5_000), 64: (1.2, 9_000), 0: (2.8, 16_000)}


def tour(steps: int = 1000, tokens: int = 60_000) -> list[sched.Measured]:
    first = sched.Measured(32, 99.0, steps, 99.0, tokens)
    return [first, measured(None, 1, 1, steps, tokens)] + [measured(s, *GPU[s], steps, tokens) for s in SMS]


def test_the_first_steps_measure_each_candidate_once():
    history = tour()
    assert [sched.choose_sms(history[:n], SMS, 60_000) for n in range(5)] == [32, None, 32, 64, 0]
    nothing = sched.Measured(64, 0.1, 10, 0.0, 0)  # this rollout left no time for a prefix
    assert sched.choose_sms([*history[:3], nothing], SMS, 60_000) == 64
    assert sched.choose_sms([*history, nothing], SMS, 60_000) == sched.choose_sms(history, SMS, 60_000)


@pytest.mark.parametrize("steps", [300, 1000, 4000])
@pytest.mark.parametrize("tokens", [5_000, 40_000, 70_000, 100_000, 300_000])
def test_with_the_chosen_partition_rollout_and_prefixes_take_least_time(steps, tokens):
    """Whatever the next step's prefixes, measured on other ones: against playing each candidate out."""
    took = {}
    for sms in SMS:
        played = measured(sms, *GPU[sms], steps, tokens)
        took[sms] = played.decode_s + (tokens - played.prefix_tokens) / GPU[0][1]  # the rest afterwards, on all SMs
    history = tour(steps)
    assert took[sched.choose_sms(history, SMS, tokens)] <= 1.001 * min(took.values())


def test_every_candidate_is_best_somewhere_and_a_new_measurement_counts():
    history = tour()
    chosen = [sched.choose_sms(history, SMS, tokens) for tokens in (20_000, 90_000, 400_000)]
    assert chosen == [32, 64, 0]
    slower = [*history, sched.Measured(64, 30.0, 1000, 30.0, 90_000)]
    assert sched.choose_sms(slower, SMS, 90_000) != 64


def test_equal_candidates_give_the_first():
    alone = sched.Measured(None, 10.0, 1000, 0.0, 100)
    same = [sched.Measured(sms, 10.0, 1000, 5.0, 100) for sms in SMS]
    assert sched.choose_sms([same[0], alone, *same], SMS, 100) == 32


def test_a_fixed_partition_needs_no_history(monkeypatch):
    assert sched.candidates("green-context", 48) == (48,) and sched.candidates("default", 0) == (0,)
    assert sched.candidates("green-context", 0) == (0,)  # a CPU has nothing to halve
    monkeypatch.setattr(hardware, "sm_count", lambda: 132)  # an H200's
    assert sched.candidates("green-context", 0) == (64,) and sched.candidates("auto", 0) == (32, 64, 96, 0)
    partition = sched.Partition((48,))
    assert not partition.measures and [partition.next(100), partition.next(5)] == [48, 48]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--overlap", "none", "--sm-policy", "auto"], "--sm-policy auto: expected none: nothing overlaps decode"),
        (["--sm-policy", "affinity"], "--sm-policy affinity: expected green-context: static SM partitions"),
        (["--prefix-sms", "-8"], "--prefix-sms -8: expected 0, or the SMs that prefixes get with --overlap prefix and"),
        (["--sm-policy", "default", "--prefix-sms", "64"], "--prefix-sms 64: expected 0, or the SMs that prefixes get"),
        (["--overlap", "none", "--prefix-sms", "64"], "--prefix-sms 64: expected 0, or the SMs that prefixes get"),
        (["--prefix-priority", "normal", "--sm-policy", "priority"], "--prefix-priority normal: expected low, or"),
        (["--prefix-priority", "normal", "--overlap", "none"], "--prefix-priority normal: expected low, or --overlap"),
        (["--sm-policy", "thread-cap"], "--prefix-percent 0: expected 1 to 100 with --sm-policy thread-cap"),
        (["--sm-policy", "thread-cap", "--prefix-percent", "101"], "--prefix-percent 101: expected 1 to 100"),
        (["--prefix-percent", "50"], "--prefix-percent 50: expected 1 to 100 with --sm-policy thread-cap, 0 with"),
    ],
)
def test_a_policy_that_cannot_take_effect_is_refused(arguments, message):
    import train

    with pytest.raises(ValueError, match=re.escape(message)):
        train.configure(arguments, world=2)


# ---- micro-batches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lengths, most, expected",
    [
        ([3, 3, 3], 6, [2, 1]),
        ([3, 3, 3], 9, [3]),
        ([1, 1, 5, 1], 8, [4]),
        ([1, 1, 5, 1], 7, [3, 1]),
        ([9, 1, 9], 4, [1, 1, 1]),
        ([2], 1, [1]),
        ([], 4, []),
    ],
)
def test_neighbours_are_packed_up_to_a_number_of_tokens(lengths, most, expected):
    runs = sched.packed(lengths, most)
    assert [run.stop - run.start for run in runs] == expected
    assert [i for run in runs for i in range(run.start, run.stop)] == list(range(len(lengths)))


def test_suffix_passes_have_every_response_once_and_in_order():
    """Also if a group's responses are in several passes, a pass has none of a group, and some are empty."""
    lengths = [[4, 0, 7], [2], [30, 1]]
    groups = []
    for own in lengths:
        group = sched.Group(None, [SimpleNamespace(token_ids=[1] * n, logprobs=[0.0] * n) for n in own])
        group.pack()
        group.advantages = torch.arange(len(own))
        groups.append(group)
    seen = []
    for run in sched.MicroBatch(groups).passes(8):
        tokens, counts = run.responses
        assert [len(t) for t in tokens] == [len(c) for c in counts]
        assert sum(max(1, n) for own in counts for n in own) <= 8 or sum(map(len, counts)) == 1
        parts = list(run.parts([t.float() for t in tokens]))
        assert [len(values) for values, _ in parts] == [len(own) for own in counts if own]
        for values, part in parts:
            assert torch.equal(values, part.tokens.float()) and len(part.mask) == len(part.advantages) == len(values)
            assert part.ref_logprobs is None
        seen += [(g, n) for g, own in enumerate(counts) for n in own]
    assert seen == [(g, n) for g, own in enumerate(lengths) for n in own]
