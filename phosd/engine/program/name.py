"""The name of a program, which ``phos run --name`` gives it."""

from phosd.engine.image.name import valid_name
from phosd.engine.system import procfs

VARIABLE = "PHOS_NAME"
"""Of the environment with which the program's first process began."""


def name_of(pid: int) -> str:
    """Return the name that a program's first process was given; empty if it has none, or one that
    no program can have.
    """
    prefix = f"{VARIABLE}=".encode()
    try:
        variables = procfs.environment(pid)
    except (FileNotFoundError, ProcessLookupError):
        return ""
    for each in variables:
        if each.startswith(prefix):
            text = each.removeprefix(prefix).decode("ascii", "replace")
            return text if valid_name(text) else ""
    return ""
