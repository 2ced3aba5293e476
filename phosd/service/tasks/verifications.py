"""Start jobs that verify images, and rehearse their restores."""

import asyncio
from collections.abc import Callable

from phosd.engine.image.manifest import Manifest
from phosd.engine.job.progress import Progress
from phosd.errors import Cancelled, ImageCorrupt, PhosError, in_one_text
from phosd.service.history.events import Event, Severity
from phosd.service.history.history import History
from phosd.service.jobs.engine import Images
from phosd.service.jobs.options import VerifyRequest
from phosd.service.jobs.table import Job, JobTable, Outcome, Task

_REHEARSED = "rehearsed"


class Verifications:
    """Starts the jobs, and records what came of them. ``write_down`` writes a job's journal record.
    Use it on the event loop only.
    """

    def __init__(
        self,
        engine: Images,
        history: History,
        jobs: JobTable,
        write_down: Callable[[Job], None],
    ) -> None:
        self._engine = engine
        self._history = history
        self._jobs = jobs
        self._write_down = write_down

    def start(
        self, manifest: Manifest, request: VerifyRequest, owner: int, acting: int | None = None
    ) -> Job:
        """Verify an image for user id ``owner``, or rehearse its restore. ``acting`` is the user id
        whose rights count, if not the owner's. Raises :class:`Busy` if a job holds the image.
        """
        return self._submit(manifest, request, owner, owner if acting is None else acting)

    async def rehearse_next(self, image: str, owner: int) -> None:
        """Rehearse the restore of an image that a schedule of user id ``owner`` has just made. Why
        that is not done is an event.
        """
        try:
            manifest = await asyncio.to_thread(self._engine.image, image)
            self._submit(manifest, VerifyRequest(rehearse=True), owner, owner, scheduled=True)
        except PhosError as error:
            self._tell(image, f"its restore is not rehearsed: {error}", Severity.WARNING, owner)

    def _submit(
        self,
        manifest: Manifest,
        request: VerifyRequest,
        owner: int,
        acting: int,
        *,
        scheduled: bool = False,
    ) -> Job:
        def work(progress: Progress) -> Outcome:
            do = self._rehearse if request.rehearse else self._verify
            try:
                do(manifest, request, acting, progress)
            finally:
                self._history.flush()  # the image's properties are read from the history
            return Outcome(manifest.id, _REHEARSED if request.rehearse else "")

        task = Task(
            "verify",
            manifest.id,
            owner,
            frozenset((f"image {manifest.id}",)),
            work,
            mode=_REHEARSED if request.rehearse else "",
            token=request.token,
            queue=scheduled,
            scheduled=scheduled,
            gpus=frozenset(gpu.ordinal for gpu in manifest.gpus if request.rehearse),
            called=manifest.called,
        )
        return self._jobs.submit(task, self._write_down)

    def _verify(
        self, manifest: Manifest, _request: VerifyRequest, _acting: int, progress: Progress
    ) -> None:
        try:
            self._engine.verify(manifest.id, progress)
        except ImageCorrupt:
            self._history.image(manifest, whole=False)
            raise
        self._history.image(manifest, whole=True)

    def _rehearse(
        self, manifest: Manifest, request: VerifyRequest, acting: int, progress: Progress
    ) -> None:
        try:
            self._engine.rehearse(manifest.id, request, acting, progress)
        except Cancelled:
            raise
        except PhosError as error:
            whole = False if isinstance(error, ImageCorrupt) else None
            text = in_one_text(error)
            self._history.image(manifest, whole=whole, rehearsal=text)
            said = f"it could not be restored now: {text}"
            self._tell(manifest.id, said, Severity.ERROR, manifest.owner)
            raise
        # A verification reads what no restore needs, too.
        self._history.image(manifest, rehearsal="")

    def _tell(self, image: str, text: str, severity: Severity, owner: int) -> None:
        self._history.event(Event("rehearsal", image, text, severity, owner))
