"""Start jobs that make, restore, verify and delete images."""

import asyncio
from collections.abc import Callable

import msgspec

from phosd.engine.image.called import Called
from phosd.engine.image.manifest import Manifest
from phosd.engine.job.checks import Finding
from phosd.engine.job.progress import Progress
from phosd.errors import Busy, ImageCorrupt, in_one_text
from phosd.service.api.destination import named_in, require_destination
from phosd.service.api.inventory import Inventory
from phosd.service.api.views import job_path
from phosd.service.dbus.caller import Caller
from phosd.service.dbus.caller_pids import CallerPids
from phosd.service.dbus.polkit import Action, Rights
from phosd.service.dbus.query_pool import QueryPool
from phosd.service.dbus.spec import method
from phosd.service.history.history import History
from phosd.service.jobs.engine import Engine
from phosd.service.jobs.options import CheckpointRequest, RestoreRequest, VerifyRequest
from phosd.service.jobs.table import Job, JobTable, Outcome, Task
from phosd.service.process_identity import Target, identify, key_of
from phosd.service.tasks.checkpoints import Checkpoints, require_possible
from phosd.service.tasks.periodic import Periodic
from phosd.service.tasks.pools import Pools
from phosd.service.tasks.verifications import Verifications

CheckRow = tuple[str, str, str]
NO_JOB = "/"
"""Path returned instead of a job's when a call ends a schedule."""


