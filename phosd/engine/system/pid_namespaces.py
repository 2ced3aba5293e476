"""The pid namespaces that phosd makes for programs, where their ids are free at each restore.

Each comes with a mount namespace, which is that of this machine but for its ``/proc``, and with a
first process, the keeper, which ends with the last process of the program. Only root may read and
write the records of them, a file each: what is in another namespace of these kinds is in a
container, or in a sandbox, that phosd knows nothing of.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from phosd.engine.system import procfs
from phosd.engine.system.procfs import ProcessId
from phosd.errors import NoSuchProcess

KINDS = ("pid", "mnt")
"""The kinds of namespaces that are made."""
_FOLDER = "namespaces"


@dataclass(frozen=True)
class PidNamespace:
    """A namespace by its ``keeper``; ``image`` is the image that was restored there, if one was.
    ``apart``: that is rehearsed only, and ends with phosd's job.
    """

    keeper: ProcessId
    image: str = ""
    apart: bool = False

    @property
    def lives(self) -> bool:
        return procfs.process_id(self.keeper.pid) == self.keeper

    def has(self, pid: int) -> bool:
        """Return whether a process is in it. Raises :class:`OSError` if that has ended."""
        return self.lives and all(
            procfs.namespace(pid, kind) == procfs.namespace(self.keeper.pid, kind) for kind in KINDS
        )

    def entrance(self) -> int:
        """Open a pidfd by which root enters it. Raises :class:`NoSuchProcess` if it has ended.

        It is the keeper's. A process of the program may have got itself another mount namespace by
        now, where it mounts what it likes in the place of what is executed there.
        """
        try:
            found = os.pidfd_open(self.keeper.pid)
        except ProcessLookupError:
            raise _ended(self) from None
        if not self.lives:
            os.close(found)
            raise _ended(self)
        return found

    def members(self) -> dict[int, int]:
        """Return its processes and their threads, but the keeper: the ids that phosd knows them by,
        by those that they have for themselves.
        """
        with contextlib.suppress(OSError):  # it has ended
            name = procfs.namespace(self.keeper.pid, "pid")
            found = members([name])[name].items()
            return {own: outer for own, outer in found if outer != self.keeper.pid}
        return {}


def _ended(namespace: PidNamespace) -> NoSuchProcess:
    return NoSuchProcess(
        f"the program's pid namespace has ended, and its first process, {namespace.keeper.pid}",
        hint="start the program again, or restore an image of it",
    )


def folder(runtime_dir: Path) -> Path:
    """Return the folder of the records, which is made if need be."""
    records = runtime_dir / _FOLDER
    records.mkdir(mode=0o700, parents=True, exist_ok=True)
    return records


def living(runtime_dir: Path) -> Iterator[PidNamespace]:
    """Yield those that are there; the records of others are removed."""
    for path in folder(runtime_dir).glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # just removed, or made
            told = json.loads(path.read_text())
            found = PidNamespace(
                ProcessId(*told["keeper"]), str(told["image"]), bool(told.get("apart"))
            )
            if found.lives:
                yield found
            else:
                path.unlink(missing_ok=True)


def made_for(runtime_dir: Path, pid: int) -> PidNamespace | None:
    """Return the namespace made by phosd that a process is in; None if it is in none of them, or
    has ended.
    """
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        if is_nested(pid):
            return next((each for each in living(runtime_dir) if each.has(pid)), None)
    return None


def is_nested(pid: int) -> bool:
    """Return whether a process is in a pid namespace below ours. Raises :class:`OSError` if it has
    ended.
    """
    return procfs.namespace(pid, "pid") != procfs.namespace(os.getpid(), "pid")


def members(names: Iterable[str]) -> dict[str, dict[int, int]]:
    """Return the ids of all processes and threads in the pid namespaces of these names (such as
    ``pid:[4026531836]``): those that we know them by, by those that they have for themselves.
    """
    found: dict[str, dict[int, int]] = {name: {} for name in names}
    for pid in procfs.pids():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            ids = found.get(procfs.namespace(pid, "pid"))
            if ids is not None:
                _add_own_ids(pid, ids)
    return found


def _add_own_ids(pid: int, ids: dict[int, int]) -> None:
    """Add the threads of a process, without those that end meanwhile."""
    for thread in procfs.threads(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            ids[procfs.own_id(thread)] = thread


def sweep(runtime_dir: Path) -> None:
    """Remove the records of namespaces that have ended, and those that were not finished."""
    for path in folder(runtime_dir).glob("*.new"):
        path.unlink()
    for _ in living(runtime_dir):
        pass
