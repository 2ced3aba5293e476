"""The Debian package: what of the checkout goes where. tests/boot installs and uses it."""

import gzip
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from phosd.engine.node.suspended import Register, Suspended
from phosd.engine.system import procfs
from phosd.service.config import json_schema
from phosd.service.jobs.job_log import JOB_ENDED
from tests.support.scripts import load

ROOT = Path(__file__).parents[2]
load("install_criu")
SUITES = load("deb_suites")


@pytest.fixture
def a_sleeper() -> Iterator[int]:
    """A process that does nothing."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


@pytest.fixture
def build_deb(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of the script, whose folder Python puts first when it is run."""
    monkeypatch.syspath_prepend(ROOT / "packaging")
    return runpy.run_path(str(ROOT / "packaging/build_deb.py"))


def test_every_file_for_systemd_has_its_place(build_deb: dict[str, Any], tmp_path: Path) -> None:
    units = build_deb["add_units"](tmp_path)
    installed = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert installed == {path.name for path in (ROOT / "systemd").iterdir()}
    folders = {path.name: path.parent.name for path in tmp_path.rglob("*") if path.is_file()}
    assert folders["org.phos.conf"] == "system.d"
    assert folders["org.phos.service"] == "system-services"
    assert folders["phosd.service"] == "system"
    assert "phosd.service" in units["ENABLED"].split()
    assert "'phosd-mover@*.service'" in units["UNITS"].split()
    assert "'run-phos-hook.mount'" not in units["UNITS"].split(), "programs see it"


def test_what_only_tests_run_is_not_in_it(build_deb: dict[str, Any]) -> None:
    own = build_deb["own_files"]()
    folders = {path.parent for path in own}
    model = build_deb["FOR_TESTS"]
    assert (ROOT / model / "launch_verdict.py").exists()
    assert model not in folders and model.parent in folders
    assert Path("phosd/service/main.py") in own
    assert not [path for path in own if "native" in path.parts]


def test_the_header_is_where_compilers_look(build_deb: dict[str, Any], tmp_path: Path) -> None:
    build_deb["add_for_others"](tmp_path)
    installed = tmp_path / "usr/include/phos.h"
    assert installed.read_bytes() == (ROOT / "phosd/include/phos.h").read_bytes()


