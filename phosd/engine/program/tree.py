"""Read a process tree: a process and all its descendants, which one image holds together."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from phosd.engine.image.manifest import Process
from phosd.engine.system import cgroups, pid_namespaces, procfs
from phosd.engine.system.procfs import ProcessId
from phosd.errors import NoSuchProcess, Reason, Unsupported


@dataclass(frozen=True)
class TreeProcess:
    """A process as it was at the scan; ``affinity`` is per thread, in CPU numbers."""

    pid: int
    start_time: int
    parent: int
    group: int
    session: int
    terminal: int
    dead: bool
    executable: str
    command: tuple[str, ...]
    uids: tuple[int, ...]
    gids: tuple[int, ...]
    groups: tuple[int, ...]
    capabilities: int
    inheritable: int
    bounding: int
    seccomp: int
    threads: tuple[int, ...]
    affinity: dict[int, tuple[int, ...]]
    cgroup: str
    own_ids: Mapping[int, int] = field(default_factory=dict)
    """The ids that its threads have for themselves, if it is in a pid namespace below ours."""
    namespace: str = ""
    """Which one that is, as ``/proc/pid/ns`` names it."""

    @property
    def id(self) -> ProcessId:
        """The pid and start time, which no later process has."""
        return ProcessId(self.pid, self.start_time)

    @property
    def uid(self) -> int:
        """The user who owns the program."""
        return self.uids[0]

    @property
    def gid(self) -> int:
        return self.gids[0]

    @property
    def alive(self) -> bool:
        """Whether this very process still runs; another may have its pid by now."""
        return procfs.process_id(self.pid) == self.id

    def record(
        self, tree: int, *, gpu: bool = False, hooked: bool = False, parked: bool = False
    ) -> Process:
        """Return the manifest's entry for the process, in the image's tree number ``tree``."""
        return Process(
            pid=self.pid,
            tree=tree,
            start_time=self.start_time,
            executable=self.executable,
            command=self.command,
            uid=self.uid,
            gid=self.gid,
            groups=self.groups,
            threads=self.threads,
            gpu=gpu,
            hooked=hooked,
            parked=parked,
            affinity=self.affinity,
            cgroup=self.cgroup,
        )

    def in_own_ids(self, record: Process) -> Process:
        """Return a record of this process with the ids that it has for itself."""
        if not self.own_ids:
            return record
        return msgspec.structs.replace(
            record,
            pid=self.own_pid,
            threads=tuple(sorted(map(self.own, self.threads))),
            affinity={self.own(thread): cpus for thread, cpus in self.affinity.items()},
            outer_pid=self.pid,
        )

    @property
    def own_pid(self) -> int:
        """The pid that it has for itself."""
        return self.own(self.pid)

    def own(self, thread: int) -> int:
        """Return the id that one of its threads has for itself."""
        return self.own_ids.get(thread, thread)


@dataclass(frozen=True)
class ProcessTree:
    """A root and its descendants, parents before children."""

    processes: tuple[TreeProcess, ...]

    def __iter__(self) -> Iterator[TreeProcess]:
        return iter(self.processes)

    @property
    def root(self) -> TreeProcess:
        return self.processes[0]

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self.processes)

    @property
    def living(self) -> tuple[TreeProcess, ...]:
        """The processes without zombies, which have no memory, no files and no ids of their own."""
        return tuple(process for process in self.processes if not process.dead)

    @property
    def nested(self) -> bool:
        """Whether its root is in a pid namespace below ours."""
        return bool(self.root.own_ids)

    def own(self, pid: int) -> int:
        """Return the pid that one of its processes has for itself."""
        return next((each.own(pid) for each in self if each.pid == pid), pid)

    @property
    def ids(self) -> dict[int, int]:
        """The ids of all threads of living processes, by those that they have for themselves, but
        for processes in pid namespaces of their own below the root's.
        """
        return {
            each.own(thread): thread
            for each in self.living
            if each.namespace == self.root.namespace
            for thread in each.threads
        }

    @property
    def privileged(self) -> str:
        """Why only root may dump or restore this tree; empty if its owner may."""
        root = self.root
        for process in self.living:
            if {*process.uids} != {root.uid} or {*process.gids} != {root.gid}:
                return f"{procfs.describe(process.pid)} runs under other ids than its root"
            if process.groups != root.groups:
                return f"{procfs.describe(process.pid)} has other groups than its root"
            if root.uid != 0 and process.capabilities:
                return f"{procfs.describe(process.pid)} has capabilities"
            # It takes CAP_SETPCAP to give these back, which no user's CRIU may have.
            if root.uid != 0 and process.inheritable:
                return f"{procfs.describe(process.pid)} has inheritable capabilities"
            if root.uid != 0 and process.bounding != root.bounding:
                return f"{procfs.describe(process.pid)} has another bounding set than its root"
            if root.uid != 0 and process.seccomp:
                # CRIU's code in a program runs with its filters suspended, which only root may do.
                return f"{procfs.describe(process.pid)} is under seccomp filters"
        return ""

    @property
    def own_session(self) -> bool:
        """Whether the leaders of all sessions and process groups of the tree are in it."""
        return all(
            process.session in self.pids and process.group in self.pids for process in self.living
        )


def scan(pid: int) -> ProcessTree:
    """Read the tree under ``pid`` as it is now.

    Raises :class:`NoSuchProcess` if there is no such process, or it is a zombie, a thread of
    another process or of the kernel, and :class:`Unsupported` if a process of the tree cannot be
    looked at. Descendants that end during the scan are left out.
    """
    root = procfs.stat(pid)
    if root is None or root.dead or pid not in procfs.threads(pid):
        why = "does not exist" if root is None else "has ended and waits for its parent"
        raise NoSuchProcess(f"process {pid} {why}", hint="`phos ps` lists the GPU processes")
    if root.of_kernel:
        raise NoSuchProcess(f"process {pid} is a thread of the kernel", hint="choose a program")
    found: list[TreeProcess] = []
    waiting = [pid]
    while waiting:
        current = waiting.pop(0)
        try:
            found.append(_read(current))
            waiting += procfs.children(current)
        except (FileNotFoundError, ProcessLookupError):
            if current == pid:
                raise NoSuchProcess(
                    f"process {pid} ended while it was looked at", hint="start it again"
                ) from None
    return ProcessTree(tuple(found))


def require_process(pid: int, status: procfs.Status) -> None:
    """Raise :class:`NoSuchProcess` if ``pid``, with this status, is only a thread of a process."""
    if status.process != pid:
        raise NoSuchProcess(
            f"{pid} is a thread of process {status.process}, no process",
            hint=f"name the process, {status.process}",
        )


def _read(pid: int) -> TreeProcess:
    stat = procfs.stat(pid)
    if stat is None:
        raise ProcessLookupError(pid)
    status = procfs.status(pid)
    require_process(pid, status)
    threads = procfs.threads(pid)
    return TreeProcess(
        pid=pid,
        start_time=stat.start_time,
        parent=stat.parent,
        group=stat.group,
        session=stat.session,
        terminal=stat.terminal,
        dead=stat.dead,
        executable="" if stat.dead else _executable(pid),
        command=() if stat.dead else procfs.command_line(pid),
        uids=status.uids,
        gids=status.gids,
        groups=status.groups,
        capabilities=status.capabilities,
        inheritable=status.inheritable,
        bounding=status.bounding,
        seccomp=status.seccomp,
        threads=threads,
        affinity={} if stat.dead else _affinity(threads),
        cgroup=_cgroup(pid),
        own_ids=_own_ids(pid, threads),
        namespace=procfs.namespace(pid, "pid") if pid_namespaces.is_nested(pid) else "",
    )


def _own_ids(pid: int, threads: tuple[int, ...]) -> dict[int, int]:
    found = {}
    if pid_namespaces.is_nested(pid):
        for thread in threads:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                found[thread] = procfs.own_id(thread)
    return found


def _executable(pid: int) -> str:
    try:
        return str((procfs.PROC / str(pid) / "exe").readlink())
    except FileNotFoundError:
        return ""  # a kernel thread has none
    except PermissionError:  # of a user namespace above this one, even for root
        raise Unsupported(
            f"process {pid} lets nobody look at it, not even root (/proc/{pid}/exe is closed)",
            hint="name the program that uses the GPU: `phos ps` lists those",
            reason=Reason.CLOSED_PROCESS,
        ) from None


def _affinity(threads: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    found = {}
    for thread in threads:
        try:
            found[thread] = tuple(sorted(os.sched_getaffinity(thread)))
        except ProcessLookupError:
            continue  # the thread has ended meanwhile
    return found


def _cgroup(pid: int) -> str:
    """Return the path in the unified hierarchy; empty if there is only cgroup v1."""
    return cgroups.memberships(pid).get(cgroups.UNIFIED, "")
