"""Unpack a crun that hands its settings on to CRIU (1.26 and newer), for the tests of containers.

Debian 12's is built without CRIU, and that of Debian 13 does not tell CRIU which plugins to load.
As ``install_criu.py`` this takes the package and its libraries from a newer suite, and leaves the
system as it is: ``<prefix>/crun`` then runs with ``<prefix>/lib``. Nothing of it is installed with
phosd.
"""

import re
import shutil
import sys
import tempfile
from pathlib import Path

from install_criu import SUITES, PrivateApt, debian_archive, run, version_tuple

MINIMUM = (1, 26)


def suffices(crun: str | Path) -> bool:
    """Return whether a program is a crun of this kind."""
    if shutil.which(crun) is None:
        return False
    told = run([crun, "--version"], "asking crun for its version")
    (version,) = re.findall(r"crun version ([\d.]+)", told) or ["0"]
    return version_tuple(version) >= MINIMUM and "+CRIU" in told


def fetch(folder: Path, prefix: Path) -> None:
    """Fetch crun, and the library with which it calls CRIU, into ``prefix``."""
    archive = debian_archive()
    for suite in SUITES:
        apt = PrivateApt(folder / suite, archive, suite)
        apt.update()
        if version_tuple(apt.candidate("crun")) >= MINIMUM:
            apt.download("crun")
            for package in apt.download("libcriu2"):
                run(["dpkg-deb", "--extract", package, folder / "root"], f"unpacking {package}")
            break
    else:
        sys.exit(f"the archive has no crun {'.'.join(map(str, MINIMUM))} in {' or '.join(SUITES)}")
    shutil.rmtree(prefix, ignore_errors=True)
    (prefix / "lib").mkdir(parents=True)
    for library in (folder / "root/usr/lib").glob("*-linux-gnu/*.so*"):
        shutil.copy2(library, prefix / "lib" / library.name, follow_symlinks=False)
    shutil.copy2(folder / "root/usr/bin/crun", prefix)
    (loader,) = (prefix / "lib").glob("ld-linux*.so.*")
    own = ["--set-interpreter", str(loader), "--force-rpath", "--set-rpath", str(prefix / "lib")]
    run(["patchelf", *own, prefix / "crun"], "having crun use its own libraries")


def main() -> None:
    """Fetch it unless the one in the prefix, or the system's, to which a link is made, will do."""
    prefix = Path(sys.argv[1]).resolve()
    own, system = prefix / "crun", shutil.which("crun")
    if suffices(own):
        return
    if system is not None and suffices(system):
        prefix.mkdir(parents=True, exist_ok=True)
        own.unlink(missing_ok=True)
        own.symlink_to(system)
        return
    with tempfile.TemporaryDirectory() as folder:
        fetch(Path(folder), prefix)


if __name__ == "__main__":
    main()
