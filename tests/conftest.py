"""What several test files share: starting ranks, and the project's root on the path."""

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


def pytest_collection_modifyitems(items: list) -> None:
    """Tests marked gpu are skipped where there is none."""
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
