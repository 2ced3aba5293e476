"""Bring processes back that the driver has checkpointed, or that phosd has stopped."""

import contextlib
from collections.abc import Collection, Iterator

from phosd.engine.job.journal import JobRecord
from phosd.engine.node.placement import whole
from phosd.engine.program import driver_checkpoint, process_gpus
from phosd.engine.program.stopped import StoppedProcesses
from phosd.engine.recovery.account import Account, noted, told
from phosd.engine.recovery.guarded import GuardingMovers
from phosd.engine.system import procfs
from phosd.engine.system.procfs import ProcessId

_MOVED_SECONDS = 120.0
"""Seconds that a process may take to tell its state on which the GPUs of others depend."""


def back_from_driver(
    processes: Collection[ProcessId],
    everyone: Collection[ProcessId],
    movers: GuardingMovers,
    jobs: Collection[JobRecord],
    stopped: StoppedProcesses,
    account: Account,
) -> None:
    """Bring back those of ``processes`` that the driver has, or phosd has ``stopped``. ``everyone``
    has those that belong to them, too.
    """
    with contextlib.ExitStack() as running:
        for pid, _ in processes:
            with noted(account, pid):
                running.enter_context(stopped.restore_threads_run([pid]))
        asked = {pid for pid, _ in processes} - account.failures.keys()
        away = _restored(asked, everyone, movers, jobs, account)
    back = asked - account.failures.keys()
    for pid in stopped.let_go(back):
        account.deeds.setdefault(pid, []).append("stopped for a suspension")
    for pid, error in driver_checkpoint.back_to_running(away & back).items():
        if error is None:
            account.deeds.setdefault(pid, []).append("brought back from the driver's checkpoint")
        else:
            account.failures[pid] = error


def _restored(
    pids: Collection[int],
    everyone: Collection[ProcessId],
    movers: GuardingMovers,
    jobs: Collection[JobRecord],
    account: Account,
) -> set[int]:
    """Let the driver restore those of ``pids`` that it has checkpointed. Returns those that it had
    checkpointed or locked.
    """
    states = driver_checkpoint.states(pids)
    for pid in pids:
        with noted(account, pid):
            told(pid, states)
    away = {
        pid for pid, state in states.items() if state not in (None, driver_checkpoint.State.RUNNING)
    }
    away -= _unclear(away, jobs, account)
    if not away:
        return away
    rooms = _rooms(away, everyone, jobs)
    movers.ask_each(lambda mover: mover.unreserve(rooms))
    _finish_moves(away, jobs, account)
    for pid, error in driver_checkpoint.back_to_locked(away - account.failures.keys()).items():
        if error is not None:
            account.failures[pid] = error
    return away


def _rooms(
    stopped: Collection[int], everyone: Collection[ProcessId], jobs: Collection[JobRecord]
) -> Collection[ProcessId]:
    """Return those whose device memory may be reserved together with that of ``stopped``. A mover
    releases the room of a group as a whole; groups of other jobs keep theirs.
    """
    records = [job.pids for job in jobs if not {*stopped}.isdisjoint(job.pids)]
    if not {*stopped} <= {pid for pids in records for pid in pids}:
        return everyone
    others = {pid for job in jobs if job.pids not in records for pid in job.pids}
    return [each for each in everyone if each.pid not in others]


def _unclear(stopped: Collection[int], jobs: Collection[JobRecord], account: Account) -> set[int]:
    """Return those of ``stopped`` that must stay as they are, and note why: another process of the
    job that moved them does not tell on which GPU it is, and they stay together.
    """
    unclear: set[int] = set()
    for _, pids in _moves(stopped, jobs):
        states = driver_checkpoint.states(pids, _MOVED_SECONDS)
        silent = [pid for pid in pids if pid not in states and procfs.process_id(pid) is not None]
        waiting = {*stopped} & {*pids} if silent else set()
        for pid in waiting:
            with noted(account, pid):
                told(silent[0], states)
        unclear |= waiting
    return unclear


def _moves(
    stopped: Collection[int], jobs: Collection[JobRecord]
) -> Iterator[tuple[dict[int, int], set[int]]]:
    """Yield the moves, and the processes, of the jobs that were moving some of ``stopped``."""
    for job in jobs:
        if job.affected and job.affected.moves and not job.pids.isdisjoint(stopped):
            yield job.affected.moves, job.pids


def _finish_moves(stopped: Collection[int], jobs: Collection[JobRecord], account: Account) -> None:
    """Move processes after those of their job that the driver has already moved to other GPUs."""
    for moves, pids in _moves(stopped, jobs):
        states = driver_checkpoint.states(pids)
        behind = [pid for pid in stopped if states.get(pid) is driver_checkpoint.State.CHECKPOINTED]
        if {driver_checkpoint.State.LOCKED, driver_checkpoint.State.RUNNING} & {*states.values()}:
            for pid in behind:
                with noted(account, pid):
                    driver_checkpoint.move([pid], whole(moves, len(process_gpus.gpu_uuids())))
