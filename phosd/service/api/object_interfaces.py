"""Define the D-Bus interfaces of processes, images and GPUs.

Times are microseconds since the epoch (0: unknown), sizes bytes, durations seconds.
"""

from dataclasses import asdict, dataclass

from phosd.engine.node.gpus import GpuInfo
from phosd.engine.system.containers import Container
from phosd.service.api.object_methods import GpuMethods, ImageMethods, ProcessMethods
from phosd.service.api.views import (
    created,
    gpu_path,
    microseconds,
    or_unknown,
    output,
    root_command,
    root_pid,
)
from phosd.service.dbus.spec import Interface, Property, methods_of


@dataclass(frozen=True)
class ObjectInterfaces:
    """The interfaces of a process, an image and a GPU."""

    process: Interface
    image: Interface
    gpu: Interface


def _container(container: Container | None) -> dict[str, str]:
    return {} if container is None else asdict(container)


def process_interface(methods: ProcessMethods | type[ProcessMethods]) -> Interface:
    """Return ``org.phos.Process1``."""
    return Interface(
        "org.phos.Process1",
        "A process that uses a GPU.",
        methods_of(methods),
        (
            Property("Pid", "u", "Its pid.", lambda view: view.process.pid, constant=True),
            Property(
                "StartTime",
                "t",
                (
                    "When it began, in clock ticks since the boot; with the pid it names the "
                    "process."
                ),
                lambda view: view.process.start_time,
                constant=True,
            ),
            Property(
                "User",
                "u",
                "The user id that it runs as.",
                lambda view: view.process.uid,
                constant=True,
            ),
            Property(
                "CommandLine",
                "as",
                "Its arguments.",
                lambda view: view.process.shown_command,
                private=True,
            ),
            Property(
                "GPUs",
                "ao",
                "The GPUs that it uses.",
                lambda view: [gpu_path(uuid) for uuid in view.gpus],
            ),
            Property(
                "DeviceBytes",
                "t",
                "Bytes of device memory that it has.",
                lambda view: view.process.device_bytes,
            ),
            Property(
                "HookState",
                "s",
                "hooked, driver (no hook: only the mode driver) or unsupported.",
                lambda view: view.process.hook_state,
            ),
            Property(
                "Reason",
                "s",
                "Why it is not hooked, or not supported; or where its memory is while suspended.",
                lambda view: view.process.reason,
                private=True,
            ),
            Property(
                "State",
                "s",
                "suspended, or what the driver and the hook say of it, e.g. running.",
                lambda view: view.process.state,
            ),
            Property(
                "LastImage",
                "s",
                "The id of the latest image of it.",
                lambda view: view.last_image,
                private=True,
            ),
            Property(
                "Output",
                "as",
                "The files to which its standard output and error go.",
                lambda view: list(view.process.output),
                private=True,
            ),
            Property(
                "Name",
                "s",
                "The name that its program was given; empty: none.",
                lambda view: view.process.name,
                private=True,
            ),
            Property(
                "Container",
                "a{ss}",
                "The container that it is in: runtime, id, and name and pod where they are known.",
                lambda view: _container(view.process.container),
                private=True,
            ),
            Property(
                "SlurmStep",
                "s",
                "The step of a Slurm job that it is in, as 4711.0 or 4711.batch; empty: in none.",
                lambda view: str(view.process.slurm_step or ""),
                private=True,
            ),
            Property(
                "CheckpointInterval",
                "d",
                "Seconds between periodic checkpoints; 0: there are none.",
                lambda view: view.every,
            ),
            Property(
                "CheckpointsKept",
                "u",
                "How many images of periodic checkpoints are kept.",
                lambda view: view.keep,
            ),
        ),
    )


