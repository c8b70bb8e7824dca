"""compare.py: figures by hand, the errors it promises, and one small comparison of the two schedules with real
engines."""

import json
import statistics

import pytest
from conftest import ROOT
from test_records import event, record, write_run

import bench
import compare
from records import read_metrics


def step_of(overlap, step_s, step, events, warm_up=False, **extra):
    """A step of a comparison: its record, and its events with their step."""
    fields = dict(
        workload="470/125", overlap=overlap, side=overlap, warm_up=warm_up, prefixes_alone_s=3.0, optimizer_floor_s=0.5
    )
    fields |= dict(prefix_share=0.9 if overlap == "prefix" else 0.0)
    fields |= {"phase/reward": 0.125, "load/actor/MHz": 1512.0, "load/reward/MHz": 1980.0}
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
    """Equation 1 by hand: T_D 4, T_P 3, of which 0.9 overlap, Δ 0.4 out of a serial step of 12."""
    (result,) = compared()
    verdict = result["verdicts"]["prefix"]
    assert verdict["speed_up"] == pytest.approx(12 / 8)  # of medians, without the warm-up
    assert verdict["speed_up_of_pairs"] == pytest.approx([10 / 7, 1.5, 1.4])
    assert verdict["most"] == pytest.approx(12 / (12 - 3)) and verdict["equation_1"] == pytest.approx(12 / (12 - 2.3))
    assert verdict["rollout_slowdown"] == pytest.approx(0.1)
    assert verdict["decode_slowdown"] == pytest.approx(4.4 / 3.5 - 1)
    head, row = compare.headline([result])
    row = dict(zip(head, row, strict=True))
    assert (row["schedule"], row["none / it"]) == ("prefix", "1.500 (1.400 to 1.500)")
    assert (row["Equation 1"], row["if Δ = 0"]) == ("1.237", "1.333")
    rows = {name: both for name, *both in compare.details(result)}
    assert rows["470/125"] == ["none", "prefix"] and rows["step, s"] == [
        "12.000 (10.000 to 14.000)",
        "8.000 (7.000 to 10.000)",
    ]
    assert rows["MFU of prefixes and training, %"] == ["n/a", "n/a"]
    assert rows["rank 0, actor, s"][0] == "2.000 (2.000 to 2.000)"
    assert rows["rank 0, actor, MHz"] == ["1512 (1512 to 1512)"] * 2
    assert "rank 0, reward, MHz" not in rows  # too short for its load to say something
    assert compare._markdown([["a", "b"], ["c", "d"]]) == "| a | b |\n|---|---|\n| c | d |"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workloads", "470"], "--workloads 470: expected prompt tokens / median response tokens, like 470/125"),
        (["--workloads", "470/0"], "--workloads 470/0: expected prompt tokens"),
        (["--pairs", "0"], "--pairs 0: expected 1 or more"),
        (["--sigma", "-1"], "--sigma -1.0: expected 0 or more"),
        (["--overlap", "none"], "--overlap: compare decides this itself"),
        (["--sms", "8", "--sm-policy", "none"], "--sm-policy none: leave it out: compare's --sms says how many SMs"),
        (["--sms", "8", "--prefix-sms", "16"], "--prefix-sms 16: leave it out beside --sms"),
        (["--sm-policy", "auto"], "--sm-policy auto: leave it out: compare's --sms says how many SMs"),
        (["--sms", "8", "8"], "--sms (8, 8): expected different numbers, 0 or more"),
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
    arguments = ["--workloads", "120/100", "150/80", "--pairs", "1", "--cut", "120", "--prompts", "4"]
    arguments += ["--rollout.n", "2", "--sms", "0", "8"]  # long responses: a prefix begins before the last is done
    done = torchrun(ROOT / "bench.py", "compare", *arguments, "--out", str(out))
    written = json.loads((out / "compare.json").read_text())
    records = read_metrics(out)
    sides = ["none", "prefix", "prefix, 8 SMs"]
    assert [r["side"] for r in records] == 4 * sides and [r["warm_up"] for r in records[:6]] == 3 * [True] + 3 * [False]
    assert [r["overlap"] for r in records[:3]] == ["none", "prefix", "prefix"]
    for workload, result, six in zip(written["workloads"], written["results"], (records[:6], records[6:]), strict=True):
        none, *others = (result["sides"][side] for side in sides)
        lengths = [length for row in workload["lengths"] for length in row]
        assert len(lengths) == 8 and max(lengths) <= 120
        assert {r["response_tokens_mean"] for r in six} == {statistics.fmean(lengths)}  # exact lengths on all sides
        assert {r["truncated_fraction"] for r in six} == {1.0} and {r["grad_norm"] > 0 for r in six} == {True}
        assert workload["prompt_tokens"] - 25 < result["prompt_tokens_mean"] <= workload["prompt_tokens"]
        assert max(value for figures in (none, *others) for value in figures["logprob_diff_max"]) < 1e-4
        measured = ("step_s", "rollout_s", "decode_s", "prefixes_alone_s", "optimizer_s", "publish_s", "kv_s")
        assert all(figures[key][0] > 0 for figures in (none, *others) for key in measured)
        assert all(figures[key][0] > 0 for figures in others for key in ("prefixes_s", "prefixes_beside"))
        assert all(0 < figures["prefix_share"][0] <= 1 for figures in others) and six[0]["prefix_share"] == 0
        assert none["exchange_s"][0] > 0 and 0.01 < none["exchange_share"][0] < 10  # 2 ranks, q = 2
    assert "| 120/100 | " in (out / "compare.md").read_text()
    for line in ("120/100 none, warm-up: step 1/12", "150/80 prefix, 8 SMs: step 12/12", "none / it"):
        assert line in done.stdout
    bench.main(["memory", str(out), "--step", "7"])
    assert (out / "memory.png").stat().st_size > 10_000
