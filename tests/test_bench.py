"""bench.py: the numbers behind each picture, from metrics, traces and memory logs written by hand, the errors it
promises, and one small comparison of the two schedules with real engines."""

import json
import statistics

import numpy as np
import pytest
from conftest import ROOT

import bench
import compare

MIB = 2**20


def write_run(path, records, events=None):
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
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


def test_reward_curve_is_mean_and_range_over_seeds(tmp_path):
    runs = [
        write_run(tmp_path / "a-s0", [record(0, 0.1), record(1, 0.2), record(2, 0.6)]),
        write_run(tmp_path / "a-s1", [record(0, 0.3), record(1, 0.6), record(2, 0.0), record(3, 9.0)]),
    ]
    (seeds,) = bench.group_runs(runs).values()
    steps, mean, low, high = bench.reward_curve(seeds)
    assert steps == [0, 1, 2]  # step 3 has one seed only
    assert mean == pytest.approx([0.2, 0.4, 0.3])
    assert low == pytest.approx([0.1, 0.2, 0.0])
    assert high == pytest.approx([0.3, 0.6, 0.6])
    _, smooth, low, _ = bench.reward_curve(seeds, smooth=2)
    assert smooth == pytest.approx([0.2, 0.3, 0.35])
    assert low == pytest.approx([0.1, 0.15, 0.3])  # of the smoothed seeds


def test_names_that_differ_in_the_seed_are_one_group(tmp_path):
    names = ["tiny-s0", "tiny-s1", "tiny_seed2", "tiny-seed=3", "tiny-prefix", "tiny-none", "s7", "a1"]
    groups = bench.group_runs(write_run(tmp_path / name, [record(0, 0.0)]) for name in names)
    counts = {name: len(seeds) for name, seeds in groups.items()}
    assert counts == {"tiny": 4, "tiny-prefix": 1, "tiny-none": 1, "s7": 1, "a1": 1}


def test_phases_add_up_to_the_step(tmp_path):
    runs = [write_run(tmp_path / f"a-s{seed}", [record(0, 0.1, 4.0 + seed), record(1, 0.1, 5.0)]) for seed in (0, 1)]
    (seeds,) = bench.group_runs(runs).values()
    steps, phases = bench.phase_seconds(seeds)
    assert steps == [0, 1]
    assert list(phases) == ["rollout wait", "actor", "other"]
    assert phases["rollout wait"] == [1.0, 2.0] and phases["actor"] == [2.0, 2.0]
    assert phases["other"] == [1.5, 1.0]  # from step_s, whatever the file says


def test_small_phases_fold_into_other():
    phases = {"actor": [5.0, 4.0], "reward": [0.01, 0.02], "other": [0.5, 0.25]}
    folded = bench.fold_small(phases)
    assert folded == {"actor": [5.0, 4.0], "other": [0.51, 0.27]}


def test_summary_row(tmp_path):
    records = [
        record(i, i / 10, step_s=100.0 if i == 0 else 4.0 + i, chance=0.25, tok_s_generate=50, elapsed_s=60.0 * i)
        for i in range(20)
    ]
    records[7]["logprob_diff_max"] = 3e-5
    row = bench.summary([bench.read_metrics(write_run(tmp_path / "a", records))])
    assert row["steps"] == "20" and row["seeds"] == "1"
    assert (row["reward first 10%"], row["last 10%"]) == ("0.050", "1.850")
    assert (row["chance"], row["step s"], row["gen tok/s"], row["minutes"]) == ("0.250", "14.00", "50", "19.0")
    assert (row["max"], row["train tok/s"]) == ("3.0e-05", "n/a")


def test_resumed_and_torn_metrics(tmp_path):
    run = write_run(tmp_path / "a", [record(0, 0.1), record(1, 0.2), record(1, 0.5)])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')  # the process died, or is still writing
    assert [r["reward_mean"] for r in bench.read_metrics(run)] == [0.1, 0.5]
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(ValueError, match="metrics.jsonl line 4 is not JSON"):
        bench.read_metrics(run)


