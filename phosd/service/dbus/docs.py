"""What each interface, method, property and signal is for, as introspection tells it."""

DESCRIPTIONS: dict[str, dict[str, str]] = {
    "org.phos.Manager1": {
        "": "GPU processes of this node: saved, restored, watched.",
        "Checkpoint": (
            "Save a process while it runs on; options: mode, fallback, parent, tcp, deadline, "
            "queue, release_cached, every, keep, token."
        ),
        "Restore": "Bring an image back to life; options: files, output, token.",
        "VerifyImage": "Read every byte of an image again; options: token.",
        "DeleteImage": "Remove an image for good; returns when it is gone.",
        "Migrate": (
            "Move a process to another GPU (its number, the beginning of its UUID, or old:new for "
            "each of several, with commas) while it runs on; options: mode, deadline, queue, "
            "token."
        ),
        "Suspend": (
            "Take a process off its GPUs, to host memory or disk; it keeps its pid. Options: "
            "where, deadline, queue, token."
        ),
        "Resume": (
            "Bring a suspended process back, on its GPUs or others; options: gpu, queue, token."
        ),
        "Swap": (
            "Suspend one process and resume another in its place; options: where, deadline, "
            "queue, token."
        ),
        "PlanEvacuation": (
            "What would become of the caller's processes if this GPU were to be cleared, a step "
            "for each: pid, migrate, suspend or stay, bytes on the GPU, destination for Migrate, "
            "why, command line."
        ),
        "Recover": (
            "Set a process running again that was left locked, checkpointed or parked; returns "
            "what was done when it is over."
        ),
        "GetProcess": "The object of a GPU process.",
        "ListProcesses": (
            "The GPU processes that the caller may see: pid, user, command line, device bytes, "
            "hook state, state, path."
        ),
        "ListImages": (
            "The images that the caller may see: id, created, owner, total bytes, stored bytes, "
            "mode, path."
        ),
        "ListJobs": "The jobs that the caller may see: number, operation, target, state, path.",
        "ListGPUs": "The GPUs: ordinal, UUID, name, memory, used memory, path.",
        "ListHistory": (
            "The latest jobs that the caller may see, newest first, with their phases; options: "
            "limit, pid, operation, state, since, until, before."
        ),
        "ListEvents": (
            "What happened lately of which the caller may know, newest first; options: limit, "
            "severity, since."
        ),
        "Version": "The version of phosd.",
        "Features": "What this version can do.",
        "GPUs": "The objects of the GPUs.",
        "Troubles": "What is wrong with phosd's own surroundings.",
        "JobNew": "A job was accepted.",
        "JobRemoved": "A job has ended; result is its state.",
        "ProcessNew": "A process uses a GPU now.",
        "ProcessRemoved": "A GPU process has ended.",
        "ImageNew": "An image is complete.",
        "ImageRemoved": "An image is gone.",
        "EventNew": "Something happened; ListEvents tells those whom it concerns what.",
    },
    "org.phos.Job1": {
        "": "A piece of long work.",
        "Cancel": "Stop at the next safe point; the program runs on.",
        "Number": "Its number, which no other job of this node ever has.",
        "Operation": (
            "checkpoint, restore, verify, delete, recover, migrate, suspend, resume or swap."
        ),
        "Target": (
            "The pid, or the id of the image, that it is about; of a swap who leaves and who comes."
        ),
        "Owner": "The user id that asked for it.",
        "State": "queued, running, done, failed or cancelled.",
        "Position": "Its place among the jobs that wait, from 1; 0 when it does not wait.",
        "Phase": "What it does now, by the names of the protocol.",
        "ProgramStopped": "Whether the program stands still now.",
        "Progress": "How much of the phase is done, 0..1.",
        "ProgressValid": "Whether Progress says anything.",
        "BytesDone": "Bytes of the phase that are done.",
        "BytesTotal": "Bytes of the phase in all; 0: not known.",
        "Rate": "Bytes a second of the phase.",
        "Started": (
            "When it began, or was asked for while it waits, in microseconds since the epoch."
        ),
        "Ended": "When it ended, in microseconds since the epoch; 0: it has not.",
        "ExpectedEnd": "When the phase should end, in microseconds since the epoch; 0: not known.",
        "StopSeconds": "For how many seconds the program has stood still.",
        "Mode": (
            "The mode of a checkpoint or a migration, or where the memory of a suspended process "
            "goes: as it was asked for; once done, what was used."
        ),
        "Why": "Why that mode was used.",
        "Destination": "Where a process is to go, as the caller said it; empty: nowhere else.",
        "WrongGuesses": "How often the program wrote where nobody expected it.",
        "Suspects": "The kernels of which one made a guess wrong.",
        "DrainedBytes": "Bytes of device memory saved so far, of all attempts.",
        "DrainRate": "Bytes of device memory saved a second.",
        "Scheduled": "Whether it is a periodic checkpoint.",
        "Details": "Figures of the mode that was used, units in their names.",
        "Notes": "What a reader should know.",
        "Phases": (
            "Each phase: name, whether the program stood still, seconds, bytes done, bytes in all."
        ),
        "Cancelable": "Whether Cancel can still do something.",
        "Result": (
            "What it made: an image id, or the pid of a process that was restored or swapped in; "
            "what it recovered; which GPU became which (0:1,1:0); or where memory was put."
        ),
        "Error": "The last part of the name of the error that ended it.",
        "Message": "What that error says.",
    },
    "org.phos.Process1": {
        "": "A process that uses a GPU.",
        "ListBlocks": (
            "Its device memory, in order of id: id, address, size, GPU (-1: host memory), flags; "
            "options: limit."
        ),
        "ListKernels": (
            "The kernels launched since a checkpoint last began to copy on write, and its "
            "program's suspects that were not (0 launches), suspects first: name, hash of the "
            "module, launches, whether it is a suspect; options: limit."
        ),
        "TrustKernels": (
            "Its program's suspects are taken for what their arguments tell again, from the next "
            "checkpoint on; options: kernel (those of this name only). How many."
        ),
        "ReadLog": "What the hook in it has counted and noted, a line each.",
        "Pid": "Its pid.",
        "StartTime": (
            "When it began, in clock ticks since the boot; with the pid it names the process."
        ),
        "User": "The user id that it runs as.",
        "CommandLine": "Its arguments.",
        "GPUs": "The GPUs that it uses.",
        "DeviceBytes": "Bytes of device memory that it has.",
        "HookState": "hooked, driver (no hook: only the mode driver) or unsupported.",
        "Reason": "Why it is not hooked, or not supported; or where its memory is while suspended.",
        "State": "suspended, or what the driver and the hook say of it, e.g. running.",
        "LastImage": "The id of the latest image of it.",
        "CheckpointInterval": "Seconds between periodic checkpoints; 0: there are none.",
        "CheckpointsKept": "How many images of periodic checkpoints are kept.",
    },
    "org.phos.Image1": {
        "": "A saved process.",
        "ListBlocks": (
            "Its device memory, in the order in which it is loaded: pid, id, address, size, GPU "
            "(-1: host memory), chunks (0: another row has them), stored bytes, bytes of those "
            "that an older image holds, too; options: limit, offset."
        ),
        "Id": "Its id; ids sort by time.",
        "Created": "When it was made, in microseconds since the epoch.",
        "Owner": "The user id that the program ran as, and a restored one runs as.",
        "Pid": "The pid of the program's first process.",
        "CommandLine": "The arguments of that process.",
        "GPUs": "UUID and chip of each GPU that it was on.",
        "TotalBytes": "Bytes that a restore brings back.",
        "DeviceBytes": "Bytes of device memory among them.",
        "StoredBytes": "Bytes that it takes on disk: equal chunks are stored once.",
        "SharedBytes": "Bytes of those that an older image holds, too.",
        "Mode": "The mode that it was made in.",
        "Parent": "The image whose chunks were not saved again; empty: none.",
        "Why": "Why it was made in that mode.",
        "WrongGuesses": "How often the program wrote where nobody expected it.",
        "StopSeconds": "For how many seconds the program stood still.",
        "Verified": "When it was verified last, in microseconds since the epoch; 0: never.",
        "VerifiedWhole": "Whether it was whole then.",
    },
    "org.phos.Gpu1": {
        "": "A GPU of this node.",
        "ListSamples": (
            "What it did during the last ten minutes, oldest first: time in microseconds since "
            "the epoch, utilisation, used memory, temperature, power, as the properties have them; "
            "options: since."
        ),
        "Ordinal": "Its number for CUDA.",
        "UUID": "Its UUID.",
        "Name": "What it is.",
        "MemoryTotal": "Bytes of memory.",
        "MemoryUsed": "Bytes of memory in use.",
        "Utilisation": "0..1; -1: not known.",
        "Temperature": "Degrees Celsius; -1: not known.",
        "Power": "Watts; -1: not known.",
        "Processes": "The pids that use it.",
    },
}
"""By interface and member; under the empty name what the interface itself is."""
