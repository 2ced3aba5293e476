"""Make pid namespaces for programs that users are about to start."""

from collections.abc import Awaitable, Callable
from typing import Annotated

import msgspec

from phosd.service.dbus.caller import Caller
from phosd.service.dbus.query_pool import QueryPool
from phosd.service.dbus.spec import Options, method
from phosd.service.jobs.engine import Programs


class NamespaceOptions(Options, frozen=True):
    """``end``: a file that tells how the program has ended, once it has: a line, ``exit CODE`` or
    ``signal NUMBER``. The program's user writes it.
    """

    end: Annotated[str, msgspec.Meta(max_length=4096)] = ""


class Namespaces:
    """Handlers of the manager. Use it on the event loop only. ``pid_of`` returns the pid of a
    connection.
    """

    def __init__(
        self, engine: Programs, pid_of: Callable[[str], Awaitable[int]], query_pool: QueryPool
    ) -> None:
        self._engine = engine
        self._pid_of = pid_of
        self._query_pool = query_pool

    @method("MakePidNamespace")
    async def make_pid_namespace(
        self, caller: Caller, socket: str, options: NamespaceOptions
    ) -> int:
        """Make a pid namespace for one of the caller's programs, with the caller's limits. Its
        first process, whose pid is returned, connects to an abstract socket and is told there what
        to start.
        """
        pid = await self._pid_of(caller.name)
        return await self._query_pool.run(
            caller.uid, self._engine.make_pid_namespace, pid, caller.uid, socket, options.end
        )
