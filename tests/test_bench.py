"""bench.py: the numbers behind curves and timelines, from metrics and traces written by hand, and the errors it
promises."""

import pytest
from test_records import EVENTS, record, write_run

import bench


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


def test_lanes_have_no_overlaps():
    lanes = bench.lanes(sorted(EVENTS[:-2], key=lambda e: (e["ts"], -e["dur"])))
    assert list(lanes) == [(0, "engine 0"), (0, "train"), (1, "train"), (2, "engine 1")]
    names = [[e["name"] for e in row] for row in lanes[0, "train"]]
    assert names == [["barrier", "reference prefix", "actor prefix", "actor"], ["actor suffix", "backward"]]


def test_trace_command(tmp_path, capsys):
    run = write_run(tmp_path / "a", [record(0, 0.0)], EVENTS)
    bench.main(["trace", str(run)])
    assert (run / "trace-step3.png").read_bytes().startswith(b"\x89PNG")
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("rank 0 reference prefix"))
    assert row.split()[4:] == ["1.500", "1.500", "(100%)", "1.000", "(", "67%)"]


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
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments)
    assert str(stopped.value).startswith("bench.py: ") and message in str(stopped.value)
