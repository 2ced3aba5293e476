"""Keep the process trees that an operation must treat together, with connections to their hooks.

Processes that share device memory are one group (hazard 5). A tree is saved from its root, so a
group is a set of whole trees.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phosd.engine.hook_client.link import Hello, HookLink, HookState
from phosd.engine.hook_client.listeners import Listeners
from phosd.engine.job.affected import AffectedProcess, AffectedSet
from phosd.engine.memory.exported import SHARED, ExportedBlock, distinct
from phosd.engine.program import (
    cuda_tools,
    driver_checkpoint,
    own_processes,
    process,
    process_gpus,
)
from phosd.engine.program.stopped import StoppedProcesses
from phosd.engine.program.tree import ProcessTree, TreeProcess
from phosd.engine.system import procfs, stopped_state
from phosd.engine.system.kcmp import same_file
from phosd.engine.system.procfs import ProcessId
from phosd.engine.system.unkillable_reads import ABANDONABLE_THREADS
from phosd.errors import Busy, NoSuchProcess, PhosError, Reason, Timeout, Unsupported

_ROOT = 0
TIMEOUT = 3.0
"""Seconds to wait for the hook of a process that may not be in the group."""


@dataclass(frozen=True)
class Member:
    """A process of a group that the driver's checkpoint saves. ``gpus`` are the node's ordinals of
    the devices that it sees; ``only_nvml``: it has not initialised CUDA, and so has no hook that
    listens, and nothing on them.
    """

    pid: int
    gpus: list[int]
    link: HookLink | None
    hello: Hello | None
    only_nvml: bool = False


@dataclass
class CheckpointGroup:
    """The process trees that are saved or moved together, and the GPU processes in them.

    A process that shares device memory with the group is in it, with its whole tree.
    """

    runtime_dir: Path
    check: Callable[[ProcessTree], object]
    trees: list[ProcessTree] = field(default_factory=list)
    members: list[Member] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._listeners = Listeners(self.runtime_dir)

    @property
    def links(self) -> list[HookLink]:
        """The connected hooks."""
        return [m.link for m in self.members if m.link is not None]

    @property
    def gpu_pids(self) -> list[int]:
        """The pids of the processes that the driver's checkpoint saves."""
        return [m.pid for m in self.members]

    @property
    def users(self) -> list[Member]:
        """The members that have initialised CUDA, and may have memory and contexts."""
        return [m for m in self.members if not m.only_nvml]

    @property
    def pids(self) -> list[int]:
        """The pids of all processes."""
        return [p.pid for tree in self.trees for p in tree]

    @property
    def living(self) -> dict[int, ProcessId]:
        """All processes that lived when they were found, by pid."""
        return {p.pid: p.id for tree in self.trees for p in tree.living}

    @property
    def owner(self) -> int:
        """The user who owns what is saved of the group: root, if it has processes of several users.
        Nobody else may have what all of them had in memory.
        """
        users = {p.uid for tree in self.trees for p in tree.living}
        return users.pop() if len(users) == 1 else _ROOT

    @property
    def process_ids(self) -> frozenset[ProcessId]:
        """The pids and start times of the GPU processes."""
        return self._ids(self.gpu_pids)

    @property
    def hooked_ids(self) -> frozenset[ProcessId]:
        """The pids and start times of the processes whose hooks are connected."""
        return self._ids(link.pid for link in self.links)

    def _ids(self, pids: Iterable[int]) -> frozenset[ProcessId]:
        wanted = set(pids)
        return frozenset(p.id for tree in self.trees for p in tree if p.pid in wanted)

    @property
    def affected(self) -> AffectedSet:
        """The processes and GPUs to settle if a job begins with this group and is interrupted."""
        members = {member.pid: member for member in self.members}
        processes = (
            AffectedProcess(
                p.pid,
                p.start_time,
                gpu=p.pid in members,
                hooked=p.pid in members and members[p.pid].link is not None,
            )
            for tree in self.trees
            for p in tree.living
        )
        gpus = {gpu for member in self.members for gpu in member.gpus}
        return AffectedSet(tuple(processes), tuple(sorted(gpus)))

    def interruptible(self) -> bool:
        """Ask whether GPUs interrupt the members' kernels when others need the GPU.

        Not once the driver has restored them for phosd; then no kernel may be run beside them
        (hazard 47).
        """
        links = self.links
        asked = len(links) == len(self.users)
        return asked and all(link.hello().never_stopped for link in links)

    @property
    def essential(self) -> list[TreeProcess]:
        """The processes without which a checkpoint is impossible: roots and GPU processes."""
        gpu = set(self.gpu_pids)
        return [p for tree in self.trees for p in tree if p is tree.root or p.pid in gpu]

    def why_not_parked(self) -> Unsupported | None:
        """Return why memory cannot be parked, or None."""
        if not self.users:
            return Unsupported("no process of it has initialised CUDA", reason=Reason.NOT_PARKABLE)
        for member in self.users:
            if member.hello is None:
                return Unsupported(
                    f"process {member.pid} runs without the hook", reason=Reason.NO_HOOK
                )
            if not member.hello.parkable:
                return Unsupported(
                    f"process {member.pid} cannot be parked: {member.hello.reason}",
                    reason=member.hello.code or Reason.NOT_PARKABLE,
                )
        return None

    def shares_memory(self) -> bool:
        """Return whether several processes share device memory, as ranks of NCCL do."""
        return len(self.members) > 1 and any(
            block.flags & SHARED for link in self.links for block in link.list_blocks()
        )

    def why_not_by_driver(self) -> str:
        """Return why mode ``driver`` cannot be used, or an empty text.

        The driver's checkpoint of shared memory may succeed and its restore then fail for good, so
        it must not even begin.
        """
        for link in self.links:
            if any(block.flags & SHARED for block in link.list_blocks()):
                return f"process {link.pid} shares device memory, which the driver cannot restore"
        return ""

    @property
    def makes_memory(self) -> bool:
        """Whether a hook is handed back memory that it makes (:attr:`Hello.makes_memory`)."""
        return any(link.hello().makes_memory for link in self.links)

    def require_complete(self, shared: Iterable[ExportedBlock]) -> None:
        """Raise :class:`Busy` if the group has grown: the new process is not stopped.

        The gates must be closed; ``shared`` is as for :meth:`require_no_sharers`.
        """
        users = {member.pid for member in self.users}
        for tree in self.trees:
            for pid in _below(tree.root.pid):
                if pid not in users and process.is_gpu_process(pid):
                    raise Busy(
                        f"process {pid} has begun to use a GPU",
                        hint="try again when the program has started all its processes",
                    )
        self.require_no_sharers(shared)

    def require_no_sharers(self, shared: Iterable[ExportedBlock]) -> None:
        """Raise :class:`Busy` if a process outside of the group has mapped its memory by now.

        It would keep the old memory when the group gets new memory. ``shared`` are the blocks that
        the group's programs share; the gates must be closed.

        Other hooks are not queried, since they may take long while the program is stopped. Instead
        open descriptors are compared: a hook keeps the descriptors of what its program imported.
        """
        ours: dict[str, list[ExportedBlock]] = {}
        for exported in distinct(shared):
            name = str(Path(f"/proc/self/fd/{exported.descriptor}").readlink())
            ours.setdefault(name, []).append(exported)
        for pid in self.other_hooks() if ours else ():
            theirs = _shared_with(pid, ours)
            if theirs and _may_use_gpu(pid):
                raise Busy(
                    f"process {theirs.pid} has begun to share its device memory with process {pid}",
                    hint="try again",
                )

    def other_hooks(self) -> Iterator[int]:
        """Return the processes outside of the group for which a hook seems to listen."""
        known = set(self.pids)
        return (pid for pid in self._listeners.pids() if pid not in known)

    def add_tree(self, tree: ProcessTree) -> None:
        """Add a tree, and connect to the hooks in it. Raises if the tree cannot be saved."""
        own_processes.require_none(tree)
        self.check(tree)  # before connecting, as connections are gone when CRIU dumps
        self.trees.append(tree)
        for pid in (p.pid for p in tree.living):
            if not process.uses_cuda(pid):
                continue
            StoppedProcesses(self.runtime_dir).require_going(pid)
            cuda_tools.require_none(pid)  # it may be stopped by the tool
            stopped_state.await_going(pid)  # frozen, it would not tell the driver either
            state = driver_checkpoint.state(pid)
            if state is None:
                continue  # CUDA is loaded but not initialised: a data-loader worker
            if state is driver_checkpoint.State.UNKNOWN:
                raise Unsupported(
                    f"the driver does not tell the state of process {pid}, and will not save it",
                    hint="see the driver's log (dmesg); the program goes on unharmed",
                    reason=Reason.DRIVER_STATE,
                )
            if state is not driver_checkpoint.State.RUNNING:
                raise Unsupported(
                    f"process {pid} is {state.name.lower()} by the driver's checkpoint",
                    hint="another tool holds it; run `cuda-checkpoint --toggle` or wait",
                    reason=Reason.DRIVER_STATE,
                )
            self.members.append(self._member(pid))

    def _member(self, pid: int) -> Member:
        try:
            link = HookLink(pid, self.runtime_dir).connect()
        except NoSuchProcess:
            if process.has_only_nvml(pid):
                return Member(pid, [], None, None, only_nvml=True)
            if not process.has_hook(pid):
                return Member(pid, process_gpus.visible_gpus(pid), None, None)
            link = self._woken(pid)
        try:
            # Do not continue without a hook that fails only now: the driver would lose what it ever
            # parked.
            hello = link.hello()
            if hello.state is HookState.PARKED:
                raise Busy(
                    f"the memory of process {pid} is parked, by a job that did not end",
                    hint=f"`phos recover {pid}` brings it back",
                )
            if hello.uses_unsupported:
                raise Unsupported(
                    f"process {pid} cannot be saved: {hello.reason}",
                    hint="neither phosd nor the driver can save that; start the program without it",
                    reason=hello.code or Reason.PROCESS_STATE,
                )
            return Member(pid, process_gpus.gpus_of(hello), link, hello)
        except BaseException:
            link.close()
            raise

    def _woken(self, pid: int) -> HookLink:
        """Wake a hook that does not listen; a phosd that was killed may have left it detached."""
        link = HookLink(pid, self.runtime_dir)
        try:
            link.reattach(TIMEOUT)
        except Timeout as error:
            raise Unsupported(
                f"the hook in process {pid} does not answer, and may have parked its memory"
                f" ({error.what})",
                hint=f"run `phos recover {pid}`; if that does not help, the program may have been"
                f" started with another PHOS_RUNTIME_DIR than {self.runtime_dir}",
                reason=Reason.HOOK_SILENT,
            ) from error
        return link

    def close(self) -> None:
        """Close the connections."""
        for link in self.links:
            link.close()


