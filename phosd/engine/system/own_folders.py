"""Take names in folders where others may write: what is in the way is put aside."""

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

from phosd.errors import NotAuthorized

TRIES = 100


def is_own(folder: Path) -> bool:
    """Return whether ``folder`` is one of ours, and no link: nobody else can then put something
    else in its place. Whatever keeps us from looking, it is not.
    """
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def own_folder(folder: Path) -> Path:
    """Make a folder (mode 0700) if we have none there, and return it.

    Raises :class:`NotAuthorized` if somebody always has something else there.
    """
    for _ in range(TRIES):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if is_own(folder):
            return folder
        with contextlib.suppress(FileNotFoundError):
            put_aside(folder)
    raise squatted(folder)


def put_aside(path: Path) -> Path:
    """Free a name by renaming, because a folder that is not empty cannot be removed at once."""
    return path.rename(path.with_name(f"{path.name}.{secrets.token_hex(4)}.squatted"))


def freed(path: Path) -> bool:
    """Put aside what is at a path, if anything is. Return False if that cannot be renamed, since
    something is mounted on it.
    """
    try:
        put_aside(path)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


def squatted(path: Path) -> NotAuthorized:
    """Return the error for a path that somebody always takes again."""
    return NotAuthorized(
        f"somebody puts {path} back whenever it is removed", hint=f"see who writes to {path.parent}"
    )
