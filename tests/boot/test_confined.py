"""phosd's units keep what they promise, and what users place in its way changes nothing."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.boot import target
from tests.boot.machine import UIDS, Failed, Machine
from tests.boot.package import install, newer
from tests.boot.target import Target, phos
from tests.boot.test_systemd import kill_phosd, show
from tests.support.harness import wait_until

CAPABILITIES = (
    *("chown", "dac_override", "dac_read_search", "fowner", "fsetid", "kill"),
    *("setgid", "setuid", "setpcap", "linux_immutable", "net_bind_service", "net_broadcast"),
    *("net_admin", "net_raw", "ipc_lock", "ipc_owner", "sys_module", "sys_rawio"),
    *("sys_chroot", "sys_ptrace", "sys_pacct", "sys_admin", "sys_boot", "sys_nice"),
    *("sys_resource", "sys_time", "sys_tty_config", "mknod", "lease", "audit_write"),
    *("audit_control", "setfcap", "mac_override", "mac_admin", "syslog", "wake_alarm"),
    *("block_suspend", "audit_read", "perfmon", "bpf", "checkpoint_restore"),
)
"""Names, by their numbers."""
_PROBE = """\
import ctypes, errno, json, os, socket, sys

libc = ctypes.CDLL(None, use_errno=True)

def call(number, *words):
    if libc.syscall(number, *words) == -1:
        raise OSError(ctypes.get_errno(), "")

def write(path):
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT))

def setuid_file():
    os.close(os.open("/run/probe-file", os.O_WRONLY | os.O_CREAT))
    os.chmod("/run/probe-file", 0o4755)

tries = {
    "write /usr": lambda: write("/usr/probe"),
    "write /etc": lambda: write("/etc/probe"),
    "write /boot": lambda: write("/boot/probe"),
    "write /proc/sys": lambda: write("/proc/sys/kernel/core_pattern"),
    "write sysrq": lambda: write("/proc/sysrq-trigger"),
    "read kmsg": lambda: os.open("/dev/kmsg", os.O_RDONLY),
    "syslog": lambda: call(103, 10, None, 0),
    "mount": lambda: call(165, b"none", b"/mnt", b"tmpfs", 0, None),
    "new mount api": lambda: call(430, b"tmpfs", 0),
    "unshare user": lambda: call(272, 0x10000000),
    "unshare mount": lambda: call(272, 0x00020000),
    "unshare net": lambda: call(272, 0x40000000),
    "hostname": lambda: call(170, b"probed", 6),
    "personality": lambda: call(135, 0x0040000),
    "real time": lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
    "setuid file": setuid_file,
    "packet socket": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
    "alg socket": lambda: socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET),
    "module": lambda: call(175, None, 0, b""),
    "clock": lambda: call(164, ctypes.create_string_buffer(16), None),
    "raw device": lambda: (os.mknod("/run/probe-disk", 0o060600, os.makedev(254, 0))),
}
said = {}
for name, one in tries.items():
    try:
        one()
        said[name] = "done"
    except OSError as error:
        said[name] = errno.errorcode[error.errno]
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
names = ("NoNewPrivs", "Seccomp", "CapEff", "CapBnd", "CapInh", "CapAmb")
said |= {name: status[name].strip() for name in names}
json.dump(said, open(sys.argv[1], "w"))
"""


def probe(machine: Machine, unit: str) -> dict[str, str]:
    """Try what the unit's settings forbid, from within: a command that the unit runs, too."""
    machine.put("/opt/probe.py", _PROBE)
    folder = f"/run/systemd/system/{unit.replace('@0', '@')}.d"
    run = f"/usr/bin/python3 /opt/probe.py /run/probe-{unit}.json"
    machine.put(f"{folder}/probe.conf", f"[Service]\nExecStartPost={run}\n")
    machine.run(f"systemctl daemon-reload; systemctl restart {unit}")
    said = machine.run(f"cat /run/probe-{unit}.json; rm -r {folder} /run/probe-*")
    machine.run("systemctl daemon-reload")
    found: dict[str, str] = json.loads(said)
    return found


def capabilities(machine: Machine, unit: str) -> int:
    """The set that the unit's file lists, without what the machine itself lacks."""
    listed = show(machine, "CapabilityBoundingSet", unit).split()
    own = sum(1 << number for number, name in enumerate(CAPABILITIES) if f"cap_{name}" in listed)
    return own & int(machine.run("grep CapBnd /proc/1/status").split()[1], 16)


@pytest.fixture
def program(booted: Machine) -> Iterator[Target]:
    """Ann's program, which computes under the hook."""
    running = target.start(booted, "ann")
    yield running
    running.kill()


