"""The demonstration's view of phosd: plain D-Bus calls, as any client would make them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phosd import bus

_MANAGER = "org.phos.Manager1"
_PROPERTIES = "org.freedesktop.DBus.Properties"
_POLL = 0.05


class JobFailedError(Exception):
    """A job of phosd did not succeed; the text is phosd's."""


@dataclass(frozen=True)
class Phase:
    """One phase of a job; ``stopped`` when the program stood still in it."""

    name: str
    stopped: bool
    seconds: float
    bytes_done: int


@dataclass(frozen=True)
class JobResult:
    """What a job gave: an image id or a pid, how it went, and how long the program stood still."""

    result: str
    mode: str
    stop_seconds: float
    phases: tuple[Phase, ...]


class Client:
    """Calls ``org.phos`` on a bus. Raises :class:`phosd.bus.CallError` for refused calls."""

    def __init__(self, connection: bus.Connection) -> None:
        self._connection = connection

    async def processes(self) -> list[dict[str, Any]]:
        """The properties of every GPU process that phosd knows."""
        (listed,) = await self._connection.call(bus.ROOT, _MANAGER, "ListProcesses")
        return [await self._properties(row[-1], "org.phos.Process1") for row in listed]

    async def gpu_names(self) -> list[str]:
        """The names of the GPUs of this machine."""
        (listed,) = await self._connection.call(bus.ROOT, _MANAGER, "ListGPUs")
        gpus = [await self._properties(row[-1], "org.phos.Gpu1") for row in listed]
        return [gpu["Name"] for gpu in gpus]

    async def checkpoint(self, pid: int, watch: Callable[[Phase], None]) -> JobResult:
        """``Checkpoint``, and wait for its job; ``watch`` sees every phase as it ends."""
        return await self._job("Checkpoint", "ua{sv}", pid, watch)

    async def restore(self, image: str, watch: Callable[[Phase], None]) -> JobResult:
        """``Restore``, and wait for its job."""
        return await self._job("Restore", "sa{sv}", image, watch)

    async def image(self, image: str) -> dict[str, Any]:
        """The properties of an image."""
        return await self._properties(bus.path_of("image", image), "org.phos.Image1")

    async def _job(
        self, method: str, signature: str, target: int | str, watch: Callable[[Phase], None]
    ) -> JobResult:
        (path,) = await self._connection.call(bus.ROOT, _MANAGER, method, signature, target, {})
        told = 0
        while True:
            job = await self._properties(path, "org.phos.Job1")
            running = job["State"] == "running"
            phases = tuple(Phase(*fields[:4]) for fields in job["Phases"])
            ended = phases[:-1] if running else phases
            for phase in ended[told:]:
                watch(phase)
            told = len(ended)
            if not running:
                break
            await asyncio.sleep(_POLL)
        if job["State"] != "done":
            raise JobFailedError(f"{method} {job['State']}: {job['Error']}: {job['Message']}")
        return JobResult(job["Result"], job["Mode"], job["StopSeconds"], phases)

    async def _properties(self, path: str, interface: str) -> dict[str, Any]:
        (values,) = await self._connection.call(path, _PROPERTIES, "GetAll", "s", interface)
        return dict(values)
