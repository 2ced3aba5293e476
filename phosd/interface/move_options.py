"""Options of the calls that move programs off and onto GPUs, by their names on D-Bus."""

from typing import Annotated, Literal

from phosd.interface.model import Said
from phosd.interface.options import QueueOptions, StopOptions

MigrateMode = Literal["auto", "precopy", "driver"]
Where = Literal["auto", "memory", "disk"]


class MigrateOptions(StopOptions, total=False):
    """Options of a migration."""

    mode: Annotated[
        MigrateMode,
        Said(
            "`precopy`: copy the memory while the program runs; `driver`: needs no hook, and stops "
            "the program for as long as the driver takes; `auto` chooses, and the job's notes say "
            "why.",
            "auto",
        ),
    ]
    deadline: Annotated[float, Said("The seconds that the program may take to come to rest.", 10.0)]


class SuspendOptions(StopOptions, total=False):
    """Options of a suspension, and of a swap."""

    where: Annotated[
        Where,
        Said(
            "Where the device memory goes: `auto` is host memory, or the disk if host memory is "
            "short.",
            "auto",
        ),
    ]
    deadline: Annotated[float, Said("The seconds that the program may take to come to rest.", 10.0)]
    thaw: Annotated[
        bool,
        Said(
            "If the process is in a step of a Slurm job that is frozen meanwhile, thaw the step, "
            "which stays so.",
            False,
        ),
    ]
    hollow: Annotated[
        bool,
        Said(
            "Leave the contexts on the GPUs, some 0.5 GB of each process: the program is resumed "
            "sooner, and on these GPUs alone. All its processes are frozen, in a cgroup of their "
            "own below theirs. `Suspend` without it takes the contexts off, too, and freezes "
            "nothing.",
            False,
            feature="hollow",
        ),
    ]


class SleepOptions(SuspendOptions, total=False):
    """Options of a suspension, but of no swap."""

    wake: Annotated[
        bool,
        Said(
            "Resume the program when somebody calls it: connects to a TCP or unix socket on which "
            "it listens, or sends something on a TCP connection that it had accepted. It is hollow "
            "until then, and takes the call itself.",
            False,
            feature="wakes",
        ),
    ]
    idle: Annotated[
        float,
        Said(
            "Do what `wake` does, and suspend the program again whenever it has launched no kernel "
            "for so many seconds (at least 1), or when it has nothing to do and another program "
            "that is called needs its GPU. A `Resume` or `Suspend` of it ends that.",
            otherwise="it stays awake",
            feature="wakes",
        ),
    ]


class ResumeOptions(QueueOptions, total=False):
    """Options of a resumption."""

    gpu: Annotated[str, Said("A destination.", otherwise="where the process was")]
    hollow: Annotated[
        bool,
        Said(
            "Bring the contexts back alone, so that the next `Resume` takes less time. The program "
            "is frozen until then.",
            False,
            feature="hollow",
        ),
    ]
    ready: Annotated[
        bool,
        Said(
            "Bring the memory back, too, and leave the program frozen: the next `Resume` only lets "
            "it run. Its memory takes room on the GPUs, until another program needs that.",
            False,
            feature="ready",
        ),
    ]
