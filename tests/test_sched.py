"""sched.py: the schedules compute one and the same update with real engines; the timeline adds up; the bound is
Equation 1."""

import json
import sched
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT

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
