"""List objects for ``org.phos.Manager1``: callers see their own, administrators see all."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from phosd.bus import Variant, variants
from phosd.errors import NoSuchImage, NoSuchJob, NoSuchProcess
from phosd.service.api.inventory import Inventory
from phosd.service.api.views import created, image_path, job_path
from phosd.service.dbus.caller import Caller
from phosd.service.dbus.caller_pids import CallerPids
from phosd.service.dbus.polkit import Rights
from phosd.service.dbus.query_pool import QueryPool
from phosd.service.dbus.spec import method
from phosd.service.history import queries
from phosd.service.history.database import Row
from phosd.service.history.history import History
from phosd.service.history.queries import EventOptions, HistoryOptions
from phosd.service.jobs.table import JobTable
from phosd.service.process_identity import identify

_Thing = TypeVar("_Thing")

ProcessRow = tuple[int, int, str, int, str, str, str]
ImageRow = tuple[str, int, int, int, int, str, str]
JobRow = tuple[int, str, str, str, str]
GpuRow = tuple[int, str, str, int, int, str]


class Listing:
    """Handlers of the manager that list things. Use it on the event loop only."""

    def __init__(
        self,
        inventory: Inventory,
        jobs: JobTable,
        history: History,
        rights: Rights,
        query_pool: QueryPool,
        pids: CallerPids,
    ) -> None:
        self._inventory = inventory
        self._jobs = jobs
        self._history = history
        self._rights = rights
        self._query_pool = query_pool
        self._pids = pids

    @method("GetProcess")
    async def get_process(self, caller: Caller, pid: int) -> str:
        """Return the object of a GPU process."""
        pid = await self._pids.known_here(caller, pid)
        if self._inventory.process(pid) is None:
            identify(pid)
            await self._inventory.refresh_processes()
        path = self._inventory.process(pid)
        if path is None:
            raise NoSuchProcess(
                f"process {pid} uses no GPU", hint="`phos ps` lists the GPU processes"
            )
        owner = self._inventory.processes[path].uid
        await self._rights.require_sight(caller, owner, f"process {pid}")
        return path

    @method("GetImage")
    async def get_image(self, caller: Caller, image: str) -> str:
        """Return the object of an image."""
        path = image_path(image)
        if path not in self._inventory.images:
            await self._inventory.refresh_images()
        view = self._inventory.images.get(path)
        if view is None:
            raise NoSuchImage(f"there is no image {image}", hint="`phos images` lists them")
        await self._rights.require_sight(caller, view.manifest.owner, f"image {image}")
        return path

    @method("GetJob")
    async def get_job(self, caller: Caller, number: int) -> str:
        """Return the object of a job that runs or ended lately."""
        job = self._jobs.numbered(number)
        if job is None:
            raise NoSuchJob(
                f"phosd knows no job {number}",
                hint="`phos jobs` lists those that it knows, and `phos history` those of before",
            )
        await self._rights.require_sight(caller, job.task.owner, f"job {number}")
        return job_path(job)

    @method("ListProcesses")
    async def list_processes(self, caller: Caller) -> list[ProcessRow]:
        """List the GPU processes that the caller may see: pid, user, command line, device bytes,
        hook state, state, path.
        """
        await self._inventory.refresh_processes()
        found = sorted(self._inventory.processes.items(), key=lambda item: item[1].pid)
        return [
            (
                p.pid,
                p.uid,
                " ".join(p.shown_command),
                p.device_bytes,
                p.hook_state,
                p.state,
                path,
            )
            for path, p in await self._seen(caller, found, lambda item: item[1].uid)
        ]

    @method("ListImages")
    async def list_images(self, caller: Caller) -> list[ImageRow]:
        """List the images that the caller may see: id, created, owner, total bytes, stored bytes,
        mode, path.
        """
        await self._inventory.refresh_images()
        found = sorted(self._inventory.images.items())
        return [
            (
                view.manifest.id,
                created(view.manifest),
                view.manifest.owner,
                view.total_bytes,
                view.stored_bytes,
                view.manifest.mode,
                path,
            )
            for path, view in await self._seen(caller, found, lambda i: i[1].manifest.owner)
        ]

    @method("ListJobs")
    async def list_jobs(self, caller: Caller) -> list[JobRow]:
        """List the jobs that the caller may see: number, operation, target, state, path."""
        return [
            (job.number, job.task.operation, job.task.target, str(job.state), job_path(job))
            for job in await self._seen(caller, self._jobs, lambda job: job.task.owner)
        ]

    @method("ListGPUs")
    async def list_gpus(self) -> list[GpuRow]:
        """List the GPUs: ordinal, UUID, name, memory, used memory, path."""
        await self._inventory.refresh_gpus()
        return [
            (gpu.ordinal, gpu.uuid, gpu.name, gpu.memory_total, gpu.memory_used or 0, path)
            for path, gpu in sorted(self._inventory.gpus.items(), key=lambda x: x[1].ordinal)
        ]

    @method("ListHistory")
    async def list_history(
        self, caller: Caller, options: HistoryOptions
    ) -> list[dict[str, Variant]]:
        """List the latest jobs that the caller may see, newest first, with their phases."""
        owner = None if await self._rights.inspects(caller) else caller.uid

        def read() -> list[dict[str, Variant]]:
            found = queries.jobs(self._history, options, owner)
            phases = queries.phases(self._history, found)
            return [
                _told(row) | {"phases": Variant("a(stdtb)", phases.get(row["id"], []))}
                for row in found
            ]

        return await self._query_pool.run(caller.uid, read)

    @method("ListEvents")
    async def list_events(self, caller: Caller, options: EventOptions) -> list[dict[str, Variant]]:
        """List the latest events that the caller may see, newest first."""
        owner = None if await self._rights.inspects(caller) else caller.uid
        found = await self._query_pool.run(
            caller.uid, queries.events, self._history, options, owner
        )
        return [_told(row) for row in found]

    async def _seen(
        self, caller: Caller, things: Iterable[_Thing], owner: Callable[[_Thing], int]
    ) -> list[_Thing]:
        """Return the things that the caller owns, or all for administrators."""
        found = list(things)
        own = [thing for thing in found if caller.may_touch(owner(thing))]
        if len(own) < len(found) and await self._rights.inspects(caller):
            return found
        return own


def _told(row: Row) -> dict[str, Variant]:
    """Return a row as an ``a{sv}``, without null values."""
    return variants({name: value for name, value in row.items() if value is not None})
