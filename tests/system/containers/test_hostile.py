"""What a container's root, and its users and images, do to phosd; others' programs are served."""

import os
import pwd
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from phosd.bus import NAME
from phosd.engine.system import cgroups
from phosd.service.tasks.runtime_checkpoints import SOCKET
from tests.node.checkpoint_restore.cycle import Undisturbed
from tests.node.containers.conftest import place, undisturbed
from tests.node.containers.test_podman import device
from tests.support import containers, cri, harness, hostile
from tests.support.bus import busctl
from tests.support.harness import Target, start, wait_until
from tests.support.hostile import GIVEN, Making
from tests.support.service import MANAGER, ROOT, bus
from tests.system.containers.test_plugin_talk import ask, connected
from tests.system.containers.test_runc import right
from tests.system.service.test_end_to_end import phos, phosd

__all__ = ["bus", "device", "place", "undisturbed"]

STRANGER, BOB = (pwd.getpwnam(name).pw_uid for name in ("nobody", "daemon"))
NEEDS_PODMAN = pytest.mark.skipif(
    not containers.installed("podman"), reason="`make setup-containers` installs podman"
)
NEEDS_CRI = pytest.mark.skipif(
    not (cri.PREFIX / "bin/containerd").exists(),
    reason="`make setup-containers` fetches containerd 2.1",
)


@contextmanager
def victim(place: Path) -> Iterator[Target]:
    """Root's program on the machine."""
    (folder := place / "victim").mkdir()
    target = start("single", folder, runtime=place / "run")
    try:
        target.wait_for_steps(2)
        yield target
    finally:
        target.kill()


def served(bus: str, place: Path, target: Target) -> None:
    """A program leaves its GPU, comes back and computes, and lists are made."""
    for operation in ("suspend", "resume"):
        (*_, job) = phos(bus, place, operation, str(target.pid))
        assert job["state"] == "done"
    target.more_steps(2)
    assert target.pid in [row["pid"] for row in phos(bus, place, "ps")]


@pytest.fixture(
    params=[
        pytest.param(hostile.by_runc, id="runc"),
        pytest.param(hostile.by_podman, id="podman", marks=NEEDS_PODMAN),
        pytest.param(hostile.by_users_podman(STRANGER), id="users-podman", marks=NEEDS_PODMAN),
        pytest.param(hostile.by_cri, id="cri", marks=NEEDS_CRI),
    ]
)
def making(request: pytest.FixtureRequest, place: Path, device: str) -> Making:
    """A way to run a container by each runtime."""
    return hostile.making(request.param, place, device)


def wait_for_hooks(bus: str, place: Path, *pids: int) -> None:
    def hooked() -> bool:
        rows = phos(bus, place, "ps")
        return {*pids} <= {row["pid"] for row in rows if row["hook"] == "hooked"}

    wait_until(hooked, f"the hooks of {pids}")


ASKS_AS_A_RUNTIME = f"""
import os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
    connection.settimeout(30)
    try:
        connection.connect("{GIVEN}/{SOCKET}")
        for pid in sys.argv[1:]:
            folder = os.open("/tmp", os.O_RDONLY)
            socket.send_fds(connection, [b"pause " + pid.encode()], [folder])
            print(connection.recv(5000).decode())
    except OSError as error:
        print("refused")
"""


