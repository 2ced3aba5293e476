"""Start checkpoint jobs: claim the process, pass on its history, and record the image."""

from collections.abc import Callable, Sequence

import msgspec

from phosd.engine.image.manifest import Manifest
from phosd.engine.image.store import packs_of
from phosd.engine.job.checkpoint_history import CheckpointHistory
from phosd.engine.job.progress import Progress
from phosd.engine.system.procfs import boot_id
from phosd.errors import (
    Busy,
    ImageCorrupt,
    InvalidOption,
    NoSuchImage,
    NoSuchProcess,
    PhosError,
)
from phosd.service.history.history import History
from phosd.service.jobs.engine import Engine
from phosd.service.jobs.job import Subject
from phosd.service.jobs.options import CheckpointRequest
from phosd.service.jobs.schedule import Schedule, surplus
from phosd.service.jobs.table import Job, JobState, JobTable, Outcome, Task
from phosd.service.process_identity import (
    Program,
    Target,
    ancestors,
    holds,
    process_key,
    program,
    require_same,
)

_SHORTEST = 1.0
"""Least seconds between two checkpoints of a schedule."""


class Checkpoints:
    """Starts checkpoint jobs. ``write_down`` writes a job's journal record; ``subject``
    returns what is known of the program of a process. Use it on the event loop only.
    """

    def __init__(
        self,
        engine: Engine,
        history: History,
        jobs: JobTable,
        write_down: Callable[[Job, Target], None],
        subject: Callable[[int], Subject] = lambda pid: Subject(),
    ) -> None:
        self._engine = engine
        self._history = history
        self._jobs = jobs
        self._write_down = write_down
        self._subject = subject

    def start(
        self,
        target: Target,
        request: CheckpointRequest,
        owner: int,
        schedule: Schedule | None = None,
        notes: Sequence[str] = (),
        acting: int | None = None,
    ) -> Job:
        """Checkpoint a process for user id ``owner``, perhaps as part of a schedule. ``notes`` are
        added to the job. ``acting`` is the user id whose rights count, if not the owner's. Raises
        :class:`Busy` unless the request queues.
        """

        known = program(target)
        rights = owner if acting is None else acting

        def work(progress: Progress) -> Outcome:
            require_same(target)
            for note in notes:
                progress.note(note)
            try:
                manifest = self._save(target, request, rights, known, progress)
            finally:
                self._history.suspects.found(known, progress.suspects)
            self._history.image(manifest, made_for=schedule)
            if schedule is not None:
                self._remove_surplus(schedule, progress)
            return Outcome(manifest.id, manifest.mode, manifest.why)

        subject = self._subject(target.pid)
        task = Task(
            operation="checkpoint",
            target=str(target.pid),
            owner=owner,
            claims=frozenset((claim_of(target.pid),)),
            work=work,
            mode=request.mode,
            token=request.token,
            queue=request.queue,
            scheduled=schedule is not None,
            executable=known.executable,
            process=named(target),
            gpus=subject.gpus,
            called=subject.called,
        )

        def before(job: Job) -> None:
            require_free_tree(self._jobs, target.pid)
            self._write_down(job, target)

        return self._jobs.submit(task, before)

    def go_on(self, target: Target) -> None:
        """Resume a program that a checkpoint holds; the target may be any process of its tree.

        Raises :class:`NoSuchProcess`, and :class:`Busy` if its image is not complete.
        """
        held = {claim_of(pid) for pid in ancestors(target.pid)}
        for job in self._jobs:
            if job.state is JobState.RUNNING and not held.isdisjoint(job.task.claims):
                if not job.progress.holding:
                    raise Busy(
                        f"job {job.number} ({job.task.operation} {job.task.target}) works on "
                        f"process {target.pid}",
                        hint="wait until it holds it, or has ended",
                    )
                job.progress.go_on()
                return
        raise NoSuchProcess(
            f"process {target.pid} is not held",
            hint="`phos checkpoint PID --hold` holds one; `phos resume` is for suspended ones, and "
            "`phos recover` for those that were left standing still",
        )

    def _save(
        self,
        target: Target,
        request: CheckpointRequest,
        owner: int,
        known: Program,
        progress: Progress,
    ) -> Manifest:
        """Run the checkpoint. A parent that phosd chose and that turns out unusable is left out."""
        experience = CheckpointHistory(
            self._history.suspects.of(known), self._history.past_checkpoints(named(target))
        )
        if request.parent == "auto":
            request = msgspec.structs.replace(request, parent=self._latest_of(target))
            if request.parent:
                try:
                    return self._engine.checkpoint(target.pid, request, owner, experience, progress)
                except (ImageCorrupt, NoSuchImage) as error:
                    progress.note(f"made without a parent: {error}")
            request = msgspec.structs.replace(request, parent="")
        return self._engine.checkpoint(target.pid, request, owner, experience, progress)

    def _latest_of(self, target: Target) -> str:
        """Return the image to use as parent; empty when there is none.

        It must not share a pack with an image that was found damaged: the new image would inherit
        the damage.
        """
        verified = self._history.verified()
        images = self._engine.images()
        doubtful = {
            pack
            for image in images
            if not verified.get(image.id, (0.0, True))[1]
            for pack in packs_of(image)
        }
        return max(
            (
                image.id
                for image in images
                if image.blocks
                and holds(image, target.pid, target.start_time)
                and not packs_of(image) & doubtful
            ),
            default="",
        )

    def _remove_surplus(self, schedule: Schedule, progress: Progress) -> None:
        """Delete the images that exceed what the schedule keeps. The job holds the process, so no
        other job makes an image with one of them as parent.
        """
        self._history.flush()
        images = self._history.images_made_for(schedule)
        for image in list(images):
            try:
                self._engine.image(image)
            except NoSuchImage:
                self._history.image_deleted(image, "it was found to be gone", schedule.target.uid)
                del images[image]
            except ImageCorrupt:
                images[image] = False
        for image in surplus(images, schedule.keep):
            try:
                self._engine.delete_image(image)
                why = f"{schedule.keep} newer good ones of its schedule are kept"
                self._history.image_deleted(image, why, schedule.target.uid)
            except PhosError as error:
                progress.note(f"image {image} is due for deletion, and stays for now: {error}")


