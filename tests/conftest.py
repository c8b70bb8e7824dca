"""What several test files share: starting ranks and whole runs, and the project's root on the path."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


@pytest.fixture(scope="session")
def torchrun():
    """torchrun(script, *arguments, ranks=2, timeout=…) -> CompletedProcess with stdout and stderr together; fails if it
    fails."""

    def run(script: Path, *arguments: str, ranks: int = 2, timeout: float = 300, check: bool = True):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", "0"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(script), *arguments]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env=environment, timeout=timeout, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        if check:
            assert done.returncode == 0, done.stdout[-6000:]
        return done

    return run


@pytest.fixture(scope="session")
def tritons_interpreter():
    """tritons_interpreter(test file) runs it as a program whose Triton kernels run on the CPU; fails if it fails."""

    def run(file: str) -> None:
        environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-W", "ignore", file]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    return run


# ---- whole runs of train.py ------------------------------------------------------------------------------------------


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def leftovers(run_dir: Path) -> list[str]:
    """Processes of this run, and what it left in /dev/shm."""
    names = [p.name for p in Path("/dev/shm").glob("*rollplex*")]
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
            environment = (entry.parent / "environ").read_bytes()
        except OSError:
            continue
        if f"ROLLPLEX_TEST_RUN={run_dir}".encode() in environment and any(w.endswith(b".py") for w in words):
            names.append(b" ".join(words).decode())
    return names


def start(run_dir: Path, *arguments: str, ranks: int = 2) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
    ]
    command += ["--nproc-per-node", str(ranks), str(ROOT / "train.py"), "--run-dir", str(run_dir), *arguments]
    environment = os.environ | {"ROLLPLEX_TEST_RUN": str(run_dir), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


def finish(process: subprocess.Popen, timeout: float) -> str:
    out = process.communicate(timeout=timeout)[0]
    assert process.returncode == 0, out[-6000:]
    return out


def pytest_collection_modifyitems(items: list) -> None:
    """Tests marked gpu are skipped where there is none."""
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
