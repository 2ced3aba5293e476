"""What a hostile user of a booted machine does with the bus, polkit and the units, as shipped."""

import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from phosd.interface import manager
from tests.boot import target
from tests.boot.machine import UIDS, Failed, Machine
from tests.boot.target import Target, phos
from tests.boot.test_systemd import show
from tests.support.harness import wait_until

SECRETS = ("single.py", "/home/ann")
"""What is in the command line and the paths of Ann's program, which nobody else is told."""
LOGIN = {"XDG_RUNTIME_DIR": f"/run/user/{UIDS['bob']}"}
NAMING = {"pid", "image", "number", "leaving", "coming"}
"""Arguments of methods that name what may be another's."""

_ASK = """\
import json, subprocess
said = []
for words in json.load(open("/opt/calls.json")):
    done = subprocess.run(["busctl", *words], capture_output=True, text=True)
    said.append([done.returncode, done.stdout + done.stderr])
print(json.dumps(said))
"""
_LISTEN = """\
import asyncio, sys
sys.path.insert(0, "/usr/lib/phos/python")
from phosd.bus import Connection

async def main():
    bus = await Connection.open("system")
    heard = lambda signal: print(signal.member, signal.path, signal.args, flush=True)
    await bus.subscribe(heard, "type='signal',sender='org.phos'")
    print("listening", flush=True)
    await asyncio.sleep(300)

asyncio.run(main())
"""


@dataclass(frozen=True)
class Property:
    """Ann's program, and an image of it; ``job`` made that. ``objects`` are their paths."""

    program: Target
    image: str
    job: int
    objects: tuple[str, ...]

    def calls(self) -> list[list[str]]:
        """A call of each method that names something, all of it Ann's, as busctl takes them."""
        pid = str(self.program.pid)
        values = {"pid": pid, "leaving": pid, "coming": "1", "image": self.image}
        values |= {"number": str(self.job), "destination": "0", "options": "0"}
        values["socket"] = "nobody-listens"
        found = []
        for method in manager.MANAGER.methods:
            names = [name for name, _ in method.arguments]
            if {*names} & NAMING:
                words = [method.name, method.signature, *(values[name] for name in names)]
                found.append(["call", "org.phos", "/org/phos", "org.phos.Manager1", *words])
        for path in self.objects:
            words = [path, "org.freedesktop.DBus.Properties", "GetAll", "s"]
            found.append(["call", "org.phos", *words, f"org.phos.{path.split('/')[3].title()}1"])
        return found


@pytest.fixture(scope="module")
def hers(booted: Machine) -> Iterator[Property]:
    program = target.start(booted, "ann")
    image = str(phos(booted, f"checkpoint {program.pid}", "ann")[-1]["result"])
    job = int(str(phos(booted, "jobs", "ann")[-1]["job"]))
    call = "busctl call org.phos /org/phos org.phos.Manager1"
    asked = (f"GetProcess u {program.pid}", f"GetImage s {image}", f"GetJob u {job}")
    paths = [booted.run(f"{call} {words}", user="ann").split('"')[1] for words in asked]
    yield Property(program, image, job, tuple(paths))
    program.kill()


def as_a_login(machine: Machine, command: str) -> str:
    return machine.run(command, user="bob")


def as_a_service(machine: Machine, command: str) -> str:
    line = "systemd-run --quiet --collect --wait --pipe --uid=nobody sh -c"
    return machine.run(f"{line} {shlex.quote(command)}")


def as_a_unit_of_the_user_manager(machine: Machine, command: str) -> str:
    machine.run("loginctl enable-linger bob; rm -f /home/bob/said")
    private = f"{LOGIN['XDG_RUNTIME_DIR']}/systemd/private"
    wait_until(lambda: machine.run(f"ls {private}", check=False, unit=False), "Bob's manager")
    whole = shlex.quote(f"{command} >new 2>&1; mv new said")
    line = f"systemd-run --user --quiet --collect --working-directory=/home/bob sh -c {whole}"
    machine.run(line, user="bob", variables=LOGIN)
    machine.run("timeout 100 sh -c 'until test -e /home/bob/said; do sleep 0.1; done'")
    return machine.run("cat /home/bob/said")


