"""Start jobs that move processes off and onto GPUs, plan evacuations, and recover processes."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from phosd.engine.image.called import Called
from phosd.engine.job.progress import Progress
from phosd.engine.node.gpus import GpuInfo
from phosd.engine.node.placement import find
from phosd.engine.operations.evacuate import EvacuationOutcome, GpuCapacity, GpuUser, Step, plan
from phosd.engine.program.process import GpuProcess
from phosd.engine.system.freezer import frozen_by_others
from phosd.engine.system.slurm_steps import kept_thawed
from phosd.errors import Busy, InvalidOption, PhosError
from phosd.service.api.destination import named_in, require_destination
from phosd.service.api.inventory import Inventory
from phosd.service.api.views import job_path
from phosd.service.dbus.caller import Caller
from phosd.service.dbus.caller_pids import CallerPids
from phosd.service.dbus.polkit import Action, Rights
from phosd.service.dbus.query_pool import QueryPool
from phosd.service.dbus.spec import method
from phosd.service.jobs.engine import Programs
from phosd.service.jobs.job import moved_text
from phosd.service.jobs.options import (
    MigrateRequest,
    ResumeRequest,
    SleepRequest,
    SuspendRequest,
)
from phosd.service.jobs.table import Job, JobState, JobTable, Outcome, Task
from phosd.service.process_identity import Target, identify, program, require_same
from phosd.service.tasks.checkpoints import claim_of, named, require_free_tree
from phosd.service.tasks.sleepers import Sleepers

OPERATIONS = ("migrate", "suspend", "resume", "swap")
StepRow = tuple[int, str, int, str, str, str]
MoveRequest = MigrateRequest | SuspendRequest | ResumeRequest
SUSPENDED = "suspended"
"""State of a process that is off its GPUs."""


@dataclass(frozen=True)
class _Move:
    """A request: ``targets`` are the processes, the first one being the job's own."""

    operation: str
    targets: tuple[Target, ...]
    request: MoveRequest
    mode: str = ""
    destination: str = ""


