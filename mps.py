"""MPS: how the kernels of a trainer and those of its engine run on one GPU at the same time.

    LOCAL_RANK 0 ──── starts ──── nvidia-cuda-mps-control -d      pipe and log in /tmp/rollplex-mps-…
      └── pipe ──── watcher: at end-of-file, quits the daemon, kills what stays, removes the directory
    other ranks of the host: wait until it answers

Without NVIDIA's daemon two processes get time slices of a GPU: prefixes would run instead of decode, not beside it. A
daemon that serves already is joined and left alone; otherwise the run has its own, which ends with it however it ends.

Run:
    python mps.py           # GPU: how long a daemon takes to start and to end; CPU: says that there is none
    echo ps | CUDA_MPS_PIPE_DIRECTORY=/tmp/rollplex-mps-… nvidia-cuda-mps-control     # GPU: who shares, during a run
Left out on purpose: static SM partitions (--sm-policy affinity).
To change what holds the trainer back, edit share_gpu(); how many SMs prefixes get is candidates() in sched.py.
"""

import hashlib
import inspect
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import hardware

_CONTROL, _PIPE = "nvidia-cuda-mps-control", "CUDA_MPS_PIPE_DIRECTORY"


def share_gpu(config) -> "Mps | None":
    """Prepare this process for running kernels beside its engine's: MPS, and what holds the trainer back (--sm-policy).

    Every rank of a host calls it with its train.Config before its first CUDA call: CUDA reads the environment when it
    starts. Nothing to do on a CPU. Raises ValueError if the policy cannot take effect here."""
    policy = config.sm_policy
    os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)  # from here on PyTorch may ask CUDA itself (train.py)
    asked = [f"--sm-policy {policy}"] * (policy in ("thread-cap", "auto"))
    asked += [f"--prefix-sms {config.prefix_sms}"] * (config.prefix_sms > 0)
    asked += ["--prefix-priority normal"] * (config.prefix_priority == "normal")
    if asked and not hardware.gpu_host():
        raise ValueError(f"{', '.join(asked)}: leave it out: this host shows no GPU that could be shared")
    if not hardware.gpu_host() or config.overlap == "none" or policy == "none":
        return None
    mps = Mps()
    held_back = {}
    if policy == "thread-cap":
        held_back = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(config.prefix_percent)}
    elif policy != "default" and config.prefix_priority == "low":
        held_back = {"CUDA_MPS_CLIENT_PRIORITY": "1"}  # below normal
    if hardware.cuda_started() and (mps.private or held_back):
        raise RuntimeError(f"CUDA was started before --sm-policy {policy} could take effect: an import used it")
    os.environ.update({_PIPE: mps.pipe} | held_back)
    return mps


