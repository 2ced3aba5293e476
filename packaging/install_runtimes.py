"""Unpack newer runtimes of containers than the machine's Debian has, for the tests of containers.

A crun that hands its settings on to CRIU (1.26 and newer): Debian 12's is built without CRIU, and
that of Debian 13 does not tell CRIU which plugins to load. A containerd whose CRI saves containers
(2.1 and newer), and a runc of that age. As ``install_criu.py`` this takes the packages and their
libraries from a newer suite, and leaves the system as it is: each program then runs with the
libraries in its prefix. Nothing of it is installed with phosd.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from install_criu import (
    SUITES,
    Archive,
    PrivateApt,
    debian_archive,
    run,
    use_libraries,
    version_tuple,
)


@dataclass(frozen=True)
class Runtime:
    """What is unpacked into ``<prefix>/<package>``: ``programs`` of it and of its dependencies, the
    first of which tells its version, in the folder ``bin``, and libraries in ``lib``.
    """

    package: str
    minimum: tuple[int, ...]
    programs: Sequence[str]
    libraries: Sequence[str] = ()
    """Packages of libraries that it loads, and does not depend on."""
    fits: Callable[[str], bool] = lambda _: True
    """Whether a build with this answer to ``--version`` will do."""

    def suffices(self, program: str | Path | None) -> bool:
        """Return whether a program is of this kind."""
        if program is None or shutil.which(program) is None:
            return False
        try:
            told = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
        except FileNotFoundError:  # its loader is not there: the checkout was moved
            return False
        (version, *_) = re.findall(r"\b\d+\.[\d.]+", told) or ["0"]
        return version_tuple(version) >= self.minimum and self.fits(told)


RUNTIMES = (
    Runtime("crun", (1, 26), ["crun"], ["libcriu2"], lambda told: "+CRIU" in told),
    Runtime("containerd", (2, 1), ["containerd", "containerd-shim-runc-v2", "ctr", "runc"]),
)


def fetch(runtime: Runtime, archive: Archive, folder: Path, prefix: Path) -> None:
    """Fetch a runtime into ``prefix``."""
    for suite in SUITES:
        apt = PrivateApt(folder / suite, archive, suite)
        apt.update()
        if version_tuple(apt.candidate(runtime.package)) >= runtime.minimum:
            break
    else:
        wanted = ".".join(map(str, runtime.minimum))
        sys.exit(f"the archive has no {runtime.package} {wanted} in {' or '.join(SUITES)}")
    for name in (runtime.package, *runtime.libraries):
        for package in apt.download(name):
            run(["dpkg-deb", "--extract", package, folder / "root"], f"unpacking {package}")
    shutil.rmtree(prefix, ignore_errors=True)
    for part in ("bin", "lib"):
        (prefix / part).mkdir(parents=True)
    for library in (folder / "root/usr/lib").glob("*-linux-gnu/*.so*"):
        shutil.copy2(library, prefix / "lib" / library.name, follow_symlinks=False)
    (loader,) = (prefix / "lib").glob("ld-linux*.so.*")
    for program in runtime.programs:
        (found, *_) = (folder / "root/usr").glob(f"*bin/{program}")
        shutil.copy2(found, prefix / "bin" / program)
        use_libraries(prefix / "bin" / program, loader, str(prefix / "lib"))


def main() -> None:
    """Fetch what the prefix lacks, unless the system's, to which links are made, will do."""
    archive = debian_archive()
    for runtime in RUNTIMES:
        prefix = Path(sys.argv[1]).resolve() / runtime.package
        if runtime.suffices(prefix / "bin" / runtime.programs[0]):
            continue
        system = [shutil.which(program) for program in runtime.programs]
        if runtime.suffices(system[0]) and all(system):
            shutil.rmtree(prefix, ignore_errors=True)
            (prefix / "bin").mkdir(parents=True)
            for found, program in zip(system, runtime.programs, strict=True):
                (prefix / "bin" / program).symlink_to(str(found))
            continue
        with tempfile.TemporaryDirectory() as folder:
            fetch(runtime, archive, Path(folder), prefix)


if __name__ == "__main__":
    main()
