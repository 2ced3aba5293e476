"""Find the GPU processes of this node, and whether each can be parked or moved."""

import contextlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from phosd.engine.hook_client.link import Hello, HookBlock, HookLink, HookState
from phosd.engine.hook_client.places import hook_socket
from phosd.engine.image.called import Called
from phosd.engine.program import cuda_tools, driver_checkpoint
from phosd.engine.program.away import Away
from phosd.engine.program.follower import follower_of
from phosd.engine.program.name import name_of
from phosd.engine.program.process_gpus import environment, gpus_of, unseen_gpus
from phosd.engine.program.stopped import StoppedProcesses
from phosd.engine.program.within import pod_or_job, within
from phosd.engine.system import procfs
from phosd.engine.system.containers import Container, container_of
from phosd.engine.system.freezer import frozen_for
from phosd.engine.system.procfs import ProcessId
from phosd.engine.system.restarters import Restarters
from phosd.engine.system.slurm_steps import SlurmStep, step_of
from phosd.engine.system.unkillable_reads import ABANDONABLE_THREADS, fairly
from phosd.errors import Busy, Internal, NoSuchProcess, PhosError, Timeout

_TIMEOUT = 2.0
"""Seconds that a hook may take to answer when processes are listed."""
_LIST_SECONDS = 8.0
"""Seconds that a list may take; whom there was no time to look at is described as before."""
_DEVICES = b" /dev/nvidia"
_HOOK = "phos-hook\n"
"""The name of the hook's thread, as in ``hook/control/server.cpp``."""
_ONLY_NVML = "it has NVML and has not initialised CUDA: it has nothing on a GPU"
_SHOWN = 2 << 10
"""Characters of a command in lists: thousands of processes fit into one answer on the bus."""


