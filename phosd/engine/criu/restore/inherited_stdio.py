"""Create new ends for a tree's output, for CRIU and the restore shim to inherit."""

import contextlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from phosd import unix_sockets
from phosd.engine.criu.restore import restore_shim
from phosd.engine.criu.restore.ending import Ending
from phosd.engine.criu.run.invocation import Owner
from phosd.engine.criu.run.part import CriuPart
from phosd.engine.image.cpu_manifest import CpuDetails, EndpointKind
from phosd.engine.program.namespace_maker import NamespaceMaker
from phosd.engine.system.procfs import ProcessId


class RestoredStdio(CriuPart):
    """Pairs of ends that replace those which led out of the tree: of each, CRIU gets one, and the
    restore shim the other.
    """

    def __init__(
        self,
        root: int,
        details: CpuDetails,
        owner: Owner,
        end: Path | None,
        ending: Ending,
        namespace: NamespaceMaker | None = None,
        output: Path | None = None,
        follower: ProcessId | None = None,
    ) -> None:
        """``end``: the file that is to tell how process ``root`` ends, as ``ending`` is told if
        there is a shim; it is restored in the ``namespace``, if one is to be made. ``output``: the
        file for what the shim reads. ``follower``: the process that waits for that end.
        """
        self._words = ["--shell-job"] if details.shell_job else []
        self._owner = owner
        self._program: list[int] = []
        self._keeper: list[int] = []
        self._terminal: int | None = None
        self._root, self._end, self._details = root, end, details
        self._namespace = namespace
        self._ending = ending
        self._output = output
        self._follower = follower
        self._parent = bool(details.tied_to_parent or end or namespace)
        if self._parent:
            self._words.append("--restore-sibling")

    def __enter__(self) -> Self:
        try:
            self._make_all()
        except BaseException:
            self._close()
            raise
        return self

    def _make_all(self) -> None:
        for endpoint in self._details.endpoints:
            if endpoint.kind is EndpointKind.TERMINAL and self._details.shell_job:
                if self._terminal is None:
                    self._terminal = self._make(endpoint.kind)
            else:
                inherited = self._make(endpoint.kind)
                self._words += ["--inherit-fd", f"fd[{inherited}]:{endpoint.key}"]

    def _make(self, kind: EndpointKind) -> int:
        """Create a pair, record both ends, and return the program's."""
        match kind:
            case EndpointKind.PIPE:
                ours, theirs = os.pipe()
                # CRIU opens it anew, with the owner's rights.
                os.fchown(theirs, self._owner.uid, -1)
            case EndpointKind.TERMINAL:
                ours, theirs = os.openpty()
                os.fchown(theirs, self._owner.uid, -1)
            case EndpointKind.SOCKET:
                ours, theirs = (end.detach() for end in unix_sockets.pair())
        self._keeper.append(ours)
        self._program.append(theirs)
        return theirs

    @property
    def words(self) -> Sequence[str]:
        return self._words

    @property
    def descriptors(self) -> Sequence[int]:
        made = self._namespace.descriptors if self._namespace is not None else ()
        told = (self._ending.tell,) if self._parent else ()
        return (*self._program, *self._keeper, *made, *told)

    def wrap(self, command: list[str]) -> list[str]:
        """Return ``command``, run by the shim if that must hold anything."""
        if not self._keeper and not self._parent:
            return command
        return restore_shim.command(
            command,
            user=(self._owner.uid, self._owner.gid, self._owner.groups),
            inputs=self._keeper,
            output=self._output if self._keeper else None,
            terminal=self._terminal,
            parent=self._parent,
            root=self._root,
            end=self._end,
            ended=self._ending.tell if self._parent else None,
            follower=self._follower,
            namespace=self._namespace.orders if self._namespace is not None else None,
        )

    def started(self) -> None:
        self._ending.started()
        if self._namespace is not None:
            self._namespace.started()
            self._namespace.made()

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        for descriptor in (*self._program, *self._keeper):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    unix_sockets.let_go(descriptor)
                else:
                    os.close(descriptor)
