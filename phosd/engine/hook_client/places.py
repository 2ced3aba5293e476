"""Where hooks listen: ``hook/<uid>/<pid>.sock`` of the runtime folder.

The folder of each user is theirs alone, and phosd makes it: nobody else can take a name there. A
hook asks for it by a connection to ``program.sock``, and phosd makes it for whoever it looks at.
Hooks of earlier versions listen at ``hook/<pid>.sock``, where they are found as long as they run.

A program in a pid namespace of its own sees another folder in the place of ``hook``,
``pidns/<inode>`` of this one, and its processes are named by the pids that they have for
themselves. Only root may enter ``pidns``.

A program in a container has a folder in memory of its own, ``/run/phos/hook`` there, which phosd
reaches through the root of the process. It belongs to the container's root, whoever that is, and
users are named there by the ids that they have for themselves.
"""

import contextlib
import logging
import os
import re
import socket
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from phosd.engine.hook_client.user_folders import Place, opened_folder
from phosd.engine.system import containers, mounts, pid_namespaces, procfs, user_namespaces
from phosd.engine.system.own_folders import TRIES, freed, is_own, own_folder, put_aside, squatted
from phosd.engine.system.removal import remove_trees
from phosd.engine.system.thread_ids import as_owner
from phosd.errors import Busy, Reason, Unsupported

_NAMESPACES = "pidns"
_NUMBER = re.compile("[0-9]{1,20}")
MOST_USERS = 4096
"""Users who have a folder: each takes an inode, and one user may have many ids in namespaces."""
MOST_SWEPT = 100_000
"""Names that are looked at in a user's folder, for what is left of processes."""
IN_CONTAINERS = "/run/phos/hook"
"""Where programs in containers see the folder of their sockets."""
_PLACE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HookSocket:
    """Where the hook of a process listens, or will, as long as the context of :func:`hook_socket`;
    ``text`` says for people where that is.

    ``folder`` is its user's, None if that was not made; a hook of an earlier version is at
    ``earlier``. ``owner``: that of the process, if it is in a container, where there may be no
    other users.
    """

    name: str
    folder: Path | None
    earlier: Path
    text: str
    owner: procfs.Status | None = None

    def __str__(self) -> str:
        return self.text

    def is_of(self, owner: int) -> bool:
        """Return whether a socket of ``owner`` is there. Raises :class:`FileNotFoundError`."""
        with _socket_of(self._place(owner), owner) as found:
            return found is not None

    def connect(self, connection: socket.socket, owner: int) -> None:
        """Connect to the socket of ``owner``, however long its path is, and to no other that has
        its name by now: a link may lead to where only root may connect.
        """
        with _socket_of(self._place(owner), owner) as found:
            if found is None:
                raise FileNotFoundError(str(self))
            with self._as_owner():
                connection.connect(f"/proc/self/fd/{found}")

    def clear_the_way(self, owner: int) -> None:
        """Put aside what keeps the hook from listening there, unless it is its socket after all."""
        place = self._place(owner)
        with self._as_owner():
            aside = put_aside(place)
            with _socket_of(aside, owner) as found:
                if found is not None:
                    aside.rename(place)

    @contextmanager
    def waking(self) -> Iterator[None]:
        """Keep the files there that wake the hook, of whichever version, inside the context."""
        places = [self.earlier] if self.folder is None else [self.folder / self.name, self.earlier]
        with ExitStack() as stack:
            for place in places:
                wake = place.with_suffix(".wake")
                try:
                    _create(wake, self._as_owner)
                except (FileNotFoundError, PermissionError):
                    if place is not self.earlier:
                        raise
                    continue  # no hook of an earlier version could listen there either
                stack.callback(self._remove, wake)
            yield

    def admit_earlier(self) -> None:
        """Let a hook of an earlier version listen, if that has come with an image: everybody may
        make something in the folder from then on. In containers everybody may.
        """
        folder = self.earlier.parent
        if self.owner is None and not folder.stat().st_mode & stat.S_IWOTH:
            _log.info("a hook of an earlier version may have to listen in %s: it is opened", folder)
            folder.chmod(0o1777)

    def _place(self, owner: int) -> Path:
        """Return where it is. At the place of earlier ones anybody may have put something."""
        if self.folder is not None and exists(self.folder / self.name):
            return self.folder / self.name
        with _socket_of(self.earlier, owner) as found:
            if found is not None:
                return self.earlier
        raise FileNotFoundError(str(self))

    def _remove(self, wake: Path) -> None:
        with contextlib.suppress(OSError), self._as_owner():  # they may have something else there
            wake.unlink()

    def _as_owner(self) -> AbstractContextManager[None]:
        return as_owner(self.owner) if self.owner else contextlib.nullcontext()


