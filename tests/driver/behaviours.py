"""List what NVIDIA's driver does, which code relies on it, and the versions that were seen.

``python -m tests.driver.page`` shows it in docs/design/driver.md. tests/unit/test_driver_table.py
compares it with the probes: the row ``states-in-order`` of section ``states`` has the probe
``test_states_in_order`` in test_states.py.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Behaviour:
    """A row. ``says`` is one sentence. ``relied_on_by`` are files of phosd; ``seen`` are the
    versions of the driver with which the probe has passed, or the same was measured. ``software``
    says how the software GPU differs, and is empty where it does the same.
    """

    id: str
    says: str
    relied_on_by: tuple[str, ...]
    seen: tuple[str, ...] = ()
    software: str = ""
    gpus: int = 1
    """How many GPUs the probe needs."""

    @property
    def probe(self) -> str:
        """The name of the test that tries it."""
        return f"test_{self.id.replace('-', '_')}"


@dataclass(frozen=True)
class Section:
    """Rows whose probes are in one module."""

    name: str
    title: str
    rows: tuple[Behaviour, ...]

    @property
    def module(self) -> str:
        """The file with the probes."""
        return f"tests/driver/test_{self.name}.py"


_R580 = ("580.159",)
_DRIVER = "phosd/engine/program/driver_checkpoint.py"
_HELD = "phosd/engine/program/held.py"
_PARK = "phosd/hook/park/park.cpp"
_RESERVATION = "phosd/engine/memory/reservation.py"
_CONTEXTS = "phosd/hook/memory/contexts.cpp"
_BLOCKS = "phosd/hook/memory/blocks.cpp"
_MEM_ALLOC = "phosd/hook/intercept/mem_alloc.cpp"
_PLACEMENT = "phosd/engine/node/image_placement.py"

SECTIONS = (
    Section(
        "states",
        "States and locks",
        (
            Behaviour(
                "states-in-order",
                "`cuCheckpointProcess` takes a process from RUNNING by Lock to LOCKED, by"
                " Checkpoint to CHECKPOINTED, by Restore to LOCKED and by Unlock to RUNNING; a"
                " call in another state answers `CUDA_ERROR_ILLEGAL_STATE`.",
                (_DRIVER,),
                _R580,
            ),
            Behaviour(
                "others-have-no-state",
                "`cuCheckpointProcessGetState` answers `CUDA_ERROR_NOT_INITIALIZED` for a"
                " process without CUDA, and `CUDA_ERROR_OPERATING_SYSTEM` for one that does not"
                " exist.",
                (_DRIVER,),
                _R580,
            ),
            Behaviour(
                "nvml-has-a-state",
                "NVML loads libcuda: a process that has NVML, and never called `cuInit`, is"
                " RUNNING, and has devices of the driver open that it does not map; Checkpoint"
                " takes them away, and after Restore NVML answers on.",
                ("phosd/engine/program/process.py",),
                _R580,
            ),
            Behaviour(
                "loading-uses-no-gpu",
                "A process that has loaded the driver, and has not called `cuInit`, has none of"
                " the driver's devices open.",
                ("phosd/engine/mover/worker/main.py",),
                _R580,
            ),
            Behaviour(
                "a-lock-holds-calls",
                "A call that allocates memory or submits work waits in a locked process until it"
                " is unlocked.",
                (_DRIVER,),
                _R580,
            ),
            Behaviour(
                "queries-pass-a-lock",
                "`cuStreamQuery` and `cuEventQuery` answer in a locked process, and so run while"
                " a checkpoint takes away what they read (hazard 38).",
                (_HELD, "phosd/hook/gate/gate.cpp"),
                _R580,
            ),
            Behaviour(
                "a-lock-gives-up",
                "`cuCheckpointProcessLock` waits for the work in flight; after its timeout it"
                " answers `CUDA_ERROR_NOT_READY` and leaves the process RUNNING.",
                (_DRIVER, "phosd/engine/system/cuda.py"),
                _R580,
            ),
            Behaviour(
                "one-thread-works-for-the-driver",
                "A checkpoint and a restore succeed while a tracer holds all threads of the"
                " process but the one that `cuCheckpointProcessGetRestoreThreadId` names, before"
                " and after the checkpoint.",
                (
                    _HELD,
                    "phosd/criu_plugin/restore_threads.cpp",
                    "phosd/engine/criu/run/tracers.py",
                ),
                _R580,
            ),
            Behaviour(
                "a-stopped-process-does-not-answer",
                "`cuCheckpointProcessGetState` does not return while the process is stopped by a"
                " signal.",
                ("phosd/engine/system/stopped_state.py", "phosd/engine/program/stopped.py"),
                _R580,
            ),
        ),
    ),
    Section(
        "checkpoints",
        "Checkpoints and restores",
        (
            Behaviour(
                "a-checkpoint-closes-the-devices",
                "A checkpoint leaves no descriptor and no mapping of the driver's devices in the"
                " process; a restore opens them again.",
                ("phosd/engine/criu/dump/preflight.py",),
                _R580,
            ),
            Behaviour(
                "a-restore-takes-what-a-checkpoint-gave",
                "A checkpoint frees all device memory of the process, its context included, and"
                " a restore takes no more than that and 16 MiB.",
                (_RESERVATION,),
                _R580,
            ),
            Behaviour(
                "everything-comes-back",
                "A restore brings memory of `cuMemAlloc`, `cuMemAllocAsync` and `cuMemCreate` back"
                " at its address, and streams, events, kernels, graphs and memory by handle.",
                (_DRIVER, "phosd/engine/operations/checkpoint/attempt.py"),
                _R580,
            ),
            Behaviour(
                "reservations-stay",
                "An address range that is reserved and unmapped stays reserved through a"
                " checkpoint and a restore, and the memory that was unmapped there can be"
                " imported and mapped again.",
                (_PARK, "phosd/engine/memory/parking.py"),
                _R580,
            ),
            Behaviour(
                "managed-memory-is-refused",
                "A checkpoint of a process with managed memory answers"
                " `CUDA_ERROR_NOT_SUPPORTED`; the process stays LOCKED, and goes on when it is"
                " unlocked.",
                ("phosd/hook/intercept/unsupported.cpp", "phosd/hook/intercept/managed.cpp"),
                _R580,
            ),
            Behaviour(
                "imports-are-lost",
                "A checkpoint of a process that has imported memory succeeds, and its restore"
                " answers `CUDA_ERROR_NOT_SUPPORTED`; the process stays CHECKPOINTED, and each"
                " further restore answers `CUDA_ERROR_OPERATING_SYSTEM` (hazard 7).",
                ("phosd/hook/park/reexport.cpp", "phosd/engine/program/group.py"),
                _R580,
            ),
            Behaviour(
                "a-checkpoint-needs-room",
                "A checkpoint succeeds with 16 MiB of the GPU's memory free; with less than 8"
                " MiB it answers `CUDA_ERROR_OUT_OF_MEMORY`, and each later one of that process"
                " `CUDA_ERROR_UNKNOWN`; the process goes on (hazard 51).",
                (_RESERVATION, "phosd/engine/mover/client/mover.py"),
                _R580,
            ),
            Behaviour(
                "a-checkpoint-fills-host-memory",
                "A checkpoint copies the device memory of the process to private memory of that"
                " process, which a restore frees.",
                ("phosd/engine/operations/admission.py", "phosd/hook/intercept/mmap_populate.cpp"),
                _R580,
            ),
            Behaviour(
                "a-restore-needs-memory",
                "A restore that finds too little memory answers `CUDA_ERROR_OUT_OF_MEMORY`; the"
                " process stays CHECKPOINTED, and each further restore answers"
                " `CUDA_ERROR_OPERATING_SYSTEM` (hazard 19).",
                (_RESERVATION, _DRIVER),
                _R580,
            ),
            Behaviour(
                "restored-kernels-are-not-interrupted",
                "A GPU runs another process's kernel beside one that does not end, and no longer"
                " does once the process of the latter was restored (hazard 47).",
                (
                    "phosd/engine/program/group.py",
                    "phosd/engine/mover/worker/copy_out.py",
                    "phosd/engine/operations/move_checks.py",
                ),
                _R580,
                software="Its kernels are threads, which always run beside each other.",
            ),
            Behaviour(
                "a-context-is-small",
                "A context takes at most 640 MiB of device memory.",
                ("phosd/engine/operations/admission.py",),
                _R580,
                software="Its contexts take nothing.",
            ),
            Behaviour(
                "stacks-can-be-given-up",
                "`cuCtxSetLimit` of the stack size to 0 frees memory of the context, and back to"
                " what it was takes it again.",
                (_CONTEXTS,),
                _R580,
                software="It keeps the limit, which has no effect.",
            ),
        ),
    ),
    Section(
        "gpus",
        "Other GPUs",
        (
            Behaviour(
                "pairs-name-each-gpu",
                "`cuCheckpointProcessRestore` takes no pairs, or one for each GPU that the"
                " process knew; fewer or more answer `CUDA_ERROR_INVALID_VALUE`, and it can be"
                " asked again (hazard 56).",
                (_PLACEMENT, _DRIVER),
                _R580,
            ),
            Behaviour(
                "hidden-gpus-are-known",
                "A process knows all GPUs of the machine, also those that `CUDA_VISIBLE_DEVICES`"
                " hides from it.",
                (_PLACEMENT, "phosd/engine/operations/move_checks.py"),
                _R580,
                gpus=2,
            ),
            Behaviour(
                "pairs-move-a-process",
                "A restore with pairs puts a process on the other GPUs, and from then on"
                " `cuDeviceGetUuid` tells it their UUIDs.",
                (_DRIVER, "phosd/engine/operations/migrate.py"),
                _R580,
                gpus=2,
            ),
            Behaviour(
                "each-gpu-needs-room",
                "A restore answers `CUDA_ERROR_OUT_OF_MEMORY` while a GPU that the process knows"
                " has too little memory free, also one that it does not use, and can be asked"
                " again (an H100 with none free; an H200 restores with 3 MiB; hazard 51).",
                ("phosd/engine/operations/admission.py", _RESERVATION),
                _R580,
                software="It looks at the GPUs alone that the process uses.",
                gpus=2,
            ),
            Behaviour(
                "unseen-gpus-import-nothing",
                "A process on a GPU that it did not see when it began is answered"
                " `CUDA_ERROR_NOT_INITIALIZED` when it imports memory of that GPU, and can make"
                " some and export it (hazard 58).",
                (_PARK, "phosd/engine/memory/handing_back.py"),
                _R580,
                gpus=2,
            ),
        ),
    ),
    Section(
        "memory",
        "Memory",
        (
            Behaviour(
                "descriptors-keep-memory",
                "A descriptor of device memory keeps the memory and what is in it, also when no"
                " process has mapped or imported it and its maker has ended.",
                ("phosd/engine/memory/exported.py",),
                _R580,
            ),
            Behaviour(
                "importers-keep-memory",
                "Memory that a process has imported stays mapped and writable there when its"
                " maker has released it and is checkpointed.",
                ("phosd/engine/mover/worker/guarded.py",),
                _R580,
            ),
            Behaviour(
                "imports-are-not-exported",
                "`cuMemExportToShareableHandle` of an imported handle answers"
                " `CUDA_ERROR_INVALID_VALUE`.",
                ("phosd/hook/park/reexport.cpp", _BLOCKS),
                _R580,
            ),
            Behaviour(
                "plain-memory-has-no-handle",
                "Memory of `cuMemAlloc` has no handle (`cuMemRetainAllocationHandle` answers"
                " `CUDA_ERROR_INVALID_VALUE`), and its allowed handle types are 0.",
                ("phosd/hook/intercept/vmm.cpp", _MEM_ALLOC),
                _R580,
            ),
            Behaviour(
                "plain-memory-has-its-size",
                "The address range of memory of `cuMemAlloc`, and its range attributes, have the"
                " size that was asked for, to the byte.",
                (_MEM_ALLOC,),
                _R580,
            ),
            Behaviour(
                "truths-take-four-bytes",
                "`cuPointerGetAttribute` writes four bytes for an attribute that is true or false.",
                (_MEM_ALLOC,),
                _R580,
            ),
            Behaviour(
                "mappings-have-buffer-ids",
                "Each mapping of memory has a buffer id of its own, and memory that is unmapped"
                " and mapped again has a new one (hazard 9).",
                (_BLOCKS, _MEM_ALLOC),
                _R580,
            ),
            Behaviour(
                "virtual-memory-has-no-legacy-ipc",
                "`cuIpcGetMemHandle` refuses memory of `cuMemCreate` (hazard 10).",
                ("phosd/hook/intercept/legacy_ipc.cpp",),
                _R580,
                software="It refuses all memory.",
            ),
            Behaviour(
                "host-memory-is-shared",
                "Host memory of `cuMemCreate` (`CU_MEM_LOCATION_TYPE_HOST_NUMA`) can be"
                " exported, and another process that imports it sees what a stream writes there.",
                ("phosd/hook/memory/event_words.cpp",),
                _R580,
            ),
            Behaviour(
                "forked-children-have-no-cuda",
                "CUDA calls in the forked child of a process with CUDA answer"
                " `CUDA_ERROR_NOT_INITIALIZED`, and so does `cuCheckpointProcessGetState` of it"
                " (hazard 40).",
                ("phosd/engine/criu/dump/inherited_devices.py",),
                _R580,
            ),
            Behaviour(
                "forked-children-keep-devices",
                "A forked child keeps the driver's devices open and mapped through its parent's"
                " checkpoint, and no device memory with them (hazard 40).",
                (
                    "phosd/criu_plugin/driver_files.cpp",
                    "phosd/engine/criu/images/inert_devices.py",
                ),
                _R580,
            ),
        ),
    ),
    Section(
        "work",
        "Work",
        (
            Behaviour(
                "contexts-keep-work-of-destroyed-streams",
                "`cuCtxRecordEvent` and `cuCtxSynchronize` wait for the work of a stream that"
                " was destroyed; `cuStreamQuery` of the legacy stream does not, where the stream"
                " was a non-blocking one (hazard 39).",
                (_CONTEXTS,),
                _R580,
            ),
            Behaviour(
                "waiting-copies-hold-submissions",
                "While a copy waits for the device, `cuCtxRecordEvent` in the same context waits"
                " as well; queries and virtual memory management do not (hazard 53).",
                ("phosd/hook/park/quiesce.cpp",),
                _R580,
            ),
            Behaviour(
                "frees-wait-for-the-device",
                "`cuMemFree` returns when all work of the context is done, that of non-blocking"
                " streams included.",
                (_MEM_ALLOC,),
                _R580,
            ),
            Behaviour(
                "relaxed-threads-spare-captures",
                "`cuEventQuery` of another thread ends a global capture with an error, unless"
                " that thread is in the relaxed mode (hazard 2).",
                ("phosd/hook/control/server.cpp",),
                _R580,
            ),
            Behaviour(
                "whole-contexts-end-captures",
                "`cuCtxRecordEvent` fails and ends each capture in its context with an error,"
                " whatever the modes of the capture and of the thread (hazard 2).",
                (_CONTEXTS,),
                _R580,
            ),
            Behaviour(
                "one-name-has-two-functions",
                "`cuGetProcAddress` finds two functions by the name `cuLaunchKernel`: one for"
                " the legacy default stream, one for that of each thread.",
                ("phosd/hook/intercept/lookup.cpp",),
                _R580,
            ),
        ),
    ),
)
