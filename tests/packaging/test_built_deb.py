"""The Debian package as it is built: what Debian's checker finds, and whose each file is."""

import fnmatch
import gzip
import platform
import re
import subprocess
from pathlib import Path

import pytest

from tests.packaging.built import only_when_built, the_only
from tests.support.scripts import load

pytestmark = only_when_built

OTHERS = tuple(
    f"usr/lib/phos/{folder}/" for folder in ("python", "criu", "criu_plugin", "runtime_plugin")
)
"""Where files are that others have written; phosd's own package is in the first, too."""
OWN_GLIBC = load("install_criu").version_tuple(platform.libc_ver()[1])
NOBLE = load("deb_suites").OTHERS["noble"]


@pytest.fixture(scope="module")
def deb() -> Path:
    return the_only("phosd_*.deb", "deb")


@pytest.fixture(scope="module")
def tree(deb: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the package, where they are installed, in a folder."""
    folder = tmp_path_factory.mktemp("deb")
    subprocess.run(["dpkg-deb", "--extract", str(deb), str(folder)], check=True)
    return folder


def test_lintian_finds_no_error(deb: Path) -> None:
    command = ["lintian", "--allow-root", "--show-overrides", str(deb)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout.splitlines()
    assert [line for line in said if line.startswith("E:")] == [], done.stdout
    overridden = [line for line in said if line.startswith("O: phosd: embedded-library")]
    assert overridden, f"it has not looked: {done.stdout}{done.stderr}"


def test_its_copyright_file_names_whose_every_file_is(tree: Path) -> None:
    text = (tree / "usr/share/doc/phosd/copyright").read_text()
    owners = {}
    for paragraph in re.split(r"\n\n", text):
        fields = dict(re.findall(r"(?m)^(\w+): ?((?:.|\n )*)", paragraph))
        if "Files" in fields:
            assert fields["Copyright"].strip() and fields["License"].strip(), paragraph[:200]
            assert len(fields["License"].splitlines()) > 1, f"no terms: {paragraph[:200]}"
            for pattern in fields["Files"].split():
                owners[pattern] = fields.get("Comment", "phosd")
    matched: set[str] = set()
    for path in (str(each.relative_to(tree)) for each in tree.rglob("*") if not each.is_dir()):
        (*_, pattern) = (each for each in owners if fnmatch.fnmatch(path, each))
        matched.add(pattern)
        if path.startswith(OTHERS) and not path.startswith("usr/lib/phos/python/phosd/"):
            own = path == "usr/lib/phos/criu/version"  # written by phosd's build
            assert (pattern == "*") is own, f"{path} is nobody's"
    assert matched == set(owners), "each pattern is about a file"
    for name in ("criu", "libc6", "libgmp10", "cuda-bindings", "msgspec", "textual", "GCC"):
        assert any(owner.startswith(f"{name} ") for owner in owners.values()), name


def test_it_has_no_compiled_python_and_the_interfaces_of_the_bus(tree: Path) -> None:
    assert list(tree.rglob("*.py")), "the modules themselves"
    assert list(tree.rglob("__pycache__")) == []
    interfaces = {path.stem for path in (tree / "usr/share/dbus-1/interfaces").iterdir()}
    assert {"org.phos.Manager1", "org.phos.Job1"} <= interfaces


def test_c_programs_find_their_header_and_others_their_module(tree: Path) -> None:
    source = tree.parent / "saving.c"
    source.write_text("#include <phos.h>\nint main(void) { return phos_checkpoint(PHOS_RUN); }\n")
    command = ["cc", "-Wall", "-Werror", "-I", str(tree / "usr/include"), "-fsyntax-only"]
    subprocess.run([*command, str(source)], check=True)
    assert (tree / "usr/lib/phos/python/phosd/program.py").exists()


def test_its_changelog_begins_with_its_version(deb: Path, tree: Path) -> None:
    field = ["dpkg-deb", "--field", str(deb), "Version"]
    version = subprocess.run(field, capture_output=True, text=True, check=True).stdout.strip()
    changelog = tree / "usr/share/doc/phosd/changelog.gz"
    with gzip.open(changelog, "rt") as file:
        assert file.readline().startswith(f"phosd ({version}) ")


@pytest.mark.skipif(
    NOBLE.glibc < OWN_GLIBC,
    reason="this machine's C library is newer than Ubuntu 24.04's",
)
def test_that_for_ubuntu_fits_its_python_and_its_c_library(tmp_path: Path) -> None:
    package = the_only("noble/phosd_*.deb", "deb SUITE=noble")
    subprocess.run(["dpkg-deb", "--extract", str(package), str(tmp_path)], check=True)
    home = tmp_path / "usr/lib/phos"
    libraries = [path for path in home.rglob("*.so*") if home / "criu" not in path.parents]
    assert home / "shipped/libphos_hook.so" in libraries
    pythons = {found for path in libraries for found in re.findall(r"\.cpython-(\d+)-", path.name)}
    assert pythons == {"312"}
    command = ["objdump", "--private-headers", *map(str, libraries)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needed = {(int(major), int(minor)) for major, minor in re.findall(r" GLIBC_(\d+)\.(\d+)", said)}
    assert (2, 17) < max(needed) <= NOBLE.glibc
