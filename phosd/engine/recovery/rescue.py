"""Bring back processes that were left locked, checkpointed or parked.

Used by a phosd that starts after one that was killed, and by ``phos recover``. Needs neither D-Bus
nor the database: driver and hooks report the state of a process, and the movers have the memory of
parked ones. Every step checks the state first, so it may be repeated.
"""

import contextlib
import os
from collections.abc import Callable, Collection
from pathlib import Path

from phosd.engine.job.journal import read_records
from phosd.engine.node.suspended import Register
from phosd.engine.program import driver_checkpoint
from phosd.engine.program.stopped import StoppedProcesses
from phosd.engine.recovery.account import Account, noted, told
from phosd.engine.recovery.dumps import wait_for_dumps
from phosd.engine.recovery.from_driver import back_from_driver
from phosd.engine.recovery.from_parking import back_from_parking, look_at
from phosd.engine.recovery.guarded import GuardingMovers, left_parked
from phosd.engine.recovery.hollow import rests
from phosd.engine.recovery.overdue import overdue
from phosd.engine.system import procfs
from phosd.engine.system.freezer import Freezer
from phosd.engine.system.instance_lock import alone, in_use
from phosd.engine.system.procfs import ProcessId
from phosd.engine.system.unkillable_reads import at_once
from phosd.errors import Busy, NoSuchProcess, NotAuthorized

Claim = Callable[[set[int]], contextlib.AbstractContextManager[None]]
"""A context that keeps jobs away from the processes with these pids."""


def free(processes: Collection[ProcessId], runtime_dir: Path) -> Account:
    """Bring processes back to running. Processes that have ended are left out.

    Processes that belong together must be passed together. A failure of one does not stop the
    others.
    """
    account = Account()
    alive = [each for each in processes if procfs.process_id(each.pid) == each]
    pids = ", ".join(str(pid) for pid, _ in alive)
    Freezer(runtime_dir).release({pid for pid, _ in alive})
    with GuardingMovers(runtime_dir) as movers:
        with overdue(f"waiting for CRIU to let go of {pids}"):
            wait_for_dumps(alive, account)
        stopped = StoppedProcesses(runtime_dir)
        for pid in stopped.let_go_saved(pid for pid, _ in alive):
            account.deeds.setdefault(pid, []).append("stopped for its image")
        ours = {each.pid for each in stopped.of(pid for pid, _ in alive)}
        for pid in {pid for pid, _ in alive} - account.failures.keys() - ours:
            with noted(account, pid):
                stopped.require_going(pid)
        ready = [each for each in alive if each.pid not in account.failures]
        jobs = read_records(runtime_dir / "journal")
        with overdue(f"bringing {pids} back from the driver's checkpoint"):
            back_from_driver(ready, processes, movers, jobs, stopped, account)
        with overdue("waiting for the movers"):
            memory = movers.guarded()
        ready = [each for each in ready if each.pid not in account.failures]
        with overdue(f"waiting for {pids} to tell their state"):
            seen = at_once((pid for pid, _ in ready), look_at, driver_checkpoint.TELLING_SECONDS)
        for each in ready:
            with noted(account, each.pid), overdue(f"waiting for the hook of {each.pid}"):
                guarded = memory.get(each, {})
                found = told(each.pid, seen)
                back_from_parking(each.pid, found, runtime_dir, guarded, movers.silent, account)
        back = [each for each in processes if each.pid not in account.failures]
        movers.let_go(back)
    return account


def bring_back(
    pid: int, runtime_dir: Path, claim: Claim = lambda _: contextlib.nullcontext()
) -> Account:
    """Bring a process back, and all processes that movers guard memory for, as they may share it.

    Works beside a running phosd, without one, and inside one, which passes ``claim`` to keep its
    jobs away. Raises :class:`NoSuchProcess`; :class:`Busy` while a job of a running phosd works on
    the process; :class:`NotAuthorized` unless run by root.
    """
    if os.geteuid() != 0:
        raise NotAuthorized("only root may bring processes back", hint="use sudo")
    wanted = procfs.process_id(pid)
    if wanted is None:
        raise NoSuchProcess(
            f"there is no process {pid}", hint="`phos recover` lists processes that stand still"
        )
    with contextlib.ExitStack() as stack:
        running = in_use(runtime_dir)
        if not running and runtime_dir.is_dir():
            stack.enter_context(alone(runtime_dir))  # no phosd may start meanwhile
        _require_awake(pid, runtime_dir)
        # First list parked processes: a job is in the journal before it parks any.
        parked = left_parked(runtime_dir)
        busy = worked_on(runtime_dir) if running else {}
        if (job := busy.get(pid)) is not None:
            raise Busy(
                f"job {job} of a running phosd works on process {pid}",
                hint=f"wait for its end, or cancel it (`phos jobs --cancel {job}`)",
            )
        suspended = {
            each
            for program in Register(runtime_dir).living()
            if pid not in program.pids
            for each in program.processes
        }
        stopped = {each.id for each in StoppedProcesses(runtime_dir).living()}
        others = {each for each in (parked | stopped) - suspended if each.pid not in busy}
        stack.enter_context(claim({each.pid for each in {wanted} | others}))
        return free({wanted} | others, runtime_dir)


def _require_awake(pid: int, runtime_dir: Path) -> None:
    """Raise :class:`Busy` if the process is suspended and no resume had begun."""
    register, asleep = Register(runtime_dir), driver_checkpoint.State.CHECKPOINTED
    stopped = StoppedProcesses(runtime_dir).of([pid])  # then nobody would tell its state
    resting = (rests(each, runtime_dir) for each in register.living() if pid in each.pids)
    if stopped or driver_checkpoint.states([pid]).get(pid, asleep) is asleep or any(resting):
        register.require_awake([pid])


def worked_on(runtime_dir: Path) -> dict[int, int]:
    """Return the job that works on each pid, according to the journal of the running phosd."""
    jobs = read_records(runtime_dir / "journal")
    return {pid: record.job for record in jobs for pid in record.pids}
