"""The last release of phosd, a plant for each test, and programs that are gone when it ends."""

import hashlib
import lzma
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from phosd.engine.system.native import softgpu_folder
from tests.node.checkpoint_restore.conftest import place, start, undisturbed
from tests.system.faults.conftest import bus, plant, pytest_runtest_makereport

__all__ = ["bus", "place", "plant", "pytest_runtest_makereport", "start", "undisturbed"]

RELEASE = Path(__file__).parent / "phosd-87dba1e.tar.xz"
"""Made by ``packaging/keep_release.py``."""
_ROOT = Path(__file__).parents[3]
_UNPACKED = _ROOT / "build" / "releases"
_FIRST = """
# Another phosd that is installed, as this checkout is, comes before PYTHONPATH.
import sys

sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in type(each).__module__]
"""


@pytest.fixture(scope="session")
def release() -> Path:
    """The folder of the last release's package: its hook stays there, as images name it."""
    folder = _UNPACKED / hashlib.sha256(RELEASE.read_bytes()).hexdigest()[:16]
    if not folder.exists():
        _UNPACKED.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=_UNPACKED))
        try:
            # By tar: Python 3.11.2 of Debian 12 knows no filter; a fresh Debian has no xz.
            subprocess.run(
                ["tar", "--extract", "--directory", fresh],
                input=lzma.decompress(RELEASE.read_bytes()),
                check=True,
            )
            (fresh / "sitecustomize.py").write_text(_FIRST)
            (fresh / "phosd/native/softgpu").symlink_to(softgpu_folder())
            (fresh / ".criu").symlink_to(_ROOT / ".criu")
            fresh.chmod(0o755)
            fresh.rename(folder)
        except OSError:
            shutil.rmtree(fresh)
            if not folder.exists():  # another shard was quicker
                raise
    return folder