def test_curves_command(tmp_path, capsys):
    runs = [write_run(tmp_path / f"a-s{s}", [record(i, 0.1 * i, chance=0.25) for i in range(5)]) for s in range(3)]
    runs.append(write_run(tmp_path / "short", [record(0, 0.5)]))
    bench.main(["curves", *map(str, runs), "--smooth", "2", "--out", str(tmp_path / "plots")])
    for name in ("reward.png", "step_time.png"):
        assert (tmp_path / "plots" / name).read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    row = next(line.split() for line in printed.splitlines() if line.startswith("a "))
    assert row[1:6] == ["3", "5", "0.000", "0.400", "0.250"]
    assert "rollout wait 3.50  actor 2.00  other -1.50" in printed  # means over steps 1 to 4


def test_trace_numbers(tmp_path):
    run = write_run(tmp_path / "a", [record(0, 0.0)], EVENTS)
    step, events = bench.read_trace(run)
    assert step == 3 and len(events) == 11
    assert bench.read_trace(run, 2)[1][0]["ts"] == 0.0
    lanes = bench.lanes(events)
    assert list(lanes) == [(0, "engine 0"), (0, "train"), (1, "train"), (2, "engine 1")]
    names = [[e["name"] for e in row] for row in lanes[0, "train"]]
    assert names == [["barrier", "reference prefix", "actor prefix", "actor"], ["actor suffix", "backward"]]
    table = bench.overlap_table(events)
    assert table[0, "reference prefix"] == pytest.approx((1.5, 1.5, 1.0))
    assert table[0, "actor prefix"] == pytest.approx((2.0, 1.5, 1.5))
    assert table[1, "actor prefix"] == pytest.approx((2.25, 2.0, 2.0))
    assert table[0, "actor"] == (4.0, 0.0, 0.0)


def test_overlapping_engine_intervals_count_once():
    events = [event("decode", 0.0, 2.0, tid="engine 0"), event("decode", 1.0, 3.0, tid="engine 1")]
    table = bench.overlap_table([*events, event("actor prefix", 0.5, 4.0)])
    assert table[0, "actor prefix"] == pytest.approx((3.5, 2.5, 2.5))


@pytest.mark.parametrize("form", ["array", "object"])
def test_finished_traces_are_read_too(tmp_path, form):
    run = write_run(tmp_path / "a", [record(0, 0.0)])
    (run / "trace.json").write_text(json.dumps(EVENTS if form == "array" else {"traceEvents": EVENTS}))
    assert len(bench.read_trace(run)[1]) == 11


def test_trace_command(tmp_path, capsys):
    run = write_run(tmp_path / "a", [record(0, 0.0)], EVENTS)
    bench.main(["trace", str(run)])
    assert (run / "trace-step3.png").read_bytes().startswith(b"\x89PNG")
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("rank 0 reference prefix"))
    assert row.split()[4:] == ["1.500", "1.500", "(100%)", "1.000", "(", "67%)"]


# ---- memory ----------------------------------------------------------------------------------------------------------

TRAINER = [  # seconds that each sample holds, phase, MiB by object
    (1.0, "start-up", {"snapshot": 10}),
    (0.5, "1", {"snapshot": 10, "other": 1}),
    (1.5, "1", {"snapshot": 10, "other": 1, "actor_boundary": 5, "rollout_kv": 50}),  # the engine knows better
    (1.0, "2", {"snapshot": 10, "actor_boundary": 5, "suffix_activations": 30}),
    (0.5, "3", {"snapshot": 10, "gradient": 4, "optimizer_state": 12}),
]
ENGINE = [  # begins 1.25 s later; its view of the snapshot is the trainer's memory, its "other" its own
    (0.75, "engine", {"snapshot": 10, "rollout_kv": 0, "other": 2}),
    (0.75, "engine", {"snapshot": 10, "rollout_kv": 20, "other": 2}),
    (1.75, "engine", {"snapshot": 10, "rollout_kv": 0, "other": 2}),
]
AREAS = {"snapshot": 45, "other": 2 + 6.5, "actor_boundary": 12.5, "suffix_activations": 30, "gradient": 2}
AREAS |= {"optimizer_state": 6, "rollout_kv": 15}  # MiB s, from the two tables above


