"""Declare the engine operations that the daemon uses, in parts: a user of one needs no more."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from phosd.engine.criu.dump.runtime_devices import RuntimeDevices
from phosd.engine.criu.dump.runtime_dump import RuntimeDump
from phosd.engine.criu.files.file_orders import Output, Version
from phosd.engine.hook_client.link import HookBlock, Kernel
from phosd.engine.image.manifest import Manifest
from phosd.engine.job.affected import InterruptedJob
from phosd.engine.job.cancellation import Cancellation
from phosd.engine.job.checkpoint_history import CheckpointHistory
from phosd.engine.job.checks import Finding
from phosd.engine.job.progress import Progress
from phosd.engine.node.gpus import GpuInfo
from phosd.engine.node.launched_kernels import KnownKernel
from phosd.engine.node.suspended import Suspended
from phosd.engine.operations.admission import DiskLimits
from phosd.engine.operations.checkpoint.choose_mode import Choice
from phosd.engine.operations.runtime_checkpoint import Paused
from phosd.engine.program.process import GpuProcess
from phosd.engine.system.procfs import ProcessId
from phosd.errors import PhosError
from phosd.service.jobs.options import (
    CheckpointRequest,
    ImportRequest,
    MigrateRequest,
    RestoreRequest,
    ResumeRequest,
    SuspendRequest,
    VerifyRequest,
)


class Programs(Protocol):
    """Operations on programs, and what this node runs them on."""

    def settle(self, interrupted: Sequence[InterruptedJob]) -> dict[int, str]:
        """Restore order after an earlier phosd: resume processes that it left stopped, and clean
        up. Call it once, before anything else. Returns what was done, by job number.
        """

    def checkpoint(
        self,
        pid: int,
        request: CheckpointRequest,
        caller: int,
        experience: CheckpointHistory,
        progress: Progress,
    ) -> Manifest:
        """Checkpoint the process tree of ``pid`` for user id ``caller``.

        ``experience`` is the history's record of earlier checkpoints of the program.
        """

    def try_checkpoint(self, pid: int, request: CheckpointRequest, caller: int) -> list[Finding]:
        """Return what a checkpoint checks before it begins, and what came of that."""

    def try_restore(self, image: str, request: RestoreRequest, caller: int) -> list[Finding]:
        """Return what a restore checks before it begins, and what came of that."""

    def make_pid_namespace(self, pid: int, uid: int, socket: str, end: str) -> int:
        """Make a pid namespace for what process ``pid`` of user ``uid`` is about to start, and
        return the pid of its first process, which connects to an abstract ``socket``.
        """

    def restore(self, image: str, request: RestoreRequest, caller: int, progress: Progress) -> int:
        """Restore an image for user id ``caller``, and return the pid of the restored process."""

    def migrate(
        self, pid: int, to: str, request: MigrateRequest, caller: int, progress: Progress
    ) -> dict[int, int]:
        """Move ``pid`` and its group to other GPUs for user id ``caller``. ``to`` is an ordinal,
        the beginning of a UUID, or ``old:new`` for each GPU, separated by commas. Returns the new
        ordinal by the ordinal of each GPU that was left.
        """

    def suspend(self, pid: int, request: SuspendRequest, caller: int, progress: Progress) -> str:
        """Take ``pid`` and its group off their GPUs. Returns where the device memory is kept:
        ``memory`` or ``disk``.
        """

    def resume(
        self, pid: int, request: ResumeRequest, caller: int, progress: Progress
    ) -> dict[int, int]:
        """Resume a suspended process. Returns new GPU ordinals by old ones, as :meth:`migrate`
        does.
        """

    def swap(
        self, leaving: int, coming: int, request: SuspendRequest, caller: int, progress: Progress
    ) -> None:
        """Suspend one process and resume another in its place; on failure both stay as they
        were.
        """

    def end_suspended(self, pid: int, caller: int, progress: Progress) -> None:
        """Kill a suspended program. Raises ``NoSuchProcess`` if it is not suspended."""

    def suspended(self) -> list[Suspended]:
        """Return the suspended programs that live, oldest first."""

    def ready(self) -> set[str]:
        """Return the images of those whose memory is on their GPUs already."""

    def launch_count(self, process: ProcessId, count_seconds: int) -> int:
        """Return how many kernels a process has launched since they are counted, and count for so
        many seconds more. Raises what :meth:`blocks` does.
        """

    def divided(self, gpu: int) -> str:
        """Return why no process can be moved to a GPU (such as "is in MIG mode"), or an empty
        string.
        """

    def context_bytes(self) -> int:
        """Return the bytes of device memory that the driver needs for a context of a process."""

    def recover(self, pid: int) -> str:
        """Resume a process, and its group, that was left locked, checkpointed or parked. Returns
        what was found and done. Raises ``Busy`` while a job works on one of the processes.
        """

    def processes(self) -> list[GpuProcess]:
        """Return the GPU processes of this node."""

    def gpus(self) -> list[GpuInfo]:
        """Return the GPUs of this node."""

    def blocks(self, process: ProcessId) -> list[tuple[HookBlock, int]]:
        """Return the blocks of a process in order of id, each with the ordinal of its GPU (-1: host
        memory). This and the next two methods ask the hook; ``inspection.py`` lists the errors that
        they raise.
        """

    def hook_log(self, process: ProcessId) -> str:
        """Return the counters of a process's hook and the newest lines of its log."""

    def answer_wish(self, process: ProcessId, wish: int, error: str) -> None:
        """Tell a process what has come of the checkpoint that it asked for: an error, or if that is
        empty, an image. Raises what the methods above do.
        """

    def is_gpu_process(self, pid: int) -> bool:
        """Return whether the driver knows the process. False if it has ended."""

    def limit(self, limits: DiskLimits) -> None:
        """Apply these limits to later checkpoints."""


