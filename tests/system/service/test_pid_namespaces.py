"""Programs that `phos run` starts in a pid namespace of their own, as users see them."""

import json
import os
import pwd
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from phosd.engine.system import audit, pid_namespaces, procfs
from tests.support.harness import wait_until
from tests.system.service.test_end_to_end import phosd

USER = pwd.getpwnam("nobody").pw_uid
AUDIT = audit.loginuid(os.getpid()) is not None
"""Whether this kernel notes who has logged in."""
# Everything is imported as root: a user may not be let into where the interpreter is.
PHOS = """
import os, sys
import phosd.cli.run_command.enclosed, phosd.cli.run_command.relay, phosd.client
from phosd.cli.main import main, named
list(map(named, main.commands))
if uid := int(sys.argv.pop(1)):
    os.setgroups([]), os.setresgid(uid, uid, uid), os.setresuid(uid, uid, uid)
main(prog_name="phos")
"""
LOOK = """
import json, os, resource, signal
def loginuid(other=None):
    try:
        if other:
            with open("/proc/self/loginuid", "w") as file:
                file.write(other)
        return open("/proc/self/loginuid").read()
    except OSError as error:
        return type(error).__name__
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({
    "pid": os.getpid(),
    "here": sorted(int(each) for each in os.listdir("/proc") if each.isdigit()),
    "leads": os.getpid() == os.getsid(0) == os.getpgid(0),
    "folder": os.getcwd(),
    "umask": os.umask(0),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "nice": os.nice(0),
    "cpus": sorted(os.sched_getaffinity(0)),
    "uids": status["Uid"].split(),
    "bounding": status["CapBnd"].strip(),
    "ignored": signal.getsignal(signal.SIGHUP) is signal.SIG_IGN,
    "token": os.environ.get("TOKEN"),
    "open": sorted(os.listdir("/proc/self/fd")),
    "input": os.readlink("/proc/self/fd/0"),
    "loginuid": loginuid(),
    "another": os.getuid() and loginuid("4343"),
}), flush=True)
"""


@dataclass
class Place:
    bus: str
    folder: Path

    def environment(self, uid: int) -> dict[str, str]:
        return os.environ | {
            "PHOS_RUNTIME_DIR": str(self.folder / "run"),
            "XDG_STATE_HOME": str(self.folder / "home" / str(uid)),
            "PHOS_BUS": self.bus,
            "TOKEN": "ä\udcff",
        }

    def run(
        self,
        *words: str,
        uid: int = 0,
        options: tuple[str, ...] = ("--pidns",),
        before: tuple[str, ...] = (),
    ) -> "subprocess.CompletedProcess[str]":
        phos = (sys.executable, "-c", PHOS, str(uid), "run", "--gpu", "soft")
        return subprocess.run(
            [*before, *phos, *options, "--", *words],
            capture_output=True,
            text=True,
            env=self.environment(uid),
            cwd=self.folder / "home",
            timeout=90,
            check=False,
        )

    def namespaces(self) -> list[pid_namespaces.PidNamespace]:
        return [*pid_namespaces.living(self.folder / "run")]


@pytest.fixture(scope="module")
def place(bus: str) -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="phos-open-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "home").mkdir()
        (folder / "home").chmod(0o777)
        with phosd(bus, folder):
            yield Place(bus, folder)


