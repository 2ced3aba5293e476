"""Values are equal through random migrations, suspends and resumes at random instants."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.rotation import seeds

ROOT = Path(__file__).parents[3]
PATIENCE = 300.0


@pytest.mark.rotated(of=3)
@pytest.mark.parametrize("seed", seeds("random walk", 1, whole=2), ids="seed {}".format)
@pytest.mark.parametrize(
    ("devices", "programs"),
    [
        (2, ("churn@1", "two_devices", "waiting_pair", "capture", "threads")),
        (4, ("single@2", "two_devices", "shared_pair", "waiting_devices", "workers")),
    ],
    ids=["two devices", "four devices"],
)
def test_values_are_equal(devices: int, programs: tuple[str, ...], seed: int) -> None:
    """Programs of every kind side by side, some of which sleep while others move."""
    command = [
        sys.executable,
        "-m",
        "tests.node.moves.random_moves",
        f"--devices={devices}",
        f"--seed={seed}",
    ]
    # Its devices are its own: this process has bound a driver that sees two of another machine.
    own = {k: v for k, v in os.environ.items() if k != "PHOS_SOFTGPU_DIR"}
    done = subprocess.run(
        [*command, "--steps=30", *programs],
        cwd=ROOT,
        env=own,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 30
