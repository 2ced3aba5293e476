"""A checkpoint under observation: what the device memory was at its stop, how far the program came
in each phase, and whether the image is that of the stop.
"""

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from phosd.engine.image.manifest import Manifest
from phosd.engine.image.verify import verify
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from tests.node.concurrent.stop_image import Memory, device_memory, differences, mapped
from tests.support.harness import Target, children

_RATE = "PHOS_SOFTGPU_COPY_RATE"
_WHILE = "PHOS_SOFTGPU_COPY_RATE_WHILE"
_BRAKED_SECONDS = 5.0
"""How long it takes to copy everything with the brake on, for which a program may wait."""
_LONGEST_REST = 3.0
T = TypeVar("T")


class Brake:
    """Slows copies down, while it is on, until ``target`` has made ``steps`` steps: how fast the
    machine is does not decide how far a program comes while it is copied.
    """

    def __init__(self, file: Path, target: Target, steps: int) -> None:
        self._file = file
        self._target = target
        self._steps = steps
        self._since = 0
        self._followed: threading.Thread | None = None

    def put_on(self) -> None:
        """Slow copies down until the target has made its steps from now on, also if it is on."""
        self._since = self._target.position()
        if self._file.exists():
            return
        self.release()
        self._file.touch()
        self._followed = threading.Thread(target=self._follow)
        self._followed.start()

    def release(self) -> None:
        """Let copies be fast again."""
        self._file.unlink(missing_ok=True)
        if self._followed is not None:
            self._followed.join()
            self._followed = None

    def _follow(self) -> None:
        while self._file.exists():
            if self._target.log.read_bytes()[self._since :].count(b"\n") >= self._steps:
                self._file.unlink(missing_ok=True)
            time.sleep(0.005)


class Watch:
    """Follows one checkpoint of ``target``; give :attr:`progress` to it.

    The movers that run may copy before CRIU has its turn and after it, but not meanwhile (for
    :data:`_LONGEST_REST` seconds): how long it takes does not decide how much is left to be copied
    while the program runs.

    ``then`` maps the name of a phase to what is to be done, once, when it begins; for ``drain``
    it is the one in which the program runs. ``brake`` is on in the phases in which it does.
    """

    def __init__(
        self,
        node: Node,
        target: Target,
        brake: Brake | None = None,
        /,
        **then: Callable[[], object],
    ) -> None:
        self.progress = Progress(observer=self._observe)
        self.memories: dict[int, Memory] = {}
        """The device memory of each process at the last stop."""
        self._node = node
        self._target = target
        self._brake = brake
        self._then = then
        self._marks: list[tuple[str, int]] = []
        self._mode = ""
        self._resting: list[int] = []
        self._alarm = threading.Timer(0, lambda: None)

    def _observe(self, progress: Progress) -> None:
        phases = progress.phases
        while len(self._marks) < len(phases):
            number = len(self._marks)
            name, stopped = phases[number].name, phases[number].stopped
            self._marks.append((name, self._target.position()))
            # The phase after "quiesce" begins when all gates have closed; nothing is parked yet.
            if number > 0 and phases[number - 1].name == "quiesce" and stopped:
                pids = (self._target.pid, *children(self._target.pid))
                self.memories = {pid: device_memory(pid) for pid in pids}
            self._slow_down(name, stopped)
            if name == "cpu":
                self._rest_movers()
            elif number > 0 and phases[number - 1].name == "cpu":
                self._wake_movers()
            if not (name == "drain" and stopped):
                self._then.pop(name, lambda: None)()

    def _slow_down(self, phase: str, stopped: bool) -> None:
        if self._brake is None:
            return
        # What is copied on write may be copied as soon as the gate opens, before "drain" begins.
        on_write = self._mode == "concurrent" and not self._node.config.snapshots
        if not stopped or (phase == "unpark" and on_write):
            self._brake.put_on()
        else:
            self._brake.release()

    def checkpoint(self, options: CheckpointOptions) -> Manifest:
        """Do it; the image is not looked at."""

        def do() -> Manifest:
            return checkpoint(self._node, self._target.pid, options, self.progress)

        return self.during(options.mode, do)

    def during(self, mode: str, do: Callable[[], T]) -> T:
        """Do what makes a checkpoint in this mode, and tells :attr:`progress`."""
        self._mode = mode
        try:
            return do()
        finally:
            self._wake_movers()
            if self._brake is not None:
                self._brake.release()

    def require_right(self, manifest: Manifest) -> None:
        """The image is whole, and chunk by chunk that of the stop."""
        assert differences(self._node.store, manifest.id, self.memories) == []
        verify(self._node.store, manifest.id, Progress())

    def _rest_movers(self) -> None:
        self._resting = [*self._node.movers.pids()]
        for pid in self._resting:
            os.kill(pid, signal.SIGSTOP)
        self._alarm = threading.Timer(_LONGEST_REST, self._wake_movers)
        self._alarm.start()

    def _wake_movers(self) -> None:
        self._alarm.cancel()
        resting, self._resting = self._resting, []
        for pid in resting:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def steps_in(self, phase: str) -> int:
        """How many steps the program made while the (last) phase of this name lasted."""
        place = self._last(phase)
        marks = [mark for _, mark in self._marks] + [self._target.position()]
        return self._lines(marks[place], marks[place + 1])

    def steps_before(self, phase: str) -> int:
        """How many steps the program made from the first phase to the (last) one of this name."""
        return self._lines(self._marks[0][1], self._marks[self._last(phase)][1])

    def _last(self, phase: str) -> int:
        return max(i for i, (name, _) in enumerate(self._marks) if name == phase)

    def _lines(self, begin: int, end: int) -> int:
        return self._target.log.read_bytes()[begin:end].count(b"\n")


