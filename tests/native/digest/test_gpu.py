"""The digest on the GPU, which is the software GPU where there is no other."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_gpu_hashes_as_the_cpu_does(tmp_path: Path) -> None:
    """Zeros, ones, random bytes; whole chunks and lengths that end inside a round."""
    command = [sys.executable, "bench/digest.py", "--gib=0.02", "--block-mib=8", "--rounds=1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PHOS_SOFTGPU_DIR": str(tmp_path)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["equal"] is True
    assert result["lengths_equal"] is True
    assert result["bytes"] == result["chunks"] * (2 << 20)
