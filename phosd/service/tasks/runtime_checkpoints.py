"""Take part in checkpoints by containers' runtimes: answer the plugin in their CRIU.

``phosd/runtime_plugin/plugin.cpp`` has the requests. Only root may make them. A program that is to
run on is saved by a job that goes on until its image is complete; CRIU dumps it within the stop. A
program that is to end is suspended for as long as CRIU saves it. Whatever becomes of CRIU, what is
left of the program runs again.
"""

import asyncio
import logging
import os
import socket
import stat
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phosd import unix_sockets
from phosd.engine.criu.dump.runtime_devices import RuntimeDevices
from phosd.engine.criu.dump.runtime_dump import RuntimeDump, is_held
from phosd.engine.job.checkpoint_history import CheckpointHistory
from phosd.engine.job.progress import Progress
from phosd.engine.node.suspended import Suspended
from phosd.engine.operations.runtime_checkpoint import Paused
from phosd.engine.system import cgroups, pid_namespaces
from phosd.errors import InvalidOption, NoSuchProcess, PhosError
from phosd.service.connections import accepted, readable
from phosd.service.history.history import History
from phosd.service.jobs.engine import Engine
from phosd.service.jobs.options import ResumeRequest
from phosd.service.jobs.table import Job, JobTable, Outcome, Task
from phosd.service.process_identity import Target, identify, program, require_same
from phosd.service.tasks.checkpoints import claim_of, named, require_free_tree

SOCKET = "runtime.sock"
MOST = 64
"""Most runtimes that are served at a time."""
_REQUEST_BYTES = 64
_MOST_DESCRIPTORS = 253
"""The kernel passes no more in a message, and closes those for which there is no room."""
_ANSWER_BYTES = 4000
_LOOK_SECONDS = 0.02
_ROOT = 0
_END_SECONDS = 10.0
_log = logging.getLogger(__name__)


