"""Bring back processes that were left locked, checkpointed or parked.

Used by a phosd that starts after one that was killed, and by ``phos recover``. Needs neither D-Bus
nor the database: driver and hooks report the state of a process, and the movers have the memory of
parked ones. Every step checks the state first, so it may be repeated.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeVar

from phosd.engine.criu.owned_processes import end_orphans, is_criu
from phosd.engine.digest import DigestKey
from phosd.engine.hook_client.link import (
    BlockFlag,
    HookBlock,
    HookLink,
    HookState,
    NotImportable,
    reach,
)
from phosd.engine.job.journal import JobRecord, read_records
from phosd.engine.memory.exported import new_key
from phosd.engine.memory.handing_back import HeldBlock, hand_back
from phosd.engine.mover.client.mover import SOFTWARE_RING_BYTES, Mover
from phosd.engine.mover.client.rescue_client import RescueClient, rescue_clients
from phosd.engine.node.placement import whole
from phosd.engine.node.suspended import Register
from phosd.engine.program import driver_checkpoint, process
from phosd.engine.program.stopped import StoppedProcesses
from phosd.engine.recovery.overdue import overdue
from phosd.engine.system import procfs
from phosd.engine.system.instance_lock import alone, in_use
from phosd.engine.system.looking import LOOKERS, at_once
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Busy, Internal, NoSuchProcess, NotAuthorized, PhosError, Timeout

GuardedBlocks = Mapping[int, Mapping[int, int]]
"""The guarded memory of one process: a descriptor by GPU and block."""
Claim = Callable[[set[int]], contextlib.AbstractContextManager[None]]
"""A context that keeps jobs away from the processes with these pids."""
_CRIU_SECONDS = 180.0
"""CRIU's action script gives up within seconds of phosd's end, but CRIU may call it only later."""
_LOOK_SECONDS = 0.05
_MOVED_SECONDS = 120.0
"""Seconds that a process may take to tell its state on which the GPUs of others depend."""
_log = logging.getLogger(__name__)


@dataclass
class Account:
    """The results: ``deeds`` by pid, and why processes could not be brought back."""

    deeds: dict[int, list[str]] = field(default_factory=dict)
    failures: dict[int, PhosError] = field(default_factory=dict)

    def text(self, pids: Iterable[int]) -> str:
        """Return a sentence for the history on each of these processes that changed or failed."""
        said = []
        for pid in pids:
            if pid in self.failures:
                said.append(f"process {pid} could not be brought back: {self.failures[pid]}")
            elif deeds := self.deeds.get(pid):
                said.append(f"process {pid} was {' and '.join(deeds)}, and runs again")
        return "; ".join(said)


_Answer = TypeVar("_Answer")


class _Movers:
    """The movers of a runtime folder. Use it as a context.

    A mover that fails to answer is left out from then on, with its error in ``silent``: what it
    guards is unknown, but nobody whose memory others have is to wait for it.
    """

    def __init__(self, runtime_dir: Path) -> None:
        self.silent: list[PhosError] = []
        self._clients = rescue_clients(runtime_dir, self.silent)
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> Self:
        for client in self._clients:
            self._opened.enter_context(client)
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def ask_each(self, ask: Callable[[RescueClient], _Answer]) -> list[tuple[int, _Answer]]:
        """Return the answers, each with the ordinal of the mover's GPU."""
        answers = []
        for client in list(self._clients):
            try:
                answers.append((client.gpu, ask(client)))
            except PhosError as error:
                _log.error("%s", error)
                self.silent.append(error)
                self._clients.remove(client)
        return answers

    def let_go(self, processes: Collection[ProcessId]) -> None:
        """Have them release all memory that they guard or reserve for these processes."""
        if not processes:
            return  # movers refuse to reserve for nobody
        self.ask_each(lambda mover: mover.unguard(processes))
        self.ask_each(lambda mover: mover.unreserve(processes))

    def guarded(self) -> dict[ProcessId, dict[int, dict[int, int]]]:
        """Return the guarded blocks: descriptors by process, GPU and block, open until the end of
        the context. Processes for which only device memory is reserved have no blocks.
        """
        found: dict[ProcessId, dict[int, dict[int, int]]] = {}
        for gpu, memory in self.ask_each(RescueClient.parked):
            for each, blocks in memory.items():
                for descriptor in blocks.values():
                    self._opened.callback(os.close, descriptor)
                found.setdefault(each, {})[gpu] = blocks
        return found


def left_parked(runtime_dir: Path) -> set[ProcessId]:
    """Return the processes for which a mover guards memory or keeps a reservation."""
    with _Movers(runtime_dir) as movers:
        return {*movers.guarded()}


