"""sched.py: the schedules compute one and the same update with real engines; the timeline adds up; the bound is
Equation 1."""

import contextlib
import json
import os
import re
import sched
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

import memory
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
    `rate` tokens/s: played out in ticks of 1 ms, with no formula of choose_sms."""
    decode_left, prefix_left, decode_s, prefix_s = steps * 0.010, 0 if sms is None else tokens, 0.0, 0.0
    while decode_left > 0 or prefix_left > 0:
        both = decode_left > 0 and prefix_left > 0
        decode_s += 0.001 if decode_left > 0 else 0
        prefix_s += 0.001 if prefix_left > 0 else 0
        decode_left -= 0.001 / slow if both else 0.001
        prefix_left -= rate * 0.001
    return sched.Measured(sms, decode_s, steps, prefix_s, tokens)


# sms -> (decode slowdown, prefix tokens/s); the first step is slow by itself and must not count
GPU = {32: (1.05, 5_000), 64: (1.2, 9_000), 0: (2.8, 16_000)}


def tour(steps: int = 1000, tokens: int = 60_000) -> list[sched.Measured]:
    first = sched.Measured(32, 99.0, steps, 99.0, tokens)
    return [first, measured(None, 1, 1, steps, tokens)] + [measured(s, *GPU[s], steps, tokens) for s in SMS]


def test_the_first_steps_measure_each_candidate_once():
    history = tour()
    assert [sched.choose_sms(history[:n], SMS, 60_000) for n in range(5)] == [32, None, 32, 64, 0]


@pytest.mark.parametrize("steps", [300, 1000, 4000])
@pytest.mark.parametrize("tokens", [5_000, 40_000, 70_000, 100_000, 300_000])
def test_the_chosen_partition_has_the_shortest_phase_1(steps, tokens):
    """Whatever the next step's prefixes, measured on other ones: against playing each candidate out."""
    took = {}
    for sms in SMS:
        played = measured(sms, *GPU[sms], steps, tokens)
        took[sms] = max(played.decode_s, played.prefix_s)
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


def test_a_fixed_partition_needs_no_history():
    assert sched.candidates("green-context", 48) == (48,) and sched.candidates("default", 0) == (0,)
    partition = sched.Partition((48,))
    assert not partition.measures and [partition.next(100), partition.next(5)] == [48, 48]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--overlap", "none", "--sm-policy", "auto"], "--sm-policy auto: expected default: nothing overlaps decode"),
        (["--sm-policy", "affinity"], "--sm-policy affinity: expected green-context: static SM partitions"),
        (["--sm-policy", "green-context"], "--prefix-sms 0: expected the prefixes' SMs with --sm-policy green-context"),
        (["--prefix-sms", "64"], "--prefix-sms 64: expected the prefixes' SMs with --sm-policy green-context, 0 with"),
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


# ---- MPS -------------------------------------------------------------------------------------------------------------

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
def mps(tmp_path, monkeypatch):
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


def test_local_rank_0_starts_a_daemon_and_ends_it(mps, monkeypatch, tmp_path):
    """These tests check our handling of processes against a stand-in, not NVIDIA's daemon."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    started = sched.Mps(grace_s=1)
    root = Path(started.pipe).parent
    assert started.private and len(daemons()) == 1 and root.stat().st_mode & 0o777 == 0o700
    assert len(started.pipe) < 60  # a socket's path has 107 bytes
    assert (root / "log" / "control.log").read_text() == "devices all"
    monkeypatch.setenv("LOCAL_RANK", "1")
    joined = sched.Mps(limit_s=1)
    assert joined.private and joined.pipe == started.pipe
    joined.close()
    assert len(daemons()) == 1
    started.close()
    assert not root.exists() and not daemons()
    assert set((tmp_path / "commands").read_text().splitlines()) == {"get_server_list", "quit -t 1"}


def test_a_daemon_that_serves_is_joined_and_left_alone(mps):
    where = os.environ | {"CUDA_MPS_LOG_DIRECTORY": str(mps)}
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, env=where)
    joined = sched.Mps()
    assert joined.pipe == str(mps) and not joined.private
    joined.close()
    assert len(daemons()) == 1
    subprocess.run(["nvidia-cuda-mps-control"], input=b"quit", check=True)
    deadline = time.monotonic() + 10
    while daemons() and time.monotonic() < deadline:
        time.sleep(0.05)


RANK = """
import sys, time, sched
mps = sched.Mps(grace_s=1)
print(mps.pipe, flush=True)
if sys.argv[1] == "raise":
    raise RuntimeError
time.sleep(0 if sys.argv[1] == "end" else 60)
"""


@pytest.mark.parametrize("how", ["end", "raise", "kill"])
def test_the_daemon_ends_however_its_starter_does(mps, how, monkeypatch):
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


def test_torchruns_ranks_find_the_same_daemon(mps, torchrun, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(
        "import sched\nprint('pipe', sched.Mps(grace_s=1).pipe, flush=True)\nimport time; time.sleep(2)\n"
    )
    lines = [line for line in torchrun(script).stdout.splitlines() if line.startswith("pipe")]
    assert len(lines) == 2 and len(set(lines)) == 1
    assert gone(Path(lines[0].split()[1]).parent)


def test_a_daemon_that_will_not_quit_is_killed(mps, monkeypatch):
    monkeypatch.setenv("STANDIN", "stubborn")
    started = sched.Mps(grace_s=0)
    assert len(daemons()) == 1
    started.close()
    assert gone(Path(started.pipe).parent)


@pytest.mark.parametrize(
    "mode, message",
    [("deaf", "no daemon answers at /tmp/rollplex-mps-.* after 1 s: start one before torchrun"),
     ("broken", "-d ended with status 1: .*The daemon said: An instance of this daemon is already running")],
)  # fmt: skip
def test_a_daemon_that_does_not_start_is_an_error_and_leaves_nothing(mps, monkeypatch, mode, message):
    monkeypatch.setenv("STANDIN", mode)
    with pytest.raises(ValueError, match=message):
        sched.Mps(limit_s=1, grace_s=1)
    assert gone(sched._private_directory())


def test_a_directory_that_is_in_the_way_is_named_and_kept(mps):
    root = sched._private_directory()
    root.mkdir()
    with pytest.raises(ValueError, match=f"{root} is left from a run .* remove it"):
        sched.Mps()
    root.rmdir()


def test_without_the_program_the_error_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="nvidia-cuda-mps-control is not installed .* --sm-policy none"):
        sched.Mps()


def test_on_a_cpu_there_is_nothing_to_share(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert sched.share_gpu("prefix", "default") is None and sched.share_gpu("prefix", "none") is None
    for policy in ("thread-cap", "green-context", "priority", "auto"):
        with pytest.raises(ValueError, match=f"--sm-policy {policy}: expected default: this host shows no GPU"):
            sched.share_gpu("prefix", policy, 50)


def test_engines_join_the_trainers_daemon_unlimited(monkeypatch):
    """What holds the trainer back is set in its own environment, which its engine starts from."""
    source = Path(sched.__file__).read_text()
    for name in memory.WHOLE_GPU:
        assert f'"{name}": ' in source
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/x")
    assert rollout._environment([])["CUDA_MPS_PIPE_DIRECTORY"] == "/tmp/x"
