"""Send images to other machines, and take them from there."""

import asyncio
from collections.abc import Callable

from phosd.engine.image.called import Called
from phosd.engine.job.progress import Progress
from phosd.errors import NotAuthorized
from phosd.service.api.images import CheckRow, check_row
from phosd.service.api.views import job_path
from phosd.service.dbus.caller import Caller
from phosd.service.dbus.polkit import Action, Rights
from phosd.service.dbus.query_pool import QueryPool
from phosd.service.dbus.spec import method
from phosd.service.jobs.engine import Images
from phosd.service.jobs.options import ImportRequest, JobOptions
from phosd.service.jobs.table import Job, JobTable, Outcome, Task

_IMPORTED = "image"
"""The target of an import: which image that is, is known when it has come."""


class Transfers:
    """Handlers of the manager. ``write_down`` writes a job's journal record. Use it on the event
    loop only.

    phosd opens no file and no address for a user: the bytes go over a socket at which the caller
    listens (docs/reference/portable-format.md). A user has one export and one
    import at a time, and others wait: one that stands still must not keep the slots of jobs from
    others.
    """

    def __init__(
        self,
        engine: Images,
        jobs: JobTable,
        rights: Rights,
        query_pool: QueryPool,
        write_down: Callable[[Job], None],
    ) -> None:
        self._engine = engine
        self._jobs = jobs
        self._rights = rights
        self._query_pool = query_pool
        self._write_down = write_down

    @method("Export")
    async def export(self, caller: Caller, image: str, socket: str, options: JobOptions) -> str:
        """Send an image to the caller, who listens at an abstract socket."""
        manifest = await asyncio.to_thread(self._engine.image, image)
        acting = await self._rights.require(
            caller, Action.EXPORT, manifest.owner, f"image {image}", image=image
        )

        def work(progress: Progress) -> Outcome:
            self._engine.export_image(image, acting, caller.uid, socket, progress)
            return Outcome(image)

        # No claim on the image: it may be restored meanwhile, and what is read is not deleted.
        return self._begin("export", image, caller, work, options.token, manifest.called)

    @method("Import")
    async def import_(self, caller: Caller, socket: str, options: ImportRequest) -> str:
        """Store an image that the caller sends, who listens at an abstract socket; the job's
        result is its id here.
        """
        owner = await self._future_owner(caller, options)

        def work(progress: Progress) -> Outcome:
            made = self._engine.import_image(options, owner, caller.uid, socket, progress)
            return Outcome(made.id, made.mode, called=made.called)

        return self._begin("import", _IMPORTED, caller, work, options.token, Called())

    @method("TryImport")
    async def try_import(
        self, caller: Caller, socket: str, options: ImportRequest
    ) -> list[CheckRow]:
        """List what stands in the way of an import, and of a restore here, as TryRestore does; the
        caller sends the beginning of the image, and nothing is stored.
        """
        owner = await self._future_owner(caller, options)
        found = await self._query_pool.run(
            caller.uid,
            self._engine.try_import,
            options,
            owner,
            caller.uid,
            socket,
            self._query_pool.over,
        )
        return [check_row(each) for each in found]

    async def _future_owner(self, caller: Caller, options: ImportRequest) -> int:
        """Return to whom the image is going to belong. Raises :class:`NotAuthorized`."""
        owner = caller.uid if options.owner is None else options.owner
        await self._rights.require(
            caller, Action.IMPORT, owner, f"what is imported for uid {owner}"
        )
        if options.trust and caller.uid != 0:
            raise NotAuthorized(
                f"uid {caller.uid} may not import on trust what nobody has signed",
                hint="sign it (`--sign KEY` of `phos export`, `phos push`), or ask as root",
            )
        return owner

    def _begin(
        self,
        operation: str,
        target: str,
        caller: Caller,
        work: Callable[[Progress], Outcome],
        token: str,
        called: Called,
    ) -> str:
        claims = frozenset((f"{operation}s of uid {caller.uid}",))
        task = Task(
            *(operation, target, caller.uid, claims, work), token=token, queue=True, called=called
        )
        return job_path(self._jobs.submit(task, self._write_down))
