"""``phos setup-analysis``: pip fetches the tools, known by their digests, or nothing changes."""

import hashlib
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from phosd import installation
from phosd.cli.commands import setup_analysis as setup
from phosd.cli.main import main
from phosd.engine.analysis.code import tools
from phosd.engine.analysis.code.tools import Tool
from phosd.installation import Kind
from tests.support.checkout import ROOT
from tests.system.cli.test_client import lines
from tests.system.cli.test_json import check

RUNS = "#!/bin/sh\necho release 13.5\n"


def wheel(folder: Path, source: setup.Source, program: str) -> setup.Source:
    """Make a wheel whose tool is a script; return the source, with its digest."""
    name = source.package.replace("-", "_")
    path = folder / f"{name}-{source.version}-py3-none-any.whl"
    information = f"{name}-{source.version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"nvidia/cu13/bin/{source.tool.value}", program)
        archive.writestr("nvidia/cu13/bin/another", "")
        archive.writestr(f"{information}/licenses/License.txt", "NVIDIA's")
        archive.writestr(
            f"{information}/METADATA",
            f"Metadata-Version: 2.1\nName: {source.package}\nVersion: {source.version}\n"
            "Requires-Dist: a-package-that-nobody-has\n",
        )
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", "")
    return replace(source, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder from which pip takes wheels, and no network. phosd is a package of the system."""
    folder = tmp_path / "offered"
    folder.mkdir()
    monkeypatch.setattr(tools, "ADDED", tmp_path / "analysis")
    monkeypatch.setattr(installation, "kind", lambda: Kind.PACKAGE)
    monkeypatch.setattr(setup, "SOURCES", [wheel(folder, each, RUNS) for each in setup.SOURCES])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_the_tools_are_put_in_place_with_their_licence(offered: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["setup-analysis", "--json"])
    assert done.exit_code == 0, done.output
    check(lines(done.stdout), "`phos setup-analysis`")
    assert {path.name for path in tools.ADDED.iterdir()} == {
        *("nvdisasm", "nvdisasm.License.txt", "ptxas", "ptxas.License.txt")
    }
    assert {path.name for path in tmp_path.iterdir()} == {"offered", "analysis"}
    for tool in Tool:
        assert (tools.ADDED / tool.value).stat().st_mode & 0o7777 == 0o755
        assert tools.ADDED.stat().st_mode & 0o7777 == 0o755
    for deleted in ([str(tools.ADDED)], []):
        done = CliRunner().invoke(main, ["setup-analysis", "--undo"])
        assert done.stdout == f"deleted       {', '.join(deleted) or 'nothing'}\n"
        assert not tools.ADDED.exists()


def test_what_has_another_digest_is_not_installed(offered: Path, tmp_path: Path) -> None:
    wheel(offered, setup.SOURCES[1], "#!/bin/sh\n")
    tools.ADDED.mkdir()
    (tools.ADDED / "nvdisasm").write_text("an older one")
    done = CliRunner().invoke(main, ["setup-analysis"])
    assert done.exit_code == 1 and "pip could not fetch the tools" in done.stderr, done.output
    assert "phos setup-analysis --help" in done.stderr
    assert [path.read_text() for path in tools.ADDED.iterdir()] == ["an older one"]
    assert {path.name for path in tmp_path.iterdir()} == {"offered", "analysis"}


def test_what_does_not_run_is_not_installed(offered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [wheel(offered, each, "#!/bin/sh\nexit 3\n") for each in setup.SOURCES]
    monkeypatch.setattr(setup, "SOURCES", broken)
    done = CliRunner().invoke(main, ["setup-analysis"])
    assert done.exit_code == 6 and "nvidia-cuda-nvdisasm==13.5.37 does not run" in done.stderr
    assert not tools.ADDED.exists()


def test_each_kind_of_installation_has_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    assert installation.kind() is Kind.CHECKOUT
    done = CliRunner().invoke(main, ["setup-analysis"])
    assert done.exit_code == 6 and f"`make setup` in {ROOT}" in done.stderr
    ways = []
    for kind in Kind:
        monkeypatch.setattr(installation, "kind", lambda kind=kind: kind)
        ways.append(tools.how_to_get())
    assert ways[0] == "`phos setup-analysis` as root"
    assert ways[1] == f"`make setup` in {ROOT}"
    assert ways[2].endswith("-m pip install 'phosd[analysis]'`")


def test_the_versions_are_those_of_the_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {each for each in project["optional-dependencies"]["analysis"] if "nvidia" in each}
    for source in setup.SOURCES:
        fitting = {source.requirement, f"{source.package}=={source.version.rpartition('.')[0]}.*"}
        assert len(fitting & wanted) == 1, source
    assert len(wanted) == len(setup.SOURCES) == len(Tool)


def test_the_tool_that_was_added_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: "/nonexistent")
    monkeypatch.setattr(tools, "ADDED", tmp_path)
    (tmp_path / "nvdisasm").touch()
    assert tools.find(Tool.NVDISASM) == tmp_path / "nvdisasm"