class Mps:
    """The MPS daemon that this process's CUDA work will go through: one that serves already, or the run's own.

    The kernel closes the watcher's pipe however rank 0 ends, so the daemon ends with it. Raises ValueError if there is
    no daemon `limit_s` seconds later; clients have `grace_s` seconds to end before the daemon."""

    def __init__(self, limit_s: float = 30.0, grace_s: float = 20.0):
        if shutil.which(_CONTROL) is None:
            raise ValueError(
                f"MPS: {_CONTROL} is not installed (it comes with NVIDIA's driver), so kernels of trainer and engine "
                "cannot overlap: install it, or take time slices with --sm-policy none, or --overlap none"
            )
        self.pipe, self.private, self._end = os.environ.get(_PIPE, "/tmp/nvidia-mps"), False, None
        if _serves(self.pipe):
            return
        root = _private_directory()
        self.pipe, self.private = f"{root}/pipe", True
        try:
            if os.environ.get("LOCAL_RANK", "0") == "0":
                self._start(root, grace_s)
            deadline = time.monotonic() + limit_s
            while not _serves(self.pipe):
                if time.monotonic() > deadline:
                    raise _failure(f"no daemon answers at {self.pipe} after {limit_s:.0f} s", root)
                time.sleep(0.1)
        except ValueError:
            self.close()
            raise

    def _start(self, root: Path, grace_s: float) -> None:
        try:
            root.mkdir(mode=0o700)
        except FileExistsError:
            raise ValueError(f"MPS: {root} is left from a run whose watcher was killed too: remove it") from None
        for name in ("pipe", "log"):
            (root / name).mkdir()
        read, self._end = os.pipe()  # closed on exec: only this process holds the end
        command = [sys.executable, "-c", f"{inspect.getsource(_watch)}\n_watch({str(root)!r}, {grace_s})"]
        # A session of its own: Ctrl-C and torchrun's signals are not for it. Nor may it hold the run's output open.
        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        self._watcher = subprocess.Popen(command, stdin=read, env=_environment(self.pipe), **quiet)
        os.close(read)
        with open(root / "log" / "start", "wb") as log:
            where = {"CUDA_MPS_LOG_DIRECTORY": str(root / "log")}
            quiet |= dict(stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            started = subprocess.run([_CONTROL, "-d"], env=_environment(self.pipe) | where, check=False, **quiet)
        if started.returncode:
            raise _failure(f"{_CONTROL} -d ended with status {started.returncode}", root)

    def close(self) -> None:
        """Stop the daemon if this process started it, and wait. It waits for its clients: end their CUDA work first."""
        if self._end is not None:
            os.close(self._end)
            self._end = None
            self._watcher.wait()


def _private_directory() -> Path:
    """The same for all ranks that one torchrun starts on a host, and nobody else's; short, since it holds sockets."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
    key = " ".join([str(os.getuid()), str(os.getppid()), *(os.environ.get(name, "") for name in names)])
    return Path(f"/tmp/rollplex-mps-{hashlib.blake2b(key.encode(), digest_size=6).hexdigest()}")


def _environment(pipe: str) -> dict[str, str]:
    """Without CUDA_VISIBLE_DEVICES: a daemon that has it renumbers the GPUs that its clients see."""
    return {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | {_PIPE: pipe}


def _serves(pipe: str) -> bool:
    """Whether a daemon answers at `pipe`."""
    run = dict(input=b"get_server_list\n", capture_output=True, timeout=10, env=_environment(pipe))
    try:
        return subprocess.run([_CONTROL], check=False, **run).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _failure(what: str, root: Path) -> ValueError:
    said = " ".join(path.read_text().strip()[-500:] for path in sorted(root.glob("log/*")))
    fix = f"start one before torchrun ({_CONTROL} -d), or use --sm-policy none"
    return ValueError(f"MPS: {what}: {fix}. The daemon said: {said or 'nothing'}")


def _watch(root: str, grace_s: float) -> None:
    """The watcher: a process of its own, run from this source alone, since importing this file would take seconds."""
    import contextlib
    import os
    import shutil
    import signal
    import subprocess
    import sys
    import time
    from pathlib import Path

    def left() -> list[int]:
        """Processes of MPS whose environment names our pipe."""
        pids = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it ended, or is somebody else's
                ours = f"CUDA_MPS_PIPE_DIRECTORY={root}/pipe".encode() in (entry / "environ").read_bytes().split(b"\0")
                if ours and (entry / "comm").read_text().startswith("nvidia-cuda-mps"):
                    pids.append(int(entry.name))
        return pids

    sys.stdin.buffer.read()  # until the starter closes its end, or is gone
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        command = f"quit -t {int(grace_s)}\n".encode()
        subprocess.run(["nvidia-cuda-mps-control"], input=command, timeout=grace_s + 2, check=False)
    deadline = time.monotonic() + 2
    while left() and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    if not hardware.gpu_host():
        print("MPS: n/a, this host shows no GPU")
        sys.exit()
    start = time.monotonic()
    daemon = Mps()
    how = "started" if daemon.private else "joined"
    print(f"{how} the daemon at {daemon.pipe} after {time.monotonic() - start:.2f} s")
    start = time.monotonic()
    daemon.close()
    print(f"{'ended' if daemon.private else 'left'} it after {time.monotonic() - start:.2f} s")