@pytest.mark.parametrize("ask", [as_a_login, as_a_service, as_a_unit_of_the_user_manager])
def test_nothing_is_done_with_what_is_anothers(
    booted: Machine, hers: Property, ask: Callable[[Machine, str], str]
) -> None:
    calls = hers.calls()
    assert len(calls) > 15
    booted.put("/opt/calls.json", json.dumps(calls))
    booted.put("/opt/ask.py", _ASK)
    answers = json.loads(ask(booted, "python3 /opt/ask.py").splitlines()[-1])
    for call, (status, text) in zip(calls, answers, strict=True):
        assert status != 0, (call, text)
        assert f"belongs to uid {UIDS['ann']}" in text, (call, text)
        assert not [secret for secret in SECRETS if secret in text], (call, text)
    tree = ask(booted, "busctl tree --list org.phos").split()
    assert [path for path in tree if "/gpu" not in path] == ["/", "/org", "/org/phos"]
    assert [job["job"] for job in phos(booted, "jobs")] == [hers.job], "no job was begun"
    hers.program.more_steps(3)
    assert [i["id"] for i in phos(booted, "images", "ann")] == [hers.image]


def test_the_bus_is_nobody_elses_to_own_or_to_watch(booted: Machine, hers: Property) -> None:
    daemon = "org.freedesktop.DBus /org/freedesktop/DBus org.freedesktop.DBus"
    before = booted.run("busctl status org.phos | grep ^PID=")
    for call in (
        f"busctl call {daemon} RequestName su org.phos 7",
        f"busctl call {daemon} AddMatch s eavesdrop=true",
        f"busctl call {daemon} UpdateActivationEnvironment 'a{{ss}}' 1 PYTHONPATH /home/bob",
        "timeout 10 busctl monitor org.phos",
    ):
        with pytest.raises(Failed, match=r"[Dd]enied|not allowed"):
            booted.run(call, user="bob")
    assert booted.run("busctl status org.phos | grep ^PID=") == before


def test_signals_tell_numbers_alone(booted: Machine, hers: Property) -> None:
    booted.put("/opt/listen.py", _LISTEN)
    listen = shlex.quote("python3 /opt/listen.py >/home/bob/heard 2>&1")
    booted.run(f"systemd-run --quiet --collect --unit=ear --uid=bob sh -c {listen}")
    heard = "cat /home/bob/heard"
    wait_until(lambda: booted.run(heard, check=False), "Bob to listen")
    image = phos(booted, f"checkpoint {hers.program.pid}", "ann")[-1]["result"]
    phos(booted, f"rm {image}", "ann")
    wait_until(lambda: "ImageRemoved" in booted.run(heard), "the signals")
    told = booted.run(f"{heard}; systemctl stop ear")
    assert "JobNew" in told
    assert "PropertiesChanged" in told
    assert not [secret for secret in SECRETS if secret in told], told


_FORGE = """\
import os, socket, sys
where = os.environ.get("NOTIFY_SOCKET", "/run/systemd/notify")
line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
me = "MAINPID=%d" % os.getpid()
for word in ("STOPPING=1", me, "WATCHDOG=trigger", "STATUS=mine", "READY=1"):
    line.sendto(word.encode(), where)
"""


def test_the_units_obey_administrators_alone(booted: Machine, hers: Property) -> None:
    """And hear phosd alone: a message to systemd in its name is nobody else's to send."""
    names = ("ActiveState", "MainPID", "NRestarts", "MemoryMax", "DropInPaths", "StatusText")
    wait_until(lambda: "0 running, 0 waiting" in show(booted, "StatusText"), "the jobs to end")
    before = [show(booted, name) for name in names]
    units = ("phosd.service", "phosd-criu.socket", "phosd-mover@0.service", "run-phos-hook.mount")
    verbs = [f"{verb} {unit}" for verb in ("stop", "kill", "restart", "mask") for unit in units]
    verbs += ["set-property phosd MemoryMax=1M", "freeze phosd", "bind phosd /home /usr"]
    verbs += [
        "clean phosd",
        "reload phosd",
        "set-environment PYTHONPATH=/home/bob",
        "daemon-reload",
    ]
    for verb in verbs:
        with pytest.raises(Failed, match=r"authentication required|Access denied"):
            booted.run(f"systemctl --no-ask-password {verb}", user="bob")
    booted.put("/opt/forge.py", _FORGE)
    booted.run("python3 /opt/forge.py", user="bob")
    assert [show(booted, name) for name in names] == before
    hers.program.more_steps(3)


def test_no_call_starts_what_its_administrator_has_disabled(booted: Machine) -> None:
    booted.run("systemctl disable --now phosd.service")
    with pytest.raises(Failed):
        booted.run("busctl call org.phos /org/phos org.phos.Manager1 ListGPUs", user="bob")
    with pytest.raises(Failed, match="systemctl"):
        booted.run("phos gpus", user="bob")
    assert show(booted, "ActiveState") == "inactive"
    booted.run("systemctl enable phosd.service")
    booted.run("busctl call org.phos /org/phos org.phos.Manager1 ListGPUs", user="bob")
    assert show(booted, "ActiveState") == "active"
