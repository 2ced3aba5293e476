"""Stop processes for as long as they are suspended, where no gate keeps them out of the driver.

Their threads must stand still while the driver has their memory (hazard 38). A suspension outlives
phosd, and with it any tracer: so they are in a group stop (SIGSTOP), out of which a tracer lets the
driver's restore thread while the driver works on them, or is asked about them. At other times
nobody would answer.

CRIU leaves a saved program in a group stop, too, if it is not to run on before its image is
complete. Its hook keeps it out of the driver, or the driver has given it back its memory.

A file for each process that phosd has stopped, written before it is, tells them from those that
their users have stopped, which phosd must not let go.
"""

import contextlib
import logging
import os
import signal
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from phosd.engine.faults import Point, point
from phosd.engine.image import private_files
from phosd.engine.program import driver_checkpoint
from phosd.engine.program.held import held
from phosd.engine.system import procfs
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Busy, NoSuchProcess

_MAX_BYTES = 64 << 10
_log = logging.getLogger(__name__)


class StoppedProcess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process that phosd has stopped, of one boot. ``restore_thread`` does the driver's work; if
    it is 0, all may run: the driver has nothing to do, or the hook keeps the others out of it.
    """

    pid: int
    start_time: int
    boot_id: str
    restore_thread: int = 0

    @property
    def id(self) -> ProcessId:
        return ProcessId(self.pid, self.start_time)

    @property
    def alive(self) -> bool:
        return self.boot_id == procfs.boot_id() and procfs.process_id(self.pid) == self.id


class StoppedProcesses:
    """The processes that phosd has stopped: a folder in ``runtime_dir``, which only root can enter.

    One that a phosd was about to stop, or had just let go, when it was killed may be among them.
    """

    def __init__(self, runtime_dir: Path) -> None:
        self._folder = runtime_dir / "stopped"

    def living(self) -> list[StoppedProcess]:
        """Return those that live."""
        return [each for each in self._all() if each.alive]

    def of(self, pids: Iterable[int]) -> list[StoppedProcess]:
        """Return those of these processes that phosd has stopped."""
        found = (self._read(self._path(pid)) for pid in sorted({*pids}))
        return [each for each in found if each is not None and each.alive]

    def require_going(self, pid: int) -> None:
        """Raise :class:`Busy` if the process is stopped: the driver would wait for it for ever."""
        if self.of([pid]):  # its threads may be about to stop
            raise Busy(
                f"process {pid} was stopped by phosd for a job that has not ended",
                hint=f"`phos recover {pid}`",
            )
        stat = procfs.stat(pid)
        if stat is not None and stat.stopped:
            raise Busy(
                f"process {pid} is stopped, by a signal or a debugger",
                hint=f"let it go on (`kill -CONT {pid}`, or detach the debugger), then try again",
            )

    @contextlib.contextmanager
    def stopping(self, restore_threads: Mapping[int, int]) -> Iterator[None]:
        """Stop processes for good, each with the thread of it that runs inside the context.

        If this raises, or what is inside, those that :meth:`of` knows may be stopped. Raises
        :class:`Busy`, :class:`NoSuchProcess`, and :class:`Timeout`.
        """
        with held(restore_threads, through_group_stop=True) as hold:
            for pid, thread in restore_threads.items():
                self._write(pid, thread)
            point(Point.GROUP_STOP_BEGIN)
            for pid in restore_threads:
                _send(pid, signal.SIGSTOP)
            hold.await_group_stop(restore_threads)
            yield

    def about_to_stop(self, pids: Iterable[int]) -> None:
        """Write down that these processes will be stopped, of which all threads may run again."""
        for pid in pids:
            self._write(pid)

    @contextlib.contextmanager
    def restore_threads_run(self, pids: Iterable[int]) -> Iterator[None]:
        """Let the restore threads of those of these processes that are stopped run inside the
        context, and no other thread of theirs: the driver may be asked about them, and may restore
        them. They must not be unlocked yet: a thread that is held may have a lock that this takes.

        Raises :class:`Busy` and :class:`Timeout`.
        """
        stopped = (each for each in self.of(pids) if each.restore_thread)
        threads = {each.pid: each.restore_thread for each in stopped}
        with held(threads, through_group_stop=True) if threads else contextlib.nullcontext():
            yield

    def let_go_saved(self, pids: Iterable[int]) -> list[int]:
        """Resume those of these processes that were stopped until their image is complete.

        Returns their pids.
        """
        return self.let_go(each.pid for each in self.of(pids) if not each.restore_thread)

    def let_go(self, pids: Iterable[int]) -> list[int]:
        """Resume those of these processes that are stopped, as they have been restored.

        Returns their pids.
        """
        stopped = self.of(pids)
        for each in stopped:
            point(Point.GROUP_STOP_END)
            with contextlib.suppress(NoSuchProcess):  # it has ended, which ends a group stop, too
                _send(each.pid, signal.SIGCONT, each.start_time)
        for each in stopped:
            point(Point.GROUP_STOP_FORGET)
            self._remove(each.pid)
        return [each.pid for each in stopped]

    def kill(self, pids: Iterable[int]) -> None:
        """Kill those of these processes that are stopped, in this order."""
        stopped = [each for pid in pids for each in self.of([pid])]
        for each in stopped:
            with contextlib.suppress(NoSuchProcess):
                _send(each.pid, signal.SIGKILL, each.start_time)
        for each in stopped:
            self._remove(each.pid)

    def bring_back(self, pids: Collection[int]) -> None:
        """Bring processes back to RUNNING, stopped or not, whichever state they are in.

        All are tried, and the first error is raised; those that are not restored stay stopped.
        """
        with self.restore_threads_run(pids):
            back = driver_checkpoint.back_to_locked(pids)
        restored = [pid for pid, error in back.items() if error is None]
        self.let_go(restored)
        driver_checkpoint.raise_first((back | driver_checkpoint.back_to_running(restored)).values())

    def forget_the_dead(self) -> None:
        """Remove the files of those that have ended."""
        for each in self._all():
            if not each.alive:
                self._remove(each.pid)

    def _all(self) -> list[StoppedProcess]:
        if not self._folder.is_dir():
            return []
        private_files.require_private(self._folder)
        found = (self._read(path) for path in sorted(self._folder.glob("*.json")))
        return [each for each in found if each is not None]

    @staticmethod
    def _read(path: Path) -> StoppedProcess | None:
        try:
            text = private_files.read_private(path, _MAX_BYTES)
            return msgspec.json.decode(text, type=StoppedProcess)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            _log.error(
                "%s does not tell which process phosd has stopped (%s); if that process is stopped "
                "and does not use a GPU, continue it (kill -CONT), else end it; then remove the "
                "file",
                path,
                error,
            )
            return None

    def _write(self, pid: int, restore_thread: int = 0) -> None:
        process = procfs.process_id(pid)
        if process is None:
            raise NoSuchProcess(
                f"process {pid} ended before it was stopped", hint="see its output for why"
            )
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        private_files.require_private(self._folder)
        partial = self._path(pid).with_suffix(".partial")
        partial.unlink(missing_ok=True)
        record = StoppedProcess(*process, procfs.boot_id(), restore_thread)
        private_files.write_durably(partial, msgspec.json.encode(record))
        partial.rename(self._path(pid))
        private_files.sync_folder(self._folder)

    def _remove(self, pid: int) -> None:
        self._path(pid).unlink(missing_ok=True)
        private_files.sync_folder(self._folder)

    def _path(self, pid: int) -> Path:
        return self._folder / f"{pid}.json"


def _send(pid: int, number: signal.Signals, start_time: int | None = None) -> None:
    """Send a signal to the process with this start time. Raises :class:`NoSuchProcess`."""
    ended = NoSuchProcess(f"process {pid} has ended", hint="see its output for why it ended")
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        raise ended from None
    try:
        found = procfs.process_id(pid)  # of this descriptor, or it has ended
        if found is None or start_time not in (None, found.start_time):
            raise ended
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        raise ended from None
    finally:
        os.close(descriptor)
