"""Where hooks listen: ``hook/<pid>.sock`` of the runtime folder.

A program in a pid namespace of its own sees another folder in its place, ``pidns/<inode>`` of this
one, and its processes are named by the pids that they have for themselves. Only root may enter
``pidns``: else users could put something there for a number that the next namespace gets.

A program in a container has a folder in memory of its own, ``/run/phos/hook`` there, which phosd
reaches through the root of the process. It belongs to the container's root, whoever that is.
"""

import contextlib
import os
import re
import secrets
import socket
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from phosd.engine.system import containers, pid_namespaces, procfs
from phosd.engine.system.removal import remove_trees
from phosd.engine.system.thread_ids import as_owner
from phosd.errors import NotAuthorized

_NAMESPACES = "pidns"
_NUMBER = re.compile("[0-9]{1,20}")
_TRIES = 100
IN_CONTAINERS = "/run/phos/hook"
"""Where programs in containers see the folder of their sockets."""


@dataclass(frozen=True)
class HookSocket:
    """Where the hook of a process listens, or will: ``path`` is valid as long as the context of
    :func:`hook_socket`, ``text`` says for people where it is. ``owner``: that of the process, if it
    is in a container, where there may be no other users.
    """

    path: Path
    text: str
    owner: procfs.Status | None = None

    def __str__(self) -> str:
        return self.text

    def is_of(self, owner: int) -> bool:
        """Return whether a socket of ``owner`` is there. Raises :class:`FileNotFoundError`."""
        return _is_socket_of(self.path, owner)

    def connect(self, connection: socket.socket) -> None:
        """Connect to it, however long its path is."""
        folder = os.open(self.path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with self._as_owner():
                connection.connect(f"/proc/self/fd/{folder}/{self.path.name}")
        finally:
            os.close(folder)

    def clear_the_way(self, owner: int) -> None:
        """Put aside what keeps the hook from listening there, unless it is its socket after all."""
        aside = put_aside(self.path)
        if _is_socket_of(aside, owner):
            aside.rename(self.path)

    @contextmanager
    def waking(self) -> Iterator[None]:
        """Have the file there that wakes the hook, inside the context."""
        wake = self.path.with_suffix(".wake")
        _create(wake, self._as_owner)
        try:
            yield
        finally:
            with contextlib.suppress(FileNotFoundError):
                wake.unlink()

    def _as_owner(self) -> AbstractContextManager[None]:
        return as_owner(self.owner) if self.owner else contextlib.nullcontext()


def _is_socket_of(path: Path, owner: int) -> bool:
    status = path.lstat()
    return stat.S_ISSOCK(status.st_mode) and status.st_uid == owner


def _create(path: Path, as_owner: Callable[[], AbstractContextManager[None]]) -> None:
    """Create an empty file at ``path``, whatever is there: every user can write to the folder."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW
    for _ in range(_TRIES):
        try:
            with as_owner():
                os.close(os.open(path, flags, 0o600))
            return
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                put_aside(path)
    raise squatted(path)


def hooks_folder(runtime_dir: Path) -> Path:
    """Return the folder of all hooks' sockets. Any user may write to it."""
    return runtime_dir / "hook"


def namespaces_folder(runtime_dir: Path) -> Path:
    """Return the folder of those that stand for it in pid namespaces, which is made if need be.

    Raises :class:`NotAuthorized` if somebody always has something else there.
    """
    folder = hooks_folder(runtime_dir) / _NAMESPACES
    for _ in range(_TRIES):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):
            if _is_ours(folder):
                return folder
            put_aside(folder)
    raise squatted(folder)


def _is_ours(folder: Path) -> bool:
    # Of root's own nobody else can put something else in its place.
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def put_aside(path: Path) -> Path:
    """Free a name by renaming, because a folder that is not empty cannot be removed at once."""
    return path.rename(path.with_name(f"{path.name}.{secrets.token_hex(4)}.squatted"))


def squatted(path: Path) -> NotAuthorized:
    """Return the error for a path that somebody always takes again."""
    return NotAuthorized(
        f"somebody puts {path} back whenever it is removed", hint=f"see who writes to {path.parent}"
    )


