"""Create new ends for a tree's output, for CRIU and the restore shim to inherit."""

import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from phosd.engine.criu import restore_shim
from phosd.engine.criu.program import Owner
from phosd.engine.image.cpu_manifest import CpuDetails, EndpointKind
from phosd.engine.program.namespace_maker import NamespaceMaker


class Outlets:
    """Pairs of ends that replace those which led out of the tree: one for CRIU, one for the shim.

    ``inherited`` are the descriptors that the command must inherit; ``words`` tell CRIU about them.
    """

    def __init__(
        self,
        root: int,
        details: CpuDetails,
        owner: Owner,
        end: Path | None,
        namespace: NamespaceMaker | None = None,
    ) -> None:
        """``end``: the file that is to tell how process ``root`` ends, which is restored in the
        ``namespace``, if one is to be made.
        """
        self.words: list[str] = []
        self._owner = owner
        self._program: list[int] = []
        self._keeper: list[int] = []
        self._terminal: int | None = None
        self._root, self._end = root, end
        self._namespace = namespace
        self._parent = bool(details.tied_to_parent or end or namespace)
        if self._parent:
            self.words.append("--restore-sibling")
        try:
            self._make_all(details, owner)
        except BaseException:
            self._close()
            raise

    def _make_all(self, details: CpuDetails, owner: Owner) -> None:
        for endpoint in details.endpoints:
            if endpoint.kind is EndpointKind.TERMINAL and details.shell_job:
                if self._terminal is None:
                    self._terminal = self._make(endpoint.kind, owner)
            else:
                inherited = self._make(endpoint.kind, owner)
                self.words += ["--inherit-fd", f"fd[{inherited}]:{endpoint.key}"]

    def _make(self, kind: EndpointKind, owner: Owner) -> int:
        """Create a pair, record both ends, and return the program's."""
        match kind:
            case EndpointKind.PIPE:
                ours, theirs = os.pipe()
                os.fchown(theirs, owner.uid, -1)  # CRIU opens it anew, with the owner's rights
            case EndpointKind.TERMINAL:
                ours, theirs = os.openpty()
                os.fchown(theirs, owner.uid, -1)
            case EndpointKind.SOCKET:
                ours, theirs = (end.detach() for end in socket.socketpair())
        self._keeper.append(ours)
        self._program.append(theirs)
        return theirs

    @property
    def inherited(self) -> tuple[int, ...]:
        made = self._namespace.descriptors if self._namespace is not None else ()
        return (*self._program, *self._keeper, *made)

    def wrap(self, command: Sequence[str], output: Path | None) -> list[str]:
        """Return ``command``, run by the shim if it must hold anything and read into ``output``."""
        if not self._keeper and not self._parent:
            return list(command)
        return restore_shim.command(
            command,
            user=(self._owner.uid, self._owner.gid, self._owner.groups),
            inputs=self._keeper,
            output=output if self._keeper else None,
            terminal=self._terminal,
            parent=self._parent,
            root=self._root,
            end=self._end,
            namespace=self._namespace.orders if self._namespace is not None else None,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        for descriptor in (*self._program, *self._keeper):
            with contextlib.suppress(OSError):
                os.close(descriptor)
