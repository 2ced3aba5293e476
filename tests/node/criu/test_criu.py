"""Finding CRIU, probing it for real, and what is said when it does not work."""

import os
from pathlib import Path

import pytest

from phosd.engine.criu.probe import probe, require_working
from phosd.engine.criu.run.invocation import Owner
from phosd.engine.criu.run.program import Criu, candidates
from phosd.errors import Internal


def script(folder: Path, body: str) -> Path:
    path = folder / "criu"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_the_probe_passes_and_is_remembered(criu: Criu, tmp_path: Path) -> None:
    verdict = probe(criu, tmp_path / "cache")
    assert verdict.reason == ""
    (remembered,) = (tmp_path / "cache").iterdir()
    remembered.write_text(remembered.read_text().replace(criu.version, "from the cache"))
    assert probe(criu, tmp_path / "cache").version == "from the cache"


def test_a_criu_that_cannot_dump_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts, says a good version, and would pass ``criu check``."""
    monkeypatch.chdir(tmp_path)  # where it writes
    body = (
        '[ "$1" = --version ] && { echo "Version: 4.9"; exit; }\n'
        'while [ $# -gt 0 ]; do [ "$1" = -W ] && cd "$2"; shift; done\n'
        'echo "Error (sockets.c:1): cannot dump that" >dump.log; exit 1'
    )
    criu = Criu.find(script(tmp_path, body))
    verdict = probe(criu, tmp_path / "cache")
    assert "criu dump failed" in verdict.reason
    assert "cannot dump that" in verdict.reason
    with pytest.raises(Internal, match=r"CRIU 4\.9 at .* does not work on this machine"):
        require_working(criu, tmp_path / "cache")


def test_an_old_criu_is_refused_by_its_version(tmp_path: Path) -> None:
    path = script(tmp_path, 'echo "Version: 3.17.1"')
    with pytest.raises(Internal, match=r"CRIU 3\.17\.1 at .* is too old"):
        Criu.find(path)


def test_a_missing_criu_says_where_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Internal, match=r"there is no CRIU at .*; run `make setup`"):
        Criu.find(tmp_path / "criu")
    monkeypatch.setenv("PHOS_CRIU", str(tmp_path / "criu"))
    with pytest.raises(Internal, match="PHOS_CRIU"):
        Criu.find()


def test_a_criu_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(Internal, match="does not start"):
        Criu.find(script(tmp_path, "exit 1"))


def test_the_environment_names_the_criu_to_use(criu: Criu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHOS_CRIU", str(criu.path))
    assert Criu.find().path == criu.path


def test_an_owner_who_cannot_reach_criu_is_told_so(criu: Criu, tmp_path: Path) -> None:
    path = script(tmp_path, f'exec {criu.path} "$@"')
    tmp_path.chmod(0o700)
    found = Criu.find(path)
    found.require_reachable(Owner(0, 0, ()))
    with pytest.raises(Internal, match=rf"user 54321 may not execute {path}"):
        found.require_reachable(Owner(54321, 54321, ()))
    os.chown(tmp_path, 54321, -1)
    with pytest.raises(Internal, match="may not execute"):
        found.require_reachable(Owner(54322, 54322, ()))


def test_a_checkout_that_is_closed_to_us_has_no_criu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below ``/root``, for a user who asks ``phos doctor``."""

    def closed(path: Path) -> bool:
        raise PermissionError(path)

    monkeypatch.delenv("PHOS_CRIU", raising=False)
    assert candidates()
    monkeypatch.setattr(Path, "is_file", closed)
    assert candidates() == []
