"""A restored program is in a scope that phosd has systemd make, and its user takes it out again."""

from collections.abc import Iterator

import pytest

from tests.boot import target
from tests.boot.machine import UIDS, Failed, Machine
from tests.boot.target import Target, phos, restore_after_kill
from tests.support.harness import wait_until

ANNS = f"user.slice/user-{UIDS['ann']}.slice"
MANAGER = f"{ANNS}/user@{UIDS['ann']}.service"
ELSEWHERE = f"{MANAGER}/elsewhere"


def place(program: Target) -> str:
    """Its cgroup."""
    said = program.machine.run(f"grep ^0:: /proc/{program.pid}/cgroup", unit=False)
    return said.strip().removeprefix("0::/")


def move(machine: Machine, user: str, unit: str, path: str, pid: int) -> None:
    """Ask systemd to move a process into a cgroup below a unit, as any user may."""
    call = "busctl call org.freedesktop.systemd1 /org/freedesktop/systemd1"
    arguments = f"AttachProcessesToUnit ssau {unit} '{path}' 1 {pid}"
    machine.run(f"{call} org.freedesktop.systemd1.Manager {arguments}", user=user)


@pytest.fixture
def restored(booted: Machine) -> Iterator[Target]:
    """Ann's program, in a scope, as the unit that it was in has ended."""
    pid = target.start_unit(booted, "slot", "ann", target.command("single"), "4G")
    wait_until(lambda: any(p["pid"] == pid for p in phos(booted, "ps")), "her program")
    program = Target(booted, pid, "/home/ann/slot.log")
    program.more_steps(3)
    image = phos(booted, f"checkpoint {pid}", "ann")[-1]["result"]
    booted.run("systemctl stop slot")
    phos(booted, f"restore {image}", "ann")
    phos(booted, f"rm {image}", "ann")
    program.more_steps(3)
    yield program
    program.kill()
    target.remove_unit(booted, "slot")


def test_its_user_takes_it_out(booted: Machine, restored: Target) -> None:
    """It is where systemd has put it, which is its user's, and is restored there, or in another
    scope. The one that has ended is nothing to phosd; others' processes and units stay theirs.
    """
    scope = place(restored)
    assert scope.startswith(f"{ANNS}/restored-")
    booted.run("loginctl enable-linger ann bob")
    ask = f"systemctl is-active user@{UIDS['ann']} user@{UIDS['bob']}"
    wait_until(lambda: booted.run(ask, check=False).split() == ["active"] * 2, "their managers")
    for user, unit, path in (
        ("bob", f"user@{UIDS['bob']}.service", ""),  # another's process
        ("bob", f"user@{UIDS['ann']}.service", ""),
        ("ann", f"user@{UIDS['bob']}.service", ""),  # another's unit
        ("ann", "phosd.service", ""),
    ):
        with pytest.raises(Failed, match=r"not owned by|non-delegated|[Dd]enied"):
            move(booted, user, unit, path, restored.pid)
    assert place(restored) == scope
    phos(booted, f"suspend {restored.pid}", "ann")
    booted.run(f"mkdir /sys/fs/cgroup/{ELSEWHERE}", user="ann")
    move(booted, "ann", f"user@{UIDS['ann']}.service", "/elsewhere", restored.pid)
    assert place(restored) == ELSEWHERE
    gone = f"test ! -e /sys/fs/cgroup/{scope} && echo gone"
    wait_until(lambda: booted.run(gone, check=False, unit=False), "the scope to end")
    position = restored.position()
    phos(booted, f"resume {restored.pid}", "ann")
    restored.more_steps(3, since=position)

    image = phos(booted, f"checkpoint {restored.pid}", "ann")[-1]["result"]
    restore_after_kill(restored, image)
    assert place(restored) == ELSEWHERE
    restored.kill()
    booted.run(f"rmdir /sys/fs/cgroup/{ELSEWHERE}", user="ann")
    phos(booted, f"restore {image}", "ann")
    assert place(restored).startswith(f"{ANNS}/restored-")
    restored.more_steps(3)
    phos(booted, f"rm {image}", "ann")
