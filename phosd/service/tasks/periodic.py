"""Repeat checkpoints on a timer for each schedule. A schedule outlives phosd, but not its
process.
"""

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

import msgspec

from phosd.engine.program.process import GpuProcess
from phosd.engine.system import procfs
from phosd.engine.system.procfs import ProcessId, boot_id
from phosd.errors import Busy, InvalidOption, NoSuchProcess, NotAuthorized, PhosError, Unsupported
from phosd.service.history.events import Event, Severity
from phosd.service.history.history import History
from phosd.service.jobs.options import CheckpointRequest
from phosd.service.jobs.schedule import PeriodicRule, Schedule
from phosd.service.jobs.table import Job, JobState, JobTable
from phosd.service.process_identity import Target, ancestors, identify
from phosd.service.tasks.checkpoints import Checkpoints

_FOR_GOOD = (InvalidOption, NoSuchProcess, NotAuthorized, Unsupported)
"""Errors that end a schedule, since a retry cannot succeed."""
_MOST_DELAY = 16
"""Upper bound of the delay after failures, in intervals; it doubles with each failure."""
_log = logging.getLogger(__name__)


class Periodic:
    """The schedules of this boot. ``changed`` is called with a process whose schedule has changed.
    ``suspended`` returns whether a process is off its GPUs; a checkpoint due then is skipped.
    ``rehearse`` is called with the image and the user of a schedule that has the restores of its
    images rehearsed. Use it on the event loop only.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        jobs: JobTable,
        history: History,
        rules: Sequence[PeriodicRule],
        changed: Callable[[Target], None],
        suspended: Callable[[Target], bool] = lambda target: False,
        rehearse: Callable[[str, int], Awaitable[None]] | None = None,
    ) -> None:
        self.rules = rules
        self._checkpoints = checkpoints
        self._jobs = jobs
        self._history = history
        self._changed = changed
        self._suspended = suspended
        self._rehearse = rehearse
        self._boot = boot_id()
        self._schedules: dict[ProcessId, Schedule] = {}
        self._clocks: dict[ProcessId, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Continue the schedules of an earlier phosd whose processes still live."""
        for row in self._history.schedules():
            try:
                schedule = Schedule.of_row(row)
            except msgspec.DecodeError as error:
                _log.error("the schedule of process %s cannot be read: %s", row["pid"], error)
                continue
            if schedule.boot_id == self._boot and _lives(schedule.target):
                self._schedules[schedule.target.id] = schedule
        self._history.forget_schedules(self._schedules.values())
        for schedule in self._schedules.values():
            if not schedule.ended:
                self._run(schedule, None)

    async def close(self) -> None:
        """Stop the timers; the schedules stay in the history."""
        for clock in self._clocks.values():
            clock.cancel()
        await asyncio.gather(*self._clocks.values(), return_exceptions=True)

    def of(self, pid: int, start_time: int) -> Schedule | None:
        """Return the schedule of a process, possibly an ended one, or None."""
        return self._schedules.get(ProcessId(pid, start_time))

    def begin(
        self, target: Target, request: CheckpointRequest, owner: int, acting: int | None = None
    ) -> Job:
        """Checkpoint a process now, and then every ``request.every`` seconds, for user id
        ``owner``. ``acting`` is the user id whose rights count, if not the owner's.

        Raises the error of the first checkpoint if that cannot start, and :class:`Busy` for a
        process that is off its GPUs; then nothing has changed.
        """
        if self._suspended(target):
            raise Busy(
                f"process {target.pid} is suspended, and is not saved meanwhile",
                hint=f"`phos resume {target.pid}`, and give it a schedule then",
            )
        rights = owner if acting is None else acting
        schedule = Schedule(self._boot, target, rights, request)
        first = msgspec.structs.replace(schedule.each, token=request.token, queue=request.queue)
        job = self._checkpoints.start(target, first, owner, schedule, acting=rights)
        self._set(schedule)
        self._run(schedule, job)
        return job

    def end(self, target: Target, owner: int) -> None:
        """End the periodic checkpoints of a process. A running checkpoint continues."""
        self._end(Schedule(self._boot, target, owner, CheckpointRequest()), f"by uid {owner}")

    def consider(self, processes: Iterable[GpuProcess]) -> None:
        """Start schedules for processes that match a rule of the configuration and have none yet.

        A process below one that has, or had, a schedule belongs to that schedule.
        """
        for process in sorted(processes, key=lambda p: p.start_time):
            rule = next((rule for rule in self.rules if rule.fits(process)), None)
            if rule is None or (process.pid, process.start_time) in self._schedules:
                continue
            above = ancestors(process.pid)
            if any(s.target.pid in above for s in self._schedules.values()):
                continue
            try:
                target = identify(process.pid)
            except NoSuchProcess:
                continue
            request = CheckpointRequest(every=rule.every, keep=rule.keep)
            schedule = Schedule(self._boot, target, target.uid, request)
            self._set(schedule)
            self._run(schedule, None)
            self._tell(schedule, f"every {rule.every:g} s, by a rule of the configuration")

    def write_again(self) -> None:
        """Record all schedules again in a new history file: else they would end with this phosd."""
        for schedule in self._schedules.values():
            self._history.schedule(schedule)

    def forget_gone(self) -> None:
        """Drop the schedules of processes that have ended."""
        gone = [key for key, s in self._schedules.items() if not _lives(s.target)]
        for key in gone:
            schedule = self._schedules.pop(key)
            self._stop(key)
            if not schedule.ended:
                self._tell(schedule, "ended with the program; `phos images` lists its images")
        if gone:
            self._history.forget_schedules(self._schedules.values())

    def _set(self, schedule: Schedule) -> None:
        self._schedules[schedule.target.id] = schedule
        self._history.schedule(schedule)
        self._changed(schedule.target)

    def _end(self, schedule: Schedule, why: str, severity: Severity = Severity.INFO) -> None:
        self._stop(schedule.target.id)
        self._set(dataclasses.replace(schedule, ended=why))
        self._tell(schedule, f"ended: {why}", severity)

    def _run(self, schedule: Schedule, job: Job | None) -> None:
        def done(clock: asyncio.Task[None]) -> None:
            if not clock.cancelled() and clock.exception() is not None:
                _log.error("no clock for process %d", key[0], exc_info=clock.exception())
                self._tell(
                    schedule, "its clock failed; phosd's log has the details", Severity.ERROR
                )

        key = schedule.target.id
        self._stop(key)
        clock = asyncio.get_running_loop().create_task(self._keep_time(schedule, job))
        clock.add_done_callback(done)
        self._clocks[key] = clock

    def _stop(self, key: ProcessId) -> None:
        clock = self._clocks.pop(key, None)
        if clock is not None:
            clock.cancel()

    async def _keep_time(self, schedule: Schedule, job: Job | None) -> None:
        """Checkpoint a process periodically. ``job`` is the checkpoint that runs already, if
        any.
        """
        loop = asyncio.get_running_loop()
        due = loop.time()
        if job is None:
            made = await asyncio.to_thread(self._history.last_made_for, schedule)
            due -= min(schedule.every, max(0.0, time.time() - made)) if made else 0.0
        failures = left_out = 0
        while True:
            if job is not None:
                await self._jobs.wait(job)
                ends = not _lives(schedule.target) or procfs.ending(schedule.target.pid)
                if isinstance(job.error, _FOR_GOOD) and not ends:
                    self._end(schedule, str(job.error), Severity.WARNING)
                    return
                failures = failures + 1 if job.state is JobState.FAILED else 0
                if schedule.rehearse and self._rehearse and job.state is JobState.DONE:
                    await self._rehearse(job.outcome.result, schedule.owner)
            due += schedule.every * min(2**failures, _MOST_DELAY)
            late = max(0, math.ceil((loop.time() - due) / schedule.every))
            if late and job is not None:
                self._tell(schedule, f"{late} left out, because job {job.number} still ran")
            left_out += late
            due += late * schedule.every
            await asyncio.sleep(due - loop.time())
            if not _lives(schedule.target):
                self.forget_gone()
                return
            if self._suspended(schedule.target):
                job = None
                left_out += 1
                continue
            notes = (f"{left_out} periodic checkpoints before it left out",) if left_out else ()
            try:
                job = self._checkpoints.start(
                    schedule.target, schedule.each, schedule.owner, schedule, notes
                )
            except PhosError as error:
                job = None
                left_out += 1
                self._tell(schedule, f"one left out: {error}", Severity.WARNING)
            else:
                left_out = 0

    def _tell(self, schedule: Schedule, text: str, severity: Severity = Severity.INFO) -> None:
        pid = schedule.target.pid
        _log.info("periodic checkpoints of process %d: %s", pid, text)
        self._history.event(Event("schedule", str(pid), text, severity, schedule.target.uid))


def _lives(target: Target) -> bool:
    try:
        return identify(target.pid).start_time == target.start_time
    except NoSuchProcess:
        return False
