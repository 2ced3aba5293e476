"""Define what takes part in a run of CRIU: a concern, what CRIU gets for it, and what it does when.

A dump and a restore have a list of such parts, and no other way to add anything to a run.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from phosd.engine.criu.run.tree_resources import TreeResources
from phosd.engine.image.cpu_manifest import CpuDetails


class CriuPart:
    """A concern around one run of CRIU, such as the tree's output, its TCP or its large memory.

    A part is a context: it is entered before CRIU starts, and undoes at the end what is not to
    stay. A class that inherits from this one overrides what it needs. All methods may raise; the
    run fails then.
    """

    @property
    def words(self) -> Sequence[str]:
        """Words of CRIU's command line; read, as the next two, when all parts are entered."""
        return ()

    @property
    def descriptors(self) -> Sequence[int]:
        """Descriptors that CRIU inherits."""
        return ()

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that are added to CRIU's environment."""
        return {}

    @property
    def plugged(self) -> bool:
        """Whether CRIU needs phosd's plugins for it."""
        return False

    def wrap(self, command: list[str]) -> list[str]:
        """Return CRIU's command, or one that runs it."""
        return command

    def started(self) -> None:
        """Go on after the start of CRIU, which has inherited everything."""

    def frozen(self, tree: TreeResources) -> None:
        """Act in a dump when CRIU has saved the tree, which stands still."""

    def record(self, details: CpuDetails) -> CpuDetails:
        """Return the details of a dumped tree with what this part has noted."""
        return details

    def watch(self) -> None:
        """Look in a restore, every now and then, whether it can still succeed."""

    def made(self) -> bool:
        """Act in a restore when CRIU has made all processes, and none runs. Return whether this is
        done: it is called again until it is, and so are the parts before it.
        """
        return True

    def held(self) -> None:
        """Act in a restore when all is restored, credentials included, and no task runs yet."""

    def complete(self) -> None:
        """Act when CRIU has ended well. Nobody but root can write to a dump any more."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None


class Parts(CriuPart):
    """The parts of a run, which act in their order, and leave in the opposite one."""

    def __init__(self, parts: Iterable[CriuPart]) -> None:
        self._parts = tuple(parts)
        self._stack = ExitStack()

    @property
    def words(self) -> Sequence[str]:
        return [word for part in self._parts for word in part.words]

    @property
    def descriptors(self) -> Sequence[int]:
        return [descriptor for part in self._parts for descriptor in part.descriptors]

    @property
    def environment(self) -> Mapping[str, str]:
        return {name: value for part in self._parts for name, value in part.environment.items()}

    @property
    def plugged(self) -> bool:
        return any(part.plugged for part in self._parts)

    def wrap(self, command: list[str]) -> list[str]:
        for part in self._parts:
            command = part.wrap(command)
        return command

    def started(self) -> None:
        for part in self._parts:
            part.started()

    def frozen(self, tree: TreeResources) -> None:
        for part in self._parts:
            part.frozen(tree)

    def record(self, details: CpuDetails) -> CpuDetails:
        for part in self._parts:
            details = part.record(details)
        return details

    def watch(self) -> None:
        for part in self._parts:
            part.watch()

    def made(self) -> bool:
        return all(part.made() for part in self._parts)

    def held(self) -> None:
        for part in self._parts:
            part.held()

    def complete(self) -> None:
        for part in self._parts:
            part.complete()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, traceback)