class Images(Protocol):
    """Operations on images, and on the output that they need."""

    def export_image(
        self, image: str, caller: int, uid: int, socket: str, progress: Progress
    ) -> None:
        """Send an image to the process of user ``uid`` that listens at the abstract ``socket``,
        with the rights of ``caller``. Raises ``ImageCorrupt``.
        """

    def import_image(
        self, request: ImportRequest, owner: int, uid: int, socket: str, progress: Progress
    ) -> Manifest:
        """Store the image that such a process sends for user ``owner``, and return it. Raises
        ``ImageCorrupt``, ``NotAuthorized``, ``OutOfSpace`` and what restores raise.
        """

    def try_import(
        self,
        request: ImportRequest,
        owner: int,
        uid: int,
        socket: str,
        cancellation: Cancellation,
    ) -> list[Finding]:
        """Return what an import checks before it asks for chunks, and what came of that. Raises
        ``Cancelled`` and ``Timeout``.
        """

    def verify(self, image: str, progress: Progress) -> None:
        """Read and check every byte of an image. Raises ``ImageCorrupt``."""

    def rehearse(self, image: str, request: VerifyRequest, caller: int, progress: Progress) -> None:
        """Rehearse the restore of an image: nothing of it runs, and nothing stays. Raises what that
        would fail with.
        """

    def images(self) -> list[Manifest]:
        """Return all published images, oldest first."""

    def in_memory(self) -> list[str]:
        """Return the images that are in memory and not on the disk yet, oldest first."""

    def write_to_disk(self, image: str, progress: Progress) -> None:
        """Write such an image to the disk, which makes it durable. Raises ``NoSuchImage`` if it is
        deleted meanwhile, and ``OutOfSpace``.
        """

    def damaged(self) -> Mapping[str, PhosError]:
        """Return the images that :meth:`images` omits because they cannot be read, each with its
        error.
        """

    def left_files(self, uid: int, before: float, used: Collection[str]) -> list[Version]:
        """Return what restores of a user's images, but for those ``used`` by jobs, have left beside
        their files until ``before`` (seconds since the epoch). Raises ``Timeout``.
        """

    def remove_left_files(
        self, uid: int, before: float, used: Collection[str], paths: Collection[str]
    ) -> list[str]:
        """Remove such files, and return which are gone. Raises ``Timeout``."""

    def files_of(self, image: str) -> list[tuple[str, int, list[Version]]]:
        """Return the files that an image holds: path, bytes, and what restores have left of it.
        Raises ``NoSuchImage`` and ``Timeout``.
        """

    def image(self, image: str) -> Manifest:
        """Return one image. Raises ``NoSuchImage``."""

    def delete_image(self, image: str) -> None:
        """Delete an image. Raises ``NoSuchImage``."""

    def notes(self) -> Mapping[str, str]:
        """Return the notes of the images that have one."""

    def set_note(self, image: str, note: str) -> None:
        """Give an image another note; an empty one takes it away. Raises ``NoSuchImage``,
        ``InvalidOption`` if it is more than a line of 200 characters, and ``OutOfSpace``.
        """

    def compact(self, go_on: Callable[[], bool]) -> int:
        """Free the bytes of packs that no image needs any more, and return how many. Stops when
        ``go_on`` returns false.
        """

    def remove_outputs(self, users: Iterable[int], before: float) -> int:
        """Remove output folders of ``phos run`` that belong to these users, that no image needs,
        and that were last written before ``before`` (seconds since the epoch). Returns how many.
        """

    def unneeded_outputs(
        self, uid: int, folder: Path, before: float, without: Collection[str]
    ) -> list[Output]:
        """Return the output folders of a user in ``folder`` that were last written before
        ``before`` and that no process needs, nor an image but those ``without``. Raises
        ``ImageCorrupt`` if an image cannot be read, ``Unsupported``, ``Internal`` and ``Timeout``.
        """

    def remove_outputs_of(
        self, uid: int, folder: Path, before: float, names: Collection[str]
    ) -> list[str]:
        """Remove those of ``names`` among these that are not needed now either, and return them.
        Raises the same.
        """


