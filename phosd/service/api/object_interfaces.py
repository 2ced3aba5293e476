"""What the objects on the bus tell: properties of jobs, images, processes and GPUs.

Times are microseconds since the epoch (0: unknown), sizes bytes, durations seconds.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any

from phosd.engine.job.progress import PhaseRecord
from phosd.engine.node.gpus import GpuInfo
from phosd.service.api.object_methods import Details
from phosd.service.api.views import created, gpu_path, microseconds, or_unknown, root_command
from phosd.service.dbus.spec import Args, Interface, Method, Property
from phosd.service.jobs.table import Job, JobState

_OPTIONS: Args = (("options", "a{sv}"),)
_MOST_SUSPECTS = 100
"""Kernels that a job names, so that no program can fill the bus with its own."""


def current_phase(job: Job) -> PhaseRecord:
    """The phase that the job is in, or ended in."""
    phases = job.progress.phases
    return phases[-1] if phases else PhaseRecord("", time.monotonic(), stopped=False)


def rate(phase: PhaseRecord) -> float:
    """Bytes a second of a phase so far."""
    seconds = (phase.end or time.monotonic()) - phase.start
    return phase.bytes_done / seconds if seconds > 0 else 0.0


def share_done(job: Job) -> float:
    """How much of the current phase is done, 0..1."""
    if job.state is JobState.DONE:
        return 1.0
    phase = current_phase(job)
    return min(1.0, phase.bytes_done / phase.bytes_total) if phase.bytes_total else 0.0


def expected_end(job: Job) -> int:
    """When the current phase should end, by its rate so far."""
    phase = current_phase(job)
    speed = rate(phase)
    if job.ended is not None or not phase.bytes_total or not speed:
        return microseconds(job.ended)
    left = max(0, phase.bytes_total - phase.bytes_done)
    return microseconds(time.time() + left / speed)


def describe_phase(phase: PhaseRecord) -> list[Any]:
    seconds = (phase.end or time.monotonic()) - phase.start
    return [phase.name, phase.stopped, seconds, phase.bytes_done, phase.bytes_total]


def job_interface(cancel: Callable[..., Awaitable[list[Any]]]) -> Interface:
    """``org.phos.Job1``. What a job says in words may name files, so only its owner hears it."""
    return Interface(
        "org.phos.Job1",
        (Method("Cancel", _OPTIONS, (), cancel),),
        (
            Property("Number", "u", lambda job: job.number, constant=True),
            Property("Operation", "s", lambda job: job.task.operation, constant=True),
            Property("Target", "s", lambda job: job.task.target, private=True, constant=True),
            Property("Owner", "u", lambda job: job.task.owner, constant=True),
            Property("State", "s", lambda job: str(job.state)),
            Property("Position", "u", lambda job: job.position),
            Property("Phase", "s", lambda job: current_phase(job).name),
            Property("ProgramStopped", "b", _program_stopped),
            Property("Progress", "d", share_done),
            Property("ProgressValid", "b", _progress_valid),
            Property("BytesDone", "t", lambda job: current_phase(job).bytes_done),
            Property("BytesTotal", "t", lambda job: current_phase(job).bytes_total),
            Property("Rate", "d", lambda job: rate(current_phase(job))),
            Property("Started", "t", lambda job: microseconds(job.started)),
            Property("Ended", "t", lambda job: microseconds(job.ended)),
            Property("ExpectedEnd", "t", expected_end),
            Property("StopSeconds", "d", lambda job: job.progress.stop_seconds),
            Property("Mode", "s", lambda job: job.outcome.mode or job.task.mode),
            Property("Why", "s", lambda job: job.outcome.why, private=True),
            Property("Destination", "s", lambda job: job.task.destination, constant=True),
            Property("WrongGuesses", "u", lambda job: job.progress.wrong_guesses),
            Property("Suspects", "as", _suspects, private=True),
            Property("DrainedBytes", "t", lambda job: job.drained.bytes),
            Property("DrainRate", "d", lambda job: job.drained.rate),
            Property("Scheduled", "b", lambda job: job.task.scheduled, constant=True),
            Property("Details", "a{sd}", _details, private=True),
            Property("Notes", "as", lambda job: list(job.progress.notes), private=True),
            Property(
                "Phases", "a(sbdtt)", lambda job: [describe_phase(p) for p in job.progress.phases]
            ),
            Property("Cancelable", "b", lambda job: not job.state.ended),
            Property("Result", "s", lambda job: job.outcome.result, private=True),
            Property("Error", "s", lambda job: job.error.code if job.error else ""),
            Property("Message", "s", lambda job: str(job.error) if job.error else "", private=True),
        ),
    )


def _details(job: Job) -> dict[str, float]:
    return {name: float(x) for name, x in job.progress.details.items() if x is not None}


def _suspects(job: Job) -> list[str]:
    return [kernel.name for kernel in job.progress.suspects[:_MOST_SUSPECTS]]


def _program_stopped(job: Job) -> bool:
    phase = current_phase(job)
    return phase.stopped and phase.end is None


def _progress_valid(job: Job) -> bool:
    return job.state is JobState.DONE or current_phase(job).bytes_total > 0


def process_interface(details: Details) -> Interface:
    """``org.phos.Process1``."""
    return Interface(
        "org.phos.Process1",
        (
            Method("ListBlocks", _OPTIONS, (("blocks", "a(tttias)"),), details.process_blocks),
            Method("ListKernels", _OPTIONS, (("kernels", "a(sstb)"),), details.process_kernels),
            Method("TrustKernels", _OPTIONS, (("count", "u"),), details.trust_kernels),
            Method("ReadLog", _OPTIONS, (("log", "s"),), details.process_log),
        ),
        (
            Property("Pid", "u", lambda view: view.process.pid, constant=True),
            Property("StartTime", "t", lambda view: view.process.start_time, constant=True),
            Property("User", "u", lambda view: view.process.uid, constant=True),
            Property("CommandLine", "as", lambda view: list(view.process.command), private=True),
            Property("GPUs", "ao", lambda view: [gpu_path(uuid) for uuid in view.gpus]),
            Property("DeviceBytes", "t", lambda view: view.process.device_bytes),
            Property("HookState", "s", lambda view: view.process.hook_state),
            Property("Reason", "s", lambda view: view.process.reason, private=True),
            Property("State", "s", lambda view: view.process.state),
            Property("LastImage", "s", lambda view: view.last_image, private=True),
            Property("CheckpointInterval", "d", lambda view: view.every),
            Property("CheckpointsKept", "u", lambda view: view.keep),
        ),
    )


def image_interface(details: Details) -> Interface:
    """``org.phos.Image1``."""
    return Interface(
        "org.phos.Image1",
        (Method("ListBlocks", _OPTIONS, (("blocks", "a(utttiutt)"),), details.image_blocks),),
        (
            Property("Id", "s", lambda view: view.manifest.id, constant=True),
            Property("Created", "t", lambda view: created(view.manifest), constant=True),
            Property("Owner", "u", lambda view: view.manifest.owner, constant=True),
            Property(
                "Pid", "u", lambda view: view.manifest.trees[0].root, private=True, constant=True
            ),
            Property(
                "CommandLine",
                "as",
                lambda view: list(root_command(view.manifest)),
                private=True,
                constant=True,
            ),
            Property(
                "GPUs",
                "a(ss)",
                lambda view: [[g.uuid, g.chip] for g in view.manifest.gpus],
                constant=True,
            ),
            Property("TotalBytes", "t", lambda view: view.total_bytes, constant=True),
            Property("DeviceBytes", "t", lambda view: view.manifest.device_bytes, constant=True),
            Property("StoredBytes", "t", lambda view: view.stored_bytes, constant=True),
            Property("SharedBytes", "t", lambda view: view.shared_bytes),
            Property("Mode", "s", lambda view: view.manifest.mode, constant=True),
            Property(
                "Parent", "s", lambda view: view.manifest.parent or "", private=True, constant=True
            ),
            Property("Why", "s", lambda view: view.manifest.why, private=True, constant=True),
            Property("WrongGuesses", "u", lambda view: view.manifest.wrong_guesses, constant=True),
            Property("StopSeconds", "d", lambda view: view.manifest.stop_seconds, constant=True),
            Property("Verified", "t", lambda view: microseconds(view.verified)),
            Property("VerifiedWhole", "b", lambda view: view.verified_ok),
        ),
    )


def _memory_used(gpu: GpuInfo) -> int:
    return gpu.memory_used or 0


def gpu_interface(details: Details) -> Interface:
    """``org.phos.Gpu1``."""
    return Interface(
        "org.phos.Gpu1",
        (Method("ListSamples", _OPTIONS, (("samples", "a(tdtdd)"),), details.gpu_samples),),
        (
            Property("Ordinal", "u", lambda gpu: gpu.ordinal),
            Property("UUID", "s", lambda gpu: gpu.uuid, constant=True),
            Property("Name", "s", lambda gpu: gpu.name, constant=True),
            Property("MemoryTotal", "t", lambda gpu: gpu.memory_total),
            Property("MemoryUsed", "t", _memory_used),
            Property("Utilisation", "d", lambda gpu: or_unknown(gpu.utilisation)),
            Property("Temperature", "d", lambda gpu: or_unknown(gpu.temperature)),
            Property("Power", "d", lambda gpu: or_unknown(gpu.power)),
            Property("Processes", "au", lambda gpu: list(gpu.pids)),
        ),
    )
