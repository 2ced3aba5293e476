"""Convert what phosd knows of kernels to records."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phosd.client.records import Values


@dataclass(frozen=True)
class Kernel:
    """A kernel that a process has launched, ``launches`` times since they are counted: of these
    ``idempotent_launches`` would leave the same memory if they were run again,
    ``overwriting_launches`` may not, and of ``undecided_launches`` it is not known. ``state`` is
    ``analysed``, ``waiting``, or says like ``reason`` why nothing is known.

    ``roles`` say by the offset of a parameter what is done through it, by ``*`` through whichever
    of them: ``read``, ``written``, ``both``. ``unknown_reads`` and ``unknown_writes`` are reasons
    why ``roles`` have not all. ``ranges_read`` and ``ranges_written``: a launch tells the ranges.
    ``idempotent``: which launches may be run again: ``always``, ``depends``, ``never``,
    ``unknown``.
    """

    name: str
    module: str
    launches: int
    suspect: bool
    state: str
    reason: str
    roles: Mapping[str, str]
    idempotent_launches: int = 0
    overwriting_launches: int = 0
    undecided_launches: int = 0
    unknown_reads: tuple[str, ...] = ()
    unknown_writes: tuple[str, ...] = ()
    ranges_read: bool = False
    ranges_written: bool = False
    idempotent: str = "unknown"
    idempotent_why: tuple[str, ...] = ()


def kernel(row: Mapping[str, Any]) -> Kernel:
    """Convert a row of ``DescribeKernels``."""
    values = Values(row, str)
    roles = row.get("Roles")
    return Kernel(
        name=values.text("Name"),
        module=values.text("Module"),
        launches=values.whole("Launches"),
        suspect=values.flag("Suspect"),
        state=values.text("State"),
        reason=values.text("Reason"),
        roles=dict(roles) if isinstance(roles, Mapping) else {},
        idempotent_launches=values.whole("IdempotentLaunches"),
        overwriting_launches=values.whole("OverwritingLaunches"),
        undecided_launches=values.whole("UndecidedLaunches"),
        unknown_reads=values.texts("UnknownReads"),
        unknown_writes=values.texts("UnknownWrites"),
        ranges_read=values.flag("RangesRead"),
        ranges_written=values.flag("RangesWritten"),
        idempotent=values.text("Idempotent") or "unknown",
        idempotent_why=values.texts("IdempotentWhy"),
    )
