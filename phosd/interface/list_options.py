"""Options of the calls that list something, as :mod:`phosd.interface.options` has the others."""

from typing import Annotated, TypedDict

from phosd.interface.model import Said
from phosd.interface.options import JobState, Operation, Severity


class HistoryOptions(TypedDict, total=False):
    """Which jobs of the past. Times are seconds since the epoch; on D-Bus microseconds."""

    pid: Annotated[int, Said("Jobs of this process.", feature="history-filters")]
    operation: Annotated[Operation, Said("Jobs of this kind.", feature="history-filters")]
    state: Annotated[JobState, Said("Jobs in this state.", feature="history-filters")]
    since: Annotated[
        float, Said("Jobs that began then or later.", signature="t", feature="history-filters")
    ]
    until: Annotated[
        float, Said("Jobs that began then or before.", signature="t", feature="history-filters")
    ]


class HistoryPageOptions(HistoryOptions, total=False):
    """Which part of the past is told at once."""

    limit: Annotated[int, Said("At most so many, up to 10,000.", 50)]
    before: Annotated[
        int, Said("With lower numbers than this, to read page after page.", signature="t")
    ]


class EventOptions(TypedDict, total=False):
    """Which events. Times are seconds since the epoch in Python, microseconds on D-Bus."""

    limit: Annotated[int, Said("At most so many, up to 10,000.", 200)]
    severity: Annotated[Severity, Said("Events of at least this severity.", "info")]
    since: Annotated[float, Said("Events from then on.", signature="t")]


class OutputOptions(TypedDict, total=False):
    """Which output folders are looked at."""

    older: Annotated[
        float,
        Said("The seconds for which an output folder was not written to; at least 60.", 86_400.0),
    ]


class LeftOptions(TypedDict, total=False):
    """Which files that restores have left are removed."""

    older: Annotated[float, Said("Those that were left so many seconds ago.", 0.0)]


class PruneOptions(OutputOptions, total=False):
    """What is listed as no longer needed."""

    images: Annotated[float, Said("Images older than so many seconds, too.", otherwise="no images")]
    files: Annotated[
        float,
        Said(
            "Files that restores have left so many seconds ago, too: newer versions of those that "
            "they have put back, and tails of those that they have cut.",
            otherwise="no files",
        ),
    ]
    keep: Annotated[
        int,
        Said(
            "How many good images of each program stay: of a name, or of a process without one.", 1
        ),
    ]


class NamespaceOptions(TypedDict, total=False):
    """Options of a pid namespace."""

    end: Annotated[str, Said("A file that tells how the program has ended, as of a restore.", "")]


class BlockOptions(TypedDict, total=False):
    """How much is listed."""

    limit: Annotated[int, Said("At most so many, of the lowest ids; up to 20,000.", 5_000)]


class ImageBlockOptions(TypedDict, total=False):
    """How much is listed, and from where."""

    limit: Annotated[int, Said("At most so many, up to 20,000.", 5_000)]
    offset: Annotated[int, Said("After so many.", 0, signature="t")]


class KernelOptions(TypedDict, total=False):
    """How much is listed."""

    limit: Annotated[int, Said("At most so many, up to 4,000.", 500)]


class AnalyseOptions(TypedDict, total=False):
    """What is counted."""

    count: Annotated[
        int,
        Said(
            "Count what the process launches for so many seconds from now on, up to 600, instead "
            "of what was counted before.",
            0,
        ),
    ]


class TrustOptions(TypedDict, total=False):
    """Which suspects are cleared."""

    kernel: Annotated[
        str, Said("Those of this name only; `InvalidOption` when it is no suspect.", "")
    ]


class SampleOptions(TypedDict, total=False):
    """Which figures are told."""

    since: Annotated[
        int,
        Said("Figures of this time or later, in microseconds since the epoch.", 0, signature="t"),
    ]
