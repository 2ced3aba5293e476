"""phosd as a service: restarted, killed and hung at the worst moments, and what it may touch."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from phosd.service.jobs.job_log import JOB_ENDED
from tests.boot import target
from tests.boot.machine import Failed, Machine
from tests.boot.target import Target, phos, restore_after_kill
from tests.support.harness import wait_until

SECONDS = 8
"""How long it takes to copy a program's device memory where a test wants time for trouble."""
PARKED = ("control", "cpu", "drain")
"""Phases of mode ``stop`` in which the memory is not the program's."""


def show(machine: Machine, name: str, unit: str = "phosd.service") -> str:
    """A property of a unit."""
    return machine.run(f"systemctl show --property={name} --value {unit}", unit=False).strip()


@contextmanager
def settings(machine: Machine, *lines: str) -> Iterator[None]:
    """Inside, phosd's unit has these lines, too, and so has what it starts."""

    def apply() -> None:
        machine.run("systemctl daemon-reload", unit=False)
        machine.run("systemctl stop phosd.service 'phosd-mover@*.service'", unit=False)
        machine.run("systemctl start phosd.service", unit=False)

    machine.put("/run/systemd/system/phosd.service.d/test.conf", "\n".join(["[Service]", *lines]))
    apply()
    try:
        yield
    finally:
        machine.run("rm -r /run/systemd/system/phosd.service.d", unit=False)
        apply()


@pytest.fixture
def program(booted: Machine) -> Iterator[Target]:
    """Ann's program, which computes under the hook."""
    running = target.start(booted, "ann")
    yield running
    running.kill()


@contextmanager
def slowly(program: Target) -> Iterator[None]:
    """Inside, copying the program's memory takes :data:`SECONDS`."""
    machine = program.machine
    (listed,) = [p for p in phos(machine, "ps") if p["pid"] == program.pid]
    size = int(str(listed["device_bytes"]))
    with settings(machine, f"Environment=PHOS_SOFTGPU_COPY_RATE={size // SECONDS}"):
        yield


def begin_job(machine: Machine, call: str, *phases: str) -> None:
    """Call a method that gives a job, and return when that is in one of these phases."""
    line = f"busctl call org.phos /org/phos org.phos.Manager1 {call}"
    path = machine.run(line, unit=False).split('"')[1]
    ask = f"busctl get-property org.phos {path} org.phos.Job1 Phase"
    wait_until(lambda: machine.run(ask, unit=False).split('"')[1] in phases, f"a phase of {phases}")


def begin(program: Target, mode: str, *phases: str) -> None:
    """Start a checkpoint, and return when it is in one of these phases."""
    begin_job(program.machine, f"Checkpoint ua{{sv}} {program.pid} 1 mode s {mode}", *phases)


def kill_phosd(machine: Machine) -> None:
    """``kill -9``; returns when the next one is ready."""
    pid = show(machine, "MainPID")
    machine.run(f"kill -9 {pid}", unit=False)
    wait_until(lambda: show(machine, "MainPID") not in (pid, "0"), "the next phosd")
    wait_until(lambda: show(machine, "ActiveState") == "active", "the next phosd to be ready")


def require_unharmed(program: Target) -> None:
    """It computes, what it computes is right, nothing of the job is left, and it can be saved."""
    machine = program.machine
    assert program.alive
    program.more_steps(5)
    wait_until(lambda: show(machine, "ActiveState") == "active", "phosd")
    assert phos(machine, "images") == []
    last = phos(machine, "history")[0]
    assert last["operation"] == "checkpoint"
    assert last["state"] in ("cancelled", "interrupted", "failed"), last
    assert machine.run("ls /run/phos/journal /var/lib/phos/images", unit=False).split() == [
        "/run/phos/journal:",
        "/var/lib/phos/images:",
    ]
    values = program.values()
    assert sorted(values) == list(range(max(values) + 1)), "no step is missing"
    image = phos(machine, f"checkpoint {program.pid}", "ann")[-1]["result"]
    restore_after_kill(program, image)
    phos(machine, f"verify {image}")
    phos(machine, f"rm {image}")


def test_ready_activated_and_read_again(booted: Machine) -> None:
    assert show(booted, "StatusText") == "Jobs: 0 running, 0 waiting"
    booted.run("systemctl stop phosd.service")
    assert show(booted, "Result") == "success"
    listed = booted.run("busctl call org.phos /org/phos org.phos.Manager1 ListGPUs", user="bob")
    assert "PHOS software GPU" in listed
    assert show(booted, "ActiveState") == "active"
    pid = show(booted, "MainPID")
    booted.run("systemctl reload phosd.service")
    wait_until(lambda: "was read again" in booted.journal(), "the reload")
    assert (show(booted, "MainPID"), show(booted, "ActiveState")) == (pid, "active")
    file = "/etc/phos/phosd.toml"
    booted.run(f"cp {file} /tmp/before; echo 'max_job = 3' >>{file}")
    assert "refused" in booted.run("systemctl reload phosd.service || echo refused")
    booted.run(f"cp /tmp/before {file}; systemctl reload phosd.service")
    assert (show(booted, "MainPID"), show(booted, "ActiveState")) == (pid, "active")


