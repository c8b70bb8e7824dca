"""beside.py: its arithmetic by hand, the errors it promises, and a small measurement with a real engine."""

import subprocess
import sys

import pytest
from conftest import ROOT

import beside
from rollout import Interval, Stats


def test_together_is_work_per_second_over_taking_turns():
    """Both in 10 s: 500 decode steps of 10 ms alone and 4 prefixes of 2 s alone are 13 s in turn."""
    both = beside.Pace(step_ms=20.0, prefix_s=2.5, mhz=None, watts=None)
    assert beside.together(10.0, 2.0, both) == pytest.approx((500 * 0.010 + 4 * 2.0) / 10)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "7b"}, "--model 7b: expected one of tiny, "),
        ({"prompts": 0}, "--prompts 0: expected 1 or more"),
        ({"length": 1}, "--length 1: expected 2 or more"),
        ({"frames": 3}, "--frames 3: expected an even number"),
        ({"side": 100}, "--side 100: expected a multiple of 28"),
        ({"side": 28}, "--side 28: expected a multiple of 28, 56 to 756"),
        ({"side": 784}, "--side 784: expected a multiple of 28, 56 to 756"),
        ({"sms": ()}, r"--sms \(\): expected one number or more"),
    ],
)
def test_what_cannot_be_measured_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        beside.Beside(**given).validate()


def test_only_prefixes_within_decode_count():
    timeline = [Interval("prefill", 0, 10, 1, 9), Interval("decode", 10, 20, 3, 3), Interval("decode", 20, 40, 5, 5)]
    spans = [(5, 12), (10, 20), (25, 40), (39, 45), (41, 50)]  # the first met a prefill, the last two decode's end
    assert beside.within_decode(spans, Stats(timeline)) == [(10, 20), (25, 40)]
    assert Stats(timeline).busy("decode") == pytest.approx((30e-9, 8))


def test_prompts_share_their_clip_and_nothing_else():
    from configs import load_config

    samples = beside._samples(beside.Beside(frames=4, side=56), load_config("tiny"), 300)
    assert len({tuple(sample.prompt_ids[:3]) for sample in samples}) == len(samples) == 300
    assert all(len(s.input_ids) == len(s.prompt_ids) - 1 + s.visual_tokens and s.visual_tokens == 8 for s in samples)


def test_decode_and_prefixes_alone_and_together():
    command = [sys.executable, "bench.py", "beside", "--prompts", "4", "--n", "4", "--length", "200"]
    command += ["--frames", "2", "--side", "56", "--together", "2", "--sms", "8"]
    out = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=200).stdout
    rows = {line[:30].strip(): line[30:].split() for line in out.splitlines()[-4:]}
    assert out.splitlines()[-6].startswith("16 responses of 200 tokens to prompts of 29; a prefix is 2 of these")
    alone = [float(value) for value in rows["prefixes on 8 SMs"][:2]]  # seconds, and of those on all SMs
    both = [float(value) for value in rows["both, prefixes on 8 SMs"][:5]]
    step_ms, whole_s = float(rows["decode"][0]), alone[0] / alone[1]
    assert both[0] > 0.3 * step_ms > 0 and both[2] > 0.3 * whole_s > 0
    assert both[4] == pytest.approx(step_ms / both[0] + whole_s / both[2], rel=0.3)  # of rounded figures
