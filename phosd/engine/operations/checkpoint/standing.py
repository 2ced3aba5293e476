"""Keep a program still until its image is complete; then end it, or hold it until told to go on.

CRIU leaves the program in a group stop. It is not kept frozen by CRIU, which belongs to the user
for as long as it runs: no file that it can write to may be in an image.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from phosd.engine.faults import Point, point
from phosd.engine.image.manifest import Manifest
from phosd.engine.job.progress import Progress
from phosd.engine.program.stopped import StoppedProcesses
from phosd.engine.program.tree import ProcessTree, TreeProcess

_END_SECONDS = 60.0
"""Seconds that killed processes may take to end: the driver frees their memory meanwhile."""
_LOOK_SECONDS = 0.01


class ProgramEnded(Exception):
    """The program was ended, as its image is complete; nobody is left to be brought back."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(f"the program was ended; image {manifest.id} is complete")
        self.manifest = manifest


class Standing:
    """The processes of a program that CRIU leaves stopped."""

    def __init__(self, stopped: StoppedProcesses, progress: Progress) -> None:
        self._stopped = stopped
        self._progress = progress
        self._processes: list[TreeProcess] = []

    def expect(self, tree: ProcessTree) -> None:
        """Write down who will be stopped; CRIU calls for it with the frozen tree."""
        self._processes.extend(tree.living)
        self._stopped.about_to_stop(process.pid for process in tree.living)

    @contextmanager
    def until_complete(self) -> Iterator[None]:
        """Let those that are stopped run on at the end of the context, if they have not ended."""
        try:
            yield
        finally:
            self._stopped.let_go(process.pid for process in self._processes)

    def end(self, manifest: Manifest) -> None:
        """Kill the program. Raises :class:`ProgramEnded`, and :class:`Cancelled` before."""
        self._progress.phase("end", stopped=True)
        self._progress.check()
        point(Point.STANDING_END)
        # Children first: those whose parent ends are told to go on (SIGCONT) if they lose the last
        # tie to their session by that.
        self._stopped.kill(process.pid for process in reversed(self._processes))
        until = time.monotonic() + _END_SECONDS
        while left := [process.pid for process in self._processes if process.alive]:
            if time.monotonic() > until:
                pids = ", ".join(map(str, left))
                self._progress.note(f"process {pids} was killed, and has not ended yet")
                break
            time.sleep(_LOOK_SECONDS)
        self._progress.finish()
        raise ProgramEnded(manifest)

    def hold(self) -> None:
        """Wait until the job is told to go on, or is cancelled."""
        self._progress.phase("hold", stopped=True)
        point(Point.STANDING_HOLD)
        self._progress.hold()