def write_log(run, name, segments, start_s=0.0, **header):
    """A memory log of samples that hold for given times, and its end."""
    run.mkdir(exist_ok=True, parents=True)
    lines, t_s = [{"capacity_bytes": 64 * MIB, "sample_ms": 25.0} | header], 5000 + start_s
    for seconds, phase, held in segments:
        held = {tag: n * MIB for tag, n in held.items()}
        lines.append({"t_ns": int(t_s * 1e9), "phase": phase, "bytes": held, "host_bytes": 7, "mark": ""})
        t_s += seconds
    lines.append(lines[-1] | {"t_ns": int(t_s * 1e9), "mark": "end"})
    (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run / name


def memory_run(run):
    write_log(run, "memory-rank0.jsonl", TRAINER, process="trainer", gpu=0)
    write_log(run, "memory-engine0-0.jsonl", ENGINE, 1.25, process="engine", engine=0, gpu=0)
    write_log(run, "memory-rank1.jsonl", TRAINER[:2], process="trainer", gpu=1)
    return run


def areas(device):
    """MiB s of each object."""
    widths = np.diff([*device.times_s, device.end_s])
    return {tag: float(values @ widths) / MIB for tag, values in device.bytes.items()}


def test_memory_of_both_processes_adds_up_and_is_counted_once(tmp_path):
    first, second = bench.read_devices(memory_run(tmp_path / "a"))
    assert (first.gpu, second.gpu) == (0, 1) and first.capacity_bytes == 64 * MIB
    assert first.end_s == second.end_s == pytest.approx(4.5)
    assert areas(first) == pytest.approx(AREAS)
    assert first.total @ np.diff([*first.times_s, first.end_s]) / MIB == pytest.approx(sum(AREAS.values()))
    assert second.bytes.keys() == {"snapshot", "other"}


def test_what_an_engine_allocates_is_not_also_other(tmp_path):
    """A trainer sees it as in use on the GPU, and cannot tell whose it is."""
    trainer = [(1.0, "1", {"other": 3}), (2.0, "1", {"other": 9}), (1.0, "2", {"other": 2})]
    write_log(tmp_path, "memory-rank0.jsonl", trainer, process="trainer", gpu=0)
    engine = [(1.0, "engine", {"engine_other": 1}), (2.0, "engine", {"engine_other": 7}), (1.0, "engine", {})]
    write_log(tmp_path, "memory-engine0-0.jsonl", engine, process="engine", engine=0, gpu=0)
    (device,) = bench.read_devices(tmp_path)
    assert areas(device) == pytest.approx({"engine_other": 1 + 14, "other": 2 + 2 * 2 + 2})


def test_memory_peaks_of_phases(tmp_path):
    device = bench.read_devices(memory_run(tmp_path / "a"))[0]
    peaks = bench.phase_peaks(device)
    assert list(peaks) == ["start-up", "1", "2", "3"]
    at_s, held = peaks["1"]
    held = {tag: n / MIB for tag, n in held.items() if n}
    assert at_s == pytest.approx(2.0) and held == {"snapshot": 10, "other": 3, "actor_boundary": 5, "rollout_kv": 20}
    assert peaks["2"][0] == pytest.approx(3.0) and sum(peaks["2"][1].values()) == 47 * MIB
    plan = {"1": {"snapshot": 10 * MIB, "rollout_kv": 16 * MIB, "reference": 8 * MIB}}
    rows = {row[0]: row[1:] for row in bench.peak_table(device, plan)}
    assert rows["GPU 0, MiB"] == ["start-up", "phase 1", "plan", "more", "phase 2", "phase 3"]
    assert rows["rollout_kv"] == ["0", "20.00", "16.00", "+25.0%", "0", "0"]
    assert rows["reference"] == ["0", "0", "8.00", "-100.0%", "0", "0"] and rows["other"][1:4] == ["3.00", "0", "n/a"]
    assert rows["total"] == ["10.00", "38.00", "34.00", "+11.8%", "47.00", "28.00"]
    assert rows["at, s"][1] == "2.00" and rows["capacity"][0] == "64.00"


def test_a_barriers_sample_opens_its_phase(tmp_path):
    run = tmp_path / "a"
    path = write_log(run, "memory-rank0.jsonl", TRAINER, process="trainer", gpu=0)
    lines = path.read_text().splitlines()
    marked = json.loads(lines[3]) | {"t_ns": int(5002.75e9), "mark": "barrier 2: rollout memory is gone"}
    path.write_text("\n".join([*lines[:4], json.dumps(marked), *lines[4:]]))  # and the last line without its end
    (device,) = bench.read_devices(run)
    assert dict(zip(device.times_s, device.phases, strict=True))[2.75] == "2"


def test_a_window_of_memory(tmp_path):
    device = bench.read_devices(memory_run(tmp_path / "a"))[0]
    part = bench.cut(device, 1.75, 3.25)
    assert part.times_s[0] == 1.75 and part.end_s == 3.25 and set(part.phases) == {"1", "2"}
    expected = {"snapshot": 15, "other": 3 + 1.25, "actor_boundary": 7.5, "suffix_activations": 7.5, "rollout_kv": 15}
    assert areas(part) == pytest.approx(expected | {"gradient": 0, "optimizer_state": 0})
    trace = [event("barrier", 5000.5, 5001.0, before="1: everyone reads θk"), event("optimizer", 5004.0, 5004.5)]
    trace += [event("barrier", 5000.5, 5001.25, pid=1, before="1: everyone reads θk"), event("data", 5000.0, 5000.5)]
    write_run(tmp_path / "b", [record(3, 0.0)], [*trace, event("decode", 5000.75, 5009.0, tid="engine 0")])
    assert bench.step_window(tmp_path / "b", 3, device.origin_ns) == pytest.approx((1.25, 4.5))


def test_memory_command(tmp_path, capsys):
    run = memory_run(write_run(tmp_path / "a", [record(0, 0.0, **{"memory/phase2_peak_bytes": 48 * MIB})]))
    (run / "plan.json").write_text(json.dumps({"phase": {"2": {"snapshot": 10 * MIB, "suffix_activations": 40 * MIB}}}))
    bench.main(["memory", str(run)])
    assert (run / "memory.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    row = next(line.split() for line in printed.splitlines() if line.startswith("suffix_activations"))
    assert row[1:] == ["0", "0", "30.00", "40.00", "-25.0%", "0"]
    assert "GPU 1, MiB" in printed and "highest of all GPUs: phase 2 48.00 MiB" in printed
    died = memory_run(tmp_path / "b-no-offload")  # in its first step: no metrics yet
    bench.main(["memory", str(run), str(died), "--window", "1", "3.5", "--out", str(tmp_path / "both.png")])
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    assert "GPU 1" not in capsys.readouterr().out  # of several runs the fullest GPU


# ---- growth ----------------------------------------------------------------------------------------------------------


def test_slope_and_its_error():
    rng, steps = np.random.default_rng(0), list(range(5, 45))
    values = [100 + 0.25 * step + noise for step, noise in zip(steps, rng.normal(0, 2, 40), strict=True)]
    slope, intercept, error, half = bench.fit_slope(steps, values)
    (expected, offset), covariance = np.polyfit(steps, values, 1, cov=True)
    assert (slope, intercept) == pytest.approx((expected, offset))
    assert error == pytest.approx(covariance[0, 0] ** 0.5)
    assert half / error == pytest.approx(2.0243942, abs=1e-6)  # Student's t, 38 degrees of freedom, 97.5 %
    assert [bench.verdict(0.5, *rest) for rest in ((0.6, 0.01), (0.4, 0.01), (0.4, 0.2))] == ["flat", "grows", "flat"]
    exact = bench.fit_slope([0, 1, 2, 3], [1.0, 3.0, 5.0, 7.0])
    assert exact[:2] == pytest.approx((2.0, 1.0)) and exact[2] == pytest.approx(0, abs=1e-12)


def test_growth_command(tmp_path, capsys):
    rng = np.random.default_rng(1)
    records = []
    for step in range(60):
        host = 1000 + (500 if step < 6 else 2.0 * step) + rng.normal(0, 3)  # the first tenth warms up
        sizes = {"memory/host_bytes": int(host * MIB), "memory/phase1_peak_bytes": 77 * MIB}
        sizes["memory/phase2_peak_bytes"] = int((50 + rng.normal(0, 1)) * MIB)
        records.append(record(step, 0.0, **sizes))
    run = write_run(tmp_path / "a", records)
    bench.main(["growth", str(run)])
    assert (run / "growth.png").read_bytes().startswith(b"\x89PNG")
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line}
    assert rows["54"][2:] == ["6", "to", "59"]
    host, flat, noisy = (rows[f"{name}_bytes"] for name in ("host", "phase1_peak", "phase2_peak"))
    assert host[-1] == "grows" and float(host[2]) == pytest.approx(2.0, abs=0.1) and float(host[3]) < 0.1
    assert (flat[1], float(flat[2]), flat[-1]) == ("77.00", 0.0, "flat") and noisy[-1] == "flat"
    bench.main(["growth", str(run), "--tolerance-mib", "3"])
    assert "grows" not in capsys.readouterr().out
    bench.main(["growth", str(run), "--warm-up", "0.5"])
    assert "30 steps, 30 to 59" in capsys.readouterr().out


# ---- compare ---------------------------------------------------------------------------------------------------------


def test_lengths_are_lognormal_cut_and_the_same_each_time():
    drawn = compare.draw_lengths(100, 400, 8, 0.5, 300, seed=3)
    flat = [length for row in drawn for length in row]
    assert (
        len(drawn) == 400
        and {len(row) for row in drawn} == {8}
        and drawn == compare.draw_lengths(100, 400, 8, 0.5, 300, 3)
    )
    assert drawn != compare.draw_lengths(100, 400, 8, 0.5, 300, 4) and max(flat) == 300 and min(flat) >= 1
    assert statistics.median(flat) == pytest.approx(100, rel=0.05)
    assert statistics.pstdev(np.log([x for x in flat if x < 300])) == pytest.approx(0.5, rel=0.1)
    assert set(compare.draw_lengths(7, 2, 3, 0.0, 99, 0)) == {(7, 7, 7)}


@pytest.mark.parametrize("wanted", [16, 19, 99, 144, 369, 1399, 5799])
def test_the_clip_is_the_largest_that_fits(wanted):
    frames, side = compare.clip_size(wanted, 3136, 602112)
    tokens = frames // 2 * (side // 28) ** 2
    assert frames % 2 == side % 28 == 0 and 3136 <= side * side <= 602112 and tokens <= wanted
    better = [(f, k) for f in range(2, 34, 2) for k in range(2, 28) if tokens < f // 2 * k * k <= wanted]
    assert not better
    same = [f for f in range(2, 34, 2) for k in range(2, 28) if f // 2 * k * k == tokens]
    assert abs(frames - 16) == min(abs(f - 16) for f in same)


def step_of(overlap, step_s, step, events, warm_up=False, **extra):
    """A step of a comparison: its record, and its events with their step."""
    fields = dict(
        workload="470/125", overlap=overlap, side=overlap, warm_up=warm_up, prefixes_alone_s=3.0, optimizer_floor_s=0.5
    )
    fields |= dict(logprob_diff_mean=1e-3, logprob_diff_max=2e-3, prompt_tokens_mean=464.0, response_tokens_mean=142.0)
    return record(step, 0.0, step_s, mfu=None, **fields | extra), [e | {"args": {"step": step}} for e in events]


NONE = [
    event("preprocess", 0.0, 0.5, tid="engine 0"),
    event("decode", 0.5, 3.5, tid="engine 0"),
    event("decode", 3.5, 4.0, tid="engine 0"),
    event("decode", 0.0, 2.0, pid=1, tid="engine 1"),
    event("KV release", 4.0, 4.25),
    event("actor prefix", 6.0, 7.0),  # inside the actor's span: enqueued there, finished later
    event("optimizer", 10.0, 11.0),
    event("optimizer", 10.0, 11.5, pid=1),
    event("publish", 11.5, 11.75),
]
PREFIX = [
    event("KV restore", 0.0, 0.125),
    event("decode", 0.5, 4.9, tid="engine 0"),
    event("reference prefix", 0.5, 2.0),
    event("actor prefix", 2.5, 5.0),
    event("rollout wait", 5.0, 5.1),
    event("KV release", 5.0, 5.25),
    event("actor prefix", 6.0, 7.0),  # one that could not be kept beside decode
    event("optimizer", 8.0, 9.0),
]


def compared(middle_s=8.0):
    steps = [step_of("none", 50.0, 0, NONE, warm_up=True), step_of("prefix", 60.0, 1, PREFIX, warm_up=True)]
    for i, (serial_s, overlapped_s) in enumerate([(10.0, 7.0), (12.0, middle_s), (14.0, 10.0)]):
        steps += [step_of("none", serial_s, 2 + 2 * i, NONE), step_of("prefix", overlapped_s, 3 + 2 * i, PREFIX)]
    return compare.compare_results([r for r, _ in steps], {r["step"]: events for r, events in steps})


def test_figures_of_a_step():
    serial = compare.step_figures(*step_of("none", 12.0, 0, NONE))
    assert (serial["rollout_s"], serial["decode_s"], serial["prefixes_alone_s"]) == pytest.approx((4.0, 3.5, 3.0))
    assert serial["prefixes_s"] is None and serial["prefixes_beside"] is None and serial["mfu"] is None
    assert (serial["optimizer_s"], serial["optimizer_over_floor"], serial["publish_s"]) == pytest.approx(
        (1.5, 3.0, 0.25)
    )
    overlapped = compare.step_figures(*step_of("prefix", 8.0, 0, PREFIX, optimizer_floor_s=None))
    assert (overlapped["prefixes_s"], overlapped["kv_s"]) == pytest.approx((4.5, 0.375))
    assert overlapped["prefixes_beside"] == pytest.approx(3.9 / 4.0)
    assert overlapped["optimizer_over_floor"] is None and overlapped["publish_s"] is None


def test_speed_up_and_its_bound():
    """Equation 1 by hand: T_D 4, T_P 3, Δ 0.4 out of a serial step of 12."""
    (result,) = compared()
    verdict = result["verdicts"]["prefix"]
    assert verdict["speed_up"] == pytest.approx(12 / 8)  # of medians, without the warm-up
    assert verdict["speed_up_of_pairs"] == pytest.approx([10 / 7, 1.5, 1.4])
    assert verdict["most"] == pytest.approx(12 / (12 - 3)) and verdict["equation_1"] == pytest.approx(12 / (12 - 2.6))
    assert verdict["rollout_slowdown"] == pytest.approx(0.1)
    assert verdict["decode_slowdown"] == pytest.approx(4.4 / 3.5 - 1)
    head, row = compare.headline([result])
    row = dict(zip(head, row, strict=True))
    assert (row["schedule"], row["none / it"]) == ("prefix", "1.500 (1.400 to 1.500)")
    assert (row["Equation 1"], row["if Δ = 0"]) == ("1.277", "1.333")
    rows = {name: both for name, *both in compare.details(result)}
    assert rows["470/125"] == ["none", "prefix"] and rows["step, s"] == [
        "12.000 (10.000 to 14.000)",
        "8.000 (7.000 to 10.000)",
    ]
    assert rows["MFU of prefixes and training, %"] == ["n/a", "n/a"]
    assert rows["rank 0, actor, s"][0] == "2.000 (2.000 to 2.000)"
    assert compare._markdown([["a", "b"], ["c", "d"]]) == "| a | b |\n|---|---|\n| c | d |"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workloads", "470"], "--workloads 470: expected prompt tokens / median response tokens, like 470/125"),
        (["--workloads", "470/0"], "--workloads 470/0: expected prompt tokens"),
        (["--pairs", "0"], "--pairs 0: expected 1 or more"),
        (["--sigma", "-1"], "--sigma -1.0: expected 0 or more"),
        (["--overlap", "none"], "--overlap: compare decides this itself"),
        (["--rollout.max-new-tokens=4"], "--rollout.max-new-tokens: compare decides this itself"),
        (["--rollout.max-num-batched-tokens", "99"], "--rollout.max-num-batched-tokens 99: a clip of 120 tokens"),
        (["--algo.mask-truncated"], "--algo.mask-truncated: every response"),
        (["--out", "taken"], "--out taken: has a run already"),
        (
            ["--workloads", "4000/900"],
            "--data.max-prompt-tokens 4000: expected together with",
        ),  # tiny has 4096 positions
        (["--prompts", "0"], "--prompts 0: expected 1 or more"),  # train.py's own checks
    ],
)
def test_comparison_errors_come_before_anything_starts(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "taken", [record(0, 0.0)])
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    standard = [] if "--workloads" in arguments else ["--workloads", "120/6"]
    with pytest.raises(SystemExit) as stopped:
        bench.main(["compare", *standard, *arguments])
    assert str(stopped.value).startswith("bench.py: ") and message in str(stopped.value)


def test_a_prompt_shorter_than_its_text_is_refused_once(tmp_path, torchrun):
    arguments = ["--workloads", "100/6", "--prompts", "4", "--out", str(tmp_path / "runs" / "c")]
    done = torchrun(ROOT / "bench.py", "compare", *arguments, check=False)
    said = "--workloads 100/6: 101 of its prompt's tokens are text, and -1 visual tokens are too few"
    assert done.returncode != 0 and done.stdout.count(said) == 1, done.stdout[-3000:]


def test_comparison_with_real_engines(tmp_path, torchrun):
    out = tmp_path / "runs" / "c"
    arguments = ["--workloads", "120/30", "150/20", "--pairs", "1", "--cut", "40", "--prompts", "4", "--rollout.n", "2"]
    arguments += ["--sms", "0", "8"]
    done = torchrun(ROOT / "bench.py", "compare", *arguments, "--out", str(out))
    written = json.loads((out / "compare.json").read_text())
    records = bench.read_metrics(out)
    sides = ["none", "prefix", "prefix, 8 SMs"]
    assert [r["side"] for r in records] == 4 * sides and [r["warm_up"] for r in records[:6]] == 3 * [True] + 3 * [False]
    assert [r["overlap"] for r in records[:3]] == ["none", "prefix", "prefix"]
    for workload, result, six in zip(written["workloads"], written["results"], (records[:6], records[6:]), strict=True):
        none, *others = (result["sides"][side] for side in sides)
        lengths = [length for row in workload["lengths"] for length in row]
        assert len(lengths) == 8 and max(lengths) <= 40
        assert {r["response_tokens_mean"] for r in six} == {statistics.fmean(lengths)}  # exact lengths on all sides
        assert {r["truncated_fraction"] for r in six} == {1.0} and {r["grad_norm"] > 0 for r in six} == {True}
        assert workload["prompt_tokens"] - 25 < result["prompt_tokens_mean"] <= workload["prompt_tokens"]
        assert max(value for figures in (none, *others) for value in figures["logprob_diff_max"]) < 1e-4
        measured = ("step_s", "rollout_s", "decode_s", "prefixes_alone_s", "optimizer_s", "publish_s", "kv_s")
        assert all(figures[key][0] > 0 for figures in (none, *others) for key in measured)
        assert all(figures[key][0] > 0 for figures in others for key in ("prefixes_s", "prefixes_beside"))
        assert none["exchange_s"][0] > 0 and 0.01 < none["exchange_share"][0] < 10  # 2 ranks, q = 2
    assert "| 120/30 | " in (out / "compare.md").read_text()
    for line in ("120/30 none, warm-up: step 1/12", "150/20 prefix, 8 SMs: step 12/12", "none / it"):
        assert line in done.stdout
    bench.main(["memory", str(out), "--step", "7"])
    assert (out / "memory.png").stat().st_size > 10_000


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["curves", "nowhere"], "nowhere: no such run directory"),
        (["curves", "."], "has no metrics.jsonl"),
        (["curves", "empty"], "empty/metrics.jsonl has no step yet"),
        (["curves", "foreign"], "foreign/metrics.jsonl line 1 lacks reward_mean, step_s"),
        (["curves", "x-s0", "x-s1"], "no step in common"),
        (["curves", "x-s0", "--smooth", "0"], "--smooth 0: it must be 1 or more"),
        (["trace", "x-s0"], "x-s0 has no trace.json"),
        (["trace", "empty"], "empty/trace.json has no step yet"),
        (["trace", "traced", "--step", "9"], "traced/trace.json has no step 9: --step takes 2 to 3"),
        (["memory", "nowhere"], "nowhere: no such run directory"),
        (["memory"], "no run given"),
        (["memory", "x-s0"], "x-s0 has no memory-rank*.jsonl: was it run with --memory.sample-ms 0"),
        (["memory", "begun"], "begun/memory-rank0.jsonl has no sample yet"),
        (["memory", "bare"], "bare/memory-rank0.jsonl line 1 lacks capacity_bytes, gpu, process"),
        (["memory", "torn"], "torn/memory-rank0.jsonl line 3 is not JSON"),
        (["memory", "odd"], "odd/memory-rank0.jsonl line 2 lacks bytes"),
        (["memory", "alone"], "GPU 4 has an engine's memory log and no trainer's"),
        (["memory", "good", "--gpu", "5"], "--gpu 5: good has no memory log of this GPU"),
        (["memory", "good", "--window", "7", "9"], "GPU 0 has no sample from 7 to 9 s: the log has 0.00 to 4.50 s"),
        (["memory", "good", "--step", "1"], "good has no trace.json"),
        (["memory", "good", "good", "--step", "1"], "--step 1: give one run, and no --window"),
        (["memory", "badplan"], "badplan/plan.json is no plan"),
        (["growth", "x-s0"], "the run's metrics have no memory/host_bytes"),
        (["growth", "x-s0", "--warm-up", "1"], "--warm-up 1.0: expected a share from 0 to below 1"),
        (["growth", "short"], "3 steps are too few"),
        (["growth", "compared"], "a run of bench.py compare has no trend"),
        (["compare"], "torchrun --nproc-per-node 2 bench.py compare"),
    ],
)
def test_errors_say_what_to_do(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "empty", [], [])
    write_run(tmp_path / "foreign", [{"step": 0, "loss": 1.0}])
    write_run(tmp_path / "x-s0", [record(0, 0.1)])
    write_run(tmp_path / "x-s1", [record(1, 0.1)])
    write_run(tmp_path / "traced", [record(0, 0.1)], EVENTS)
    write_run(tmp_path / "short", [record(i, 0.1, **{"memory/host_bytes": 1}) for i in range(3)])
    write_run(tmp_path / "compared", [record(0, 0.1, workload="470/125")])
    memory_run(tmp_path / "good")
    (memory_run(tmp_path / "badplan") / "plan.json").write_text('{"phases": {}}')
    header = json.dumps({"process": "trainer", "gpu": 0, "capacity_bytes": None}) + "\n"
    texts = {"begun": header + '{"t_ns": 1, "ph', "bare": "{}\n", "torn": header + "{}\n{oops\n", "odd": ""}
    texts["odd"] = header + '{"t_ns": 1, "phase": "1"}\n'
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "memory-rank0.jsonl").write_text(text)
    write_log(memory_run(tmp_path / "alone"), "memory-engine4-0.jsonl", ENGINE, process="engine", engine=4, gpu=4)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments)
    assert str(stopped.value).startswith("bench.py: ") and message in str(stopped.value)
