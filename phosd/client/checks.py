"""Describe what was looked at before an operation."""

from dataclasses import dataclass
from typing import Self

from phosd.errors import from_one_text


@dataclass(frozen=True)
class Check:
    """What was looked at before a checkpoint or a restore: ``error`` is the name of the error that
    stands in the way (empty: none), ``text`` its message or what was found, and ``reason`` a code.
    """

    what: str
    error: str
    text: str
    reason: str = ""

    @classmethod
    def of(cls, what: str, error: str, text: str) -> Self:
        """Return the check of a row of ``TryCheckpoint`` or ``TryRestore``."""
        return cls(what, error, *from_one_text(error, text))
