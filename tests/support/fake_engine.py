"""Provide a fake engine that a test controls, to test the service around it."""

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phosd.engine.criu.dump.runtime_devices import RuntimeDevices
from phosd.engine.criu.dump.runtime_dump import RuntimeDump
from phosd.engine.criu.files.file_orders import Output, Version
from phosd.engine.hook_client.link import HookBlock, Kernel, LaunchedKernel
from phosd.engine.image.manifest import (
    CHUNK,
    Block,
    ChunkRef,
    Gpu,
    Host,
    Manifest,
    Process,
    Tree,
)
from phosd.engine.image.note import checked_note
from phosd.engine.job.affected import InterruptedJob
from phosd.engine.job.cancellation import Cancellation
from phosd.engine.job.checkpoint_history import CheckpointHistory
from phosd.engine.job.checks import Finding
from phosd.engine.job.progress import Progress
from phosd.engine.node.gpus import GpuInfo
from phosd.engine.node.launched_kernels import KnownKernel
from phosd.engine.node.placement import find
from phosd.engine.node.suspended import Suspended
from phosd.engine.operations.admission import UNLIMITED, DiskLimits
from phosd.engine.operations.checkpoint.choose_mode import Choice
from phosd.engine.operations.runtime_checkpoint import Paused
from phosd.engine.program.process import GpuProcess
from phosd.engine.system.procfs import ProcessId, boot_id
from phosd.errors import NoSuchImage, PhosError
from phosd.service.jobs.options import (
    CheckpointRequest,
    ImportRequest,
    MigrateRequest,
    RestoreRequest,
    ResumeRequest,
    SuspendRequest,
    VerifyRequest,
)
from phosd.service.process_identity import identify

GPU = GpuInfo(0, "GPU-1234-ab", "A test's GPU", 1 << 30, 1 << 20, 0.5, 40.0, 100.0)


def block(*packs: int) -> Block:
    """Return a block with a chunk in each of these packs."""
    chunks = tuple(ChunkRef("a", pack, 0, CHUNK) for pack in packs)
    return Block(process=0, id=1, va=0, size=len(packs) * CHUNK, gpu=0, chunks=chunks)


def manifest(
    image: str,
    *,
    owner: int = 0,
    pid: int = 1,
    mode: str = "stop",
    why: str = "",
    blocks: tuple[Block, ...] = (),
    start_time: int = 1,
    boot: str = "boot",
) -> Manifest:
    """Return the manifest of a small image of one process."""
    process = Process(
        pid=pid,
        tree=0,
        start_time=start_time,
        executable="/bin/train",
        command=("train", "--secret"),
        uid=owner,
        gid=owner,
        groups=(),
        threads=(pid,),
        gpu=True,
        hooked=True,
        parked=True,
    )
    return Manifest(
        id=image,
        created="2026-01-02T03:04:05+00:00",
        mode=mode,
        owner=owner,
        host=Host(boot, "6.18", "4.2", 13000, ()),
        gpus=(Gpu(0, GPU.uuid, "chip", 1 << 30),),
        trees=(Tree(root=pid, folder="criu", files=()),),
        processes=(process,),
        blocks=blocks,
        stop_seconds=0.5,
        why=why,
    )


def launched(
    name: str,
    module: int,
    launches: int,
    idempotent: int = 0,
    overwrites: int = 0,
    *,
    suspect: bool = False,
    summary: int | None = None,
) -> LaunchedKernel:
    """Return a kernel that was counted."""
    counts = launches, idempotent, overwrites
    return LaunchedKernel(name, module, *counts, suspect=suspect, guessed=False, summary=summary)


def this_process(**changes: object) -> GpuProcess:
    """Return the test's own process as a GPU process."""
    values = {
        "pid": os.getpid(),
        "start_time": 1,
        "uid": 0,
        "command": ("python", "train.py"),
        "gpus": (0,),
        "device_bytes": 4096,
        "hook_state": "hooked",
        "reason": "",
        "state": "running",
    }
    return GpuProcess(**(values | changes))  # type: ignore[arg-type]


