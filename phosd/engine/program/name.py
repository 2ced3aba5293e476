"""The name of a program, which ``phos run --name`` gives it."""

from collections.abc import Collection, Iterator
from contextlib import suppress

from phosd.engine.image.name import valid_name
from phosd.engine.system import procfs

VARIABLE = "PHOS_NAME"
"""A variable in the environment with which the program's first process began."""
CLONES_KEEPER = "phos-clone"
"""What the first process of a clone's pid namespace calls itself, for everybody to see."""


def name_of(pid: int) -> str:
    """Return the name that a program's first process was given; empty if it has none, or one that
    no program can have, or is of a clone, which has the environment of the one that has the name.
    """
    prefix = f"{VARIABLE}=".encode()
    try:
        variables = procfs.environment(pid)
    except (FileNotFoundError, ProcessLookupError):
        return ""
    for each in variables:
        if each.startswith(prefix):
            text = each.removeprefix(prefix).decode("ascii", "replace")
            return text if valid_name(text) and not _is_clone(pid) else ""
    return ""


def _is_clone(pid: int) -> bool:
    found = procfs.stat(pid)
    while found is not None and found.parent > 0:
        found = procfs.stat(found.parent)
        if found is not None and found.name == CLONES_KEEPER:
            return True
    return False


def first_of(named: Collection[int]) -> int | None:
    """Return the first process of a program, of all that have its name; None if none runs."""
    for pid in sorted(named):
        found = procfs.stat(pid)
        if found is not None and not found.dead and found.parent not in named:
            return pid
    return None


def is_named(pid: int, name: str) -> bool:
    """Return whether a process has this name. Its user can keep the answer back for ever."""
    with suppress(OSError):  # nobody may look
        return name_of(pid) == name
    return False


def processes_of(user: int) -> Iterator[int]:
    """Yield the processes of a user."""
    for pid in procfs.pids():
        with suppress(OSError):  # it has ended
            if (procfs.PROC / str(pid)).stat().st_uid == user:
                yield pid


def names_of_user(user: int) -> set[str]:
    """Return the names of the user's programs that run."""
    found = set()
    for pid in processes_of(user):
        with suppress(OSError):  # nobody may look
            found.add(name_of(pid))
    return found - {""}
