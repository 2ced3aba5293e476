"""Open and make the folder in which the hooks of a user listen; it is theirs alone."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from phosd.engine.system import mounts, procfs
from phosd.engine.system.own_folders import TRIES, freed, squatted
from phosd.engine.system.thread_ids import as_owner, as_user
from phosd.errors import Reason, Unsupported


@dataclass(frozen=True)
class Place:
    """What a process looks for: ``name`` in the folder ``user`` of ``parent``. ``uid``: the user,
    as we know them. ``status``: of the process, if it is in a container.
    """

    parent: Path
    user: int
    uid: int
    name: str
    text: str
    status: procfs.Status | None = None

    @property
    def folder(self) -> Path:
        return self.parent / str(self.user)

    def opened(self) -> int | None:
        """Open the folder of the user; None if there is none of theirs."""
        return opened_folder(self.folder, self.uid)

    def made(self) -> int:
        """Open the folder of the user, which is made if need be. Raises :class:`NotAuthorized` if
        others have something in its place, and :class:`OSError` where a container lets nobody make
        one.
        """
        # In a user namespace of theirs users mount what they like: nothing is made there that they
        # could not make, and nothing put aside.
        theirs = self.status is not None and _has_own_users(self.status.process)
        for _ in range(TRIES):
            with contextlib.suppress(FileExistsError):
                if theirs and self.status:
                    with as_owner(self.status):
                        self.folder.mkdir(mode=0o700)
                else:
                    parent = self.parent.stat()
                    with as_user(parent.st_uid, parent.st_gid):
                        self.folder.mkdir(mode=0o700)
                    self._give()
            if (found := self.opened()) is not None:
                return found
            if theirs:
                break
            if not freed(self.folder):
                break
        raise squatted(self.folder if self.status is None else Path(self.text).parent)

    def _give(self) -> None:
        """Give the folder, which was just made, to the user."""
        try:
            os.chown(self.folder, self.uid, -1, follow_symlinks=False)
        except PermissionError as error:
            self.folder.rmdir()
            raise Unsupported(
                f"phosd may not give a folder to user {self.uid}, in which the user's hooks listen",
                hint="phosd lacks CAP_CHOWN: start its service, or its container, with it",
                reason=Reason.NO_HOOK,
            ) from error


def opened_folder(folder: Path, uid: int) -> int | None:
    """Open the folder of a user; None if there is none of theirs.

    They may have mounted something on it (FUSE), whose server is not asked for anything.
    """
    # An error says that there is nothing, or nothing of ours: a link, a file.
    with contextlib.suppress(OSError), mounts.opened_unmounted(folder, os.O_DIRECTORY) as found:
        if found is not None and os.fstat(found).st_uid == uid:
            return os.dup(found)
    return None


def _has_own_users(pid: int) -> bool:
    return procfs.namespace(pid, "user") != procfs.namespace(os.getpid(), "user")
