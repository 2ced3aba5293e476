"""The units: systemd understands them, and they leave no more open than must be."""

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

UNITS = Path(__file__).parents[3] / "systemd"
PROGRAM = re.compile(r"^(Exec\w+=[-+]*)/\S+", re.MULTILINE)


def test_systemd_understands_every_unit(tmp_path: Path) -> None:
    """The package's programs, and perhaps the system's bus, are not on the machine that tests this;
    something else is.
    """
    kinds = ("phosd*.service", "phosd*.socket", "*.mount")
    for unit in (path for kind in kinds for path in UNITS.glob(kind)):
        text = PROGRAM.sub(r"\1/bin/true", unit.read_text())
        (tmp_path / unit.name).write_text(re.sub("^Documentation=.*", "", text, flags=re.MULTILINE))
    shutil.copy(tmp_path / "phosd-mover@.service", tmp_path / "phosd-mover@0.service")
    (tmp_path / "dbus.socket").write_text(
        "[Socket]\nListenStream=/run/bus\nService=phosd.service\n"
    )
    units = sorted(path for path in tmp_path.iterdir() if not path.name.endswith("@.service"))
    assert len(units) == 6
    done = subprocess.run(
        ["systemd-analyze", "verify", *map(str, units), str(tmp_path / "phosd-criu@.service")],
        capture_output=True,
        text=True,
    )
    said = [line for line in done.stderr.splitlines() if "phosd" in line]
    assert (said, done.returncode) == ([], 0), done.stderr


@pytest.mark.parametrize(("unit", "most"), [("phosd", 6.0), ("phosd-mover@", 6.0)])
def test_how_exposed_a_unit_is(unit: str, most: float) -> None:
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--no-pager", UNITS / f"{unit}.service"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"Overall exposure level for \S+: (\d+\.\d+)", done.stdout)
    assert found is not None, done.stdout
    assert float(found.group(1)) <= most, done.stdout


def settings(unit: str) -> dict[str, str]:
    """The last value of each setting of ``[Service]``, ``[Socket]`` or ``[Mount]``."""
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNITS / unit)
    return {
        name: value
        for part in ("Service", "Socket", "Mount")
        if part in parser
        for name, value in parser[part].items()
    }


def test_criu_has_no_sandbox_and_its_door_is_roots() -> None:
    """A dump from a private mount namespace returns 0 and can never be restored (and what is
    restored inherits the rest).
    """
    sandbox = (
        *("Protect", "Private", "Restrict", "SystemCall", "NoNewPrivileges", "Capability"),
        *("ReadOnly", "ReadWrite", "Inaccessible", "TemporaryFile", "Bind", "Root", "User"),
    )
    found = settings("phosd-criu@.service")
    assert [name for name in found if name.startswith(sandbox)] == []
    assert found["KillMode"] == "process", "what it has restored stays"
    door = settings("phosd-criu.socket")
    assert (door["SocketMode"], door["SocketUser"], door["Accept"]) == ("0600", "root", "yes")


def test_phosd_sees_what_programs_see() -> None:
    """Their files, their shared memory, their processes, their GPUs."""
    found = settings("phosd.service")
    for name in ("ProtectHome", "PrivateTmp", "PrivateDevices", "PrivateUsers", "PrivateIPC"):
        assert name not in found
    assert found["ProtectSystem"] == "full"


def test_folders_are_made_with_their_rights() -> None:
    lines = (UNITS / "phosd-tmpfiles.conf").read_text().splitlines()
    found = {line.split()[1]: line.split()[2:5] for line in lines if line.startswith("d ")}
    assert found == {
        "/run/phos": ["0755", "root", "root"],
        "/run/phos/hook": [":0755", "root", "root"],
        "/run/phos/journal": ["0700", "root", "root"],
        "/run/phos/mover": ["0700", "root", "root"],
        "/var/lib/phos": ["0700", "root", "root"],
    }


def test_what_users_write_does_not_fill_the_system() -> None:
    found = settings("run-phos-hook.mount")
    assert (found["Where"], found["Type"]) == ("/run/phos/hook", "tmpfs")
    options = found["Options"].split(",")
    assert {"mode=755", "nosuid", "nodev", "noexec"} <= set(options)
    assert {option.partition("=")[0] for option in options} >= {"size", "nr_inodes"}