def socket_path(runtime_dir: Path, pid: int) -> Path:
    """Return the path of the socket of the hook of ``pid``."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        if pid_namespaces.is_nested(pid):
            inode = (procfs.PROC / str(pid) / "ns/pid").stat().st_ino
            return hooks_folder(runtime_dir) / _NAMESPACES / f"{inode}/{procfs.own_id(pid)}.sock"
    return hooks_folder(runtime_dir) / f"{pid}.sock"


@contextmanager
def hook_socket(runtime_dir: Path, pid: int) -> Iterator[HookSocket]:
    """Find the socket of the hook of ``pid``, here or in its container."""
    with containers.own_memory(pid, IN_CONTAINERS) as folder:
        inside = None if folder is None else _inside(folder, pid)
        if inside is None:
            path = socket_path(runtime_dir, pid)
            inside = HookSocket(path, str(path))
        yield inside


def _inside(folder: int, pid: int) -> HookSocket | None:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        name = f"{procfs.own_id(pid)}.sock"
        text = f"{IN_CONTAINERS}/{name} in its container"
        return HookSocket(Path(f"/proc/self/fd/{folder}/{name}"), text, procfs.status(pid))
    return None


def folders(runtime_dir: Path) -> Iterator[Path]:
    """Yield the folders in which hooks' sockets are, but for those of containers."""
    hooks = hooks_folder(runtime_dir)
    yield hooks
    for folder, _ in _of_namespaces(hooks):
        yield folder


def listening(runtime_dir: Path) -> Iterator[int]:
    """Yield the processes for which a hook seems to listen."""
    hooks = hooks_folder(runtime_dir)
    yield from sorted(_pids(hooks))
    nested = {name: pids for folder, name in _of_namespaces(hooks) if (pids := {*_pids(folder)})}
    found = pid_namespaces.members(nested) if nested else {}
    for name, pids in nested.items():
        yield from sorted(found[name][pid] for pid in pids & found[name].keys())
    yield from _in_containers()


def _in_containers() -> Iterator[int]:
    """Yield the processes in containers for which a hook seems to listen."""
    ours = procfs.namespace(os.getpid(), "mnt")
    seen: dict[str, frozenset[int]] = {ours: frozenset()}
    for pid in sorted(procfs.pids()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            space = procfs.namespace(pid, "mnt")
            if space not in seen:
                with containers.own_memory(pid, IN_CONTAINERS) as folder:
                    path = Path(f"/proc/self/fd/{folder}")
                    seen[space] = frozenset(() if folder is None else _pids(path))
            if seen[space] and procfs.own_id(pid) in seen[space]:
                yield pid


def sweep(runtime_dir: Path) -> None:
    """Remove what processes and namespaces have left that have ended, and ``.wake`` files.

    A stale ``.wake`` file would wake a hook in the middle of a dump. Raises :class:`Timeout`.
    """
    hooks = hooks_folder(runtime_dir)
    _sweep(hooks, {pid: pid for pid in procfs.pids()})
    folders = dict(_of_namespaces(hooks))
    found = pid_namespaces.members(folders.values()) if folders else {}
    for folder, name in folders.items():
        _sweep(folder, found[name])
    remove_trees([folder for folder, name in folders.items() if not found[name]])
    remove_trees([*(hooks / _NAMESPACES).glob("*.old")])


def _sweep(folder: Path, ids: Mapping[int, int]) -> None:
    for path in [*folder.glob("*.sock"), *folder.glob("*.wake")]:
        pid = path.stem
        with contextlib.suppress(OSError):  # a folder of this name, made by any user, is harmless
            found = path.lstat()
            dead = pid.isascii() and pid.isdecimal() and int(pid) not in ids
            if dead or (path.suffix == ".wake" and stat.S_ISREG(found.st_mode)):
                path.unlink()


def _pids(folder: Path) -> Iterator[int]:
    """Yield the pids after which sockets in a folder are named."""
    for path in folder.glob("*.sock"):
        if path.stem.isascii() and path.stem.isdecimal():
            yield int(path.stem)


def _of_namespaces(hooks: Path) -> Iterator[tuple[Path, str]]:
    """Yield the folder of each pid namespace, and the name that this has in ``/proc/pid/ns``."""
    with contextlib.suppress(FileNotFoundError):  # none was ever made
        if _is_ours(hooks / _NAMESPACES):
            for folder in (hooks / _NAMESPACES).iterdir():
                if _NUMBER.fullmatch(folder.name):
                    yield folder, f"pid:[{folder.name}]"