@contextlib.contextmanager
def explain_death(group: CheckpointGroup, operation: str, outcome: str = "") -> Iterator[None]:
    """Turn an error inside into :class:`NoSuchProcess` if the program's end has caused it."""
    try:
        yield
    except PhosError as error:
        ended = [p.pid for p in group.essential if not p.alive]
        if not ended:
            if isinstance(error, Busy):
                _add_the_dead(error, group)
            raise
        # Others may have ended as a consequence; the process that the error names is the first.
        first = next((pid for pid in ended if f"process {pid} " in error.what), ended[0])
        said = error.what.startswith(f"process {first} ended")
        death = NoSuchProcess(
            f"process {first} ended during its {operation}" + ("" if said else f" ({error.what})"),
            hint=f"{outcome}see the program's output for why it ended",
        )
        for note in getattr(error, "__notes__", ()):
            if not any(f"process {pid} ended" in note for pid in ended):
                death.add_note(note)
        raise death from error


def _add_the_dead(error: Busy, group: CheckpointGroup) -> None:
    """Name processes that have ended, and were no GPU processes any more when they were looked at:
    kernels of the others may wait for theirs for ever.
    """
    for pid in [p.pid for tree in group.trees for p in tree if not p.alive]:
        error.add_note(f"process {pid} has ended, and the others may wait for it")


def _may_use_gpu(pid: int) -> bool:
    """Whether a process uses a GPU under the hook, or does not let itself be looked at."""

    def look(pid: int) -> bool:
        return process.has_hook(pid) and process.is_gpu_process(pid)

    return dict(ABANDONABLE_THREADS.each([pid], look)).get(pid, True)


def _below(pid: int) -> Iterator[int]:
    """Yield the process and its descendants, as they are now."""
    yield pid
    try:
        children = procfs.children(pid)
    except (FileNotFoundError, ProcessLookupError):
        return  # it has ended
    for child in children:
        yield from _below(child)


def _shared_with(pid: int, ours: Mapping[str, Sequence[ExportedBlock]]) -> ExportedBlock | None:
    """Return the block of ``ours``, by descriptor name, that ``pid`` has a descriptor of."""
    folder = procfs.PROC / str(pid) / "fd"
    try:
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                for exported in ours.get(str(path.readlink()), ()):
                    if same_file(exported.descriptor, int(path.name), pid):
                        return exported
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        pass  # it has ended, or belongs to another user while phosd does not run as root
    return None