class RuntimeCheckpoints:
    """Serves the socket. Use it on the event loop only. ``write_down`` writes a job's journal
    record.
    """

    def __init__(
        self,
        runtime_dir: Path,
        engine: Engine,
        history: History,
        jobs: JobTable,
        write_down: Callable[[Job, Target], None],
    ) -> None:
        self._path = runtime_dir / SOCKET
        self._jobs = _Jobs(engine, history, jobs, write_down)
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Listen. Without the socket phosd serves all others nevertheless."""
        try:
            self._path.unlink(missing_ok=True)
            listener = unix_sockets.listening(
                self._path, kind=socket.SOCK_SEQPACKET, backlog=MOST, descriptors=True
            )
        except OSError as error:
            _log.warning("runtimes cannot save GPU programs by %s: %s", self._path, error)
            return
        listener.setblocking(False)
        self._listener = listener
        self._accepting = asyncio.get_running_loop().create_task(self._accept(listener))
        for left in await asyncio.to_thread(self._jobs.engine.left_by_runtimes):
            self._begin(self._jobs.bring_back(left))  # an earlier phosd has left it

    async def stop_listening(self) -> None:
        """Take no further requests: a runtime finds that phosd is not there."""
        if self._accepting is not None and self._listener is not None:
            self._accepting.cancel()  # before its descriptor gets another meaning for the loop
            await asyncio.wait([self._accepting])
            unix_sockets.stop_listening(self._listener)
            self._path.unlink(missing_ok=True)

    async def close(self) -> None:
        """End the connections. The jobs must have ended."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_END_SECONDS)

    def _begin(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        async for connection in accepted(listener):
            if not _may_ask(*unix_sockets.peer_of(connection)) or len(self._tasks) >= MOST:
                unix_sockets.close(connection)
            else:
                self._begin(_Talk(connection, self._jobs).hold())


@dataclass(frozen=True)
class _Jobs:
    """Starts the jobs of runtimes' checkpoints."""

    engine: Engine
    history: History
    table: JobTable
    write_down: Callable[[Job, Target], None]

    async def bring_back(self, suspended: Suspended) -> PhosError | None:
        """Resume a program as soon as nobody holds it any more. Returns why it stays suspended."""
        try:
            while suspended.alive and is_held(suspended.pid):
                await asyncio.sleep(_LOOK_SECONDS)
            if not suspended.alive:
                return NoSuchProcess(f"process {suspended.pid} has ended")
            target = identify(suspended.pid)

            def work(progress: Progress) -> Outcome:
                require_same(target)
                self.engine.resume(target.pid, ResumeRequest(), _ROOT, progress)
                return Outcome(str(target.pid))

            await self.table.result(self.submit("resume", target, work))
        except PhosError as error:
            _log.error(
                "process %d stays suspended after a runtime's checkpoint or restore: %s",
                suspended.pid,
                error,
            )
            return error
        return None

    def save(self, target: Target, folder: int, dump: RuntimeDump) -> Job:
        """Save a program that runs on, while ``dump`` is made of it."""
        known = program(target)

        def work(progress: Progress) -> Outcome:
            require_same(target)
            experience = CheckpointHistory(
                self.history.suspects.of(known), self.history.past_checkpoints(named(target))
            )
            try:
                choice = self.engine.checkpoint_for_runtime(
                    target.pid, folder, dump, experience, progress
                )
            finally:
                self.history.suspects.found(known, progress.suspects)
            return Outcome("", choice.mode, choice.why)

        return self.submit("checkpoint", target, work)

    def submit(self, operation: str, target: Target, work: Callable[[Progress], Outcome]) -> Job:
        def before(job: Job) -> None:
            require_free_tree(self.table, target.pid)
            self.write_down(job, target)

        task = Task(
            operation=operation,
            target=str(target.pid),
            owner=_ROOT,
            claims=frozenset((claim_of(target.pid),)),
            work=work,
            queue=True,  # it may be the resumption after the checkpoint before
            executable=program(target).executable,
            process=named(target),
        )
        return self.table.submit(task, before)


@dataclass(frozen=True)
class _Saving:
    """A program that runs on is being saved: by ``job``, while CRIU makes its ``dump``."""

    dump: RuntimeDump
    job: Job

    async def end(self, table: JobTable) -> None:
        """End it, as CRIU has gone; the program runs then."""
        self.dump.over(complete=False)
        self.job.progress.cancel()
        await table.wait(self.job)


class _Talk:
    """One connection: the checkpoint, or the restore, of one container."""

    def __init__(self, connection: socket.socket, jobs: _Jobs) -> None:
        self._connection = connection
        self._jobs = jobs
        self._engine = jobs.engine
        self._folder = -1
        self._paused: Paused | None = None
        self._devices: RuntimeDevices | None = None
        self._saving: _Saving | None = None
        self._cancel: Callable[[], None] | None = None
        """Ends what is done for a request, if it takes long."""
        self._resumed: asyncio.Task[PhosError | None] | None = None

    async def hold(self) -> None:
        """Answer until the plugin has gone, and then have what is left of the program run."""
        try:
            while request := await self._next():
                with self._ended_by_hangup():
                    answer = await self._answer(request)
                await self._say(answer)
        except (OSError, ValueError) as error:
            _log.warning("a runtime's CRIU: %s", error)
        finally:
            unix_sockets.close(self._connection)
            if self._saving is not None:
                await self._saving.end(self._jobs.table)
            if self._folder >= 0:
                os.close(self._folder)
        if self._paused is not None:
            await self._jobs.bring_back(self._paused.suspended)
        if self._resumed is not None:
            await self._resumed

    @contextmanager
    def _ended_by_hangup(self) -> Iterator[None]:
        """Cancel what is done for a request if the plugin, which waits for the answer, goes: the
        runtime's command has timed out, and the program is to run at once.
        """
        loop = asyncio.get_running_loop()

        def gone() -> None:
            loop.remove_reader(self._connection)
            if self._cancel is not None:
                self._cancel()

        loop.add_reader(self._connection, gone)
        try:
            yield
        finally:
            loop.remove_reader(self._connection)
            self._cancel = None

    def _cancellable(self, job: Job) -> Job:
        self._cancel = lambda: None if job.state.ended else self._jobs.table.cancel(job)
        return job

    async def _answer(self, request: str) -> str:
        begun = self._paused is not None or self._saving is not None
        try:
            match request.split(" "):
                case ["pause", number] if self._folder >= 0 and not begun:
                    return await self._pause(_pid(number))
                case ["snapshot", number] if self._folder >= 0 and not begun:
                    return await self._snapshot(_pid(number))
                case ["save"] if self._saving is not None:
                    return f"noted {await asyncio.to_thread(self._saving.dump.held)}".rstrip()
                case ["end"] if self._saving is not None:
                    self._saving.dump.over(complete=True)
                    return "ended"
                case ["await"] if self._saving is not None:
                    await self._jobs.table.result(self._cancellable(self._saving.job))
                    return "saved"
                case ["save"] if self._paused is not None:
                    progress = Progress()
                    self._cancel = progress.cancel
                    self._devices = await asyncio.to_thread(
                        self._engine.save_for_runtime, self._paused, self._folder, progress
                    )
                    return f"saved {self._devices.kinds}".rstrip()
                case ["end"] if self._devices is not None:
                    await asyncio.to_thread(self._devices.take_out, self._folder)
                    return "ended"
                case ["restored", number] if self._folder >= 0 and self._resumed is None:
                    return await self._adopt(_pid(number))
                case ["await"] if self._resumed is not None:
                    error = await self._resumed
                    return "resumed" if error is None else f"error {error}"
            raise InvalidOption(f"{request!r} cannot be asked for now")
        except PhosError as error:
            _log.warning("a runtime's CRIU is answered: %s", error)
            return f"error {error}"

    async def _pause(self, pid: int) -> str:
        """Suspend a program. One that the runtime has frozen runs meanwhile, and is frozen again
        before CRIU holds it.
        """
        if not await asyncio.to_thread(self._engine.uses_gpus, pid):
            return "nothing"
        thaw = ExitStack()
        try:
            await asyncio.to_thread(thaw.enter_context, cgroups.thawed(pid))
            await self._suspend(identify(pid))
        finally:
            await asyncio.to_thread(thaw.close)
        return "paused"

    async def _suspend(self, target: Target) -> None:

        def work(progress: Progress) -> Outcome:
            require_same(target)
            self._paused = self._engine.pause_for_runtime(target.pid, progress)
            where = self._paused.suspended.where
            return Outcome(where, where)

        job = self._cancellable(self._jobs.submit("suspend", target, work))
        await self._jobs.table.result(job)

    async def _snapshot(self, pid: int) -> str:
        if any(await asyncio.to_thread(lambda: [*cgroups.freezers(pid)])):
            return "frozen"  # by the runtime, until CRIU has ended: it cannot run on before
        if not await asyncio.to_thread(self._engine.uses_gpus, pid):
            return "nothing"
        loop, stands = asyncio.get_running_loop(), asyncio.Event()
        dump = RuntimeDump(lambda: loop.call_soon_threadsafe(stands.set))
        job = self._cancellable(self._jobs.save(identify(pid), self._folder, dump))
        self._saving = _Saving(dump, job)
        first = [loop.create_task(stands.wait()), loop.create_task(self._jobs.table.wait(job))]
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in first:
                each.cancel()
        if not stands.is_set():
            await self._jobs.table.result(job)  # raises why it could not be stopped
        return "paused"

    async def _adopt(self, pid: int) -> str:
        found = await asyncio.to_thread(
            self._engine.adopt_of_runtime, pid, self._folder, Progress()
        )
        if found is None:
            return "nothing"
        self._resumed = asyncio.get_running_loop().create_task(self._jobs.bring_back(found))
        return "adopted"

    async def _next(self) -> str:
        """Return the next request; empty at the end. Takes the folder that comes with it."""
        await readable(self._connection)
        data, descriptors, _, _ = socket.recv_fds(
            self._connection, _REQUEST_BYTES, _MOST_DESCRIPTORS
        )
        for descriptor in descriptors:
            if self._folder < 0 and stat.S_ISDIR(os.fstat(descriptor).st_mode):
                self._folder = descriptor
            else:
                unix_sockets.abandon(descriptor)
        return data.decode("ascii")

    async def _say(self, text: str) -> None:
        await asyncio.get_running_loop().sock_sendall(
            self._connection, text.encode(errors="replace")[:_ANSWER_BYTES]
        )


def _may_ask(pid: int, uid: int) -> bool:
    """Return whether a process may ask: the root of a container, who may have been given the
    socket's folder, is no runtime's, and the pids that it names are others' here.
    """
    try:
        return uid == _ROOT and pid > 0 and not pid_namespaces.is_nested(pid)
    except OSError:  # it has ended
        return False


def _pid(text: str) -> int:
    if not text.isdecimal():
        raise InvalidOption(f"{text!r} is no pid")
    return int(text)
