"""Programs with a name: one of each runs at a time, and what it was started with is kept."""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from phosd.cli.run_command.program import not_started, runs_folder
from phosd.client.errors import CommandError
from phosd.client.users import user_name
from phosd.engine.image.name import NAMES, may_be_given
from phosd.engine.program.name import first_of, is_named, processes_of
from phosd.engine.system import procfs

COMMAND = "command"
"""The file of an output folder that has what the program was started with."""
_MOST_BYTES = 4 << 20


def checked_name(
    _context: click.Context, _parameter: click.Parameter, name: str | None
) -> str | None:
    """Return a name that a program may be given. Raises :class:`click.BadParameter`."""
    if name is not None and not may_be_given(name):
        raise click.BadParameter(f"{name!r} can be no name: {NAMES}")
    return name


def keep_command(folder: Path, words: Sequence[str]) -> None:
    """Write what a program is started with to its output folder."""
    (folder / COMMAND).write_text(json.dumps(words))


def kept_command(folder: Path) -> list[str] | None:
    """Return what the program with this output folder was started with; None if that is not known.

    The file must be the user's own: the program may have had any file as its output.
    """
    with suppress(OSError, ValueError):
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(folder / COMMAND, flags), "rb") as file:
            if os.fstat(file.fileno()).st_uid == os.geteuid():
                words = json.loads(file.read(_MOST_BYTES))
                if isinstance(words, list):
                    return [str(word) for word in words]
    return None


def running(name: str, user: int | None = None) -> int | None:
    """Return the first process of a user's program with this name; None if none runs. Without a
    user id it is the caller's.
    """
    theirs = processes_of(os.geteuid() if user is None else user)
    return first_of({pid for pid in theirs if is_named(pid, name)})


def users_with(name: str) -> list[str]:
    """Return the users, and user ids without a name, with a running program of this name."""
    owners = set()
    for pid in procfs.pids():
        with suppress(OSError):  # it has ended
            if is_named(pid, name):
                owners.add(user_name((procfs.PROC / str(pid)).stat().st_uid))
    return sorted(owners)


@contextmanager
def only_one(name: str) -> Iterator[None]:
    """Keep others from starting a program with this name inside the context.

    Raises :class:`CommandError` if somebody does already, or one runs.
    """
    folder = runs_folder().parent / "names"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise not_started(f"{folder} cannot be used ({error})") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(
                "Busy",
                f"another `phos run` starts {name}, or waits for it; see `phos ps`, or take "
                "another name",
            ) from None
        if (pid := running(name)) is not None:
            raise CommandError(
                "Busy",
                f"{name} runs already: process {pid}; wait until it has ended (`phos wait {name}`),"
                " or take another name",
            )
        yield
    finally:
        os.close(lock)


def told(words: Sequence[str]) -> str:
    """Return words for a message, not too many."""
    text = " ".join(words)
    return text if len(text) <= 200 else text[:200] + "..."