def test_what_is_restored_has_nothing_of_phosd(booted: Machine, program: Target) -> None:
    """It is in its owner's slice, in no sandbox, and does not end with phosd."""

    def bonds() -> list[str]:
        status = f"grep -E 'NoNewPrivs|CapBnd|Seccomp:' /proc/{program.pid}/status"
        spaces = f"cd /proc/{program.pid}/ns; for n in *; do readlink $n; done"
        limits = f"cat /proc/{program.pid}/limits"
        return [booted.run(line, unit=False) for line in (status, spaces, limits)]

    before = bonds()
    image = phos(booted, f"checkpoint {program.pid}", "ann")[-1]["result"]
    assert show(booted, "ActiveState", "phosd-mover@0.service") == "active"
    restore_after_kill(program, image)
    assert bonds() == before
    cgroup = booted.run(f"grep ^0:: /proc/{program.pid}/cgroup", unit=False)
    assert "/user.slice/user-1000.slice/restored-" in cgroup
    sandboxed = booted.run(f"readlink /proc/{show(booted, 'MainPID')}/ns/mnt", unit=False)
    assert sandboxed not in before[1], "phosd itself has a sandbox, or this shows nothing"
    booted.run("systemctl restart phosd.service", unit=False)
    program.more_steps(5)
    phos(booted, f"rm {image}")


def test_a_suspended_program_outlives_phosd(booted: Machine, program: Target) -> None:
    """Its memory is in nobody's hands, the GPU in nobody's use, and the next phosd resumes it."""
    image = phos(booted, f"checkpoint {program.pid}", "ann")[-1]["result"]
    before = show(booted, "MainPID", "phosd-mover@0.service")
    phos(booted, f"suspend {program.pid}", "ann")
    wait_until(
        lambda: show(booted, "MainPID", "phosd-mover@0.service") not in ("0", before),
        "what stands by for the next mover",
    )
    wait_until(
        lambda: not any(gpu["memory_used"] for gpu in phos(booted, "gpus", "ann")),
        "the GPUs to be unused",
    )
    booted.run("systemctl restart phosd.service", unit=False)
    (listed,) = phos(booted, "ps", "ann")
    assert (listed["pid"], listed["state"]) == (program.pid, "suspended")
    position = program.position()
    phos(booted, f"resume {program.pid}", "ann")
    program.more_steps(5, since=position)
    restore_after_kill(program, image)  # compares what is computed again
    phos(booted, f"rm {image}")


def test_the_journal_knows_jobs(booted: Machine, program: Target) -> None:
    saved = phos(booted, f"checkpoint {program.pid}", "ann")[-1]
    query = f"journalctl -u phosd.service -o json PHOS_IMAGE={saved['result']}"
    wait_until(lambda: booted.run(query, unit=False), "the entry")
    (entry,) = [json.loads(line) for line in booted.run(query, unit=False).splitlines()]
    assert (entry["PHOS_PID"], entry["PRIORITY"]) == (str(program.pid), "6")
    assert (entry["_TRANSPORT"], entry["SYSLOG_IDENTIFIER"]) == ("journal", "phosd")
    assert entry["MESSAGE_ID"] == JOB_ENDED
    assert f"job {entry['PHOS_JOB']}, checkpoint of {program.pid}: done" in entry["MESSAGE"]
    assert booted.run(f"journalctl -q PHOS_IMAGE={saved['result']}", user="bob", check=False) == ""
    phos(booted, f"rm {saved['result']}")


@pytest.mark.parametrize(("mode", "phases"), [("stop", PARKED), ("concurrent", ("drain",))])
def test_a_restart_in_the_middle(
    booted: Machine, program: Target, mode: str, phases: tuple[str, ...]
) -> None:
    with slowly(program):
        begin(program, mode, *phases)
        booted.run("systemctl restart phosd.service", unit=False)
    require_unharmed(program)


@pytest.mark.parametrize(("mode", "phases"), [("stop", PARKED), ("concurrent", ("drain",))])
def test_killed_in_the_middle(
    booted: Machine, program: Target, mode: str, phases: tuple[str, ...]
) -> None:
    with slowly(program):
        begin(program, mode, *phases)
        kill_phosd(booted)
        program.more_steps(3)
    require_unharmed(program)


def test_criu_outlives_phosd_and_gives_up_by_itself(booted: Machine, program: Target) -> None:
    """It waits for phosd's word, which never comes."""
    instances = "systemctl list-units --plain --no-legend 'phosd-criu@*.service'"
    with settings(booted, "Environment=PHOS_FAULT=checkpoint-cpu:hang"):
        begin(program, "stop", "cpu")
        assert len(booted.run(instances, unit=False).splitlines()) == 1
        kill_phosd(booted)
        wait_until(lambda: not booted.run(instances, unit=False), "the end of CRIU")
        program.more_steps(3)
    require_unharmed(program)


