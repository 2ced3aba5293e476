"""Follow the dump that a container's runtime makes, with a CRIU of its own, of a program that runs
on afterwards.

That CRIU's plugin (``phosd/runtime_plugin``) says when it holds the program, and when it is about
to let it go.
"""

import threading
import time
from collections.abc import Callable, Sequence

from phosd.engine.criu.dump.dumps import DriverWork
from phosd.engine.criu.dump.runtime_devices import RuntimeDevices, places
from phosd.engine.criu.run.memory_handles import MemoryHandle
from phosd.engine.criu.run.tree_resources import Place, TreeResources
from phosd.engine.job.cancellation import Cancellation
from phosd.engine.program.tree import ProcessTree, scan
from phosd.engine.system import procfs, stopped_state
from phosd.errors import Busy, Cancelled, Reason, Unsupported

_LOOK_SECONDS = 0.1
_RELEASE_SECONDS = 0.002
"""Between two looks whether CRIU has let go: the program stands still for as long."""


class RuntimeDump:
    """The part of CRIU (:class:`~phosd.engine.criu.dump.dumps.CpuSide`) in a checkpoint.

    ``stands`` is called when the program stands still, so that the runtime's CRIU may hold it.
    :meth:`held` and :meth:`over` are called by another thread than the checkpoint's.
    """

    def __init__(self, stands: Callable[[], object]) -> None:
        self._stands = stands
        self._on_hold: Callable[[], object] = lambda: None
        self._trees: list[ProcessTree] = []
        self._devices: list[RuntimeDevices] = []
        self._checkpointed: frozenset[int] = frozenset()
        self._known: frozenset[Place] = frozenset()
        self._held = False
        self._over = threading.Event()
        self._given_up: Cancelled | None = None

    @property
    def trees(self) -> list[ProcessTree]:
        return self._trees

    @property
    def left_out(self) -> tuple[str, ...]:
        return ()  # a runtime's images have no files

    @property
    def inheritors(self) -> frozenset[int]:
        return frozenset().union(*(each.users for each in self._devices))

    def on_hold(self, action: Callable[[], object], checkpointed: frozenset[int]) -> None:
        """Call ``action`` when CRIU holds the program, and has written nothing of it yet.
        The driver has ``checkpointed`` these processes by then.
        """
        self._on_hold = action
        self._checkpointed = checkpointed

    def prepare(self, trees: list[ProcessTree]) -> None:
        self._trees = list(trees)
        self._known = frozenset[Place]().union(*map(places, trees))

    def held(self) -> str:
        """Look at the program, which CRIU holds. Returns the kinds of devices that CRIU is to note.
        An error is to end CRIU's dump. Raises :class:`Cancelled` if nobody waits for it any more,
        and what :meth:`on_hold` and :meth:`RuntimeDevices.of` raise.
        """
        if self._given_up is not None:
            raise self._given_up
        self._trees = [scan(tree.root.pid) for tree in self._trees]
        self._devices = [
            RuntimeDevices.of(tree, self._checkpointed, self._known) for tree in self._trees
        ]
        self._on_hold()
        self._held = True
        return self._devices[0].kinds

    def take_devices_out(self, folder: int) -> None:
        """Take the driver's devices out of what CRIU has written."""
        for each in self._devices:
            each.take_out(folder)

    def over(self, *, complete: bool) -> None:
        """Say that CRIU is about to let the program go: it has dumped it, or ``complete`` is
        false. Only the first time counts.
        """
        if not self._over.is_set():
            self._held = self._held and complete
            self._over.set()

    def dump(self, cancellation: Cancellation, handles: Sequence[MemoryHandle] = ()) -> None:
        """Wait until CRIU has dumped the program and let it go. Raises :class:`Busy` if it has only
        let it go, and :class:`Unsupported` if it has one of ``handles`` open, which a runtime's
        CRIU could not restore. Cancelled, this still waits: nobody answers whom CRIU holds.
        """
        for tree in self._trees:
            for each in TreeResources.of(scan(tree.root.pid), handles).of_memory:
                raise Unsupported(
                    f"{procfs.describe(each.pid)} keeps device memory open that it has exported "
                    f"(descriptor {each.number})",
                    hint="the program goes on; close it once other processes have imported it",
                    reason=Reason.SHARED_MEMORY,
                )
        self._stands()
        while not self._over.wait(_LOOK_SECONDS):
            try:
                cancellation.check()
            except Cancelled as error:
                self._given_up = error
        pids = {process.pid for tree in self._trees for process in tree.living}
        while pids := {pid for pid in pids if is_held(pid)}:
            time.sleep(_RELEASE_SECONDS)
        if self._given_up is not None:
            raise self._given_up
        if not self._held:
            raise Busy(
                "the runtime's CRIU did not save the program, which runs on",
                hint="the end of its log (dump.log) says why",
            )

    def dump_around(self, driver: DriverWork, cancellation: Cancellation) -> None:
        """Raise :class:`Unsupported`."""
        raise Unsupported(
            "a runtime's CRIU has the driver do nothing",
            hint="start the container with phosd's hook (`phos setup-container-runtime --help`)",
            reason=Reason.NO_HOOK,
        )


def is_held(pid: int) -> bool:
    """Return whether CRIU, or the runtime, has not let a process go."""
    return procfs.tracer(pid) != 0 or stopped_state.is_still(pid)
