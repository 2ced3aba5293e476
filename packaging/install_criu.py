"""Unpack a CRIU that works on new kernels into a prefix of its own, leaving the system as it is.

Older Debian releases ship a CRIU that fails on current kernels (dumping sockets needs 4.2 from
Linux 6.16 on). This takes the package and its libraries from a newer suite of the archive that the
machine already uses: mirror and keyring come from its apt configuration, and apt checks the
signatures. ``<prefix>/criu`` then runs with ``<prefix>/lib``, its own C library included.
``<prefix>/packages.json`` tells which file came from which package, and ``<prefix>/copyright`` has
their copyright files.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SUITES = ("testing", "unstable")
MINIMUM = (4, 2)
PINNED_VERSION = "4.2.1-1"
PINNED_SHA256 = {
    "amd64": "4039578de7dd6480964754c1348416f0f0658fba3eadaa918bfe43e9a5fb9b04",
}


@dataclass(frozen=True)
class Archive:
    """A Debian archive that the machine trusts."""

    uri: str
    keyring: Path


def run(command: Sequence[str | Path], what: str, folder: Path | None = None) -> str:
    """Run ``command`` silently, in ``folder``; on failure stop with ``what`` and its last lines."""
    done = subprocess.run(
        [str(word) for word in command],
        text=True,
        capture_output=True,
        check=False,
        cwd=folder,
        env={**os.environ, "LC_ALL": "C"},
    )
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        sys.exit(f"{what} failed ({command[0]} returned {done.returncode}):\n{tail}")
    return done.stdout


def debian_archive() -> Archive:
    """Return the archive of the machine's own Debian release."""
    codename = os_release().get("VERSION_CODENAME", "stable")
    known = ["Origin: Debian", f"Codename: {codename}"]  # other archives use the codename too
    unread = ["--no-release-info", f"Release: {codename}"]  # before the first `apt-get update`
    for choice in (known, unread):
        listing = run(
            ["apt-get", "indextargets", "Identifier: Packages", "Component: main", *choice],
            "reading the apt configuration",
        )
        first = listing.split("\n\n")[0].splitlines()
        target = dict(line.split(": ", 1) for line in first if ": " in line)
        if target:
            source = Path(target["Sourcesentry"].rsplit(":", 1)[0])
            return Archive(target["Repo-URI"], keyring_of(source))
    sys.exit(
        f"apt has no source for Debian {codename}, so CRIU cannot be fetched from it; "
        "install CRIU 4.2 or newer and name it with PHOS_CRIU=/path/to/criu"
    )


def os_release() -> dict[str, str]:
    lines = Path("/etc/os-release").read_text().splitlines()
    return {key: value.strip('"') for key, _, value in (line.partition("=") for line in lines)}


def keyring_of(source: Path) -> Path:
    """Return the keyring that ``source`` names, else that of the package debian-archive-keyring."""
    named = re.findall(r"(?im)signed-by[:=]\s*(/[^\s\]]+)", source.read_text())
    package = [f"/usr/share/keyrings/debian-archive-keyring.{suffix}" for suffix in ("pgp", "gpg")]
    for keyring in (*named, *package):
        if Path(keyring).is_file():
            return Path(keyring)
    sys.exit("the keyring of the Debian archive is missing; install debian-archive-keyring")