def exists(path: str | Path, folder: int | None = None) -> bool:
    """Return whether there is something at a path, or at a name in an open folder. If a file system
    is mounted there, its server is not asked.
    """
    try:
        os.close(os.open(path, _PLACE, dir_fd=folder))
    except OSError:
        return False
    return True


@contextmanager
def _socket_of(path: Path, owner: int) -> Iterator[int | None]:
    """Open the socket of ``owner`` at ``path``, as ``O_PATH``; None if something else is there.

    Users may have mounted what they like on the name, whose server is not asked for anything.
    Raises :class:`FileNotFoundError` if nothing is there.
    """
    with mounts.opened_unmounted(path) as found:
        status = os.fstat(found) if found is not None else None
        fitting = status and stat.S_ISSOCK(status.st_mode) and status.st_uid == owner
        yield found if fitting else None


def _create(path: Path, as_owner: Callable[[], AbstractContextManager[None]]) -> None:
    """Create an empty file at ``path``, whatever is there: users can write to the folder. Nothing
    is put aside there that the owner could not rename: a container may have any folder in its
    place that others write to.
    """
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW
    for _ in range(TRIES):
        try:
            with as_owner():
                os.close(os.open(path, flags, 0o600))
            return
        except FileExistsError:
            with as_owner():
                if not freed(path):
                    break
    raise squatted(path)


def hooks_folder(runtime_dir: Path) -> Path:
    """Return the folder of users' folders."""
    return runtime_dir / "hook"


def make_hooks_folder(runtime_dir: Path) -> None:
    """Make the folder in which only root can make something, unless it is there.

    One of an earlier phosd, where everybody can, stays so as long as it is there: the hooks that
    listen in it could not do so any more when they are woken.
    """
    hooks_folder(runtime_dir).mkdir(mode=0o755, parents=True, exist_ok=True)


def namespaces_folder(runtime_dir: Path) -> Path:
    """Return the folder of those that stand for it in pid namespaces, which is made if need be.

    Raises :class:`NotAuthorized` if somebody always has something else there.
    """
    return own_folder(hooks_folder(runtime_dir) / _NAMESPACES)


def make_place(runtime_dir: Path, pid: int) -> None:
    """Make a folder for the sockets of a user's hooks where process ``pid``, which is in no
    container, looks for it. Raises :class:`Busy` if too many users have one,
    :class:`NotAuthorized`, :class:`Unsupported` for one of the many ids of a user namespace, and
    :class:`OSError` if the process has ended.
    """
    with ExitStack() as stack:
        _make(runtime_dir, place_outside(runtime_dir, pid), pid, stack)


def _make(runtime_dir: Path, place: Place, pid: int, stack: ExitStack) -> int:
    found = place.opened()
    if found is None:
        if place.status is None and not user_namespaces.made_its_users(pid):
            raise Unsupported(
                f"process {pid} is in a user namespace, where user {place.uid} is not who made it",
                hint="give the container a folder for hooks (`phos setup-container-runtime`)",
                reason=Reason.PROCESS_STATE,
            )
        if place.status is None and has_many_users(runtime_dir, MOST_USERS):
            raise Busy(
                f"{MOST_USERS} users have folders in {hooks_folder(runtime_dir)}",
                hint="see who has so many ids; phosd removes those of ids without a process",
            )
        found = place.made()
    stack.callback(os.close, found)
    return found


def socket_path(runtime_dir: Path, pid: int) -> Path:
    """Return the path of the socket of the hook of ``pid``, which is in no container."""
    place = place_outside(runtime_dir, pid)
    return place.folder / place.name


def place_outside(runtime_dir: Path, pid: int, *, nested: bool = True) -> Place:
    """Return what a process looks for that is in no container. ``nested``: whether it may be in a
    pid namespace.
    """
    parent, user, own = hooks_folder(runtime_dir), -1, pid
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        user = procfs.status(pid).uids[1]
        if nested and pid_namespaces.is_nested(pid):
            inode = (procfs.PROC / str(pid) / "ns/pid").stat().st_ino
            parent, own = parent / _NAMESPACES / str(inode), procfs.own_id(pid)
    name = f"{own}.sock"
    return Place(parent, user, user, name, str(parent / str(user) / name))


