"""A user's service that is one line of ``phos run``: stopped by systemd, it goes on later."""

import shlex
from collections.abc import Iterator

import pytest

from tests.boot import target
from tests.boot.machine import Machine
from tests.boot.target import phos
from tests.support.harness import parse, undisturbed, wait_until

_UNIT = """\
[Unit]
After=phosd.service

[Service]
User=ann
WorkingDirectory=/
Environment={variables}
ExecStart=/usr/bin/phos run --gpu soft --name {name} --resume --on-term=save -- {command}
KillMode={mode}
TimeoutStopSec=100
SuccessExitStatus=75

[Install]
WantedBy=multi-user.target
"""


class Service:
    """A service with this name, and what it has said to the journal since it was started last."""

    def __init__(self, machine: Machine, name: str, mode: str) -> None:
        self._machine, self.name = machine, name
        self.invocation = "none"
        variables = shlex.join(f"{key}={value}" for key, value in target.VARIABLES.items())
        command = target.command("single")
        unit = _UNIT.format(name=name, mode=mode, command=command, variables=variables)
        machine.put(f"/etc/systemd/system/{name}.service", unit)
        machine.run("systemctl daemon-reload")

    def values(self, invocation: str = "") -> dict[int, str]:
        """What it has said since it was started last, or in an earlier invocation."""
        return parse(self.said(invocation).encode())

    def start(self) -> None:
        """Start it; returns when it computes."""
        self._machine.run(f"systemctl start {self.name}")
        self.is_started()

    def is_started(self) -> None:
        """Wait until it computes. Its invocation is known only while the unit is loaded."""
        words = f"systemctl show --property=InvocationID --value {self.name}"
        self.invocation = self._machine.run(words).strip()
        wait_until(lambda: len(self.values()) > 5, "the service to compute")

    def stop(self) -> None:
        """Stop it; it must be saved by that."""
        self._machine.run(f"systemctl stop {self.name}")
        said = self.said()
        assert "phos: saved as" in said, said
        told = self._machine.run(f"journalctl --output=cat --lines=20 --unit={self.name}")
        assert f"{self.name}.service: Deactivated successfully." in told, told

    def said(self, invocation: str = "") -> str:
        by = invocation or self.invocation
        words = f"journalctl --output=cat _SYSTEMD_INVOCATION_ID={by}"
        return self._machine.run(words, unit=False)


@pytest.fixture(params=["control-group", "mixed"])
def service(booted: Machine, request: pytest.FixtureRequest) -> Iterator[Service]:
    name = request.param.partition("-")[0]
    yield Service(booted, name, request.param)
    booted.run(f"systemctl kill --signal=KILL {name}", check=False)


def test_it_goes_on_after_each_stop(booted: Machine, service: Service) -> None:
    seen: dict[int, str] = {}
    for number in range(1, 4):
        service.start()
        now = service.values()
        assert not seen or min(now) > min(seen), "it has begun anew"
        service.stop()
        seen |= service.values()
        images = [i for i in phos(booted, "images", "ann") if i["name"] == service.name]
        newest = images[-1]
        assert (newest["number"], newest["state"]) == (number, "durable")
        assert phos(booted, f"images {service.name}", "ann")[0]["id"] == newest["id"]
    expected = undisturbed("single", max(seen) + 1)
    assert seen == {step: expected[step] for step in seen}
    assert sorted(seen) == list(range(max(seen) + 1)), "a step is missing"


def test_it_goes_on_after_a_reboot(booted: Machine) -> None:
    service = Service(booted, "rebooted", "control-group")
    booted.run("systemctl enable rebooted")
    service.start()
    service.stop()
    last = max(service.values())
    booted.reboot()
    service.is_started()
    assert min(service.values()) == last + 1
    expected = undisturbed("single", max(service.values()) + 1)
    assert service.values().items() <= expected.items()
    service.stop()


def test_a_reboot_saves_it(booted: Machine) -> None:
    """First as it was started, then as it was restored, in a scope made by phosd."""
    service = Service(booted, "running", "control-group")
    booted.run("systemctl enable running")
    service.start()
    for _ in range(2):
        before = service.invocation
        booted.reboot()
        service.is_started()
        said = service.said(before)
        assert min(service.values()) == max(service.values(before)) + 1, said
    service.stop()
    booted.run("systemctl disable running")


def test_who_would_restart_it_is_told(booted: Machine) -> None:
    """The unit that restarts its service, the system's or a user's; else nobody."""
    service = Service(booted, "restarted", "control-group")
    booted.put(
        "/etc/systemd/system/restarted.service.d/again.conf", "[Service]\nRestart=on-failure"
    )
    booted.run("systemctl daemon-reload; loginctl enable-linger ann")
    service.start()
    users = f"phos run --gpu soft --name users -- {target.command('single')}"
    variables = " ".join(f"--setenv={key}={value}" for key, value in target.VARIABLES.items())
    booted.run(
        f"systemd-run --user --unit=users --property=Restart=always {variables} /usr/bin/{users}",
        user="ann",
        variables={"XDG_RUNTIME_DIR": "/run/user/1000"},
    )
    alone = target.start(booted)
    wait_until(lambda: len(phos(booted, "ps")) == 3, "three programs")
    found = {row["name"]: row["restarter"] for row in phos(booted, "ps")}
    assert found == {
        "restarted": "unit restarted.service",
        "users": "user unit users.service",
        None: None,
    }
    service.stop()
    service.start()  # it is restored, in a scope
    again = {row["name"]: row["restarter"] for row in phos(booted, "ps")}
    assert again["restarted"] == "unit restarted.service"
    service.stop()
    booted.run(
        "systemctl --user stop users", user="ann", variables={"XDG_RUNTIME_DIR": "/run/user/1000"}
    )
    alone.kill()