def test_the_journal_explains_the_end_of_a_job(tmp_path: Path) -> None:
    catalog = tmp_path / "usr/lib/systemd/catalog"
    catalog.mkdir(parents=True)
    shutil.copy(ROOT / "systemd/phosd.catalog", catalog)
    (tmp_path / "var/lib/systemd/catalog").mkdir(parents=True)

    def journalctl(*words: str) -> str:
        command = ["journalctl", f"--root={tmp_path}", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    journalctl("--update-catalog")
    said = journalctl("--dump-catalog", JOB_ENDED)
    assert "Subject: Job @PHOS_JOB@ of phosd has ended" in said
    assert set(re.findall(r"@(\w+)@", said)) == {"PHOS_JOB"}, "a field that each entry has"


def test_what_units_and_scripts_of_the_package_run_exists() -> None:
    """They name files and modules by paths that no import checks."""
    texts = [*(ROOT / "systemd").iterdir(), *(ROOT / "packaging/debian").iterdir()]
    named: set[str] = set()
    for text in (path.read_text() for path in texts):
        named |= {*re.findall(r"/usr/lib/phos/python/(\S+\.py)", text)}
        modules = re.findall(r"(?:-m |from |import )(phosd(?:\.\w+)*)", text)
        named |= {str(Path(*module.split("."))) for module in modules}
    assert {"phosd/engine/system/unsandboxed.py", "phosd/engine/mover"} <= named
    for path in named:
        places = (ROOT / path, ROOT / f"{path}.py", ROOT / path / "__main__.py")
        assert any(place.is_file() for place in places), path


def test_a_file_that_has_no_place_is_named(build_deb: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "systemd").mkdir()
    (tmp_path / "systemd/phosd.strange").touch()
    build_deb["add_units"].__globals__["ROOT"] = tmp_path
    with pytest.raises(SystemExit, match=r"phosd\.strange"):
        build_deb["add_units"](tmp_path / "root")


@pytest.mark.parametrize(
    ("release", "suffix"),
    [
        ({"ID": "debian", "VERSION_ID": "12"}, "~deb12u1"),
        ({"ID": "debian", "VERSION_ID": "13"}, "~deb13u1"),
        ({"ID": "ubuntu", "VERSION_ID": "24.04"}, "~ubuntu24.04u1"),
        ({"ID": "debian", "VERSION_CODENAME": "forky"}, ""),
    ],
)
def test_versions_tell_releases_apart(
    build_deb: dict[str, Any], release: dict[str, str], suffix: str
) -> None:
    assert SUITES.Suite("of a test", release, (3, 11), (2, 36)).suffix == suffix


def test_a_newer_release_has_a_newer_version_and_a_newer_phosd_too() -> None:
    ordered = ("0.1.0~deb12u1", "0.1.0~deb13u1", "0.1.0~ubuntu24.04u1", "0.1.0", "0.1.1~deb12u1")
    for older, newer in pairwise(ordered):
        subprocess.run(["dpkg", "--compare-versions", older, "lt", newer], check=True)


def test_for_another_release_it_depends_on_the_python_there(
    build_deb: dict[str, Any], tmp_path: Path
) -> None:
    noble = SUITES.OTHERS["noble"]
    assert noble.suffix == "~ubuntu24.04u1"
    build_deb["add_control"](tmp_path, "1.2", "amd64", {}, noble)
    control = (tmp_path / "DEBIAN/control").read_text()
    assert "\nDepends: python3 (>= 3.12~), python3 (<< 3.13~), libc6 (>= 2." in control
    with gzip.open(tmp_path / "usr/share/doc/phosd/changelog.gz", "rt") as file:
        assert file.readline() == "phosd (1.2) noble; urgency=medium\n"


def test_this_release_is_as_the_table_has_it() -> None:
    own = SUITES.own_suite()
    if (told := SUITES.OTHERS.get(own.codename)) is not None:
        assert told.release.items() <= own.release.items()
        assert told.glibc == own.glibc


def test_no_release_with_an_older_c_library_gets_what_is_built_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.41"))
    SUITES.require_fit(SUITES.OTHERS["trixie"])
    with pytest.raises(SystemExit, match=r"glibc 2\.41, and noble has 2\.39; build .* older"):
        SUITES.require_fit(SUITES.OTHERS["noble"])


@pytest.mark.parametrize(("python", "lacks"), [("3.11", False), ("3.12", True)])
def test_what_an_import_needs_on_the_other_python_must_be_there(
    tmp_path: Path, python: str, lacks: bool
) -> None:
    folder = tmp_path / "one-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: one\nVersion: 1.0\n"
        "Requires-Dist: Two.Three; python_version >= '3.12'\nRequires-Dist: four; extra == 'x'\n"
    )
    if lacks:
        with pytest.raises(SystemExit, match=r"one needs Two\.Three.* with Python 3\.12"):
            SUITES.require_complete(tmp_path, python)
        (tmp_path / "two_three-1.0.dist-info").mkdir()
        metadata = "Metadata-Version: 2.1\nName: two-three\nVersion: 1.0\n"
        (tmp_path / "two_three-1.0.dist-info/METADATA").write_text(metadata)
    SUITES.require_complete(tmp_path, python)


