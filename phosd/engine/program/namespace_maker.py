"""Make a pid namespace for a program: phosd's side of :mod:`phosd.engine.program.keeper`."""

import contextlib
import json
import os
import secrets
import select
import signal
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from phosd.engine.hook_client.places import hooks_folder, namespaces_folder
from phosd.engine.program.name import CLONES_KEEPER
from phosd.engine.system import pid_namespaces, procfs
from phosd.engine.system.freezer import thaw_killed
from phosd.engine.system.pid_namespaces import PidNamespace
from phosd.errors import Internal

_TIMEOUT_MS = 30_000
_ENDING_MS = 10_000


class NamespaceMaker:
    """A namespace that a command is about to make, which gets the :attr:`orders`.

    The command must inherit the ``descriptors``. Call :meth:`started` when it runs. Leaving the
    context before :meth:`made` keeps the command from making one.
    """

    def __init__(
        self,
        runtime_dir: Path,
        *,
        image: str = "",
        ids: Collection[int] = (),
        apart: bool = False,
        clone: bool = False,
    ) -> None:
        """``ids``: of the processes and threads that are to be restored. ``apart``: it comes with a
        network and IPC of its own, and is for a rehearsal. ``clone``: it is for a clone.
        """
        self._apart = apart
        self._clone = clone
        self._folder = pid_namespaces.folder(runtime_dir)
        self._hooks = hooks_folder(runtime_dir)
        self._places = namespaces_folder(runtime_dir)
        self._image = image
        self._ids = sorted(ids)
        self._told, self._tell = os.pipe()
        self._wait, self._go = os.pipe()
        self.name = secrets.token_hex(8)
        """The name of its record, and of what works there."""
        self.namespace: PidNamespace | None = None

    @property
    def orders(self) -> Mapping[str, Any]:
        """What the command must be told, as JSON."""
        return {
            "told": self._tell,
            "go": self._wait,
            "hooks": str(self._hooks),
            "places": str(self._places),
            "ids": self._ids,
            "apart": self._apart,
            "comm": CLONES_KEEPER if self._clone else "",
        }

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self._tell, self._wait)

    def started(self) -> None:
        """Close the command's ends here, once it has them: its end is noticed then."""
        for end in self.descriptors:
            os.close(end)
        self._tell = self._wait = -1

    def fileno(self) -> int:
        """Return what is readable when the command has made the namespace, or has ended."""
        return self._told

    def made(self, require: Callable[[int], None] = lambda _keeper: None) -> PidNamespace:
        """Record the namespace, and let its keeper begin, unless ``require`` raises for that.

        Raises :class:`Internal`.
        """
        if self.namespace is not None:
            return self.namespace
        poller = select.poll()
        poller.register(self._told, select.POLLIN)
        text = os.read(self._told, 16) if poller.poll(_TIMEOUT_MS) else b""
        keeper = procfs.process_id(int(text)) if text else None
        if keeper is None:
            raise Internal(
                "no pid namespace could be made",
                hint="phosd needs CAP_SYS_ADMIN outside of its sandbox; see its log",
            )
        require(keeper.pid)
        record = self._folder / f"{self.name}.json"
        written = record.with_suffix(".new")
        written.write_text(
            json.dumps({"keeper": [*keeper], "image": self._image, "apart": self._apart})
        )
        written.rename(record)
        self.namespace = PidNamespace(keeper, self._image, self._apart)
        os.write(self._go, str(keeper.pid).encode())
        return self.namespace

    def end(self) -> None:
        """Kill all that is in the namespace, and wait until the keeper is gone."""
        if self.namespace is not None:
            end(self.namespace)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for end in (self._told, self._tell, self._wait, self._go):
            if end >= 0:
                os.close(end)


def end(namespace: PidNamespace) -> None:
    """Kill all that is in a namespace, by its keeper, and wait until that is gone."""
    with contextlib.ExitStack() as stack:
        try:
            held = os.pidfd_open(namespace.keeper.pid)
        except ProcessLookupError:
            return
        stack.callback(os.close, held)
        if not namespace.lives:
            return
        members = namespace.members().values()
        with contextlib.suppress(ProcessLookupError):  # it ends with the last process in it
            signal.pidfd_send_signal(held, signal.SIGKILL)
        thaw_killed(members)
        poller = select.poll()
        poller.register(held, select.POLLIN)
        poller.poll(_ENDING_MS)
