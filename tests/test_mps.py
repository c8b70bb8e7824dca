"""mps.py: a run's own MPS daemon ends with it, one that served before is left alone; NVIDIA's program is a stand-in."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT

import hardware
import mps
import rollout
import train

# Stands in for NVIDIA's program: -d leaves a daemon at $CUDA_MPS_PIPE_DIRECTORY/control, otherwise commands come from
# standard input. STANDIN: "deaf" never answers, "stubborn" ignores quit, "broken" cannot start.
STANDIN = """#!{python} -IS
import os, socket, sys
path, mode = os.environ["CUDA_MPS_PIPE_DIRECTORY"] + "/control", os.environ.get("STANDIN", "")
if sys.argv[1:] == ["-d"]:
    if mode == "broken":
        sys.exit("An instance of this daemon is already running")
    server = socket.socket(socket.AF_UNIX)
    server.bind(path + ".deaf" * (mode == "deaf"))
    server.listen()
    if os.fork():
        sys.exit(0)
    os.setsid()
    open(os.environ["CUDA_MPS_LOG_DIRECTORY"] + "/control.log", "w").write(
        "devices " + os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    while True:
        connection, _ = server.accept()
        command = connection.recv(100).decode().split()
        print(*command, file=open(os.environ["ROLLPLEX_TEST_RUN"] + "/commands", "a"))
        connection.send(b"ok")
        connection.close()
        if command[0] == "quit" and mode != "stubborn":
            sys.exit(0)
for line in sys.stdin:
    client = socket.socket(socket.AF_UNIX)
    try:
        client.connect(path)
    except OSError:
        print("Cannot find MPS control daemon process")
        sys.exit(1)
    client.send(line.encode())
    client.recv(10)
"""


@pytest.fixture
def standin(tmp_path, monkeypatch):
    """The stand-in first on PATH, no daemon, and the environment of a rank; fails if a process of it is left."""
    program = tmp_path / "bin" / "nvidia-cuda-mps-control"
    program.parent.mkdir()
    program.write_text(STANDIN.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    nobody = tempfile.mkdtemp()  # short: it would hold a socket
    rank = dict(CUDA_MPS_PIPE_DIRECTORY=nobody, TORCHELASTIC_RUN_ID=str(tmp_path), LOCAL_RANK="0")
    for name, value in (rank | {"ROLLPLEX_TEST_RUN": str(tmp_path)}).items():
        monkeypatch.setenv(name, value)
    yield Path(nobody)
    shutil.rmtree(nobody)
    left = daemons()
    for pid in left:
        os.kill(pid, 9)
    assert not left


def daemons() -> list[int]:
    """The stand-ins of this test that run: their environment names it."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            ours = f"ROLLPLEX_TEST_RUN={os.environ['ROLLPLEX_TEST_RUN']}".encode() in (entry / "environ").read_bytes()
            if ours and (entry / "comm").read_text().strip() == "nvidia-cuda-mps":
                pids.append(int(entry.name))
    return pids


def gone(root: Path, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while (root.exists() or daemons()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not root.exists() and not daemons()


def test_local_rank_0_starts_a_daemon_and_ends_it(standin, monkeypatch, tmp_path):
    """These tests check our handling of processes against a stand-in, not NVIDIA's daemon."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    started = mps.Mps(grace_s=1)
    root = Path(started.pipe).parent
    assert started.private and len(daemons()) == 1 and root.stat().st_mode & 0o777 == 0o700
    assert len(started.pipe) < 60  # a socket's path has 107 bytes
    assert (root / "log" / "control.log").read_text() == "devices all"
    monkeypatch.setenv("LOCAL_RANK", "1")
    joined = mps.Mps(limit_s=1)
    assert joined.private and joined.pipe == started.pipe
    joined.close()
    assert len(daemons()) == 1
    started.close()
    assert not root.exists() and not daemons()
    assert set((tmp_path / "commands").read_text().splitlines()) == {"get_server_list", "quit -t 1"}


def test_a_daemon_that_serves_is_joined_and_left_alone(standin):
    where = os.environ | {"CUDA_MPS_LOG_DIRECTORY": str(standin)}
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, env=where)
    joined = mps.Mps()
    assert joined.pipe == str(standin) and not joined.private
    joined.close()
    assert len(daemons()) == 1
    subprocess.run(["nvidia-cuda-mps-control"], input=b"quit", check=True)
    deadline = time.monotonic() + 10
    while daemons() and time.monotonic() < deadline:
        time.sleep(0.05)


RANK = """
import sys, time, mps
daemon = mps.Mps(grace_s=1)
print(daemon.pipe, flush=True)
if sys.argv[1] == "raise":
    raise RuntimeError
time.sleep(0 if sys.argv[1] == "end" else 60)
"""


@pytest.mark.parametrize("how", ["end", "raise", "kill"])
def test_the_daemon_ends_however_its_starter_does(standin, how, monkeypatch):
    """A rank that waits finds the daemon without being told; after its starter there is no process and no directory."""
    ranks = []
    monkeypatch.setenv("STANDIN", "stubborn")  # so that the watcher needs two seconds
    for rank in ("1", "0"):
        command, environment = (
            [sys.executable, "-c", RANK, how if rank == "0" else "end"],
            os.environ | {"LOCAL_RANK": rank},
        )
        quiet = dict(stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT)
        ranks.append(subprocess.Popen(command, env=environment, **quiet))
    pipes = [process.stdout.readline().strip() for process in ranks]
    if how == "kill":
        assert len(daemons()) == 1
        ranks[1].kill()
    codes = [process.wait(60) for process in ranks]
    assert pipes[0] == pipes[1] != "" and codes == [0, {"end": 0, "raise": 1, "kill": -9}[how]]
    for process in ranks:
        assert process.stdout.read() == ""  # nobody else holds the run's output open
        process.stdout.close()
    assert Path(pipes[1]).exists()
    assert gone(Path(pipes[1]).parent)


def test_torchruns_ranks_find_the_same_daemon(standin, torchrun, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text("import mps\nprint('pipe', mps.Mps(grace_s=1).pipe, flush=True)\nimport time; time.sleep(2)\n")
    lines = [line for line in torchrun(script).stdout.splitlines() if line.startswith("pipe")]
    assert len(lines) == 2 and len(set(lines)) == 1
    assert gone(Path(lines[0].split()[1]).parent)


def test_a_daemon_that_will_not_quit_is_killed(standin, monkeypatch):
    monkeypatch.setenv("STANDIN", "stubborn")
    started = mps.Mps(grace_s=0)
    assert len(daemons()) == 1
    started.close()
    assert gone(Path(started.pipe).parent)


@pytest.mark.parametrize(
    "mode, message",
    [("deaf", "no daemon answers at /tmp/rollplex-mps-.* after 1 s: start one before torchrun"),
     ("broken", "-d ended with status 1: .*The daemon said: An instance of this daemon is already running")],
)  # fmt: skip
def test_a_daemon_that_does_not_start_is_an_error_and_leaves_nothing(standin, monkeypatch, mode, message):
    monkeypatch.setenv("STANDIN", mode)
    with pytest.raises(ValueError, match=message):
        mps.Mps(limit_s=1, grace_s=1)
    assert gone(mps._private_directory())


def test_a_directory_that_is_in_the_way_is_named_and_kept(standin):
    root = mps._private_directory()
    root.mkdir()
    with pytest.raises(ValueError, match=f"{root} is left from a run .* remove it"):
        mps.Mps()
    root.rmdir()


def test_without_the_program_the_error_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="nvidia-cuda-mps-control is not installed .* --sm-policy none"):
        mps.Mps()


def sharing(policy: str, **given) -> train.Config:
    return replace(train.TINY, sm_policy=policy, **given)


def test_on_a_cpu_there_is_nothing_to_share(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shared = [mps.share_gpu(sharing(policy)) for policy in ("none", "default", "priority", "green-context")]
    assert shared == [None] * 4
    for policy in ("thread-cap", "auto"):
        with pytest.raises(ValueError, match=f"--sm-policy {policy}: leave it out: this host shows no GPU"):
            mps.share_gpu(sharing(policy))
    with pytest.raises(ValueError, match="--prefix-sms 8: leave it out: this host shows no GPU"):
        mps.share_gpu(sharing("green-context", prefix_sms=8))
    with pytest.raises(ValueError, match="--prefix-priority normal: leave it out: this host shows no GPU"):
        mps.share_gpu(sharing("green-context", prefix_priority="normal"))


def test_what_holds_the_trainer_back(monkeypatch):
    monkeypatch.setattr(hardware, "gpu_host", lambda: True)
    monkeypatch.setattr(hardware, "cuda_started", lambda: False)
    monkeypatch.setattr(mps, "Mps", lambda: SimpleNamespace(pipe="/tmp/x", private=False))
    variables = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_CLIENT_PRIORITY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    configs = {name: sharing(name) for name in ("none", "default", "priority", "green-context", "auto")}
    configs["thread-cap"] = sharing("thread-cap", prefix_percent=50)
    configs["normal"] = sharing("green-context", prefix_priority="normal")
    held_back = {}
    for name, config in configs.items():
        with monkeypatch.context() as environment:
            for variable in variables:  # set first, so that they are as before afterwards
                environment.setenv(variable, "")
                environment.delenv(variable)
            mps.share_gpu(config)
            held_back[name] = tuple(os.environ.get(variable) for variable in variables)
    below = dict.fromkeys(("priority", "green-context", "auto"), ("/tmp/x", "1", None))
    rest = {"none": (None,) * 3, "thread-cap": ("/tmp/x", None, "50")}
    rest |= dict.fromkeys(("default", "normal"), ("/tmp/x", None, None))
    assert held_back == below | rest


def test_engines_join_the_trainers_daemon_unlimited(monkeypatch):
    """What holds the trainer back is set in its own environment, which its engine starts from."""
    source = Path(mps.__file__).read_text()
    for name in hardware.WHOLE_GPU:
        assert f'"{name}": ' in source
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/x")
    assert rollout._environment([])["CUDA_MPS_PIPE_DIRECTORY"] == "/tmp/x"
