"""Identify a process by its start time at the moment when a caller names its pid."""

import socket
from dataclasses import dataclass

from phosd import unix_sockets
from phosd.engine.image.manifest import Manifest
from phosd.engine.program.tree import require_process
from phosd.engine.system import procfs
from phosd.engine.system.procfs import ProcessId
from phosd.errors import NoSuchProcess, NotAuthorized


@dataclass(frozen=True)
class Target:
    """The process that a caller names, and the user it belongs to."""

    id: ProcessId
    uid: int

    @property
    def pid(self) -> int:
        """The process id."""
        return self.id.pid

    @property
    def start_time(self) -> int:
        """Start time of the process in clock ticks since boot."""
        return self.id.start_time


def identify(pid: int) -> Target:
    """Return the process that has this pid now. ``uid`` is 0 when its user ids differ (a set-uid
    program).

    Raises :class:`NoSuchProcess` when there is none, or only a zombie or a thread.
    """
    found = procfs.stat(pid)
    try:
        status = procfs.status(pid)
    except (FileNotFoundError, ProcessLookupError):
        found = None
    if found is None:
        raise NoSuchProcess(f"there is no process {pid}", hint="`phos ps` lists the GPU processes")
    if found.dead:
        raise NoSuchProcess(
            f"process {pid} has ended and waits for its parent, {found.parent}, to notice",
            hint="there is nothing left of it to save",
        )
    require_process(pid, status)
    uids = set(status.uids)
    return Target(ProcessId(pid, found.start_time), uids.pop() if len(uids) == 1 else 0)


def identify_peer(connection: socket.socket) -> Target:
    """Return the process that has made a connection. Call it when that is accepted: the connection
    may outlive the process, and another one get its pid.

    Raises :class:`NoSuchProcess` if it has ended, and :class:`NotAuthorized` if the process is
    another user's than the one that has connected.
    """
    pid, uid = unix_sockets.peer_of(connection)
    if pid == 0:
        raise NoSuchProcess(
            "phosd does not see the process that asks",
            hint="it is in a pid namespace that is not below phosd's",
        )
    target = identify(pid)
    if not unix_sockets.peer_lives(connection):
        raise has_ended(pid)
    if target.uid != uid:
        raise NotAuthorized(
            f"process {pid} is not uid {uid}'s, who has connected to phosd",
            hint="a program that changes its user cannot ask for itself; use `phos checkpoint`",
        )
    return target


def require_same(process: Target) -> None:
    """Raise :class:`NoSuchProcess` when the process has ended, even if its pid is in use again."""
    if identify(process.pid) != process:
        raise has_ended(process.pid)


def has_ended(pid: int) -> NoSuchProcess:
    """Return the error for a process that has ended, even if its pid is in use again."""
    return NoSuchProcess(f"process {pid} has ended", hint="`phos ps` lists the GPU processes")


def process_key(boot_id: str, pid: int, start_time: int) -> str:
    """Return a key for a process that stays unique across reboots and reuse of pids."""
    return f"{boot_id}/{pid}/{start_time}"


def key_of(pid: int) -> str:
    """Return the key of a process of this boot; an empty text if it has ended."""
    found = procfs.process_id(pid)
    return process_key(procfs.boot_id(), *found) if found else ""


@dataclass(frozen=True)
class Program:
    """A user's executable. Its processes run the same kernels."""

    uid: int
    executable: str


def program(process: Target) -> Program:
    """Return the executable of a process; its name is empty when it cannot be read."""
    try:
        name = str((procfs.PROC / str(process.pid) / "exe").readlink())
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        name = ""
    return Program(process.uid, name)


def holds(manifest: Manifest, pid: int, start_time: int) -> bool:
    """Whether an image was made of this process, now or earlier, during the current boot."""
    return ProcessId(pid, start_time) in held_by(manifest, procfs.boot_id())


def held_by(manifest: Manifest, boot: str) -> list[ProcessId]:
    """Return the processes of the boot that an image was made of."""
    if manifest.host.boot_id != boot:
        return []
    return [ProcessId(p.known_as, p.start_time) for p in manifest.processes]


def ancestors(pid: int) -> set[int]:
    """Return the pids of a process and of all its ancestors."""
    found: set[int] = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        process = procfs.stat(pid)
        pid = process.parent if process else 0
    return found
