"""GPU processes of this node: finding them, and what can be done with each."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from phosd.engine import cuda, driver
from phosd.engine.errors import Internal, NoSuchProcess, PhosError
from phosd.engine.hooklink import HookLink, HookState

_PROC = Path("/proc")


@dataclass(frozen=True)
class GpuProcess:
    """One process that uses a GPU. ``start_time`` in clock ticks since boot; bytes for memory.

    ``hook_state`` is ``hooked`` (can be parked), ``driver`` (only mode ``driver``) or
    ``unsupported``; ``reason`` says why it is not ``hooked``. ``state`` is the driver's or, when
    the gate is not open, the hook's, in lower case.
    """

    pid: int
    start_time: int
    uid: int
    command: tuple[str, ...]
    gpus: tuple[int, ...]
    device_bytes: int
    hook_state: str
    reason: str
    state: str


def start_time(pid: int) -> int:
    """Field 22 of ``/proc/<pid>/stat``: with the pid it identifies a process."""
    return int(_stat_fields(pid)[19])


def is_zombie(pid: int) -> bool:
    """Whether the process has ended and waits for its parent."""
    return _stat_fields(pid)[0] == "Z"


def _stat_fields(pid: int) -> list[str]:
    """``/proc/<pid>/stat`` from the state on; the name before it may hold any character."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise NoSuchProcess(f"there is no process {pid}", hint="see `phos ps`") from error
    return text[text.rindex(")") + 2 :].split()


def command_of(pid: int) -> tuple[str, ...]:
    """The command line; empty for a zombie."""
    raw = (_PROC / str(pid) / "cmdline").read_bytes()
    return tuple(part.decode(errors="replace") for part in raw.split(b"\0")[:-1])


def uses_cuda(pid: int) -> bool:
    """Whether the process has a CUDA driver library mapped (false for a process that is gone)."""
    try:
        with (_PROC / str(pid) / "maps").open() as maps:
            return any("/libcuda.so" in line for line in maps)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def is_gpu_process(pid: int) -> bool:
    """Whether the driver knows the process: it has CUDA loaded and has initialised it."""
    return uses_cuda(pid) and driver.state(pid) is not None


def visible_gpus(pid: int) -> list[int]:
    """The node's ordinals of the process's devices, in the order in which it numbers them."""
    uuids = gpu_uuids()
    chosen = _environment(pid).get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return list(range(len(uuids)))
    ordinals = []
    for name in chosen.split(","):
        name = name.strip()
        if name.isdigit() and int(name) < len(uuids):
            ordinals.append(int(name))
        elif matches := [i for i, uuid in enumerate(uuids) if name and uuid.startswith(name)]:
            ordinals.append(matches[0])
        else:
            break  # as the driver does: devices after an invalid one are invisible
    return ordinals


def gpu_uuids() -> list[str]:
    """UUIDs (``GPU-...``) of the node's GPUs by ordinal."""
    uuids = []
    for ordinal in range(cuda.call("cuDeviceGetCount")):
        device = cuda.call("cuDeviceGet", ordinal)
        raw = bytes(cuda.call("cuDeviceGetUuid_v2", device).bytes).hex()
        parts = (raw[:8], raw[8:12], raw[12:16], raw[16:20], raw[20:])
        uuids.append("GPU-" + "-".join(parts))
    return uuids


def _environment(pid: int) -> dict[str, str]:
    try:
        raw = (_PROC / str(pid) / "environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise NoSuchProcess(f"there is no process {pid}", hint="see `phos ps`") from error
    pairs = (p.decode(errors="replace").partition("=") for p in raw.split(b"\0") if p)
    return {name: value for name, _, value in pairs}


def list_processes(runtime_dir: Path) -> list[GpuProcess]:
    """Every GPU process of the node that this process may look at, in order of pid."""
    return list(_scan(runtime_dir))


def _scan(runtime_dir: Path) -> Iterator[GpuProcess]:
    pids = sorted(int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())
    for pid in pids:
        if pid == os.getpid() or not uses_cuda(pid):
            continue
        try:
            described = describe(pid, runtime_dir)
        except (NoSuchProcess, FileNotFoundError, ProcessLookupError):
            continue  # ended while we looked
        if described is not None:
            yield described


def describe(pid: int, runtime_dir: Path) -> GpuProcess | None:
    """What can be done with process ``pid``; None when it is not a GPU process."""
    started = start_time(pid)
    state = driver.state(pid)
    if state is None:
        return None
    hook_state, reason, gate, blocks = "driver", "", HookState.RUNNING, []
    if state is driver.State.RUNNING:
        try:
            with HookLink(pid, runtime_dir) as link:
                hello = link.hello()
                blocks = link.list_blocks()
            gate, reason = hello.state, hello.reason
            hook_state = "hooked" if hello.parkable else "driver"
            if hello.uses_unsupported:
                hook_state = "unsupported"
        except (NoSuchProcess, Internal) as error:
            reason = str(error)
        except PhosError as error:
            hook_state, reason = "unsupported", str(error)
    gpus = visible_gpus(pid)
    used = {gpus[b.device] for b in blocks if 0 <= b.device < len(gpus)}
    return GpuProcess(
        pid=pid,
        start_time=started,
        uid=(_PROC / str(pid)).stat().st_uid,
        command=command_of(pid),
        gpus=tuple(sorted(used)),
        device_bytes=sum(b.size for b in blocks),
        hook_state=hook_state,
        reason=reason,
        state=(gate if gate is not HookState.RUNNING else state).name.lower(),
    )
