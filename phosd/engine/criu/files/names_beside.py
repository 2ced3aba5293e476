"""The names of what restores leave beside a program's files, or have there for a while."""

TAIL, NEWER = ".phos-tail-", ".phos-newer-"
"""What follows the names of files in which what was cut or replaced stays, before a mark."""
UNDO = ".phos-undo-"
"""What follows the name of a file that is being written in place, before a mark: there it is whole,
as it was. If there is such a file, the other one may be a mixture.
"""
FRESH = ".phos-new-"
"""What follows the names of new files beside those that they replace, before a mark."""


def is_beside(name: str) -> bool:
    """Return whether it is such a name."""
    return any(each in name for each in (TAIL, NEWER, UNDO, FRESH))
