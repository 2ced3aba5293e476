"""What a wrong guess teaches: the daemon remembers it, and the next guess is right."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import harness
from tests.support.harness import Target, start, wait_until
from tests.system.service.test_end_to_end import phos, phosd

SECONDS = 2.0
"""How long copying all device memory of the program takes."""
TRIES = 5
"""On a busy machine CRIU may take longer than that, and then nothing is left to be guessed."""


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    """A program whose kernel follows pointers that stand in memory."""
    extra = {"PYTHONPATH": str(harness.PROGRAMS), "PHOS_TEST_PACE": "0.01"}
    runtime = tmp_path / "run"
    found = start("wrong", tmp_path, runtime=runtime, arguments=("0", "chase"), extra=extra)
    try:
        found.wait_for_steps(5)
        yield found
    finally:
        found.kill()


def test_a_program_is_guessed_wrong_once(bus: str, tmp_path: Path, target: Target) -> None:
    def device_bytes() -> int:
        found = phos(bus, tmp_path, "ps")
        return sum(int(str(p["device_bytes"])) for p in found if p["pid"] == target.pid)

    with phosd(bus, tmp_path):
        size = wait_until(device_bytes, "the hook, which looks for phosd's folder now and then")
    slowly = {"PHOS_SOFTGPU_COPY_RATE": str(int(2 * size / SECONDS))}
    (tmp_path / "phosd.toml").write_text(f"shadow_limit = {size - 1}\n")  # no room for a snapshot
    pid = str(target.pid)
    with phosd(bus, tmp_path, **slowly):
        for _ in range(TRIES):
            job = phos(bus, tmp_path, "checkpoint", pid, "--mode", "concurrent")[-1]
            if job["mode"] != "concurrent":
                break
        assert job["mode"] in ("recopy", "stop")
        assert int(str(job["wrong_guesses"])) >= 1
        assert "chase" in str(job["suspects"])
        assert "guessed wrong" in str(job["why"])
        image = phos(bus, tmp_path, "images")[-1]
        assert (image["id"], image["mode"]) == (job["result"], job["mode"])
        assert image["wrong_guesses"] == job["wrong_guesses"]
    with phosd(bus, tmp_path, **slowly):
        past = phos(bus, tmp_path, "history")[0]
        assert past["wrong_guesses"] == job["wrong_guesses"]
        words = ("checkpoint", pid, "--mode", "concurrent", "--fallback", "none")
        job = phos(bus, tmp_path, *words)[-1]
        assert (job["mode"], job["wrong_guesses"]) == ("concurrent", 0)
        target.more_steps(3)