class Images:
    """Handlers of the manager. ``write_down`` writes a job's journal record. Use it on the event
    loop only.
    """

    def __init__(
        self,
        engine: Engine,
        history: History,
        jobs: JobTable,
        rights: Rights,
        checkpoints: Checkpoints,
        verifications: Verifications,
        periodic: Periodic,
        query_pool: QueryPool,
        pids: CallerPids,
        inventory: Inventory,
        pools: Pools,
        write_down: Callable[[Job], None],
    ) -> None:
        self._engine = engine
        self._history = history
        self._jobs = jobs
        self._rights = rights
        self._checkpoints = checkpoints
        self._verifications = verifications
        self._periodic = periodic
        self._query_pool = query_pool
        self._pids = pids
        self._inventory = inventory
        self._pools = pools
        self._write_down = write_down

    @method("Checkpoint")
    async def checkpoint(self, caller: Caller, pid: int, options: CheckpointRequest) -> str:
        """Save a process while it runs on (then=run), or ends when its image is complete (end), or
        stands still until Continue (hold).
        """
        require_possible(options)
        pid = await self._pids.known_here(caller, pid)
        target = identify(pid)
        acting = await self._rights.require(
            caller, Action.CHECKPOINT, target.uid, f"process {pid}", pid=str(pid)
        )
        if options.stands:
            await self._may_stop(caller, target)
        if options.parent not in ("", "auto"):
            await self._image_for(caller, Action.CHECKPOINT, options.parent)
        if options.every == 0:
            self._periodic.end(target, caller.uid)
            return NO_JOB
        begin = self._periodic.begin if options.every else self._checkpoints.start
        return job_path(begin(target, options, caller.uid, acting=acting))

    @method("Continue")
    async def go_on(self, caller: Caller, pid: int) -> None:
        """Resume a program that a checkpoint holds, as its image is complete."""
        pid = await self._pids.known_here(caller, pid)
        target = identify(pid)
        await self._may_stop(caller, target)
        self._checkpoints.go_on(target)

    @method("Restore")
    async def restore(self, caller: Caller, image: str, options: RestoreRequest) -> str:
        """Bring an image back to life."""
        if options.gpu:
            require_destination(options.gpu)
        manifest, acting = await self._image_for(caller, Action.RESTORE, image)
        options = await self._with_pids_of_ours(caller, options)
        here = self._inventory.gpus.values()
        saved = {gpu.uuid for gpu in manifest.gpus}
        gpus = named_in(options.gpu, here) or {gpu.ordinal for gpu in here if gpu.uuid in saved}

        def work(progress: Progress) -> Outcome:
            pid = self._engine.restore(image, options, acting, progress)
            if not options.clone:
                self._tell_schedule(image, pid, progress)
            return Outcome(str(pid), "eager", process=key_of(pid), made_of=image)

        claims, token = _claims(image), options.token
        task = Task(
            "restore",
            image,
            caller.uid,
            claims,
            work,
            destination=options.gpu,
            token=token,
            gpus=frozenset(gpus),
            called=manifest.called,
        )
        return job_path(self._jobs.submit(task, self._write_down))

    @method("TryCheckpoint")
    async def try_checkpoint(
        self, caller: Caller, pid: int, options: CheckpointRequest
    ) -> list[CheckRow]:
        """List what a checkpoint checks before it begins: what, the error that stands in its way
        (empty: none), and that error's message or what was found; nothing is stopped or saved.
        """
        pid = await self._pids.known_here(caller, pid)
        target = identify(pid)
        acting = await self._rights.require(
            caller, Action.CHECKPOINT, target.uid, f"process {pid}", pid=str(pid)
        )
        if options.parent == "auto":
            options = msgspec.structs.replace(options, parent="")
        found = await self._query_pool.run(
            caller.uid, self._engine.try_checkpoint, pid, options, acting
        )
        return [check_row(each) for each in found]

    @method("TryRestore")
    async def try_restore(
        self, caller: Caller, image: str, options: RestoreRequest
    ) -> list[CheckRow]:
        """List what a restore checks before it begins, as TryCheckpoint does."""
        if options.gpu:
            require_destination(options.gpu)
        _, acting = await self._image_for(caller, Action.RESTORE, image)
        options = await self._with_pids_of_ours(caller, options)
        found = await self._query_pool.run(
            caller.uid, self._engine.try_restore, image, options, acting
        )
        return [check_row(each) for each in found]

    def _tell_schedule(self, image: str, pid: int, progress: Progress) -> None:
        """Note that the schedule that has made the image ended with the program's first process."""
        schedule = self._history.schedule_of(image)
        if schedule is not None and schedule.request.every and not schedule.ended:
            every = f"{schedule.request.every:g}s"
            progress.note(
                f"its checkpoints every {every} have ended with the process that was saved; "
                f"`phos checkpoint {pid} --every {every} --keep {schedule.keep}` begins them again"
            )

    async def _with_pids_of_ours(self, caller: Caller, options: RestoreRequest) -> RestoreRequest:
        if options.cgroups_of:
            pid = await self._pids.known_here(caller, options.cgroups_of)
            options = msgspec.structs.replace(options, cgroups_of=pid)
        if options.follower:
            pid = await self._pids.known_here(caller, options.follower)
            options = msgspec.structs.replace(options, follower=pid)
        return options

    @method("VerifyImage")
    async def verify_image(self, caller: Caller, image: str, options: VerifyRequest) -> str:
        """Read every byte of an image again, or rehearse its restore."""
        action = Action.RESTORE if options.rehearse else Action.VERIFY
        manifest, acting = await self._image_for(caller, action, image)
        return job_path(self._verifications.start(manifest, options, caller.uid, acting))

    @method("DeleteImage")
    async def delete_image(self, caller: Caller, image: str) -> None:
        """Remove an image for good; returns when it is gone."""
        owner, called = None, Called()
        try:
            manifest, _acting = await self._image_for(caller, Action.DELETE, image)
            owner, called = manifest.owner, manifest.called
        except ImageCorrupt:
            if caller.uid != 0:  # the owner is unknown
                raise
        if pool := self._pools.images().get(image):
            raise Busy(
                f"the pool {pool} makes its programs of image {image}",
                hint=f"`phos pool rm {pool}` first",
            )

        def work(_: Progress) -> Outcome:
            self._engine.delete_image(image)
            self._history.image_deleted(image, f"uid {caller.uid} asked for it", owner)
            return Outcome(image)

        task = Task(*("delete", image, caller.uid, _claims(image), work), called=called, short=True)
        await self._jobs.result(self._jobs.submit(task, self._write_down))

    # Starting a job

    async def _may_stop(self, caller: Caller, target: Target) -> None:
        """Raise unless the caller may take the process off its GPUs, too."""
        pid = target.pid
        await self._rights.require(
            caller, Action.MIGRATE, target.uid, f"process {pid}", pid=str(pid)
        )

    async def _image_for(self, caller: Caller, action: Action, image: str) -> tuple[Manifest, int]:
        """Return the image, if the caller may use it, and the user id whose rights count. A
        restored program runs as the image's owner.
        """
        manifest = await asyncio.to_thread(self._engine.image, image)
        acting = await self._rights.require(
            caller, action, manifest.owner, f"image {image}", image=image
        )
        return manifest, acting


def _claims(image: str) -> frozenset[str]:
    """Return the claims of a job that works on an image."""
    return frozenset((f"image {image}",))


def check_row(finding: Finding) -> CheckRow:
    if finding.trouble is None:
        return finding.what, "", finding.found
    return finding.what, finding.trouble.code, in_one_text(finding.trouble)