@pytest.mark.parametrize("unit", ["phosd.service", "phosd-mover@0.service"])
def test_inside_the_sandbox_is_what_the_unit_says(booted: Machine, unit: str) -> None:
    said = probe(booted, unit)
    allowed = format(capabilities(booted, unit), "016x")
    assert (said.pop("CapEff"), said.pop("CapBnd")) == (allowed, allowed)
    assert (said.pop("NoNewPrivs"), said.pop("Seccomp")) == ("1", "2")
    assert int(said.pop("CapInh"), 16) == int(said.pop("CapAmb"), 16) == 0
    assert "done" not in said.values(), said


def test_what_is_phosds_is_closed_to_users(booted: Machine, program: Target) -> None:
    """Also while a program is suspended, and an image is in memory."""
    phos(booted, f"checkpoint {program.pid}", "ann")
    phos(booted, f"suspend {program.pid}", "ann")
    places = "/run/phos /var/lib/phos /var/cache/phos /etc/phos /usr/lib/phos"
    look = f"find {places} {{}} -print 2>/dev/null || true"
    written = booted.run(look.format("-writable ! -type l"), user="bob").split()
    own = f"/run/phos/hook/{UIDS['bob']}"
    assert {path for path in written if not path.startswith(own)} == {"/run/phos/program.sock"}
    state = look.format("-readable ! -type l").replace("/etc/phos /usr/lib/phos", "")
    read = {path for path in booted.run(state, user="bob").split() if not path.startswith(own)}
    assert read == {
        *("/run/phos", "/run/phos/hook", "/run/phos/program.sock", "/var/cache/phos"),
    }
    odd = f"find {places} '(' ! -uid 0 ! -path '/run/phos/hook/*' -o -perm /6000 ')' -print"
    assert booted.run(odd) == ""
    phos(booted, f"resume {program.pid}", "ann")
    for image in phos(booted, "images"):
        phos(booted, f"rm {image['id']}")


def own_folder(machine: Machine, user: str) -> str:
    """The folder for the hooks of a user, which phosd makes when a program of theirs asks."""
    call = "from socket import *; socket(AF_UNIX).connect('/run/phos/program.sock')"
    machine.run(f'python3 -c "{call}"', user=user)
    folder = f"/run/phos/hook/{UIDS[user]}"
    machine.run(f"timeout 60 sh -c 'until test -d {folder}; do sleep 0.1; done'")
    return folder


def test_links_of_users_lead_nobody_astray(booted: Machine) -> None:
    """When folders are made, cleaned and removed, which root does."""
    folder = own_folder(booted, "bob")
    booted.run("install -d -o ann -m 700 /home/ann/hers && echo precious > /home/ann/hers/file")
    state = "stat -c '%n %a %U %G' /etc /etc/shadow /home/ann/hers /home/ann/hers/file /run/phos/*"
    before = booted.run(state)
    links = {"journal": "/etc", "a.sock": "/etc/shadow", "hers": "/home/ann/hers"}
    for name, destination in links.items():
        booted.run(f"ln -s {destination} {folder}/{name}", user="bob")
    booted.run(f"mkdir -m 777 {folder}/deep; ln -s / {folder}/deep/root", user="bob")
    for step in (
        "systemd-tmpfiles --create --remove --clean --prefix=/run/phos --prefix=/var/lib/phos",
        "loginctl terminate-user bob; systemctl restart phosd.service",
        "systemctl stop phosd.service run-phos-hook.mount; systemctl start phosd.service",
    ):
        booted.run(step, check=False)
        assert booted.run(state) == before, step
    assert booted.run("cat /home/ann/hers/file") == "precious\n"
    with pytest.raises(Failed, match="Permission denied"):
        booted.run("mv /run/phos/hook /run/phos/mine || rmdir /run/phos/hook", user="bob")


FORGED = "4711"
"""A number that no job has here."""
_FORGE = """\
import socket
fields = {"MESSAGE": "forged", "PRIORITY": "2", "SYSLOG_IDENTIFIER": "phosd", "PHOS_JOB": "4711",
    "_SYSTEMD_UNIT": "phosd.service", "UNIT": "phosd.service", "OBJECT_PID": "PID",
    "COREDUMP_UNIT": "phosd.service", "OBJECT_SYSTEMD_UNIT": "phosd.service", "_UID": "0",
    "_PID": "1"}
line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
text = "".join(name + "=" + value + "\\n" for name, value in fields.items())
line.sendto(text.encode(), "/run/systemd/journal/socket")
"""


