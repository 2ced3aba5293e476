"""Let a suspended program run again whose memory is loaded: the last steps of a resumption."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from phosd.engine.faults import Point, point
from phosd.engine.hook_client.link import HookLink, HookState, reach
from phosd.engine.image.manifest import Manifest
from phosd.engine.job.affected import AffectedSet
from phosd.engine.job.progress import Progress
from phosd.engine.node.gpus import GpuInfo
from phosd.engine.node.loaded_memory import LoadedMemory
from phosd.engine.node.node import Node
from phosd.engine.node.suspended import Suspended
from phosd.engine.operations.coming_back import affected_by, back_from_driver, hooked
from phosd.engine.operations.pinned_shelf import forget_removed
from phosd.engine.operations.places_back import now_on
from phosd.errors import Internal, Reason, Unsupported


@dataclass
class Return:
    """A suspended program on its way back, whose ``manifest`` has the pids of now. ``thaw`` lets
    its processes run. What is entered in ``job`` ends before what is in ``after``.

    ``further``: the driver has brought it back before, or never had it. ``links`` are to its hooks,
    if they had to be asked already, and are closed by ``connected``.
    """

    node: Node
    suspended: Suspended
    manifest: Manifest
    thaw: Callable[[], None]
    job: ExitStack
    after: ExitStack
    further: bool
    links: list[HookLink] = field(default_factory=list)
    connected: ExitStack = field(default_factory=ExitStack)
    _affected: AffectedSet = field(init=False)

    def __post_init__(self) -> None:
        self.job.enter_context(self.connected)

    def announce(self, progress: Progress, moves: Mapping[int, int]) -> None:
        """Write down what the job is about to touch."""
        self._affected = affected_by(self.suspended, hooked(self.manifest), moves)
        progress.about_to_touch(self._affected)

    def connect(self) -> list[HookLink]:
        """Connect to the hooks of the processes whose memory was parked, until the job ends."""
        self.links = self.links or [
            self.connected.enter_context(reach(process.pid, self.node.config.runtime_dir))
            for process in self.manifest.processes
            if process.gpu and process.parked and process.hooked
        ]
        return self.links

    def run(
        self,
        memory: LoadedMemory,
        release: Callable[[], None],
        moves: dict[int, int],
        gpus: Sequence[GpuInfo],
        progress: Progress,
    ) -> dict[int, int]:
        """Give it its ``memory``, and let it run. ``release`` frees the room that is reserved for
        the driver; ``gpus`` are all that are here. Returns the GPU that it has now, by each that it
        had.
        """
        node, suspended = self.node, self.suspended
        progress.check()
        untouched = self.job.enter_context(ExitStack())
        # A failed resume is repeated from here, and needs the room.
        untouched.callback(memory.unguard)
        memory.guard()
        progress.phase("control")
        point(Point.RESUME_CONTROL)
        with node.gpu_locks.locked(self._affected.gpus, progress):
            release()
            self.thaw()  # from here on the driver and the hooks need its threads
            if not self.further:
                progress.about_to_touch(replace(self._affected, moves=moves))
                back_from_driver(node.stopped, suspended, moves, gpus)
        progress.phase("map")
        point(Point.RESUME_MAP)
        links = self.connect()
        self.job.push(self.connected.pop_all())  # they close before memory is freed
        parked = _all_parked(self.manifest, links)
        # From here on hooks have some of the memory, and a repeated resume continues with it.
        untouched.pop_all()
        _give_memory(parked, memory)
        node.suspended.remove(suspended)  # from here on it counts as running, even if phosd dies
        self.forget_stored()
        self.job.callback(memory.unguard)
        if not self.further or parked == links:  # else it is unknown which a hook had already
            memory.keep(links)
        _open(links)
        progress.phase("release")
        return now_on(suspended, moves)

    def forget_stored(self) -> None:
        """Delete the stored data after the job, whatever becomes of it: the program runs."""
        self.after.callback(_delete, self.node, self.suspended)


def _delete(node: Node, resumed: Suspended) -> None:
    node.suspend_store.shelf_of(resumed).delete(resumed.image)
    forget_removed(node, resumed)


def _open(links: Iterable[HookLink]) -> None:
    point(Point.RESUME_OPEN)
    for link in links:
        link.open_gate()


def _give_memory(links: Sequence[HookLink], memory: LoadedMemory) -> None:
    """Ask the hooks to map the memory. Their gates stay closed while they are connected."""
    for link in links:
        memory.hand_back(link)
        if (state := link.hello().state) is HookState.PARKED:
            raise Internal(
                f"the memory of process {link.pid} is still {state.name.lower()}",
                hint=f"`phos resume {link.pid}` again, and report this",
            )


def _all_parked(manifest: Manifest, links: Sequence[HookLink]) -> list[HookLink]:
    """Return the hooks whose memory is parked. Raises :class:`Unsupported` unless processes that
    share memory are all parked, or none of them is.
    """
    found = [link for link in links if link.hello().state is HookState.PARKED]
    _require_together(manifest, {link.pid for link in found})
    return found


def _require_together(manifest: Manifest, parked: Collection[int]) -> None:
    for block in manifest.blocks:
        if block.alias is not None:
            pids = [manifest.processes[n].pid for n in (block.process, block.alias[0])]
            waiting = [pid for pid in pids if pid in parked]
            if len(waiting) == 1:
                raise Unsupported(
                    f"process {waiting[0]} is parked, but the memory that it shares was given"
                    " back to other processes already, and phosd no longer holds it",
                    hint=f"end process {waiting[0]}, and restore an image of the program",
                    reason=Reason.SHARED_MEMORY,
                )