def image_interface(methods: ImageMethods | type[ImageMethods]) -> Interface:
    """Return ``org.phos.Image1``."""
    return Interface(
        "org.phos.Image1",
        "A saved process.",
        methods_of(methods),
        (
            Property(
                "Id", "s", "Its id; ids sort by time.", lambda view: view.manifest.id, constant=True
            ),
            Property(
                "Created",
                "t",
                "When it was made, in microseconds since the epoch.",
                lambda view: created(view.manifest),
                constant=True,
            ),
            Property(
                "Owner",
                "u",
                "The user id that the program ran as, and a restored one runs as.",
                lambda view: view.manifest.owner,
                constant=True,
            ),
            Property(
                "Pid",
                "u",
                "The pid that the program's first process had.",
                lambda view: root_pid(view.manifest),
                private=True,
                constant=True,
            ),
            Property(
                "CommandLine",
                "as",
                "The arguments of that process.",
                lambda view: list(root_command(view.manifest)),
                private=True,
                constant=True,
            ),
            Property(
                "Output",
                "as",
                "The files to which that process's standard output and error went, and go again.",
                lambda view: output(view.manifest),
                private=True,
                constant=True,
            ),
            Property(
                "Name",
                "s",
                "The name of the program; empty: it has none.",
                lambda view: view.manifest.name,
                private=True,
                constant=True,
            ),
            Property(
                "Note",
                "s",
                "What its owner has written of it; empty: nothing.",
                lambda view: view.note,
                private=True,
            ),
            Property(
                "Number",
                "u",
                "Its number among the owner's images with this name: NAME@NUMBER.",
                lambda view: view.manifest.number,
                constant=True,
            ),
            Property(
                "GPUs",
                "a(ss)",
                "UUID and chip of each GPU that it was on.",
                lambda view: [[g.uuid, g.chip] for g in view.manifest.gpus],
                constant=True,
            ),
            Property(
                "TotalBytes",
                "t",
                "Bytes that a restore brings back.",
                lambda view: view.total_bytes,
                constant=True,
            ),
            Property(
                "DeviceBytes",
                "t",
                "Bytes of device memory among them.",
                lambda view: view.manifest.device_bytes,
                constant=True,
            ),
            Property(
                "StoredBytes",
                "t",
                "Bytes that it takes on disk: equal chunks are stored once.",
                lambda view: view.stored_bytes,
                constant=True,
            ),
            Property(
                "SharedBytes",
                "t",
                "Bytes of those that an older image holds, too.",
                lambda view: view.shared_bytes,
            ),
            Property(
                "Mode",
                "s",
                "The mode that it was made in.",
                lambda view: view.manifest.mode,
                constant=True,
            ),
            Property(
                "Parent",
                "s",
                "The image whose chunks were not saved again; empty: none.",
                lambda view: view.manifest.parent or "",
                private=True,
                constant=True,
            ),
            Property(
                "Why",
                "s",
                "Why it was made in that mode.",
                lambda view: view.manifest.why,
                private=True,
                constant=True,
            ),
            Property(
                "WrongGuesses",
                "u",
                "How often the program wrote where phosd did not expect it.",
                lambda view: view.manifest.wrong_guesses,
                constant=True,
            ),
            Property(
                "StopSeconds",
                "d",
                "For how many seconds the program stood still.",
                lambda view: view.manifest.stop_seconds,
                constant=True,
            ),
            Property(
                "State",
                "s",
                "in memory: it is lost if the machine ends now; durable: it is on the disk.",
                lambda view: view.state,
            ),
            Property(
                "Verified",
                "t",
                "When it was verified last, in microseconds since the epoch; 0: never.",
                lambda view: microseconds(view.verified),
            ),
            Property(
                "VerifiedWhole", "b", "Whether it was whole then.", lambda view: view.verified_ok
            ),
            Property(
                "Rehearsed",
                "t",
                ("When its restore was rehearsed last, in microseconds since the epoch; 0: never."),
                lambda view: microseconds(view.rehearsed[0]),
            ),
            Property(
                "RehearsalError",
                "s",
                "Why that failed; empty: it did not.",
                lambda view: view.rehearsed[1],
                private=True,
            ),
        ),
    )


def _memory_used(gpu: GpuInfo) -> int:
    return gpu.memory_used or 0


def gpu_interface(methods: GpuMethods | type[GpuMethods]) -> Interface:
    """Return ``org.phos.Gpu1``."""
    return Interface(
        "org.phos.Gpu1",
        "A GPU of this node.",
        methods_of(methods),
        (
            Property("Ordinal", "u", "Its number for CUDA.", lambda gpu: gpu.ordinal),
            Property("UUID", "s", "Its UUID.", lambda gpu: gpu.uuid, constant=True),
            Property("Name", "s", "What it is.", lambda gpu: gpu.name, constant=True),
            Property("MemoryTotal", "t", "Bytes of memory.", lambda gpu: gpu.memory_total),
            Property("MemoryUsed", "t", "Bytes of memory in use.", _memory_used),
            Property(
                "Utilisation", "d", "0..1; -1: not known.", lambda gpu: or_unknown(gpu.utilisation)
            ),
            Property(
                "Temperature",
                "d",
                "Degrees Celsius; -1: not known.",
                lambda gpu: or_unknown(gpu.temperature),
            ),
            Property("Power", "d", "Watts; -1: not known.", lambda gpu: or_unknown(gpu.power)),
            Property("Processes", "au", "The pids that use it.", lambda gpu: list(gpu.pids)),
        ),
    )
