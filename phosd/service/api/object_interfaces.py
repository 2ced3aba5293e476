"""Read the properties that :mod:`phosd.interface` states of processes, images, pools and GPUs."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from phosd.engine.node.gpus import GpuInfo
from phosd.engine.system.containers import Container
from phosd.service.api.views import (
    ImageView,
    ProcessView,
    created,
    gpu_path,
    microseconds,
    or_unknown,
    output,
    root_command,
    root_pid,
)
from phosd.service.dbus.spec import Served
from phosd.service.tasks.kept_pool import KeptPool


@dataclass(frozen=True)
class ObjectInterfaces:
    """The interfaces of a process, an image, a pool and a GPU."""

    process: Served
    image: Served
    pool: Served
    gpu: Served


def _container(container: Container | None) -> dict[str, str]:
    return {} if container is None else asdict(container)


PROCESS_READERS: Mapping[str, Callable[[ProcessView], object]] = {
    "Pid": lambda view: view.process.pid,
    "StartTime": lambda view: view.process.start_time,
    "User": lambda view: view.process.uid,
    "CommandLine": lambda view: view.process.shown_command,
    "GPUs": lambda view: [gpu_path(uuid) for uuid in view.gpus],
    "DeviceBytes": lambda view: view.process.device_bytes,
    "HookState": lambda view: view.process.hook_state,
    "Reason": lambda view: view.process.reason,
    "State": lambda view: view.process.state,
    "LastImage": lambda view: view.last_image,
    "Output": lambda view: list(view.process.output),
    "Name": lambda view: view.process.name,
    "Container": lambda view: _container(view.process.container),
    "SlurmStep": lambda view: str(view.process.slurm_step or ""),
    "Restarter": lambda view: view.process.restarter,
    "Pool": lambda view: view.pool,
    "Waits": lambda view: view.waits,
    "Hollow": lambda view: view.process.away is not None and view.process.away.hollow,
    "Ready": lambda view: view.process.away is not None and view.process.away.ready,
    "Wakes": lambda view: view.sleeper is not None,
    "Idle": lambda view: view.sleeper.idle if view.sleeper else 0.0,
    "CheckpointInterval": lambda view: view.every,
    "CheckpointsKept": lambda view: view.keep,
}
IMAGE_READERS: Mapping[str, Callable[[ImageView], object]] = {
    "Id": lambda view: view.manifest.id,
    "Created": lambda view: created(view.manifest),
    "Owner": lambda view: view.manifest.owner,
    "Pid": lambda view: root_pid(view.manifest),
    "CommandLine": lambda view: list(root_command(view.manifest)),
    "Output": lambda view: output(view.manifest),
    "Name": lambda view: view.manifest.name,
    "Within": lambda view: view.manifest.within,
    "Note": lambda view: view.note,
    "Number": lambda view: view.manifest.number,
    "GPUs": lambda view: [[g.uuid, g.chip] for g in view.manifest.gpus],
    "TotalBytes": lambda view: view.total_bytes,
    "DeviceBytes": lambda view: view.manifest.device_bytes,
    "StoredBytes": lambda view: view.stored_bytes,
    "SharedBytes": lambda view: view.shared_bytes,
    "Mode": lambda view: view.manifest.mode,
    "Parent": lambda view: view.manifest.parent or "",
    "Why": lambda view: view.manifest.why,
    "WrongGuesses": lambda view: view.manifest.wrong_guesses,
    "StopSeconds": lambda view: view.manifest.stop_seconds,
    "State": lambda view: view.state,
    "Verified": lambda view: microseconds(view.verified),
    "VerifiedWhole": lambda view: view.verified_ok,
    "Rehearsed": lambda view: microseconds(view.rehearsed[0]),
    "RehearsalError": lambda view: view.rehearsed[1],
    "Crashes": lambda view: view.crashes,
}
POOL_READERS: Mapping[str, Callable[[KeptPool], object]] = {
    "Name": lambda kept: kept.pool.name,
    "Owner": lambda kept: kept.pool.owner,
    "Image": lambda kept: kept.pool.image,
    "Hollow": lambda kept: kept.pool.hollow,
    "Ready": lambda kept: kept.pool.ready,
    "Max": lambda kept: kept.pool.most,
    "Waiting": lambda kept: len(kept.resting),
    "WaitingReady": lambda kept: len(kept.are_ready),
    "Running": lambda kept: len(kept.started),
    "Trouble": lambda kept: kept.trouble,
    "Stated": lambda kept: kept.pool.stated,
}
GPU_READERS: Mapping[str, Callable[[GpuInfo], object]] = {
    "Ordinal": lambda gpu: gpu.ordinal,
    "UUID": lambda gpu: gpu.uuid,
    "Name": lambda gpu: gpu.name,
    "MemoryTotal": lambda gpu: gpu.memory_total,
    "MemoryUsed": lambda gpu: gpu.memory_used or 0,
    "Utilisation": lambda gpu: or_unknown(gpu.utilisation),
    "Temperature": lambda gpu: or_unknown(gpu.temperature),
    "Power": lambda gpu: or_unknown(gpu.power),
    "Processes": lambda gpu: list(gpu.pids),
    "Movers": lambda gpu: list(gpu.movers),
}