def kept_for(processes: Collection[ProcessId], runtime_dir: Path) -> bool:
    """Return whether a mover guards memory of one of these. Raises if a mover does not answer."""
    with _Movers(runtime_dir) as movers:
        memory = movers.guarded()
        found = any(any(memory.get(each, {}).values()) for each in processes)
        if movers.silent and not found:
            raise movers.silent[0]
        return found


def free(processes: Collection[ProcessId], runtime_dir: Path) -> Account:
    """Bring processes back to running. Processes that have ended are left out.

    Processes that belong together must be passed together. A failure of one does not stop the
    others.
    """
    account = Account()
    alive = [each for each in processes if procfs.process_id(each.pid) == each]
    pids = ", ".join(str(pid) for pid, _ in alive)
    with _Movers(runtime_dir) as movers:
        with overdue(f"waiting for CRIU to let go of {pids}"):
            _wait_for_dumps(alive, account)
        stopped = StoppedProcesses(runtime_dir)
        for pid in stopped.let_go_saved(pid for pid, _ in alive):
            account.deeds.setdefault(pid, []).append("stopped for its image")
        ours = {each.pid for each in stopped.of(pid for pid, _ in alive)}
        for pid in {pid for pid, _ in alive} - account.failures.keys() - ours:
            with _noted(account, pid):
                stopped.require_going(pid)
        ready = [each for each in alive if each.pid not in account.failures]
        jobs = read_records(runtime_dir / "journal")
        with overdue(f"bringing {pids} back from the driver's checkpoint"):
            _back_from_driver(ready, processes, movers, jobs, stopped, account)
        with overdue("waiting for the movers"):
            memory = movers.guarded()
        ready = [each for each in ready if each.pid not in account.failures]
        with overdue(f"waiting for {pids} to tell their state"):
            seen = at_once((pid for pid, _ in ready), _seen, driver_checkpoint.TELLING_SECONDS)
        for each in ready:
            with _noted(account, each.pid), overdue(f"waiting for the hook of {each.pid}"):
                guarded = memory.get(each, {})
                found = _told(each.pid, seen)
                _back_from_parking(each.pid, found, runtime_dir, guarded, movers.silent, account)
        back = [each for each in processes if each.pid not in account.failures]
        movers.let_go(back)
    return account


def let_rest(processes: Collection[ProcessId], runtime_dir: Path) -> None:
    """Have the movers release all memory of these processes, which are suspended."""
    if not processes:
        return
    with _Movers(runtime_dir) as movers:
        movers.let_go(processes)


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
    asleep = driver_checkpoint.State.CHECKPOINTED
    stopped = StoppedProcesses(runtime_dir).of([pid])  # then nobody would tell its state
    if stopped or driver_checkpoint.states([pid]).get(pid, asleep) is asleep:
        Register(runtime_dir).require_awake([pid])


def worked_on(runtime_dir: Path) -> dict[int, int]:
    """Return the job that works on each pid, according to the journal of the running phosd."""
    jobs = read_records(runtime_dir / "journal")
    return {pid: record.job for record in jobs for pid in record.pids}


def _wait_for_dumps(processes: Collection[ProcessId], account: Account) -> None:
    """Wait until CRIU, which ends on its own after its phosd, has released the processes."""
    waiting = {pid for pid, _ in processes}
    end_orphans()
    end = time.monotonic() + _CRIU_SECONDS
    while waiting:
        dumped = _dumped()
        waiting = {pid for pid in waiting if dumped & _line_of(pid) or procfs.traced(pid)}
        if waiting and time.monotonic() > end:
            break
        if waiting:
            time.sleep(_LOOK_SECONDS)
    for pid in waiting:
        account.failures[pid] = Busy(
            f"process {pid} is held by CRIU or a debugger",
            hint="end the debugger (`grep Tracer /proc/PID/status`), or bring back the file system "
            "that CRIU waits for; then `phos recover PID`",
        )


def _dumped() -> set[int]:
    """Return the roots of the trees that CRIU is dumping."""

    def look(pid: int) -> str:
        with contextlib.suppress(OSError):
            words = procfs.command_line(pid)
            if "dump" in words and "--tree" in words[:-1] and is_criu(pid):
                return words[words.index("--tree") + 1]
        return ""

    roots = (root for _, root in LOOKERS.each(procfs.pids(), look))
    return {int(root) for root in roots if root.isascii() and root.isdecimal()}


def _line_of(pid: int) -> set[int]:
    """Return the process and its ancestors."""
    found: set[int] = set()
    while pid and pid not in found:
        found.add(pid)
        stat = procfs.stat(pid)
        pid = stat.parent if stat else 0
    return found


