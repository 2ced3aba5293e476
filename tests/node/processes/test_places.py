"""The folders where hooks listen, in which users may make what they like."""

import contextlib
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from phosd.engine.hook_client import places
from phosd.engine.hook_client.link import HookLink
from phosd.engine.hook_client.listeners import Listeners
from phosd.engine.hook_client.places import IN_CONTAINERS
from phosd.engine.node.node import Node
from phosd.engine.program.discovery import discover_group
from phosd.errors import Busy, NoSuchProcess, NotAuthorized, Unsupported
from tests.node.checkpoint_restore.conftest import Starter, node, place, start
from tests.support.hanging_folder import hanging_folder
from tests.support.harness import running, users_hooks, wait_until

__all__ = ["node", "place", "start"]

USER, OTHER = 54321, 54322


@contextmanager
def process_of(user: int) -> Iterator[int]:
    words = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "sleep", "600"]
    with running(words) as found:
        wait_until(lambda: Path(f"/proc/{found.pid}/comm").read_text() == "sleep\n", "its ids")
        try:
            yield found.pid
        finally:
            found.kill()


def listener(path: Path, user: int = 0) -> None:
    """A file of a socket, where nobody accepts."""
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
    os.chown(path, user, user)


def test_each_user_has_a_folder_that_no_other_can_enter(tmp_path: Path) -> None:
    places.make_hooks_folder(tmp_path)
    with process_of(USER) as one, process_of(OTHER) as two:
        for pid in (one, two):
            places.make_place(tmp_path, pid)
    hooks = places.hooks_folder(tmp_path)
    assert (hooks.stat().st_uid, stat.S_IMODE(hooks.stat().st_mode)) == (0, 0o755)
    for user in (USER, OTHER):
        status = (hooks / str(user)).lstat()
        assert (status.st_uid, status.st_mode) == (user, stat.S_IFDIR | 0o700)


@pytest.mark.parametrize("kind", ["file", "link", "folder", "full folder"])
def test_nobody_keeps_a_user_from_theirs(kind: str, tmp_path: Path) -> None:
    """Where an earlier phosd has left a folder in which everybody may make something."""
    hooks = places.hooks_folder(tmp_path)
    hooks.mkdir()
    hooks.chmod(0o1777)
    places.make_hooks_folder(tmp_path)
    squatted, theirs = hooks / str(USER), tmp_path / "theirs"
    theirs.mkdir()
    match kind:
        case "file":
            squatted.touch()
        case "link":
            squatted.symlink_to(theirs)
        case _:
            squatted.mkdir()
    if kind == "full folder":
        (squatted / "file").touch()
    os.chown(squatted, OTHER, OTHER, follow_symlinks=False)
    with process_of(USER) as pid:
        for _ in range(2):
            places.make_place(tmp_path, pid)
    status = squatted.lstat()
    assert (status.st_uid, status.st_mode) == (USER, stat.S_IFDIR | 0o700)
    assert theirs.stat().st_uid == 0 and not any(theirs.iterdir())


def test_users_of_many_ids_leave_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.make_hooks_folder(tmp_path)
    monkeypatch.setattr(places, "MOST_USERS", 3)
    for user in range(OTHER, OTHER + 3):
        (users_hooks(tmp_path, user) / "left").touch()
    with process_of(USER) as pid:
        with pytest.raises(Busy, match="3 users have folders"):
            places.make_place(tmp_path, pid)
        places.forget_users(tmp_path)
        places.make_place(tmp_path, pid)
        places.forget_users(tmp_path)
    assert [path.name for path in places.hooks_folder(tmp_path).iterdir()] == [str(USER)]


NAMESPACE = """
import ctypes, os
assert ctypes.CDLL(None).unshare(0x10000000) == 0
print("made", flush=True)
input()
os.setresuid(1, 1, 1)
print("is another", flush=True)
input()
"""


def test_no_id_of_a_user_namespace_has_a_folder_but_its_makers(tmp_path: Path) -> None:
    """A user may have 65,536 of them, and each would be one of few."""
    places.make_hooks_folder(tmp_path)
    words = [sys.executable, "-c", NAMESPACE]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with running(words, **pipes) as inside, process_of(USER) as outside:
        assert inside.stdin is not None and inside.stdout is not None
        assert inside.stdout.readline() == "made\n"
        places.make_place(tmp_path, inside.pid)
        Path(f"/proc/{inside.pid}/uid_map").write_text(f"0 0 1\n1 {OTHER} 1\n")
        inside.stdin.write("\n")
        inside.stdin.flush()
        assert inside.stdout.readline() == "is another\n"
        with pytest.raises(Unsupported, match=f"user {OTHER} is not who made it"):
            places.make_place(tmp_path, inside.pid)
        places.make_place(tmp_path, outside)
    there = {path.name for path in places.hooks_folder(tmp_path).iterdir()}
    assert there == {"0", str(USER)}