@dataclass(frozen=True)
class GpuProcess:
    """A process that uses a GPU. ``start_time`` in clock ticks since boot; memory in bytes.

    ``hook_state`` is ``hooked`` (can be parked), ``driver`` (only mode ``driver``) or
    ``unsupported``; ``reason`` says why it is not ``hooked``. ``state`` is the driver's, or the
    hook's if the gate is not open, in lower case; or ``stopped``, by a signal or a debugger.
    ``output`` are the files to which its standard output and error go. ``name`` is that of its
    program, if ``phos run`` gave it one; ``container`` is the one that it is in, if that has an id,
    and ``unseen`` are the GPUs of this node that were not given to it. ``slurm_step`` is the step
    of a Slurm job that it is in. ``unit`` is the service of systemd that would start it again if it
    crashed. ``away`` is where its memory is while it is suspended.
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
    output: tuple[str, ...] = ()
    name: str = ""
    container: Container | None = None
    unseen: frozenset[int] = frozenset()
    slurm_step: SlurmStep | None = None
    unit: str = ""
    away: Away | None = None

    @property
    def restarter(self) -> str:
        """The unit, pod or job that would start its program again if it, or the node, failed;
        empty: none is known.
        """
        return pod_or_job(self.container, self.slurm_step) or self.unit

    @property
    def within(self) -> str:
        """The pod, Slurm job or container that it is in, in words; empty: in none."""
        return within(self.container, self.slurm_step)

    @property
    def called(self) -> Called:
        """What people call its program."""
        return Called(self.name, self.within)

    @property
    def id(self) -> ProcessId:
        """The pid and start time, which no later process has."""
        return ProcessId(self.pid, self.start_time)

    @property
    def shown_command(self) -> list[str]:
        """The command for lists, as far as 2,048 characters go."""
        shown, left = [], _SHOWN
        for word in self.command:
            shown.append(word[:left])
            left -= len(word) + 1
            if left <= 0:
                break
        return shown


def uses_cuda(pid: int) -> bool:
    """Return whether the process maps a CUDA driver library; False if it has ended."""
    return _maps(pid, b"/libcuda.so")


def has_hook(pid: int) -> bool:
    """Return whether the hook is in the process, and not switched off."""
    return hook_place(pid) is not None


def hook_place(pid: int) -> Path | None:
    """Return the runtime directory in which the hook of a process listens; None without a hook."""
    if not _maps(pid, b"/libphos_hook.so"):
        return None
    try:
        variables = environment(pid)
    except NoSuchProcess:
        return None
    if variables.get("PHOS_HOOK") == "off":
        return None
    return Path(variables.get("PHOS_RUNTIME_DIR") or "/run/phos")


def _maps(pid: int, library: bytes) -> bool:
    try:
        with (procfs.PROC / str(pid) / "maps").open("rb") as maps:
            return any(library in line for line in maps)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def is_gpu_process(pid: int) -> bool:
    """Return whether a process has initialised CUDA."""
    if not uses_cuda(pid) or driver_checkpoint.state(pid) is None:
        return False
    return not has_only_nvml(pid)


def has_only_nvml(pid: int) -> bool:
    """Return whether a process that the driver knows has NVML and has not initialised CUDA.

    NVML loads libcuda, and the driver's checkpoint knows the process from then on; CUDA maps the
    driver's devices, and the hook begins with it (docs/design/driver.md: nvml-has-a-state). A
    launcher is such a process, which asks how many GPUs there are and starts others to use them.
    """
    nvml = False
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        with (procfs.PROC / str(pid) / "maps").open("rb") as maps:
            for line in maps:
                if _DEVICES in line:
                    return False
                nvml = nvml or b"/libnvidia-ml.so" in line
        return nvml and not _hook_has_begun(pid)
    return False


def _hook_has_begun(pid: int) -> bool:
    threads = (procfs.PROC / str(pid) / "task").iterdir()
    return any((thread / "comm").read_text(errors="replace") == _HOOK for thread in threads)


def list_processes(
    runtime_dir: Path,
    asking: Callable[[int], AbstractContextManager[bool]],
    restarters: Restarters,
    without: Collection[int] = (),
    known: Mapping[int, GpuProcess] = MappingProxyType({}),
) -> list[GpuProcess]:
    """Return every GPU process of the node that this process may inspect, ordered by pid.

    ``asking`` tells for each whether it may be queried; it may not while a job works on it. Such a
    process, one that is stopped, and one that does not let itself be looked at, is described as in
    the previous list, ``known``: none that lives vanishes. Processes in ``without`` are left out.
    """

    stopped = StoppedProcesses(runtime_dir)

    def look(pid: int) -> GpuProcess | None:
        if not uses_cuda(pid):
            return None
        before, described = _known(pid, known), None
        # It may end meanwhile, or a thread of it that is looked at, or a file that it has open.
        with contextlib.suppress(NoSuchProcess, FileNotFoundError, ProcessLookupError):
            with asking(pid) as free:
                described = None if free else _as_before(before)
                described = described or _stopped(pid, before, stopped)
                described = described or describe(pid, runtime_dir, ask_hook=free, before=before)
            described = described and _with_unit(described, restarters)
        return described or (before and _unlooked(before))

    pids = fairly({*procfs.pids()} - {os.getpid(), *without})
    seen = dict(ABANDONABLE_THREADS.each(pids, look, _LIST_SECONDS))
    unseen = [before for pid in pids if pid not in seen and (before := _known(pid, known))]
    found = [each for each in seen.values() if each is not None]
    found += filter(None, map(_unlooked, unseen))
    return sorted(found, key=lambda each: each.pid)


def _unlooked(before: GpuProcess) -> GpuProcess | None:
    """Describe a process that could not be looked at as before; None if it is ending, or has become
    another program.
    """
    with contextlib.suppress(NoSuchProcess, FileNotFoundError, ProcessLookupError):
        if not procfs.ending(before.pid) and procfs.command_line(before.pid) == before.command:
            return replace(before, reason="it could not be looked at")
    return None


def _with_unit(found: GpuProcess, restarters: Restarters) -> GpuProcess:
    follower = follower_of(found.pid)
    unit = restarters.unit_of(
        found.pid, named=bool(found.name), follower=follower.pid if follower else None
    )
    return replace(found, unit=unit)


def _as_before(before: GpuProcess | None) -> GpuProcess | None:
    """Return the known description of a process that a job works on.

    Not even the driver is queried: the software GPU's driver answers through a socket of the
    process, which would look to CRIU like one of the program.
    """
    return before and replace(before, reason="a job works on it")


def _known(pid: int, known: Mapping[int, GpuProcess]) -> GpuProcess | None:
    found, stat = known.get(pid), procfs.stat(pid)
    if found is None or stat is None or stat.start_time != found.start_time:
        return None
    return found


def _stopped(pid: int, before: GpuProcess | None, stopped: StoppedProcesses) -> GpuProcess | None:
    """Return the description of a stopped process, which cannot be queried; None if it runs."""
    try:
        stopped.require_going(pid)
    except Busy as error:
        found, stat = before, procfs.stat(pid)
        if found is None and stat is not None:
            found = _described(ProcessId(pid, stat.start_time), "unsupported", "", "")
        return found and replace(found, reason=str(error), state="stopped")
    return None


def _unheard(pid: int, runtime_dir: Path) -> str:
    """Return why a process is listed as unsupported whose hook does not listen."""
    return (
        f"the hook in process {pid} does not answer, and may have parked its memory in a job that"
        f" failed; `phos recover {pid}`, or start the program with PHOS_RUNTIME_DIR={runtime_dir}"
    )


def _place_for(pid: int, runtime_dir: Path) -> str:
    """Make a folder in which the hook of a process can listen: its user may have none yet. Returns
    what is to be said of that; nothing if there was one.
    """
    try:
        with hook_socket(runtime_dir, pid) as before, hook_socket(runtime_dir, pid, make=True):
            had = before.folder is not None
    except (OSError, PhosError) as error:  # a container, or somebody in it, may not let us
        return f"the hook of process {pid} has no folder to listen in ({error})"
    if had:
        return ""
    return f"the hook of process {pid} has only now a folder to listen in; look again in a second"


def describe(
    pid: int, runtime_dir: Path, *, ask_hook: bool = True, before: GpuProcess | None = None
) -> GpuProcess | None:
    """Describe what can be done with process ``pid``; None if it is no GPU process.

    A hook that does not answer, perhaps because the machine is busy, had its memory ``before``.
    """
    stat = procfs.stat(pid)
    state = driver_checkpoint.state(pid)
    if stat is None or state is None:
        return None
    process = ProcessId(pid, stat.start_time)
    if frozen_for(pid):  # with all others of its program, of which not all use a GPU
        known = before is not None or _hook_has_begun(pid)
        return _described(process, "hooked", "phosd has frozen it", state.name) if known else None
    if state is driver_checkpoint.State.UNKNOWN:
        why = "the driver does not tell its state (see phosd's log)"
        return _described(process, "unsupported", why, state.name)
    if tool := cuda_tools.tool_in(pid):
        why = f"it runs under {tool}, which the driver cannot save"
        return _described(process, "unsupported", why, state.name)
    if not ask_hook:
        return _described(process, "hooked", "a job works on it", state.name)
    hook_state, reason, gate = "driver", "", HookState.RUNNING
    memory: list[tuple[HookBlock, int]] = []
    if state is driver_checkpoint.State.RUNNING:
        try:
            with HookLink(pid, runtime_dir, _TIMEOUT) as link:
                hello = link.hello()
                memory = placed(hello, link.list_blocks())
            gate, reason = hello.state, hello.reason
            hook_state = "hooked" if hello.parkable else "driver"
            if hello.uses_unsupported:
                hook_state = "unsupported"
        except (NoSuchProcess, Internal) as error:
            reason = str(error)
            if has_only_nvml(pid):
                reason = _ONLY_NVML
            elif isinstance(error, NoSuchProcess) and has_hook(pid):
                said = _place_for(pid, runtime_dir)
                hook_state, reason = "unsupported", said or _unheard(pid, runtime_dir)
        except PhosError as error:
            if isinstance(error, Timeout) and before is not None:
                return replace(before, reason=str(error))
            hook_state, reason = "unsupported", str(error)
    shown = state.name if gate is HookState.RUNNING else gate.name
    return _described(process, hook_state, reason, shown, memory)


def placed(hello: Hello, blocks: Sequence[HookBlock]) -> list[tuple[HookBlock, int]]:
    """Return each block with the node's ordinal of its GPU (-1 for host memory)."""
    gpus = gpus_of(hello)
    return [(b, gpus[b.device] if 0 <= b.device < len(gpus) else -1) for b in blocks]


def _described(
    process: ProcessId,
    hook_state: str,
    reason: str,
    state: str,
    memory: Sequence[tuple[HookBlock, int]] = (),
) -> GpuProcess:
    return GpuProcess(
        pid=process.pid,
        start_time=process.start_time,
        uid=(procfs.PROC / str(process.pid)).stat().st_uid,
        command=procfs.command_line(process.pid),
        gpus=tuple(sorted({gpu for _, gpu in memory if gpu >= 0})),
        device_bytes=sum(block.size for block, _ in memory),
        hook_state=hook_state,
        reason=reason,
        state=state.lower(),
        output=output_files(process.pid),
        name=name_of(process.pid),
        container=container_of(process.pid),
        unseen=unseen_gpus(process.pid),
        slurm_step=step_of(process.pid),
    )


def output_files(pid: int) -> tuple[str, ...]:
    """Return the files to which a process's standard output and error go, each once; neither
    terminals and pipes, nor paths that are too long for lists.
    """
    found: list[str] = []
    for number in (1, 2):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            target = str((procfs.PROC / str(pid) / "fd" / str(number)).readlink())
            if target.startswith("/") and not target.startswith("/dev/") and len(target) <= _SHOWN:
                found.append(target)
    return tuple(dict.fromkeys(found))