class PrivateApt:
    """Runs apt with its own lists, cache and sources in ``folder``; installs nothing."""

    def __init__(self, folder: Path, archive: Archive, suite: str, kind: str = "deb") -> None:
        self._folder = folder
        self._archives = folder / "cache/archives"
        for part in ("state", "lists/partial", "cache/archives/partial"):
            (folder / part).mkdir(parents=True)
        (folder / "status").touch()
        (folder / "suite.sources").write_text(
            f"Types: {kind}\nURIs: {archive.uri}\nSuites: {suite}\nComponents: main\n"
            f"Signed-By: {archive.keyring}\n"
        )
        settings = {
            "Dir::State": folder / "state",
            "Dir::State::status": folder / "status",
            "Dir::State::lists": folder / "lists",
            "Dir::Cache": folder / "cache",
            "Dir::Etc::sourcelist": folder / "suite.sources",
            "Dir::Etc::sourceparts": "/dev/null",
            "Dir::Etc::preferencesparts": "/dev/null",
            "APT::Sandbox::User": "root",
            "APT::Update::Post-Invoke::": "",
        }
        self._options = [f"-o{key}={value}" for key, value in settings.items()]

    def update(self) -> None:
        run(["apt-get", *self._options, "-qq", "update"], "reading the newer suite's lists")

    def candidate(self, package: str) -> str:
        """Return the version that would be fetched, or an empty string."""
        policy = run(["apt-cache", *self._options, "policy", package], "asking for a version")
        found = re.search(r"Candidate: (\S+)", policy)
        return found.group(1) if found and found.group(1) != "(none)" else ""

    def download(self, package: str) -> list[Path]:
        """Fetch ``package`` and its dependencies; apt checks signatures and hashes."""
        words = ["install", "-y", "-qq", "--download-only", "--no-install-recommends", package]
        run(["apt-get", *self._options, *words], f"fetching {package}")
        return sorted(self._archives.glob("*.deb"))

    def source(self, package: str) -> Path:
        """Fetch the source of ``package`` as its authors have published it (``kind`` deb-src)."""
        words = ["source", "-qq", "--download-only", "--tar-only", package]
        run(["apt-get", *self._options, *words], f"fetching {package}'s source", self._folder)
        (found,) = self._folder.glob(f"{package}_*.orig.tar.*[!c]")
        return found


def fetch(folder: Path, prefix: Path) -> str:
    """Fetch CRIU into ``prefix`` (which must not exist). Returns its package version."""
    archive = debian_archive()
    for suite in SUITES:
        apt = PrivateApt(folder / suite, archive, suite)
        apt.update()
        version = apt.candidate("criu")
        if version_tuple(version) >= MINIMUM:
            packages = apt.download("criu")
            check_pin(packages, version)
            unpack(packages, folder / "root", prefix)
            return version
    wanted = ".".join(map(str, MINIMUM))
    sys.exit(f"the archive has no CRIU {wanted} in {' or '.join(SUITES)}; see PHOS_CRIU")


def version_tuple(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("-")[0]))


def check_pin(packages: Sequence[Path], version: str) -> None:
    """Check the package against its pinned hash; for a newer version apt's own check must do."""
    if version != PINNED_VERSION:
        note = f"note: the archive has CRIU {version}; {PINNED_VERSION} was tested"
        print(note, file=sys.stderr)
        return
    (package,) = (path for path in packages if path.name.startswith("criu_"))
    architecture = package.stem.rsplit("_", 1)[1]
    expected = PINNED_SHA256.get(architecture)
    found = hashlib.sha256(package.read_bytes()).hexdigest()
    if expected not in (None, found):
        sys.exit(
            f"{package.name} has the SHA-256 {found}, not the pinned {expected}; not installed"
        )


def unpack(packages: Sequence[Path], root: Path, prefix: Path) -> None:
    """Extract only the binary and the libraries from the packages, and whose they are."""
    (prefix / "lib").mkdir(parents=True)
    for package in packages:
        run(["dpkg-deb", "--extract", package, root], f"unpacking {package.name}")
    write_origins(
        prefix, {package: take_files(package, root, prefix) for package in packages}, root
    )


def write_origins(prefix: Path, taken: Mapping[Path, Sequence[str]], root: Path) -> None:
    """Write which of the files in ``prefix`` are from which of the packages that are unpacked in
    ``root``, and the copyright files of these.
    """
    (prefix / "copyright").mkdir(parents=True)
    used: list[dict[str, str | list[str]]] = []
    for package, files in taken.items():
        if files:
            described = describe(package)
            used.append({**described, "files": [*files]})
            name = described["name"]
            copyright_file = root / "usr/share/doc" / name / "copyright"  # or a link to another's
            shutil.copy2(copyright_file, prefix / "copyright" / name)
    (prefix / "packages.json").write_text(json.dumps(used, indent=1) + "\n")


