"""All interfaces of phosd: the methods of each, and the properties of its record."""

from collections.abc import Iterator
from typing import get_args

from phosd.interface import list_options, options, records
from phosd.interface.manager import MANAGER
from phosd.interface.model import (
    Interface,
    Method,
    Property,
    options_of,
    properties_of,
)
from phosd.interface.options import CheckpointMode

_WITHOUT_CALL = ("error-reasons",)
"""Features that no call or option has: the reasons of errors."""


JOB = Interface(
    "org.phos.Job1",
    "A piece of long work.",
    (
        Method(
            "Cancel",
            "",
            "",
            "Stop at the next safe point; the program runs on.",
            options.NoOptions,
        ),
    ),
    (
        *properties_of(records.Job),
        Property("ProgressValid", "b", "Whether `Progress` says anything."),
    ),
)
PROCESS = Interface(
    "org.phos.Process1",
    "A process that uses a GPU.",
    (
        Method(
            "ListBlocks",
            "",
            "a(tttias) blocks",
            "List its device memory, in order of id: id, address, size, the GPU's ordinal (-1: "
            "host memory), and flags: `exported` and `imported` (shared with others), `program` "
            "(made by the program's own calls of the VMM), `host`.",
            list_options.BlockOptions,
            "process-blocks",
        ),
        Method(
            "ListKernels",
            "",
            "a(sstb) kernels",
            "List the kernels that were launched since a checkpoint last began to copy on write, "
            "and suspects of the program that were not launched (0 launches); suspects first, then "
            "those launched most: name, hash of the module, launches, whether it is a suspect.",
            list_options.KernelOptions,
            "process-kernels",
        ),
        Method(
            "DescribeKernels",
            "",
            "aa{sv} kernels",
            "Describe the kernels that were launched since they are counted, those launched most "
            "first, with what the analysis of their machine code knows. A checkpoint counts anew "
            "when it begins to copy on write, and so does `AnalyseKernels`.",
            list_options.KernelOptions,
            "kernel-analysis",
        ),
        Method(
            "AnalyseKernels",
            "",
            "u waiting",
            "Analyse the process's kernels before others, and return how many are still to be "
            "analysed: call it again until that is 0. `Unsupported` where `analysis` is off.",
            list_options.AnalyseOptions,
            "kernel-analysis",
        ),
        Method(
            "TrustKernels",
            "",
            "u count",
            "Clear suspects of its program (those that the history has for its user and its "
            "executable): from the next checkpoint on, what they write is predicted from their "
            "arguments again. Returns how many were cleared. For those who may checkpoint the "
            "process.",
            list_options.TrustOptions,
            "process-kernels",
        ),
        Method(
            "ListDoors",
            "",
            "as doors",
            "List where it and the processes below it listen: `127.0.0.1:8000`, `/run/chat.sock`, "
            "`@abstract`.",
            options.NoOptions,
            "process-doors",
        ),
        Method(
            "ReadLog",
            "",
            "s log",
            "Return what the hook has counted and noted, a line each.",
            options.NoOptions,
            "process-log",
        ),
    ),
    properties_of(records.Process),
)
IMAGE = Interface(
    "org.phos.Image1",
    "A saved process.",
    (
        Method(
            "ListBlocks",
            "",
            "a(utttiutt) blocks",
            "List its device memory, in the order in which it is loaded: pid, id, address, size, "
            "the GPU's ordinal (-1: host memory), chunks (0: another row has them, because "
            "processes share this memory), bytes stored for it (counting only chunks that no "
            "earlier row has), bytes of those that an older image holds, too.",
            list_options.ImageBlockOptions,
            "image-blocks",
        ),
        Method(
            "ListFiles",
            "",
            "a(sta(stt)) files",
            "List the files whose bytes the image holds: path, bytes, and what restores have left "
            "beside it: path, bytes, and when it was left, in microseconds since the epoch.",
            options.NoOptions,
            "file-versions",
        ),
        Method(
            "SetNote",
            "s note",
            "",
            "Write a note of the image, in place of the one that it has; an empty one takes that "
            "away. One line of at most 200 characters, without control characters. For those who "
            "may delete the image.",
            options.NoOptions,
            "image-notes",
        ),
        Method(
            "ReportCrashes",
            "u count",
            "",
            "Tell how often in a row the program has crashed soon after its restore from the "
            "image, as `phos run --resume` does; 0: it goes on. For those who may restore it.",
            options.NoOptions,
            "crashes",
        ),
    ),
    properties_of(records.Image),
)
GPU = Interface(
    "org.phos.Gpu1",
    "A GPU of this node.",
    (
        Method(
            "ListSamples",
            "",
            "a(tdtdd) samples",
            "Return what the GPU did during the last ten minutes, every two seconds, oldest first: "
            "time (microseconds since the epoch), utilisation, used memory, temperature, power. "
            "`Unsupported` where a GPU reports nothing.",
            list_options.SampleOptions,
            "gpu-samples",
        ),
    ),
    properties_of(records.Gpu),
)
POOL = Interface(
    "org.phos.Pool1",
    "Programs of an image that are there before somebody asks for them. The manager changes and "
    "ends a pool, and starts its programs.",
    (),
    properties_of(records.Pool),
)
INTERFACES = (MANAGER, JOB, PROCESS, IMAGE, POOL, GPU)
RECORDS: dict[str, type[records.Record]] = {
    MANAGER.name: records.Manager,
    JOB.name: records.Job,
    PROCESS.name: records.Process,
    IMAGE.name: records.Image,
    POOL.name: records.Pool,
    GPU.name: records.Gpu,
}
"""The record of each interface."""


def features() -> tuple[str, ...]:
    """Return what a phosd with these interfaces has as its ``Features``."""
    modes = (f"mode-{mode}" for mode in get_args(CheckpointMode) if mode != "auto")
    return tuple(dict.fromkeys((*_features_of_calls(), *_WITHOUT_CALL, *modes)))


def _features_of_calls() -> Iterator[str]:
    for interface in INTERFACES:
        for method in interface.methods:
            given = options_of(method.options) if method.options is not None else ()
            yield from filter(None, (method.feature, *(option.feature for option in given)))
