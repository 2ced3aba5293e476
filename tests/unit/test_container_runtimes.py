"""What `phos setup-container-runtime` writes for each runtime, and takes away again."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from phosd.cli import setup_container_runtime as setup
from phosd.cli.main import main


@pytest.fixture
def etc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty /etc."""
    for name in ("DESCRIPTION", "DOCKER", "CONTAINERD", "CONTAINERD_PART"):
        monkeypatch.setattr(setup, name, tmp_path / getattr(setup, name).relative_to("/etc"))
    for_criu = tuple(tmp_path / path.relative_to("/etc") for path in setup.CRIU)
    monkeypatch.setattr(setup, "CRIU", for_criu)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return tmp_path


def run(*words: str) -> dict[str, Any]:
    told = CliRunner().invoke(main, ["--json", "setup-container-runtime", *words])
    assert told.exit_code == 0, told.output
    found: dict[str, Any] = json.loads(told.stdout)
    return found


def files(etc: Path) -> dict[str, str]:
    return {
        str(each.relative_to(etc)): each.read_text() for each in etc.rglob("*") if each.is_file()
    }


@pytest.mark.parametrize("runtime", ["podman", "crio", "docker", "containerd"])
def test_undone_nothing_is_left(etc: Path, runtime: str) -> None:
    """But for containerd's settings, which only import what is there."""
    assert run(runtime)["changed"]
    (device,) = json.loads(setup.DESCRIPTION.read_text())["devices"]
    edits = device["containerEdits"]
    (hook,) = [word for word in edits["env"] if word.startswith("LD_PRELOAD=")]
    assert hook.partition("=")[2] == edits["mounts"][0]["containerPath"]
    assert Path(edits["mounts"][0]["hostPath"]).is_file()
    run(runtime, "--undo")
    kept = {name: json.loads(text) for name, text in files(etc).items() if name.endswith(".json")}
    assert kept in ({}, {"docker/daemon.json": {}})
    assert not setup.CONTAINERD_PART.exists()
    assert not any(path.exists() for path in setup.CRIU)


@pytest.mark.parametrize(
    ("version", "features", "told"),
    [
        ("1.8.1", "+SYSTEMD +YAJL", "is built without CRIU"),
        ("1.21", "+SYSTEMD +CRIU", "hands no settings on to its CRIU"),
        ("1.26", "+SYSTEMD +CRIU", ""),
    ],
)
def test_a_crun_that_does_not_tell_its_criu(
    version: str, features: str, told: str, etc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crun = etc / "crun"
    crun.write_text(f"#!/bin/sh\necho 'crun version {version}'\necho '{features}'\n")
    crun.chmod(0o755)
    monkeypatch.setenv("PATH", str(etc), prepend=os.pathsep)
    assert [told in todo for todo in run("podman")["todo"]] == ([True] if told else [])
    assert not any("crun" in todo for todo in run("docker")["todo"])


def test_criu_loads_one_plugin(etc: Path) -> None:
    """What is there already stays, and it is said what it must say."""
    setup.CRIU[0].parent.mkdir()
    setup.CRIU[0].write_text("libdir /usr/lib/criu\n")
    told = run("podman")
    assert any("libdir" in todo and str(setup.CRIU[0]) in todo for todo in told["todo"])
    (folder,) = setup.CRIU[1].read_text().split()[1:]
    assert [path.name for path in Path(folder).iterdir()] == ["phos_plugin.so"]
    run("podman", "--undo")
    assert setup.CRIU[0].read_text() == "libdir /usr/lib/criu\n"
    assert not setup.CRIU[1].exists()


def test_what_others_have_set_stays(etc: Path) -> None:
    setup.DOCKER.parent.mkdir()
    setup.DOCKER.write_text('{"data-root": "/big", "features": {"buildkit": true}}')
    setup.DOCKER.chmod(0o600)
    changed = [setup.DESCRIPTION, *setup.CRIU, setup.DOCKER]
    assert run("docker")["changed"] == list(map(str, changed))
    assert json.loads(setup.DOCKER.read_text()) == {
        "data-root": "/big",
        "features": {"buildkit": True, "cdi": True},
    }
    assert setup.DOCKER.stat().st_mode & 0o777 == 0o600
    run("podman", "--undo")
    assert setup.DESCRIPTION.exists(), "Docker needs it"
    run("docker", "--undo")
    assert json.loads(setup.DOCKER.read_text())["features"] == {"buildkit": True}
    assert not setup.DESCRIPTION.exists()


def test_settings_with_comments_are_left_to_their_owner(etc: Path) -> None:
    setup.CONTAINERD.parent.mkdir()
    setup.CONTAINERD.write_text("# ours\nversion = 2\n")
    assert any("imports = " in todo for todo in run("containerd")["todo"])
    assert setup.CONTAINERD.read_text() == "# ours\nversion = 2\n"
    setup.CONTAINERD.write_text(f'imports = ["{setup.CONTAINERD_PART.parent}/*.toml"]\n')
    assert not any("imports = " in todo for todo in run("containerd")["todo"])


def test_settings_that_are_broken_are_named(etc: Path) -> None:
    setup.DOCKER.parent.mkdir()
    setup.DOCKER.write_text("{")
    told = CliRunner().invoke(main, ["setup-container-runtime", "docker"])
    assert told.exit_code != 0
    assert str(setup.DOCKER) in told.output
    assert setup.DOCKER.read_text() == "{"
    assert not setup.DESCRIPTION.exists()


def test_only_root(etc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    told = CliRunner().invoke(main, ["setup-container-runtime", "podman"])
    assert told.exit_code == 3
    assert not files(etc)
