"""records.py: metrics and traces written by hand are read as they were meant, torn and repeated ones too, and the
overlap of phases with engines adds up."""

import json

import pytest

import records


def write_run(path, steps, events=None):
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in steps))
    if events is not None:
        text = "[\n" + "".join(json.dumps(event) + ",\n" for event in events)  # unfinished, as a run leaves it
        (path / "trace.json").write_text(text)
    return path


def record(step, reward, step_s=4.0, **extra):
    phases = {"phase/rollout wait": 1.0 + step, "phase/actor": 2.0, "phase/other": 1.0 - step}
    return {"step": step, "reward_mean": reward, "step_s": step_s} | phases | extra


def event(name, start_s, end_s, pid=0, tid="train", step=3, **args):
    span = dict(ts=start_s * 1e6, dur=(end_s - start_s) * 1e6)
    return dict(name=name, ph="X", pid=pid, tid=tid, args={"step": step} | args) | span


EVENTS = [
    event("barrier", 10.0, 10.5, before="1: everyone reads θk"),
    event("prefill", 10.5, 11.0, tid="engine 0"),
    event("decode", 11.0, 13.0, tid="engine 0"),
    event("decode", 13.5, 14.0, tid="engine 0"),
    event("decode", 13.0, 13.25, pid=2, tid="engine 1"),
    event("reference prefix", 10.5, 12.0),
    event("actor prefix", 12.0, 14.0),
    event("actor", 15.0, 19.0),
    event("actor suffix", 15.0, 16.0),
    event("backward", 16.0, 18.0),
    event("actor prefix", 11.5, 13.75, pid=1),  # rank 1 started no engine
    event("actor prefix", 0.0, 1.0, step=2),
    dict(name="process_name", ph="M", pid=0, args={"name": "rank 0"}),
]


def test_resumed_and_torn_metrics(tmp_path):
    run = write_run(tmp_path / "a", [record(0, 0.1), record(1, 0.2), record(1, 0.5)])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')  # the process died, or is still writing
    assert [r["reward_mean"] for r in records.read_metrics(run)] == [0.1, 0.5]
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(ValueError, match="metrics.jsonl line 4 is not JSON"):
        records.read_metrics(run)


def test_overlap_by_hand(tmp_path):
    run = write_run(tmp_path / "a", [record(0, 0.0)], EVENTS)
    step, events = records.read_trace(run)
    assert step == 3 and len(events) == 11
    assert records.read_trace(run, 2)[1][0]["ts"] == 0.0
    table = records.overlap_table(events)
    assert table[0, "reference prefix"] == pytest.approx((1.5, 1.5, 1.0))
    assert table[0, "actor prefix"] == pytest.approx((2.0, 1.5, 1.5))
    assert table[1, "actor prefix"] == pytest.approx((2.25, 2.0, 2.0))
    assert table[0, "actor"] == (4.0, 0.0, 0.0)


def test_overlapping_engine_intervals_count_once():
    events = [event("decode", 0.0, 2.0, tid="engine 0"), event("decode", 1.0, 3.0, tid="engine 1")]
    table = records.overlap_table([*events, event("actor prefix", 0.5, 4.0)])
    assert table[0, "actor prefix"] == pytest.approx((3.5, 2.5, 2.5))


@pytest.mark.parametrize("form", ["array", "object"])
def test_finished_traces_are_read_too(tmp_path, form):
    run = write_run(tmp_path / "a", [record(0, 0.0)])
    (run / "trace.json").write_text(json.dumps(EVENTS if form == "array" else {"traceEvents": EVENTS}))
    assert len(records.read_trace(run)[1]) == 11