def _back_from_driver(
    processes: Collection[ProcessId],
    everyone: Collection[ProcessId],
    movers: _Movers,
    jobs: Collection[JobRecord],
    stopped: StoppedProcesses,
    account: Account,
) -> None:
    """Bring back those of ``processes`` that the driver has, or phosd has ``stopped``. ``everyone``
    has those that belong to them, too.
    """
    with contextlib.ExitStack() as running:
        for pid, _ in processes:
            with _noted(account, pid):
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
    movers: _Movers,
    jobs: Collection[JobRecord],
    account: Account,
) -> set[int]:
    """Have the driver restore those of ``pids`` that it has checkpointed. Returns those that it had
    checkpointed or locked.
    """
    states = driver_checkpoint.states(pids)
    for pid in pids:
        with _noted(account, pid):
            _told(pid, states)
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
            with _noted(account, pid):
                _told(silent[0], states)
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
                with _noted(account, pid):
                    driver_checkpoint.move([pid], whole(moves, len(process.gpu_uuids())))


@dataclass(frozen=True)
class _Seen:
    """What a look at a process whose memory may be parked finds."""

    uses_cuda: bool
    has_hook: bool
    is_known: bool
    """Whether the driver tells its state."""


def _seen(pid: int) -> _Seen:
    untold = (None, driver_checkpoint.State.UNKNOWN)
    known, hooked = driver_checkpoint.state(pid) not in untold, process.has_hook(pid)
    return _Seen(process.uses_cuda(pid), hooked, known)


def _told(pid: int, found: Mapping[int, _Answer]) -> _Answer:
    """Return what was found out about a process. Raises :class:`Timeout` if it told nothing."""
    try:
        return found[pid]
    except KeyError:
        raise Timeout(
            f"process {pid} does not let itself be looked at",
            hint=f"see what it, or its file system, waits for; then `phos recover {pid}`",
        ) from None


def _back_from_parking(
    pid: int,
    seen: _Seen,
    runtime_dir: Path,
    memory: GuardedBlocks,
    silent: Sequence[PhosError],
    account: Account,
) -> None:
    if not (seen.is_known and seen.has_hook):
        if memory and seen.uses_cuda:
            raise Internal(
                f"the driver does not tell the state of process {pid}, whose memory is kept",
                hint=f"see its log (dmesg), then `phos recover {pid}`",
            )
        return
    deeds = account.deeds.setdefault(pid, [])
    with reach(pid, runtime_dir) as link:
        hello = link.hello()
        if hello.state is HookState.PARKED:
            blocks = process.placed(hello, link.list_blocks())
            found = {
                block.id: _kept(memory, gpu, block.id)
                for block, gpu in blocks
                if not block.flags & BlockFlag.HAS_DESCRIPTOR  # else it was handed back, and made
            }
            missing = [block for block, descriptor in found.items() if descriptor is None]
            if missing and silent:  # that mover may have it
                raise silent[0]
            if missing:
                raise Internal(
                    f"nobody holds the memory of {len(missing)} of its {len(found)} blocks",
                    hint=f"it is lost: end process {pid} and restore its last image",
                )
            kept = {block: fd for block, fd in found.items() if fd is not None}
            try:
                link.unpark(kept.items())
            except NotImportable:
                _hand_back_copies(link, blocks, kept)
            link.open_gate()
            deeds.append("given back its parked memory")
        link.forget()


def _hand_back_copies(
    link: HookLink, blocks: Sequence[tuple[HookBlock, int]], kept: Mapping[int, int]
) -> None:
    """Have movers of our own copy the memory into what the process makes: those that guard it may
    have no engine, and obey no visitor. A phosd that runs may hold the memory, too: not for long.
    """
    with contextlib.ExitStack() as movers:
        running: dict[int, Mover] = {}
        held = []
        for block, gpu in blocks:
            if block.id not in kept:
                continue
            if (at := max(gpu, 0)) not in running:
                key = DigestKey(os.urandom(32))
                running[at] = movers.enter_context(Mover.start(at, SOFTWARE_RING_BYTES, key))
            memory = HeldBlock(block.id, block.size, at, new_key(), kept[block.id])
            running[at].adopt([(memory.key, memory.size, memory.descriptor)])
            held.append(memory)
        hand_back(link, held, running.__getitem__, None)


def _kept(memory: GuardedBlocks, gpu: int, block: int) -> int | None:
    """Return a descriptor of a block of a process that is on ``gpu`` now.

    In the middle of a migration two GPUs have the block, and that of the process counts.
    """
    for place in (gpu, *memory):
        if (descriptor := memory.get(place, {}).get(block)) is not None:
            return descriptor
    return None


@contextlib.contextmanager
def _noted(account: Account, pid: int) -> Iterator[None]:
    try:
        yield
    except PhosError as error:
        account.failures[pid] = error