def require_possible(request: CheckpointRequest) -> None:
    """Raise :class:`InvalidOption` for options that exclude each other."""
    if not request.every:
        if request.keep is not None:
            raise InvalidOption(
                "keep is for checkpoints that repeat", hint="give `every` with it, in seconds"
            )
        if request.rehearse:
            raise InvalidOption(
                "rehearse is for checkpoints that repeat",
                hint="give `every` with it, or verify the image with `rehearse`",
            )
        return
    if request.stands:
        raise InvalidOption(
            "only a program that runs on can be saved again and again",
            hint="leave `then` out, or `every`",
        )
    if request.every < _SHORTEST:
        raise InvalidOption(
            f"a checkpoint every {request.every} s is not possible",
            hint=f"give at least {_SHORTEST:.0f} s, or 0 to end the schedule",
        )
    if request.parent:
        raise InvalidOption(
            "a schedule chooses the parent of each image itself",
            hint="leave `parent` out, or `every`",
        )


def named(target: Target) -> str:
    """Return a key for the process, unique across reboots."""
    return process_key(boot_id(), target.pid, target.start_time)


def require_free_tree(jobs: JobTable, pid: int) -> None:
    """Raise :class:`Busy` when a job holds an ancestor or descendant of this process: they belong
    to the same tree.
    """
    above = ancestors(pid)
    for held in {int(claim.split()[1]) for claim in jobs.claimed("process")}:
        if held in above or pid in ancestors(held):
            jobs.require_free((claim_of(held),))


def claim_of(pid: int) -> str:
    """Return the claim of a job that works on a process."""
    return f"process {pid}"
