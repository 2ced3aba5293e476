"""Options of the calls, by their names on D-Bus. What is left out is phosd's default.

A class says which words an option may be, its type, its default and its documentation, once: the
service is held against it, ``phos`` and ``phos-tui`` offer it, and dbus.md shows it.
"""

from typing import Annotated, Literal, TypedDict

from phosd.interface.model import Option, Said, options_of

Operation = Literal[
    "checkpoint",
    "restore",
    "verify",
    "delete",
    "recover",
    "migrate",
    "suspend",
    "resume",
    "swap",
    "start",
    "export",
    "import",
]
JobState = Literal["queued", "running", "done", "failed", "cancelled", "interrupted"]
Severity = Literal["info", "warning", "error"]
CheckpointMode = Literal["auto", "concurrent", "recopy", "stop", "driver"]
Fallback = Literal["auto", "none"]
Tcp = Literal["refuse", "close"]
Then = Literal["run", "end", "hold"]
Files = Literal["rollback", "keep", "cut", "as-is"]
CloneFiles = Literal["copy", "share", "refuse"]
ClonePorts = Literal["move", "always", "refuse"]


class NoOptions(TypedDict, total=False):
    """The options of a call that knows none."""


class JobOptions(TypedDict, total=False):
    """Options of every call that starts a job."""

    token: Annotated[
        str,
        Said(
            "A word of the caller's choice: a call that the same user repeats with it returns the "
            "same job, as long as the history has it. One that phosd did not survive has failed, "
            "and its message says what has come of it.",
            "",
        ),
    ]


class QueueOptions(JobOptions, total=False):
    """Options of every job that works on a process."""

    queue: Annotated[
        bool,
        Said(
            "Wait if another job works on the process, instead of failing with `Busy`; a user may "
            "have 16 jobs waiting.",
            False,
            feature="queue",
        ),
    ]


class StopOptions(QueueOptions, total=False):
    """Options of every job that stops a program."""

    callback_deadline: Annotated[
        float,
        Said(
            "The seconds within which a program with safe points must come to one; if it does not, "
            "it runs on and the job fails with `Timeout`.",
            otherwise="the setting",
            feature="safe-points",
        ),
    ]
    without_callbacks: Annotated[
        bool,
        Said(
            "Stop the program where it is if it has come to no safe point by then.",
            False,
            feature="safe-points",
        ),
    ]


def own_first(kind: type) -> list[Option]:
    """Return the options of a call, those last that every job may have."""
    common = {option.name for option in options_of(StopOptions)}
    return sorted(options_of(kind), key=lambda option: option.name in common)


class CheckpointOptions(StopOptions, total=False):
    """Options of a checkpoint."""

    mode: Annotated[
        CheckpointMode,
        Said(
            "`concurrent`: a short stop, copied while the program computes on, as it was at the "
            "stop; `recopy`: copied before the stop, again and again, as it is at the end; `stop`: "
            "copied while the program stands still; `driver`: by the CUDA driver, slowest, and "
            "works for programs that were not started with `phos run`. `auto` chooses, and says "
            "why.",
            "auto",
        ),
    ]
    fallback: Annotated[
        Fallback,
        Said(
            "When the program wrote where phosd did not expect it: go on in a mode that guesses "
            "less (`auto`), or fail with `MisSpeculation` (`none`). What is saved is right in any "
            "case.",
            "auto",
        ),
    ]
    parent: Annotated[
        str,
        Said(
            "An image that most of the memory is expected to be equal to; what any image of the "
            "user has is not stored again in any case. `auto`: the latest image of this process "
            "that shares nothing with a damaged one.",
            "",
        ),
    ]
    tcp: Annotated[
        Tcp,
        Said(
            "What becomes of TCP connections that lead out of the process tree: `refuse` to save "
            "the program, or `close` them when it is restored. Those within the tree are saved.",
            "refuse",
        ),
    ]
    deadline: Annotated[
        float,
        Said(
            "The seconds that the program may take to come to rest; if it takes longer, it runs on "
            "and the job fails.",
            10.0,
        ),
    ]
    release_cached: Annotated[
        bool,
        Said(
            "Ask PyTorch first to give back the device memory that it keeps and does not use, so "
            "that it is not saved; the notes say how much that was. Not with mode `driver`.",
            False,
            feature="release-cached",
        ),
    ]
    durable: Annotated[
        bool,
        Said(
            "Wait until the image is on the disk. It is made in memory if it fits there, and until "
            "it is on the disk, too, it is lost if the machine ends.",
            False,
        ),
    ]
    then: Annotated[
        Then,
        Said(
            "What becomes of the program: it is to `run` on; or it stands still until its image is "
            "complete and on the disk, and comes to its `end`; or it is on `hold` until "
            "`Continue`, and the job in the phase `hold`. With the last two the mode is `auto`, "
            "`stop` or `driver`, and the caller needs the right to suspend the program, too; if "
            "the job fails or is cancelled, or phosd ends, the program runs on.",
            "run",
            feature="then",
        ),
    ]
    in_memory: Annotated[
        bool,
        Said(
            "With `then` = `end`: end the program when its image is complete in memory, where a "
            "machine that ends loses it.",
            False,
        ),
    ]
    every: Annotated[
        float,
        Said(
            "Repeat the checkpoint every so many seconds (at least 1) as long as the process "
            "lives; 0 ends that, and the reply is `/` instead of a job.",
            feature="periodic",
        ),
    ]
    keep: Annotated[
        int,
        Said(
            "With `every`: how many of the images so made are kept.",
            otherwise="5",
            feature="periodic",
        ),
    ]
    rehearse: Annotated[
        bool,
        Said(
            "With `every`: rehearse the restore of each image, in a job of its own.",
            False,
            feature="rehearsals",
        ),
    ]