def test_what_a_user_mounts_on_their_folder_is_not_asked(tmp_path: Path) -> None:
    """A setuid fusermount mounts what they serve."""
    places.make_hooks_folder(tmp_path)
    with process_of(USER) as pid:
        places.make_place(tmp_path, pid)
        with hanging_folder(places.hooks_folder(tmp_path) / str(USER)) as server:
            server.hang()
            with pytest.raises(NotAuthorized, match=r"somebody puts .*54321 back"):
                places.make_place(tmp_path, pid)
            assert pid not in Listeners(tmp_path).pids()


def test_names_taken_in_advance_are_nobodys(node: Node, start: Starter) -> None:
    """A program is reached although others have made the names that it would have had for an
    earlier phosd.
    """
    hooks = places.hooks_folder(node.config.runtime_dir)
    assert stat.S_IMODE(hooks.stat().st_mode) == 0o755
    hooks.chmod(0o1777)
    target = start("single")
    squatted = hooks / f"{target.pid}.sock"
    squatted.touch()
    os.chown(squatted, USER, USER)
    target.wait_for_steps(3)
    with discover_group(target.pid, node.config.runtime_dir, lambda tree: None) as group:
        assert [member.link is not None for member in group.members] == [True]
    (found,) = [each for each in node.processes() if each.pid == target.pid]
    assert found.hook_state == "hooked"


def test_an_earlier_place_has_to_be_of_the_processs_user(tmp_path: Path) -> None:
    """What others have there is nothing, and no reason to refuse anything."""
    places.make_hooks_folder(tmp_path)
    with process_of(USER) as pid:
        listener(places.hooks_folder(tmp_path) / f"{pid}.sock", OTHER)
        with pytest.raises(NoSuchProcess, match="has no hook"):
            HookLink(pid, tmp_path).connect()


def test_who_is_seen_is_given_a_folder(node: Node, start: Starter) -> None:
    """A program that has begun without phosd, when it is listed, and when it is to be saved."""
    target = start("single")
    target.wait_for_steps(3)
    folder = users_hooks(node.config.runtime_dir)

    def hooked() -> bool:
        return [each.hook_state for each in node.processes() if each.pid == target.pid] == [
            "hooked"
        ]

    shutil.rmtree(folder)
    wait_until(hooked, "the hook to listen")
    shutil.rmtree(folder)
    with discover_group(target.pid, node.config.runtime_dir, lambda tree: None) as group:
        assert [member.link is not None for member in group.members] == [True]


def test_what_is_mounted_on_a_folder_is_not_asked(tmp_path: Path) -> None:
    """By a user, on their own: it may be a file system whose server never answers."""
    places.make_hooks_folder(tmp_path)
    folder = users_hooks(tmp_path)
    with places.hook_socket(tmp_path, os.getpid()) as found:
        assert found.folder is not None
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=700", "none", folder], check=True)
    try:
        with places.hook_socket(tmp_path, os.getpid()) as found:
            assert found.folder is None
    finally:
        subprocess.run(["umount", folder], check=True)


# -- who listens ----------------------------------------------------------------------------------


@contextmanager
def container(processes: int = 1) -> Iterator[tuple[Path, list[int]]]:
    """Processes in a mount namespace that has a folder in memory for hooks, and that folder."""
    mounts = (
        f"mount -t tmpfs run /run && mkdir -p {IN_CONTAINERS} && mount -t tmpfs -o mode=1733,"
        f"nr_inodes=0 hook {IN_CONTAINERS}"
    )
    more = "".join("sleep 600 & echo $!; " for _ in range(processes - 1))
    words = ["unshare", "--mount", "sh", "-ec", f"{mounts}; {more} echo $$; exec sleep 600"]
    with running(words, stdout=subprocess.PIPE, start_new_session=True) as first:
        assert first.stdout is not None
        pids = [int(first.stdout.readline()) for _ in range(processes)]
        try:
            yield Path(f"/proc/{first.pid}/root{IN_CONTAINERS}"), pids
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)


def test_whose_hooks_listen(tmp_path: Path) -> None:
    """On this machine, in containers, and those of earlier versions."""
    places.make_hooks_folder(tmp_path)
    with ExitStack() as stack:
        one, two, earlier, none = (
            stack.enter_context(process_of(user)) for user in (USER, OTHER, USER, USER)
        )
        inside, (new, old, silent) = stack.enter_context(container(3))
        for pid, user in ((one, USER), (two, OTHER)):
            places.make_place(tmp_path, pid)
            listener(places.socket_path(tmp_path, pid), user)
        listener(places.hooks_folder(tmp_path) / f"{earlier}.sock", USER)
        with places.hook_socket(tmp_path, new, make=True):
            assert stat.S_IMODE((inside / "0").stat().st_mode) == 0o700
        for path in (inside / "0" / f"{new}.sock", inside / f"{old}.sock"):
            path.touch()
        looked = {one, two, earlier, none, new, old, silent}
        listeners = Listeners(tmp_path)
        for _ in range(2):
            assert looked & {*listeners.pids()} == {one, two, earlier, new, old}


