"""Describe what is known of the kernels of one module, as it is kept and shown."""

from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from phosd.engine.analysis.code.opcodes import Use
from phosd.engine.analysis.idempotency import of_kernel
from phosd.engine.analysis.summary import Summary
from phosd.engine.analysis.table import VERSION

ANALYSIS = 8
"""The version of the analysis. Raise it when results may change: what an earlier one found is then
found anew.
"""
MOST_KERNELS = 1 << 16
"""Most kernels of one module."""
MOST_TABLE_BYTES = 1 << 20
"""Most bytes of the table of one kernel."""

Name = Annotated[str, Meta(min_length=1, max_length=4096)]
Reason = Annotated[str, Meta(max_length=300)]
Reasons = Annotated[tuple[Reason, ...], Meta(max_length=256)]
Role = Literal["read", "written", "both"]
Again = Literal["always", "depends", "never", "unknown"]
_Offset = Annotated[str, Meta(pattern=r"^(\*|[0-9]{1,5})$")]


class State(StrEnum):
    """What has come of a module."""

    ANALYSED = "analysed"
    """Its kernels are analysed as they are asked for."""
    UNREADABLE = "unreadable-module"
    """It is damaged, or nothing that is known."""
    OTHER_ARCHITECTURE = "other-architecture"
    """It has no code for the GPU."""
    TOO_LONG = "too-long"
    """It takes more processor time than a module may."""
    TOO_LARGE = "too-large"
    """It has more kernels, or needs more memory, than a module may."""
    CRASHED = "crashed"
    """What reads it has crashed on it."""


class KernelFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a kernel does with the memory that its parameters point to: ``roles`` by the offset of a
    parameter, ``*`` for one that is chosen by an index. ``ranges_*`` say whether a launch tells
    which memory is read, or written; ``idempotent`` which launches may be run again, with why none
    may, or it is unknown. ``table`` is what the hook gets of the kernel; empty: nothing.
    """

    parameter_bytes: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    roles: Annotated[dict[_Offset, Role], Meta(max_length=1 << 13)] = {}
    unknown_reads: Reasons = ()
    unknown_writes: Reasons = ()
    ranges_read: bool = False
    ranges_written: bool = False
    idempotent: Again = "unknown"
    idempotent_why: Reasons = ()
    table: Annotated[bytes, Meta(max_length=MOST_TABLE_BYTES)] = b""


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of a module: of those of its ``kernels`` that were asked for, or of all if it
    is ``whole``. ``table`` is the version of its kernels' tables. ``reason`` says in words why it
    is in a state other than ``analysed``; ``tools`` which tools were there then.
    """

    digest: str
    architecture: int
    analysis: int = ANALYSIS
    table: int = VERSION
    state: State = State.ANALYSED
    reason: Reason = ""
    tools: str = ""
    whole: bool = False
    kernels: dict[Name, KernelFacts] = {}


def facts(summary: Summary, table: bytes = b"") -> KernelFacts:
    """Return what a summary says."""
    again = of_kernel(summary)
    return KernelFacts(
        summary.kernel.size,
        {str(at): use.value for at, use in sorted(summary.roles.items(), key=_order)},
        tuple(sorted(summary.unknown(Use.READ))),
        tuple(sorted(summary.unknown(Use.WRITTEN))),
        summary.computed(Use.READ),
        summary.computed(Use.WRITTEN),
        again.idempotent.value,
        tuple(sorted(again.why)),
        table,
    )


def unknown(reason: str) -> KernelFacts:
    """Return the facts of a kernel of which nothing is known, and why."""
    return KernelFacts(unknown_reads=(reason,), unknown_writes=(reason,), idempotent_why=(reason,))


def row(name: str, known: KernelFacts) -> dict[str, Any]:
    """Return the facts of a kernel as programs are told them, by the names in ``KernelFacts``."""
    said: dict[str, Any] = msgspec.to_builtins(known, builtin_types=(bytes,))
    del said["table"]
    return {"kernel": name} | said


def _order(role: tuple[int | str, Use]) -> tuple[bool, int]:
    """Order roles by offset, with that of whichever pointer at the end."""
    return isinstance(role[0], str), role[0] if isinstance(role[0], int) else 0