def test_killed_in_the_middle_of_a_restore(booted: Machine, program: Target) -> None:
    """What was half restored is gone; the image is whole."""
    image = phos(booted, f"checkpoint {program.pid}", "ann")[-1]["result"]
    program.more_steps(10)
    program.kill()
    before, since = program.values(), program.position()
    with settings(booted, "Environment=PHOS_FAULT=restore-map:hang"):
        begin_job(booted, f"Restore sa{{sv}} {image} 0", "map")
        assert program.alive
        kill_phosd(booted)
        wait_until(lambda: not program.alive, "the end of what was half restored")
    assert phos(booted, "history")[0]["state"] == "interrupted"
    phos(booted, f"restore {image}", "ann")
    target.require_continuation(program, before, since)
    phos(booted, f"rm {image}")


def test_a_daemon_that_hangs_is_killed_and_loses_nothing(booted: Machine, program: Target) -> None:
    with slowly(program), settings_of_watchdog(booted):
        begin(program, "stop", *PARKED)
        pid = show(booted, "MainPID")
        booted.run(f"kill -STOP {pid}", unit=False)
        wait_until(lambda: show(booted, "MainPID") not in (pid, "0"), "the next phosd")
        assert "Watchdog timeout" in booted.journal()
        wait_until(lambda: show(booted, "ActiveState") == "active", "the next phosd to be ready")
        program.more_steps(3)
    require_unharmed(program)


@contextmanager
def settings_of_watchdog(machine: Machine) -> Iterator[None]:
    machine.put(
        "/run/systemd/system/phosd.service.d/watchdog.conf",
        "[Service]\nWatchdogSec=4\nTimeoutAbortSec=2\n",
    )
    machine.run("systemctl daemon-reload && systemctl restart phosd.service", unit=False)
    yield


def test_the_bus_is_restarted(booted: Machine, program: Target) -> None:
    """phosd comes back to it, and forgets nothing: it is the same process."""
    image = phos(booted, f"checkpoint {program.pid}", "ann")[-1]["result"]
    pid = show(booted, "MainPID")
    booted.run("systemctl restart dbus.service", unit=False)

    def listed() -> list[object]:
        try:
            return [found["id"] for found in phos(booted, "images")]
        except Failed:
            return []

    wait_until(lambda: listed() == [image], "phosd on the new bus")
    assert show(booted, "MainPID") == pid
    phos(booted, f"rm {image}")


@pytest.mark.parametrize(
    ("door", "kind"),
    [
        ("/run/phos/criu.sock", "SOCK_SEQPACKET"),
        ("/run/phos/mover/0.sock", "SOCK_STREAM"),
        ("/run/phos/hook/{uid}/{pid}.sock", "SOCK_STREAM"),
    ],
)
def test_others_find_the_doors_closed(
    booted: Machine, program: Target, door: str, kind: str
) -> None:
    image = phos(booted, f"checkpoint {program.pid}", "ann")[-1]["result"]
    path = door.format(pid=program.pid, uid=booted.run("id -u ann").strip())
    knock = f"python3 -c 'from socket import *; socket(AF_UNIX, {kind}).connect(\"{path}\")'"
    booted.run(knock)
    with pytest.raises(Failed, match="PermissionError"):
        booted.run(knock, user="bob")
    for folder in ("/var/lib/phos", "/run/phos/journal", "/run/phos/mover"):
        with pytest.raises(Failed, match="Permission denied"):
            booted.run(f"ls {folder}", user="bob")
    phos(booted, f"rm {image}")


def test_users_do_not_fill_what_the_system_needs(booted: Machine, program: Target) -> None:
    """Sockets need no room, so programs that start later can be saved all the same."""
    call = "from socket import *; socket(AF_UNIX).connect('/run/phos/program.sock')"
    booted.run(f'python3 -c "{call}"', user="bob")
    junk = f"/run/phos/hook/{booted.run('id -u bob').strip()}/junk"
    folder = junk.removesuffix("/junk")
    booted.run(f"timeout 60 sh -c 'until test -d {folder}; do sleep 0.1; done'")
    with pytest.raises(Failed, match="Permission denied"):
        booted.run("touch /run/phos/hook/junk", user="bob")
    with pytest.raises(Failed, match="No space left"):
        booted.run(f"head -c 32M /dev/zero > {junk}", user="bob")
    assert int(booted.run(f"stat -c %s {junk}")) < 5 << 20
    later = target.start(booted, "ann")
    image = phos(booted, f"checkpoint {later.pid}", "ann")[-1]["result"]
    later.kill()
    booted.run(f"rm {junk}", user="bob")
    phos(booted, f"rm {image}")
