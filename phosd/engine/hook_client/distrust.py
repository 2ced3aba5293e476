"""Remember whose hooks have sent what may not be closed: phosd asks them nothing any more.

That is a process and, if its hook listens in memory of its container's own, that container, where
the next process may do the same. It is never a user: a container's root may be the machine's, and
pods of many people run with one id. What a process or a container does takes nothing from others.
"""

import contextlib
import logging
import threading
from dataclasses import dataclass
from typing import Self

from phosd.engine.hook_client.places import HookSocket
from phosd.engine.system import procfs
from phosd.engine.system.procfs import ProcessId
from phosd.errors import NotAuthorized

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_processes: set[ProcessId] = set()
_FEW = 64
_most = _FEW
"""How many of these there may be before the ended ones are left out. It is set anew each time, so
that each of thousands costs as little as the first."""
_containers: dict[str, set[ProcessId]] = {}
"""Processes that are known to be in each container. A container is known by its mount namespace,
whose number gets to another one when the last of them has ended."""


class Distrusted(NotAuthorized):
    """The hook is one that phosd asks nothing."""

    code = NotAuthorized.__name__


@dataclass(frozen=True)
class Peer:
    """The process that a hook is in, and its container, or an empty text."""

    process: ProcessId
    container: str = ""

    @classmethod
    def at(cls, place: HookSocket, pid: int) -> Self:
        """Return the process ``pid``, whose hook listens there. Raises :class:`ProcessLookupError`
        or :class:`FileNotFoundError` if it has ended.
        """
        process = procfs.process_id(pid)
        if process is None:
            raise ProcessLookupError(pid)
        return cls(process, procfs.namespace(pid, "mnt") if place.owner is not None else "")


def distrust(peer: Peer) -> None:
    """Ask no hook of this process or container any more, until it has ended."""
    global _most
    members = {peer.process, *_members(peer.container)} if peer.container else set()
    with _lock:
        _processes.add(peer.process)
        if len(_processes) > _most:
            _processes.difference_update({each for each in _processes if not _lives(each)})
            _most = 2 * len(_processes) + _FEW
        if peer.container:
            _containers.setdefault(peer.container, set()).update(members)
    also = " and of all processes in its container" if peer.container else ""
    _log.warning(
        "the hook of process %d has sent files or sockets instead of memory; phosd asks the hook "
        "of this process%s nothing more",
        peer.process.pid,
        also,
    )


def require_trusted(peer: Peer) -> None:
    """Raise :class:`Distrusted` unless phosd may ask this hook."""
    pid = peer.process.pid
    with _lock:
        if peer.process in _processes:
            raise Distrusted(
                f"the hook of process {pid} has sent files or sockets instead of memory",
                hint="phosd asks it nothing any more: start the program anew, with phosd's hook",
            )
        if _holds_distrusted(peer.container):
            _containers[peer.container].add(peer.process)
            raise Distrusted(
                f"a hook in the container of process {pid} has sent files or sockets instead of "
                "memory",
                hint="phosd asks no hook there any more: start the container anew",
            )


def _holds_distrusted(container: str) -> bool:
    """Return whether this is a container that is distrusted, and not one with its number."""
    known = _containers.get(container, set())
    while known:
        each = next(iter(known))
        if _lives(each) and _is_in(each.pid, container):
            return True
        known.discard(each)
    _containers.pop(container, None)
    return False


def _members(container: str) -> set[ProcessId]:
    found = (procfs.process_id(pid) for pid in procfs.pids() if _is_in(pid, container))
    return {each for each in found if each is not None}


def _is_in(pid: int, container: str) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        return procfs.namespace(pid, "mnt") == container
    return False


def _lives(process: ProcessId) -> bool:
    return procfs.process_id(process.pid) == process