def watched(
    node: Node,
    target: Target,
    options: CheckpointOptions,
    brake: Brake | None = None,
    /,
    **then: Callable[[], object],
) -> tuple[Manifest, Watch]:
    """A checkpoint whose image was compared, chunk by chunk, with the memory of the stop."""
    watch = Watch(node, target, brake, **then)
    manifest = watch.checkpoint(options)
    assert manifest.blocks or manifest.mode == "driver", "nothing was saved"
    watch.require_right(manifest)
    return manifest, watch


@contextlib.contextmanager
def slow_movers(node: Node, target: Target, seconds: float, gpus: int = 1) -> Iterator[None]:
    """Inside, copying all device memory of the target out takes about so long: the movers, and
    nobody else, are given a copy rate.
    """
    with _rated_movers(node, gpus, {_RATE: _rate(node, target, seconds)}):
        yield


@contextlib.contextmanager
def braked_movers(node: Node, target: Target, steps: int, gpus: int = 1) -> Iterator[Brake]:
    """Inside, movers copy slowly while the brake is on, which a :class:`Watch` puts on until the
    target has made ``steps`` steps.
    """
    with tempfile.TemporaryDirectory(prefix="phos-brake-") as folder:
        file = Path(folder) / "on"
        limits = {_RATE: _rate(node, target, _BRAKED_SECONDS), _WHILE: str(file)}
        with _rated_movers(node, gpus, limits):
            yield Brake(file, target, steps)


def _rate(node: Node, target: Target, seconds: float) -> str:
    """The bytes a second at which copying the target's device memory takes so long: twice with a
    snapshot, first within the device; on write once. (A pass of recopy may take twice as long.)
    """
    pids = (target.pid, *children(target.pid))
    total = sum(end - begin for pid in pids for begin, end in mapped(pid))
    return str(int((2 if node.config.snapshots else 1) * total / seconds))


@contextlib.contextmanager
def _rated_movers(node: Node, gpus: int, limits: dict[str, str]) -> Iterator[None]:
    """Inside, the node's movers have these limits in their environment."""
    node.close()
    os.environ.update(limits)
    try:
        for gpu in range(gpus):
            node.movers.mover(gpu)
    finally:
        for name in limits:
            del os.environ[name]
    yield
    node.close()