def packed_files(package: Path, root: Path) -> list[Path]:
    """Return the files of a package that is unpacked in ``root``."""
    listed = run(["dpkg-deb", "--contents", package], f"reading {package.name}").splitlines()
    return [root / line.split(maxsplit=5)[5].partition(" -> ")[0] for line in listed]


def take_files(package: Path, root: Path, prefix: Path) -> list[str]:
    """Copy the binary and the libraries of a package that is unpacked in ``root``; their names."""
    taken = []
    for path in packed_files(package, root):
        if path == root / "usr/sbin/criu":
            place = prefix / "criu"
        elif path.match("usr/lib/*-linux-gnu/*.so*") and path.parent.parent.parent == root / "usr":
            place = prefix / "lib" / path.name
        else:
            continue
        shutil.copy2(path, place, follow_symlinks=False)
        taken.append(str(place.relative_to(prefix)))
    return sorted(taken)


def describe(package: Path) -> dict[str, str]:
    """Return a package's name and version, and the source package that it was built from."""
    fields = ("Package", "Version", "Source")
    said = run(["dpkg-deb", "--field", package, *fields], f"reading {package.name}")
    told = dict(line.split(": ", 1) for line in said.splitlines())
    # `Source` is there only if it differs, with a version in brackets if that differs, too.
    source, _, version = told.get("Source", told["Package"]).partition(" ")
    return {
        "name": told["Package"],
        "source": source,
        "version": version.strip("()") or told["Version"],
    }


def use_libraries(program: Path, loader: Path, libraries: str) -> None:
    """Make a program use another loader and other libraries (an rpath holds for what these load).

    In this order: patchelf 0.18 makes a program that is not relocatable, as Debian's Python, one
    that crashes when it sets the path after the loader.
    """
    run(["patchelf", "--force-rpath", "--set-rpath", libraries, program], "setting the path")
    run(["patchelf", "--set-interpreter", loader, program], "setting the loader")


def bind_to_prefix(prefix: Path, home: Path) -> Path:
    """Set the binary's loader and library path to ``home``, the folder's place at run time:
    ``prefix`` itself (again, if it was moved), or where a package installs it. Returns the loader.
    """
    binary = prefix / "criu"
    (loader,) = (prefix / "lib").glob("ld-linux*")
    wanted = home / "lib" / loader.name
    if not shutil.which("patchelf"):
        sys.exit("patchelf is missing; install it (apt-get install patchelf) and try again")
    now = run(["patchelf", "--print-interpreter", binary], "reading the binary").strip()
    if now != str(wanted):
        use_libraries(binary, wanted, str(wanted.parent))
    return loader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prefix", type=Path, help="folder for CRIU and its libraries")
    parser.add_argument("--home", type=Path, help="where that folder will be when CRIU runs")
    args = parser.parse_args()
    prefix: Path = args.prefix.resolve()
    if not (prefix / "criu").exists():
        with tempfile.TemporaryDirectory(prefix="criu-") as scratch:
            fresh = prefix.with_name(prefix.name + ".new")
            shutil.rmtree(fresh, ignore_errors=True)
            version = fetch(Path(scratch), fresh)
            (fresh / "version").write_text(version + "\n")
            shutil.rmtree(prefix, ignore_errors=True)
            fresh.rename(prefix)
    loader = bind_to_prefix(prefix, args.home or prefix)
    # Run it by its loader, as it may not be in its final place yet.
    version = run(
        [loader, "--library-path", prefix / "lib", prefix / "criu", "--version"], "starting CRIU"
    )
    print(version.splitlines()[0])


if __name__ == "__main__":
    main()