class Moves:
    """Handlers of the manager. ``write_down`` writes a job's journal record. Use it on the event
    loop only.
    """

    def __init__(
        self,
        engine: Programs,
        jobs: JobTable,
        inventory: Inventory,
        sleepers: Sleepers,
        rights: Rights,
        query_pool: QueryPool,
        pids: CallerPids,
        write_down: Callable[[Job, Target], None],
    ) -> None:
        self._engine = engine
        self._jobs = jobs
        self._inventory = inventory
        self._sleepers = sleepers
        self._rights = rights
        self._query_pool = query_pool
        self._pids = pids
        self._write_down = write_down
        self._thawing: set[asyncio.Task[None]] = set()

    @method("Migrate")
    async def migrate(
        self, caller: Caller, pid: int, destination: str, options: MigrateRequest
    ) -> str:
        """Move a process to another GPU (its number, the beginning of its UUID, or old:new for each
        of several, with commas) while it runs on.
        """
        require_destination(destination)
        target, acting = await self._theirs(caller, pid)

        def work(progress: Progress) -> Outcome:
            require_same(target)
            moved = self._engine.migrate(target.pid, destination, options, acting, progress)
            return Outcome(moved_text(moved))

        move = _Move("migrate", (target,), options, options.mode, destination)
        return job_path(self._begin(caller, move, work))

    @method("Suspend")
    async def suspend(self, caller: Caller, pid: int, options: SleepRequest) -> str:
        """Take a process off its GPUs, to host memory or disk; it keeps its pid."""
        target, acting = await self._theirs(caller, pid)
        if options.thaw:
            _require_thawed(target.pid)
        if options.sleeps:
            await self._sleepers.require_room(target)
        called = self._inventory.subject(target.pid).called

        def suspend(progress: Progress) -> str:
            return self._engine.suspend(target.pid, options.each, acting, progress)

        def work(progress: Progress) -> Outcome:
            require_same(target)
            if options.sleeps:
                with self._sleepers.begun(target, acting, options, called, progress) as where:
                    where = where or suspend(progress)
            else:
                with self._sleepers.left_alone(target.id):
                    where = suspend(progress)
            return Outcome(where, where)

        job = self._begin(caller, _Move("suspend", (target,), options, options.where), work)
        if options.thaw:
            self._thaw_behind_resumption(target.pid, job)
        return job_path(job)

    @method("Resume")
    async def resume(self, caller: Caller, pid: int, options: ResumeRequest) -> str:
        """Bring a suspended process back, on its GPUs or others."""
        if options.gpu:
            require_destination(options.gpu)
        target, acting = await self._theirs(caller, pid)

        def work(progress: Progress) -> Outcome:
            require_same(target)
            with self._sleepers.left_alone(target.id) as sleeper:
                if sleeper is not None and (options.hollow or options.ready):
                    raise InvalidOption(
                        f"process {target.pid} is resumed when somebody calls it, and would stand "
                        "still then",
                        hint=f"`phos resume {target.pid}` ends that",
                    )
                if sleeper is not None and not sleeper.suspension:  # it is to stay awake
                    return Outcome(moved_text({gpu: gpu for gpu in sleeper.gpus}))
                moved = self._engine.resume(target.pid, options, acting, progress)
            return Outcome(moved_text(moved))

        move = _Move("resume", (target,), options, destination=options.gpu)
        return job_path(self._begin(caller, move, work))

    @method("Swap")
    async def swap(self, caller: Caller, leaving: int, coming: int, options: SuspendRequest) -> str:
        """Suspend one process and resume another in its place."""
        if leaving == coming:
            raise InvalidOption(
                f"process {leaving} cannot take its own place",
                hint="name the process that leaves the GPU, and then the suspended one",
            )
        out, acting = await self._theirs(caller, leaving)
        come, acting_too = await self._theirs(caller, coming)
        if options.thaw:
            _require_thawed(out.pid)

        def work(progress: Progress) -> Outcome:
            require_same(out)
            require_same(come)
            # Root's rights for one process must not extend to the other.
            rights = acting if acting == acting_too else caller.uid
            with self._sleepers.left_alone(out.id), self._sleepers.left_alone(come.id):
                self._engine.swap(out.pid, come.pid, options, rights, progress)
            return Outcome(str(come.pid))

        move = _Move("swap", (out, come), options, options.where)
        return job_path(self._begin(caller, move, work))

    @method("PlanEvacuation")
    async def plan_evacuation(self, caller: Caller, gpu: str) -> list[StepRow]:
        """Plan how to clear a GPU of the processes that the caller may see, a step for each: pid,
        migrate, suspend or stay, bytes on the GPU, destination for Migrate, why, command line.
        """
        await self._inventory.refresh_gpus()
        await self._inventory.refresh_processes()
        gpus = list(self._inventory.gpus.values())
        ordinal = find(gpu, gpus)
        found = next(each for each in gpus if each.ordinal == ordinal)
        everybody = await self._rights.inspects(caller)
        steps = await self._query_pool.run(caller.uid, self._plan, found, caller, everybody)
        return [_told(found.ordinal, step, self._besides(step)) for step in steps]

    @method("Recover")
    async def recover(self, caller: Caller, pid: int) -> str:
        """Let a process run again that was left locked, checkpointed or parked. Returns afterwards,
        with what was done.
        """
        pid = await self._pids.known_here(caller, pid)
        target = identify(pid)
        await self._rights.require(
            caller, Action.RECOVER, target.uid, f"process {pid}", pid=str(pid)
        )

        def work(_: Progress) -> Outcome:
            require_same(target)
            return Outcome(self._engine.recover(pid))

        called = self._inventory.subject(pid).called
        task = Task(
            *("recover", str(pid), caller.uid, frozenset((claim_of(pid),)), work), called=called
        )
        # Each step of a recovery looks first, so an interrupted job needs no journal record.
        job = self._jobs.submit(task, lambda _: None)
        try:
            outcome = await self._jobs.result(job)
        finally:
            await self._inventory.refresh_processes()
        return outcome.result

    # Starting a job

    async def _theirs(self, caller: Caller, pid: int) -> tuple[Target, int]:
        """Return the process that the caller means, if the caller may move it, and the user id
        whose rights count.
        """
        pid = await self._pids.known_here(caller, pid)
        target = identify(pid)
        acting = await self._rights.require(
            caller, Action.MIGRATE, target.uid, f"process {pid}", pid=str(pid)
        )
        return target, acting

    def _begin(self, caller: Caller, move: _Move, work: Callable[[Progress], Outcome]) -> Job:
        targets, first = move.targets, move.targets[0]

        def before(job: Job) -> None:
            for target in targets:
                require_free_tree(self._jobs, target.pid)
            self._write_down(job, first)

        ours = [self._inventory.subject(target.pid) for target in targets]
        coming = named_in(move.destination, self._inventory.gpus.values())
        task = Task(
            operation=move.operation,
            target=" ".join(str(target.pid) for target in targets),
            owner=caller.uid,
            claims=frozenset(claim_of(target.pid) for target in targets),
            work=work,
            mode=move.mode,
            destination=move.destination,
            token=move.request.token,
            queue=move.request.queue,
            executable=program(first).executable,
            process=named(first),
            gpus=coming.union(*(subject.gpus for subject in ours)),
            called=Called.together(subject.called for subject in ours),
        )
        return self._jobs.submit(task, before)

    def _thaw_behind_resumption(self, pid: int, job: Job) -> None:
        """Keep the step of a process thawed while ``job``, its suspension, waits for a resumption:
        who is frozen cannot come back to a GPU either.
        """
        before = self._jobs.holder(claim_of(pid))
        if job.state is not JobState.QUEUED or before is None or before.task.operation != "resume":
            return

        async def thaw() -> None:
            with kept_thawed(pid):
                await self._jobs.wait(before)

        task = asyncio.get_running_loop().create_task(thaw())
        self._thawing.add(task)
        task.add_done_callback(self._thawing.discard)

    # Evacuation

    def _plan(self, gpu: GpuInfo, caller: Caller, everybody: bool) -> list[Step]:
        """Plan for the processes on the GPU that the caller may see."""
        processes = tuple(self._inventory.processes.values())
        here = [process for process in processes if _is_on(process, gpu)]
        users = [
            GpuUser(process, self._bytes_on(process, gpu.ordinal))
            for process in here
            if everybody or caller.may_touch(process.uid)
        ]
        capacities = [
            GpuCapacity(each.ordinal, each.name, each.memory_total - self._used(each, processes))
            for each in tuple(self._inventory.gpus.values())
            if each.ordinal == gpu.ordinal or not self._engine.divided(each.ordinal)
        ]
        return plan(gpu.ordinal, users, capacities, self._engine.context_bytes())

    def _besides(self, step: Step) -> list[str]:
        """Return what else is to be known before a step is taken."""
        path = self._inventory.process(step.user.process.pid)
        view = self._inventory.views.get(path or "")
        if view is None or step.outcome is not EvacuationOutcome.SUSPEND:
            return []
        said = ["no call will wake it any more"] if view.sleeper is not None else []
        if view.waits:
            said.append(
                f"`phos start {view.pool}` would bring it back there; `phos pool scale {view.pool} "
                "--hollow 0 --ready 0` ends it instead"
            )
        return said

    def _used(self, gpu: GpuInfo, processes: tuple[GpuProcess, ...]) -> int:
        """Return the bytes of a GPU's memory in use; without NVML, those that hooks report."""
        if gpu.memory_used is not None:
            return gpu.memory_used
        return sum(self._bytes_on(p, gpu.ordinal) for p in processes if _is_on(p, gpu))

    def _bytes_on(self, process: GpuProcess, gpu: int) -> int:
        """Return a process's bytes on one GPU. When it uses several GPUs and its hook does not
        answer, all its bytes count.
        """
        if gpu not in process.gpus:
            return 0  # only a context
        if len(process.gpus) > 1 and process.away is None:
            try:
                blocks = self._engine.blocks(process.id)
            except PhosError:
                return process.device_bytes
            return sum(block.size for block, where in blocks if where == gpu)
        return process.device_bytes


def _is_on(process: GpuProcess, gpu: GpuInfo) -> bool:
    """Whether a process uses the GPU, according to its hook or NVML. A hollow one has contexts."""
    if process.state == SUSPENDED:
        hollow = process.away is not None and process.away.hollow
        return hollow and gpu.ordinal in process.gpus
    return gpu.ordinal in process.gpus or process.pid in gpu.pids


def _require_thawed(pid: int) -> None:
    """Raise :class:`Busy` if a process is frozen already: then it was not Slurm that freezes it
    while it is suspended, and it is not for its user to thaw it.
    """
    if path := frozen_by_others(pid):
        raise Busy(
            f"process {pid} is frozen, with its cgroup {path}",
            hint="ask before it is frozen, or thaw it (`scontrol resume`), and try again",
        )


def _told(gpu: int, step: Step, besides: list[str]) -> StepRow:
    process = step.user.process
    to = f"{gpu}:{step.to}" if step.outcome is EvacuationOutcome.MIGRATE else ""
    command = " ".join(process.shown_command)
    why = "; ".join([step.why, *besides])
    return process.pid, str(step.outcome), step.user.bytes, to, why, command
