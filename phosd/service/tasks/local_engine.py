"""Run the engine on this node's GPUs."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import msgspec

from phosd.engine.criu.dump.runtime_devices import RuntimeDevices
from phosd.engine.criu.dump.runtime_dump import RuntimeDump
from phosd.engine.hook_client.link import HookBlock, Kernel
from phosd.engine.image.manifest import Manifest
from phosd.engine.image.repack import compact
from phosd.engine.image.verify import verify
from phosd.engine.job.affected import InterruptedJob
from phosd.engine.job.cancellation import Cancellation
from phosd.engine.job.checkpoint_history import CheckpointHistory
from phosd.engine.job.checks import Finding
from phosd.engine.job.progress import Progress
from phosd.engine.node import inspection
from phosd.engine.node.gpus import GpuInfo, divided, list_gpus
from phosd.engine.node.kernel_analysis import KernelAnalysis
from phosd.engine.node.launched_kernels import KnownKernel
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.node.suspended import Suspended
from phosd.engine.operations import runtime_checkpoint
from phosd.engine.operations.admission import DiskLimits, context_bytes
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint, try_checkpoint
from phosd.engine.operations.checkpoint.choose_mode import Choice
from phosd.engine.operations.end import end_suspended
from phosd.engine.operations.migrate import MigrateOptions, migrate
from phosd.engine.operations.permissions import require_may_export, require_may_restore
from phosd.engine.operations.pid_namespace import make_pid_namespace
from phosd.engine.operations.restore.rehearse import rehearse
from phosd.engine.operations.restore.restore import restore, try_restore
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.runtime_checkpoint import Paused
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.engine.operations.swap import SwapOptions, swap
from phosd.engine.operations.transfer.caller_stream import CallerStream
from phosd.engine.operations.transfer.export_image import export_image
from phosd.engine.operations.transfer.import_image import ImportOptions, import_image, try_import
from phosd.engine.program.process import GpuProcess, is_gpu_process
from phosd.engine.recovery.rescue import bring_back
from phosd.engine.recovery.startup import settle
from phosd.engine.system.host_memory import total_memory
from phosd.engine.system.procfs import ProcessId
from phosd.errors import PhosError, Unsupported
from phosd.service.config import Config
from phosd.service.jobs.options import (
    CheckpointRequest,
    ImportRequest,
    MigrateRequest,
    RestoreRequest,
    ResumeRequest,
    SuspendRequest,
    VerifyRequest,
)
from phosd.service.tasks.local_files import UsersFiles

_DRY_RUN_SECONDS = 30.0
"""Seconds without a byte after which a dry run of an import ends."""
_log = logging.getLogger(__name__)
_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_T = TypeVar("_T")


class NodeEngine(UsersFiles):
    """The implementation of :class:`~phosd.service.jobs.engine.Engine` on this node."""

    def __init__(self, config: Config) -> None:
        self._node = Node(
            NodeConfig(
                state_dir=config.state_dir,
                runtime_dir=config.runtime_dir,
                staging_limit=config.staging_limit,
                ring_bytes=config.ring_bytes,
                criu=config.criu,
                allow_unsafe_driver=config.allow_unsafe_driver,
                callback_deadline=config.callback_deadline,
                shadow_limit=config.shadow_limit,
                memory_tier=config.memory_tier_limit.of(total_memory()),
                kept_files=[(each.user, str(each.path)) for each in config.files],
            )
        )
        self._kernels = KernelAnalysis(self._node, config.analysis_limits)
        self._stands_by = config.stands_by
        self._limits = config.disk_limits
        self._signers = config.allowed_signers

    def settle(self, interrupted: Sequence[InterruptedJob]) -> dict[int, str]:
        settled = settle(self._node, interrupted)
        if self._stands_by:
            with suppress(Unsupported):  # there is no GPU, as whoever asks for them is told
                self._node.movers.keep_standbys(gpu.ordinal for gpu in list_gpus())
        return settled

    def checkpoint(
        self,
        pid: int,
        request: CheckpointRequest,
        caller: int,
        experience: CheckpointHistory,
        progress: Progress,
    ) -> Manifest:
        options = _chosen(
            CheckpointOptions, request, caller=caller, experience=experience, limits=self._limits
        )
        return checkpoint(self._node, pid, options, progress)

    def try_checkpoint(self, pid: int, request: CheckpointRequest, caller: int) -> list[Finding]:
        options = _chosen(CheckpointOptions, request, caller=caller, limits=self._limits)
        return try_checkpoint(self._node, pid, options, Progress())

    def try_restore(self, image: str, request: RestoreRequest, caller: int) -> list[Finding]:
        require_may_restore(self.image(image), caller)
        return try_restore(self._node, image, request, Progress())

    def make_pid_namespace(self, pid: int, uid: int, socket: str, end: str) -> int:
        return make_pid_namespace(self._node, pid, uid, socket, end)

    def compact(self, go_on: Callable[[], bool]) -> int:
        return compact(self._node.store, go_on)

    def limit(self, limits: DiskLimits) -> None:
        self._limits = limits

    def restore(self, image: str, request: RestoreRequest, caller: int, progress: Progress) -> int:
        require_may_restore(self.image(image), caller)
        return restore(self._node, image, request, progress, self._limits).pid

    def export_image(
        self, image: str, caller: int, uid: int, socket: str, progress: Progress
    ) -> None:
        require_may_export(self.image(image), caller)
        with CallerStream(socket, uid, progress) as stream:
            export_image(self._node.store, image, stream, progress)

    def import_image(
        self, request: ImportRequest, owner: int, uid: int, socket: str, progress: Progress
    ) -> Manifest:
        with CallerStream(socket, uid, progress) as stream:
            return import_image(self._node, self._import(request, owner), stream, progress)

    def try_import(
        self,
        request: ImportRequest,
        owner: int,
        uid: int,
        socket: str,
        cancellation: Cancellation,
    ) -> list[Finding]:
        with CallerStream(socket, uid, cancellation, within=_DRY_RUN_SECONDS) as stream:
            return try_import(self._node, self._import(request, owner), stream, cancellation)

    def _import(self, request: ImportRequest, owner: int) -> ImportOptions:
        said = msgspec.structs.asdict(request) | {"owner": owner}
        del said["token"]
        return ImportOptions(**said, signers=self._signers, limits=self._limits)

    def migrate(
        self, pid: int, to: str, request: MigrateRequest, caller: int, progress: Progress
    ) -> dict[int, int]:
        options = _chosen(MigrateOptions, request, to=to, caller=caller)
        return migrate(self._node, pid, options, progress)

    def suspend(self, pid: int, request: SuspendRequest, caller: int, progress: Progress) -> str:
        options = _chosen(SuspendOptions, request, caller=caller, limits=self._limits)
        suspended = suspend(self._node, pid, options, progress)
        progress.figures.stored_bytes = suspended.stored_bytes
        return suspended.where

    def end_suspended(self, pid: int, caller: int, progress: Progress) -> None:
        end_suspended(self._node, pid, caller, progress)

    def suspended(self) -> list[Suspended]:
        return self._node.suspended.living()

    def is_gpu_process(self, pid: int) -> bool:
        return is_gpu_process(pid)

    def uses_gpus(self, pid: int) -> bool:
        return runtime_checkpoint.uses_gpus(pid)

    def checkpoint_for_runtime(
        self,
        pid: int,
        folder: int,
        dump: RuntimeDump,
        experience: CheckpointHistory,
        progress: Progress,
    ) -> Choice:
        return runtime_checkpoint.checkpoint(self._node, pid, folder, dump, experience, progress)

    def pause_for_runtime(self, pid: int, progress: Progress) -> Paused:
        return runtime_checkpoint.pause(self._node, pid, progress)

    def save_for_runtime(self, paused: Paused, folder: int, progress: Progress) -> RuntimeDevices:
        return runtime_checkpoint.save(self._node, paused, folder, progress)

    def adopt_of_runtime(self, pid: int, folder: int, progress: Progress) -> Suspended | None:
        return runtime_checkpoint.adopt(self._node, pid, folder, progress)

    def left_by_runtimes(self) -> list[Suspended]:
        return [each for each in self._node.suspended.living() if each.known]

    def resume(
        self, pid: int, request: ResumeRequest, caller: int, progress: Progress
    ) -> dict[int, int]:
        options = _chosen(ResumeOptions, request, caller=caller)
        return resume(self._node, pid, options, progress)

    def swap(
        self, leaving: int, coming: int, request: SuspendRequest, caller: int, progress: Progress
    ) -> None:
        options = _chosen(SwapOptions, request, caller=caller, limits=self._limits)
        swap(self._node, leaving, coming, options, progress)

    def ready(self) -> set[str]:
        return self._node.readied.images()

    def divided(self, gpu: int) -> str:
        return divided(gpu)

    def context_bytes(self) -> int:
        return context_bytes()

    def verify(self, image: str, progress: Progress) -> None:
        verify(self._node.store, image, progress)

    def rehearse(self, image: str, request: VerifyRequest, caller: int, progress: Progress) -> None:
        require_may_restore(self.image(image), caller)
        rehearse(self._node, image, request, progress)

    def images(self) -> list[Manifest]:
        return self._node.store.list()

    def in_memory(self) -> list[str]:
        return self._node.store.write_back.pending()

    def write_to_disk(self, image: str, progress: Progress) -> None:
        self._node.store.write_back.write(image, progress)

    def damaged(self) -> Mapping[str, PhosError]:
        return self._node.store.damaged()

    def image(self, image: str) -> Manifest:
        return self._node.store.get(image)

    def delete_image(self, image: str) -> None:
        self._node.store.delete(image)

    def notes(self) -> dict[str, str]:
        return self._node.store.notes()

    def set_note(self, image: str, note: str) -> None:
        self._node.store.set_note(image, note)

    def processes(self) -> list[GpuProcess]:
        self._node.suspend_store.forget_the_dead()  # ended processes may still take much memory
        return self._node.processes()

    def recover(self, pid: int) -> str:
        account = bring_back(pid, self._node.config.runtime_dir, self._node.claim)
        if pid in account.failures:
            raise account.failures[pid]
        done = account.text(sorted({pid, *account.deeds, *account.failures}))
        return done or f"process {pid} runs; there was nothing to do"

    def blocks(self, process: ProcessId) -> list[tuple[HookBlock, int]]:
        return inspection.blocks(self._node, process)

    def kernels(self, process: ProcessId) -> list[Kernel]:
        return inspection.kernels(self._node, process)

    def known_kernels(self, process: ProcessId, uid: int) -> list[KnownKernel]:
        return self._kernels.known(process, uid)

    def hurry_analysis(self, process: ProcessId, uid: int, count_seconds: int) -> int:
        return self._kernels.hurry(process, uid, count_seconds)

    def launch_count(self, process: ProcessId, count_seconds: int) -> int:
        found = inspection.launches(self._node, process, count_seconds)
        return sum(kernel.launches for kernel in found)

    def analyse_some(self, processes: Sequence[GpuProcess]) -> bool:
        return self._kernels.step(processes)

    def hook_log(self, process: ProcessId) -> str:
        return inspection.log(self._node, process)

    def answer_wish(self, process: ProcessId, wish: int, error: str) -> None:
        inspection.answer_wish(self._node, process, wish, error)

    def gpus(self) -> list[GpuInfo]:
        ours = self._node.movers.pids()
        return [replace(gpu, movers=tuple(ours.intersection(gpu.pids))) for gpu in list_gpus()]

    def close(self) -> None:
        self._kernels.close()
        self._node.close()


def _chosen(kind: type[_Struct], request: msgspec.Struct, **added: object) -> _Struct:
    """Build the options of an operation from the fields of the request and from ``added``."""
    said = msgspec.structs.asdict(request)
    return kind(**{name: said[name] for name in kind.__struct_fields__ if name in said}, **added)
