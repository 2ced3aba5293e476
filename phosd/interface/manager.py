"""The methods and signals of ``org.phos.Manager1``.

A method that starts work returns its job at once; options that nobody knows are errors.
"""

from phosd.interface import list_options, move_options, options, records
from phosd.interface.model import Event, Interface, Method, properties_of

_CHECKS = "a(sss) checks"

IMAGE_METHODS = (
    Method(
        "Checkpoint",
        "u pid",
        "o job",
        "Save a process and its children.",
        options.CheckpointOptions,
        "checkpoint",
    ),
    Method(
        "TryCheckpoint",
        "u pid",
        _CHECKS,
        "List what a checkpoint checks before it begins: what, the error that stands in its way "
        "(empty: none), and that error's message, with a reason, or what was found. Nothing is "
        "stopped or saved.",
        options.CheckpointOptions,
        "dry-run",
    ),
    Method(
        "Continue",
        "u pid",
        "",
        "Resume a program that a checkpoint with `then` = `hold` holds, as its image is complete.",
        options.NoOptions,
        "then",
    ),
    Method(
        "Restore",
        "s image",
        "o job",
        "Run the program of an image again from where it was. The job's result is its pid.",
        options.RestoreOptions,
        "restore",
    ),
    Method(
        "CreatePool",
        "s name, s image",
        "",
        "Keep programs of an image ready, each a clone of it, that are started in a moment.",
        options.PoolOptions,
        "pools",
    ),
    Method(
        "ScalePool",
        "s name",
        "",
        "Change how many programs of a pool wait, and how many there may be.",
        options.PoolOptions,
        "pools",
    ),
    Method(
        "RemovePool",
        "s name",
        "",
        "End a pool, and its programs that were not started. Others run on.",
        feature="pools",
    ),
    Method(
        "ListPools",
        "",
        "a(susuuo) pools",
        "List the pools that the caller may see: name, owner, image, how many programs wait, how "
        "many were started and live, path.",
        feature="pools",
    ),
    Method(
        "StartPooled",
        "s name",
        "o job",
        "Start a program of a pool: one that waits, or else one that is restored now. The job's "
        "result is its pid, its mode where it was started from (`ready`, `hollow` or "
        "`image`).",
        options.JobOptions,
        "pools",
    ),
    Method(
        "TryRestore",
        "s image",
        _CHECKS,
        "List what a restore checks before it begins, as `TryCheckpoint` does. Nothing is "
        "restored.",
        options.RestoreOptions,
        "dry-run",
    ),
    Method(
        "VerifyImage",
        "s image",
        "o job",
        "Read every byte of an image again, or rehearse its restore.",
        options.VerifyOptions,
        "verify",
    ),
    Method(
        "DeleteImage",
        "s image",
        "",
        "Remove an image for good. The reply comes when it is gone.",
        options.NoOptions,
    ),
)
TRANSFER_METHODS = (
    Method(
        "Export",
        "s image, s socket",
        "o job",
        "Send an image to the caller, who listens at an abstract unix socket, by the protocol of "
        "transfers. A user has one export and one import at a time, and others wait.",
        options.JobOptions,
        "transfers",
    ),
    Method(
        "Import",
        "s socket",
        "o job",
        "Store an image that the caller sends in the same way. The job's result is its id here.",
        options.ImportOptions,
        "transfers",
    ),
    Method(
        "TryImport",
        "s socket",
        _CHECKS,
        "List what stands in the way of an import, and of a restore here, as `TryCheckpoint` does. "
        "The caller sends the head of the image only, and nothing is stored.",
        options.ImportOptions,
        "transfers",
    ),
)
MOVE_METHODS = (
    Method(
        "Migrate",
        "u pid, s destination",
        "o job",
        "Move a process to other GPUs, a destination.",
        move_options.MigrateOptions,
        "migrate",
    ),
    Method(
        "Suspend",
        "u pid",
        "o job",
        "Take a process off its GPUs, to host memory or disk; it keeps its pid and stands still.",
        move_options.SleepOptions,
        "suspend",
    ),
    Method(
        "Resume",
        "u pid",
        "o job",
        "Bring a suspended process back, on its GPUs or others.",
        move_options.ResumeOptions,
        "resume",
    ),
    Method(
        "Swap",
        "u leaving, u coming",
        "o job",
        "Suspend one process and resume another in its place.",
        move_options.SuspendOptions,
        "swap",
    ),
    Method(
        "PlanEvacuation",
        "s gpu",
        "a(ustsss) steps",
        "Plan how to clear a GPU of the processes that the caller may see, a step for each: pid, "
        "`migrate`, `suspend` or `stay`, bytes on the GPU, destination for `Migrate`, why, command "
        "line. Nothing is done.",
        options.NoOptions,
        "evacuate",
    ),
    Method(
        "Recover",
        "u pid",
        "s done",
        "Let a process run again that a phosd or another tool left locked, checkpointed or parked. "
        "The reply comes afterwards, with what was found and done. `Busy` while a job works on the "
        "process.",
        options.NoOptions,
        "recover",
    ),
)
NAMESPACE_METHODS = (
    Method(
        "MakePidNamespace",
        "s socket",
        "u keeper",
        "Make a pid namespace for what the calling process is about to start, with the user, the "
        "cgroup and the limits of the calling process. Its first process, whose pid is returned, "
        "connects to the abstract unix socket at which the calling process must listen (up to 100 "
        "letters, digits, and any of `. _ -`), and is told there what to start. `Unsupported` if "
        "the calling process is in a container or a sandbox, which the program would not be in.",
        list_options.NamespaceOptions,
        "pid-namespaces",
    ),
)
LIST_METHODS = (
    Method(
        "GetProcess",
        "u pid",
        "o process",
        "Return the object of a GPU process. `NoSuchProcess` if there is none, and `NotAuthorized` "
        "if the lists below do not show it to the caller.",
    ),
    Method(
        "GetImage",
        "s image",
        "o path",
        "Return the object of an image. `NoSuchImage` or `NotAuthorized`.",
        feature="get-one",
    ),
    Method(
        "GetJob",
        "u number",
        "o job",
        "Return the object of a job that runs or ended lately. `NoSuchJob` or `NotAuthorized`.",
        feature="get-one",
    ),
    Method(
        "ListProcesses",
        "",
        "a(uustsso) processes",
        "List the GPU processes that the caller may see: pid, user, command line, device bytes, "
        "hook state, state, path.",
    ),
    Method(
        "ListImages",
        "",
        "a(stuttso) images",
        "List the images that the caller may see: id, created, owner, total bytes, stored bytes, "
        "mode, path.",
    ),
    Method(
        "ListJobs",
        "",
        "a(ussso) jobs",
        "List the jobs that the caller may see: number, operation, target, state, path.",
    ),
    Method(
        "ListGPUs",
        "",
        "a(usstto) gpus",
        "List the GPUs: ordinal, UUID, name, memory, used memory, path.",
    ),
    Method(
        "GetStorage",
        "",
        "(tttt) storage",
        "Return the bytes of the disk that images are on, how many of them are free, how many the "
        "caller's images take (for administrators all images; with a quota suspended programs "
        "count, too), and how many they may take; 0: as many as the disk has.",
        feature="storage",
    ),
    Method(
        "ListHistory",
        "",
        "aa{sv} jobs",
        "List the latest jobs that the caller may see, newest first, with their phases.",
        list_options.HistoryPageOptions,
    ),
    Method(
        "ListEvents",
        "",
        "aa{sv} events",
        "List the latest events that concern the caller, newest first; all for administrators.",
        list_options.EventOptions,
        "events",
    ),
)
PRUNE_METHODS = (
    Method(
        "PlanPruning",
        "s outputs",
        "a(sstts) things",
        "List what nothing needs any more of what is the caller's: `image`, `output` or `file`, "
        "the id, the name in the folder of outputs or the path, bytes, time, why. Nothing is "
        "removed.",
        list_options.PruneOptions,
        "prune",
    ),
    Method(
        "RemoveOutputs",
        "s outputs, as names",
        "as removed",
        "Remove output folders of `phos run` by name, but those that something needs. Returns the "
        "names of those that are gone.",
        list_options.OutputOptions,
        "prune",
    ),
    Method(
        "RemoveFiles",
        "as paths",
        "as removed",
        "Remove files that restores have left beside those that the caller's images hold, by path, "
        "but those that a job may need. Returns the paths of those that are gone.",
        list_options.LeftOptions,
        "file-versions",
    ),
)
MANAGER = Interface(
    "org.phos.Manager1",
    "GPU processes of this node: saved, restored, watched.",
    (
        *IMAGE_METHODS,
        *MOVE_METHODS,
        *LIST_METHODS,
        *PRUNE_METHODS,
        *NAMESPACE_METHODS,
        *TRANSFER_METHODS,
    ),
    properties_of(records.Manager),
    (
        Event("JobNew", "o job", "A job was accepted."),
        Event("JobRemoved", "o job, s result", "A job has ended; `result` is its state."),
        Event("ProcessNew", "o process", "A process uses a GPU now."),
        Event("ProcessRemoved", "o process", "A GPU process has ended."),
        Event("ImageNew", "o image", "An image is complete."),
        Event("ImageRemoved", "o image", "An image is gone."),
        Event(
            "EventNew",
            "s severity, s kind",
            "Something happened; `ListEvents` tells those what it concerns.",
        ),
    ),
)