@pytest.mark.parametrize("uid", [0, USER])
def test_it_is_alone_and_has_what_its_starter_has(place: Place, uid: int) -> None:
    lowered = "ulimit -S -n 77; ulimit -H -n 88; umask 027; trap '' HUP; exec \"$@\""
    if AUDIT:
        lowered = f"echo 4242 >/proc/self/loginuid; {lowered}"
    cpu = max(os.sched_getaffinity(0))
    before = ("nice", "-n", "3", "taskset", "-c", str(cpu), "sh", "-c", lowered, "sh")
    done = place.run("/usr/bin/python3", "-c", LOOK, uid=uid, before=before)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    assert seen["here"] == [1, seen["pid"]] and seen["leads"]
    assert seen["folder"] == str(place.folder / "home")
    assert (seen["files"], seen["nice"], seen["cpus"]) == ([77, 88], min(19, os.nice(0) + 3), [cpu])
    assert (seen["umask"], seen["ignored"], seen["token"]) == (0o27, True, "ä\udcff")
    assert {*seen["uids"]} == {str(uid)}
    bounding = procfs.credentials(os.getpid()).bounding
    assert int(seen["bounding"], 16) == bounding
    assert {*seen["open"]} <= {"0", "1", "2", "3"}, "nothing else is left open"
    assert seen["input"] == "/dev/null"
    assert seen["loginuid"] == ("4242" if AUDIT else "FileNotFoundError")
    if uid and AUDIT:
        assert seen["another"] == "PermissionError", "it calls itself another user's"
    wait_until(lambda: not place.namespaces(), "the namespace to end with its program")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["sh", "-c", "exit 3"], 3),
        (["sh", "-c", "kill -9 $$"], 137),
        (["/nowhere/at/all"], 127),
        (["/etc/passwd"], 126),
    ],
)
def test_its_end_is_told_as_ever(place: Place, words: list[str], code: int) -> None:
    assert place.run(*words).returncode == code


def test_what_it_leaves_behind_goes_on_and_ends_with_the_keeper(place: Place) -> None:
    done = place.run("sh", "-c", "sleep 1000 & sleep 0.01 & exit 5")
    assert done.returncode == 5, "its own end is what counts"
    (left,) = place.namespaces()
    wait_until(lambda: len(left.members()) == 1, "the other one to be collected")
    os.kill(left.keeper.pid, signal.SIGTERM)
    os.kill(left.keeper.pid, signal.SIGINT)
    assert left.lives, "signals do not reach it"
    os.kill(left.keeper.pid, signal.SIGKILL)
    wait_until(lambda: not left.members(), "all to end")


def test_phosd_knows_which_process_a_pid_is_there(place: Place) -> None:
    call = "exec busctl --address=$PHOS_BUS call org.phos /org/phos org.phos.Manager1 GetProcess u"
    other = "echo 5000 >/proc/sys/kernel/ns_last_pid; sh -c"  # than outside
    own = place.run("sh", "-c", f"{other} 'echo $$; {call} $$'")
    assert own.stdout == "5001\n"
    assert "uses no GPU" in own.stderr and "process 5001 " not in own.stderr
    assert "no process 1 in the pid namespace" in place.run("sh", "-c", f"{call} 1").stderr


def test_who_is_in_a_sandbox_gets_none(place: Place) -> None:
    """The program would be outside of it."""
    sandboxed = ("setpriv", "--no-new-privs")
    done = place.run("true", before=sandboxed)
    assert done.returncode == 6 and "may gain no privileges" in done.stderr
    done = place.run("sh", "-c", "echo $$", options=("--name", "boxed"), before=sandboxed)
    assert done.returncode == 0 and "no pid namespace of its own" in done.stderr
    (pid,) = done.stdout.split()
    assert int(pid) > 20, "it was started all the same"
    unshared = ("unshare", "--net")
    assert "its own net namespace" in place.run("true", before=unshared).stderr


def test_strangers_who_connect_first_hold_up_nobody(place: Place) -> None:
    """A name of a socket is no secret, and none of these has been named by phosd."""
    held: list[socket.socket] = []
    over = threading.Event()

    def connect() -> None:
        while not over.is_set():
            lines = Path("/proc/net/unix").read_text().splitlines()
            for name in {line.split("@", 1)[1] for line in lines if "@phos-start-" in line}:
                held.append(socket.socket(socket.AF_UNIX))
                held[-1].setblocking(False)
                with suppress(BlockingIOError, ConnectionRefusedError):
                    held[-1].connect(f"\0{name}")

    stranger = threading.Thread(target=connect)
    stranger.start()
    try:
        assert place.run("sh", "-c", "exit 3").returncode == 3
    finally:
        over.set()
        stranger.join()
        for each in held:
            each.close()
    assert held


def test_without_phosd_it_is_started_without_one(tmp_path: Path) -> None:
    (tmp_path / "run" / "hook").mkdir(parents=True)
    (tmp_path / "home").mkdir()
    nowhere = Place("unix:path=/nowhere", tmp_path)
    done = nowhere.run("true", options=("--name", "alone"))
    assert done.returncode == 0 and "no pid namespace of its own" in done.stderr
    assert nowhere.run("true").returncode == 1
