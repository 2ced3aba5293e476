"""Unpack Debian's Prometheus for the tests of alerts; no service is installed, and none begins.

``<prefix>/bin`` then has ``prometheus`` and ``promtool``, of the machine's own release. Nothing of
it is installed with phosd.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from install_criu import PrivateApt, debian_archive, os_release, run

PROGRAMS = ("prometheus", "promtool")


def fetch(folder: Path, prefix: Path) -> None:
    """Fetch the programs into ``prefix``."""
    suite = os_release().get("VERSION_CODENAME", "stable")
    apt = PrivateApt(folder / suite, debian_archive(), suite)
    apt.update()
    # From Debian 13 on each has a package of its own; what they depend on is not needed.
    for name in filter(apt.candidate, PROGRAMS):
        (package,) = (path for path in apt.download(name) if path.name.startswith(f"{name}_"))
        run(["dpkg-deb", "--extract", package, folder / "root"], f"unpacking {package.name}")
    (prefix / "bin").mkdir(parents=True, exist_ok=True)
    for program in PROGRAMS:
        shutil.copy2(folder / "root/usr/bin" / program, prefix / "bin")


def main() -> None:
    """Fetch it unless it is there."""
    prefix = Path(sys.argv[1]).resolve()
    if all((prefix / "bin" / program).exists() for program in PROGRAMS):
        return
    with tempfile.TemporaryDirectory() as folder:
        fetch(Path(folder), prefix)


if __name__ == "__main__":
    main()