def place_inside(memory: int, pid: int) -> Place:
    """Return what a process in a container looks for, which has this folder in memory. Raises
    :class:`FileNotFoundError` or :class:`ProcessLookupError` if it has ended.
    """
    status, user, name = (
        procfs.status(pid),
        user_namespaces.own_user(pid),
        f"{procfs.own_id(pid)}.sock",
    )
    text = f"{IN_CONTAINERS}/{user}/{name} in its container"
    return Place(Path(f"/proc/self/fd/{memory}"), user, status.uids[1], name, text, status)


@contextmanager
def hook_socket(runtime_dir: Path, pid: int, *, make: bool = False) -> Iterator[HookSocket]:
    """Find the socket of the hook of ``pid``, here or in its container. ``make``: the folder of its
    user, if there is none, with the errors of :func:`make_place`.
    """
    with containers.own_memory(pid, IN_CONTAINERS) as memory, ExitStack() as stack:
        place = None
        if memory is not None:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                place = place_inside(memory, pid)
        place = place or place_outside(runtime_dir, pid)
        if make:
            folder: int | None = _make(runtime_dir, place, pid, stack)
        elif (folder := place.opened()) is not None:
            stack.callback(os.close, folder)
        yield HookSocket(
            place.name,
            None if folder is None else Path(f"/proc/self/fd/{folder}"),
            place.parent / place.name,
            place.text,
            place.status,
        )


def folders(runtime_dir: Path) -> Iterator[Path]:
    """Yield the folders in which hooks' sockets are, but for those of containers."""
    hooks = hooks_folder(runtime_dir)
    for parent in (hooks, *_of_namespaces(hooks)):
        yield parent
        yield from _of_users(parent)


def forget_users(runtime_dir: Path) -> None:
    """Remove the folders of users without a process. Raises :class:`Timeout`."""
    there = {*_of_users(hooks_folder(runtime_dir))}
    for pid in procfs.pids():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            there.difference_update(
                hooks_folder(runtime_dir) / str(uid) for uid in procfs.status(pid).uids
            )
    remove_trees(sorted(there))


def has_many_users(runtime_dir: Path, most: int = MOST_USERS // 2) -> bool:
    """Return whether so many users have a folder."""
    return len([*_of_users(hooks_folder(runtime_dir))]) >= most


def sweep(runtime_dir: Path) -> None:
    """Remove what processes, users and namespaces have left that have ended, and ``.wake`` files.

    A stale ``.wake`` file would wake a hook in the middle of a dump. Raises :class:`Timeout`.
    """
    hooks = hooks_folder(runtime_dir)
    forget_users(runtime_dir)
    ids = {pid: pid for pid in procfs.pids()}
    for folder in (hooks, *_of_users(hooks)):
        _sweep(folder, ids)
    nested = {each: f"pid:[{each.name}]" for each in _of_namespaces(hooks)}
    found = pid_namespaces.members(nested.values()) if nested else {}
    for folder, name in nested.items():
        for each in (folder, *_of_users(folder)):
            _sweep(each, found[name])
    remove_trees([folder for folder, name in nested.items() if not found[name]])
    remove_trees([*(hooks / _NAMESPACES).glob("*.old")])


def _sweep(folder: Path, ids: Mapping[int, int]) -> None:
    """In a user's folder, as far as :data:`MOST_SWEPT` names go."""
    owner = None if is_own(folder) else folder.lstat().st_uid
    opened = os.open(folder, os.O_RDONLY) if owner is None else opened_folder(folder, owner)
    if opened is None:
        return
    try:
        with os.scandir(f"/proc/self/fd/{opened}") as entries:
            for entry in islice(entries, MOST_SWEPT):
                _remove_left(entry, opened, ids)
    finally:
        os.close(opened)


def _remove_left(entry: "os.DirEntry[str]", folder: int, ids: Mapping[int, int]) -> None:
    pid, _, suffix = entry.name.partition(".")
    with contextlib.suppress(OSError):  # a folder of this name, made by any user, is harmless
        if suffix in ("sock", "wake"):
            dead = pid.isascii() and pid.isdecimal() and int(pid) not in ids
            if dead or (suffix == "wake" and entry.is_file(follow_symlinks=False)):
                os.unlink(entry.name, dir_fd=folder)


def _of_users(parent: Path) -> Iterator[Path]:
    """Yield the folders of users in a folder of ours."""
    with contextlib.suppress(FileNotFoundError), os.scandir(parent) as entries:
        for entry in entries:
            if _NUMBER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                yield parent / entry.name


def _of_namespaces(hooks: Path) -> Iterator[Path]:
    """Yield the folder of each pid namespace, which is named after its inode."""
    if is_own(hooks / _NAMESPACES):
        yield from _of_users(hooks / _NAMESPACES)
