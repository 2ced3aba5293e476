"""What `phos setup-container-runtime` writes for each runtime, and takes away again."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from phosd.cli.commands import setup_container_runtime as setup
from phosd.cli.main import main


@pytest.fixture
def etc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty /etc."""
    for name in ("DESCRIPTION", "DOCKER", "CONTAINERD"):
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
    assert run(runtime)["changed"]
    (device,) = json.loads(setup.DESCRIPTION.read_text())["devices"]
    edits = device["containerEdits"]
    (hook,) = [word for word in edits["env"] if word.startswith("LD_PRELOAD=")]
    assert hook.partition("=")[2] == edits["mounts"][0]["containerPath"]
    assert Path(edits["mounts"][0]["hostPath"]).is_file()
    run(runtime, "--undo")
    kept = {name: json.loads(text) for name, text in files(etc).items() if name.endswith(".json")}
    assert kept in ({}, {"docker/daemon.json": {}})
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


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("1.6.20~ds1 1.6.20~ds1-1+deb12u3", "get the hook by volumes"),
        ("1.7.24", "put enable_cdi = true"),
        ("/v2 2.1.9+unknown", ""),
    ],
)
def test_containerds_settings_are_left_to_their_owner(
    version: str, told: str, etc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that 1.7 imports would replace what the node has for the CRI."""
    (etc / "bin").mkdir()
    program = etc / "bin/containerd"
    program.write_text(f"#!/bin/sh\necho 'containerd github.com/containerd/containerd {version}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(etc / "bin"), prepend=os.pathsep)
    setup.CONTAINERD.parent.mkdir()
    section = '[plugins."io.containerd.grpc.v1.cri"]\n'
    setup.CONTAINERD.write_text(f"version = 2\n{section}")
    todo = [each for each in run("containerd")["todo"] if "containerd" in each]
    assert [told in each for each in todo] == ([True] if told else [])
    assert setup.CONTAINERD.read_text() == f"version = 2\n{section}"
    setup.CONTAINERD.write_text(f"version = 2\n{section}enable_cdi = true\n")
    assert not [each for each in run("containerd")["todo"] if "cdi" in each]


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