def test_a_containers_root_is_no_runtime(bus: str, place: Path, making: Making) -> None:
    """It was given phosd's folder, and names a pid that the machine has, and one that it has."""
    (place / "run").mkdir()
    with (
        phosd(bus, place),
        victim(place) as target,
        making(place / "run") as container,
    ):
        asks = container.runs(ASKS_AS_A_RUNTIME, str(target.pid), "1")
        done = subprocess.run(asks, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert not {*done.stdout.split()} - {"refused"}
        assert not phos(bus, place, "jobs")
        target.more_steps(2)
        container.target.more_steps(2)


VANDAL = """
import os, sys
from contextlib import suppress
folder, file = sys.argv[1:]
os.chdir("/run/phos/hook")
here = os.open(".", os.O_RDONLY)
os.rename("0/1.sock", "0/kept")
os.rename("0", "own")
def socket_link(name): os.symlink(file, name)
def folder_link(name): os.symlink(folder, name)
def fifo(name): os.mkfifo(name)
def full(name):
    os.mkdir(name)
    with open(name + "/x", "wb") as data:
        with suppress(OSError):
            while True:
                data.write(bytes(4096))
                data.flush()
            os.unlink(name + "/x")
print("begun", flush=True)
number = 0
while not os.path.exists("/tmp/over"):
    for name in ("0", "1.sock", "1.wake", "0/1.sock", "0/1.wake"):
        for make in (socket_link, folder_link, fifo, os.mkdir, full):
            number += 1
            with suppress(OSError):
                os.rename(name, f"left{number % 40}")
            with suppress(OSError):
                make(name)
    os.fchmod(here, (0, 0o777, 0o1733)[number % 3])
os.fchmod(here, 0o1733)
with suppress(OSError):
    os.rename("0", "last")
os.rename("own", "0")
os.rename("0/kept", "0/1.sock")
"""


def test_what_its_root_makes_of_the_folder_of_hooks(
    bus: str, place: Path, making: Making, undisturbed: Undisturbed
) -> None:
    """Links to what is the machine's, FIFOs, and no room, at each of the names that phosd uses."""
    (folder := place / "folder").mkdir()
    (file := place / "file").write_text("root's")
    with phosd(bus, place), victim(place) as other, making() as container:
        target = container.target
        wait_for_hooks(bus, place, target.pid)
        words = container.runs(VANDAL, str(folder), str(file))
        with harness.running(words, stdout=subprocess.PIPE) as vandal:
            assert vandal.stdout is not None
            assert vandal.stdout.readline() == "begun\n"
            for _ in range(2):
                served(bus, place, other)
            assert vandal.poll() is None
            (Path(f"/proc/{target.pid}/root") / "tmp/over").touch()
            assert vandal.wait(30) == 0
        assert not [*folder.iterdir()] and file.read_text() == "root's"
        for operation in ("suspend", "resume"):
            (*_, job) = phos(bus, place, operation, str(target.pid))
            assert job["state"] == "done"
        target.more_steps(2)
        right(target, undisturbed)


def test_a_cgroup_that_its_root_freezes_without_a_pause(
    bus: str, place: Path, making: Making, undisturbed: Undisturbed
) -> None:
    """Its own, as one that was delegated to it; while it is suspended, and for ever."""
    with phosd(bus, place), victim(place) as other, making() as container:
        target = container.target
        (hierarchy, path) = next(
            (each, path)
            for each, path in cgroups.memberships(target.pid).items()
            if each in ("freezer", cgroups.UNIFIED) and len(path) > 1
        )
        frozen = cgroups.folder(hierarchy, path)
        assert frozen is not None
        over = threading.Event()

        def freeze(*, to: bool) -> None:
            cgroups.set_frozen(frozen, frozen=to)

        def besiege() -> None:
            while not over.wait(0.01):
                freeze(to=True)
                time.sleep(0.03)
                freeze(to=False)

        with ThreadPoolExecutor() as pool:
            sieging = pool.submit(besiege)
            own = pool.submit(_try, bus, "Suspend", target.pid)
            served(bus, place, other)
            over.set()
            sieging.result()
            own.result()
        wait_until(lambda: not _at_work(bus, place), "the end of jobs")
        _try(bus, "Resume", target.pid)
        wait_until(lambda: not _at_work(bus, place), "the end of jobs")
        target.more_steps(2)
        freeze(to=True)
        _try(bus, "Suspend", target.pid)
        served(bus, place, other)
        freeze(to=False)
        wait_until(lambda: not _at_work(bus, place), "the end of jobs")
        _try(bus, "Resume", target.pid)
        target.more_steps(2)
        right(target, undisturbed)


def _try(bus: str, method: str, pid: int, uid: int | None = None) -> str:
    """Call a method for a process; the path of the job, or why there is none."""
    words = ("call", NAME, ROOT, MANAGER, method, "ua{sv}", str(pid), "0")
    try:
        return busctl(bus, *words, uid=uid)
    except RuntimeError as error:
        return str(error)


def _at_work(bus: str, place: Path) -> bool:
    ended = {"done", "failed", "cancelled"}
    return any(row["state"] not in ended for row in phos(bus, place, "jobs"))


def test_a_rootless_container_is_its_users(bus: str, place: Path) -> None:
    """To another user it is as root's: who is root there is told by the id that they have here."""
    with (
        phosd(bus, place),
        victim(place) as other,
        containers.run_by_runc("single", place, user_namespace=True) as target,
    ):
        target.wait_for_steps(2)
        wait_until(
            lambda: target.pid in [row["pid"] for row in phos(bus, place, "ps")], "it to be known"
        )
        for method in ("Suspend", "Resume", "Checkpoint"):
            for program, owner in ((target.pid, containers.FIRST_MAPPED), (other.pid, 0)):
                told = _try(bus, method, program, STRANGER)
                assert f"belongs to uid {owner}" in told, told
        assert not phos(bus, place, "jobs")


@NEEDS_PODMAN
def test_root_in_a_users_container_is_that_user(bus: str, place: Path, device: str) -> None:
    """Whatever id it has for itself, and though it was given the bus: another user's program and
    root's are not its own. Its own has capabilities there, and is root's to suspend.
    """
    (folder := place / "bobs").mkdir()
    os.chown(folder, BOB, BOB)
    users_podman = hostile.making(hostile.by_users_podman(STRANGER), place, device)
    with (
        phosd(bus, place),
        victim(place) as roots,
        users_podman(Path(bus.partition("path=")[2]).parent) as container,
    ):
        as_bob = ("setpriv", f"--reuid={BOB}", f"--regid={BOB}", "--clear-groups", sys.executable)
        bobs = start("single", folder, runtime=place / "run", interpreter=as_bob)
        try:
            bobs.wait_for_steps(2)
            own = container.target.pid
            wait_for_hooks(bus, place, own, bobs.pid)

            def told(method: str, pid: int) -> str:
                words = ["busctl", f"--address=unix:path={GIVEN}/bus", "call", NAME, ROOT, MANAGER]
                asked = [*container.enter, *words, method, "ua{sv}", str(pid), "0"]
                done = subprocess.run(asked, capture_output=True, text=True, timeout=60)
                return done.stdout + done.stderr

            for program, owner in ((bobs.pid, BOB), (roots.pid, 0)):
                for method in ("Suspend", "Resume", "Checkpoint"):
                    assert f"belongs to uid {owner}" in (said := told(method, program)), said
            assert "/org/phos/job" in (said := told("Suspend", own)), said
            refused = f"uid {STRANGER} may not save the tree of process {own}"
            wait_until(lambda: refused in (place / "phosd.log").read_text(), "what root there may")
            assert len(phos(bus, place, "jobs")) == 1
            bobs.more_steps(2)
            container.target.more_steps(2)
        finally:
            bobs.kill()


def test_an_image_that_points_to_anothers_memory(bus: str, place: Path) -> None:
    """Whoever makes a pod of an image of their own decides what is in the runtime's folder."""
    with phosd(bus, place), victim(place) as other, harness.running(["sleep", "600"]) as own:
        with connected(place) as connection:
            assert ask(connection, f"pause {other.pid}", place / "anns") == "paused"
            assert ask(connection, "save") == "saved"
        anns = [*(place / "anns").glob("phos-*")]
        another = "the container has no process"  # told when all was opened and its seal looked at
        for number, kind in enumerate(("links", "fifos", "folders", "devices", "users", "roots")):
            (folder := place / f"hostile{number}").mkdir()
            for path in anns:
                name = folder / path.name
                if kind == "links":
                    name.symlink_to(path)
                elif kind == "fifos":
                    os.mkfifo(name, 0o600)
                elif kind == "folders":
                    name.mkdir()
                elif kind == "devices":
                    os.mknod(name, 0o600 | 0o020000, os.makedev(1, 5))
                else:
                    shutil.copy(path, name)
                    os.chown(name, STRANGER if kind == "users" else 0, -1)
            with connected(place) as connection:
                told = ask(connection, f"restored {own.pid}", folder)
            assert told == "" or told.startswith("error"), (kind, told)
            assert (another in told) == (kind == "roots"), (kind, told)
        served(bus, place, other)
        own.kill()
