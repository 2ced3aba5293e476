"""Unpack Debian 13's Slurm (24.11) for the tests of jobs, where the system's is another one.

As ``install_criu.py`` this takes packages and libraries from the archive, and leaves the system as
it is: ``<prefix>/bin`` has daemons and commands, which run with ``<prefix>/lib``,
``<prefix>/plugins`` is their ``PluginDir``, and phosd's own plugin is built for them with
``<prefix>/include``. Nothing of it is installed with phosd.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from install_criu import PrivateApt, debian_archive, run, use_libraries, version_tuple

SUITE = "trixie"
RELEASE = (24, 11)
PACKAGES = ("slurmctld", "slurmd", "libslurm-dev")
DAEMONS = ("slurmctld", "slurmd", "slurmstepd")
COMMANDS = ("sbatch", "scancel", "scontrol", "sinfo", "srun")


def fetch(folder: Path, prefix: Path) -> None:
    """Fetch Slurm into ``prefix``."""
    apt = PrivateApt(folder / SUITE, debian_archive(), SUITE)
    apt.update()
    found = apt.candidate("slurmctld")
    if version_tuple(found)[:2] != RELEASE:
        sys.exit(f"Debian {SUITE} has Slurm {found or 'no more'}, and not 24.11")
    for package in {path for each in PACKAGES for path in apt.download(each)}:
        run(["dpkg-deb", "--extract", package, folder / "root"], f"unpacking {package}")
    root = folder / "root/usr"
    shutil.rmtree(prefix, ignore_errors=True)
    for part in ("bin", "lib"):
        (prefix / part).mkdir(parents=True)
    shutil.copytree(root / "include/slurm", prefix / "include/slurm")
    (plugins,) = root.glob("lib/*-linux-gnu/slurm-wlm")
    shutil.copytree(plugins, prefix / "plugins", symlinks=True)
    for library in plugins.parent.glob("*.so*"):
        shutil.copy2(library, prefix / "lib" / library.name, follow_symlinks=False)
    for daemon in DAEMONS:  # Debian's alternatives, of which there is one
        shutil.copy2(root / "sbin" / f"{daemon}-wlm", prefix / "bin" / daemon)
    for command in COMMANDS:
        shutil.copy2(root / "bin" / command, prefix / "bin")
    (loader,) = (prefix / "lib").glob("ld-linux*.so.*")
    libraries = f"{prefix / 'lib'}:{prefix / 'plugins'}"
    for program in (prefix / "bin").iterdir():
        use_libraries(program, loader, libraries)


def main() -> None:
    """Fetch it unless it is in the prefix, or the system's own is of this release."""
    prefix = Path(sys.argv[1]).resolve()
    for place in (prefix / "bin/slurmctld", Path("/usr/sbin/slurmctld")):
        if place.exists():
            told = run([place, "-V"], f"asking {place} for its version")  # slurm-wlm 24.11.5
            if version_tuple(told.split()[1])[:2] == RELEASE:
                return
    with tempfile.TemporaryDirectory() as folder:
        fetch(Path(folder), prefix)


if __name__ == "__main__":
    main()
