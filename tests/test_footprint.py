"""footprint.py: the numbers behind pictures of memory, from memory logs and metrics written by hand, and the errors it
promises."""

import json

import numpy as np
import pytest
from test_records import event, record, write_run

import bench
import footprint

MIB = 2**20
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
    first, second = footprint.read_devices(memory_run(tmp_path / "a"))
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
    (device,) = footprint.read_devices(tmp_path)
    assert areas(device) == pytest.approx({"engine_other": 1 + 14, "other": 2 + 2 * 2 + 2})


def test_memory_peaks_of_phases(tmp_path):
    device = footprint.read_devices(memory_run(tmp_path / "a"))[0]
    peaks = footprint.phase_peaks(device)
    assert list(peaks) == ["start-up", "1", "2", "3"]
    at_s, held = peaks["1"]
    held = {tag: n / MIB for tag, n in held.items() if n}
    assert at_s == pytest.approx(2.0) and held == {"snapshot": 10, "other": 3, "actor_boundary": 5, "rollout_kv": 20}
    assert peaks["2"][0] == pytest.approx(3.0) and sum(peaks["2"][1].values()) == 47 * MIB
    plan = {"1": {"snapshot": 10 * MIB, "rollout_kv": 16 * MIB, "reference": 8 * MIB}}
    rows = {row[0]: row[1:] for row in footprint.peak_table(device, plan)}
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
    (device,) = footprint.read_devices(run)
    assert dict(zip(device.times_s, device.phases, strict=True))[2.75] == "2"


def test_a_window_of_memory(tmp_path):
    device = footprint.read_devices(memory_run(tmp_path / "a"))[0]
    part = footprint.cut(device, 1.75, 3.25)
    assert part.times_s[0] == 1.75 and part.end_s == 3.25 and set(part.phases) == {"1", "2"}
    expected = {"snapshot": 15, "other": 3 + 1.25, "actor_boundary": 7.5, "suffix_activations": 7.5, "rollout_kv": 15}
    assert areas(part) == pytest.approx(expected | {"gradient": 0, "optimizer_state": 0})
    trace = [event("barrier", 5000.5, 5001.0, before="1: everyone reads θk"), event("optimizer", 5004.0, 5004.5)]
    trace += [event("barrier", 5000.5, 5001.25, pid=1, before="1: everyone reads θk"), event("data", 5000.0, 5000.5)]
    write_run(tmp_path / "b", [record(3, 0.0)], [*trace, event("decode", 5000.75, 5009.0, tid="engine 0")])
    assert footprint.step_window(tmp_path / "b", 3, device.origin_ns) == pytest.approx((1.25, 4.5))


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
    slope, intercept, error, half = footprint.fit_slope(steps, values)
    (expected, offset), covariance = np.polyfit(steps, values, 1, cov=True)
    assert (slope, intercept) == pytest.approx((expected, offset))
    assert error == pytest.approx(covariance[0, 0] ** 0.5)
    assert half / error == pytest.approx(2.0243942, abs=1e-6)  # Student's t, 38 degrees of freedom, 97.5 %
    assert [footprint.verdict(0.5, *rest) for rest in ((0.6, 0.01), (0.4, 0.01), (0.4, 0.2))] == [
        "flat",
        "grows",
        "flat",
    ]
    exact = footprint.fit_slope([0, 1, 2, 3], [1.0, 3.0, 5.0, 7.0])
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
    assert (flat[1], float(flat[2]), float(flat[3]), flat[-1]) == ("77.00", 0, 0, "flat") and noisy[-1] == "flat"
    bench.main(["growth", str(run), "--tolerance-mib", "3"])
    assert "grows" not in capsys.readouterr().out
    bench.main(["growth", str(run), "--warm-up", "0.5"])
    assert "30 steps, 30 to 59" in capsys.readouterr().out


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
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
    ],
)
def test_errors_say_what_to_do(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "x-s0", [record(0, 0.1)])
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
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments)
    assert str(stopped.value).startswith("bench.py: ") and message in str(stopped.value)