def test_no_folder_of_users_is_listed(tmp_path: Path) -> None:
    """They may make any number of names, and programs stand still meanwhile."""
    places.make_hooks_folder(tmp_path)
    mine = users_hooks(tmp_path)
    with container() as (inside, (pid,)):
        theirs = inside / "0"
        theirs.mkdir()
        for folder in (mine, theirs, inside):
            (folder / f"{pid}.sock").touch()
            os.utime(folder, (0, 1))  # whoever lists it changes the first

        def listed() -> list[bool]:
            return [folder.stat().st_atime != 0 for folder in (mine, theirs, inside)]

        listeners = Listeners(tmp_path)
        for _ in range(2):
            assert pid in listeners.pids()
        assert listed() == [False] * 3
        for folder in (mine, theirs, inside):
            [*folder.iterdir()]
        assert listed() == [True] * 3, "the test tests nothing"


def test_what_a_later_look_has_to_open_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Containers that are made while programs stand still are not waited for; that is said."""
    places.make_hooks_folder(tmp_path)
    monkeypatch.setattr("phosd.engine.hook_client.listeners.MOST_NEW", 1)
    with ExitStack() as stack:
        listeners = Listeners(tmp_path)
        known, (before,) = stack.enter_context(container())
        (known / f"{before}.sock").touch()
        assert before in listeners.pids()
        later = []
        for _ in range(3):
            inside, (pid,) = stack.enter_context(container())
            (inside / f"{pid}.sock").touch()
            later.append(pid)
        found = {*listeners.pids()}
        assert before in found and len(found & {*later}) == 1
        assert "2 new containers were not looked at" in caplog.text
        first = Listeners(tmp_path)
        assert {before, *later} <= {*first.pids()}


def test_a_container_of_too_many_processes_is_not_looked_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    places.make_hooks_folder(tmp_path)
    monkeypatch.setattr("phosd.engine.hook_client.listeners.MOST_IN_CONTAINER", 2)
    listeners = Listeners(tmp_path)
    with container(3) as (inside, pids):
        for pid in pids:
            (inside / f"{pid}.sock").touch()
        assert len({*pids} & {*listeners.pids()}) == 2
    assert "a container has 3 processes; only 2 are looked at" in caplog.text


# -- what is left ---------------------------------------------------------------------------------


def test_nobody_keeps_the_folder_of_pid_namespaces(tmp_path: Path) -> None:
    """It cannot be entered, and what was in its place before is not followed."""
    hooks = places.hooks_folder(tmp_path)
    hooks.mkdir()
    hooks.chmod(0o1777)
    (tmp_path / "elsewhere").mkdir(mode=0o755)
    (hooks / "pidns").symlink_to(tmp_path / "elsewhere")
    for _ in range(2):
        folder = places.namespaces_folder(tmp_path)
        status = folder.lstat()
        assert stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
        folder.rmdir()
        folder.mkdir()
        os.chown(folder, USER, USER)


def test_what_an_ended_namespace_has_left_is_removed_however_deep(tmp_path: Path) -> None:
    folder = places.hooks_folder(tmp_path)
    folder.mkdir()
    folder = places.namespaces_folder(tmp_path) / "1234"
    folder.mkdir()
    at = os.open(folder, os.O_PATH)
    for _ in range(3000):
        os.mkdir("a", dir_fd=at)
        below = os.open("a", os.O_PATH, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    places.sweep(tmp_path)
    assert not folder.exists()


def test_a_hook_of_an_earlier_version_comes_back(place: Path) -> None:
    """One that came with an image, to a machine that has no folder for it yet."""
    place.chmod(0o755)
    places.make_hooks_folder(place)
    hooks = places.hooks_folder(place)
    code = (
        "import os, socket, sys, time\n"
        "base, listener = f'{sys.argv[1]}/{os.getpid()}', socket.socket(socket.AF_UNIX)\n"
        "while True:\n"
        "    time.sleep(0.01)\n"
        "    try:\n"
        "        os.stat(base + '.wake')\n"
        "        listener.bind(base + '.sock')\n"
        "        break\n"
        "    except OSError: pass\n"
        "listener.listen()\n"
        "listener.accept()[0].recv(1)\n"
    )
    words = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
    with running([*words, "/usr/bin/python3", "-S", "-c", code, hooks]) as earlier:
        wait_until(lambda: Path(f"/proc/{earlier.pid}/comm").read_text() != "setpriv\n", "its ids")
        link = HookLink(earlier.pid, place)
        link.reattach(60)
        assert link.connected
        link.close()
    assert not [*hooks.rglob("*.wake")]