class Runtimes(Protocol):
    """What a container's runtime asks for, whose own CRIU saves and restores the program."""

    def uses_gpus(self, pid: int) -> bool:
        """Return whether a process of the tree of ``pid`` uses a GPU. Raises ``NoSuchProcess``."""

    def checkpoint_for_runtime(
        self,
        pid: int,
        folder: int,
        dump: RuntimeDump,
        experience: CheckpointHistory,
        progress: Progress,
    ) -> Choice:
        """Save the tree of ``pid``, which a runtime's CRIU dumps and lets run on, with its device
        memory in the runtime's open ``folder``. Returns the mode.
        """

    def pause_for_runtime(self, pid: int, progress: Progress) -> Paused:
        """Suspend the tree of ``pid``, which a container's runtime is about to save."""

    def save_for_runtime(self, paused: Paused, folder: int, progress: Progress) -> RuntimeDevices:
        """Write its device memory into the runtime's open ``folder``, and return what is to be
        taken out of the files that CRIU writes to it. Raises ``OutOfSpace`` and ``Busy``.
        """

    def adopt_of_runtime(self, pid: int, folder: int, progress: Progress) -> Suspended | None:
        """Take the tree of ``pid``, which a runtime restores, for suspended, with the device memory
        in the runtime's open ``folder``; None if there is none. Raises ``ImageCorrupt``.
        """

    def left_by_runtimes(self) -> list[Suspended]:
        """Return the programs that are suspended for a runtime's checkpoint, or since its
        restore.
        """


class Kernels(Protocol):
    """What the analysis of kernels knows, and is to look at."""

    def kernels(self, process: ProcessId) -> list[Kernel]:
        """Return the kernels that a process launched since a checkpoint last read the list."""

    def known_kernels(self, process: ProcessId, uid: int) -> list[KnownKernel]:
        """Return the same kernels of a process of this user, with what the analysis knows."""

    def hurry_analysis(self, process: ProcessId, uid: int, count_seconds: int) -> int:
        """Analyse these kernels before others, and count those that the process launches in the
        next ``count_seconds``. Returns how many of them wait. Raises ``Unsupported`` if nothing is
        analysed here.
        """

    def analyse_some(self, processes: Sequence[GpuProcess]) -> bool:
        """Analyse some of what these processes have launched. Returns whether there may be more.
        For one thread alone.
        """


class Engine(Programs, Images, Runtimes, Kernels, Protocol):
    """The operations on this node. Each blocks, and may be called from any thread."""

    def close(self) -> None:
        """Release all resources of the engine."""
