"""Know a database of SQLite, which notes which file it is, and has others beside it by its name."""

import os

_BEGINNING = b"SQLite format 3\0"
"""Each database begins so (https://sqlite.org/fileformat2.html)."""


def is_database(descriptor: int) -> bool:
    """Return whether an open file is one."""
    return os.pread(descriptor, len(_BEGINNING), 0) == _BEGINNING