def test_the_log_of_phosd_is_its_own(booted: Machine, program: Target) -> None:
    """No user's entry is among phosd's, and no name of theirs begins one, or a field."""
    booted.put("/opt/forge.py", _FORGE.replace('PID"', show(booted, "MainPID") + '"', 1))
    booted.run("python3 /opt/forge.py; echo forged | systemd-cat -t phosd", user="bob")
    wait_until(lambda: "forged" in booted.run("journalctl -t phosd", unit=False), "his entries")
    image = phos(booted, f"checkpoint {program.pid}", "ann")[-1]["result"]
    names = f"/home/ann/x\nMESSAGE=forged\nPHOS_JOB={FORGED}\n<2>phosd: forged"
    asked = f"phos restore {image} --output {shlex.quote(names)}"
    with pytest.raises(Failed):
        booted.run(asked, user="ann")
    wait_until(lambda: "restore of" in booted.journal(), "the end of the job")
    said = booted.run("journalctl -u phosd -o json --output-fields=MESSAGE,PHOS_JOB", unit=False)
    entries = [json.loads(line) for line in said.splitlines()]
    assert not [each for each in entries if str(each["MESSAGE"]).startswith("forged")]
    assert len(entries) > 2
    assert not [each for each in entries if each.get("PHOS_JOB") == FORGED]
    phos(booted, f"rm {image}")


def test_refused_calls_do_not_fill_the_log(booted: Machine, program: Target) -> None:
    before = len(booted.journal().splitlines())
    call = f"busctl call org.phos /org/phos org.phos.Manager1 Suspend 'ua{{sv}}' {program.pid} 0"
    booted.run(f"for n in $(seq 100); do {call} 2>/dev/null; done; true", user="bob")
    assert len(booted.journal().splitlines()) == before


_STORM = """\
import os, socket, subprocess, time
end = time.monotonic() + 25
while time.monotonic() < end:
    for name in ("program.sock", "criu.sock", "runtime.sock"):
        line = socket.socket(socket.AF_UNIX)
        line.settimeout(1)
        try:
            line.connect("/run/phos/" + name)
            line.send(bytes(64))
        except OSError:
            pass
    for name in ("program.sock", "hook/1001/x.sock"):
        try:
            os.unlink("/run/phos/" + name)
        except OSError:
            pass
"""


def test_restarts_beside_users_who_want_its_places(booted: Machine, program: Target) -> None:
    booted.put("/opt/storm.py", _STORM)
    for number in range(3):
        booted.run(
            f"systemd-run --quiet --collect --unit=storm{number} --uid=bob python3 /opt/storm.py"
        )
    door = "stat -c '%U %G %a %F' /run/phos /run/phos/*.sock"
    before = booted.run(door)
    for restart in ("systemctl restart phosd.service", "systemctl restart phosd-criu.socket", ""):
        booted.run(restart) if restart else kill_phosd(booted)
        wait_until(lambda: show(booted, "ActiveState") == "active", "phosd")
        wait_until(lambda: booted.run(door, check=False) == before, "the same sockets")
    image = phos(booted, f"checkpoint {program.pid}", "ann")[-1]["result"]
    program.more_steps(3)
    booted.run("systemctl stop 'storm*'")
    phos(booted, f"rm {image}")


def test_it_does_not_go_on_in_a_unit_that_is_anothers_by_now(booted: Machine) -> None:
    """With that one's limits and memory, and with its end: batch systems use names again."""

    def in_the_slot(user: str, command: str, most: str) -> int:
        return target.start_unit(booted, "slot", user, command, most)

    pid = in_the_slot("ann", target.command("single"), "4G")
    wait_until(lambda: any(p["pid"] == pid for p in phos(booted, "ps")), "her program")
    running = Target(booted, pid, "/home/ann/slot.log")
    running.more_steps(3)
    image = phos(booted, f"checkpoint {pid}", "ann")[-1]["result"]
    booted.run("systemctl stop slot")
    in_the_slot("bob", "/usr/bin/sleep infinity", "infinity")
    assert phos(booted, f"restore {image}", "ann")[-1]["result"] == str(pid)
    running.more_steps(3)
    cgroup = booted.run(f"grep ^0:: /proc/{pid}/cgroup", unit=False)
    assert f"/user.slice/user-{UIDS['ann']}.slice/restored-" in cgroup
    booted.run("systemctl stop slot")
    assert running.alive, "it has ended with another's service"
    running.kill()
    phos(booted, f"rm {image}")
    target.remove_unit(booted, "slot")


def test_the_package_stays_while_a_program_is_suspended(
    booted: Machine, package: Path, tmp_path: Path, program: Target
) -> None:
    """Neither removal nor purge takes what phosd keeps for its user; an upgrade hands it on."""
    phos(booted, f"suspend {program.pid}", "ann")
    for words in ("--remove", "--purge"):
        with pytest.raises(Failed, match=f"programs are suspended: {program.pid}"):
            booted.run(f"dpkg {words} phosd")
        assert show(booted, "ActiveState") == "active"
    install(booted, newer(package, tmp_path))
    position = program.position()
    phos(booted, f"resume {program.pid}", "ann")
    program.more_steps(3, since=position)
    values = program.values()
    assert sorted(values) == list(range(max(values) + 1)), "no step is missing"
