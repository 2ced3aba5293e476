"""Find the processes for which a hook seems to listen, in containers, too."""

import contextlib
import logging
import math
import os
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from phosd.engine.hook_client.places import IN_CONTAINERS, exists, place_inside, place_outside
from phosd.engine.hook_client.user_folders import Place
from phosd.engine.system import containers, mounts, places_apart, procfs
from phosd.engine.system.procfs import ProcessId
from phosd.engine.system.unkillable_reads import owner

MOST_IN_CONTAINER = 10_000
"""Processes of a mount namespace that are looked for."""
MOST_NEW = 64
"""Mount namespaces that have come since a first look, and are looked at in a later one."""
_log = logging.getLogger(__name__)


class Listeners:
    """Finds processes for which a hook seems to listen. It asks for the name of each process:
    users may make any number of names.

    What containers have as the folder of their hooks is remembered, so that a later look, while
    programs stand still, opens only what has come since.
    """

    def __init__(self, runtime_dir: Path) -> None:
        self._runtime_dir = runtime_dir
        self._containers: dict[str, _Container] = {}
        self._may_open: float = math.inf
        self._holding_up: set[int] = set()

    def pids(self) -> list[int]:
        """Return the processes, ordered by pid."""
        ours = procfs.namespace(os.getpid(), "mnt")
        counts: Counter[str] = Counter()
        memories: dict[str, int | None] = {}
        found = []
        with ExitStack() as stack:
            users = _Users(stack)
            for pid in sorted(procfs.pids()):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                    space = procfs.namespace(pid, "mnt")
                    if space != ours and space not in memories:
                        memories[space] = self._memory(space, pid, stack)
                    if (memory := memories.get(space)) is None:
                        place = place_outside(self._runtime_dir, pid, nested=space != ours)
                    else:
                        counts[space] += 1
                        if counts[space] > MOST_IN_CONTAINER:
                            continue
                        place = place_inside(memory, pid)
                    if users.have(place):
                        found.append(pid)
        self._warn_of_what_was_left_out(counts)
        self._may_open = MOST_NEW
        return found

    def _warn_of_what_was_left_out(self, counts: Counter[str]) -> None:
        for count in counts.values():
            if count > MOST_IN_CONTAINER:
                _log.warning(
                    "a container has %d processes; only %d are looked at for hooks",
                    *(count, MOST_IN_CONTAINER),
                )
        if self._may_open < 0:
            _log.warning("%d new containers were not looked at for hooks", -self._may_open)

    def _memory(self, space: str, pid: int, stack: ExitStack) -> int | None:
        """Return the folder in memory that the processes of a mount namespace have for hooks, open
        as long as ``stack``.
        """
        known = self._containers.get(space)
        if known is not None and known.lives_in(space):
            if known.mount is None:
                return None
            if (memory := containers.known_memory(known.mount)) is not None:
                stack.callback(os.close, memory)
                return memory
        self._may_open -= 1
        if self._may_open < 0:
            raise ProcessLookupError  # as if it was not there
        return self._looked_at(space, pid, stack)

    def _looked_at(self, space: str, pid: int, stack: ExitStack) -> int | None:
        user, witness, began = owner(pid), procfs.process_id(pid), time.monotonic()
        if user in self._holding_up or witness is None:
            raise ProcessLookupError  # as if it was not there
        memory = stack.enter_context(containers.own_memory(pid, IN_CONTAINERS))
        mount = None if memory is None else mounts.mount_of(memory)
        self._containers[space] = _Container(witness, mount)
        if user != 0 and time.monotonic() > began + places_apart.TIMEOUT:
            _log.warning("no more containers of user %d are looked at: one does not answer", user)
            self._holding_up.add(user)
        return memory


@dataclass(frozen=True)
class _Container:
    """A mount namespace, by a process in it that was looked at: another one gets its number when it
    has ended. ``mount``: of its folder in memory, which :mod:`.containers` keeps open.
    """

    witness: ProcessId
    mount: int | None

    def lives_in(self, space: str) -> bool:
        with contextlib.suppress(OSError):
            there = procfs.namespace(self.witness.pid, "mnt") == space
            return there and procfs.process_id(self.witness.pid) == self.witness
        return False


class _Users:
    """The folders of users, each opened once in a look."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._open: dict[Path, int | None] = {}

    def have(self, place: Place) -> bool:
        """Return whether a hook seems to listen there, or where those of earlier versions do."""
        folder = place.folder
        if folder not in self._open:
            found = self._open[folder] = place.opened()
            if found is not None:
                self._stack.callback(os.close, found)
        opened = self._open[folder]
        return (opened is not None and exists(place.name, opened)) or exists(
            place.parent / place.name
        )
