"""Managed memory in the host, as a program sees it: like the driver's, but for what is noted."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.harness import PROGRAMS, environment, users_hooks

PROGRAM = Path(__file__).parent / "programs" / "answers_of_managed.py"


def answers(place: Path, **more: str) -> dict[str, object]:
    path = os.pathsep.join([str(PROGRAMS), *sys.path])
    env = environment(hooked=bool(more), runtime=place, extra={**more, "PYTHONPATH": path})
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_it_answers_like_the_driver_s(tmp_path: Path) -> None:
    users_hooks(tmp_path)
    natively, in_host = answers(tmp_path), answers(tmp_path, PHOS_MANAGED="host")
    assert len(natively) > 20
    assert in_host == natively