def test_who_distributes_it_is_its_maintainer(
    build_deb: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DEBFULLNAME", "Node Team")
    monkeypatch.setenv("DEBEMAIL", "nodes@example.org")
    build_deb["add_control"](tmp_path, "1.2", "amd64", {}, SUITES.own_suite())
    control = (tmp_path / "DEBIAN/control").read_text()
    assert "\nMaintainer: Node Team <nodes@example.org>\n" in control
    with gzip.open(tmp_path / "usr/share/doc/phosd/changelog.gz", "rt") as file:
        assert "\n -- Node Team <nodes@example.org>  " in file.read()


def test_the_configuration_names_its_schema(build_deb: dict[str, Any], tmp_path: Path) -> None:
    build_deb["add_control"](tmp_path, "1.2", "amd64", {}, SUITES.own_suite())
    first, _, _ = (tmp_path / "etc/phos/phosd.toml").read_text().partition("\n")
    schema = tmp_path / first.removeprefix("#:schema file:///")
    assert json.loads(schema.read_text()) == json_schema()


def test_maintainer_scripts_are_whole(build_deb: dict[str, Any], tmp_path: Path) -> None:
    units = build_deb["add_units"](tmp_path)
    build_deb["add_control"](tmp_path, "1.2", "amd64", units, SUITES.own_suite())
    for name in ("postinst", "prerm", "postrm"):
        script = tmp_path / "DEBIAN" / name
        assert script.stat().st_mode & 0o777 == 0o755
        assert re.search(r"@[A-Z_]+@", script.read_text()) is None
        subprocess.run(["sh", "-n", script], check=True)
    control = (tmp_path / "DEBIAN/control").read_text()
    assert re.search(r"(?m)^Version: 1\.2$", control)
    assert re.search(r"(?m)^Depends: python3 \(>= 3\.\d+~\), python3 \(<< 3\.\d+~\), ", control)
    conffiles = (tmp_path / "DEBIAN/conffiles").read_text().split()
    assert all((tmp_path / path[1:]).is_file() for path in conffiles)


def test_the_documents_link_to_what_is_installed(build_deb: dict[str, Any], tmp_path: Path) -> None:
    build_deb["add_documents"](tmp_path)
    pages = list(tmp_path.rglob("*.md"))
    assert {"README.md", "dbus.md"} <= {page.name for page in pages}
    for page in pages:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_it_is_not_removed_while_a_program_is_suspended(
    build_deb: dict[str, Any], tmp_path: Path, a_sleeper: int
) -> None:
    run, bin_, asked = tmp_path / "run", tmp_path / "bin", tmp_path / "asked"
    for folder in (run / "systemd/system", run / "phos", bin_):
        folder.mkdir(parents=True)
    build_deb["put"](bin_ / "systemctl", f'#!/bin/sh\necho "$@" >>{asked}\n', 0o755)
    script = (ROOT / "packaging/debian/prerm").read_text().replace("@UNITS@", "phosd-mover")
    for real, fake in (
        ("/run/", f"{run}/"),
        ("/usr/bin/python3", sys.executable),
        ("/usr/lib/phos/python", str(ROOT)),
        ("py3clean -p phosd", f"echo cleaned >>{asked}"),
    ):
        script = script.replace(real, fake)

    def remove() -> subprocess.CompletedProcess[str]:
        path = {"PATH": f"{bin_}:{os.environ['PATH']}"}
        words = ["sh", "-c", script, "prerm", "remove"]
        return subprocess.run(words, env=path, capture_output=True, text=True)

    identity = procfs.process_id(a_sleeper)
    assert identity is not None
    entry = Suspended(
        image="20261001T101112-abcd",
        pid=a_sleeper,
        start_time=identity[1],
        owner=0,
        command=("train",),
        since=0.0,
        where="memory",
        stored_bytes=1,
        device_bytes={0: 1},
        processes=(identity,),
    )
    Register(run / "phos").write(entry)
    refused = remove()
    assert refused.returncode != 0
    assert f"programs are suspended: {a_sleeper}. Bring each back" in refused.stderr
    assert "`phos resume PID`" in refused.stderr
    assert not asked.exists(), "nothing is stopped"
    Register(run / "phos").remove(entry)
    assert remove().returncode == 0
    did = asked.read_text().splitlines()
    assert did[0].endswith("stop phosd.service")
    assert did[-1] == "cleaned", "what postinst has compiled goes as well"