@dataclass
class FakeEngine:
    """The fake engine. Checkpoints last until ``go`` is set; ``act`` is called in the middle of
    each.
    """

    go: threading.Event = field(default_factory=threading.Event)
    images_take: float = 0.0
    """Seconds that listing the images takes."""
    stored: dict[str, Manifest] = field(default_factory=dict)
    running: list[GpuProcess] = field(default_factory=list)
    act: Callable[[Progress], None] = lambda progress: None
    requests: list[object] = field(default_factory=list)
    answers: list[tuple[int, int, str]] = field(default_factory=list)
    without_gpu: set[int] = field(default_factory=set)
    """Processes that the driver does not know."""
    """What processes were told of the checkpoints that they had asked for."""
    found: list[Finding] = field(default_factory=list)
    """What a dry run finds."""
    experience: list[CheckpointHistory] = field(default_factory=list)
    made: int = 0
    mode: str = "stop"
    why: str = ""
    limits: DiskLimits = UNLIMITED
    outputs_before: list[float] = field(default_factory=list)
    outputs: dict[int, list[Output]] = field(default_factory=dict)
    """The output folders of each user that nothing needs."""
    outputs_asked: list[tuple[int, Path, frozenset[str]]] = field(default_factory=list)
    left: dict[int, list[Version]] = field(default_factory=dict)
    """What restores have left beside the files of each user's images."""
    unreadable: dict[str, PhosError] = field(default_factory=dict)
    unwritten: list[str] = field(default_factory=list)
    noted: dict[str, str] = field(default_factory=dict)
    disk_trouble: PhosError | None = None
    live_blocks: list[tuple[HookBlock, int]] = field(default_factory=list)
    launched: list[Kernel] = field(default_factory=list)
    known: list[KnownKernel] = field(default_factory=list)
    hurried: list[tuple[ProcessId, int]] = field(default_factory=list)
    analysed: list[list[int]] = field(default_factory=list)
    """The pids that were looked at, at each look."""
    asked: list[ProcessId] = field(default_factory=list)
    silent: PhosError | None = None
    devices: list[GpuInfo] = field(default_factory=lambda: [GPU])
    looks_at_gpus: int = 0
    recovered: list[int] = field(default_factory=list)
    trouble: PhosError | None = None
    in_pieces: set[int] = field(default_factory=set)
    moves: list[tuple[object, ...]] = field(default_factory=list)

    def make_pid_namespace(self, pid: int, uid: int, socket: str, end: str) -> int:
        self.requests.append((pid, uid, socket, end))
        return 77

    def settle(self, interrupted: Sequence[InterruptedJob]) -> dict[int, str]:
        return {job.job: "its processes run" for job in interrupted}

    def checkpoint(
        self,
        pid: int,
        request: CheckpointRequest,
        caller: int,
        experience: CheckpointHistory,
        progress: Progress,
    ) -> Manifest:
        self.requests.append(request)
        self.experience.append(experience)
        progress.phase("prepare")
        progress.phase("quiesce", stopped=True, bytes_total=1000)
        self.act(progress)
        while not self.go.wait(0.01):
            progress.check()
        progress.phase("publish")
        image = manifest(
            f"image-{self.made}",
            pid=pid,
            mode=self.mode,
            why=self.why,
            blocks=(block(self.made),),
            start_time=identify(pid).start_time,
            boot=boot_id(),
        )
        self.made += 1
        self.stored[image.id] = image
        if request.then == "hold":
            progress.made(image.id)
            progress.phase("hold", stopped=True)
            progress.hold()
        return image

    def try_checkpoint(self, pid: int, request: CheckpointRequest, caller: int) -> list[Finding]:
        self.requests.append(request)
        return self.found

    def try_restore(self, image: str, request: RestoreRequest, caller: int) -> list[Finding]:
        self.requests.append(request)
        return self.found

    def restore(self, image: str, request: RestoreRequest, caller: int, progress: Progress) -> int:
        self.requests.append(request)
        progress.phase("load")
        self.act(progress)
        return 4711

    def export_image(
        self, image: str, caller: int, uid: int, socket: str, progress: Progress
    ) -> None:
        self.requests.append((image, caller, uid, socket))
        self.act(progress)

    def import_image(
        self, request: ImportRequest, owner: int, uid: int, socket: str, progress: Progress
    ) -> Manifest:
        self.requests.append((request, owner, uid, socket))
        self.act(progress)
        image = manifest(f"image-{self.made}", owner=owner)
        self.made += 1
        self.stored[image.id] = image
        return image

    def try_import(
        self,
        request: ImportRequest,
        owner: int,
        uid: int,
        socket: str,
        cancellation: Cancellation,
    ) -> list[Finding]:
        self.requests.append((request, owner, uid, socket))
        return self.found

    def _move(self, progress: Progress) -> None:
        progress.phase("precopy", bytes_total=1000)
        progress.phase("quiesce", stopped=True)
        self.act(progress)
        while not self.go.wait(0.01):
            progress.check()
        if self.trouble is not None:
            raise self.trouble

    def _becomes(self, pid: int, **changes: object) -> None:
        self.running = [
            dataclasses.replace(p, **changes) if p.pid == pid else p  # type: ignore[arg-type]
            for p in self.running
        ]

    def migrate(
        self, pid: int, to: str, request: MigrateRequest, caller: int, progress: Progress
    ) -> dict[int, int]:
        self.moves.append(("migrate", pid, to, request, caller))
        self._move(progress)
        name = to.rpartition(":")[2]
        new = int(name) if name.isdecimal() else find(name, self.devices)
        self._becomes(pid, gpus=(new,))
        return {0: new}

    def suspend(self, pid: int, request: SuspendRequest, caller: int, progress: Progress) -> str:
        self.moves.append(("suspend", pid, request, caller))
        self._move(progress)
        self._becomes(pid, state="suspended")
        return "memory" if request.where == "auto" else request.where

    def end_suspended(self, pid: int, caller: int, progress: Progress) -> None:
        self.moves.append(("end", pid, caller))
        self.running = [each for each in self.running if each.pid != pid]

    def suspended(self) -> list[Suspended]:
        return []

    def ready(self) -> set[str]:
        return set()

    def uses_gpus(self, pid: int) -> bool:
        return False

    def checkpoint_for_runtime(
        self,
        pid: int,
        folder: int,
        dump: RuntimeDump,
        experience: CheckpointHistory,
        progress: Progress,
    ) -> Choice:
        raise NotImplementedError

    def pause_for_runtime(self, pid: int, progress: Progress) -> Paused:
        raise NotImplementedError

    def save_for_runtime(self, paused: Paused, folder: int, progress: Progress) -> RuntimeDevices:
        raise NotImplementedError

    def adopt_of_runtime(self, pid: int, folder: int, progress: Progress) -> Suspended | None:
        return None

    def left_by_runtimes(self) -> list[Suspended]:
        return []

    def resume(
        self, pid: int, request: ResumeRequest, caller: int, progress: Progress
    ) -> dict[int, int]:
        self.moves.append(("resume", pid, request, caller))
        self._move(progress)
        self._becomes(pid, state="running")
        return {0: int(request.gpu or 0)}

    def swap(
        self, leaving: int, coming: int, request: SuspendRequest, caller: int, progress: Progress
    ) -> None:
        self.moves.append(("swap", leaving, coming, request, caller))
        self._move(progress)
        self._becomes(leaving, state="suspended")
        self._becomes(coming, state="running")

    def launch_count(self, process: ProcessId, count_seconds: int) -> int:
        return len(self.launched)

    def divided(self, gpu: int) -> str:
        return "is in MIG mode" if gpu in self.in_pieces else ""

    def context_bytes(self) -> int:
        return 0

    def recover(self, pid: int) -> str:
        self.recovered.append(pid)
        if self.trouble is not None:
            raise self.trouble
        return f"process {pid} was given back its parked memory, and runs again"

    def verify(self, image: str, progress: Progress) -> None:
        progress.phase("verify")
        self.act(progress)

    def rehearse(self, image: str, request: VerifyRequest, caller: int, progress: Progress) -> None:
        self.moves.append(("rehearse", image, request, caller))
        progress.phase("load")
        self.act(progress)

    def images(self) -> list[Manifest]:
        time.sleep(self.images_take)
        return list(self.stored.values())

    def in_memory(self) -> list[str]:
        return [*self.unwritten]

    def write_to_disk(self, image: str, progress: Progress) -> None:
        if self.disk_trouble is not None:
            raise self.disk_trouble
        self.image(image)
        self.unwritten.remove(image)

    def damaged(self) -> dict[str, PhosError]:
        return self.unreadable

    def image(self, image: str) -> Manifest:
        if image not in self.stored:
            raise NoSuchImage(f"there is no image {image}", hint="`phos images` lists them")
        return self.stored[image]

    def delete_image(self, image: str) -> None:
        del self.stored[image]

    def notes(self) -> dict[str, str]:
        return {image: note for image, note in self.noted.items() if image in self.stored}

    def set_note(self, image: str, note: str) -> None:
        self.image(image)
        self.noted[image] = checked_note(note)

    def processes(self) -> list[GpuProcess]:
        return self.running

    def known_kernels(self, process: ProcessId, uid: int) -> list[KnownKernel]:
        self._ask(process)
        return list(self.known)

    def hurry_analysis(self, process: ProcessId, uid: int, count_seconds: int) -> int:
        self._ask(process)
        self.hurried.append((process, count_seconds))
        return sum(one.state == "waiting" for one in self.known)

    def analyse_some(self, processes: Sequence[GpuProcess]) -> bool:
        self.analysed.append([process.pid for process in processes])
        return False

    def _ask(self, process: ProcessId) -> None:
        self.asked.append(process)
        if self.silent is not None:
            raise self.silent

    def blocks(self, process: ProcessId) -> list[tuple[HookBlock, int]]:
        self._ask(process)
        return self.live_blocks

    def kernels(self, process: ProcessId) -> list[Kernel]:
        self._ask(process)
        return self.launched

    def hook_log(self, process: ProcessId) -> str:
        self._ask(process)
        return "state 0\n1.5 a note\n"

    def is_gpu_process(self, pid: int) -> bool:
        return pid not in self.without_gpu

    def answer_wish(self, process: ProcessId, wish: int, error: str) -> None:
        self._ask(process)
        self.answers.append((process.pid, wish, error))

    def gpus(self) -> list[GpuInfo]:
        self.looks_at_gpus += 1
        return self.devices

    def compact(self, go_on: Callable[[], bool]) -> int:
        return 0

    def remove_outputs(self, users: Iterable[int], before: float) -> int:
        self.outputs_before.append(before)
        return 0

    def limit(self, limits: DiskLimits) -> None:
        self.limits = limits

    def unneeded_outputs(
        self, uid: int, folder: Path, before: float, without: Collection[str]
    ) -> list[Output]:
        self.outputs_asked.append((uid, folder, frozenset(without)))
        return [output for output in self.outputs.get(uid, ()) if output.written < before]

    def remove_outputs_of(
        self, uid: int, folder: Path, before: float, names: Collection[str]
    ) -> list[str]:
        unneeded = self.unneeded_outputs(uid, folder, before, ())
        gone = [output.name for output in unneeded if output.name in names]
        left = [each for each in self.outputs.get(uid, ()) if each.name not in gone]
        self.outputs[uid] = left
        return gone

    def left_files(self, uid: int, before: float, used: Collection[str]) -> list[Version]:
        return [each for each in self.left.get(uid, ()) if each.left < before]

    def remove_left_files(
        self, uid: int, before: float, used: Collection[str], paths: Collection[str]
    ) -> list[str]:
        gone = [each for each in self.left_files(uid, before, used) if each.path in paths]
        self.left[uid] = [each for each in self.left.get(uid, ()) if each not in gone]
        return [each.path for each in gone]

    def files_of(self, image: str) -> list[tuple[str, int, list[Version]]]:
        if self.silent is not None:
            raise self.silent
        left = self.left.get(self.image(image).owner, [])
        return [(file, 4096, left) for file in sorted({each.file for each in left})]

    def close(self) -> None:
        """Do nothing: the fake holds no resources."""
