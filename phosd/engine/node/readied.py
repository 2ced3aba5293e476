"""Keep the memory of hollow programs loaded on their GPUs, where it waits for their resumption.

Such a program is *ready*. Nothing else of it changes: it stays hollow and frozen, and nobody has
written down that it is ready. The memory belongs to this process. Without it, as after the end of
phosd or of a data mover, the program is hollow.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from phosd.engine.image.manifest import Manifest
from phosd.engine.node.loaded_memory import LoadedMemory
from phosd.engine.node.suspended import Suspended


@dataclass(frozen=True)
class Ready:
    """The loaded memory of a hollow program, with its manifest, which has the pids of now.
    ``held`` frees the memory.
    """

    program: Suspended
    manifest: Manifest
    memory: LoadedMemory
    held: ExitStack


class ReadiedMemory:
    """The memory of the programs that are ready. Safe to use from several threads."""

    def __init__(self) -> None:
        self._ready: dict[str, Ready] = {}
        """By the image of their suspension; those that are ready for longest come first."""
        self._lock = threading.Lock()

    def keep(self, ready: Ready) -> None:
        """Keep the loaded memory of a program."""
        with self._lock:
            self._ready[ready.program.image] = ready

    @contextmanager
    def taken(self, program: Suspended) -> Iterator[Ready | None]:
        """Lend the memory of a program to the job that resumes it; afterwards what it did not keep
        is free. Yields None if the program is not ready, or is hollow no more.
        """
        ready = self._pop(program)
        if ready is not None and not (program.hollow and ready.memory.intact):
            ready.held.close()
            ready = None
        if ready is None:
            yield None
            return
        with ready.held:
            yield ready

    def drop(self, program: Suspended) -> None:
        """Free the memory of a program, if it is ready."""
        if ready := self._pop(program):
            ready.held.close()

    def give_way(self, gpu: int, lacking: int) -> None:
        """Free the memory of those that are ready on this GPU for longest, until so many bytes more
        are free there; of none, if all of it would not do.
        """
        gone = []
        with self._lock:
            sizes = {
                name: each.memory.bytes_by_gpu().get(gpu, 0) for name, each in self._ready.items()
            }
            if sum(sizes.values()) >= lacking:
                for name, size in sizes.items():
                    if lacking > 0 and size:
                        gone.append(self._ready.pop(name))
                        lacking -= size
        for each in gone:
            each.held.close()

    def images(self) -> set[str]:
        """Return the images of the suspensions of programs that are ready."""
        with self._lock:
            return {name for name, each in self._ready.items() if each.memory.intact}

    def bytes_of(self, program: Suspended, pid: int) -> int | None:
        """Return the bytes that a process has on the GPUs, if its program is ready."""
        with self._lock:
            ready = self._ready.get(program.image)
        return ready.memory.bytes_of(pid) if ready is not None and ready.memory.intact else None

    def let_go_of_the_dead(self) -> None:
        """Free the memory of programs that have ended."""
        self._close(lambda each: not each.program.alive)

    def close(self) -> None:
        """Free all of it: then these programs are hollow."""
        self._close(lambda _: True)

    def _pop(self, program: Suspended) -> Ready | None:
        with self._lock:
            return self._ready.pop(program.image, None)

    def _close(self, unwanted: Callable[[Ready], bool]) -> None:
        with self._lock:
            names = [name for name, each in self._ready.items() if unwanted(each)]
            gone = [self._ready.pop(name) for name in names]
        for each in gone:
            each.held.close()