class RestoreOptions(JobOptions, total=False):
    """Options of a restore."""

    files: Annotated[
        Files,
        Said(
            "What becomes of files that have changed since: `rollback` puts those back that the "
            "image has, `cut` cuts those to their old length that the program only wrote to and "
            "that have grown, `keep` does neither. Others are refused, unless they are only "
            "appended to. What is replaced or cut stays in a file beside. With `as-is` the program "
            "goes on with all of them as they are, unless they are gone.",
            "rollback",
        ),
    ]
    output: Annotated[
        str,
        Said("A file for the output and the errors, if they went to a pipe or a terminal.", ""),
    ]
    end: Annotated[
        str,
        Said("A file that tells how the program has ended: `exit CODE` or `signal NUMBER`.", ""),
    ]
    pid_namespace: Annotated[
        bool,
        Said(
            "Give the program a pid namespace of its own, in which its pids are free, also if it "
            "was in none.",
            False,
            feature="pid-namespaces",
        ),
    ]
    clone: Annotated[
        str,
        Said(
            "The name (up to 32 letters, digits, and any of `_ -`) of a clone, which is restored "
            "in such a namespace beside the program.",
            "",
            feature="clones",
        ),
    ]
    clone_files: Annotated[
        CloneFiles,
        Said(
            "What becomes of the files on the disk that a clone writes to: it gets a `copy` of "
            "each, or may `share` those that it appends to, or is to `refuse` if there are any.",
            "copy",
            feature="clones",
        ),
    ]
    clone_ports: Annotated[
        ClonePorts,
        Said(
            "Where another program has a TCP port on which the program listened, a clone listens "
            "on another one, which the job's notes tell (`move`), or is to `refuse`; or it "
            "`always` does, as programs of pools do.",
            "move",
            feature="clone-ports",
        ),
    ]
    gpu: Annotated[
        str,
        Said(
            "A destination; old numbers or UUIDs are those of the image.",
            otherwise="the same GPU if it is here and has room, or another of the same chip",
            feature="restore-gpu",
        ),
    ]
    cgroups_of: Annotated[
        int,
        Said(
            "The pid of a process of the image's owner, in whose cgroups the program goes on.",
            otherwise="where the program was",
        ),
    ]
    hollow: Annotated[
        bool,
        Said(
            "Leave the program suspended, with its contexts on the GPUs and its memory in host "
            "memory: `Resume` starts it, sooner than a restore.",
            False,
            feature="hollow-restores",
        ),
    ]
    follower: Annotated[
        int,
        Said(
            "The pid of a process of the image's owner, which waits for the program and ends as it "
            "does: what starts that one again is told as what starts the program again.",
            otherwise="none",
            feature="followers",
        ),
    ]


class PoolOptions(TypedDict, total=False):
    """Options of a pool."""

    hollow: Annotated[
        int, Said("How many programs wait, hollow, to be started.", otherwise="1, or as before")
    ]
    ready: Annotated[
        int,
        Said(
            "How many more wait with their memory on the GPUs, as long as there is room.",
            otherwise="0, or as before",
        ),
    ]
    max: Annotated[
        int, Said("How many there may be, with those that run.", otherwise="8, or as before")
    ]


class VerifyOptions(JobOptions, total=False):
    """Options of a verification."""

    rehearse: Annotated[
        bool,
        Said(
            "Rehearse the restore up to the program's first instruction, which takes the right to "
            "restore.",
            False,
            feature="rehearsals",
        ),
    ]
    files: Annotated[
        Files, Said("With `rehearse`: as of a restore.", "rollback", feature="rehearsals")
    ]


class ImportOptions(JobOptions, total=False):
    """Options of an import."""

    anyway: Annotated[
        bool, Said("Take the image also if it could not be restored here now.", False)
    ]
    again: Annotated[
        bool,
        Said(
            "Store the image also if it is here already. Otherwise the job's result is its id.",
            False,
        ),
    ]
    owner: Annotated[
        int,
        Said("The user id that the image is to belong to. For root.", otherwise="the caller"),
    ]
    trust: Annotated[bool, Said("Take it though nobody has signed it. For root.", False)]
