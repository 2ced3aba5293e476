"""Take the pids that callers name processes by, which may be in one of phosd's pid namespaces."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from phosd.bus import CallError
from phosd.engine.system import pid_namespaces
from phosd.errors import NoSuchProcess
from phosd.service.dbus.caller import Caller
from phosd.service.dbus.query_pool import QueryPool


class CallerPids:
    """Use it on the event loop only. ``pid_of`` returns the pid of a connection."""

    def __init__(
        self, runtime_dir: Path, pid_of: Callable[[str], Awaitable[int]], query_pool: QueryPool
    ) -> None:
        self._runtime_dir = runtime_dir
        self._pid_of = pid_of
        self._query_pool = query_pool

    async def known_here(self, caller: Caller, pid: int) -> int:
        """Return the pid by which phosd knows the process that the caller knows by ``pid``.

        A pid namespace that phosd has not made is a container's, whose programs are told of no
        other pids than phosd's. Raises :class:`NoSuchProcess` if there is no such process in the
        caller's.
        """
        with suppress(CallError, OSError):  # the caller has left the bus, or ended
            calling = await self._pid_of(caller.name)
            if pid_namespaces.is_nested(calling):
                return await self._query_pool.run(caller.uid, self._outside, calling, pid)
        return pid

    def _outside(self, calling: int, pid: int) -> int:
        made = pid_namespaces.made_for(self._runtime_dir, calling)
        if made is None:
            return pid
        try:
            return made.members()[pid]
        except KeyError:
            raise NoSuchProcess(
                f"there is no process {pid} in the pid namespace of the caller",
                hint="`phos ps` lists the pids outside; those that processes have there count here",
            ) from None
