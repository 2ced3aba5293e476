"""The Debian package of this checkout, and what an administrator does with it."""

import fcntl
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.boot.machine import Machine

REPOSITORY = Path(__file__).parents[2]
CACHE = REPOSITORY / "build/boot"


@contextmanager
def locked_cache() -> Iterator[Path]:
    """The folder of what is kept between runs, for us alone."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield CACHE


def build_package(folder: Path) -> Path:
    """The package of this checkout as it is now, in ``folder``."""
    command = [sys.executable, str(REPOSITORY / "packaging/build_deb.py"), f"--output={folder}"]
    with locked_cache():
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.split()[-1])


def newer(package: Path, folder: Path) -> Path:
    """The same, as version 999, and with a hook of another content, in ``folder``."""
    root = folder / "root"
    subprocess.run(["dpkg-deb", "--raw-extract", package, root], check=True)
    control = root / "DEBIAN/control"
    control.write_text(re.sub("(?m)^Version: .*", "Version: 999", control.read_text()))
    with (root / "usr/lib/phos/shipped/libphos_hook.so").open("ab") as hook:
        hook.write(b"newer")  # behind its end; it loads as before
    changed = folder / "phosd_999.deb"
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "-Znone", "--build", root, changed], check=True
    )
    return changed


def install(machine: Machine, package: Path) -> str:
    """Install the package's file, with nothing but what the machine has; what dpkg said."""
    machine.carry(package, f"/root/{package.name}")
    return machine.run(f"dpkg --install /root/{package.name}")
